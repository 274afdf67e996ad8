"""Laws of cache reuse within a canvas: which positions a pass computes, and that rows do not pay for others."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.bench.timing import endless
from mercury_jax.decode.methods import cache_refresh as caches, key_reuse
from mercury_jax.models.cache import with_kv_kind
from mercury_jax.types import Pass
from tests.marks import slow_except
from tests.tiny import tiny

LONG = "for value in range(count):\n    print(total)\n" * 3
PROMPTS = ["def x", LONG, "return y if x", "z in range"]
PASSES = 64  # that the log of a row holds


class LoggedCache(NamedTuple):
    """A cache that also logs the passes of each row."""

    inner: Any
    log: Any  # int [B, PASSES, 4]: first position, number of positions, positions and rows of the program
    passes: Any  # int [B]


@functools.cache
def logged(alignment: str = "same_position", pattern: str = "bidirectional"):
    """A tiny model whose cache logs every pass."""
    lm = tiny(pattern)
    model = models.build(dataclasses.replace(lm.model.config, alignment=alignment))

    def empty(rows, slots):
        return LoggedCache(
            model.empty_cache(rows, slots), jnp.zeros((rows, PASSES, 4), int), jnp.zeros((rows,), int)
        )

    def logged_forward(params, given, **more):
        inner, log, passes = given.cache
        hidden, inner = model.forward(params, given._replace(cache=inner), **more)
        rows, width = given.tokens.shape
        same = lambda n: jnp.full_like(given.used, n)
        entry = jnp.stack([given.start, given.used, same(width), same(rows)], axis=-1)
        at = jnp.where(given.used > 0, passes, PASSES)  # a row that does not take part logs nothing
        log = log.at[jnp.arange(len(at)), at].set(entry.astype(log.dtype), mode="drop")
        return hidden, LoggedCache(inner, log, passes + (given.used > 0))

    return dataclasses.replace(lm, model=model._replace(forward=logged_forward, empty_cache=empty))


def spans(refresh, prompts, rule=None, pattern="bidirectional", **more):
    """The output, and (first, count, positions and rows of the program) of every pass of each row."""
    plan = mj.Plan(block=8, refresh=refresh)
    out = mj.sample(
        logged(pattern=pattern),
        prompts,
        max_tokens=24,
        plan=plan,
        sampler=rule or mj.rules.confidence(),
        keep=True,
        **more,
    )
    cache = jax.device_get(out.state.state.cache)
    rows = zip(cache.log.tolist(), cache.passes.tolist(), strict=True)
    return out, [log[:n] for log, n in rows][: len(out.texts)]


@pytest.mark.long
@pytest.mark.parametrize("prompt", slow_except(["def x", LONG], LONG))
def test_a_prefix_cache_recomputes_the_block_and_what_follows_and_nothing_of_the_prompt(prompt):
    start = len(tiny().tokenizer.encode(prompt))
    out, [log] = spans(mj.Refresh.prefix(), prompt)
    ran, end = [(first, count) for first, count, *_ in log], start + 24
    blocks = [start, start + 8, start + 16][: -(-int(out.forwards[0]) // 8)]
    want = [(0, end) if step == 0 else (at, end - at) for at in blocks for step in range(8)]
    assert ran == want[: len(ran)] and len(ran) == out.forwards[0]


def test_a_dual_cache_recomputes_the_block_alone():
    start = len(tiny().tokenizer.encode(LONG))
    out, [log] = spans(mj.Refresh.dual(every=4), LONG)
    ran = [(first, count) for first, count, *_ in log]
    want = [
        (0, start + 24) if step % 4 == 0 else (at, 8)
        for at in range(start, start + 24, 8)
        for step in range(8)
    ]
    assert ran == want[: len(ran)] and len(ran) == out.forwards[0]


@pytest.fixture
def rows_apart(monkeypatch):
    """Groups of one row of the tiny model; programs are found by their config, so those of other groups go."""
    jax.clear_caches()
    monkeypatch.setattr(key_reuse, "TOKENS", 64)
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_a_row_that_recomputes_its_canvas_does_not_make_the_others_do_so(rows_apart):
    run = lambda prompts: spans(mj.Refresh.dual(), prompts, rule=mj.rules.threshold(0.2))
    out, together = run(PROMPTS)
    steps = [[count > 8 for _, count, *_ in log] for log in together]
    assert len({tuple(x) for x in steps}) > 1  # the rows leave lockstep
    for prompt, log, forwards in zip(PROMPTS, together, out.forwards, strict=True):
        assert all(width == 8 if count <= 8 else rows == 1 for _, count, width, rows in log)
        assert len(log) == forwards
        assert [entry[:2] for entry in log] == [entry[:2] for entry in run(prompt)[1][0]]


@pytest.mark.long
@pytest.mark.parametrize(
    "refresh",
    [
        pytest.param(mj.Refresh.prefix(), marks=pytest.mark.slow),
        pytest.param(mj.Refresh.vicinity(2, every=3), marks=pytest.mark.slow),
        caches.dkv_decode(4),
        pytest.param(caches.suffix_pruning(8, reuse=2), marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_a_row_do_not_depend_on_its_neighbours_bit_for_bit(refresh):
    first, other = (tiny().tokenizer.encode(p) for p in PROMPTS[:2])
    run = lambda ids: spans(refresh, [first, ids], rule=mj.rules.threshold(0.2), logprobs=0)[0]
    a, b = run(other), run(other[::-1])  # of the same length: the same program
    np.testing.assert_array_equal(a.tokens[0], b.tokens[0])
    np.testing.assert_array_equal(a.logprobs[0].tokens, b.logprobs[0].tokens)


@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "prompt"),  # prompts to which this cache gives other tokens than none
    slow_except(
        [("bidirectional", "def x"), ("causal_encoder", "return y if x"), ("block_causal", "def x")],
        ("block_causal", "def x"),
    ),
)
def test_dkv_decode_makes_the_tokens_of_the_published_loop(pattern, prompt):
    """The reference: after two full steps of a block, all but what was decided two steps ago; every 4th step all."""
    with jax.enable_x64(True):
        lm = endless(tiny(pattern, dtype="float64"))
        text, start = prefix_of_masks(lm, prompt, len(lm.tokenizer.encode(prompt)) + 16)
        cache, forward = lm.model.empty_cache(1, len(text)), jax.jit(lm.model.forward)
        one = lambda n: jnp.array([n])

        def run(at, first, end, encoding, cache):
            few, at = at.size, np.pad(at, (0, end - first - at.size)) + first
            given = Pass(
                text[at][None], cache, one(first), one(few), one(end), one(encoding), positions=at[None]
            )
            return forward(lm.params, given)

        passes, encoded, block = 0, 0, start
        while block < len(text):
            ready = int(lm.model.encodable(one(block))[0])
            if ready > encoded:  # what precedes the block, where its keys depend on nothing that follows
                _, cache = run(np.arange(ready - encoded), encoded, ready, True, cache)
                encoded = ready
            aligned = (block // 8 + 1) * 8 if pattern == "block_causal" else block + 8
            stop = min(aligned, len(text))
            end = len(text) if pattern == "bidirectional" else stop
            store, decided = np.zeros((1, end - encoded, lm.model.config.width)), []  # after each step
            for step in range(stop - block):
                cached = decided[step - 2] if step >= 2 and step % 4 else np.zeros(end - encoded, bool)
                at = np.flatnonzero(~cached)
                hidden, cache = run(at, encoded, end, False, cache)
                store[:, at] = hidden[:, : at.size]
                canvas, slots = text[encoded:end], np.arange(encoded, end)
                here = (canvas == lm.tokenizer.mask) & (slots >= block) & (slots < stop)
                text[encoded:end] = most_confident(lm, jnp.asarray(store), canvas, here)
                decided.append(text[encoded:end] != lm.tokenizer.mask)
                passes += 1
            block = stop
        got = sampled(lm, caches.dkv_decode(every=4), prompt)
        assert got.tokens[0].tolist() == text[start:].tolist() and got.forwards[0] == passes
        assert got.tokens[0].tolist() != sampled(lm, None, prompt).tokens[0].tolist()


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["causal_encoder", "block_causal"])
def test_a_canvas_computes_what_is_undecided_and_what_was_just_decided(pattern):
    ids = tiny().tokenizer.encode(LONG)
    ids = ids[: len(ids) // 8 * 8]  # whole blocks
    out, [log] = spans(caches.dkv_decode(every=99), [ids], pattern=pattern)
    assert out.forwards[0] == 24
    denoising = [(first, count) for first, count, *_ in log if first >= len(ids)]
    block = [8, 8, 7, 6, 5, 4, 3, 2]
    want = [(at, n) for at in range(len(ids), len(ids) + 24, 8) for n in (*block, 8)][:-1]  # and encodes it
    assert denoising == want


@pytest.mark.slow
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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "pattern", slow_except(["bidirectional", "causal_encoder", "block_causal"], "block_causal")
)
@pytest.mark.parametrize(
    "policy",
    [caches.dkv_decode(every=1), caches.dllm_cache(prompt_every=1, answer_every=1)],
    ids=lambda p: p.name,
)
def test_a_policy_that_computes_everything_is_plain_decoding(policy, pattern):
    with jax.enable_x64(True):
        lm = tiny(pattern, dtype="float64")
        assert sampled(lm, policy, PROMPTS).texts == sampled(lm, None, PROMPTS).texts


CALLS = {
    "drawn": lambda lm, plan: mj.sample(lm, PROMPTS, max_tokens=16, temperature=1.0, seed=3, plan=plan).texts,
    "n": lambda lm, plan: mj.sample(lm, PROMPTS[:2], n=2, temperature=1.0, max_tokens=12, plan=plan).texts,
    "infill": lambda lm, plan: mj.infill(lm, ["def x", mj.Hole(9), "return y"], plan=plan).texts,
    "edit": lambda lm, plan: mj.edit(lm, "def x return y", spans=[(1, 4)], plan=plan).texts,
    "stream": lambda lm, plan: [
        out.text for out in mj.stream(lm, PROMPTS[0], max_tokens=16, plan=plan) if out.done
    ],
    "resumed": lambda lm, plan: (
        mj.sample(lm, None, state=mj.sample(lm, PROMPTS, max_tokens=16, passes=3, plan=plan).state).texts
    ),
    "session": lambda lm, plan: (
        mj.sample(
            lm,
            "if x",
            state=mj.sample(lm, PROMPTS[0], max_tokens=8, keep=True, plan=plan).state,
            max_tokens=8,
        ).texts
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["bidirectional", "causal_encoder", "block_causal"])
@pytest.mark.parametrize("call", CALLS)
def test_a_policy_that_computes_everything_changes_no_public_call(call, pattern):
    with jax.enable_x64(True):
        lm = tiny(pattern, dtype="float64")
        plan = mj.Plan(refresh=caches.dkv_decode(every=1))
        assert CALLS[call](lm, plan) == CALLS[call](lm, None)


def counts(policy, prompt="def x"):
    """Positions that each pass computes, one token decided in each, and the length of prompt and row."""
    start = len(tiny().tokenizer.encode(prompt))
    out, [log] = spans(policy, prompt)
    assert len(log) == out.forwards[0] == 24
    return [count for _, count, *_ in log], start, start + 24


@pytest.mark.slow
def test_dllm_cache_computes_prompt_and_answer_at_their_intervals_and_a_share_between():
    used, start, end = counts(caches.dllm_cache(prompt_every=9, answer_every=4, ratio=0.25), LONG)
    for step, n in enumerate(used):
        answer = 24 if step % 4 == 0 else 24 // 4
        assert n == answer + (start if step % 9 == 0 else 0), step


@pytest.mark.slow
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


@pytest.mark.long
def test_dkv_greedy_computes_what_was_decided_what_comes_next_and_masks_near_it():
    used, _, end = counts(caches.dkv_greedy(every=3, window=2))
    within = [step % 8 % 3 for step in range(24)]
    assert all((n == end) == (at == 0) for n, at in zip(used, within, strict=True))
    assert all(2 <= n <= 1 + 1 + 2 + 1 for n, at in zip(used, within, strict=True) if at)


@pytest.mark.slow
def test_a_row_whose_attended_positions_change_computes_all_of_them():
    @caches.cache_policy
    def forgets_the_suffix(key, view, memory):
        suffix = ~view.block & (jnp.cumsum(view.block) > 0)
        return caches.Positions(view.changed, view.exists & ~(suffix & (view.step >= 2))), memory

    used, start, end = counts(forgets_the_suffix())
    # All of it, one token, all but what follows the block; then a token a pass until the next block begins.
    assert used[:8] == [end, 1, start + 8, 1, 1, 1, 1, 1] and used[8] == end and used[10] == start + 16


def test_every_policy_is_registered_with_its_source_and_what_it_leaves_out():
    assert set(caches.ALL) == {"dkv_decode", "dkv_greedy", "dllm_cache", "elastic_cache", "suffix_pruning"}
    for name, make in caches.ALL.items():
        assert make.source and "one number for all rows" in (make.__doc__ or ""), name
        assert make() == make() and hash(make()) == hash(make())  # equal policies share a program


@pytest.mark.long
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


@pytest.mark.long
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
        (lambda: sampled(tiny(), mj.Refresh.dual()), "a policy of mj.cache_refresh, or None"),
        (lambda: sampled(tiny("bidirectional"), caches.dkv_decode(), guidance=1.0), "guidance is 1.0"),
        (lambda: sampled(logged("shifted"), caches.dkv_decode()), "logits are shifted"),
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


@pytest.mark.slow
def test_drift_of_quantised_keys_is_refused():
    lm = tiny("bidirectional")
    lm = dataclasses.replace(lm, model=with_kv_kind(lm.model, "int8"))
    with pytest.raises(ValueError, match="those of this model are quantised"):
        sampled(lm, caches.elastic_cache())
