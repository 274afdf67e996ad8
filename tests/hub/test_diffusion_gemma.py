"""DiffusionGemma against transformers: its logits, with and without self-conditioning, behind a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hub.goldens_of import golden, logits_of

LIMIT = 1e-4
CHECKPOINTS = ["diffusion_gemma", "diffusion_gemma_other"]  # the second: every size drawn at random


@functools.partial(jax.jit, static_argnums=0)
def denoise(model, params, tokens, canvas, carry_logits, conditioned):
    """(canvas logits behind the encoded tokens); conditioned: whether carry_logits are told."""
    (rows, known), length = tokens.shape, canvas.shape[1]
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    yes = jnp.ones((rows,), bool)
    nothing = jax.tree.map(jnp.zeros_like, model.condition(params, carry_logits))
    carry = jax.tree.map(lambda x: jnp.where(conditioned, x, 0), model.condition(params, carry_logits))
    pad = lambda x: jnp.zeros((rows, known, *x.shape[2:]), x.dtype)
    cache = model.empty_cache(rows, known + length)
    _, cache = model.forward(
        params, tokens, cache, full(0), full(known), full(known), yes, jax.tree.map(pad, nothing)
    )
    hidden, _ = model.forward(
        params, canvas, cache, full(known), full(length), full(known + length), ~yes, carry
    )
    return model.head(params, hidden)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_canvas_logits_are_transformers(name):
    g = golden(name)
    run = lambda conditioned: denoise(
        g.opened.model, g.params, g.said["tokens"], g.said["canvas"], g.said["carry_logits"], conditioned
    )
    plain, told = run(False), run(True)
    assert np.abs(plain - g.said["logits"]).max() <= LIMIT
    assert np.abs(told - g.said["logits_conditioned"]).max() <= LIMIT
    assert np.abs(g.said["logits"] - g.said["logits_conditioned"]).max() > 0.1  # the signal is heard


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_encoder_predicts_as_transformers_does(name):
    g = golden(name)
    if "encoder_logits" not in g.said:
        pytest.fail("the golden has no encoder logits")
    assert np.abs(logits_of(g, g.said["tokens"]) - g.said["encoder_logits"]).max() <= LIMIT
