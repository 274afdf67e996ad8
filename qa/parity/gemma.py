"""Gemma 4 and DiffusionGemma as transformers has them: configurations, and the logits of encoder and decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
    DynamicCache,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (  # pyright: ignore[reportMissingImports]
    EntropyBoundSamplerConfig,
)

EOS = 1
SLIDING, FULL = "sliding_attention", "full_attention"
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=4, patch_size=2, position_embedding_size=4,
)  # fmt: skip
AUDIO = dict(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 4],
    conv_kernel_size=3, attention_chunk_size=4, attention_context_left=3, output_proj_dims=8,
)  # fmt: skip
TEXT = dict(
    vocab_size=97, hidden_size=16, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    global_head_dim=16, num_global_key_value_heads=1, sliding_window=5, max_position_embeddings=256,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL], num_hidden_layers=5,
)  # fmt: skip
CAP = dict(final_logit_softcapping=30.0)  # a class attribute of DiffusionGemma's, a field of Gemma 4's
MOE = dict(num_experts=5, top_k_experts=2, moe_intermediate_size=12)


def diffusion() -> tuple[Any, Any]:
    """Proportions of the 26B one. Its soft cap is the default, 30, which `save_pretrained` leaves unsaid."""
    text = dict(TEXT, **MOE, use_bidirectional_attention="vision", eos_token_id=EOS)
    config = DiffusionGemmaConfig(text_config=text, vision_config=VISION, canvas_length=16)
    return DiffusionGemmaForBlockDiffusion, config


def sampling(eos: int) -> Any:
    """DiffusionGemma's sampler, cooled until a random model accepts several tokens a step and comes to rest."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=32, max_denoising_steps=12, sampler_config=EntropyBoundSamplerConfig(0.1), t_min=0.05,
        t_max=0.1, stability_threshold=1, confidence_threshold=0.3, pad_token_id=0, eos_token_id=eos, bos_token_id=2,
    )  # fmt: skip


def drawn(seed: int) -> tuple[Any, Any]:
    """A DiffusionGemma whose sizes the seed chose."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    between = lambda low, high: int(rng.integers(low, high + 1))
    heads, layers = between(3, 6), between(5, 7)
    kv = pick(*[k for k in range(1, heads + 1) if heads % k == 0])
    wide_kv = pick(*[k for k in range(1, heads + 1) if heads % k == 0])
    kinds = [SLIDING, SLIDING, FULL, *[pick(SLIDING, FULL) for _ in range(layers - 4)]]
    experts = between(3, 7)
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": float(between(100, 20_000))},
        FULL: {"rope_type": "proportional", "rope_theta": float(between(10_000, 2_000_000)),
               "partial_rotary_factor": pick(0.25, 0.5, 0.75)},
    }  # fmt: skip
    text = dict(
        vocab_size=between(70, 120), hidden_size=2 * between(8, 12), intermediate_size=between(17, 33),
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=2 * between(2, 6),
        global_head_dim=4 * between(3, 5), num_global_key_value_heads=wide_kv, sliding_window=between(3, 9),
        layer_types=[str(k) for k in rng.permutation(kinds)] + [FULL], num_hidden_layers=layers,
        num_experts=experts, top_k_experts=between(1, experts), moe_intermediate_size=between(5, 15),
        rms_norm_eps=pick(1e-6, 1e-5, 1e-4), rope_parameters=rope, max_position_embeddings=between(100, 400),
        final_logit_softcapping=between(10, 99) / 4,
    )  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=VISION, canvas_length=between(5, 13))
    return DiffusionGemmaForBlockDiffusion, config


def moe() -> tuple[Any, Any]:
    """Like 26B-A4B: dense and expert branches side by side, keys as values in the global layers."""
    text = dict(
        TEXT, **MOE, **CAP, enable_moe_block=True, attention_k_eq_v=True, hidden_size_per_layer_input=0
    )
    config = Gemma4Config(text_config=text, vision_config=VISION, audio_config=None)
    return Gemma4ForConditionalGeneration, config


def dense() -> tuple[Any, Any]:
    """Like 31B, text only."""
    text = dict(TEXT, **CAP, hidden_size=24, attention_k_eq_v=True, hidden_size_per_layer_input=0)
    return Gemma4ForCausalLM, Gemma4TextConfig(**text)


def per_layer() -> tuple[Any, Any]:
    """Like E2B: an embedding for each layer, and later layers that attend to the keys of earlier ones."""
    kinds = [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL]
    text = dict(
        TEXT, **CAP, layer_types=kinds, num_hidden_layers=7, num_kv_shared_layers=3, use_double_wide_mlp=True,
        num_global_key_value_heads=None, hidden_size_per_layer_input=6, vocab_size_per_layer_input=97,
    )  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config=VISION, audio_config=AUDIO)
    return Gemma4ForConditionalGeneration, config


def published(config: dict) -> dict:
    """`per_layer_config` as the two keys that published checkpoints have in its place."""
    wide = config.pop("per_layer_config")
    one = next(iter(wide.values()))
    assert all(v == one for v in wide.values())
    config["global_head_dim"] = one["head_dim"]
    config["num_global_key_value_heads"] = one.get("num_key_value_heads")
    config["torch_dtype"] = config.pop("dtype")
    return config


def passes(tokens: Any, canvas: Any, carry: Any) -> Any:
    """For `both`: the decoder's logits without and with self-conditioning, and the encoder's."""

    def run(model: Any) -> dict[str, Any]:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        bare = model(input_ids=tokens, past_key_values=cache, decoder_input_ids=canvas)
        said = carry.to(model.dtype)
        held = model(past_key_values=cache, decoder_input_ids=canvas, self_conditioning_logits=said)
        cap = model.final_logit_softcapping
        ahead = torch.tanh(model.lm_head(bare.encoder_last_hidden_state) / cap) * cap
        return dict(logits=bare.logits, conditioned=held.logits, encoder=ahead)

    return run
