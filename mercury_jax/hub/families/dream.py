"""Dream, Dream-Coder, DiffuCoder, DreamOn: Qwen2.5 made bidirectional; logits at position i predict token i + 1."""

from __future__ import annotations

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.families import qwen_llama
from mercury_jax.hub.family import Family, Json

MASK = 151666


def _config(config: Json) -> ModelConfig:
    return ModelConfig(
        **qwen_llama.config_fields(
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
    keys=qwen_llama.KEYS.plus(qwen_llama.NO_WINDOW).plus(qwen_llama.FIXED_BIAS),
    config=_config,
    names=qwen_llama.tensor_names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, made of Qwen2.5; DiffuCoder and DreamOn too",
    ignored=qwen_llama.IGNORED,
    export=lambda c: qwen_llama.export_config(c, architectures=["DreamModel"], model_type="Dream"),
    licence="Apache-2.0 (DiffuCoder: Apple's)",
)
