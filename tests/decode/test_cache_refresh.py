"""Laws of cache reuse in bidirectional models: which positions a pass computes, and that rows do not pay for others."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from tests.tiny import tiny

LONG = "for value in range(count):\n    print(total)\n" * 3
PROMPTS = ["def x", LONG, "return y if x", "z in range"]


@functools.cache
def recorded(alignment: str = "same_position"):
    """A tiny bidirectional model, and the list of its passes as (start [b], used [b], positions of the program)."""
    lm, passes = tiny("bidirectional"), []
    config = dataclasses.replace(lm.model.config, alignment=alignment)
    model = models.build(config)

    def forward(params, given, **more):
        note = lambda start, used: passes.append((start.tolist(), used.tolist(), given.tokens.shape[1]))
        jax.debug.callback(note, given.start, given.used)
        return model.forward(params, given, **more)

    return dataclasses.replace(lm, model=model._replace(forward=forward)), passes


def spans(refresh, prompts, alignment="same_position", rule=None, **more):
    """The output, and (start, used) of every pass of every row, in the order of the program."""
    lm, passes = recorded(alignment)
    plan = mj.Plan(block=8, refresh=refresh)
    passes.clear()
    out = mj.sample(lm, prompts, max_tokens=24, plan=plan, sampler=rule or mj.rules.confidence(), **more)
    jax.effects_barrier()
    ran = [(s, u) for start, used, _ in passes for s, u in zip(start, used, strict=True) if u]
    return out, ran, list(passes)


@pytest.mark.parametrize("prompt", ["def x", LONG])
def test_a_prefix_cache_recomputes_the_block_and_what_follows_and_nothing_of_the_prompt(prompt):
    start = len(tiny().tokenizer.encode(prompt))
    out, ran, _ = spans(mj.Refresh.prefix(), prompt)
    end = start + 24
    blocks = [start, start + 8, start + 16][: -(-int(out.forwards[0]) // 8)]
    want = [(0, end) if step == 0 else (at, end - at) for at in blocks for step in range(8)]
    assert ran == want[: len(ran)] and len(ran) == out.forwards[0]


def test_a_dual_cache_recomputes_the_block_alone():
    start = len(tiny().tokenizer.encode(LONG))
    out, ran, _ = spans(mj.Refresh.dual(every=4), LONG)
    want = [
        (0, start + 24) if step % 4 == 0 else (at, 8)
        for at in range(start, start + 24, 8)
        for step in range(8)
    ]
    assert ran == want[: len(ran)] and len(ran) == out.forwards[0]


def test_a_row_that_recomputes_its_canvas_does_not_make_the_others_do_so():
    ran = {}
    for prompts in (PROMPTS, *([p] for p in PROMPTS)):
        out, spans_of, passes = spans(mj.Refresh.dual(), prompts, rule=mj.rules.threshold(0.2))
        ran[len(prompts), prompts[0]] = sorted(spans_of), out.forwards.tolist()
        wide = sum(width == max(w for *_, w in passes) for *_, width in passes)
        assert wide <= sum(
            used > 8 for _, used in spans_of
        )  # one wide pass for each that is due, and no others
    alone = [ran[1, p] for p in PROMPTS]
    assert ran[4, PROMPTS[0]][0] == sorted(sum((spans_of for spans_of, _ in alone), []))
    assert ran[4, PROMPTS[0]][1] == [n for _, forwards in alone for n in forwards]


@pytest.mark.parametrize("refresh", [mj.Refresh.dual(), mj.Refresh.prefix(), mj.Refresh.vicinity(2, every=3)])
def test_the_numbers_of_a_row_do_not_depend_on_its_neighbours_bit_for_bit(refresh):
    first, other = (tiny().tokenizer.encode(p) for p in PROMPTS[:2])
    run = lambda ids: spans(refresh, [first, ids], rule=mj.rules.threshold(0.2), logprobs=0)[0]
    a, b = run(other), run(other[::-1])  # of the same length: the same program
    np.testing.assert_array_equal(a.tokens[0], b.tokens[0])
    np.testing.assert_array_equal(a.logprobs[0].tokens, b.logprobs[0].tokens)


def test_shifted_logits_find_the_token_before_a_part_of_any_width():
    with jax.enable_x64(True):
        lm, _ = recorded("shifted")
        run = lambda prompts, refresh: mj.sample(
            lm,
            prompts,
            max_tokens=24,
            sampler=mj.rules.threshold(0.2),
            plan=mj.Plan(block=8, refresh=refresh),
        )
        together = run(PROMPTS, mj.Refresh.prefix())
        for i, prompt in enumerate(PROMPTS):
            assert run(prompt, mj.Refresh.prefix()).texts[0] == together.texts[i]
