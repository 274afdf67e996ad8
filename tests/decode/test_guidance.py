"""Guidance is its formula over two plain passes, and nothing at weight 0."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode.methods import guidance
from mercury_jax.types import LeaveOneOut, Model, Pass
from tests.marks import slow_except
from tests.tiny import PATTERNS, VOCAB, tiny

BLOCK, SLOTS, MASK = 8, 40, 4  # the tiny models'
PROMPTS = [5, 13, 20, 9, 12]  # tokens
NEGATIVES = [11, 3, 0, 9, 19]  # longer, shorter, none, the same length, longer by more than a block
SETTLED = [0, 2, 11, 0, 7]  # answer tokens that are known already
OPEN = [6, 8, 5, 8, 1]  # behind them
WEIGHTS = [0.5, 2.0, 0.0, -1.0, 1.5]


@functools.cache
def ids():
    """(text [5, SLOTS] whose open positions are masks, negative prompts)."""
    rng = np.random.default_rng(0)
    text = rng.integers(5, VOCAB, (5, SLOTS))
    for row, start in zip(text, np.add(PROMPTS, SETTLED), strict=True):
        row[start:] = MASK
    negatives = [rng.integers(5, VOCAB, n).tolist() for n in NEGATIVES]
    negatives[3] = [MASK] * PROMPTS[3]  # LLaDA's guidance: the prompt masked
    return text, negatives


def beside(pattern):
    """The other sequence of each row, written out: (text, known, total)."""
    text, negatives = ids()
    out = np.zeros((5, SLOTS), int)
    lengths = []
    for new, old, prompt, negative in zip(out, text, PROMPTS, negatives, strict=True):
        pad = (prompt - len(negative)) % BLOCK if pattern == "block_causal" else 0
        row = np.concatenate([[MASK] * pad, negative, old[prompt:]])[:SLOTS]
        new[: len(row)] = row
        lengths.append(pad + len(negative))
    known = np.add(lengths, SETTLED)
    return out, known, known + OPEN


@functools.partial(jax.jit, static_argnums=0)
def one(model, params, *args, **more):
    hidden, cache = model.forward(params, Pass(*args, **more))
    return model.head(params, hidden), cache


def walk(model, params, cache, text, known, total, size):
    """Passes as the decoder makes them: rows encode, then denoise once. Logits [open, V] of each row."""
    length, known, total = np.zeros(len(known), int), np.asarray(known), np.asarray(total)
    ready = np.asarray(model.encodable(jnp.asarray(known)))
    starts, out = ready, cast(list[Any], [None] * len(known))
    while any(x is None for x in out):
        encoding = length < ready
        n = np.where(encoding, np.minimum(size, ready - length), np.minimum(size, total - length))
        tokens = np.take_along_axis(text, np.minimum(length[:, None] + np.arange(size), text.shape[1] - 1), 1)
        now = [jnp.asarray(x, jnp.int32) for x in (length, n, length + n)]
        logits, cache = one(model, params, jnp.asarray(tokens, jnp.int32), cache, *now, jnp.asarray(encoding))
        for i in np.flatnonzero(~encoding):
            out[i] = np.asarray(logits[i]) if out[i] is None else out[i]
        length = length + np.where(encoding, n, 0)
    return [row[k - s : t - s] for row, s, k, t in zip(out, starts, known, total, strict=True)]


def build(pattern, dtype):
    lm = tiny(pattern, BLOCK, dtype=dtype)
    return lm.model, jax.tree.map(lambda x: x.astype(dtype), lm.params)


def conditional(pattern, dtype, model=None, cache=None):
    """Logits at the open positions, each row a [OPEN, V], of the plain model or of a guided one."""
    plain, params = build(pattern, dtype)
    known = np.add(PROMPTS, SETTLED)
    cache = plain.empty_cache(5, SLOTS) if cache is None else cache
    return walk(model or plain, params, cache, ids()[0], known, known + OPEN, width(pattern))


def width(pattern):
    return SLOTS if pattern == "bidirectional" else BLOCK


def guided(pattern, dtype, weights, **more):
    plain, params = build(pattern, dtype)
    cache = guidance.start(plain, params, 5, SLOTS, PROMPTS, ids()[1], weights, **more)
    return conditional(pattern, dtype, guidance.guided(plain), cache)


@pytest.fixture(autouse=True)
def _negative_prompts_take_several_passes(monkeypatch):
    monkeypatch.setattr(guidance, "PREFILL", BLOCK)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_at_weight_zero_it_is_the_plain_model_bit_for_bit(pattern):
    with jax.enable_x64(True):
        pairs = zip(guided(pattern, "float64", 0.0), conditional(pattern, "float64"), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_it_is_the_formula_over_two_plain_passes_in_x64(pattern):
    with jax.enable_x64(True):
        plain, params = build(pattern, "float64")
        text, known, total = beside(pattern)
        theirs = walk(plain, params, plain.empty_cache(5, SLOTS), text, known, total, width(pattern))
        ours = conditional(pattern, "float64")
        got = guided(pattern, "float64", WEIGHTS)
    for i, (l, c, u, w) in enumerate(zip(got, ours, theirs, WEIGHTS, strict=True)):
        np.testing.assert_allclose(l, u + (w + 1) * (c - u), rtol=1e-9, atol=1e-9, err_msg=f"row {i}")
        assert len(l) > 0 and np.abs(c - u).max() > 0.05  # the prompt matters to this model
    np.testing.assert_array_equal(got[2], ours[2])  # a row of weight 0 among others
    np.testing.assert_allclose(got[3], theirs[3], rtol=1e-9, atol=1e-9)  # w = -1 is the other branch


@pytest.mark.long
def test_one_row_may_replace_another_where_the_rooms_are_equal():
    plain, params = build("block_causal", "float32")
    begin = lambda batch, prompts, negatives, weights: guidance.start(
        plain, params, batch, SLOTS, prompts, negatives, weights, room=20
    )
    wanted = begin(5, PROMPTS, ids()[1], WEIGHTS)
    start = begin(5, PROMPTS[:3] + [9], [ids()[1][0], None, [], ids()[1][3]], [0.5, 0.0, 0.0, -1.0])
    assert start.weight.shape == (5,) and int(start.prompt_length[4]) == 0  # the fifth row was added
    admit = jax.jit(lambda old, i, row: jax.tree.map(lambda a, b: a.at[i].set(b[0]), old, row))
    for i in (1, 2, 4):
        start = admit(start, i, begin(1, PROMPTS[i : i + 1], ids()[1][i : i + 1], WEIGHTS[i]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), start, wanted)


def teller():
    """A model whose hidden states are (position, token, carry), negative those of the shadow masks."""

    def forward(params, given):
        at = given.start[:, None] + jnp.arange(given.tokens.shape[1])
        hidden = jnp.stack([at, given.tokens, given.self_cond["soft"][..., 0].astype(int)], axis=-1)
        if given.leave_one_out is not None:
            columns = given.leave_one_out.columns
            masks = jnp.where((columns < 0)[..., None], 0, hidden[jnp.arange(len(at))[:, None], columns])
            hidden = jnp.concatenate([hidden, -masks], axis=1)
        return hidden, given.cache

    plain = tiny("bidirectional", BLOCK).model
    return Model(**(plain._asdict() | dict(forward=forward, head=lambda params, hidden: hidden)))


@pytest.mark.long
@pytest.mark.parametrize("joint", [False, True])
def test_shadow_masks_are_guided_in_a_cache_that_is_just_large_enough(joint):
    prompt, total, negative = PROMPTS[4], 20, ids()[1][4]
    text, other = ids()[0][4:, :total], beside("bidirectional")[0][4:, : total + 7]
    call = lambda *x: [jnp.asarray([y], jnp.int32) for y in x]
    with jax.enable_x64(True):
        plain, params = build("bidirectional", "float64")
        new = total - prompt
        cache = guidance.start(plain, params, 1, total + new, [prompt], [negative], 0.5)

        def run(model, text, cache, n):
            """Logits of the tokens behind the prompt, then of their shadow masks."""
            masks = LeaveOneOut(MASK, n - new + jnp.arange(new)[None], joint)
            logits = one(
                model, params, jnp.asarray(text), cache, *call(0, n, n), jnp.asarray([False]), leave_one_out=masks
            )[0]  # fmt: skip
            return np.asarray(logits)[0, n - new :]

        got = run(guidance.guided(plain), text, cache, total)
        c = run(plain, text, plain.empty_cache(1, total + new), total)
        u = run(plain, other, plain.empty_cache(1, total + 7 + new), total + 7)
    np.testing.assert_allclose(got, c + 0.5 * (c - u), rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("negative", [[], [50, 51], [50, 51, 52, 53, 54]])
def test_carry_and_shadows_follow_their_tokens(negative):
    plain = teller()
    model = guidance.guided(plain)
    cache = guidance.start(plain, {}, 1, 8, [3], [negative], 1.0)
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 15, 16, 17]])
    carry = {"soft": (tokens + 90.0)[..., None]}
    rest = [jnp.asarray([x]) for x in (0, 8, 8, False)]
    masks = LeaveOneOut(MASK, jnp.asarray([[3, 4, 5, 6, 7, -1]]))
    hidden: Any = model.forward({}, Pass(tokens, cache, *rest, carry, leave_one_out=masks))[0]
    assert all(x.shape[:2] == (1, 14) for x in jax.tree.leaves(hidden))
    want = np.array([[len(negative) + i, 13 + i, 103 + i] for i in range(5)])
    np.testing.assert_array_equal(hidden.unconditional[0, 3:8], want)
    np.testing.assert_array_equal(hidden.unconditional[0, 8:13], -want)
    assert not hidden.unconditional[0, 13].any()  # no mask, so no token that it stands at
    np.testing.assert_array_equal(hidden.conditional[0, 3:8, 0], np.arange(3, 8))


def test_a_prompt_before_the_pass_is_neither_repeated_nor_needed():
    """Passes over a part of a bidirectional canvas, as a refresh makes them."""
    plain = teller()
    cache = guidance.start(plain, {}, 1, 8, [3], [[50]], 1.0)
    tokens = jnp.asarray([[12, 13, 14, 15]])
    rest = [jnp.asarray([x]) for x in (2, 4, 8, False)]
    ask = guidance.guided(plain).forward
    hidden: Any = ask({}, Pass(tokens, cache, *rest, {"soft": jnp.ones((1, 4, 1))}))[0]
    assert hidden.unconditional[0].tolist() == [[0, 50, 0], [1, 13, 1], [2, 14, 1], [3, 15, 1]]


def test_equal_models_give_the_same_guided_one_and_the_rest_is_the_models():
    plain, params = build("causal_encoder", "float32")
    model = guidance.guided(plain)
    assert model is guidance.guided(plain) and hash(model) == hash(guidance.guided(plain))
    changed = {"forward", "head", "head_chunk", "empty_cache", "rings"}
    assert all(getattr(model, k) is v for k, v in plain._asdict().items() if k not in changed)
    empty = model.empty_cache(5, SLOTS)
    for a, b in zip(
        conditional("causal_encoder", "float32", model, empty), conditional("causal_encoder", "float32"), strict=True
    ):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    hidden = jnp.ones((1, 2, plain.config.width))  # of `apply`, which has no other branch
    np.testing.assert_array_equal(model.head(params, hidden), plain.head(params, hidden))
    assert dataclasses.replace(empty, extra=1) != empty


@pytest.mark.parametrize(
    "negatives, weights, room, words",
    [
        ([[5]], 1.0, None, "negative is 'a list of 1'; allowed: one for each of the 2 prompts"),
        ([[5], [VOCAB]], 1.0, None, rf"negative\[1\] id is {VOCAB}; allowed: 0..{VOCAB - 1}"),
        ([[5], None], float("nan"), None, "guidance weight is nan; allowed: a finite number"),
        ([[5], None], [1.0], None, r"guidance weight is \[1.0\]"),
        ([[5] * 9, None], 1.0, 8, r"negative\[0\] is '9 tokens'; allowed: at most 8"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(negatives, weights, room, words):
    plain, params = build("causal_encoder", "float32")
    with pytest.raises(ValueError, match=words):
        guidance.start(plain, params, 2, SLOTS, [3, 4], negatives, weights, room)
