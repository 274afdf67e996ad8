"""Laws of cache reuse in bidirectional models: which positions a pass computes, and that rows do not pay for others."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.bench.timing import endless
from mercury_jax.decode import cache_refresh as caches
from mercury_jax.models.cache import with_kv_kind
from mercury_jax.types import Pass
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
    assert ran[4, PROMPTS[0]][0] == sorted(span for spans_of, _ in alone for span in spans_of)
    assert ran[4, PROMPTS[0]][1] == [n for _, forwards in alone for n in forwards]


@pytest.mark.parametrize(
    "refresh",
    [
        mj.Refresh.prefix(),
        mj.Refresh.vicinity(2, every=3),
        caches.dkv_decode(4),
        caches.suffix_pruning(8, reuse=2),
    ],
)
def test_the_numbers_of_a_row_do_not_depend_on_its_neighbours_bit_for_bit(refresh):
    first, other = (tiny().tokenizer.encode(p) for p in PROMPTS[:2])
    run = lambda ids: spans(refresh, [first, ids], rule=mj.rules.threshold(0.2), logprobs=0)[0]
    a, b = run(other), run(other[::-1])  # of the same length: the same program
    np.testing.assert_array_equal(a.tokens[0], b.tokens[0])
    np.testing.assert_array_equal(a.logprobs[0].tokens, b.logprobs[0].tokens)


def test_shifted_logits_find_the_token_before_a_part_of_any_width():
    """One layer's keys know nothing of their context, so that a prefix cache is exact."""
    with jax.enable_x64(True):
        lm = tiny("bidirectional", layers=1, dtype="float64")
        model = models.build(dataclasses.replace(lm.model.config, alignment="shifted"))
        lm = dataclasses.replace(lm, model=model)
        for tokens in (20, 60):  # after a prompt of 4 a part of the canvas, and nearly all of it
            run = lambda refresh, tokens=tokens: mj.sample(
                lm, [[270, 70, 80, 90]], max_tokens=tokens, sampler=mj.rules.confidence(),
                plan=mj.Plan(block=20, steps=4, refresh=refresh),
            )  # fmt: skip
            assert run(mj.Refresh.prefix()).tokens[0].tolist() == run(None).tokens[0].tolist()


# --- policies


def prefix_of_masks(lm, prompt, length):
    """The canvas before the first pass, a mask for each token of the answer, and the length of the prompt."""
    ids = lm.tokenizer.encode(prompt)
    return np.array([*ids, *[lm.tokenizer.mask] * (length - len(ids))]), len(ids)


def most_confident(lm, hidden, canvas, open_masks):
    """Puts the most confident token into one of the open masks, as LLaDA's low_confidence remasking does."""
    logits = np.array(lm.model.head(lm.params, hidden)[0], np.float64)
    logits[:, list(lm.corruption.forbidden)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    best = np.where(open_masks, (p.max(-1) / p.sum(-1)), -1.0).argmax()
    canvas[best] = logits[best].argmax()
    return canvas


def sampled(lm, refresh, prompt="def x", tokens=16, block=8, **more):
    lm = endless(lm)
    plan = mj.Plan(block=block, refresh=refresh)
    return mj.sample(lm, prompt, max_tokens=tokens, plan=plan, sampler=mj.rules.confidence(), **more)


def test_dkv_decode_makes_the_tokens_of_the_published_loop():
    """The reference: after two full steps of a block, all but what was decided two steps ago; every 4th step all."""
    with jax.enable_x64(True):
        lm = endless(tiny("bidirectional", dtype="float64"))
        canvas, start = prefix_of_masks(lm, "def x", len(lm.tokenizer.encode("def x")) + 16)
        width, cache = len(canvas), lm.model.empty_cache(1, len(canvas))
        store = np.zeros((1, width, lm.model.config.width))
        for block in range(start, width, 8):
            decided = []  # after each step
            for step in range(8):
                cached = decided[step - 2] if step >= 2 and step % 4 else np.zeros(width, bool)
                at = np.flatnonzero(~cached)[None]
                one, false = jnp.array([at.size]), jnp.array([False])
                given = Pass(canvas[at], cache, jnp.array([0]), one, jnp.array([width]), false, positions=at)
                hidden, cache = lm.model.forward(lm.params, given)
                store[:, at[0]] = hidden
                slots = np.arange(width)
                here = (canvas == lm.tokenizer.mask) & (slots >= block) & (slots < block + 8)
                canvas = most_confident(lm, jnp.asarray(store), canvas, here)
                decided.append(canvas != lm.tokenizer.mask)
        got = sampled(lm, caches.dkv_decode(every=4))
        assert got.tokens[0].tolist() == canvas[start:].tolist() and got.forwards[0] == 16
        assert got.tokens[0].tolist() != sampled(lm, None).tokens[0].tolist()


def test_suffix_pruning_decodes_a_block_as_if_the_row_ended_behind_its_window():
    """The reference's sampler with a density of 1 keeps a window of the suffix and nothing behind it."""
    with jax.enable_x64(True):
        lm = tiny("bidirectional", dtype="float64")
        found = lambda refresh, tokens: sampled(lm, refresh, tokens=tokens, logprobs=0).logprobs[0].tokens
        kept = lambda window, **more: caches.suffix_pruning(window=window, sigma=0.0, scale=3.0, **more)
        short, whole = found(None, 16), found(None, 24)
        np.testing.assert_allclose(found(kept(8), 24)[:8], short[:8], rtol=1e-9)
        np.testing.assert_allclose(found(kept(24), 24), whole, rtol=1e-9)
        assert np.abs(short[:8] - whole[:8]).max() > 0.01
        for reuse, refresh in ((1, mj.Refresh.prefix()), (2, mj.Refresh.dual())):
            np.testing.assert_allclose(found(kept(24, reuse=reuse), 24), found(refresh, 24), rtol=1e-9)


@pytest.mark.parametrize(
    "policy",
    [caches.dkv_decode(every=1), caches.dllm_cache(prompt_every=1, answer_every=1)],
    ids=lambda p: p.name,
)
def test_a_policy_that_computes_everything_is_plain_decoding(policy):
    with jax.enable_x64(True):
        lm = tiny("bidirectional", dtype="float64")
        assert sampled(lm, policy, PROMPTS).texts == sampled(lm, None, PROMPTS).texts


def counts(policy, prompt="def x"):
    """Positions that each pass computes, one token decided in each, and the length of prompt and row."""
    start = len(tiny().tokenizer.encode(prompt))
    out, ran, _ = spans(policy, prompt)
    assert len(ran) == out.forwards[0] == 24
    return [used for _, used in ran], start, start + 24


def test_dllm_cache_computes_prompt_and_answer_at_their_intervals_and_a_share_between():
    used, start, end = counts(caches.dllm_cache(prompt_every=9, answer_every=4, ratio=0.25), LONG)
    for step, n in enumerate(used):
        answer = 24 if step % 4 == 0 else 24 // 4
        assert n == answer + (start if step % 9 == 0 else 0), step


def test_elastic_cache_computes_everything_when_keys_moved_and_only_then():
    still, start, end = counts(caches.elastic_cache(gamma=0.0, window=8))
    # The masks of the window, the token that was just decided, and the tracked one before them.
    assert still[0] == end and all(n <= 8 + 2 for n in still[1:])
    moving, *_ = counts(caches.elastic_cache(gamma=1.0, window=8))
    assert (
        moving[0] == end
        and end in moving[1:]
        and not any(a == b == end for a, b in itertools.pairwise(moving))
    )


def test_dkv_greedy_computes_what_was_decided_what_comes_next_and_masks_near_it():
    used, _, end = counts(caches.dkv_greedy(every=3, window=2))
    within = [step % 8 % 3 for step in range(24)]
    assert all((n == end) == (at == 0) for n, at in zip(used, within, strict=True))
    assert all(2 <= n <= 1 + 1 + 2 + 1 for n, at in zip(used, within, strict=True) if at)


def test_every_policy_is_registered_with_its_source_and_what_it_leaves_out():
    assert set(caches.ALL) == {"dkv_decode", "dkv_greedy", "dllm_cache", "elastic_cache", "suffix_pruning"}
    for name, make in caches.ALL.items():
        assert make.source and "one number for all rows" in (make.__doc__ or ""), name
        assert make() == make() and hash(make()) == hash(make())  # equal policies share a program


def test_a_policy_of_a_user_sees_hidden_states_and_how_far_keys_moved():
    @caches.cache_policy(init=lambda width: jnp.zeros((width,)), drift=True)
    def first_moved(key, view, memory):
        seen = jnp.where(view.age == 1, view.key_drift + view.value_drift, 0.0)
        hidden = jnp.abs(view.hidden).sum(-1) > 0
        due = view.changed | view.masked & (view.confidence < 2.0) | ~hidden
        return caches.Positions(due & (memory >= 0), view.exists), memory + seen

    lm = tiny("bidirectional")
    out = sampled(lm, first_moved(), history=False)
    assert out.lengths[0] == 16 and "first_moved" not in caches.ALL


def wrong(result):
    return caches.cache_policy(lambda key, view, memory: result(view))()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mj.Plan(refresh=mj.rules.threshold(0.9)), "refresh is .*mj.cache_refresh.dkv_decode"),
        (
            lambda: caches.dkv_decode(every=0),
            r"dkv_decode\(every=\) is 0; allowed: a whole number, 1 or more",
        ),
        (lambda: caches.dkv_decode(every=[1, 2]), "one number: it is static"),
        (lambda: caches.dkv_decode(evry=1), "evry.*every is the nearest"),
        (lambda: sampled(tiny(), caches.dkv_decode()), "the cache of a causal_encoder model is exact"),
        (lambda: sampled(tiny("bidirectional"), caches.dkv_decode(), guidance=1.0), "guidance is 1.0"),
        (lambda: sampled(recorded("shifted")[0], caches.dkv_decode()), "logits are shifted"),
        (lambda: sampled(tiny("bidirectional"), wrong(lambda v: v.masked)), r"two bool\[64\]"),
        (
            lambda: sampled(tiny("bidirectional"), wrong(lambda v: (caches.Positions(v.age, v.masked), ()))),
            r"two bool\[64\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_drift_of_quantised_keys_is_refused():
    lm = tiny("bidirectional")
    lm = dataclasses.replace(lm, model=with_kv_kind(lm.model, "int8"))
    with pytest.raises(ValueError, match="those of this model are quantised"):
        sampled(lm, caches.elastic_cache())
