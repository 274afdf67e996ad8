"""Requests whose head is odd: method, path, Host, lengths, encodings, and the lines themselves."""

import json

from qa.fuzz.bodies import MODEL, SAY

BODY = json.dumps({"model": MODEL, "messages": SAY, "max_tokens": 2}).encode()
METHODS = [
    b"POST", b"POST", b"POST", b"GET", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"TRACE", b"CONNECT", b"PATCH",
    b"PRI", b"post", b"G\x00T", b"", b"X" * 5000, b"GET POST",
]  # fmt: skip
PATHS = [
    b"/v1/chat/completions", b"/v1/chat/completions", b"/v1/models", b"/health", b"/metrics", b"/", b"*", b"",
    b"/v1/chat/completions/", b"//v1/chat/completions", b"/v1/../v1/models", b"/v1/%2e%2e/metrics", b"/v1/models/%00",
    b"/v1/models/%ff%fe", b"/v1/models/a%2Fb", b"@evil.example/v1/models", b"http://evil.example/v1/models",
    b"http://[::1/v1/models", b"/health@evil.example", b"/v1/models?x=%zz&&==", b"/v1/models#frag", b"/\xe2\x98\x83",
    b"/a b", b"/" + b"a" * 20_000, b"/v1/models/" + b"%41" * 2000, b"/playground/../../etc/passwd",
    b"/static/..%2f..%2fetc/passwd", b"\\v1\\models", b"/v1/models;x=1", b"/%",
]  # fmt: skip
HOSTS = [
    b"localhost", b"127.0.0.1:80", b"[::1]", b"LOCALHOST.", b"", b" ", b"evil.example", b"localhost, evil.example",
    b"localhost/health", b"localhost:99999999", b"a@localhost", b"localhost#", b"[::1", b"\xff\xfe", b"localhost\x00",
    b"a" * 3000, b"%6cocalhost", b"localhost?x", b"..", b"-",
]  # fmt: skip
LENGTHS = [
    b"0", b"-1", b"+5", b"1e3", b"99999999999999999999", b"0x10", b"5, 5", b"", b" ", b"\xd9\xa3", b"3", b"1000000000",
]  # fmt: skip
MORE = [
    (b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Transfer-Encoding", b"xchunked"), (b"Content-Encoding", b"gzip"), (b"Content-Type", b"text/plain"),
    (b"Content-Type", b"application/json; charset=utf-16"),
    (b"Content-Type", b"application/json" + b";" * 500),
    (b"Content-Type", b"multipart/form-data; boundary=x"), (b"Expect", b"100-continue"), (b"Expect", b"tea"),
    (b"Upgrade", b"websocket"), (b"Upgrade", b"h2c"), (b"Connection", b"upgrade, close, keep-alive"),
    (b"Authorization", b"Bearer \xff\x00"), (b"Authorization", b"Basic !!!"),
    (b"Authorization", b"Bearer " + b"k" * 12_000), (b"X-Forwarded-Host", b"evil.example"),
    (b"Forwarded", b"for=1;host=x"), (b"X-Request-Id", b"a\tb" * 50), (b"X-Request-Id", b"\xff" * 300),
    (b"Range", b"bytes=0-"), (b"Cookie", b"a=" * 2000), (b"Accept", b"text/html"),
    (b"Accept-Encoding", b"gzip;q=nan"), (b"Origin", b"http://evil.example"), (b"", b"x"), (b"X y", b"z"),
    (b"X\x00", b"z"), (b"X", b"a\r\n folded"), (b"X", b"\x7f\x01"), (b"H" * 9000, b"v"),
    (b"Sec-WebSocket-Key", b"AAAA"), (b"Content-Length", b"7"), (b"Host", b"evil.example"),
    (b"TE", b"trailers"),
]  # fmt: skip
VERSIONS = [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.1 x"]
BODIES = [
    BODY, BODY, BODY, b"", b"{}", BODY[:20], b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n\r\n",
    b"ffffffffffffffff\r\n", BODY * 2,
]  # fmt: skip


def odd(draw):
    """The bytes of a request with one to three odd things in its head."""
    about = {"method": b"POST", "path": b"/v1/chat/completions", "host": b"localhost", "version": b"HTTP/1.1"}
    about |= {"length": None, "end": b"\r\n", "body": BODY}
    more = []
    choices = {"method": METHODS, "path": PATHS, "host": HOSTS, "length": LENGTHS, "version": VERSIONS,
               "body": BODIES, "end": [b"\n", b"\r", b"\r\n\r\n", b"\r\n \t"]}  # fmt: skip
    for what in draw.choices((*choices, "more", "more", "more", "host", "path"), k=draw.choice((1, 1, 2, 3))):
        if what == "more":
            more.append(draw.choice(MORE))
        else:
            about[what] = draw.choice(choices[what])
    return _bytes(about, more)


def _bytes(about, more):
    length = about["length"] if about["length"] is not None else str(len(about["body"])).encode()
    lines = [b" ".join((about["method"], about["path"], about["version"])), b"Host: " + about["host"]]
    lines += [b"Content-Type: application/json", b"Content-Length: " + length]
    lines += [name + b": " + value for name, value in more]
    return about["end"].join(lines) + about["end"] + b"\r\n" + about["body"]
