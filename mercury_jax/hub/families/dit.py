"""Diffusion transformers (DiT) in the layout of their Hugging Face classes: MDLM, BD3-LM, DUO and GIDD.

All four have the same backbone, and the first three the same keys in config.json. They differ in the noise: MDLM is
masked diffusion, BD3-LM is masked diffusion block by block, DUO is uniform diffusion, and GIDD (dvruette/gidd) mixes
masks and uniform noise.
"""

from __future__ import annotations

import functools
from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub import family, generation
from mercury_jax.hub.family import UNUSED, Family, Json, allow, need, register
from mercury_jax.hub.params import TensorSource
from mercury_jax.models.dit import DiTConfig

# Tensors that are not parameters: rotary tables, and the range of times on which BD3-LM was trained.
CONSTANTS = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", r"^sampling_eps_(min|max)$")

KEYS = family.COMMON | allow({
    "vocab_size hidden_dim n_heads n_blocks cond_dim model_length": int, "causal": (False,), "adaln": (True,),
    "attn_backend": UNUSED,  # how the reference computes the same numbers
    "var_min sampling_eps_min sampling_eps_max": UNUSED,  # training only
})  # fmt: skip
TIMED = KEYS | {"time_conditioning": bool}


def _names(prefix: str, config: ModelConfig) -> dict[str, TensorSource]:
    """Maps the parameters to the tensors of a checkpoint; `prefix` precedes every name of a tensor."""
    linear = lambda path, name: {
        f"{path}/w": TensorSource(f"{prefix}{name}.weight", 1),
        f"{path}/b": TensorSource(f"{prefix}{name}.bias", fold=2),
    }
    sources = {
        "embed": TensorSource(f"{prefix}vocab_embed.embedding"),
        "norm/scale": TensorSource(f"{prefix}output_layer.norm_final.weight"),
    }
    sources |= linear("condition/first", "sigma_map.mlp.0") | linear("condition/second", "sigma_map.mlp.2")
    sources |= linear("modulation/proj", "output_layer.adaLN_modulation")
    sources |= linear("head", "output_layer.linear")
    for i in range(config.layers):
        ours, theirs = f"block_{i}", f"blocks.{i}"
        sources |= {
            f"{ours}/attention_norm/scale": TensorSource(f"{prefix}{theirs}.norm1.weight"),
            f"{ours}/mlp_norm/scale": TensorSource(f"{prefix}{theirs}.norm2.weight"),
            f"{ours}/qkv/w": TensorSource(f"{prefix}{theirs}.attn_qkv.weight", 1),
            f"{ours}/o/w": TensorSource(f"{prefix}{theirs}.attn_out.weight", 2),
        }
        sources |= linear(f"{ours}/modulation/proj", f"{theirs}.adaLN_modulation")
        sources |= linear(f"{ours}/up", f"{theirs}.mlp.0") | linear(f"{ours}/down", f"{theirs}.mlp.2")
    return sources


# Keys of config.json for width, heads, layers, width of the time conditioning, and context.
SIZES = ("hidden_dim", "n_heads", "n_blocks", "cond_dim", "model_length")
GIDD_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "timestep_cond_dim", "max_seq_len")


def _config(config: Json, sizes: tuple[str, ...] = SIZES, masked: bool = True, **ours: Any) -> DiTConfig:
    """Converts config.json; sizes that it does not have are constants in the reference implementation.

    The models use GPT-2's tokenizer, which has neither mask nor padding; its last id ends a text. Each model adds one
    id after it: the mask or, for uniform noise, the padding.
    """
    width, heads, layers, cond, context = (need(config, key) for key in sizes)
    vocab = need(config, "vocab_size")
    if heads < 1 or width % heads:
        raise refuse(f"config.json: {sizes[1]}", heads, f"a divisor of {sizes[0]} = {width}")
    id_of = lambda key, default: default if config.get(key) is None else config[key]
    mask = id_of("mask_token_id", vocab - 1) if masked else None
    pad = id_of("pad_token_id", vocab - 1 if mask is None else mask)
    fields = dict(
        vocab=vocab, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, layers=layers, ffn=4 * width,
        cond=cond, context=context, block=context, dtype=family.common_fields(config)["dtype"], mask=mask, pad=pad,
        eos=id_of("eos_token_id", (pad if mask is None else mask) - 1),
        timed=bool(config.get("time_conditioning", False)),
    )  # fmt: skip
    return DiTConfig(**(fields | ours))


def _bd3lm(config: Json) -> DiTConfig:
    if not config.get("cross_attn", True):  # the base checkpoint has one block, the context
        return _config(config, pattern="bidirectional", level="clipped")
    return _config(config, block=need(config, "block_size"), pattern="block_causal", level="clipped")


def _mdlm_decoding(config: Json, file: Json) -> dict[str, Any]:
    """Settings of MDLM; `ancestral_cache` reuses a prediction between steps, which needs a model without time."""
    published = {
        "rule": "ancestral" if config.get("time_conditioning") else "ancestral_cache",
        "temperature": 1.0,
        "block": generation.WHOLE_ANSWER,
        "steps": 128,
        "source": "kuleshov-group/mdlm configs/config.yaml: ddpm_cache",
    }
    return generation.with_generation_config(published, file)


def _export(
    c: ModelConfig, architecture: str, model_type: str, sizes: tuple[str, ...] = SIZES, **theirs: Any
) -> dict[str, Any]:
    """Converts our config to config.json; refuses sizes that the reference implementation has as constants."""
    assert isinstance(c, DiTConfig)
    have = (c.ffn, c.frequencies, c.rope_theta, c.norm_eps)
    want = (4 * c.width, 256, 10_000.0, 1e-5)
    if have != want:
        raise refuse("ffn, frequencies, rope_theta, norm_eps", have, f"{want}, which the family's code fixes")
    return dict(
        architectures=[architecture], model_type=model_type, vocab_size=c.vocab, torch_dtype=c.dtype,
        mask_token_id=c.mask, eos_token_id=c.eos, pad_token_id=c.pad,
        **dict(zip(sizes, (c.width, c.heads, c.layers, c.cond, c.context), strict=True)), **theirs,
    )  # fmt: skip


register(
    Family(
        name="MDLM",
        architectures=("MDLM",),
        checkpoints=("kuleshov-group/mdlm-owt",),
        keys=TIMED,
        config=_config,
        names=functools.partial(_names, "backbone."),
        noise=NoiseConfig(kind="absorbing"),
        about="DiT, GPT-2's tokens, masked diffusion (arXiv 2406.07524)",
        decoding=_mdlm_decoding,
        ignored=CONSTANTS,
        export=lambda c: _export(c, "MDLM", "mdlm", dropout=0.1, time_conditioning=c.timed),
        licence="Apache-2.0",
    ),
    Family(
        name="BD3-LM",
        architectures=("BD3LM",),
        checkpoints=tuple(f"kuleshov-group/bd3lm-owt-block_size{n}" for n in (4, 8, 16)),
        keys=TIMED | {"block_size": int, "cross_attn": bool},
        config=_bd3lm,
        names=functools.partial(_names, "backbone."),
        noise=NoiseConfig(kind="absorbing"),
        block="4, 8, 16",
        about="DiT, GPT-2's tokens, masked diffusion block by block (arXiv 2503.09573)",
        decoding={
            "rule": "first_hitting", "processors": {"top_p": {"p": 0.9, "crossing": 0}}, "temperature": 1.0,
            "source": "kuleshov-group/bd3lms scripts/gen_ppl/genppl_bd3lm.sh",
        },
        ignored=CONSTANTS,
        export=lambda c: _export(
            c, "BD3LM", "bd3lm", dropout=0.1, block_size=c.block, cross_attn=c.pattern == "block_causal", adaln=True,
            causal=False, time_conditioning=c.timed,
        ),
        licence="Apache-2.0",
    ),
    Family(
        name="DUO",
        architectures=("DUO",),
        checkpoints=("s-sahoo/duo", "s-sahoo/duo-distilled"),
        keys=KEYS,
        # The reference always conditions on the time; config.json has no key for it.
        config=functools.partial(_config, masked=False, timed=True),
        names=functools.partial(_names, "backbone."),
        noise=NoiseConfig(kind="uniform"),
        about="DiT, GPT-2's tokens, uniform diffusion (arXiv 2506.10892)",
        decoding={
            "rule": "predictor_corrector", "params": {"kappa": 1.0, "own": 1.0, "greedy": 0}, "temperature": 1.0,
            "block": generation.WHOLE_ANSWER,
            "source": "s-sahoo/duo configs/config.yaml: ancestral (1000 steps for 1024 tokens)",
        },
        ignored=CONSTANTS,
        export=lambda c: _export(c, "DUO", "DUO", dropout=0.1, causal=False),
        licence="Apache-2.0",
    ),
    Family(
        name="GIDD",
        architectures=("DIT",),
        checkpoints=tuple(
            f"dvruette/gidd-{size}-p_unif-{p}" for size in ("small", "base") for p in ("0.0", "0.1", "0.2")
        ),
        keys=family.COMMON | allow({" ".join(("vocab_size", *GIDD_SIZES)): int, "t_eps p_uniform": float}),
        # Conditioned on the time t itself, mapped into [t_eps, 1 - t_eps] as in the reference's training and sampler.
        config=lambda config: _config(
            config, GIDD_SIZES, timed=True, level="time", level_eps=config.get("t_eps", 1e-4)
        ),
        names=functools.partial(_names, ""),
        noise=lambda config: NoiseConfig(kind="hybrid", uniform=config.get("p_uniform", 0.0)),
        about="DiT, GPT-2's tokens, masks and uniform noise mixed (arXiv 2503.04482)",
        decoding={
            "rule": "hybrid_ancestral", "temperature": 1.0, "block": generation.WHOLE_ANSWER, "steps": 128,
            "source": "dvruette/gidd gidd/configs/generate.yaml",
        },
        ignored=CONSTANTS,
        fits=lambda config: "timestep_cond_dim" in config,
        export=lambda c: _export(c, "DIT", "dit", GIDD_SIZES, t_eps=getattr(c, "level_eps", None)),
        licence="MIT",
    ),
)  # fmt: skip
