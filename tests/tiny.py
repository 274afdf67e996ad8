"""Small models with random weights, and a small tokenizer: what the laws of decoding are tested on."""

import functools

import jax

from mercury_jax import models, noise
from mercury_jax.config import ModelConfig
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM

VOCAB = 320


@functools.cache
def tokenizer() -> Tokenizer:
    words = [
        "def", "return", "if", "else", "for", "in", "range", "print", "value", "total", "count", "x", "y",
        "z",
    ]  # fmt: skip
    texts = [f"{a} {b}({c}):\n    return {c}" for a in words for b in words for c in words[-3:]]
    return Tokenizer.train(texts, VOCAB)


def tiny(
    pattern: str = "causal_encoder",
    block: int = 8,
    kind: str = "absorbing",
    dtype: str = "float32",
    layers: int = 2,
) -> LM:
    """The same object for the same arguments, so that tests share compiled programs.

    One layer compiles in three quarters of the time; but its keys know nothing of their context, so that a wrong
    cache shows only with two.
    """
    return _tiny(pattern, block, kind, dtype, layers)  # the cache tells tiny() from tiny("causal_encoder")


@functools.cache
def _tiny(pattern: str, block: int, kind: str, dtype: str, layers: int) -> LM:
    config = ModelConfig(
        vocab=VOCAB, width=16, layers=layers, heads=2, kv_heads=1, head_dim=8, ffn=32,
        pattern=pattern, block=block, dtype=dtype, context=256,
    )  # fmt: skip
    model = _model(config)
    forbidden = noise.specials(tokenizer())
    corruption = {
        "absorbing": lambda: noise.absorbing(config.mask, forbidden=forbidden),
        "uniform": lambda: noise.uniform(VOCAB, forbidden=forbidden),
        "hybrid": lambda: noise.hybrid(VOCAB, config.mask, forbidden=forbidden),
    }[kind]()
    return LM(model, _params(layers), tokenizer(), corruption, f"tiny {pattern}")


_model = functools.cache(models.build)


@functools.cache
def _params(layers: int):
    """The same for every pattern: shapes and draws know nothing of it."""
    config = ModelConfig(vocab=VOCAB, width=16, layers=layers, heads=2, kv_heads=1, head_dim=8, ffn=32)
    # Larger weights than at init: a model whose tokens depend on each other.
    init = lambda key: jax.tree.map(lambda x: 2.0 * x, models.build(config).init(key))
    with jax.enable_x64(False):
        return jax.jit(init)(jax.random.key(1))


PATTERNS = ("causal_encoder", "block_causal", "bidirectional")
