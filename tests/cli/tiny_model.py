"""The tiny model of the command line's tests."""

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import models, noise
from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM

TEXTS = [f"def f{i}(x, y={i % 13}):\n    return x + {i} * y\n\n" for i in range(300)]


def tiny_lm() -> LM:
    """A model with random parameters, made without compiling."""
    tok = Tokenizer.train(TEXTS, 320)
    config = ModelConfig(
        vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8, context=128
    )
    model = models.build(config)
    corruption = noise.build(NoiseConfig(), config.vocab, config.mask, noise.specials(tok))
    rng = np.random.default_rng(0)
    # Drawn by numpy: JAX would compile for seconds.
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    return LM(model, params, tok, corruption, "tiny", {"note": "random"})
