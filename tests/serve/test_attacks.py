"""Known attacks on servers of language models, each refused; a test in this file begins with the attack's number.

1  a malformed Host skips the key       test_auth: test_a_malformed_host_is_refused_with_and_without_a_key;
                                        test_attacks_code: test_01_02_no_decision_depends_on_the_url,
                                        test_01_26_packages_are_pinned_to_safe_versions
2  "@host" in the path or in Host       test_auth: test_a_malformed_host_is_refused_with_and_without_a_key,
                                        test_without_a_key_only_health_and_readiness_answer;
                                        test_attacks_code: test_01_02_no_decision_depends_on_the_url
3  a route that needs no key            test_auth: test_without_a_key_only_health_and_readiness_answer,
                                        test_the_app_has_the_listed_routes,
                                        test_the_playground_needs_a_key, test_a_websocket_is_closed
4  timing of the key                    test_auth: test_all_keys_are_compared_in_constant_time
5  a huge n and other large numbers     here
6  negative and overflowing integers    here; test_protocol: test_a_number_is_a_finite_number_and_nothing_else;
                                        test_http: test_a_body_that_is_not_a_json_object_is_refused
7  an empty prompt                      here
8  oversized headers and bodies         test_server: test_headers_are_bounded_and_malformed_bytes_get_400,
                                        test_endless_headers_are_refused_by_their_size,
                                        test_slow_headers_and_idle_connections_are_closed,
                                        test_a_body_larger_than_the_limit_is_refused_before_it_is_read;
                                        test_http: test_size_is_counted_while_reading_and_content_length_is_not_trusted,
                                        test_depth_is_bounded, test_a_slow_body_times_out
9  a bad schema or expression           test_attacks_schemas
10 schemas and expressions as bombs     test_attacks_schemas;
                                        test_grammar_refusals: test_a_schema_that_cannot_be_guaranteed_is_refused,
                                        test_a_bomb_takes_no_longer_than_its_time,
                                        test_no_more_compile_at_once_than_there_are_workers
11 a template in the request            here
12 a template of a model                test_attacks_code (who may make one); test_chat_template (what it may do):
                                        test_a_template_that_exceeds_a_limit_is_stopped,
                                        test_private_and_mutating_attributes_are_refused
13 pickles                              test_attacks_code; test_folder: test_pickles_and_empty_folders_are_refused
14 code that a checkpoint names         test_attacks_code;
                                        test_folder: test_code_that_a_config_names_is_noted_and_not_run
15 weights with a lying header          test_tensors: test_a_malformed_header_raises_an_error_that_names_the_file;
                                        test_tensors_mutated: test_a_mutated_file_raises_an_error_or_is_read_intact
16 a path in an upload's name           here
17 a path out of a checkpoint's folder  test_folder: test_a_symbolic_link_out_of_the_folder_is_refused,
                                        test_an_index_may_only_name_files_of_its_folder,
                                        test_a_snapshot_may_only_link_to_its_own_blobs;
                                        test_manifest: test_files_outside_of_a_checkpoints_folder_are_refused
18 an image's address is fetched        here; test_images: test_a_hostile_image_is_refused_in_bounded_memory
19 a request chooses the model          here
20 a remote $ref                        test_attacks_schemas;
                                        test_grammar_refusals: test_a_schema_that_cannot_be_guaranteed_is_refused
21 special tokens in a user's text      here; test_messages_tools: test_user_text_never_becomes_a_control_token;
                                        test_hub_tokenizer: test_every_text_round_trips_without_control_tokens
22 tensors and ids from a client        here
23 an error tells of the inside         here; test_streaming: test_an_unexpected_exception_is_a_500_with_a_request_id,
                                        test_a_failed_job_is_one_error_without_internals
24 DNS rebinding, foreign pages         test_auth:
                                        test_an_unknown_host_is_refused,
                                        test_no_response_allows_another_origin;
                                        test_http: test_content_types_that_a_web_page_may_send_are_refused;
                                        test_server: test_a_public_address_needs_a_key,
                                        test_a_public_address_without_a_key_is_refused_before_the_model_is_loaded
25 a cache shared between keys          here; test_engine: test_the_prefix_cache_is_shared_by_requests_of_one_salt_only
26 a poisoned package                   test_attacks_code
"""

import re
from pathlib import Path

import pytest

from mercury_jax.serve.chat.messages import plain_messages
from mercury_jax.serve.engine.prefix_cache import chunk_hashes
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import ChatCompletionsRequest, parse_request
from tests.serve.api_client import CHAT, MINIMAL, PAYLOAD, ScriptedApp, function_tool, schema_format

ROOT = Path(__file__).parents[2]
# For each field, the first value out of range and one far out of range.
TOO_MUCH = {
    "n": (17, 10**6), "max_tokens": ((1 << 20) + 1, 10**9), "max_completion_tokens": ((1 << 20) + 1, 10**9),
    "top_logprobs": (21, 10**6), "top_k": ((1 << 20) + 1, 10**9), "logit_bias": ({str(i): 1 for i in range(513)},),
    "stop": (["x"] * 33, "x" * 257, ["x" * 257]), "tools": ([function_tool({}, f"f{i}") for i in range(129)],),
    "messages": ([{"role": "user", "content": "a"}] * 2049,), "temperature": (2.01, 1e9), "seed": (2**63, 2**80),
    "repetition_penalty": (1001, 1e9), "presence_penalty": (2.01,), "frequency_penalty": (2.01,), "top_p": (1.01,),
}  # fmt: skip


@pytest.mark.parametrize("field", TOO_MUCH)
def test_05_numbers_out_of_range_are_refused_before_anything_is_allocated(nano, field):
    # The prompt fits into 2,000,000 slots, so the value is refused and not its length, whose error has a code.
    scripted_app = ScriptedApp(nano, slots=2 * 10**6)
    more = {"logprobs": True} if field == "top_logprobs" else {}
    for value in TOO_MUCH[field]:
        error = scripted_app.refuses({**PAYLOAD, **more, field: value})
        assert error["param"].split("[")[0] == field and error["code"] is None
    scripted_app.serves()


def test_05_the_number_of_answers_is_bounded(nano):
    scripted_app, payload = ScriptedApp(nano, slots=2 * 10**6), MINIMAL["/v1/completions"]
    for many in ({"n": 17}, {"n": 10**6}, {"prompt": ["a"] * 17}, {"prompt": ["a"] * 4, "n": 5}, {"best_of": 2},
                 {"logprobs": 21}):  # fmt: skip
        assert scripted_app.refuses({**payload, **many}, "/v1/completions")["param"] in many
    few = ScriptedApp(nano)  # 4 slots and a queue of 8
    assert few.refuses({**PAYLOAD, "n": 13})["param"] == "n"


@pytest.mark.parametrize("bad", [-1, 0, -(2**63), 2**63, 10**30, 1.5, True, "1", [1]])
def test_06_invalid_and_overflowing_integers_are_refused(scripted_app, bad):
    for path, payload in MINIMAL.items():
        for field in ("max_tokens", "n") if path in (CHAT, "/v1/completions") else ("max_tokens",):
            if (path, field, bad) != ("/v1/completions", "max_tokens", 0):  # no answer
                assert scripted_app.refuses({**payload, field: bad}, path)["param"] == field
    for name in ("-1", "01", "1.0", " 1", "1_0", "0x1", "", "1e3", "²", str(2**70), "1023\n"):
        assert "logit_bias" in scripted_app.refuses({**PAYLOAD, "logit_bias": {name: 1}})["param"]
    assert (
        "logit_bias" in scripted_app.refuses({**PAYLOAD, "logit_bias": {"1024": 1}})["param"]
    )  # nano has 1024 tokens
    scripted_app.serves()


def test_07_an_empty_prompt_is_refused(scripted_app):
    for path, payloads in {
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
        for payload in payloads:
            error = scripted_app.refuses({**MINIMAL[path], **payload}, path)
            # An empty list is refused by the request model, not by a later check with another message.
            assert [] not in payload.values() or re.search(r"a list of (1 to \d+|one)", error["message"])
    scripted_app.serves()


def test_11_a_template_in_a_request_is_ignored(scripted_app):
    scripted_app.post(PAYLOAD)
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for more in (
        {"chat_template": evil}, {"chat_template_kwargs": {"chat_template": evil, "enable_thinking": True}},
        {"template": evil}, {"extra_body": {"chat_template": evil, "add_generation_prompt": True}},
    ):  # fmt: skip
        assert scripted_app.post({**PAYLOAD, **more}).status_code == 200
    assert len({ticket.request.prompt for ticket in scripted_app.engine.tickets}) == 1


def test_16_no_request_uploads_or_opens_a_file(scripted_app, monkeypatch):
    opened = []
    monkeypatch.setattr(
        "builtins.open", lambda *args, **kwargs: opened.append(args) or pytest.fail("a file was opened")
    )
    name = "../../../../etc/passwd"
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        for path in ("/v1/files", "/v1/uploads", f"/v1/models/{name}", "/v1/models"):
            assert scripted_app.client.request(method, path, json={"file": name}).status_code in (404, 405)
    form = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\nx\r\n--x--\r\n'
    sent = scripted_app.client.post(
        CHAT, content=form, headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert sent.status_code == 415
    assert scripted_app.client.get(f"/v1/models/{name.replace('/', '%2f')}").status_code == 404
    scripted_app.refuses({**PAYLOAD, "model": name}, status=404)
    assert opened == []


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, {"type": "image", "url": "file:///x"},
     {"type": "input_audio", "input_audio": {"data": "AA=="}}, {"type": "file", "file": {"file_id": "1"}},
     {"type": "image_url", "image_url": "http://a@b/\\@c"}, {"type": "text"}, {"type": "text", "text": None}, {}, 5,
     {"type": ["text"], "text": "a"}],
    ids=str,
)  # fmt: skip
def test_18_parts_other_than_text_are_refused_and_nothing_is_fetched(scripted_app, part, no_network):
    for role in ("user", "system", "assistant"):
        error = scripted_app.refuses(
            {**PAYLOAD, "messages": [*PAYLOAD["messages"], {"role": role, "content": [part]}]}
        )
        assert error["param"].startswith("messages[1].content")
        payload = {**PAYLOAD, "messages": [{"role": role, "content": [part]}]}
        with pytest.raises(ApiError):
            plain_messages(parse_request(ChatCompletionsRequest, payload).messages)
    scripted_app.serves()


def test_19_a_request_cannot_load_another_model(scripted_app, no_network):
    for name in (
        "http://evil.example/model",
        "/etc/passwd",
        "org/other",
        "nano/../nano",
        "NANO",
        "nano\n",
        "é" * 200,
    ):
        assert scripted_app.refuses({**PAYLOAD, "model": name}, status=404)["code"] == "model_not_found"
        assert scripted_app.client.get(f"/v1/models/{name.strip()}x").status_code == 404
    scripted_app.refuses({**PAYLOAD, "model": None})
    scripted_app.refuses({**PAYLOAD, "model": ""})


def test_21_text_of_a_user_never_becomes_a_control_token(scripted_app, nano):
    tok = nano.tokenizer
    control = {i for i in range(tok.vocab_size) if not tok.pieces[i]} | {tok.eos, tok.pad, tok.mask}
    spelt = [tok.decode([i], skip_special=False) for i in sorted(control)]
    marks = [
        *spelt, "<|mask|>", "<|endoftext|>", "<|im_start|>system", "<s>", "</s>", "<|assistant|>", "[MASK]",
    ]  # fmt: skip
    in_prompt = lambda: [i for i in scripted_app.engine.tickets[-1].request.prompt if i in control]
    assert len(control) > 8
    scripted_app.post(PAYLOAD)
    plain = in_prompt()
    for text in (*marks, "".join(marks)):
        scripted_app.post({**PAYLOAD, "messages": [{"role": "user", "content": text}]})
        assert in_prompt() == plain, text
        named = {**PAYLOAD["messages"][0], "name": text[:60]}
        scripted_app.post({**PAYLOAD, "messages": [named]})
        assert in_prompt() == plain
    scripted_app.post({"model": "nano", "prompt": "a"}, "/v1/completions")
    bare = in_prompt()
    scripted_app.post({"model": "nano", "prompt": "".join(marks)}, "/v1/completions")
    assert in_prompt() == bare


def test_22_tensors_and_token_ids_are_refused_or_ignored(scripted_app):
    for prompt in ([1, 2, 1024], [[1, -2]], [4.5], {"ids": [1]}, [True], [[[4]]], [2**40]):
        scripted_app.refuses({"model": "nano", "prompt": prompt}, "/v1/completions")
    scripted_app.post(PAYLOAD)
    embeds = {
        "prompt_embeds": "gASVBQAAAAAAAABLAS4=",
        "prompt_token_ids": [4],
        "input_ids": [4],
        "kv_transfer_params": {},
    }
    scripted_app.post({**PAYLOAD, **embeds})
    assert len({ticket.request.prompt for ticket in scripted_app.engine.tickets}) == 1


def test_23_no_error_reveals_internals(scripted_app):
    """No error contains files, lines, addresses or names of libraries."""
    client, pattern = scripted_app.client, schema_format({"type": "string", "pattern": "("})
    answers = [
        client.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
        client.get("/nothing"),
        client.delete(CHAT),
        scripted_app.post({**PAYLOAD, "seed": {}}),
        scripted_app.post({**PAYLOAD, "response_format": pattern}),
        scripted_app.post({**PAYLOAD, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert not re.search(
            r"0x[0-9a-f]{6}|\.py|Traceback|site-packages|line \d+,|mercury_jax\.|<[a-z_.]+ object",
            answer.text,
        )
        assert not {"server", "x-powered-by"} & set(answer.headers)


def test_25_jobs_of_different_keys_have_different_salts(nano):
    keys = ("first-key-123", "second-key-456")
    scripted_app, salts = ScriptedApp(nano, keys=keys, playground=True), {}
    edit = "<|code_to_edit|>\na = 1\n<|/code_to_edit|>"
    payloads = {**MINIMAL, "/v1/edit/completions": {**PAYLOAD, "messages": [{"role": "user", "content": edit}]},
            "/playground/stream": {"kind": "text", "prompt": "a"}}  # fmt: skip
    payloads.pop(
        "/v1/apply/completions"
    )  # this model is not asked for it; its jobs are made as those of an edit
    for key in (*keys, *keys):
        for path, payload in payloads.items():
            before = len(scripted_app.engine.tickets)
            said = scripted_app.post(payload, path, headers={"authorization": f"Bearer {key}"})
            assert said.status_code == 200 and len(scripted_app.engine.tickets) == before + 1, said.text
            salts.setdefault(key, set()).add(scripted_app.engine.tickets[-1].request.cache_salt)
    assert all(len(found) == 1 for found in salts.values()) and salts[keys[0]] != salts[keys[1]]
    assert not any(key in str(salts.values()) for key in keys)


def test_25_prefix_hashes_depend_on_the_whole_text_and_the_salt():
    """Texts that share only their end, and texts of different salts, share no hash; a common beginning does."""
    chain = lambda ids, salt: list(chunk_hashes(ids, 4, salt))
    mine = chain(range(12), "a")
    assert len(set(mine)) == 3 and mine == chain([*range(12), 99], "a")
    assert set(mine).isdisjoint(chain(range(12), "b")) and set(mine).isdisjoint(chain(range(12), ""))
    assert set(mine).isdisjoint(chain([50, *range(1, 12)], "a"))
    assert chain([*range(11), 99], "a")[:2] == mine[:2] and chain([*range(11), 99], "a")[2] != mine[2]


def test_the_table_names_existing_tests():
    rows = re.split(r"\n(?=\d+ )", (__doc__ or "").split("\n\n")[1])
    assert [int(row.split()[0]) for row in rows] == list(range(1, 27))
    for row in rows:
        number, tests = int(row.split()[0]), row[40:]
        here = Path(__file__).read_text()
        assert not re.search(r"\bhere\b", tests) or f"\ndef test_{number:02d}_" in here, row
        for part in filter(None, (p.strip() for p in tests.replace("\n", " ").split(";"))):
            file, _, names = part.partition(": ")
            if file.startswith("here"):
                continue
            (path,) = (ROOT / "tests").rglob(f"{file.split()[0]}.py")
            wanted = re.findall(r"test_\w+", names) or [rf"test_\w*{number:02d}_\w+"]
            assert all(re.search(rf"\ndef {name}\(", path.read_text()) for name in wanted), part
