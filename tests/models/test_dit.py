"""Diffusion transformers: the logits of the reference implementations, the cache, and the time of the noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.decode.likelihood import canvas_times
from mercury_jax.decode.registration import rule
from mercury_jax.decode.sampler import accept
from mercury_jax.hub.export import named_family, writers
from mercury_jax.hub.family import family_of
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.models.dit import DiTConfig, noise_level
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.types import Batch, LeaveOneOut, PackedPass, Pass
from tests.hub.goldens_of import GOLDENS, golden
from tests.tiny import VOCAB, tokenizer

LIMIT = 1e-4


@functools.cache
def parts(name, timed=None):
    """(model, params, what the reference said); timed overrides the checkpoint's own setting."""
    g = golden(name)
    config = g.opened.config
    if timed is not None and timed != config.timed:
        return models.build(dataclasses.replace(config, timed=timed)), g.params, g.said
    return g.opened.model, g.params, g.said


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, positions, ranges, time=None):
    wide = lambda x: jnp.broadcast_to(x, (len(tokens), *x.shape))
    return model.head(
        params, model.apply(params, PackedPass(tokens, wide(positions), wide(ranges), time=time))
    )


def ranges_of(*pairs):
    """[T, 2, 2] from one or two (start, end), each an array [T]."""
    pairs = [*pairs, (0 * pairs[0][0], 0 * pairs[0][0])][:2]
    return np.stack([np.stack(np.broadcast_arrays(*p), axis=-1) for p in pairs], axis=1).astype(np.int32)


def whole(model, tokens):
    """(positions, ranges) of rows without canvases of their own, as the model's pattern has them."""
    at, block, size = np.arange(tokens.shape[1]), model.config.block, tokens.shape[1]
    end = (at // block + 1) * block if model.config.pattern == "block_causal" else np.full(size, size)
    return at, ranges_of((0 * at, end))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "timed", "key"),
    [
        ("mdlm", False, "logits"), ("mdlm", True, "timed_logits"), ("bd3lm", False, "logits"),
        ("bd3lm", True, "timed_logits"), ("duo", True, "logits"), ("gidd", True, "logits"),
    ],
)  # fmt: skip
def test_logits_equal_the_reference(name, timed, key):
    model, params, said = parts(name, timed)
    got = apply(model, params, said["tokens"], *whole(model, said["tokens"]), said["time"] if timed else None)
    assert said[key].std() > 0.3
    assert np.abs(got - said[key]).max() <= LIMIT
    if timed:  # the level that we tell is the one that the reference was given
        np.testing.assert_allclose(
            noise_level(model.config, jnp.asarray(said["time"])), said["sigma"], rtol=2e-6
        )


@pytest.mark.parametrize("timed", [False, True])
def test_noisy_blocks_beside_clean_text_equal_the_reference(timed):
    model, params, said = parts("bd3lm", timed)
    n, block = said["tokens"].shape[1], model.config.block
    at = np.arange(n)
    begin = at // block * block
    noisy = ranges_of((n + 0 * at, n + begin), (begin, begin + block))
    clean = ranges_of((n + 0 * at, n + begin + block))
    got = apply(
        model, params, said["train_tokens"], np.tile(at, 2), np.concatenate([noisy, clean]),
        said["time"] if timed else None,
    )  # fmt: skip
    assert np.abs(got[:, :n] - said["timed_train_logits" if timed else "train_logits"]).max() <= LIMIT


def test_a_block_after_a_cache_has_the_logits_of_the_whole_row():
    model, params, said = parts("bd3lm")
    tokens = jnp.asarray(said["tokens"])
    rows, n = tokens.shape
    block, known = model.config.block, n - model.config.block
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    yes = jnp.ones((rows,), bool)

    masks = LeaveOneOut(96, jnp.tile(jnp.arange(block), (rows, 1)))

    @jax.jit
    def behind(params, tokens):
        cache = model.empty_cache(rows, n + block)
        given = Pass(tokens[:, :known], cache, full(0), full(known), full(known), yes)
        _, cache = model.forward(params, given)
        given = Pass(tokens[:, known:], cache, full(known), full(block), full(n), ~yes, leave_one_out=masks)
        hidden, _ = model.forward(params, given)
        return model.head(params, hidden)

    got = behind(params, tokens)
    np.testing.assert_allclose(got[:, :block], said["logits"][:, known:], atol=LIMIT)
    # Behind the tokens follow the shadow masks: where a mask stands, its shadow sees what it sees.
    masked = said["tokens"][:, known:] == 96
    np.testing.assert_allclose(got[:, block:][masked], got[:, :block][masked], atol=LIMIT)
    assert np.abs(got[:, block:] - got[:, :block])[~masked].max() > 1e-2


def test_each_packed_document_gets_its_own_time():
    model, params, said = parts("duo")
    rows, n = said["tokens"].shape
    both = said["tokens"].reshape(1, -1)
    at = np.arange(2 * n)
    begin = at // n * n
    time = np.repeat(said["time"], n)[None]
    got = apply(model, params, both, at % n, ranges_of((begin, begin + n)), time)
    assert np.abs(got.reshape(rows, n, -1) - said["logits"]).max() <= LIMIT


def test_a_timed_model_needs_a_time_and_an_untimed_one_refuses_it():
    for timed, time in ((True, None), (False, np.ones(2))):
        model, params, said = parts("mdlm", timed)
        with pytest.raises(ValueError, match="time is"):
            apply(model, params, said["tokens"], *whole(model, said["tokens"]), time)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(kv_heads=2), "kv_heads"), (dict(tied=True), "tied"), (dict(qk_norm=True), "qk_norm"),
        (dict(pattern="causal_encoder"), "pattern"), (dict(level="cosine"), "level"), (dict(cond=0), "cond"),
        (dict(level_eps=0.0), "level_eps"), (dict(frequencies=7), "frequencies"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused_by_name(change, named):
    good = dict(vocab=40, heads=4, kv_heads=4, width=32, head_dim=8)
    assert DiTConfig(**good).timed is False
    with pytest.raises(ValueError, match=named):
        DiTConfig(**good | change)


@pytest.mark.parametrize("name", ["mdlm", "bd3lm", "duo", "gidd"])
def test_a_dit_config_survives_a_round_trip(name):
    opened = open_checkpoint(GOLDENS / name)
    assert family_of(opened.folder.config)[0] is opened.family
    assert opened.family in writers(opened.config)
    other = dataclasses.replace(opened.config, ffn=100)
    assert opened.family not in writers(other)


def test_the_noise_is_that_of_the_checkpoint():
    for name, kind in (("mdlm", "absorbing"), ("bd3lm", "absorbing"), ("duo", "uniform"), ("gidd", "hybrid")):
        found = open_checkpoint(GOLDENS / name).noise
        assert found is not None and found.kind == kind
        assert name != "gidd" or found.uniform == 0.2


@pytest.mark.parametrize(
    ("width", "layers", "heads", "millions"), [(768, 12, 12, 169.6), (1024, 24, 16, 424.5)]
)
def test_gidd_has_the_published_number_of_parameters(width, layers, heads, millions):
    config = named_family("GIDD").config(
        dict(
            vocab_size=50258, max_seq_len=512, hidden_size=width, timestep_cond_dim=128, num_hidden_layers=layers,
            num_attention_heads=heads,
        )
    )  # fmt: skip
    sizes = jax.eval_shape(models.build(config).init, jax.random.key(0))
    assert round(sum(x.size for x in jax.tree.leaves(sizes)) / 1e6, 1) == millions


def told_forward(params, given):
    """Hidden: the time it was told, and the latest time at which the tokens before it were encoded."""
    tokens, cache, start = given.tokens, given.cache, given.start
    time, encoding = (jnp.broadcast_to(x.T, tokens.shape[::-1]).T for x in (given.time, given.encoding))
    at = start[:, None] + jnp.arange(tokens.shape[1])
    live = (jnp.arange(tokens.shape[1]) < given.used[:, None]) & encoding
    put = lambda old, at, t: old.at[at].set(t, mode="drop")
    k = jax.vmap(put)(cache[0].k, jnp.where(live, at, 10_000), time[..., None, None])
    before = jnp.arange(k.shape[1])[None] < (start + live.sum(axis=1))[:, None]
    encoded = jnp.where(before, k[:, :, 0, 0], 0.0).max(axis=1)
    hidden = jnp.stack([time, jnp.broadcast_to(encoded[:, None], tokens.shape)], -1)
    return hidden, (cache[0]._replace(k=k),)


@functools.cache
def teller(pattern):
    """A timed model whose logits of ids 50 and 51 are what `told_forward` hides."""
    config = DiTConfig(
        vocab=VOCAB, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32, timed=True, pattern=pattern,
        block=8, context=256,
    )  # fmt: skip
    model = models.build(config)._replace(
        forward=told_forward,
        apply=lambda params, given: jnp.stack([given.time, 0 * given.time], -1),
        head=lambda params, h: jnp.pad(h, [(0, 0), (0, 0), (50, VOCAB - 52)], constant_values=-5.0),
    )
    corruption = noise.absorbing(config.mask, forbidden=noise.specials(tokenizer()))
    return mj.LM(model, {}, tokenizer(), corruption, "teller")


@rule
def witness(key, view, memory):
    """One token a step, from the left: 60 where the model was told the view's time and encoded at 0, else 61."""
    right = (jnp.abs(view.logits[0, 50] - view.t) < 1e-6) & (jnp.abs(view.logits[0, 51]) < 1e-6)
    first = view.masked & (jnp.cumsum(view.masked) == 1)
    said = view.stats._replace(sample=jnp.where(right, 60, 61) + 0 * view.canvas)
    return accept(view._replace(stats=said), first), memory


@pytest.mark.parametrize("pattern", ["bidirectional", "block_causal"])
@pytest.mark.parametrize("steps", [None, 16])
def test_the_model_gets_the_time_of_the_rule_and_zero_when_it_encodes(pattern, steps):
    lm = teller(pattern)
    out = mj.sample(
        lm,
        ["def x", "for value in range(count):\n    print(total)" * 3],
        max_tokens=12,
        sampler=witness(),
        plan=mj.Plan(steps=steps),
    )
    for tokens, length in zip(out.tokens, out.lengths, strict=True):
        assert length == 12 and set(np.asarray(tokens)[:length].tolist()) == {60}


@pytest.mark.long
def test_a_guided_pass_over_a_part_of_the_canvas_gets_the_time():
    plan = mj.Plan(refresh=mj.Refresh.dual())
    out = mj.sample(
        teller("bidirectional"), "def x", max_tokens=12, sampler=witness(), plan=plan, guidance=0.5
    )
    assert set(np.asarray(out.tokens[0])[: out.lengths[0]].tolist()) == {60}


def test_scoring_gives_each_canvas_the_time_of_its_share_of_masks():
    weight = np.array([[0, 2.0, 2.0, 0, 4.0], [0, 1.0, 1.0, 0, 2.0]])
    canvas = np.array([-1, 0, 0, 1, 1])
    np.testing.assert_allclose(canvas_times(canvas, weight), [[0, 0.5, 0.5, 0.25, 0.25], [0, 1, 1, 0.5, 0.5]])
    lm = teller("block_causal")
    got = mj.logits(lm, [[4, 70, 4, 70]])[0]
    np.testing.assert_allclose(got[:, 50], 0.5)
    np.testing.assert_allclose(mj.logits(lm, [[70, 70]], time=0.25)[0][:, 50], 0.25)
    assert np.isfinite(mj.score(lm, "def x", "return y", samples=4).log_p)
    for bad in (1.5, [0.1, 0.2]):
        with pytest.raises(ValueError, match="time is"):
            mj.logits(lm, [[70, 70]], time=bad)


def test_objectives_give_each_canvas_its_time():
    model, told = teller("block_causal").model, []
    model = model._replace(
        apply=lambda p, given: told.append(given.time) or given.time[..., None],
        head=lambda p, h: jnp.zeros((*h.shape[:2], VOCAB)),
    )
    laid = model.layout(np.arange(100, 116), 0)
    batch = Batch(*(jnp.asarray(x)[None] for x in laid))
    # The time is an output of the same program: outside of it there is only a tracer.
    run = jax.jit(lambda key: (masked_elbo()(key, model, {}, batch, noise.absorbing(4)), told[0]))
    time, canvas = np.asarray(run(jax.random.key(0))[1])[0], np.asarray(laid.canvas)
    assert (time[canvas < 0] == 0).all() and (canvas < 0).any()
    per = [set(time[canvas == c].tolist()) for c in (0, 1)]
    assert all(len(x) == 1 and 0 < min(x) <= 1 for x in per) and per[0] != per[1]
