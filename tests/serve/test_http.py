"""Limits of request bodies: size, depth, time, content type, valid JSON."""

import asyncio
import json

import pytest
from starlette.requests import Request

from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import read_json
from mercury_jax.serve.options import ServerOptions

JSON = [(b"content-type", b"application/json")]


def read(parts, headers=JSON, gap=0.0, left=False, **options):
    """Returns what `read_json` makes of a body that arrives in parts."""
    waiting = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
    waiting.append(
        {"type": "http.disconnect"} if left else {"type": "http.request", "body": b"", "more_body": False}
    )

    async def receive():
        await asyncio.sleep(gap)
        return waiting.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return asyncio.run(read_json(Request(scope, receive), ServerOptions(**options), dict))


def refused(*args, **fields):
    with pytest.raises(ApiError) as error:
        read(*args, **fields)
    return error.value.status


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"5", b"null", b'"a"', b"{'a': 1}", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}',
     b'{"a": ' + b"9" * 5000 + b"}", b"\xff{}", b'{"a": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b"{}{}", b"{} x",
     b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\x00"}', '{"a": 1}'.encode("utf-16"), b'{"a":1,}'],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_refused(text):
    assert refused([text]) == 400


def test_a_syntax_error_is_reported_with_its_position():
    for text, position in (
        (b"{'a': 1}", "character 2 of line 1"),
        (b'{"a": 1,\n "b": x}', "character 7 of line 2"),
    ):
        with pytest.raises(ApiError, match=f"The body is not valid JSON: .* at {position}"):
            read([text])


@pytest.mark.parametrize(
    "text, words",
    [
        (b"null", "The body is null; allowed: an object"),
        (b"true", "The body is true"), (b"5", "The body is a number"),
        (b"[]", "The body is a list"), (b'"a"', "The body is a text"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: a number has too many digits$"),
        (b"\xef\xbb\xbf{}", "not valid JSON: Unexpected UTF-8 BOM at character 1 of line 1$"),
        (b'{"a": NaN}', "not valid JSON: NaN is not JSON$"),
        (b'{"a": 1e999}', "not valid JSON: 1e999 is out of range$"),
    ],
)  # fmt: skip
def test_a_refusal_names_json_and_not_python(text, words):
    with pytest.raises(ApiError, match=words):
        read([text])


def test_an_object_is_read_in_parts_of_any_size():
    text = json.dumps({"a": "é\u2028🙂\0", "b": [1.5, None]}).encode()
    for size in (1, 3, len(text)):
        assert read([text[i : i + size] for i in range(0, len(text), size)]) == json.loads(text)
    assert read([b'{"a": "\\ud83d\\ude42"}']) == {"a": "🙂"}
    large = {"a": ["x" * 100] * 2000}
    assert read([json.dumps(large).encode()]) == large


def test_size_is_counted_while_reading_and_content_length_is_not_trusted():
    assert refused([b" " * 11], max_body=10) == 413
    assert refused([b"x"] * 10**6, max_body=10) == 413
    assert refused([b"{}"], [*JSON, (b"content-length", b"11")], max_body=10) == 413
    for lie in (b"-1", b"1e3", b"0x10", b"9" * 400, b"\xb2"):
        assert refused([b"{}"], [*JSON, (b"content-length", lie)]) == 413
    assert read([b"{}"], [*JSON, (b"content-length", b"1")]) == {}


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_bounded(opening, closing):
    for depth, fits in [(20, True), (21, False), (500, False), (200_000, False)]:
        text = b'{"a":' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"
        if fits:
            assert read([text], max_depth=20)
        else:
            assert refused([text], max_depth=20) == 400


def test_a_slow_body_times_out():
    assert refused([b"{"] * 1000, gap=0.02, read_timeout=0.1) == 408


def test_a_client_that_disconnects_ends_the_read():
    assert refused([b"{"], left=True) == 400


@pytest.mark.parametrize(
    "kind",
    [b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application/jsonx",
     b"application/json; charset=utf-16", b"text/json", b"application/json, text/plain",
     b"text/plain; a=application/json",
     b"application/json;charset=utf-8, text/plain", b";application/json"],
)  # fmt: skip
def test_content_types_that_a_web_page_may_send_are_refused(kind):
    assert refused([b"{}"], [(b"content-type", kind)]) == 415


@pytest.mark.parametrize(
    "kind", [b"application/json", b"Application/JSON; charset=UTF-8", b'application/json;charset="utf-8"',
             b"application/vnd.api+json", b"application/json; charset=utf8",
             b"application/json ; version=1; charset=UTF-8",
             b"application/json;", b"application/json; charset=us-ascii; profile=\"http://a\""]
)  # fmt: skip
def test_json_content_types_are_accepted(kind):
    assert read([b"{}"], [(b"content-type", kind)]) == {}


def test_a_compressed_body_is_refused():
    assert refused([b"{}"], [*JSON, (b"content-encoding", b"gzip")]) == 415
