"""The engine: answers do not depend on batching, and requests are queued, cancelled and refused in order."""

import asyncio
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from mercury_jax import sample
from mercury_jax.config import Plan
from mercury_jax.decode import grammar, infill, rules
from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.decode.infill import Hole
from mercury_jax.decode.registration import rule
from mercury_jax.decode.request import Request
from mercury_jax.decode.sampler import accept
from mercury_jax.serve.engine.buckets import Bucket
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import (
    ContextLengthExceeded,
    EngineConfig,
    EngineRequest,
    RequestRejected,
)
from mercury_jax.serve.engine.sampling_params import DEFAULT_RULES, rule_set
from mercury_jax.sharding import mesh, shardings
from tests.tiny import tiny

RULES = ("confidence", "editing", "factor", "entropy_bound")
SMALL = EngineConfig(slots=3, queue=6, context=128, programs="one", rules=RULES)


@pytest.fixture(scope="module")
def engine():
    engine = Engine(tiny(), SMALL)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def engine_of_one_rule():
    engine = Engine(tiny(), dataclasses.replace(SMALL, rules=()))
    engine.start()
    yield engine
    engine.stop()


def ids(seed, count=9):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(30, 300, count))


def requests(count, **fields):
    return [EngineRequest(prompt=ids(i, 5 + i), max_tokens=10 + i, seed=i, **fields) for i in range(count)]


def text(handle):
    return handle.wait(60).tokens.tolist()


def compilations():
    """A list to which every compilation from now on is added."""
    found = []
    note = lambda name, *_, **__: found.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(note)
    return found


@pytest.mark.long
def test_no_request_compiles_anything(engine):
    """Runs first, so that nothing was compiled for an earlier request."""
    compiled = compilations()
    varied = [
        dict(rule=name, p=p) for name, p in (("factor", 0.5), ("threshold", 0.2), ("entropy_bound", None))
    ]
    varied += [
        dict(temperature=0.7, top_p=0.9),
        dict(logit_bias={50: 1.0, 51: -3}),
        dict(steps=3),
        dict(repetition_penalty=1.3),
        dict(prompt=ids(4, 90)),
        dict(prompt=(*ids(4, 90), 44)),  # a prefix of it is in the prefix cache
        dict(logprobs=1),
        dict(grammar=grammar.compile(tiny().tokenizer, grammar.Choice(["def", "return"]))),
    ]
    for fields in varied:
        assert text(
            engine.submit(EngineRequest(**{"prompt": ids(2, 11), "max_tokens": 9, "seed": 3} | fields))
        )
    assert engine.stats().cached_tokens and compiled == []


def test_a_users_rule_is_offered_beside_the_default_ones_if_it_can_share_the_program(monkeypatch):
    lm, accept_none = tiny(), lambda key, view, memory: (accept(view, view.masked & False), memory)
    for name in ("cheap", "costly"):
        monkeypatch.delitem(rules.ALL, name, raising=False)
        rule(name=name, noise="absorbing", needs_logits=name == "costly")(accept_none)
    offered = rule_set(lm).names
    assert offered[0] == rule_set(lm).own.rule.name and "cheap" in offered
    assert set(offered[1:]) == {"cheap", *DEFAULT_RULES["absorbing"]} - {offered[0]}
    # A rule that reads the logits of every position, and any other of the package, is offered where it is named.
    assert rule_set(lm, ("costly", "slow_fast", "cheap")).names == (
        offered[0], "slow_fast", "cheap", "costly",
    )  # fmt: skip
    assert rule_set(lm, ()).names == offered[:1]
    for name in ("expand", "wino", "predictor_corrector", "autoregressive", "nothing"):
        with pytest.raises(ValueError, match="rules"):
            rule_set(lm, (name,))
    for name in ("cheap", "costly"):
        del rules.ALL[name]


def test_the_engine_returns_what_sample_returns(engine):
    for request in requests(3):
        want = sample(
            tiny(), list(request.prompt), max_tokens=request.max_tokens, seed=request.seed, temperature=0.0
        )
        assert text(engine.submit(dataclasses.replace(request, temperature=0.0))) == want.tokens[0].tolist()


def test_an_answer_does_not_depend_on_its_neighbours(engine):
    mixed = [
        *requests(2, temperature=1.0),
        EngineRequest(prompt=ids(7), max_tokens=20, rule="confidence", presence_penalty=0.5),
        EngineRequest(prompt=ids(8), max_tokens=12, rule="editing", top_p=0.7, temperature=0.8, seed=4),
        EngineRequest(prompt=ids(9), max_tokens=9, logit_bias={40: 5.0}, top_k=3, min_p=0.1, logprobs=2),
    ]
    alone = [text(engine.submit(request)) for request in mixed]
    together = [engine.submit(request) for request in mixed]
    assert [text(handle) for handle in together] == alone


def test_sampling_parameters_apply_to_their_request(engine):
    few = engine.submit(EngineRequest(prompt=ids(3), max_tokens=8, steps=1)).wait(60)
    many = engine.submit(EngineRequest(prompt=ids(3), max_tokens=8, rule="confidence")).wait(60)
    assert few.forwards == 1 and many.forwards == 8
    assert set(text(engine.submit(EngineRequest(prompt=ids(3), max_tokens=8, logit_bias={77: 1e4})))) == {77}
    seen = engine.submit(EngineRequest(prompt=ids(3), max_tokens=8, logprobs=2)).wait(60).logprobs
    assert seen.top.shape == (8, 2) and np.all(seen.top[:, 0] >= seen.tokens - 1e-6)


def test_final_tokens_do_not_change_and_the_last_snapshot_is_complete(engine):
    handle = engine.submit(EngineRequest(prompt=ids(4), max_tokens=30, rule="confidence", frames=True))

    async def collect():
        return [s async for s in handle]

    seen = asyncio.run(collect())
    last = seen[-1]
    assert last.finish in ("stop", "length") and last.final == len(last.tokens) == 30
    assert [s.forwards for s in seen[:-1]] == list(range(1, 31))
    for s in seen:
        assert s.tokens[: s.final].tolist() == last.tokens[: s.final].tolist()
        assert s.accepted[: s.final].all() and len(s.tokens) == len(s.accepted) == len(s.confidence)


def test_the_prefix_cache_is_shared_by_requests_of_one_salt_only(engine):
    prompt = ids(5, 90)  # longer than two canvases: it is prefilled in chunks
    first = engine.submit(EngineRequest(prompt=prompt, max_tokens=8, cache_salt="a")).wait(60)
    again = engine.submit(EngineRequest(prompt=prompt, max_tokens=8, cache_salt="a")).wait(60)
    other = engine.submit(EngineRequest(prompt=prompt, max_tokens=8, cache_salt="b")).wait(60)
    changed = (*prompt[:3], prompt[3] + 1, *prompt[4:])
    assert (first.cached, again.cached, other.cached) == (0, 64, 0)
    assert engine.submit(EngineRequest(prompt=changed, max_tokens=8, cache_salt="a")).wait(60).cached == 0
    assert first.tokens.tolist() == again.tokens.tolist() == other.tokens.tolist()


@pytest.mark.long
def test_cancelling_frees_the_slot_and_does_not_change_neighbours(engine):
    long = EngineRequest(prompt=ids(6), max_tokens=100, rule="confidence")
    alone = text(engine.submit(long))
    beside = engine.submit(long)
    gone = [engine.submit(long) for _ in range(4)]  # two in slots, two still waiting
    for handle in gone:
        handle.cancel()
    assert [handle.wait(60).finish for handle in gone] == ["cancelled"] * 4
    assert text(engine.submit(EngineRequest(prompt=ids(1), max_tokens=4))) and text(beside) == alone
    assert engine.stats().running == 0


@pytest.mark.long
def test_the_queue_is_bounded_and_every_accepted_request_finishes(engine):
    taken, refused = [], 0
    for _ in range(30):
        try:
            taken.append(engine.submit(EngineRequest(prompt=ids(2), max_tokens=60, rule="confidence")))
        except RequestRejected as rejected:
            refused += rejected.retry_after >= 1
    assert refused and len(taken) >= SMALL.queue
    assert {handle.wait(60).finish for handle in taken} <= {"stop", "length"}


@pytest.mark.parametrize(
    "fields, word",
    [(dict(prompt=()), "prompt"), (dict(rule="nothing"), "rule"), (dict(logprobs=99), "logprobs"),
     (dict(logit_bias=dict.fromkeys(range(999), 1.0)), "logit_bias")],
)  # fmt: skip
def test_invalid_requests_are_refused_by_parameter(engine, fields, word):
    with pytest.raises(ValueError, match=word):
        engine.submit(EngineRequest(**{"prompt": ids(1), "max_tokens": 4} | fields))
    with pytest.raises(ContextLengthExceeded, match="128"):
        engine.submit(EngineRequest(prompt=ids(1), max_tokens=125))


@pytest.mark.long
def test_a_hole_is_filled_as_infill_fills_it(engine):
    request = EngineRequest(prompt=ids(1), suffix=ids(2), max_tokens=6, frames=True)
    final = engine.submit(request).wait(60)
    assert len(final.tokens) == 6 and final.finish == "stop"
    row = [list(request.prompt), Hole(6), list(request.suffix)]
    want = infill.fill(
        tiny(), [row], Request(sampler=rules.threshold(), seed=0, plan=Plan()), on_frame=lambda frames: None
    )
    assert final.tokens.tolist() == want.fillings[0][0].tolist()


@pytest.mark.long
def test_holes_of_different_lengths_share_compiled_programs(engine):
    """Lengths double and canvases come in a few sizes: an editor's next request compiles nothing."""
    hole = lambda before, behind, most: EngineRequest(
        prompt=ids(1, before), suffix=ids(2, behind), max_tokens=most
    )
    engine.submit(hole(9, 9, 8)).wait(60)
    compiled = compilations()
    for before, behind, most in ((30, 3, 8), (3, 20, 6), (17, 17, 7), (9, 9, 1), (9, 9, 3), (9, 9, 40)):
        final = engine.submit(hole(before, behind, most)).wait(60)
        assert 1 <= len(final.tokens) <= most
        assert final.finish == ("length" if len(final.tokens) == most else "stop")
    assert compiled == []


def test_draining_finishes_running_requests_and_rejects_new_ones():
    few = dataclasses.replace(SMALL, rules=("confidence",))
    engine = Engine(tiny(), few)
    engine.start()
    running = [
        engine.submit(EngineRequest(prompt=ids(i), max_tokens=50, rule="confidence")) for i in range(4)
    ]
    drained = threading.Thread(target=engine.drain)
    drained.start()
    while not engine.closing:
        pass
    with pytest.raises(RequestRejected, match="closing"):
        engine.submit(EngineRequest(prompt=ids(1), max_tokens=4))
    assert {handle.wait(60).finish for handle in running} <= {"stop", "length"}
    drained.join(10)
    engine.stop()


@pytest.mark.long
def test_draining_waits_for_a_request_between_queue_and_slot(engine_of_one_rule, monkeypatch):
    engine = engine_of_one_rule
    reached, go_on, start = threading.Event(), threading.Event(), engine._start_request

    def slow_start(*args):
        reached.set()
        go_on.wait(20)
        start(*args)

    monkeypatch.setattr(engine, "_start_request", slow_start)
    handle = engine.submit(EngineRequest(prompt=ids(1), max_tokens=4))
    assert reached.wait(20) and not engine.drain(timeout=0.2)
    go_on.set()
    assert engine.drain(timeout=60) and handle.finished and handle.latest.finish in ("stop", "length")


def test_a_request_that_fails_on_its_way_to_a_slot_ends_with_an_error(engine_of_one_rule, monkeypatch):
    engine = engine_of_one_rule
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_start_request", lambda *_: 1 / 0)
        final = engine.submit(EngineRequest(prompt=ids(1), max_tokens=4)).wait(60)
    assert final.finish == "error" and engine.stats().failed == 1
    assert len(text(engine.submit(EngineRequest(prompt=ids(1), max_tokens=4)))) == 4


def test_a_stopped_engine_that_never_started_ends_its_requests():
    engine = Engine(tiny(), dataclasses.replace(SMALL, rules=("confidence",)))
    handle = engine.submit(EngineRequest(prompt=ids(1), max_tokens=4))
    engine.stop()
    assert handle.wait(1).finish == "cancelled"


def test_stopping_ends_every_request():
    engine = Engine(tiny(), dataclasses.replace(SMALL, rules=("confidence",)))
    engine.start()
    handles = [
        engine.submit(EngineRequest(prompt=ids(i), max_tokens=100, rule="confidence")) for i in range(5)
    ]
    engine.stop()
    assert {handle.wait(1).finish for handle in handles} <= {"cancelled", "stop", "length"}
    with pytest.raises(RequestRejected, match="closing"):
        engine.submit(EngineRequest(prompt=ids(1), max_tokens=4))


def test_thinking_is_closed_and_the_answer_keeps_max_tokens(engine):
    effort = EFFORTS["low"]._replace(thinking=20, p=0.9)
    asked = [{"role": "user", "content": "x in y"}]
    want = sample(tiny(), asked, max_tokens=12, effort=effort, seed=2, temperature=1.0)
    prompt = tuple(tiny().tokenizer.render(asked, thinking=True))
    request = EngineRequest(
        prompt=prompt, max_tokens=12, thinking=20, seed=2, temperature=1.0, p=0.9, steps=4
    )
    handle = engine.submit(dataclasses.replace(request, frames=True))

    async def collect():
        return [s async for s in handle]

    *seen, final = asyncio.run(collect())
    for s in seen:  # tokens accepted behind the end of thinking were not final
        assert s.tokens[: s.final].tolist() == final.tokens[: s.final].tolist()
    thought, said = tiny().tokenizer.split_answer(final.tokens.tolist())
    assert (thought, said) == (want.thinking[0], want.text) and said


@pytest.mark.slow
def test_rows_move_between_buckets_while_they_decode():
    """Rows move to more and to fewer slots, to longer and to shorter ones, and their text does not change."""
    engine = Engine(tiny(), dataclasses.replace(SMALL, slots=5, rules=("confidence",)))
    engine.start()
    least, most = engine.buckets.capacity(50), engine.buckets.capacities[-1]
    for shape in (Bucket(1, least, 2), Bucket(1, most, 2)):
        engine._compiled.add(shape)
    compiled = compilations()
    sizes = (45, 100, 20, 9, 5)
    several = [
        EngineRequest(prompt=ids(i, 5), max_tokens=size, rule="confidence") for i, size in enumerate(sizes)
    ]
    alone = [text(engine.submit(request)) for request in several]
    slots = engine._slots
    assert slots is not None
    seen, handles = [], [engine.submit(several[0])]
    while handles[0].latest is None:
        seen.append(slots.bucket)
        time.sleep(0.001)
    handles += [engine.submit(request) for request in several[1:]]
    while not all(handle.finished for handle in handles):
        seen.append(slots.bucket)
        time.sleep(0.001)
    assert [text(handle) for handle in handles] == alone and compiled == []
    assert list(dict.fromkeys(seen))[-3:] == [(1, least, 2), (5, most, 2), (1, most, 2)]
    engine.stop()


@pytest.mark.long
def test_the_engine_serves_on_after_a_failure(engine, monkeypatch):
    broken = lambda *_: (_ for _ in ()).throw(RuntimeError("no device"))
    with monkeypatch.context() as patch:
        patch.setattr(engine._slots, "dispatch", broken)
        final = engine.submit(EngineRequest(prompt=ids(1), max_tokens=4)).wait(60)
    assert (final.finish, "no device" in final.message) == ("error", False)
    assert len(text(engine.submit(EngineRequest(prompt=ids(1), max_tokens=4)))) == 4


@pytest.mark.slow
def test_a_model_on_a_mesh_answers_as_on_one_device():
    lm, on = tiny(), mesh(data=2, tensor=2)
    spread = dataclasses.replace(
        lm, params=jax.device_put(lm.params, shardings(lm.params, lm.model.shardings, on))
    )
    said = []
    for model in (lm, spread):
        engine = Engine(model, dataclasses.replace(SMALL, slots=4, rules=("confidence",)))
        engine.start()
        said.append(
            [
                text(handle)
                for handle in [engine.submit(request) for request in requests(6, rule="confidence")]
            ]
        )
        assert engine._slots is not None
        split = {leaf.sharding.num_devices for leaf in jax.tree.leaves(engine._slots.state.cache)}
        assert split == ({4} if model is spread else {1})
        engine.stop()
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv, size, error",
    [("int8", 0.4, 0.1), pytest.param("fp8", 0.4, 0.3, marks=pytest.mark.slow),
     pytest.param("4bit", 0.2, 0.5, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_quantised_kv_cache_is_smaller_and_nearly_exact(engine, kv, size, error):
    small = Engine(tiny(), dataclasses.replace(SMALL, rules=RULES, kv=kv))
    small.start()
    assert (
        small.stats().kv_bytes < size * engine.stats().kv_bytes
    )  # 8 numbers per head take 32 bytes, 12 or 6
    request = EngineRequest(prompt=ids(3, 40), max_tokens=8, logprobs=0)
    near, exact = (e.submit(request).wait(60).logprobs for e in (small, engine))
    assert near is not None and exact is not None
    assert 0 < np.abs(near.tokens - exact.tokens).max() < error
    small.stop()
