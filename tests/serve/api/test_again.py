"""Thinking that nobody asked for and that takes an answer's room: the answer has its room all the same."""

import json

import numpy as np
import pytest

from mercury_jax.decode.output import LogProbs
from mercury_jax.serve.api.again import joined
from mercury_jax.tokenizer import SPECIAL
from tests.serve.api.scripted import Scripted, saying, snapshot
from tests.serve.api.wired import ASK, choices, client_of, events, post, said

TIGHT = {**ASK, "max_tokens": 6, "reasoning_effort": "instant", "reasoning_summary": True}


def thinking(nano, finish="length"):
    """nano as it thinks by itself, until its room is out; a job with room to think goes on and answers."""
    tok = nano.tokenizer
    first = [SPECIAL.think, *tok.encode("carry the one")]
    rest = [*tok.encode(" and go"), SPECIAL.end_think, *tok.encode("932")]

    def script(job):
        if job.thinking:
            return [snapshot(rest[:2]), snapshot(rest[:-1]), snapshot(rest, finish="stop", forwards=2)]
        return [snapshot(first[:2]), snapshot(first, finish=finish, forwards=3, cached=4)]

    return Scripted(nano, script), len(first) + len(rest), tuple(first)


def test_the_reply_is_never_empty_and_all_of_it_is_counted(nano):
    engine, tokens, first = thinking(nano)
    body = post(engine, TIGHT)
    [choice] = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("932", "stop")
    assert body["reasoning_summary"] == {"content": "carry the one and go", "status": "complete"}
    usage = body["usage"]
    assert (usage["completion_tokens"], usage["cached_input_tokens"]) == (tokens, 4)
    before, after = (ticket.job for ticket in engine.tickets)
    assert usage["prompt_tokens"] == len(before.prompt) and after.prompt == (*before.prompt, *first)
    assert before.max_tokens == after.max_tokens == 6 and after.thinking > 6
    chunks = events(engine, TIGHT)
    assert said(chunks) == "932" and choices(chunks)[-1]["finish_reason"] == "stop"
    assert chunks[-1]["reasoning_summary"] == body["reasoning_summary"]
    shown = events(engine, {**TIGHT, "diffusing": True})
    frames = [c["delta"]["content"] for c in choices(shown) if "content" in c["delta"]]
    progress = [c["diffusion_meta"]["diffusion_progress"] for c in shown if "diffusion_meta" in c]
    assert frames[-1] == "932" and progress == sorted(progress) and progress.count(1.0) == 1


def test_only_thinking_that_is_not_over_goes_on(nano):
    for script in (saying(nano, "93", finish="length"), thinking(nano, "stop")[0].script):
        engine = Scripted(nano, script)
        post(engine, TIGHT)
        assert len(engine.tickets) == 1
    closed = [SPECIAL.think, *nano.tokenizer.encode("so"), SPECIAL.end_think, *nano.tokenizer.encode("93")]
    engine = Scripted(nano, [snapshot(closed, finish="length")])
    body = post(engine, TIGHT)
    assert len(engine.tickets) == 1 and body["choices"][0]["finish_reason"] == "length"


def test_the_context_is_never_exceeded(nano):
    for context in (12, 14, 20, 40):
        engine, _, first = thinking(nano)
        engine.context = context
        body = post(engine, TIGHT)
        for ticket in engine.tickets:
            job = ticket.job
            assert len(job.prompt) + job.max_tokens + job.thinking + bool(job.thinking) <= context
        assert (body["choices"][0]["message"]["content"] == "932") == (len(engine.tickets) == 2)
        assert body["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_stop_text_cancels_the_second_job(nano):
    engine, _, _ = thinking(nano)
    engine.pause = 0.05
    inner = engine.script
    engine.script = lambda job: [*inner(job)[:-1], *saying(nano, "x", "y")] if job.thinking else inner(job)
    stopped = post(engine, {**TIGHT, "stop": ["93"]})
    assert stopped["choices"][0]["message"]["content"] == "" and len(engine.tickets) == 2
    assert engine.tickets[1].cancelled and not engine.tickets[0].cancelled


def test_two_snapshots_are_one_of_the_whole_answer():
    nats = lambda n: LogProbs(np.full(n, -1.0), np.zeros((n, 2), int), np.full((n, 2), -1.0))
    one = snapshot([1, 2, 3], finish="length", logprobs=nats(3), cached=7, forwards=5)
    two = joined(one, snapshot([4, 5], final=1, logprobs=nats(2), forwards=2))
    assert two.tokens.tolist() == [1, 2, 3, 4, 5] and two.settled.tolist() == [True] * 4 + [False]
    assert (two.final, two.start, two.cached, two.forwards, two.finish) == (4, 4, 7, 7, None)
    assert len(two.confidence) == len(two.forced) == len(two.logprobs.tokens) == len(two.logprobs.top) == 5
    assert joined(one, snapshot([], logprobs=None)).logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_engine_takes_no_second_job_the_first_was_all(nano, stream):
    engine, _, _ = thinking(nano)
    submit = engine.submit

    def once(job):
        engine.closing = bool(engine.tickets)
        return submit(job)

    engine.submit = once
    answer = client_of(engine).post("/v1/chat/completions", json={**TIGHT, "stream": stream})
    assert answer.status_code == 200
    told = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    assert json.loads(told)["choices"][0]["finish_reason"] == "length"
    assert len(engine.tickets) == 1
