"""MDLM, BD3-LM, DUO and GIDD: diffusion transformers (DiT) as their Hugging Face classes save them.

They share one backbone. MDLM is masked diffusion, BD3-LM masked diffusion block by block, DUO uniform diffusion, and
GIDD (dvruette/gidd) mixes masks and uniform noise. The first three also share the keys of config.json.
"""

from __future__ import annotations

import functools
from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub.family import (
    BOOL,
    COMMON,
    INT,
    NUMBER,
    ConfigKeys,
    Family,
    Json,
    TensorSource,
    dtype_of,
    need,
)
from mercury_jax.models.dit import DiTConfig

# No parameters: tables of rotary angles, and the range of times on which BD3-LM was trained.
CONSTANTS = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", r"^sampling_eps_(min|max)$")


KEYS = COMMON.plus(
    ConfigKeys(
        used={
            "vocab_size": INT, "hidden_dim": INT, "n_heads": INT, "n_blocks": INT, "cond_dim": INT, "model_length": INT,
        },
        only={"causal": (False,), "adaln": (True,)},
        unused={
            "attn_backend": "how the reference computes the same numbers",
            **dict.fromkeys(("var_min", "sampling_eps_min", "sampling_eps_max"), "training only"),
        },
    )
)  # fmt: skip
TIMED = ConfigKeys(used={"time_conditioning": BOOL})
BLOCKS = ConfigKeys(used={"block_size": INT, "cross_attn": BOOL})


def _names(prefix: str, config: ModelConfig) -> dict[str, TensorSource]:
    """Where each parameter is; `prefix` precedes every name in the files."""
    linear = lambda path, name: {
        f"{path}/w": TensorSource(f"{prefix}{name}.weight", 1),
        f"{path}/b": TensorSource(f"{prefix}{name}.bias", fold=2),
    }
    found = {
        "embed": TensorSource(f"{prefix}vocab_embed.embedding"),
        "norm/scale": TensorSource(f"{prefix}output_layer.norm_final.weight"),
    }
    found |= linear("condition/first", "sigma_map.mlp.0") | linear("condition/second", "sigma_map.mlp.2")
    found |= linear("modulation/proj", "output_layer.adaLN_modulation")
    found |= linear("head", "output_layer.linear")
    for i in range(config.layers):
        ours, theirs = f"block_{i}", f"blocks.{i}"
        found |= {
            f"{ours}/attention_norm/scale": TensorSource(f"{prefix}{theirs}.norm1.weight"),
            f"{ours}/mlp_norm/scale": TensorSource(f"{prefix}{theirs}.norm2.weight"),
            f"{ours}/qkv/w": TensorSource(f"{prefix}{theirs}.attn_qkv.weight", 1),
            f"{ours}/o/w": TensorSource(f"{prefix}{theirs}.attn_out.weight", 2),
        }
        found |= linear(f"{ours}/modulation/proj", f"{theirs}.adaLN_modulation")
        found |= linear(f"{ours}/up", f"{theirs}.mlp.0") | linear(f"{ours}/down", f"{theirs}.mlp.2")
    return found


def _sizes(config: Json, width: str, heads: str, layers: str, cond: str, context: str) -> dict[str, Any]:
    """The sizes of a DiT from the keys that a family uses; what its files do not say is fixed in its code."""
    wide, count = need(config, width), need(config, heads)
    if count < 1 or wide % count:
        raise refuse(f"config.json: {heads}", count, f"a divisor of {width} = {wide}")
    length = need(config, context)
    return dict(
        vocab=need(config, "vocab_size"), width=wide, heads=count, kv_heads=count, head_dim=wide // count,
        layers=need(config, layers), ffn=4 * wide, cond=need(config, cond), context=length, block=length,
        dtype=dtype_of(config),
    )  # fmt: skip


def _shared_sizes(config: Json) -> dict[str, Any]:
    return _sizes(config, "hidden_dim", "n_heads", "n_blocks", "cond_dim", "model_length")


def _special_ids(config: Json) -> dict[str, Any]:
    """Ids of a model with a mask: GPT-2 has none, so one was added behind its last id, the end of text."""
    mask = _id(config, "mask_token_id", need(config, "vocab_size") - 1)
    return dict(mask=mask, eos=_id(config, "eos_token_id", mask - 1), pad=_id(config, "pad_token_id", mask))


def _id(config: Json, key: str, default: int) -> int:
    return default if config.get(key) is None else config[key]


def _mdlm(config: Json) -> DiTConfig:
    return DiTConfig(
        **_shared_sizes(config), **_special_ids(config), timed=bool(config.get("time_conditioning", False))
    )


def _bd3lm(config: Json) -> DiTConfig:
    # Without `cross_attn` (its pre-trained model of one block) it is a plain bidirectional model.
    blocks = bool(config.get("cross_attn", True))
    return DiTConfig(
        **_shared_sizes(config) | ({"block": need(config, "block_size")} if blocks else {}),
        **_special_ids(config),
        pattern="block_causal" if blocks else "bidirectional",
        timed=bool(config.get("time_conditioning", False)),
        level="clipped",
    )


def _duo(config: Json) -> DiTConfig:
    # Its class always conditions on the time. Padding is the id behind GPT-2's.
    pad = _id(config, "pad_token_id", need(config, "vocab_size") - 1)
    return DiTConfig(
        **_shared_sizes(config), mask=None, pad=pad, eos=_id(config, "eos_token_id", pad - 1), timed=True
    )


def _exportable(config: ModelConfig) -> DiTConfig:
    """The config, if config.json can say all of it; what is compared here is fixed in the reference's code."""
    assert isinstance(config, DiTConfig)
    have = (config.ffn, config.frequencies, config.rope_theta, config.norm_eps)
    want = (4 * config.width, 256, 10_000.0, 1e-5)
    if have != want:
        raise refuse("ffn, frequencies, rope_theta, norm_eps", have, f"{want}, which the family's code fixes")
    return config


def _common_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys that all of these families share."""
    ids = dict(mask_token_id=config.mask, eos_token_id=config.eos, pad_token_id=config.pad)
    return ids | dict(vocab_size=config.vocab, torch_dtype=config.dtype)


def _export(architecture: str, kind: str, config: ModelConfig) -> dict[str, Any]:
    c = _exportable(config)
    return _common_keys(c) | dict(
        architectures=[architecture], model_type=kind, model_length=c.context, hidden_dim=c.width, cond_dim=c.cond,
        n_blocks=c.layers, n_heads=c.heads, dropout=0.1,
    )  # fmt: skip


MDLM = Family(
    name="MDLM",
    architectures=("MDLM",),
    checkpoints=("kuleshov-group/mdlm-owt",),
    keys=KEYS.plus(TIMED),
    config=_mdlm,
    names=functools.partial(_names, "backbone."),
    noise=NoiseConfig(kind="absorbing"),
    about="DiT, GPT-2's tokens, masked diffusion (arXiv 2406.07524)",
    ignored=CONSTANTS,
    export=lambda c: _export("MDLM", "mdlm", c) | dict(time_conditioning=c.timed),
    licence="Apache-2.0",
)
BD3LM = Family(
    name="BD3-LM",
    architectures=("BD3LM",),
    checkpoints=tuple(f"kuleshov-group/bd3lm-owt-block_size{n}" for n in (4, 8, 16)),
    keys=KEYS.plus(TIMED).plus(BLOCKS),
    config=_bd3lm,
    names=functools.partial(_names, "backbone."),
    noise=NoiseConfig(kind="absorbing"),
    block="4, 8, 16",
    about="DiT, GPT-2's tokens, masked diffusion block by block (arXiv 2503.09573)",
    ignored=CONSTANTS,
    export=lambda c: (
        _export("BD3LM", "bd3lm", c)
        | dict(
            block_size=c.block,
            cross_attn=c.pattern == "block_causal",
            adaln=True,
            causal=False,
            time_conditioning=c.timed,
        )
    ),
    licence="Apache-2.0",
)
DUO = Family(
    name="DUO",
    architectures=("DUO",),
    checkpoints=("s-sahoo/duo", "s-sahoo/duo-distilled"),
    keys=KEYS,
    config=_duo,
    names=functools.partial(_names, "backbone."),
    noise=NoiseConfig(kind="uniform"),
    about="DiT, GPT-2's tokens, uniform diffusion (arXiv 2506.10892)",
    ignored=CONSTANTS,
    export=lambda c: _export("DUO", "DUO", c) | dict(causal=False),
    licence="Apache-2.0",
)


_GIDD_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "timestep_cond_dim", "max_seq_len")


def _gidd(config: Json) -> DiTConfig:
    """It is conditioned on the time itself, shrunk into [t_eps, 1 - t_eps] as in its training and its sampler."""
    return DiTConfig(
        **_sizes(config, *_GIDD_KEYS),
        **_special_ids(config),
        timed=True,
        level="time",
        level_eps=config.get("t_eps", 1e-4),
    )


def _export_gidd(config: ModelConfig) -> dict[str, Any]:
    c = _exportable(config)
    found = dict(zip(_GIDD_KEYS, (c.width, c.heads, c.layers, c.cond, c.context), strict=True))
    return _common_keys(c) | found | dict(architectures=["DIT"], model_type="dit", t_eps=c.level_eps)


GIDD = Family(
    name="GIDD",
    architectures=("DIT",),
    checkpoints=tuple(
        f"dvruette/gidd-{size}-p_unif-{p}" for size in ("small", "base") for p in ("0.0", "0.1", "0.2")
    ),
    keys=COMMON.plus(
        ConfigKeys(
            used={"vocab_size": INT, "t_eps": NUMBER, "p_uniform": NUMBER, **dict.fromkeys(_GIDD_KEYS, INT)}
        )
    ),
    config=_gidd,
    names=functools.partial(_names, ""),
    noise=lambda config: NoiseConfig(kind="hybrid", uniform=config.get("p_uniform", 0.0)),
    about="DiT, GPT-2's tokens, masks and uniform noise mixed (arXiv 2503.04482)",
    ignored=CONSTANTS,
    fits=lambda config: "timestep_cond_dim" in config,
    export=_export_gidd,
    licence="MIT",
)
