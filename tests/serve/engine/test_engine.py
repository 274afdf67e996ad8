"""The laws of the engine: who waits, who shares a slot, and what a request's text may depend on."""

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
from mercury_jax.decode.request import Request
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.shapes import Shape
from mercury_jax.serve.engine.ticket import Ticket
from mercury_jax.serve.engine.types import Busy, Job, Settings, TooLong
from mercury_jax.serve.engine.waiting import LONG, PACE, Waiting, may_sit
from mercury_jax.sharding import mesh, shardings
from tests.tiny import tiny

RULES = ("confidence", "editing", "factor", "entropy_bound")
SMALL = Settings(slots=3, queue=6, context=128, programs="one", rules=RULES)


@pytest.fixture(scope="module")
def engine():
    engine = Engine(tiny(), SMALL)
    engine.start()
    yield engine
    engine.stop()


def ids(seed, count=9):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(30, 300, count))


def jobs(count, **fields):
    return [Job(prompt=ids(i, 5 + i), max_tokens=10 + i, seed=i, **fields) for i in range(count)]


def text(ticket):
    return ticket.wait(60).tokens.tolist()


def compilations():
    """A list that grows with every program that is compiled from now on."""
    found = []
    note = lambda name, *_, **__: found.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(note)
    return found


def test_nothing_that_a_job_asks_for_compiles(engine):
    """The first test: nobody has asked this engine for anything yet."""
    compiled = compilations()
    varied = [
        dict(rule=name, p=p) for name, p in (("factor", 0.5), ("threshold", 0.2), ("entropy_bound", None))
    ]
    varied += [
        dict(temperature=0.7, top_p=0.9),
        dict(bias={50: 1.0, 51: -3}),
        dict(steps=3),
        dict(repetition=1.3),
        dict(prompt=ids(4, 90)),
        dict(prompt=(*ids(4, 90), 44)),  # what it shares with the one before is there already
        dict(logprobs=1),
        dict(grammar=grammar.compile(tiny().tokenizer, grammar.Choice(["def", "return"]))),
    ]
    for fields in varied:
        assert text(engine.submit(Job(**{"prompt": ids(2, 11), "max_tokens": 9, "seed": 3} | fields)))
    assert engine.stats().cached_tokens and compiled == []


def test_an_answer_is_what_sample_gives(engine):
    for job in jobs(3):
        want = sample(tiny(), list(job.prompt), max_tokens=job.max_tokens, seed=job.seed, temperature=0.0)
        assert text(engine.submit(dataclasses.replace(job, temperature=0.0))) == want.tokens[0].tolist()


def test_an_answer_does_not_depend_on_what_runs_beside_it(engine):
    mixed = [
        *jobs(2, temperature=1.0),
        Job(prompt=ids(7), max_tokens=20, rule="confidence", presence=0.5),
        Job(prompt=ids(8), max_tokens=12, rule="editing", top_p=0.7, temperature=0.8, seed=4),
        Job(prompt=ids(9), max_tokens=9, bias={40: 5.0}, top_k=3, min_p=0.1, logprobs=2),
    ]
    alone = [text(engine.submit(job)) for job in mixed]
    together = [engine.submit(job) for job in mixed]
    assert [text(ticket) for ticket in together] == alone


def test_the_numbers_of_a_job_reach_its_row(engine):
    few = engine.submit(Job(prompt=ids(3), max_tokens=8, steps=1)).wait(60)
    many = engine.submit(Job(prompt=ids(3), max_tokens=8, rule="confidence")).wait(60)
    assert few.forwards == 1 and many.forwards == 8
    assert set(text(engine.submit(Job(prompt=ids(3), max_tokens=8, bias={77: 1e4})))) == {77}
    seen = engine.submit(Job(prompt=ids(3), max_tokens=8, logprobs=2)).wait(60).logprobs
    assert seen.top.shape == (8, 2) and np.all(seen.top[:, 0] >= seen.tokens - 1e-6)


def test_what_is_final_never_changes_and_the_last_snapshot_is_all(engine):
    ticket = engine.submit(Job(prompt=ids(4), max_tokens=30, rule="confidence", frames=True))

    async def collect():
        return [s async for s in ticket]

    seen = asyncio.run(collect())
    last = seen[-1]
    assert last.finish in ("stop", "length") and last.final == len(last.tokens) == 30
    assert [s.forwards for s in seen[:-1]] == list(range(1, 31))
    for s in seen:
        assert s.tokens[: s.final].tolist() == last.tokens[: s.final].tolist()
        assert s.settled[: s.final].all() and len(s.tokens) == len(s.settled) == len(s.confidence)


def test_a_prompt_is_encoded_once_and_only_its_sender_shares_it(engine):
    prompt = ids(5, 90)  # longer than two canvases: it has encoding passes of its own
    first = engine.submit(Job(prompt=prompt, max_tokens=8, salt="a")).wait(60)
    again = engine.submit(Job(prompt=prompt, max_tokens=8, salt="a")).wait(60)
    other = engine.submit(Job(prompt=prompt, max_tokens=8, salt="b")).wait(60)
    changed = (*prompt[:3], prompt[3] + 1, *prompt[4:])
    assert (first.cached, again.cached, other.cached) == (0, 64, 0)
    assert engine.submit(Job(prompt=changed, max_tokens=8, salt="a")).wait(60).cached == 0
    assert first.tokens.tolist() == again.tokens.tolist() == other.tokens.tolist()


def test_a_job_that_is_cancelled_leaves_its_seat_and_its_neighbours_alone(engine):
    long = Job(prompt=ids(6), max_tokens=100, rule="confidence")
    alone = text(engine.submit(long))
    beside = engine.submit(long)
    gone = [engine.submit(long) for _ in range(4)]  # two in slots, two still waiting
    for ticket in gone:
        ticket.cancel()
    assert [ticket.wait(60).finish for ticket in gone] == ["cancelled"] * 4
    assert text(engine.submit(Job(prompt=ids(1), max_tokens=4))) and text(beside) == alone
    assert engine.stats().running == 0


def test_the_queue_is_bounded_and_nothing_taken_is_lost(engine):
    taken, refused = [], 0
    for _ in range(30):
        try:
            taken.append(engine.submit(Job(prompt=ids(2), max_tokens=60, rule="confidence")))
        except Busy as busy:
            refused += busy.retry_after >= 1
    assert refused and len(taken) >= SMALL.queue
    assert {ticket.wait(60).finish for ticket in taken} <= {"stop", "length"}


def test_short_jobs_overtake_long_ones_and_none_waits_for_ever():
    queue = Waiting(9, lambda: None)
    make = lambda size, born: (
        ticket := Ticket(Job(prompt=(1,), max_tokens=size), lambda: None),
        setattr(ticket, "born", born),
    )[0]
    long, short, late = make(5000, 0.0), make(10, 1.0), make(10, 5000 / PACE + 1)
    for ticket in (long, late, short):
        queue.add(ticket)
    assert [queue.take(lambda _: True) for _ in range(3)] == [short, long, late]


def test_long_jobs_leave_a_seat_to_the_short():
    long, short = Job(prompt=(1,), max_tokens=LONG), Job(prompt=(1,), max_tokens=LONG - 2)
    assert [may_sit(long, [long] * n, 8) for n in (0, 5, 6)] == [True, True, False]
    assert may_sit(short, [long] * 6, 8) and may_sit(long, [short] * 7, 8)
    assert may_sit(long, [], 1) and may_sit(long, [], 2)


@pytest.mark.parametrize(
    "fields, word",
    [
        (dict(prompt=()), "prompt"),
        (dict(rule="nothing"), "rule"),
        (dict(logprobs=99), "logprobs"),
        (dict(bias=dict.fromkeys(range(999), 1.0)), "bias"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_in_words(engine, fields, word):
    with pytest.raises(ValueError, match=word):
        engine.submit(Job(**{"prompt": ids(1), "max_tokens": 4} | fields))
    with pytest.raises(TooLong, match="128"):
        engine.submit(Job(prompt=ids(1), max_tokens=125))


def test_holes_are_filled_between_both_texts(engine):
    job = Job(prompt=ids(1), suffix=ids(2), max_tokens=6, frames=True)
    final = engine.submit(job).wait(60)
    assert len(final.tokens) == 6 and final.finish == "stop"
    row = [list(job.prompt), Hole(6), list(job.suffix)]
    want = infill.fill(
        tiny(), [row], Request(sampler=rules.threshold(), plan=Plan()), on_frame=lambda frames: None
    )
    assert final.tokens.tolist() == want.fillings[0][0].tolist()


def test_holes_of_many_shapes_share_a_program(engine):
    """Lengths double, and texts and canvases take wide steps: an editor's next request compiles nothing."""
    hole = lambda before, behind, most: Job(prompt=ids(1, before), suffix=ids(2, behind), max_tokens=most)
    engine.submit(hole(9, 9, 8)).wait(60)
    compiled = compilations()
    for before, behind, most in ((30, 3, 8), (3, 20, 6), (17, 17, 7), (9, 9, 1), (9, 9, 3), (9, 9, 40)):
        final = engine.submit(hole(before, behind, most)).wait(60)
        assert 1 <= len(final.tokens) <= most
        assert final.finish == ("length" if len(final.tokens) == most else "stop")
    assert compiled == []


def test_draining_ends_what_runs_and_takes_nothing_new():
    few = dataclasses.replace(SMALL, rules=("confidence",))
    engine = Engine(tiny(), few)
    engine.start()
    running = [engine.submit(Job(prompt=ids(i), max_tokens=50, rule="confidence")) for i in range(4)]
    drained = threading.Thread(target=engine.drain)
    drained.start()
    while not engine.closing:
        pass
    with pytest.raises(Busy, match="closing"):
        engine.submit(Job(prompt=ids(1), max_tokens=4))
    assert {ticket.wait(60).finish for ticket in running} <= {"stop", "length"}
    drained.join(10)
    engine.stop()


def test_stopping_ends_every_ticket():
    engine = Engine(tiny(), dataclasses.replace(SMALL, rules=("confidence",)))
    engine.start()
    tickets = [engine.submit(Job(prompt=ids(i), max_tokens=100, rule="confidence")) for i in range(5)]
    engine.stop()
    assert {ticket.wait(1).finish for ticket in tickets} <= {"cancelled", "stop", "length"}
    with pytest.raises(Busy, match="closing"):
        engine.submit(Job(prompt=ids(1), max_tokens=4))


def test_thinking_is_closed_and_the_answer_keeps_its_room(engine):
    effort = EFFORTS["low"]._replace(thinking=20, p=0.9)
    asked = [{"role": "user", "content": "x in y"}]
    want = sample(tiny(), asked, max_tokens=12, effort=effort, seed=2, temperature=1.0)
    prompt = tuple(tiny().tokenizer.render(asked, thinking=True))
    job = Job(prompt=prompt, max_tokens=12, thinking=20, seed=2, temperature=1.0, p=0.9, steps=4)
    ticket = engine.submit(dataclasses.replace(job, frames=True))

    async def collect():
        return [s async for s in ticket]

    *seen, final = asyncio.run(collect())
    for s in seen:  # what was settled behind the close of the thinking was not final
        assert s.tokens[: s.final].tolist() == final.tokens[: s.final].tolist()
    thought, said = tiny().tokenizer.split_answer(final.tokens.tolist())
    assert (thought, said) == (want.thinking[0], want.text) and said


def test_the_slots_change_their_shape_while_rows_decode():
    """Rows move to more and to fewer seats, to longer and to shorter slots, and say the same."""
    engine = Engine(tiny(), dataclasses.replace(SMALL, slots=5, rules=("confidence",)))
    engine.start()
    for shape in (Shape(1, 64, 2), Shape(1, engine.plan.slots[-1], 2)):
        engine._programs.add(shape)
    compiled = compilations()
    sizes = (45, 100, 20, 9, 5)
    several = [Job(prompt=ids(i, 5), max_tokens=size, rule="confidence") for i, size in enumerate(sizes)]
    alone = [text(engine.submit(job)) for job in several]
    slots = engine._slots
    assert slots is not None
    seen, tickets = [], [engine.submit(several[0])]
    while tickets[0].latest is None:
        seen.append(slots.shape)
        time.sleep(0.001)
    tickets += [engine.submit(job) for job in several[1:]]
    while not all(ticket.over for ticket in tickets):
        seen.append(slots.shape)
        time.sleep(0.001)
    assert [text(ticket) for ticket in tickets] == alone and compiled == []
    most = engine.plan.slots[-1]
    assert list(dict.fromkeys(seen))[-3:] == [(1, 64, 2), (5, most, 2), (1, most, 2)]
    engine.stop()


def test_one_that_fails_in_the_engine_takes_nobody_with_it_for_good(engine, monkeypatch):
    broken = lambda *_: (_ for _ in ()).throw(RuntimeError("no device"))
    with monkeypatch.context() as patch:
        patch.setattr(engine._slots, "dispatch", broken)
        final = engine.submit(Job(prompt=ids(1), max_tokens=4)).wait(60)
    assert (final.finish, "no device" in final.message) == ("error", False)
    assert len(text(engine.submit(Job(prompt=ids(1), max_tokens=4)))) == 4


def test_one_model_over_a_mesh_says_what_it_says_on_one_device():
    lm, on = tiny(), mesh(data=2, tensor=2)
    spread = dataclasses.replace(
        lm, params=jax.device_put(lm.params, shardings(lm.params, lm.model.shardings, on))
    )
    said = []
    for model in (lm, spread):
        engine = Engine(model, dataclasses.replace(SMALL, slots=4, rules=("confidence",)))
        engine.start()
        said.append([text(ticket) for ticket in [engine.submit(job) for job in jobs(6, rule="confidence")]])
        assert engine._slots is not None
        split = {leaf.sharding.num_devices for leaf in jax.tree.leaves(engine._slots.state.cache)}
        assert split == ({4} if model is spread else {1})
        engine.stop()
    assert said[0] == said[1]


@pytest.mark.parametrize("kind, room, most", [("int8", 0.4, 0.1), ("4bit", 0.2, 0.5)])
def test_keys_in_few_bits_take_less_room_and_say_nearly_the_same(engine, kind, room, most):
    small = Engine(tiny(), dataclasses.replace(SMALL, rules=RULES, kv=kind))
    small.start()
    assert small.stats().kv_bytes < room * engine.stats().kv_bytes  # 8 numbers a head: 32 bytes, 12, 6
    job = Job(prompt=ids(3, 40), max_tokens=8, logprobs=0)
    near, exact = (e.submit(job).wait(60).logprobs.tokens for e in (small, engine))
    assert 0 < np.abs(near - exact).max() < most
    small.stop()
