"""Responses and streams of all endpoints, from scripted snapshots."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.sample import LogProbs
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.tokenizer import SPECIAL
from tests.hub.tiny_tokenizers import TEMPLATES, byte_level
from tests.serve.api_client import PAYLOAD, TEXT, choices, client_of, content_of, events, post
from tests.serve.chat.checkpoint_tokenizers import without_tools
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots
from tests.tiny import tiny

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FIM = {"model": "mercury-edit", "prompt": "def f(", "suffix": "):\n"}


@pytest.fixture(scope="module")
def answering(nano):
    return ScriptedEngine(nano, text_snapshots(nano, "347+5", "347+585 is", "347+585 is 932.\nYes"))


def test_a_chat_completion(answering):
    body = post(answering, PAYLOAD)
    assert body["model"] == "nano" and body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice == {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}


def test_a_stream_has_the_same_content(answering):
    chunks = events(answering, PAYLOAD)
    first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None, "logprobs": None}
    assert chunks[0]["choices"] == [first]
    assert content_of(chunks) == TEXT and "usage" not in chunks[-1]
    assert [c["finish_reason"] for c in choices(chunks)] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {} and len({(c["id"], c["created"]) for c in chunks}) == 1


def test_usage_is_flat_and_nested_and_streamed_on_request(answering, nano):
    usage = post(answering, PAYLOAD)["usage"]
    assert usage["completion_tokens"] == len(nano.tokenizer.encode(TEXT))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["cached_input_tokens"]}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage["reasoning_tokens"]}
    *before, last = events(answering, {**PAYLOAD, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"] == usage
    assert all(chunk["usage"] is None and chunk["choices"][0]["logprobs"] is None for chunk in before)
    assert not any("usage" in chunk for chunk in events(answering, PAYLOAD))


def test_diffusing_chunks_hold_the_whole_text(nano):
    ids = nano.tokenizer.encode("one two three four")
    drafts = [ids[::-1][:4], [*ids[:1], *ids[4:6]], [*ids[:2], *ids[5:]], [*ids[:3], ids[0]]]
    script = [snapshot(shown, final=i) for i, shown in enumerate(drafts)] + [snapshot(ids, finish="stop")]
    chunks = events(ScriptedEngine(nano, script, pause=0.01), {**PAYLOAD, "diffusing": True})
    shown = [c["delta"]["content"] for c in choices(chunks) if "content" in c["delta"]]
    assert shown[-1] == "one two three four" and len(shown) == 5
    assert len(set(shown)) == 5 and not shown[1].startswith(shown[0])
    progress = [c["diffusion_meta"]["diffusion_progress"] for c in chunks if "diffusion_meta" in c]
    assert progress == sorted(progress) and [p for p in progress if p >= 1.0] == [1.0]
    body = post(ScriptedEngine(nano, script), {**PAYLOAD, "diffusing": True})
    assert body["choices"][0]["message"]["content"] == "one two three four"


def test_no_alternatives_need_no_logprobs(answering):
    assert post(answering, {**PAYLOAD, "top_logprobs": 0, "stop": [""]})["choices"][0]["logprobs"] is None
    refused = client_of(answering).post("/v1/chat/completions", json={**PAYLOAD, "top_logprobs": 1})
    assert refused.json()["error"]["param"] == "top_logprobs"


def test_an_empty_answer_has_a_finish_reason(nano):
    for finish in ("stop", "length"):
        chunks = events(ScriptedEngine(nano, [snapshot([], finish=finish)]), PAYLOAD)
        assert content_of(chunks) == "" and choices(chunks)[-1]["finish_reason"] == finish
        body = post(ScriptedEngine(nano, [snapshot([], finish=finish)]), PAYLOAD)
        assert (
            body["choices"][0]["finish_reason"] == finish and body["choices"][0]["message"]["content"] == ""
        )


def tool_call_snapshots(nano, *payloads, before=""):
    ids = nano.tokenizer.encode(before) if before else []
    for payload in payloads:
        ids += [SPECIAL.tool_call, *nano.tokenizer.encode(payload), SPECIAL.end_tool_call]
    return [snapshot(ids[:n]) for n in range(1, len(ids), 3)] + [snapshot(ids, finish="stop")]


def test_a_streamed_tool_call_has_its_id_once(nano):
    script = tool_call_snapshots(
        nano, '{"name": "add", "arguments": {"a": 347, "b": [585]}}', '{"name": "add", "arguments": {}}'
    )
    payload = {**PAYLOAD, "tools": [TOOL]}
    body = post(ScriptedEngine(nano, script), payload)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    whole = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in whole] == [{"a": 347, "b": [585]}, {}]
    assert [call["index"] for call in whole] == [0, 1] and len({call["id"] for call in whole}) == 2
    chunks = events(ScriptedEngine(nano, script, pause=0.002), payload)
    deltas = [call for c in choices(chunks) for call in c["delta"].get("tool_calls", [])]
    for i, call in enumerate(whole):
        mine = [d for d in deltas if d["index"] == i]
        assert [("id" in d, "type" in d, "name" in d["function"]) for d in mine] == [(True,) * 3] + [
            (False,) * 3
        ] * (len(mine) - 1)
        assert "".join(d["function"]["arguments"] for d in mine) == call["function"]["arguments"]
    assert choices(chunks)[-1]["finish_reason"] == "tool_calls"


def with_logprobs(shown):
    """The last of some snapshots, with logprobs that tell its tokens apart: -1 for the first, then -2, ..."""
    n = len(shown[-1].tokens)
    values = -np.arange(1.0, n + 1)
    nats = LogProbs(values, shown[-1].tokens[:, None], values[:, None])
    return [*shown[:-1], shown[-1]._replace(logprobs=nats)]


def logprob_cases(tok):
    """Ids of answers, fields of the request, and which of the ids wrote the content."""
    text = tok.encode("347+585 is 932.\nYes and no")
    until = next(n for n in range(len(text)) if "\nY" in tok.decode(text[:n]))
    cut = [i for i in range(until) if len(tok.decode(text[:i])) < len("347+585 is 932.")]
    call = [SPECIAL.tool_call, *tok.encode('{"name": "add", "arguments": {}}'), SPECIAL.end_tool_call]
    thought = [SPECIAL.think, *tok.encode("carry"), SPECIAL.end_think]
    bad = [SPECIAL.tool_call, *tok.encode("no call"), SPECIAL.end_tool_call]
    hi, tools = tok.encode("é: hi"), {"tools": [TOOL]}
    whole = lambda before: [*range(len(before), len(before) + len(hi))]
    return [
        (text, {"stop": "\nY"}, cut),
        ([*hi, *call], tools, whole([])),
        ([*call, *call], tools, []),
        ([*thought, *hi], {}, whole(thought)),
        ([*thought, *call, *hi, *call], tools, whole(thought + call)),
        ([*hi, *bad], tools, [*range(len(hi)), *range(len(hi) + 1, len(hi + bad) - 1)]),
        ([*thought, SPECIAL.eos], {"stop": ["x"]}, []),
    ]


@pytest.mark.parametrize("case", range(7))
def test_logprobs_are_those_of_the_content(nano, case):
    """Neither of thinking, calls and stop sequences; null where there is no content."""
    ids, fields, content = logprob_cases(nano.tokenizer)[case]
    engine = ScriptedEngine(nano, with_logprobs([snapshot(ids[:3]), snapshot(ids, finish="stop")]))
    engine.submit = functools.partial(submit_once, engine, engine.submit)
    payload = {**PAYLOAD, "max_tokens": 400, "logprobs": True, **fields}
    [choice] = post(engine, payload)["choices"]
    found = choice["logprobs"]
    assert found["refusal"] is None
    if not content:
        assert found["content"] is None
    else:
        assert [-1 - entry["logprob"] for entry in found["content"]] == content
        written = b"".join(bytes(entry["bytes"]) for entry in found["content"]).decode()
        assert written.startswith(choice["message"]["content"]) or "no call" in written
    engine.closing = False
    assert choices(events(engine, payload))[-1]["logprobs"] == found


def submit_once(engine, submit, job):
    """Refuses the job that would continue an answer without content."""
    handle = submit(job)
    engine.closing = True
    return handle


def test_text_offsets_are_positions_in_the_text(nano):
    ids = nano.tokenizer.encode("aé日b\nYes")
    engine = ScriptedEngine(nano, with_logprobs([snapshot(ids, finish="stop")]))
    body = post(engine, {"model": "nano", "prompt": "a", "logprobs": 1, "stop": "\nY"}, "/v1/completions",
                "TextCompletion")  # fmt: skip
    [choice] = body["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "aé日b" and len({len(values) for values in found.values()}) == 1
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, offset)
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][-1] == 3


@pytest.mark.parametrize(
    "fields, last",
    [({"continue_final_message": True, "add_generation_prompt": False}, {}),
     ({"continue_final_message": True}, {}), ({"add_generation_prompt": False}, {}), ({}, {"prefix": True})],
)  # fmt: skip
def test_the_last_message_is_continued(nano, fields, last):
    """As vLLM, Mistral and DeepSeek do; the answer is the new text alone, with its first space, or nothing."""
    asked, tok = PAYLOAD["messages"], nano.tokenizer
    payload = {**PAYLOAD, "messages": [*asked, {"role": "assistant", "content": "It is", **last}], **fields}
    prompt = (*tok.render(asked), *tok.encode("It is"))
    for text in (" 932", ""):
        engine = ScriptedEngine(nano, text_snapshots(nano, text))
        assert post(engine, payload)["choices"][0]["message"]["content"] == text
        assert content_of(events(engine, payload)) == text
        assert [ticket.request.prompt for ticket in engine.tickets] == [prompt] * 2
        assert engine.tickets[0].request.thinking == 0
    spaced = without_tools(
        "llama"
    )  # drops the space of a first token, which belongs to a text that is continued
    engine = ScriptedEngine(nano, [snapshot(spaced.encode("nine"), finish="stop")])
    engine.lm = dataclasses.replace(nano, tokenizer=spaced)
    assert post(engine, payload)["choices"][0]["message"]["content"] == " nine"
    assert post(engine, PAYLOAD)["choices"][0]["message"]["content"] == "nine"


@pytest.mark.parametrize("text", ["It is", "im", "", " It is "])
def test_a_message_is_continued_outside_of_the_thinking_that_a_template_always_opens(nano, text):
    """As in transformers, the prompt ends with the text of the message: no mark is added before it or behind it."""
    template = TEMPLATES["chatml"].replace("assistant\\n' }}", "assistant\\n<think>\\n' }}").encode()
    tok = HFTokenizer.of({**byte_level(), "chat_template.jinja": template})
    asked, last = PAYLOAD["messages"], {"role": "assistant", "content": text, "prefix": True}
    engine = ScriptedEngine(nano, [snapshot(tok.encode(" nine"), finish="stop")])
    engine.lm = dataclasses.replace(nano, tokenizer=tok)
    body = post(engine, {**PAYLOAD, "messages": [*asked, last]})
    assert body["choices"][0]["message"]["content"] == " nine"
    prompt, whole = engine.tickets[-1].request.prompt, tok.render([*asked, last], add_generation_prompt=False)
    assert [*prompt] == whole[: len(whole) - whole[::-1].index(tok.end_turn) - 1]
    opening = tok.tokens.control["<think>"]
    assert opening in tok.render(asked) and opening not in prompt


@pytest.mark.parametrize(
    "fields, last, message",
    [
        ({"continue_final_message": True}, {"role": "user", "content": "a"},
         "continue_final_message is true; allowed: false where the last message is not a text of the assistant"),
        ({"add_generation_prompt": False}, {"role": "user", "content": "a"},
         "add_generation_prompt is false; allowed: true"),
        ({"continue_final_message": True, "add_generation_prompt": True}, {"role": "assistant", "content": "a"},
         "add_generation_prompt is true; allowed: false with continue_final_message"),
        ({"response_format": {"type": "json_object"}}, {"role": "assistant", "content": "a", "prefix": True},
         r"response_format.type is 'json_object'; allowed: text with messages\[2\].prefix"),
        ({}, {"role": "assistant", "prefix": True, "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
         "prefix is true"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(scripted_app, fields, last, message):
    messages = [*PAYLOAD["messages"], {"role": "assistant", "content": "b"}, last]
    assert re.search(message, scripted_app.refuses({**PAYLOAD, "messages": messages, **fields})["message"])
    early = [{"role": "assistant", "content": "b", "prefix": True}, *PAYLOAD["messages"]]
    assert scripted_app.refuses({**PAYLOAD, "messages": early})["param"] == "messages[0].prefix"
    only = {**PAYLOAD, "messages": early[:1]}
    for body in (only, {**only, "tools": [{"type": "function", "function": {"name": "f"}}]}):
        assert "where no message precedes the one" in scripted_app.refuses(body)["message"]


def test_bad_words_may_not_arise_where_a_text_is_continued(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    for text, ok in (("Once up", False), ("Once", True)):
        last = {"role": "assistant", "content": text, "prefix": True}
        post(engine, {**PAYLOAD, "messages": [*PAYLOAD["messages"], last], "bad_words": ["upon"]})
        grammar = engine.tickets[-1].request.grammar
        assert grammar.completes(nano.tokenizer.encode("on")) == ok


@pytest.mark.parametrize("content", [None, "", "I add."])
def test_a_tool_call_and_its_result_are_rendered_into_the_prompt(nano, content):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 347, "b": [585]}'},
    }
    asked = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "932"}
    post(engine, {**PAYLOAD, "messages": [*PAYLOAD["messages"], asked, result], "tools": [TOOL]})
    prompt = nano.tokenizer.decode(engine.tickets[-1].request.prompt)
    assert prompt.index("347+585=") < prompt.index('"a": 347') < prompt.index("932")
    call["function"]["arguments"] = json.dumps({"a": "1" * 100_000})
    answer = client_of(engine).post(
        "/v1/chat/completions", json={**PAYLOAD, "messages": [*PAYLOAD["messages"], asked, result]}
    )
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_answer_and_cancels_its_job(nano, stream):
    engine = ScriptedEngine(
        nano,
        text_snapshots(nano, "347+585", "347+585 is 932.\nYes", "347+585 is 932.\nYes and no"),
        pause=0.05,
    )
    payload = {**PAYLOAD, "stop": "\nY"}
    content = (
        content_of(events(engine, payload))
        if stream
        else post(engine, payload)["choices"][0]["message"]["content"]
    )
    assert content == "347+585 is 932." and engine.tickets[0].cancelled


def test_n_answers_are_n_jobs_with_different_seeds(nano):
    engine = ScriptedEngine(nano, lambda job: text_snapshots(nano, f"seed {job.seed % 10}"))
    body = post(engine, {**PAYLOAD, "n": 3, "seed": 2**63 - 1})
    contents = [choice["message"]["content"] for choice in body["choices"]]
    assert contents == ["seed 7", "seed 8", "seed 9"] or len(set(contents)) == 3
    chunks = events(engine, {**PAYLOAD, "n": 3, "seed": 2**63 - 1})
    assert [content_of(chunks, i) for i in range(3)] == contents
    assert all([c["finish_reason"] for c in choices(chunks, i)][-1] == "stop" for i in range(3))
    one, usage = post(engine, {**PAYLOAD, "seed": 0})["usage"], body["usage"]
    assert (
        usage["prompt_tokens"] == one["prompt_tokens"]
        and usage["completion_tokens"] == 3 * one["completion_tokens"]
    )


def test_without_a_seed_each_job_gets_a_fresh_one(answering):
    answering.tickets.clear()
    for payload in (
        {**PAYLOAD, "seed": 5},
        {**PAYLOAD, "seed": 5},
        {**PAYLOAD, "seed": -5},
        PAYLOAD,
        PAYLOAD,
    ):
        post(answering, payload)
    seeds = [ticket.request.seed for ticket in answering.tickets]
    assert seeds[0] == seeds[1] == 5 and len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)


def test_thinking_is_reported_on_request_and_always_counted(nano):
    tok = nano.tokenizer
    ids = [*tok.encode("carry the one"), SPECIAL.end_think, *tok.encode("932")]
    engine = ScriptedEngine(nano, [snapshot(ids[:4]), snapshot(ids, finish="stop")])
    payload = {
        **PAYLOAD, "reasoning_effort": "high", "reasoning_summary": True, "reasoning_summary_wait": True,
    }  # fmt: skip
    body = post(engine, payload)
    assert body["reasoning_summary"] == {"content": "carry the one", "status": "complete"}
    assert body["choices"][0]["message"]["content"] == "932" and 0 < body["usage"]["reasoning_tokens"] < len(
        ids
    )
    last = events(engine, payload)[-1]
    assert (
        last["reasoning_summary"]["content"] == "carry the one"
        and last["choices"][0]["finish_reason"] == "stop"
    )
    assert "reasoning_summary" not in post(engine, {**payload, "reasoning_summary": False})
    skipped = post(ScriptedEngine(nano, text_snapshots(nano, "932")), {**payload, "reasoning_effort": "none"})
    assert skipped["reasoning_summary"] == {"content": None, "status": "skipped"}


def test_a_fim_completion(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "a, ", "a, b"))
    body = post(engine, FIM, "/v1/fim/completions", "TextCompletion")
    assert body["choices"] == [{"index": 0, "finish_reason": "stop", "text": "a, b", "logprobs": None}]
    assert body["id"].startswith("cmpl-") and engine.tickets[0].request.presence_penalty == 1.5
    chunks = events(engine, FIM, "/v1/fim/completions", "TextChunk")
    assert (
        "".join(c["text"] for c in choices(chunks)) == "a, b"
        and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    )
    for empty in ("", None, "<|endoftext|>"):
        post(engine, {**FIM, "suffix": empty}, "/v1/fim/completions", "TextCompletion")
        assert engine.tickets[-1].request.suffix is None
    stopped = post(
        ScriptedEngine(nano, text_snapshots(nano, "a\n\nb")), FIM, "/v1/fim/completions", "TextCompletion"
    )
    assert stopped["choices"][0]["text"] == "a"


def test_completions_take_several_prompts(nano):
    engine = ScriptedEngine(nano, lambda job: text_snapshots(nano, f"{len(job.prompt)}"))
    payload = {"model": "nano", "prompt": ["a", "def f(x):"], "n": 2}
    body = post(engine, payload, "/v1/completions", "TextCompletion")
    contents = [choice["text"] for choice in body["choices"]]
    assert contents[0] == contents[1] != contents[2] == contents[3] and [
        c["index"] for c in body["choices"]
    ] == [0, 1, 2, 3]
    refused = client_of(engine).post("/v1/completions", json={**payload, "n": 9})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    for bad in (
        {"prompt": [1, 2, 10**6]},
        {"echo": True, "suffix": "b"},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"best_of": 2},
    ):
        assert client_of(engine).post("/v1/completions", json={**payload, **bad}).status_code == 400, bad


def test_likelihoods_of_a_prompt_are_those_of_the_score_or_refused_by_name(nano):
    """Other attention patterns; a model of uniform noise has no exact ones."""
    ids = list(range(5, 45))
    body = {"model": "tiny", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    ask = lambda lm, **more: client_of(ScriptedEngine(lm)).post("/v1/completions", json={**body, **more})
    for pattern in ("block_causal", "bidirectional"):
        lm = dataclasses.replace(tiny(pattern), name="tiny")
        found = ask(lm).json()["choices"][0]["logprobs"]
        rows = range(1, len(ids))
        exact = mj.score(lm, [ids[:i] for i in rows], [[ids[i]] for i in rows], samples=1)
        np.testing.assert_allclose(found["token_logprobs"][1:], exact.log_p, atol=1e-4)
        assert found["top_logprobs"][1:] == [{}] * len(rows)
    uniform = dataclasses.replace(tiny(kind="uniform"), name="tiny")
    refused = ask(uniform).json()["error"]
    assert refused["param"] == "echo" and "a model that denoises masks" in refused["message"]
    assert ask(uniform, logprobs=None).status_code == 200
    assert ask(uniform, prompt=[5] * 513).json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_beyond_the_context_is_refused_in_the_vendors_words(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    words = "You exceeded the maximum context length for this model of 512. Please reduce the length of the messages " \
            "or completion."  # fmt: skip
    for size, needed in ((3000, r"The prompt has \d+ tokens; allowed: up to 511,"),
                         (10**6, r"10{6} characters, .* at least \d+ tokens; allowed: up to 511")):  # fmt: skip
        long = [{"role": "user", "content": "1+1= " * (size // 5)}]
        answer = client_of(engine).post("/v1/chat/completions", json={**PAYLOAD, "messages": long})
        assert answer.status_code == 400
        error = answer.json()["error"]
        message = error.pop("message")
        assert message.startswith(words) and re.search(needed, message)
        assert error == {
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    for fields in ({}, {"max_tokens": 50000}, {"max_completion_tokens": 9000}):
        post(engine, {**PAYLOAD, **fields})
        job = engine.tickets[-1].request
        assert len(job.prompt) + job.max_tokens == engine.context


def test_strict_temperature_resets_values_out_of_range(nano):
    for wanted, strict, used in ((None, False, None), (0, False, 0), (1.7, False, 1.7), (None, True, 0.75),
                                 (0, True, 0.75), (0.6, True, 0.6)):  # fmt: skip
        engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
        body = post(engine, {**PAYLOAD, "temperature": wanted}, strict_temperature=strict)
        assert engine.tickets[0].request.temperature == used and ("warning" in body) == (
            strict and wanted == 0
        )


def test_extra_body_counts_and_max_completion_tokens_takes_precedence(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    post(
        engine,
        {**PAYLOAD, "max_tokens": 7, "max_completion_tokens": 9, "extra_body": {"top_k": 3, "max_tokens": 5}},
    )
    assert (engine.tickets[0].request.max_tokens, engine.tickets[0].request.top_k) == (9, 3)
    bad = client_of(engine).post("/v1/chat/completions", json={**PAYLOAD, "extra_body": {"top_k": "3"}})
    assert bad.status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/fim/completions"])
def test_a_request_chooses_its_decoding_rule(nano, path):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    body = {**PAYLOAD, "prompt": "a", "reasoning_effort": "low"}
    chosen = {"rule": "local_leap", "rule_params": {"p": 0.5, "radius": 2}}
    for more in (chosen, {"extra_body": chosen}):
        assert client_of(engine).post(path, json={**body, **more}).status_code == 200
        job = engine.tickets[-1].request
        assert (job.rule, job.p, job.rule_params) == ("local_leap", None, {"p": 0.5, "radius": 2})
    for fields, message in (
        ({"rule": "tresholds"}, r"rule is 'tresholds'; allowed: threshold is the nearest"),
        ({"rule": "threshold", "rule_params": {"p": 1.5}}, r"threshold\(p=\) is 1.5; allowed: a number in \[0, 1\]"),
        ({"rule": "threshold", "rule_params": {"q": 1}}, r"threshold\(\) argument is 'q'; allowed: p"),
        ({"rule": "local_leap", "rule_params": {"radius": 1.5}},
         r"local_leap\(radius=\) is 1.5; allowed: a whole number"),
        ({"rule_params": {"p": 0.5}}, "rule_params needs rule"),
    ):  # fmt: skip
        refused = client_of(engine).post(path, json={**body, **fields})
        assert refused.status_code == 400 and re.search(message, refused.json()["error"]["message"])
        assert refused.json()["error"]["param"] == ("rule" if "rule is" in message else "rule_params")


def test_efforts_set_rule_steps_and_thinking(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    used = {}
    for name in ("instant", "low", "medium", "high", None, "realtime"):
        more = {"realtime": True} if name == "realtime" else {"reasoning_effort": name}
        engine.tickets.clear()  # a reply that only thinks has a second job
        post(engine, {**PAYLOAD, "max_tokens": 100, **more})
        job = engine.tickets[0].request
        used[name] = (job.p, job.steps, job.thinking)
        assert job.max_tokens == 100
    assert used["realtime"] == used["instant"] == (0.7, 8, 0) and used["low"][:2] == (0.8, 16)
    assert 0 < used["low"][2] < used["medium"][2] <= used["high"][2] and used[None] == (None, 0, 0)


@pytest.mark.parametrize(
    "method, path, message",
    [("POST", "/chat/completions", "path is '/chat/completions'; allowed: /v1/chat/completions is the nearest"),
     ("POST", "/v1/v1/completions", "allowed: /v1/completions is the nearest; all: /v1/chat/completions, "),
     ("POST", "/v1/fim/completions/", "allowed: /v1/fim/completions is the nearest"),
     ("GET", "/models", "allowed: /v1/models is the nearest"),
     ("POST", "/v1/batches", "path is '/v1/batches'; allowed: /v1/chat/completions, /v1/completions, "),
     ("POST", "/v1/embeddings", "allowed: /v1/chat/completions, .*/openapi.json describes them"),
     ("GET", "/v1/chat/completions", "method is 'GET'; allowed for /v1/chat/completions: POST$"),
     ("POST", "/v1/models", "method is 'POST'; allowed for /v1/models: GET, HEAD$"),
     ("DELETE", "/health", "method is 'DELETE'; allowed for /health: GET, HEAD$")],
)  # fmt: skip
def test_an_unknown_path_or_method_is_refused_with_those_that_exist(nano, method, path, message):
    answer = client_of(ScriptedEngine(nano)).request(method, path)
    wrong_method = message.partition("method is")[1]
    assert answer.status_code == (405 if wrong_method else 404) and re.search(
        message, answer.json()["error"]["message"]
    )
    assert answer.headers.get("allow", "") == (message[:-1].rpartition(": ")[2] if wrong_method else "")


def test_a_tool_choice_is_refused_with_the_choices_that_there_are(nano):
    add = {"type": "function", "function": {"name": "add"}}
    other = {"type": "function", "function": {"name": "other"}}
    for fields, message in (
        ({"tool_choice": "required"}, "'required'; allowed: auto or none, since the request has no tools"),
        ({"tool_choice": other}, "'other'; allowed: auto or none, since the request has no tools"),
        (
            {"tool_choice": other, "tools": [add]},
            "'other'; allowed: auto, none, required, or a call of one of the tools add",
        ),
    ):
        answer = client_of(ScriptedEngine(nano)).post("/v1/chat/completions", json={**PAYLOAD, **fields})
        assert answer.json()["error"]["message"] == f"tool_choice is {message}"


def test_metrics_count_requests(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"))
    client = client_of(engine)
    for path in ("/v1/chat/completions", "/v1/x", "/v1/y"):
        client.post(path, json=PAYLOAD)
    text = client.get("/metrics").text
    for line in (
        'mercury_http_responses_total{path="/v1/chat/completions",status="200"} 1.0',
        'mercury_http_responses_total{path="other",status="404"} 2.0',
        "mercury_submitted_total 1.0",
        "mercury_structured_output_failures_total 0.0",
        "mercury_first_frame_seconds_count 1.0",
        "mercury_last_token_seconds_count 1.0",
        "mercury_tokens_per_forward_count 1.0",
        "mercury_ready 1.0",
    ):
        assert line in text.splitlines(), line
