"""Diffusion models initialised from autoregressive checkpoints (Qwen2, Qwen2.5, Qwen3, Llama).

They have the tensors of the original model. What differs is the attention pattern, the mask token, and which position's
logits predict a token (`alignment`).
"""

import functools
from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub import family, generation
from mercury_jax.hub.families.qwen_llama import EXPERTS, experts_of, export_config
from mercury_jax.hub.family import UNUSED, Family, Json, Keys, allow, register

# --- Dream, Dream-Coder, DiffuCoder, DreamOn: Qwen2.5 made bidirectional; logits at position i predict token i + 1

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
        decoding=generation.dream_decoding,
    )
)  # fmt: skip


# --- Fast-dLLM v2: Qwen2.5 in causal blocks; logits at position i predict token i + 1 (arXiv 2509.26328)

FAST_DLLM_MASK, FAST_DLLM_BLOCK = 151665, 32  # where config.json does not say
FAST_DLLM_SMALL_BLOCK = 8


def _fast_dllm_decoding(config: Json, generation: Json) -> dict[str, Any]:
    """Settings of the model card. generation_config.json is a copy of Qwen2.5's, which `generate` does not read."""
    small = FAST_DLLM_SMALL_BLOCK
    fits = config.get("bd_size", FAST_DLLM_BLOCK) % small == 0
    return {
        "rule": "scheduled",
        "params": {"p": 0.9},
        "processors": {"temperature": {"t": 1.0}},
        "temperature": 0.0,
        **({"block": small} if fits else {}),
        "source": "model card of Fast_dLLM_v2_7B: small_block_size 8, threshold 0.9",
    }


register(
    Family(
        name="Fast-dLLM v2",
        architectures=("Fast_dLLM_QwenForCausalLM",),
        checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
        keys=family.QWEN2_KEYS | {"bd_size": int, "conplemenrary_mask": UNUSED},  # the second for training only
        config=lambda config: family.decoder_config(
            config, default_mask=FAST_DLLM_MASK, qkv_bias=True, out_bias=False, pattern="block_causal",
            block=config.get("bd_size", FAST_DLLM_BLOCK), alignment="shifted",
        ),
        noise=NoiseConfig(kind="absorbing"),
        block="32",
        about="masked blocks, made of Qwen2.5",
        decoding=_fast_dllm_decoding,
        export=lambda c: export_config(c, "Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", bd_size=c.block),
        licence="Apache-2.0",
    )
)  # fmt: skip


# --- SDAR and TraDo: Qwen3, dense or with experts, with block-causal attention (arXiv 2510.06303)

SDAR_MASK, SDAR_BLOCK = 151669, 4  # of the published models without these keys in config.json
SDAR_KEYS = family.KEYS | family.NO_WINDOW | family.NO_BIAS | allow({
    "block_size": int,
    "debug ep_size fuse_cross_entropy micro_forward skip_checkpoint use_deepep": UNUSED,  # training only
})  # fmt: skip
SDAR_MOE_KEYS = SDAR_KEYS | EXPERTS


def _export_sdar(c: ModelConfig) -> dict[str, Any]:
    kind = ("SDARForCausalLM", "sdar") if c.experts is None else ("SDARMoeForCausalLM", "sdar_moe")
    return export_config(c, *kind, block_size=c.block)


register(
    Family(
        name="SDAR, TraDo",
        architectures=("SDARForCausalLM", "SDARMoeForCausalLM"),
        checkpoints=("JetLM/SDAR-4B-Chat", "JetLM/SDAR-30B-A3B-Chat", "Gen-Verse/TraDo-8B-Instruct"),
        keys=lambda config: SDAR_MOE_KEYS if "SDARMoeForCausalLM" in config["architectures"] else SDAR_KEYS,
        config=lambda config: family.decoder_config(
            config, default_mask=SDAR_MASK, qk_norm=True, experts=experts_of(config), pattern="block_causal",
            block=config.get("block_size", SDAR_BLOCK),
        ),
        noise=NoiseConfig(kind="absorbing"),
        block="4 to 64",
        about="masked blocks, made of Qwen3",
        decoding={
            "rule": "scheduled", "params": {"p": 0.85}, "processors": {"temperature": {"t": 1.0}}, "temperature": 1.0,
            "source": "JetAstra/SDAR generate.py: low_confidence_dynamic, as many steps as tokens",
        },
        export=_export_sdar,
        licence="MIT",
    )
)  # fmt: skip


# --- dllm's tiny-A2D (Qwen2, Qwen3, Llama) and Open-dCoder (Qwen2.5), made bidirectional

# architecture -> (model_type, biases on q, k and v, norms of q and k)
A2D_KINDS = {
    "A2DQwen2LMHeadModel": ("a2d-qwen2", True, False),
    "A2DQwen3LMHeadModel": ("a2d-qwen3", False, True),
    "A2DLlamaLMHeadModel": ("a2d-llama", False, False),
}


def _a2d_keys(config: Json) -> Keys:
    biased = "A2DQwen2LMHeadModel" in config["architectures"]
    known = family.QWEN2_KEYS if biased else family.KEYS | family.NO_WINDOW | family.NO_BIAS
    return known | {"pretraining_tp": (1,)}


def _a2d_config(config: Json, alignment: str = "same_position") -> ModelConfig:
    """Converts config.json, which must have a mask id: these families have no fixed one."""
    if config.get("mask_token_id") is None:
        raise refuse("mask", None, "an id: neither config.json nor the tokenizer names the mask; pass mask=")
    named = [A2D_KINDS[name] for name in config["architectures"] if name in A2D_KINDS]
    _, bias, norm = named[0] if named else ("qwen2", True, False)
    return family.decoder_config(
        config,
        qkv_bias=bias,
        out_bias=False,
        qk_norm=norm,
        pattern="bidirectional",
        block=32,
        alignment=alignment,
    )


def _export_a2d(c: ModelConfig) -> dict[str, Any]:
    for architecture, (kind, bias, norm) in A2D_KINDS.items():
        if (bias, norm) == (c.qkv_bias, c.qk_norm):
            return export_config(c, architecture, kind)
    raise refuse("qkv_bias, qk_norm", (c.qkv_bias, c.qk_norm), "one of the two, or none")


register(
    Family(
        name="tiny-A2D",
        architectures=tuple(A2D_KINDS),
        checkpoints=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"),
        keys=_a2d_keys,
        config=_a2d_config,
        noise=NoiseConfig(kind="absorbing"),
        about="masked, small, made of Qwen or Llama",
        export=_export_a2d,
        licence="Apache-2.0",
        decoding={
            "rule": "confidence", "temperature": 0.0, "block": 32,
            "source": "ZHZisZZ/dllm examples/a2d/mdlm/sample.py: low_confidence, steps = tokens, block_size 32",
        },
        rank=1,
    ),
    Family(
        name="Open-dCoder",
        architectures=("Qwen2ForCausalLM",),
        checkpoints=("fredzzp/open-dcoder-0.5B",),
        keys=family.QWEN2_KEYS,
        config=functools.partial(_a2d_config, alignment="shifted"),
        noise=NoiseConfig(kind="absorbing"),
        about="masked, made of Qwen2.5-Coder",
        # config.json and the architecture are those of Qwen2.5; only a mask id (with remote code) tells them apart.
        fits=lambda config: config.get("mask_token_id") is not None and "auto_map" in config,
        export=lambda c: export_config(
            c, "Qwen2ForCausalLM", "qwen2", auto_map={"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"}
        ),
        licence="Apache-2.0",
        # The defaults of the generation class. The repository's sample.py uses `alg="p2"` instead.
        decoding={
            "rule": "dream_entropy", "params": {"alg_temp": 0.0}, "temperature": 0.0, "block": generation.WHOLE_ANSWER,
            "source": "pengzhangzhi/Open-dLLM MDMGenerationConfig: alg entropy, temperature 0, steps = tokens",
        },
        rank=1,
    ),
)  # fmt: skip
