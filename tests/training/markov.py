"""A Markov source of known entropy, and its exact denoiser in the place of a model: bounds must equal the entropy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import models, noise
from mercury_jax.config import ModelConfig
from mercury_jax.types import Batch

STATES, LENGTH, MASK, FORBIDDEN = 4, 16, 5, (4, 5)  # ids 0..3 are data, 4 is never drawn, 5 is the mask
RNG = np.random.default_rng(0)
CHAIN = RNG.dirichlet(np.full(STATES, 0.35), size=STATES)
FIRST = np.linalg.matrix_power(CHAIN, 200)[0]
NOISES = {
    "absorbing": noise.absorbing(MASK, forbidden=FORBIDDEN),
    "absorbing, cosine": noise.absorbing(MASK, noise.cosine(), FORBIDDEN),
    "absorbing, polynomial": noise.absorbing(MASK, noise.polynomial(2.0), FORBIDDEN),
    "uniform": noise.uniform(6, forbidden=FORBIDDEN),
    "uniform, cosine": noise.uniform(6, noise.cosine(), FORBIDDEN),
    "hybrid": noise.hybrid(6, MASK, 0.2, FORBIDDEN),
    "hybrid, no uniform": noise.hybrid(6, MASK, 0.0, FORBIDDEN),  # GIDD's published p_unif-0.0
    "hybrid, half": noise.hybrid(6, MASK, 0.5, FORBIDDEN),
}


def entropy() -> float:
    """Nats per token of a sequence."""
    first = -(FIRST * np.log(FIRST)).sum()
    step = -(FIRST[:, None] * CHAIN * np.log(CHAIN)).sum()
    return (first + (LENGTH - 1) * step) / LENGTH


def sequences(seed: int, count: int) -> np.ndarray:
    """Draws sequences [count, LENGTH]."""
    rng = np.random.default_rng(seed)
    x = np.zeros((count, LENGTH), np.int32)
    x[:, 0] = rng.choice(STATES, size=count, p=FIRST)
    edges = CHAIN.cumsum(1)
    for i in range(1, LENGTH):
        x[:, i] = np.minimum((rng.random((count, 1)) > edges[x[:, i - 1]]).sum(1), STATES - 1)
    return x


def smoothed(likelihood):
    """log p(x_i | noised sequence) [B, L, K] by the forward-backward algorithm, of likelihoods q(xt_i | x_i)."""
    chain, first = jnp.asarray(CHAIN, jnp.float32), jnp.asarray(FIRST, jnp.float32)
    unit = lambda x: x / x.sum(-1, keepdims=True)

    def forward(a, e):
        a = unit((a @ chain) * e)
        return a, a

    def backward(b, e):
        b = unit((b * e) @ chain.T)
        return b, b

    by_step = jnp.moveaxis(likelihood, 1, 0)
    start = unit(first * by_step[0])
    ahead = jnp.concatenate([start[None], jax.lax.scan(forward, start, by_step[1:])[1]])
    end = jnp.ones_like(start)
    behind = jnp.concatenate([end[None], jax.lax.scan(backward, end, by_step[1:][::-1])[1]])[::-1]
    return jnp.log(jnp.moveaxis(unit(ahead * behind), 0, 1) + 1e-30)


def likelihoods(corruption, xt, t):
    """q(xt | x) for each of the data's ids x, up to a factor: written from the definition, not from `bound_terms`."""
    same = jax.nn.one_hot(xt, MASK + 1)[..., :STATES]
    if corruption.kind == "absorbing":
        return jnp.where((xt == MASK)[..., None], 1.0, same)
    alpha = corruption.alpha(t)[..., None]
    share = 1.0 if corruption.uniform_share is None else corruption.uniform_share(t)[..., None]
    other = (1.0 - alpha) * share / STATES
    return jnp.where((xt == MASK)[..., None], 1.0, alpha * same + other)


@functools.cache
def exact(name: str, posterior: bool = False):
    """A model whose logits are log p(x_i | the other tokens), or log p(x_i | all tokens) with `posterior`.

    `params` is a number that is added to the logits of id 0.
    """
    corruption = NOISES[name]
    config = ModelConfig(
        vocab=6, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16, pattern="bidirectional", block=LENGTH,
        mask=MASK, pad=4, eos=0,
    )  # fmt: skip
    model = models.build(config)

    def apply(params, given, **_):
        own = likelihoods(corruption, given.tokens, given.time)
        found = smoothed(own) - (0.0 if posterior else jnp.log(jnp.maximum(own, 1e-9)))
        found = found.at[..., 0].add(params)
        return jnp.concatenate([found, jnp.full((*found.shape[:2], 2), -1e9)], axis=-1)

    return model._replace(
        apply=apply,
        head=lambda params, hidden: hidden,
        hides_padding=False,
        config=dataclasses.replace(config, timed=True),
    ), corruption


def batch(model, texts: np.ndarray) -> Batch:
    """Texts [N, LENGTH] as rows."""
    laid = model.layout(texts[0], 0)
    wide = lambda x: jnp.broadcast_to(x, (len(texts), *x.shape))
    return Batch(jnp.asarray(texts)[:, laid.positions], *(wide(x) for x in laid[1:]))


def estimate(
    objective, name: str, chunks: int = 16, rows: int = 2048, shift: float = 0.0, posterior: bool = False
) -> tuple[float, float, set]:
    """Mean loss per token, its standard error, and the names of the metrics."""
    model, corruption = exact(name, posterior)

    @jax.jit
    def each(key, data):
        loss = objective(key, model, jnp.float32(shift), data, corruption)
        return loss.per_example.sum() / loss.weight.sum(), loss.metrics

    found = [each(jax.random.key(i), batch(model, sequences(i, rows))) for i in range(chunks)]
    values = np.array([float(x) for x, _ in found])
    return values.mean(), values.std(ddof=1) / np.sqrt(chunks), set(found[0][1])
