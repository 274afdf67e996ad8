"""Dream, Dream-Coder, DiffuCoder, DreamOn: Qwen2.5 made bidirectional, its logits still one position ahead."""

from __future__ import annotations

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import Json

MASK = 151666


def config(config: Json) -> ModelConfig:
    """Dream's config.json; biases on queries, keys and values are not written there."""
    return ModelConfig(
        **decoder.sizes(
            {"mask_token_id": MASK, **config}, qkv_bias=True, out_bias=False, pattern="bidirectional", block=32,
            alignment="shifted",
        )
    )  # fmt: skip


DREAM = Family(
    name="Dream",
    architectures=("DreamModel",),
    checkpoints=(
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Instruct",
        "Dream-org/DreamOn-v0-7B",
    ),
    keys=decoder.KEYS.plus(decoder.NO_WINDOW).plus(decoder.FIXED_BIAS),
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, made of Qwen2.5; DiffuCoder and DreamOn too",
    ignored=decoder.IGNORED,
    export=lambda c: decoder.export(c, architectures=["DreamModel"], model_type="Dream"),
    licence="Apache-2.0 (DiffuCoder: Apple's)",
)
