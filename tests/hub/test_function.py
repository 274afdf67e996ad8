"""mj.from_function: a denoiser of one's own answers as the loop that its author would write, in every public call."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mercury_jax as mj
from mercury_jax import hub
from tests.marks import slow_except

VOCAB, MASK, EOS, CONTEXT = 12, 10, 11, 24
OURS = [name for name, make in mj.rules.ALL.items() if make.__module__.startswith("mercury_jax.")]
# Ids that a rule of variable length reacts to; any of the vocabulary's will do.
SPECIAL = {"expand": dict(expand=8, delete=9), "levenshtein": dict(delete=8, insert=9)}


@functools.cache
def weights(seed: int = 0) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    normal = lambda *shape: 1.5 * jax.random.normal(next(keys), shape)
    return dict(
        embed=normal(VOCAB, 8), at=normal(CONTEXT, 8), q=normal(8, 8), k=normal(8, 8), v=normal(8, 8), time=normal(8)
    )  # fmt: skip


def network(params, tokens, attends=None, positions=None, time=None, layers=1):
    """Attention without norms. Forbidden keys have logits of -inf, so that a query without keys gets NaN."""
    positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
    x = params["embed"][tokens] + params["at"][positions]
    if time is not None:
        x += jnp.sin(9.0 * time)[:, None, None] * params["time"]
    for _ in range(layers):
        scores = jnp.einsum("btd,bsd->bts", x @ params["q"], x @ params["k"]) / 8
        if attends is not None:
            scores = jnp.where(attends, scores, -jnp.inf)
        x += jax.nn.softmax(scores) @ (x @ params["v"])
    return x @ params["embed"].T / 2


def plain(params, tokens):
    return network(params, tokens)


def padded(params, tokens, lengths):
    assert tokens.shape[1] <= CONTEXT  # its table of positions ends there
    return network(params, tokens, (jnp.arange(tokens.shape[1]) < lengths[:, None])[:, None])


def masked(params, tokens, *, attention_mask, positions):
    return network(params, tokens, attention_mask, positions)


def deep(params, tokens, attention_mask):
    return network(params, tokens, attention_mask, layers=2)


def timed(params, tokens, lengths, time):
    return network(params, tokens, (jnp.arange(tokens.shape[1]) < lengths[:, None])[:, None], time=time)


def shifted(params, tokens, lengths):
    """Its logits at position i - 1 predict position i."""
    logits = padded(params, tokens, lengths)
    return jnp.concatenate([logits[:, 1:], logits[:, :1]], axis=1)


def own(apply, **changes):
    given = dict(vocab=VOCAB, context=CONTEXT, mask=MASK, eos=EOS, check=False) | changes
    return mj.from_function(apply, weights(), **given)


PROMPT = [3, 4, 5]


def loop(prompt: list[int], count: int, p: float) -> tuple[list[int], int]:
    """threshold(p) over a whole answer, as its author would write it: (ids up to the end of text, passes)."""
    canvas, passes = np.array([*prompt, *[MASK] * count]), 0
    while (canvas == MASK).any():
        logits = np.array(plain(weights(), canvas[None])[0], np.float64)
        logits[:, MASK] = -np.inf
        probability = np.exp(logits - logits.max(-1, keepdims=True))
        probability /= probability.sum(-1, keepdims=True)
        best = np.where(canvas == MASK, probability.max(-1), -1.0)
        accepted = (best >= p) | (best == best.max())
        canvas = np.where(accepted, logits.argmax(-1), canvas)
        passes += 1
        ends = np.flatnonzero(canvas == EOS)
        if len(ends) and MASK not in canvas[: ends[0]]:
            break
    answer = canvas[len(prompt) :].tolist()
    return answer[: answer.index(EOS)] if EOS in answer else answer, passes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("apply", [plain, padded, masked])
def test_sample_answers_as_a_loop_over_the_function(apply):
    lm = own(apply, check=True)
    for prompt in (PROMPT, [7, 1, 2]):
        out = mj.sample(lm, prompt, max_tokens=9, sampler=mj.rules.threshold(0.6))
        assert (out.tokens[0].tolist(), out.forwards[0]) == loop(prompt, 9, 0.6)


@pytest.mark.slow
def test_rows_of_several_lengths_see_no_padding():
    prompts = [[3, 4, 5, 6, 7], [8], [1, 2]]
    for apply in (padded, masked):
        batch = mj.sample(own(apply), prompts, max_tokens=9, sampler=mj.rules.threshold(0.6))
        assert [t.tolist() for t in batch.tokens] == [loop(p, 9, 0.6)[0] for p in prompts]


@pytest.mark.slow
def test_a_function_without_lengths_is_guided_by_a_masked_prompt():
    weight, canvas = 0.5, np.array([*PROMPT, *[MASK] * 4])
    for _ in range(4):  # LLaDA's loop: one token a step, the most confident one
        both = np.stack([canvas, np.where(np.arange(7) < 3, MASK, canvas)])
        known, blank = np.array(plain(weights(), jnp.asarray(both)), np.float64)
        logits = known + weight * (known - blank)
        logits[:, MASK] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        at = np.where(canvas == MASK, (p / p.sum(-1, keepdims=True)).max(-1), -1.0).argmax()
        canvas[at] = logits[at].argmax()
    guided = dict(guidance=weight, negative="masked", sampler=mj.rules.confidence())
    for apply in (plain, padded):
        out = mj.sample(own(apply, eos=None), PROMPT, max_tokens=4, **guided)
        assert out.tokens[0].tolist() == canvas[3:].tolist()


@pytest.mark.long
def test_batches_of_a_function_are_its_rows():
    lm = own(padded, eos=None, tokenizer=Letters(), forbidden=[EOS])
    call = functools.partial(mj.sample, lm, temperature=8.0, sampler=mj.rules.random())
    two = call(["ab", "c"], n=2, max_tokens=[6, 4], seed=[5, 9])
    rows = [
        call(p, max_tokens=m, seed=s) for p, m, s in (("ab", 6, 5), ("ab", 6, 6), ("c", 4, 9), ("c", 4, 10))
    ]
    assert two.texts == [row.text for row in rows] and len(set(two.texts)) == 4
    letter = two.texts[0][2]
    assert call("ab", max_tokens=6, seed=5, stop=letter).text == two.texts[0].partition(letter)[0]
    frames = list(mj.stream(lm, ["ab", "c"], max_tokens=4))
    last = {frame.row: frame.text for frame in frames if frame.done}
    assert [last[0], last[1]] == mj.sample(lm, ["ab", "c"], max_tokens=4).texts
    assert mj.infill(lm, [[0, 1], mj.Hole(2), [3]]).text == mj.infill(lm, ["ab", mj.Hole(2), "d"]).text


@pytest.mark.slow
@pytest.mark.parametrize("apply", [plain, padded])
def test_the_log_probabilities_of_a_rollout_are_those_of_its_trajectory(apply):
    lm = own(apply, eos=None)
    made = mj.rollout(lm, [PROMPT, [1, 2, 6]], n=2, max_tokens=4, sampler=mj.rules.random(), temperature=1.0)
    again = mj.rl.token_log_probs(lm, lm.params, made.batch(lm), estimator="trajectory")
    np.testing.assert_allclose(again, made.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_query_without_keys_spreads_no_nan_to_the_next_layer():
    lm, prompts = own(deep, check=True), [[3, 4, 5, 6, 7], [8], [1, 2]]
    batch = mj.sample(lm, prompts, max_tokens=9)
    alone = [mj.sample(lm, prompt, max_tokens=9).tokens[0].tolist() for prompt in prompts]
    assert [t.tolist() for t in batch.tokens] == alone


def test_without_lengths_rows_of_several_lengths_are_refused_in_every_call():
    lm = own(plain)
    calls = [
        lambda: mj.sample(lm, [[1, 2], [3]], max_tokens=4),
        lambda: mj.sample(lm, [1, 2], max_tokens=4, guidance=1.0),
        lambda: mj.edit(lm, [[1, 2], [3]]),
        lambda: mj.score(lm, [1, 2], [[3], [4, 5]]),
        lambda: mj.logits(lm, [[3], [4]], prompt=[[1], [1, 2]]),
        lambda: mj.sample(lm, [1, 2], max_tokens=4, sampler=mj.rules.expand(8, 9)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="would see the padding"):
            call()
    out = mj.sample(lm, [[1, 2], [3, 4]], max_tokens=7, sampler=mj.rules.threshold(0.6))
    assert [t.tolist() for t in out.tokens] == [loop(p, 7, 0.6)[0] for p in ([1, 2], [3, 4])]


@pytest.mark.slow
def test_every_call_gives_the_same_whichever_way_padding_is_hidden():
    def calls(lm):
        yield [frame.tokens.tolist() for frame in mj.stream(lm, PROMPT, max_tokens=5)][-1]
        yield mj.edit(lm, [1, 2, MASK, 4], sampler=mj.rules.editing()).tokens[0].tolist()
        yield np.round(mj.score(lm, PROMPT, [6, 7], samples=4).log_p, 4)
        yield np.round(np.asarray(mj.logits(lm, [MASK, 3], prompt=PROMPT)), 4).tolist()

    found = [list(calls(own(apply))) for apply in (plain, padded, masked)]
    assert found[0] == found[1] == found[2]
    whole = np.asarray(mj.logits(own(plain), [*PROMPT, MASK, 3]))
    direct = plain(weights(), jnp.array([[*PROMPT, MASK, 3]]))
    np.testing.assert_allclose(whole, direct, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_infill_sees_both_sides_of_a_hole():
    lm = own(padded, tokenizer=Letters())
    filled = mj.infill(lm, ["ab", mj.Hole(1), "de"])
    logits = np.array(plain(weights(), jnp.array([[0, 1, MASK, 3, 4]])))[0, 2]
    logits[[MASK, EOS]] = -np.inf
    assert filled.tokens[0].tolist() == [0, 1, int(logits.argmax()), 3, 4]
    assert filled.text == Letters().decode(filled.tokens[0])
    assert mj.infill(lm, ["ab", mj.Hole(most=3), "de"]).text.startswith("ab")


REFUSED = {  # rules that need what these functions lack
    "autoregressive": r"sampler\.speculate is .*None",  # to verify a draft by a function that sees the whole canvas
    "self_speculation": r"sampler\.speculate is .*None",
    "prism": r'params with a "quality_head"',
    "hybrid_ancestral": "the noise of this model is no mixture of masks and random tokens",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "name", slow_except(OURS, "threshold", "wino", "expand", "remdm_confidence", "entropy_bound")
)
def test_every_rule_runs_or_says_what_it_needs(name):
    made = mj.rules.ALL[name](**SPECIAL.get(name, {}))
    absorbing = "absorbing" in getattr(made, "noise", ("absorbing",))
    lm = own(masked) if absorbing else own(masked, mask=None, noise="uniform")
    call = lambda: mj.sample(lm, [PROMPT, [1]], max_tokens=6, sampler=made)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            call()
    else:
        tokens = call().tokens
        assert all(len(t) <= 6 for t in tokens) and not (absorbing and any(MASK in t for t in tokens))


def test_leave_one_out_predictions_do_not_see_the_token_at_their_position():
    @mj.rule(leave_one_out=True)
    def blind(key, view, memory):
        return mj.rules.propose(view, view.leave_one_out.argmax), memory

    lm, text = own(masked), [1, 2, 3, 4, 5]
    found = mj.edit(lm, text, sampler=blind(), plan=mj.Plan(steps=1)).tokens[0]
    for i in range(len(text)):
        canvas = [*text[:i], MASK, *text[i + 1 :]]  # one layer: no other key depends on this token
        logits = np.array(plain(weights(), jnp.array([canvas])))[0, i]
        logits[MASK] = -np.inf
        assert found[i] == logits.argmax()
    with pytest.raises(ValueError, match=r"blind.*attention_mask and positions"):
        mj.edit(own(padded), text, sampler=blind())


@pytest.mark.slow
def test_shifted_logits_are_aligned_with_the_canvas():
    straight, moved = own(padded), own(shifted, alignment="shifted")
    for rule in (mj.rules.threshold(0.6), mj.rules.confidence()):
        a, b = (mj.sample(lm, [PROMPT, [1]], max_tokens=6, sampler=rule) for lm in (straight, moved))
        assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]
    # Nothing precedes the first position, so only the others are compared.
    a, b = (np.asarray(mj.logits(lm, [MASK, 3, 4])) for lm in (straight, moved))
    np.testing.assert_array_equal(a[:, 1:], b[:, 1:])


@pytest.mark.long
def test_a_function_of_time_gets_the_time_of_each_step():
    def clock(params, tokens, time):  # the most probable token counts quarters of the time
        return 9.0 * jax.nn.one_hot(jnp.broadcast_to((4 * time).astype(int)[:, None], tokens.shape), VOCAB)

    @mj.rule
    def leftmost(key, view, memory):
        return mj.rules.accept(view, view.masked & (jnp.cumsum(view.masked) == 1)), memory

    out = mj.sample(own(clock), [5], max_tokens=4, sampler=leftmost())
    assert out.tokens[0].tolist() == [4, 3, 2, 1]
    lm, seen = own(timed), [0.25, 1.0]
    for t in seen:
        direct = timed(weights(), jnp.array([[1, MASK]]), jnp.array([2]), jnp.array([t]))
        np.testing.assert_allclose(mj.logits(lm, [1, MASK], time=t), direct, rtol=1e-5, atol=1e-5)
    assert np.isfinite(mj.score(lm, PROMPT, [6, 7]).log_p)


@pytest.mark.long
@pytest.mark.parametrize("apply", [plain, padded])
def test_the_decoder_of_a_function_is_a_function_too(apply):
    lm, rule = own(apply), mj.rules.threshold(0.6)
    decoder = mj.decoder(lm, rule, slots=12)

    def tokens(params, key):
        state = decoder.init(params, jnp.array([PROMPT]), max_tokens=9, key=key)
        return decoder.answer(decoder.run(params, state))[0][0, :9]

    # One program for two sets of parameters.
    stacked = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))
    both = jax.jit(jax.vmap(tokens, in_axes=(0, None)))(stacked, jax.random.key(0))
    for i, found in enumerate(both):
        other = dataclasses.replace(lm, params=weights(i))
        assert (
            found.tolist()[: len(want := mj.sample(other, PROMPT, max_tokens=9, sampler=rule).tokens[0])]
            == want.tolist()
        )
    if apply is plain:
        with pytest.raises(ValueError, match="would see the padding"):
            decoder.init(lm.params, jnp.array([PROMPT]), max_tokens=5, key=jax.random.key(0))


@pytest.mark.slow
def test_uniform_noise_needs_no_mask_and_is_scored_without_one():
    lm = own(padded, mask=None, noise="uniform")
    out = mj.sample(lm, [PROMPT, [1]], max_tokens=6)
    assert all(((t >= 0) & (t < VOCAB)).all() for t in out.tokens)
    assert mj.edit(lm, [1, 2, 3]).tokens[0].shape == (3,)
    assert mj.score(lm, [1], [2]).log_p < 0.0


@pytest.mark.long
def test_every_id_but_the_mask_and_what_is_forbidden_can_be_emitted():
    def wish(params, tokens):  # position i prefers the id i, and then the one after it
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return 2.0 * jax.nn.one_hot(at % VOCAB, VOCAB) + jax.nn.one_hot((at + 1) % VOCAB, VOCAB)

    text = lambda **more: mj.sample(own(wish, eos=None, **more), [0], max_tokens=12).tokens[0].tolist()
    assert text() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 11, 0]
    with pytest.raises(ValueError, match=r"tokenizer.decode is \[0, 1, .*11\]; .* belong into forbidden"):
        text(tokenizer=Letters())
    assert text(tokenizer=Letters(), forbidden=[11]) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]
    assert text(forbidden=[0, 5]) == [1, 2, 3, 4, 6, 6, 7, 8, 9, 11, 11, 1]
    assert text(mask=None, noise="uniform") == [*range(1, 12), 0]


@pytest.mark.slow
def test_without_an_end_of_text_every_answer_has_its_length():
    def ender(params, tokens, lengths):  # writes 5, and then ends
        after = jnp.arange(tokens.shape[1]) > 3
        return jax.nn.one_hot(jnp.broadcast_to(jnp.where(after, EOS, 5), tokens.shape), VOCAB)

    expected = {
        None: ([5, *[EOS] * 6], "length"),
        EOS: ([5], "stop"),
        (7, EOS): ([5], "stop"),
        (5, EOS): ([], "stop"),
    }
    for eos, (tokens, finish) in expected.items():
        out = mj.sample(own(ender, eos=eos), PROMPT, max_tokens=7)
        assert (out.tokens[0].tolist(), out.finish) == (tokens, [finish])
    assert mj.edit(own(ender, eos=None), [1, 2]).tokens[0].shape == (2,)


def test_a_second_lm_of_the_same_function_compiles_nothing():
    traces = []

    def counted(params, tokens, lengths):
        traces.append(tokens.shape)
        return padded(params, tokens, lengths)

    mj.sample(own(counted), PROMPT, max_tokens=5)
    before = len(traces)
    again = mj.from_function(
        counted, weights(1), vocab=VOCAB, context=CONTEXT, mask=MASK, eos=EOS, check=False
    )
    mj.sample(again, PROMPT, max_tokens=5)
    assert len(traces) == before + 1  # the trace that checks what the function returns


class Letters:
    """A tokenizer of one's own: a letter an id."""

    def encode(self, text):
        return ["abcdefghij".index(c) for c in text]

    def decode(self, ids):
        return "".join("abcdefghij"[i] for i in ids)


class Encoding(NamedTuple):
    ids: list[int]


class Special(Letters):
    """As the package tokenizers: an object that holds the ids, and special tokens unless told otherwise."""

    def encode(self, text, pair=None, add_special_tokens=True):
        ids = super().encode(text)
        return Encoding([9, *ids] if add_special_tokens else ids)


def test_the_tokenizer_is_optional_or_anything_that_encodes_and_decodes():
    ids = mj.sample(own(padded), PROMPT, max_tokens=5)
    assert ids.text == " ".join(map(str, ids.tokens[0].tolist()))
    for tokenizer in (Letters(), Special()):
        out = mj.sample(own(padded, tokenizer=tokenizer), "def", max_tokens=5)
        assert out.tokens[0].tolist() == ids.tokens[0].tolist() and out.text == Letters().decode(
            out.tokens[0]
        )
    for lm, words in ((own(padded), "no tokenizer"), (own(padded, tokenizer=Letters()), "no chat template")):
        with pytest.raises(ValueError, match=words):
            mj.sample(lm, [{"role": "user", "content": "ab"}])


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Module:
    """A module that is a pytree and takes one row, as those of Equinox."""

    table: jax.Array

    def __call__(self, tokens):
        return self.table[tokens]

    def tree_flatten(self):
        return (self.table,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_a_module_that_is_a_pytree_holds_its_own_parameters():
    module = Module(jnp.eye(VOCAB) + jnp.roll(jnp.eye(VOCAB), 1, axis=1))
    lm = mj.from_function(
        lambda module, tokens: jax.vmap(module)(tokens), module, vocab=VOCAB, context=CONTEXT, mask=MASK
    )
    assert mj.sample(lm, PROMPT, max_tokens=4).lengths == [4]
    with pytest.raises(ValueError, match=r"arguments of apply is '\(tokens\)'.*eqx.combine"):
        mj.from_function(module, {}, vocab=VOCAB, context=CONTEXT, mask=MASK)


@pytest.mark.long
def test_an_equinox_module():
    class Denoiser(eqx.Module):
        embed: Any
        attention: Any
        head: Any

        def __call__(self, tokens, attends):
            x = jax.vmap(self.embed)(tokens)
            x = x + self.attention(x, x, x, mask=attends)
            return jax.vmap(self.head)(x)

    keys = jax.random.split(jax.random.key(0), 3)
    module = Denoiser(
        eqx.nn.Embedding(VOCAB, 8, key=keys[0]),
        eqx.nn.MultiheadAttention(2, 8, key=keys[1]),
        eqx.nn.Linear(8, VOCAB, key=keys[2]),
    )
    params, static = eqx.partition(module, eqx.is_array)

    def apply(params, tokens, attention_mask):
        return jax.vmap(eqx.combine(params, static))(tokens, attention_mask)

    lm = mj.from_function(apply, params, vocab=VOCAB, context=CONTEXT, mask=MASK)
    batch = mj.sample(lm, [PROMPT, [1]], max_tokens=4)
    alone = mj.sample(lm, [1], max_tokens=4, seed=1)
    assert batch.tokens[1].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize(
    "wrong, words",
    [(lambda p, t: jnp.tril(jnp.ones((t.shape[1],) * 2)) @ p["embed"][t] @ p["embed"].T, "apply is causal"),
     (lambda p, t: plain(p, t) + t.sum(), "logits of another"),
     (lambda p, t, lengths: plain(p, t) + 0 * lengths[0], "does not hide padding"),
     (lambda p, t: plain(p, t) + np.random.default_rng().random(), "another program each time"),
     (lambda p, t: plain(p, t) + jax.random.normal(jax.random.key(0), (VOCAB,)), "draws random numbers")],
)  # fmt: skip
def test_a_function_that_would_give_wrong_text_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        own(wrong, check=True)
    own(wrong)


def test_an_array_that_is_kept_from_call_to_call_is_refused():
    kept = []

    def apply(params, tokens):
        kept.append(params["embed"].sum())
        return plain(params, tokens) + kept[-2:][0]

    with pytest.raises(ValueError, match="keeps an array"):
        own(apply, check=True)


class Trained(nnx.Module):
    """An NNX module with a layer that computes something else in training."""

    def __init__(self, layer):
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(VOCAB, 8, rngs=rngs), nnx.Linear(8, VOCAB, rngs=rngs)
        self.layer = nnx.Dropout(0.5, rngs=rngs) if layer == "dropout" else nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(self.layer(x + x.mean(1, keepdims=True)))


@pytest.mark.long
@pytest.mark.parametrize("layer", ["dropout", "batch norm"])
def test_an_nnx_module_in_training_mode_is_refused_at_the_call(layer):
    def made(module):
        graph, params = nnx.split(module)
        merged = lambda params, tokens: nnx.merge(graph, params)(tokens)
        return mj.from_function(merged, params, vocab=VOCAB, context=CONTEXT, mask=MASK)

    module = Trained(layer)
    with pytest.raises(ValueError, match=r"call module.eval\(\) before nnx.split"):
        made(module)
    module.eval()
    assert mj.sample(made(module), [[3, 4]], max_tokens=3).lengths == [3]


class LinenTrained(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 8)(tokens)
        return nn.Dense(VOCAB)(self.layer(x + x.mean(1, keepdims=True)))


@pytest.mark.parametrize(
    "layer, options",
    [
        (nn.Dropout(0.5, deterministic=False), {}),
        (nn.Dropout(0.5, deterministic=False), {"rngs": {"dropout": jax.random.key(2)}}),
        (nn.BatchNorm(use_running_average=False), {}),
    ],
)
def test_a_linen_module_in_training_mode_is_refused(layer, options):
    net = LinenTrained(layer)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = net.init(keys, jnp.zeros((1, 4), int))
    with pytest.raises(ValueError, match="of Linen pass deterministic=True"):
        mj.from_function(
            lambda p, t: net.apply(p, t, **options), variables, vocab=VOCAB, context=CONTEXT, mask=MASK
        )


def test_an_equinox_module_in_training_mode_is_refused():
    layer, embed = eqx.nn.Dropout(0.5), jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
    apply = lambda p, t: jax.vmap(layer)(p[t] + p[t].mean(1, keepdims=True))
    with pytest.raises(ValueError, match=r"eqx.nn.inference_mode\(module\)"):
        mj.from_function(apply, embed, vocab=VOCAB, context=CONTEXT, mask=MASK)


def test_the_parameters_of_another_network_are_refused_in_words():
    lm = dataclasses.replace(own(padded), params={"embed": jnp.zeros((VOCAB, 4))})
    with pytest.raises(ValueError, match=r"apply\(params, tokens int32\[1, 24\]\) fails: KeyError: 'at'"):
        mj.sample(lm, PROMPT, max_tokens=3)


def test_a_function_is_not_saved_as_a_model(tmp_path):
    with pytest.raises(ValueError, match="FunctionConfig"):
        hub.save(tmp_path / "lm", own(padded), mj.NoiseConfig())
    assert not (tmp_path / "lm").exists()
