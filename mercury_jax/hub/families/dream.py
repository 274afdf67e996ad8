"""Dream, Dream-Coder, DiffuCoder, DreamOn: Qwen2.5 made bidirectional; logits at position i predict token i + 1."""

import functools

from mercury_jax.config import NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import export_config
from mercury_jax.hub.family import Family, register

register(
    Family(
        name="Dream",
        architectures=("DreamModel",),
        checkpoints=(
            "Dream-org/Dream-v0-Instruct-7B",
            "Dream-org/Dream-Coder-v0-Instruct-7B",
            "apple/DiffuCoder-7B-Instruct",
            "Dream-org/DreamOn-v0-7B",
        ),
        keys=family.QWEN2_KEYS,
        config=functools.partial(
            family.decoder_config, default_mask=151666, qkv_bias=True, out_bias=False, pattern="bidirectional",
            block=32, alignment="shifted",
        ),
        noise=NoiseConfig(kind="absorbing"),
        about="masked, made of Qwen2.5; DiffuCoder and DreamOn too",
        export=functools.partial(export_config, architecture="DreamModel", model_type="Dream"),
        licence="Apache-2.0 (DiffuCoder: Apple's)",
    )
)  # fmt: skip
