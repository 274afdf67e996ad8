"""Known attacks on servers of language models, each refused. Those that others test as well, or alone, stand there:

1  a malformed Host skips the key       test_guard: test_a_malformed_host, test_without_a_key
2  "@host" in the path or in Host       test_guard: POISON, CROOKED
3  a side door without a key            test_guard: test_without_a_key, test_the_app_has_the_routes
4  timing of the key                    test_guard: test_keys_are_compared_in_constant_time
5  a huge n and other large numbers     here
6  negative and overflowing integers    here; test_fields: test_a_number_is_a_finite_number
7  an empty prompt                      here
8  oversized headers and bodies         test_server: test_headers; test_body: test_size, test_a_body_that_trickles
9  a bad schema or expression           here
10 schemas and expressions as bombs     here
11 a template in the request            here
12 a template of a model                here (who may make one); tests/hub/test_template.py (what it may do)
13 pickles                              here; tests/hub/test_files.py: test_pickles_and_empty_folders
14 code that a checkpoint names         here; tests/hub/test_files.py: test_code_that_a_config_names
15 weights with a lying header          tests/hub/test_tensors.py, tests/hub/test_tensors_fuzz.py
16 a path in an upload's name           here
17 a path out of a checkpoint's folder  tests/hub/test_files.py: test_a_symbolic_link, test_an_index_names_bare_files
18 an image's address is fetched        here
19 a request chooses the model          here
20 a remote $ref                        here
21 special tokens in a user's text      here; tests/serve/chat
22 tensors and ids from a client        here
23 an error tells of the inside         here; test_answers: test_what_is_not_foreseen, test_a_job_that_fails
24 DNS rebinding, foreign pages         test_guard: test_a_foreign_name, test_no_answer_allows_another_origin;
                                        test_body: test_what_a_foreign_page_may_send; test_server: test_an_open_address
25 a cache shared between keys          here; tests/serve/engine (what the salt does)
26 a poisoned package                   here
"""

import re
import socket
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mercury_jax.serve.api import Options, create_app
from tests.serve.api.scripted import Scripted, saying

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
ASK = {"model": "nano", "messages": [{"role": "user", "content": "347+585="}]}
LEAST = {
    CHAT: ASK,
    "/v1/completions": {"model": "nano", "prompt": "a"},
    "/v1/fim/completions": {"model": "nano", "prompt": "a"},
    "/v1/edit/completions": ASK,
    "/v1/apply/completions": ASK,
}


class Door:
    """An app in front of a script, and what reached the engine behind it."""

    def __init__(self, nano, **options):
        self.engine = Scripted(nano, saying(nano, "932"))
        self.client = TestClient(
            create_app(self.engine, Options(playground=False, **options)), base_url="http://localhost"
        )

    def post(self, ask, path=CHAT, **more):
        return self.client.post(path, json=ask, **more)

    def refuses(self, ask, path=CHAT, status=400, within=5.0):
        """Whether a request is refused in words, in time, and before anything reaches the engine."""
        before, began = len(self.engine.tickets), time.perf_counter()
        answer = self.post(ask, path)
        assert answer.status_code == status, answer.text[:300]
        assert isinstance(answer.json()["error"]["message"], str) and len(answer.text) < 2000
        assert len(self.engine.tickets) == before and time.perf_counter() - began < within
        return answer.json()["error"]

    def serves(self):
        """Whether it still answers."""
        assert self.post(ASK).json()["choices"][0]["message"]["content"] == "932"


@pytest.fixture
def door(nano):
    return Door(nano)


@pytest.fixture
def no_network(monkeypatch):
    """Whoever opens a connection is caught."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield tried
    assert tried == []


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def tool_of(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOO_MUCH = {
    "n": 10**6, "max_tokens": 10**9, "max_completion_tokens": 10**9, "top_logprobs": 10**6, "top_k": 10**9,
    "logit_bias": {str(i): 1 for i in range(513)}, "stop": ["x"] * 33, "tools": [tool_of({})] * 129,
    "messages": [{"role": "user", "content": "a"}] * 5000, "temperature": 1e9, "seed": 2**80,
    "repetition_penalty": 1e9, "presence_penalty": 3,
}  # fmt: skip


@pytest.mark.parametrize("field", TOO_MUCH)
def test_05_large_numbers_are_refused_before_anything_is_copied(door, field):
    assert door.refuses({**ASK, field: TOO_MUCH[field]})["param"] == field
    assert door.refuses({**ASK, "stop": ["x" * 257]})["param"].startswith("stop")
    door.serves()


@pytest.mark.parametrize("bad", [-1, 0, -(2**63), 2**63, 10**30, 1.5, True, "1", [1]])
def test_06_integers_that_are_none_or_wrap_around_are_refused(door, bad):
    for path, ask in LEAST.items():
        for field in ("max_tokens", "n") if path in (CHAT, "/v1/completions") else ("max_tokens",):
            assert door.refuses({**ask, field: bad}, path)["param"] == field
    for name in ("-1", "01", "1.0", " 1", "1_0", "0x1", "", "1e3", "²", str(2**70), "1023\n"):
        assert "logit_bias" in door.refuses({**ASK, "logit_bias": {name: 1}})["param"]
    assert "logit_bias" in door.refuses({**ASK, "logit_bias": {"1024": 1}})["param"]  # nano has 1024 tokens
    door.serves()


def test_07_an_empty_prompt_is_refused_and_the_server_lives(door):
    for path, asks in {
        CHAT: [
            {"messages": []},
            {"messages": None},
            {"messages": {}},
            {"messages": [[]]},
            {"messages": [None]},
        ],
        "/v1/completions": [
            {"prompt": ""},
            {"prompt": []},
            {"prompt": [""]},
            {"prompt": None},
            {"prompt": [[]]},
        ],
        "/v1/fim/completions": [{"prompt": ""}, {"prompt": "", "suffix": ""}, {"prompt": None}],
        "/v1/edit/completions": [{"messages": []}, {"messages": [{"role": "user", "content": ""}]}],
        "/v1/apply/completions": [{"messages": []}, {"messages": [{"role": "user", "content": ""}]}],
    }.items():
        for ask in asks:
            door.refuses({**LEAST[path], **ask}, path)
    door.serves()


BAD_SCHEMAS = (
    {"type": "nothing"}, {"type": 5}, {"properties": []}, {"pattern": "("}, {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "pattern": "[z-a]"}, {"enum": []}, {"required": "a"}, {"minItems": -1}, {"$ref": "#/nowhere"},
    {"type": "string", "format": "no-such-format", "pattern": "*"}, {"not": {}}, {"anyOf": []}, {"items": 7},
    {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9}, {"multipleOf": 0}, {"allOf": [False]},
    {"type": "object", "patternProperties": {"(": {}}},
)  # fmt: skip


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
def test_09_a_bad_schema_is_refused_and_takes_nothing_down(door, schema):
    error = door.refuses({**ASK, "response_format": schema_of(schema)})
    assert "response_format" in error["param"] and error["code"] == "invalid_json_schema"
    door.refuses({**ASK, "tools": [tool_of({"type": "object", "properties": {"a": schema}, "required": ["a"]})],
                  "tool_choice": "required"})  # fmt: skip
    door.serves()


def nested(depth, key):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if key == "items" else {"properties": {"a": schema}}
    return schema


def doubling(levels):
    """Each definition holds the next one twice: 2 ** levels places."""
    defs = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


BOMBS = {
    "deep lists": nested(90, "items"),
    "deep objects": nested(45, "properties"),
    "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(12_000)}},
    "many choices": {"enum": [f"choice {i}" for i in range(25_000)]},
    "many alternatives": {"anyOf": [{"const": i} for i in range(12_000)]},
    "a long expression": {"type": "string", "pattern": "a?" * 50_000},
    "repeats of repeats": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "doubling": doubling(60),
    "itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself within itself": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
                             "$ref": "#/$defs/a"},
    "large counts": {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 4000},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_10_a_bomb_ends_in_bounded_time(door, name):
    """Refused or compiled, but soon; what the script says to those that compile obeys no schema and is not sent."""
    began = time.perf_counter()
    tool = tool_of({"type": "object", "properties": {"a": BOMBS[name]}})
    for ask in ({"response_format": schema_of(BOMBS[name])}, {"tools": [tool], "tool_choice": "auto"}):
        answer = door.post({**ASK, **ask})
        assert answer.status_code in (200, 400, 500) and len(answer.text) < 2000
    assert time.perf_counter() - began < 20
    door.serves()


def test_11_no_template_comes_with_a_request(door):
    door.post(ASK)
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for more in (
        {"chat_template": evil}, {"chat_template_kwargs": {"chat_template": evil, "enable_thinking": True}},
        {"template": evil}, {"extra_body": {"chat_template": evil, "add_generation_prompt": False}},
    ):  # fmt: skip
        assert door.post({**ASK, **more}).status_code == 200
    assert len({ticket.job.prompt for ticket in door.engine.tickets}) == 1


def test_16_there_is_nothing_to_upload_and_no_request_names_a_file(door, monkeypatch):
    opened = []
    monkeypatch.setattr(
        "builtins.open", lambda *args, **kwargs: opened.append(args) or pytest.fail("a file was opened")
    )
    name = "../../../../etc/passwd"
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        for path in ("/v1/files", "/v1/uploads", f"/v1/models/{name}", "/v1/models"):
            assert door.client.request(method, path, json={"file": name}).status_code in (404, 405)
    form = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\nx\r\n--x--\r\n'
    sent = door.client.post(CHAT, content=form, headers={"content-type": "multipart/form-data; boundary=x"})
    assert sent.status_code == 415
    assert door.client.get(f"/v1/models/{name.replace('/', '%2f')}").status_code == 404
    door.refuses({**ASK, "model": name}, status=404)
    assert opened == []


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, {"type": "image", "url": "file:///x"},
     {"type": "input_audio", "input_audio": {"data": "AA=="}}, {"type": "file", "file": {"file_id": "1"}},
     {"type": "image_url", "image_url": "http://a@b/\\@c"}, {"type": "text"}, {"type": "text", "text": None}, {}, 5,
     {"type": ["text"], "text": "a"}],
    ids=str,
)  # fmt: skip
def test_18_what_is_no_text_is_refused_and_nothing_is_fetched(door, part, no_network):
    for role in ("user", "system", "assistant"):
        error = door.refuses({**ASK, "messages": [*ASK["messages"], {"role": role, "content": [part]}]})
        assert error["param"].startswith("messages[1].content")
    door.serves()


def test_19_a_request_chooses_among_names_and_loads_nothing(door, no_network):
    for name in (
        "http://evil.example/model",
        "/etc/passwd",
        "org/other",
        "nano/../nano",
        "NANO",
        "nano\n",
        "é" * 200,
    ):
        assert door.refuses({**ASK, "model": name}, status=404)["code"] == "model_not_found"
        assert door.client.get(f"/v1/models/{name.strip()}x").status_code == 404
    door.refuses({**ASK, "model": None})
    door.refuses({**ASK, "model": ""})


@pytest.mark.parametrize(
    "target",
    ["http://evil.example/s.json", "file:///etc/passwd", "//evil.example/x", "other.json#/a", "urn:x", 5],
)
def test_20_a_reference_out_of_the_schema_is_refused(door, target, no_network):
    for schema in ({"$ref": target}, {"type": "object", "properties": {"a": {"$ref": target}}}):
        assert door.refuses({**ASK, "response_format": schema_of(schema)})["code"] == "invalid_json_schema"
        door.refuses({**ASK, "tools": [tool_of({"type": "object", "properties": {"b": schema}})]})
    remote = {"$schema": "http://evil.example/meta", "$id": "http://evil.example/id", "type": "object"}
    door.post({**ASK, "response_format": schema_of(remote)})


def test_21_a_users_text_never_becomes_a_token_of_control(door, nano):
    tok = nano.tokenizer
    control = {i for i in range(tok.vocab_size) if not tok.pieces[i]} | {tok.eos, tok.pad, tok.mask}
    spelt = [tok.decode([i], skip_special=False) for i in sorted(control)]
    marks = [
        *spelt,
        "<|mask|>",
        "<|endoftext|>",
        "<|im_start|>system",
        "<s>",
        "</s>",
        "<|assistant|>",
        "[MASK]",
    ]
    in_prompt = lambda: [i for i in door.engine.tickets[-1].job.prompt if i in control]
    assert len(control) > 8
    door.post(ASK)
    plain = in_prompt()
    for text in (*marks, "".join(marks)):
        door.post({**ASK, "messages": [{"role": "user", "content": text}]})
        assert in_prompt() == plain, text
        named = {**ASK["messages"][0], "name": text[:60]}
        door.post({**ASK, "messages": [named]})
        assert in_prompt() == plain
    door.post({"model": "nano", "prompt": "a"}, "/v1/completions")
    bare = in_prompt()
    door.post({"model": "nano", "prompt": "".join(marks)}, "/v1/completions")
    assert in_prompt() == bare


def test_22_neither_tensors_nor_ids_are_taken(door):
    for prompt in ([1, 2, 3], [[1, 2]], [4], {"ids": [1]}, [True]):
        door.refuses({"model": "nano", "prompt": prompt}, "/v1/completions")
    door.post(ASK)
    embeds = {
        "prompt_embeds": "gASVBQAAAAAAAABLAS4=",
        "prompt_token_ids": [4],
        "input_ids": [4],
        "kv_transfer_params": {},
    }
    door.post({**ASK, **embeds})
    assert len({ticket.job.prompt for ticket in door.engine.tickets}) == 1


def test_23_no_answer_tells_of_the_inside(door):
    """Not of files, lines, addresses or libraries, whatever was wrong with the request."""
    answers = [door.client.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
               door.client.get("/nothing"), door.client.delete(CHAT), door.post({**ASK, "seed": {}}),
               door.post({**ASK, "response_format": schema_of({"type": "string", "pattern": "("})}),
               door.post({**ASK, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]})]  # fmt: skip
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert not re.search(
            r"0x[0-9a-f]{6}|\.py|Traceback|site-packages|line \d+,|mercury_jax\.|<[a-z_.]+ object",
            answer.text,
        )
        assert not {"server", "x-powered-by"} & set(answer.headers)


def test_25_keys_of_one_customer_are_not_found_by_another(nano):
    keys = ("first-key-123", "second-key-456")
    door, salts = Door(nano, keys=keys), {}
    for key in (*keys, *keys):
        door.post(ASK, headers={"authorization": f"Bearer {key}"})
        salts.setdefault(key, set()).add(door.engine.tickets[-1].job.salt)
    assert all(len(found) == 1 for found in salts.values()) and salts[keys[0]] != salts[keys[1]]
    assert not any(key in str(salts.values()) for key in keys)
