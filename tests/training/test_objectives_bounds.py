"""Bounds under every kind of noise, with an exact denoiser; DiffusionGemma's loss; what weights and shares are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.config import ModelConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.training.objectives import (
    cart,
    diffusion_gemma,
    gidd_elbo,
    llada,
    masked,
    masked_and_edited,
    masked_elbo,
    objective as parts,
    range_variances,
    score_entropy,
    uniform_elbo,
)
from mercury_jax.types import Batch
from tests.tiny import tiny
from tests.training import markov

POSTERIOR = dict(posterior=True)
BOUNDS = {
    "masked": (masked_elbo(), "absorbing", {}),
    "masked, cosine": (masked_elbo(), "absorbing, cosine", {}),
    "complementary": (masked_elbo(complementary=True), "absorbing", {}),
    "complementary, cosine": (masked_elbo(complementary=True), "absorbing, cosine", {}),
    "masked, polynomial": (masked_elbo(), "absorbing, polynomial", {}),
    "llada": (llada(), "absorbing", {}),
    "score entropy": (score_entropy(), "absorbing", {}),
    "uniform": (uniform_elbo(), "uniform", {}),
    "uniform, cosine": (uniform_elbo(), "uniform, cosine", {}),
    "uniform, posterior": (uniform_elbo(posterior=True), "uniform", POSTERIOR),
    "hybrid": (gidd_elbo(), "hybrid", {}),
    "hybrid, no uniform": (gidd_elbo(), "hybrid, no uniform", {}),
    "hybrid, half uniform": (gidd_elbo(), "hybrid, half", {}),
    "hybrid, posterior": (gidd_elbo(posterior=True), "hybrid", POSTERIOR),
}
SLOW = {name for name in BOUNDS if name.endswith(("cosine", "polynomial", "posterior"))} | {
    "llada", "complementary", "hybrid", "hybrid, half uniform", "hybrid, no uniform", "score entropy",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BOUNDS]
)
def test_with_an_exact_denoiser_the_bound_is_the_entropy_within_one_percent(name):
    objective, kind, how = BOUNDS[name]
    mean, se, metrics = markov.estimate(objective, kind, chunks=24, rows=8192, **how)
    assert "nats_per_token" in metrics
    assert abs(mean / markov.entropy() - 1.0) < 0.01 and 3 * se < 0.01 * markov.entropy()


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["masked", "score entropy", "uniform", "hybrid"])
def test_with_a_wrong_denoiser_the_bound_is_above_the_entropy(name):
    objective, kind, _ = BOUNDS[name]
    mean, se, _ = markov.estimate(objective, kind, shift=1.0)
    assert mean - 4 * se > 1.02 * markov.entropy()


NO_BOUNDS = {
    "clipped": (uniform_elbo(clip=2.0), "uniform"),
    "dynamic": (gidd_elbo(weights="dynamic"), "hybrid"),
    "range": (masked_elbo(least=0.3, most=0.8), "absorbing"),
    "masked, clipped": (masked_elbo(clip=2.0), "absorbing"),
    "cart": (cart(), "absorbing"),
    "llada, clipped": (llada(clip=2.0), "absorbing"),
    "edited": (masked_and_edited(causal=0), "absorbing"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NO_BOUNDS)
def test_what_is_no_bound_is_not_called_one(name):
    objective, kind = NO_BOUNDS[name]
    mean, se, metrics = markov.estimate(objective, kind, chunks=4)
    assert "nats_per_token" not in metrics and "weighted_ce" in metrics
    assert abs(mean - markov.entropy()) > 4 * se


GRADIENTS = {
    "masked": BOUNDS["masked"],
    "complementary": BOUNDS["complementary"],
    "score entropy": BOUNDS["score entropy"],
    "cart": (cart(), "absorbing", {}),
    "uniform": BOUNDS["uniform"],
    "uniform, posterior": BOUNDS["uniform, posterior"],
    "hybrid": BOUNDS["hybrid"],
    "hybrid, no uniform": BOUNDS["hybrid, no uniform"],
}


@pytest.mark.long
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_finite_differences(name):
    objective, kind, how = GRADIENTS[name]
    with jax.enable_x64(True):
        model, corruption = markov.exact(kind, **how)
        data = markov.batch(model, markov.sequences(0, 16))

        def loss(shift):
            found = objective(jax.random.key(0), model, shift, data, corruption)
            return found.per_example.sum() / found.weight.sum()

        at, step = jnp.float64(0.7), 1e-4
        slope = (loss(at + step) - loss(at - step)) / (2 * step)
        assert float(jax.grad(loss)(at)) == pytest.approx(float(slope), rel=1e-4)


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("kind", "posterior"),
    [
        ("absorbing", False), ("uniform", False), ("uniform", True), ("hybrid", False),
        ("hybrid, no uniform", False),
    ],
)  # fmt: skip
def test_score_is_the_likelihood_under_every_kind_of_noise(kind, posterior):
    model, corruption = markov.exact(kind, posterior)
    lm = dataclasses.replace(
        tiny("bidirectional"), model=model, params=jnp.float32(0.0), corruption=corruption
    )
    texts = markov.sequences(1, 128)
    how = dict(posterior=True) if posterior else {}
    found = mj.score(lm, texts[:, :1], texts[:, 1:], samples=128, **how)
    true = np.log(markov.CHAIN[texts[:, :-1], texts[:, 1:]]).sum(1)
    gap = np.asarray(found.log_p) - true
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(len(texts)) + 1e-3
    # Errors are those of independent samples; strata vary less, most where the times of hybrid noise meet masks alone.
    error, least = np.sqrt((np.asarray(found.se) ** 2).mean()), 0.3 if kind == "hybrid, no uniform" else 0.5
    assert least * error < gap.std() < 1.5 * error


def test_hybrid_noise_without_its_share_is_refused():
    corruption = noise.hybrid(6, 5)._replace(uniform_share=None)
    with pytest.raises(ValueError, match="corruption.uniform_share is None"):
        noise.bound_terms(corruption, jnp.zeros((2, 6)), *(jnp.zeros(2, jnp.int32),) * 2, jnp.full(2, 0.5))


@pytest.mark.parametrize("share", [None, lambda t: 0.0 * t], ids=["built in", "a user's function"])
def test_hybrid_noise_without_uniform_noise_has_the_terms_of_absorbing_noise(share):
    rng, mask = np.random.default_rng(0), 8
    logits = jnp.asarray(rng.normal(size=(64, 9)), jnp.float32)
    x0 = jnp.asarray(rng.integers(mask, size=64), jnp.int32)
    xt = jnp.where(rng.random(64) < 0.5, mask, x0)
    t = jnp.asarray(rng.uniform(0.01, 0.99, 64), jnp.float32)
    hybrid = noise.hybrid(9, mask, 0.0)
    if share is not None:
        hybrid = hybrid._replace(alpha=noise.linear(), uniform_share=share)
    got, want = (noise.bound_terms(c, logits, x0, xt, t) for c in (hybrid, noise.absorbing(mask)))
    np.testing.assert_allclose(
        got.weight * got.divergence, want.weight * want.divergence, rtol=1e-4, atol=1e-5
    )


# --- formulas of the papers, written out


def test_the_terms_of_uniform_noise_are_those_of_udlm():
    """UDLM, arXiv 2412.10193, eq. 18, for the linear schedule: x-bar = V alpha x + 1 - alpha."""
    size, rng = 7, np.random.default_rng(0)
    corruption = noise.uniform(size)
    logits = jnp.asarray(rng.normal(size=(64, size)), jnp.float32)
    x0, xt = (jnp.asarray(rng.integers(size, size=64), jnp.int32) for _ in range(2))
    t = jnp.asarray(rng.uniform(0.05, 0.95, 64), jnp.float32)
    terms = noise.bound_terms(corruption, logits, x0, xt, t)
    alpha = (1.0 - t)[:, None]
    bar, bar_p = (size * alpha * x + 1.0 - alpha for x in (jax.nn.one_hot(x0, size), jax.nn.softmax(logits)))
    at = lambda x: jnp.take_along_axis(x, xt[:, None], axis=1)
    inner = (bar / at(bar)) * jnp.log(at(bar_p) * bar / (bar_p * at(bar)))
    want = -1.0 / (size * alpha[:, 0]) * ((size / at(bar) - size / at(bar_p))[:, 0] - inner.sum(1))
    np.testing.assert_allclose(terms.weight * terms.divergence, want, rtol=2e-4, atol=2e-5)


def test_weights_of_hybrid_noise_are_those_of_gidd():
    """GIDD, arXiv 2503.04482, with gamma = 1: weights of clean tokens, masks and noise; dynamic ones are relative."""
    size, mask, share = 9, 8, 0.2
    corruption = noise.hybrid(size, mask, share)
    t = jnp.asarray([0.1, 0.5, 0.9, 0.3])
    c, n = 2 * share / (1 - share) * np.sqrt(t * (1 - t)), size - 1
    slope = (1 - 2 * t) / (2 * t * (1 - t)) * c
    on_clean = (c + (1 - t) * slope) / n / ((1 - t) * (1 - t + c / n))
    on_noise = (c + (1 - t) * slope) / ((1 - t) * c)
    x0 = jnp.zeros(4, jnp.int32)
    terms = lambda xt: noise.bound_terms(corruption, jnp.zeros((4, size)), x0, jnp.full(4, xt), t)
    np.testing.assert_allclose(terms(0).weight, on_clean, rtol=1e-4)
    np.testing.assert_allclose(terms(3).weight, on_noise, rtol=1e-4)
    np.testing.assert_allclose(terms(mask).weight, 1 / (t * (1 - t)), rtol=1e-4)
    np.testing.assert_allclose(terms(mask).weight / terms(mask).scale, 2.0, rtol=1e-4)


@pytest.mark.long
def test_cart_weights_are_the_double_sum_of_the_document():
    rng, p = np.random.default_rng(0), 0.3
    visible, document = rng.random((3, 12)) < 0.5, np.sort(rng.integers(1, 4, (3, 12)), axis=1)
    want = np.zeros((3, 12))
    for b, i, j in np.ndindex(3, 12, 12):
        if i != j and visible[b, j] and document[b, i] == document[b, j]:
            want[b, i] += 0.5 * p * (1 - p) ** (abs(i - j) - 1)
    found = masked.cart_weights(jnp.asarray(~visible), jnp.asarray(document), p)
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.long
def test_complementary_masks_score_every_token_once():
    model, corruption = markov.exact("absorbing")
    data = markov.batch(model, markov.sequences(0, 8))
    noised = masked.mask_canvases(jax.random.key(0), data, corruption, None, 1e-4)
    other = masked.complement(noised, data, corruption, None)
    assert (noised.masked ^ other.masked)[data.editable].all()
    np.testing.assert_allclose(corruption.alpha(noised.t) + corruption.alpha(other.t), 1.0, atol=1e-6)
    found = masked_elbo(complementary=True)(jax.random.key(0), model, 0.0, data, corruption)
    assert found.per_example.shape == (8,) and float(found.weight.sum()) == 2 * data.editable.sum()


# --- shares of documents


def packed(model, lengths=((9, 3), (14, 2), (5, 1))) -> Batch:
    """Documents of (tokens, prompt) in one row, packed as training packs them."""
    from mercury_jax.training.data import packing

    row = packing.PackedRow()
    for n, (tokens, prompt) in enumerate(lengths):
        row.add((0, n), model.layout(np.arange(tokens, dtype=np.int32) % 4, prompt))
    return jax.tree.map(jnp.asarray, packing.pack([row], 96, 4))


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("pattern", "predicts_next"),
    [("bidirectional", False), ("causal_encoder", False), ("causal_encoder", True), ("block_causal", False)],
)
def test_documents_and_shares(pattern, predicts_next):
    config = ModelConfig(
        vocab=6, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16, pattern=pattern, block=4, mask=5, pad=4,
        eos=0, predicts_next=predicts_next,
    )  # fmt: skip
    for prompts in ((3, 2, 1), (0, 0, 0)):
        data = packed(models.build(config), tuple(zip((9, 14, 5), prompts)))
        of = parts.documents(data)
        answers = [int(data.editable[of == n].sum()) for n in (1, 2, 3)]
        assert answers == [n - p for n, p in zip((9, 14, 5), prompts)]
        for how in ("answer", "canvas"):
            share = parts.shares(data, data.editable, how)
            np.testing.assert_allclose([share[of == n].sum() for n in (1, 2, 3)], 1.0, rtol=1e-5)
        by_canvas = parts.shares(data, data.editable, "canvas")
        sums = [float(by_canvas[data.canvas == c].sum()) for c in range(int(data.canvas.max()) + 1)]
        counts = [len(np.unique(data.canvas[of == n])) - (-1 in data.canvas[of == n]) for n in (1, 2, 3)]
        np.testing.assert_allclose(sums, np.repeat(1 / np.array(counts), counts), rtol=1e-5)


def test_the_variance_of_a_range_of_noise_is_measured():
    model, corruption = markov.exact("absorbing")
    batches = [markov.batch(model, markov.sequences(i, 16)) for i in range(24)]
    found = range_variances(jax.random.key(0), model, 0.0, batches, corruption, [(1e-3, 1.0), (0.4, 0.8)])
    assert found[0.4, 0.8] < found[1e-3, 1.0]
    with pytest.raises(ValueError, match="batches is 1; allowed: 2 or more"):
        range_variances(jax.random.key(0), model, 0.0, batches[:1], corruption, [(0.1, 1.0)])


# --- DiffusionGemma


def gemma(**more):
    config = GemmaConfig(
        vocab=24, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=32, window=8, block=4, context=64,
        global_head_dim=8, global_kv_heads=1, self_conditioning=True, encoder_scalars=True, predicts_next=True, pad=4,
        eos=0, **more,
    )  # fmt: skip
    model = models.build(config)
    return model, jax.jit(model.init)(jax.random.key(0)), noise.uniform(24, forbidden=(4,))


@pytest.mark.long
def test_diffusion_gemma_is_the_mean_over_documents_of_both_losses():
    model, params, corruption = gemma()
    data = packed(model)
    run = jax.jit(
        lambda objective: objective(jax.random.key(1), model, params, data, corruption), static_argnums=0
    )
    alone, both = (run(diffusion_gemma(encoder=w, self_condition=0.0)) for w in (0.0, 1.0))
    assert float(both.weight.sum()) == pytest.approx(3.0, rel=1e-6)
    a, b = both.metrics["canvas_ce"][0], both.metrics["causal_ce"][0]
    assert float(alone.per_example.sum()) == pytest.approx(float(a), rel=1e-5)
    assert float(both.per_example.sum()) == pytest.approx(float(a + b), rel=1e-5)
    # The encoder's loss by hand: each document's tokens after its first, from an autoregressive pass over it alone.
    of, means = np.asarray(parts.documents(data))[0], []
    for n in (1, 2, 3):
        ids = data.tokens[0][(of == n) & (data.canvas[0] < 0)]
        slots = jnp.arange(len(ids))
        ranges = jnp.zeros((len(ids), 2, 2), int).at[:, 0, 1].set(slots + 1)
        given = mj.types.PackedPass(ids[None], slots[None], ranges[None])
        log_p = jax.nn.log_softmax(model.head(params, model.apply(params, given)))[0]
        means.append(-np.take_along_axis(log_p[:-1], ids[1:, None], axis=1).mean())
    assert float(b) == pytest.approx(float(sum(means)), rel=1e-4)


@pytest.mark.long
def test_self_conditioning_of_diffusion_gemma_reaches_canvases_and_stops_its_gradient():
    model, params, corruption = gemma()
    data = packed(model)

    def loss(params, probability, encoder=0.0):
        objective = diffusion_gemma(encoder=encoder, self_condition=probability)
        return objective(jax.random.key(1), model, params, data, corruption).per_example.sum()

    assert float(loss(params, 0.0)) != float(loss(params, 1.0))
    assert float(loss(params, 0.0, 1.0) - loss(params, 0.0)) == pytest.approx(
        float(loss(params, 1.0, 1.0) - loss(params, 1.0)), rel=1e-4
    )  # clean tokens see none of it
    # With the first pass's prediction as a constant the gradient is the same.
    slope = jax.grad(loss)(params, 1.0)
    first = {}
    real = model.condition

    def constant(p, logits):
        first.setdefault("value", jax.lax.stop_gradient(real(params, logits)))
        return first["value"]

    held = model._replace(condition=constant)
    objective = diffusion_gemma(encoder=0.0, self_condition=1.0)
    again = jax.grad(lambda p: objective(jax.random.key(1), held, p, data, corruption).per_example.sum())(
        params
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), slope, again)


@pytest.mark.slow
def test_several_canvases_score_as_each_of_them_alone():
    """What gemma's own multi-canvas training is reported to break: canvas k sees the clean tokens before it alone."""
    model, params, corruption = gemma()
    ids = np.arange(13, dtype=np.int32) % 4
    whole = packed(model, ((13, 1),))
    key, objective = jax.random.key(3), diffusion_gemma(encoder=0.0, self_condition=0.0, least=0.499999)
    noised = lambda data: (
        noise.corrupt(
            jax.random.split(key, 3)[1], corruption, data.tokens, jnp.full(data.tokens.shape, 0.5),
            data.editable,
        ).xt
    )  # fmt: skip
    xt = noised(whole)
    hidden = parts.denoise(model, params, whole, xt)
    logits = model.head(params, hidden)
    for c in range(3):
        end = 1 + 4 * (c + 1)
        alone = jax.tree.map(jnp.asarray, model.layout(ids[:end], 1 + 4 * c))
        own, here = np.flatnonzero(alone.editable), np.asarray(whole.canvas[0] == c)
        tokens = jnp.asarray(alone.tokens).at[own].set(xt[0][here])
        given = mj.types.PackedPass(tokens[None], alone.positions[None], alone.ranges[None])
        want = model.head(params, model.apply(params, given))[0][own]
        np.testing.assert_allclose(logits[0][here], want, atol=2e-5)
    found = objective(key, model, params, whole, corruption)
    assert np.isfinite(float(found.per_example.sum())) and float(found.weight.sum()) == pytest.approx(1.0)


def test_objectives_of_other_noise_name_what_scores_it():
    model, params, corruption = gemma()
    data = packed(model)
    for objective, given, words in (
        (
            uniform_elbo(),
            noise.absorbing(5),
            "allowed: uniform, for uniform_elbo; masked_elbo scores absorbing",
        ),
        (
            gidd_elbo(),
            corruption,
            "allowed: hybrid, for gidd_elbo; uniform_elbo or diffusion_gemma scores uniform",
        ),
        (
            diffusion_gemma(),
            noise.hybrid(24, 5),
            "allowed: uniform, for diffusion_gemma; gidd_elbo scores hybrid",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            objective(jax.random.key(0), model, params, data, given)
    plain = models.build(dataclasses.replace(model.config, predicts_next=False))
    with pytest.raises(
        ValueError, match="encoder is 1.0; allowed: 0 for a model whose config has predicts_next"
    ):
        diffusion_gemma()(jax.random.key(0), plain, params, packed(plain), corruption)
    with pytest.raises(ValueError, match="least is 0.5; allowed: 0 < least < most = 0.3"):
        masked_elbo(least=0.5, most=0.3)
