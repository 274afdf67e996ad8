"""Logits equal those of each family's reference implementation, on checkpoints in the published files' format."""

import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.types import Pass
from tests.hub.goldens_of import NAMES, forward, golden, limit, logits_of

# Models whose reference takes more than tokens have their own tests below.
PLAIN = [n for n in NAMES if not n.startswith(("diffusion_gemma", "mdlm", "bd3lm", "duo", "gidd"))]


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_the_references(name):
    g = golden(name)
    want = g.said["logits"]
    if (c := g.opened.config).alignment == "shifted" and c.pattern == "bidirectional":
        want = np.concatenate([want[:, :1], want[:, :-1]], axis=1)
    got = logits_of(g, g.said["tokens"])
    assert want.std() > 0.3  # logits that vary: a model of zeros would agree with anything near zero
    assert np.abs(got - want).max() <= limit(g.said["fp64_diff"])


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [n for n in PLAIN if n in ("llada2", "sdar", "sdar_moe", "fast_dllm")])
def test_logits_of_a_block_behind_a_cache_equal_the_references(name):
    g = golden(name)
    model, tokens, canvas = g.opened.model, g.said["tokens"], g.said["canvas_tokens"]
    rows, block = canvas.shape
    known, total = tokens.shape[1] - block, tokens.shape[1]
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    yes = jnp.ones((rows,), bool)
    cache = model.empty_cache(rows, total + block)
    given = Pass(jnp.asarray(tokens[:, :known]), cache, full(0), full(known), full(known), yes)
    _, cache = forward(model, g.params, given)
    given = Pass(jnp.asarray(canvas), cache, full(known), full(block), full(total), ~yes)
    got, _ = forward(model, g.params, given)
    want = g.said["canvas_logits"]
    if g.opened.config.alignment == "shifted":  # the first of the block is said by the token before it
        got, want = np.asarray(got)[:, 1:], want[:, :-1]
    assert np.abs(np.asarray(got) - want).max() <= limit(g.said["fp64_diff"])
