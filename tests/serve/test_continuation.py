"""Chat answers that end without content, or whose thinking used up `max_tokens`, are continued."""

import json

import numpy as np
import pytest

from mercury_jax.decode.sample import LogProbs
from mercury_jax.tokenizer import SPECIAL
from tests.serve.api_client import PAYLOAD, choices, client_of, content_of, events, post
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots

TIGHT = {**PAYLOAD, "max_tokens": 6, "reasoning_effort": "instant", "reasoning_summary": True}


def thinking(nano, finish="length"):
    """An engine that thinks without being asked until `max_tokens` is used up; a job with a thinking budget answers."""
    tok = nano.tokenizer
    first = [SPECIAL.think, *tok.encode("carry the one")]
    rest = [*tok.encode(" and go"), SPECIAL.end_think, *tok.encode("932")]

    def script(job):
        if job.thinking:
            return [snapshot(rest[:2]), snapshot(rest[:-1]), snapshot(rest, finish="stop", forwards=2)]
        return [snapshot(first[:2]), snapshot(first, finish=finish, forwards=3, cached=4)]

    return ScriptedEngine(nano, script), len(first) + len(rest), tuple(first)


def test_thinking_within_max_tokens_is_continued_and_counted(nano):
    engine, tokens, first = thinking(nano)
    body = post(engine, TIGHT)
    [choice] = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("932", "stop")
    assert body["reasoning_summary"] == {"content": "carry the one and go", "status": "complete"}
    usage = body["usage"]
    assert (usage["completion_tokens"], usage["cached_input_tokens"]) == (tokens, 4)
    before, after = (ticket.request for ticket in engine.tickets)
    assert usage["prompt_tokens"] == len(before.prompt) and after.prompt == (*before.prompt, *first)
    assert before.max_tokens == after.max_tokens == 6 and after.thinking > 6
    chunks = events(engine, TIGHT)
    assert content_of(chunks) == "932" and choices(chunks)[-1]["finish_reason"] == "stop"
    assert chunks[-1]["reasoning_summary"] == body["reasoning_summary"]
    shown = events(engine, {**TIGHT, "diffusing": True})
    frames = [c["delta"]["content"] for c in choices(shown) if "content" in c["delta"]]
    progress = [c["diffusion_meta"]["diffusion_progress"] for c in shown if "diffusion_meta" in c]
    assert frames[-1] == "932" and progress == sorted(progress) and progress.count(1.0) == 1


def test_an_answer_with_content_is_not_continued(nano):
    closed = [SPECIAL.think, *nano.tokenizer.encode("so"), SPECIAL.end_think, *nano.tokenizer.encode("93")]
    for script in (text_snapshots(nano, "93", finish="length"), [snapshot(closed, finish="length")]):
        engine = ScriptedEngine(nano, script)
        body = post(engine, TIGHT)
        assert len(engine.tickets) == 1 and body["choices"][0]["finish_reason"] == "length"
    call = [
        SPECIAL.tool_call,
        *nano.tokenizer.encode('{"name": "add", "arguments": {}}'),
        SPECIAL.end_tool_call,
    ]
    engine = ScriptedEngine(nano, [snapshot(call, finish="stop")])
    add = {"type": "function", "function": {"name": "add"}}
    assert post(engine, {**TIGHT, "max_tokens": 60, "tools": [add]})["choices"][0]["message"]["tool_calls"]
    assert len(engine.tickets) == 1


T, C = SPECIAL.think, SPECIAL.end_think
# Answers without content: ids, finish reason, and whether the server closes their thinking.
SILENT = {
    "ends in its thinking": ([T, 300, 301], "stop", True), "says nothing": ([], "stop", False),
    "ends behind its thinking": ([T, 300, C], "stop", False), "thinks again": ([T, 300, C, T, 301], "stop", True),
    "spaces": ([25, 25, 25], "stop", False), "marks alone": ([SPECIAL.user, SPECIAL.tool_call], "length", False),
    "closed at the limit": ([T, 300, C], "length", False),
    "an end of turn": ([T, 300, SPECIAL.end_turn, 400], None, True),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SILENT)
def test_an_answer_without_content_is_followed_by_one_with_content(nano, name, stream):
    """Whatever the model wrote, the next job begins with a visible token."""
    ids, finish, shut = SILENT[name]
    rest = [snapshot([*ids, 500], finish="stop")] if finish is None else []
    first = [snapshot(ids, finish=finish), *rest]
    engine = ScriptedEngine(
        nano, lambda job: text_snapshots(nano, "932") if job.visible else first, pause=0.01
    )
    payload = {**TIGHT, "max_tokens": 5}
    if stream:
        chunks = events(engine, payload)
        content, finish = content_of(chunks).strip(), choices(chunks)[-1]["finish_reason"]
    else:
        [choice] = post(engine, payload)["choices"]
        content, finish = choice["message"]["content"].strip(), choice["finish_reason"]
    assert (content, finish, len(engine.tickets)) == ("932", "stop", 2)
    before, after = (ticket.request for ticket in engine.tickets)
    kept = [i for i in ids if i != SPECIAL.end_turn][: 2 if None in SILENT[name] else None]
    assert after.prompt == (*before.prompt, *kept, *[C] * shut)
    assert (after.max_tokens, after.thinking, after.seed) == (5, 0, before.seed)


def test_a_second_answer_without_content_is_continued_too(nano):
    def script(job):
        silent = [
            snapshot([300, C] if job.thinking else [T, 300], finish="stop" if job.thinking else "length")
        ]
        return text_snapshots(nano, "932") if job.visible else silent

    engine = ScriptedEngine(nano, script)
    body = post(engine, TIGHT)
    assert body["choices"][0]["message"]["content"] == "932" and len(engine.tickets) == 3
    prompts = [ticket.request.prompt for ticket in engine.tickets]
    assert prompts[1] == (*prompts[0], T, 300) and prompts[2] == (*prompts[1], 300, C)


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_continuation_stays_within_the_context(nano, finish):
    prompt = len(nano.tokenizer.render(PAYLOAD["messages"]))
    for context in (prompt - 1, prompt, *range(prompt + 1, 41, 3)):
        engine = ScriptedEngine(nano, lambda job: text_snapshots(nano, "932") if job.visible or job.thinking else
                          [snapshot([T, *range(300, 300 + job.max_tokens - 1)], finish=finish)])  # fmt: skip
        engine.context = context
        answer = client_of(engine).post("/v1/chat/completions", json={**TIGHT, "max_tokens": 6})
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "context_length_exceeded" and context <= prompt
            continue
        for ticket in engine.tickets:
            job = ticket.request
            assert len(job.prompt) + job.max_tokens + job.thinking + bool(job.thinking) <= context
        assert len(engine.tickets) >= 2 and answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_stop_sequence_cancels_the_second_job(nano):
    engine, _, _ = thinking(nano)
    engine.pause = 0.05
    inner = engine.script
    engine.script = lambda job: (
        [*inner(job)[:-1], *text_snapshots(nano, "x", "y")] if job.thinking else inner(job)
    )
    stopped = post(engine, {**TIGHT, "stop": ["93"]})  # which is why it says nothing
    assert stopped["choices"][0]["message"]["content"] == "" and len(engine.tickets) == 2
    assert engine.tickets[1].cancelled and not engine.tickets[0].cancelled


def test_join_makes_one_snapshot_of_two():
    nats = lambda n: LogProbs(np.full(n, -1.0), np.zeros((n, 2), int), np.full((n, 2), -1.0))
    one = snapshot([1, 2, 3], finish="length", logprobs=nats(3), cached=7, forwards=5)
    two = one.followed_by(snapshot([4, 5], final=1, logprobs=nats(2), forwards=2))
    assert two.tokens.tolist() == [1, 2, 3, 4, 5] and two.accepted.tolist() == [True] * 4 + [False]
    assert (two.final, two.start, two.cached, two.forwards, two.finish) == (4, 4, 7, 7, None)
    assert two.logprobs is not None
    assert len(two.confidence) == len(two.forced) == len(two.logprobs.tokens) == len(two.logprobs.top) == 5
    assert one.followed_by(snapshot([], logprobs=None)).logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_second_job_the_first_answer_is_returned(nano, stream):
    engine, _, _ = thinking(nano)
    submit = engine.submit

    def once(job):
        engine.closing = bool(engine.tickets)
        return submit(job)

    engine.submit = once
    answer = client_of(engine).post("/v1/chat/completions", json={**TIGHT, "stream": stream})
    assert answer.status_code == 200
    last = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert len(engine.tickets) == 1
