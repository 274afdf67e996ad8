"""Mutations of config.json: small random checkpoints whose config.json differs from a plain one in a key or two.

Read by `tests/hub/test_family.py`, and by `qa/parity/mutated.py`, where transformers computes the logits.
The weights come from a seed, so only the logits are committed. torch is not needed here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.checkpoint import tensors

VOCAB, WIDTH, FFN, PAIRS = 53, 24, 20, 3  # PAIRS: rotary frequencies of a head of width / heads
LENGTH = 23  # tokens of a prompt and its last token
CANVAS = 6  # of DiffusionGemma
DROP = ...  # as a value: the key is taken out


class Case(NamedTuple):
    """One mutation.

    base: the checkpoint that it starts from, a name of `BASES`.
    change: keys of config.json and their values; objects are merged, `DROP` takes a key out.
    refused: words of the error, where we do not load it; empty where its logits must be transformers'.
    head: "own" adds an lm_head of its own to the files, "same" one that equals the embedding.
    """

    name: str
    base: str
    change: Mapping[str, Any] = {}
    refused: tuple[str, ...] = ()
    head: str = ""


_PLAIN = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64, rms_norm_eps=1e-6, bos_token_id=None,
    eos_token_id=1, pad_token_id=None, rope_theta=1000.0, rope_scaling=None, torch_dtype="float32", use_cache=True,
    initializer_range=0.02, attention_dropout=0.0, tie_word_embeddings=False, transformers_version="5.23.0",
)  # fmt: skip
_GEMMA_TEXT = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, sliding_window=5, max_position_embeddings=64, rms_norm_eps=1e-6,
    layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_activation="gelu_pytorch_tanh",
    pad_token_id=0, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
)  # fmt: skip
_VISION = dict(
    model_type="gemma4_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=4, patch_size=2, position_embedding_size=4,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=10)
BASES: dict[str, dict[str, Any]] = {
    "qwen2": dict(
        _PLAIN, architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False, sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3": dict(
        _PLAIN, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=8, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=3,
    ),
    "qwen3_moe": dict(
        _PLAIN, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=8, attention_bias=False,
        use_sliding_window=False, sliding_window=None, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=10, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
        router_aux_loss_coef=0.001, output_router_logits=False,
    ),
    "llama": dict(
        _PLAIN, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False,
        pretraining_tp=1, head_dim=6,
    ),
    "gemma4": dict(
        _GEMMA_TEXT, architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", global_head_dim=8,
        num_global_key_value_heads=1, attention_k_eq_v=True, enable_moe_block=False, hidden_size_per_layer_input=0,
        final_logit_softcapping=20.0, num_kv_shared_layers=0, use_double_wide_mlp=False, dtype="float32",
    ),
    "diffusion_gemma": dict(
        architectures=["DiffusionGemmaForBlockDiffusion"], model_type="diffusion_gemma", canvas_length=CANVAS,
        tie_word_embeddings=True, dtype="float32", vision_config=_VISION,
        text_config=dict(
            _GEMMA_TEXT, **_EXPERTS, model_type="diffusion_gemma_text", global_head_dim=8,
            num_global_key_value_heads=1, use_bidirectional_attention="vision",
        ),
    ),
}  # fmt: skip


def config_of(case: Case) -> dict[str, Any]:
    """The case's config.json."""
    return merged(BASES[case.base], case.change)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes; an empty object replaces what was there."""
    found = dict(base)
    for key, value in change.items():
        if value is DROP:
            found.pop(key, None)
        elif isinstance(value, Mapping) and value:
            old = found.get(key)
            found[key] = merged(old if isinstance(old, Mapping) else {}, value)
        else:
            found[key] = value
    return found


def write(folder: Path, case: Case) -> Path:
    """The case's checkpoint: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    arrays = {name: drawn(case.base, name, shape) for name, shape in shapes(case).items()}
    if case.head == "same":
        embed = next(name for name in arrays if name.endswith("embed_tokens.weight"))
        arrays["lm_head.weight"] = arrays[embed]
    tensors.write(
        folder / "model.safetensors",
        [tensors.LazyTensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()],
    )
    return folder


def drawn(base: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a scale that fits its role, the same in every case that has it in this shape.

    RandomState's streams are frozen: they do not change with numpy's releases.
    """
    rng = np.random.RandomState(zlib.crc32(f"{base} {name}".encode()))
    last = name.rsplit(".", 1)[-1]
    if "norm" in name or last in ("layer_scalar", "scale", "per_expert_scale"):
        return rng.uniform(0.6, 1.4, shape).astype(np.float32)
    if last == "bias":
        return rng.normal(0.0, 0.4, shape).astype(np.float32)
    scale = 0.7 if "embed_tokens" in name or "lm_head" in name else 1.3 / shape[-1] ** 0.5
    return rng.normal(0.0, scale, shape).astype(np.float32)


def tokens(case: Case) -> np.ndarray:
    """[2, LENGTH]: one prompt, and two tokens that may end it; of DiffusionGemma two canvases behind it."""
    rng = np.random.RandomState(7)
    last = CANVAS if case.base == "diffusion_gemma" else 1
    prompt = rng.randint(3, VOCAB, LENGTH - last)
    return np.stack([np.concatenate([prompt, rng.randint(3, VOCAB, last)]) for _ in range(2)]).astype(
        np.int32
    )


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The tensors that such a checkpoint has, by name; of one that is refused, those of the known file."""
    config = BASES[case.base] if case.refused else config_of(case)
    if case.base in ("gemma4", "diffusion_gemma"):
        found = dict(_gemma(case.base, config.get("text_config", config)))
    else:
        found = dict(_plain(case.base, config))
    if case.head == "own":
        found["lm_head.weight"] = (VOCAB, WIDTH)
    return found


def _plain(base: str, c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = c["num_attention_heads"]
    kv: int = c.get("num_key_value_heads") or heads
    head: int = c.get("head_dim") or WIDTH // heads
    sizes = dict(q=heads * head, k=kv * head, v=kv * head)
    yield "model.embed_tokens.weight", (VOCAB, WIDTH)
    yield "model.norm.weight", (WIDTH,)
    if c.get("tie_word_embeddings") is not True:
        yield "lm_head.weight", (VOCAB, WIDTH)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield f"{layer}input_layernorm.weight", (WIDTH,)
        yield f"{layer}post_attention_layernorm.weight", (WIDTH,)
        yield f"{layer}self_attn.o_proj.weight", (WIDTH, heads * head)
        for name, size in sizes.items():
            yield f"{layer}self_attn.{name}_proj.weight", (size, WIDTH)
            if base == "qwen2" or c.get("attention_bias") is True:
                yield f"{layer}self_attn.{name}_proj.bias", (size,)
        if base != "qwen2" and c.get("attention_bias") is True:
            yield f"{layer}self_attn.o_proj.bias", (WIDTH,)
        if base.startswith("qwen3"):
            yield f"{layer}self_attn.q_norm.weight", (head,)
            yield f"{layer}self_attn.k_norm.weight", (head,)
        sparse = (
            base == "qwen3_moe" and i not in c["mlp_only_layers"] and not (i + 1) % c["decoder_sparse_step"]
        )
        if sparse:
            count = int(c.get("num_experts") or c["num_local_experts"])
            yield f"{layer}mlp.gate.weight", (count, WIDTH)
        stems = [f"{layer}mlp.experts.{e}." for e in range(count)] if sparse else [f"{layer}mlp."]
        for stem in stems:
            wide = c["moe_intermediate_size"] if sparse else c["intermediate_size"]
            for name, size in dict(gate=(wide, WIDTH), up=(wide, WIDTH), down=(WIDTH, wide)).items():
                yield f"{stem}{name}_proj.weight", size
                if base == "llama" and c.get("mlp_bias") is True:
                    yield f"{stem}{name}_proj.bias", size[:1]


def _gemma(base: str, c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    stem, encoder = "model.", ""
    if base == "diffusion_gemma":
        stem, encoder = "model.decoder.", "model.encoder.language_model."
        for name, size in dict(gate=(FFN, WIDTH), up=(FFN, WIDTH), down=(WIDTH, FFN)).items():
            yield f"{stem}self_conditioning.{name}_proj.weight", size
        yield f"{stem}self_conditioning.pre_norm.weight", (WIDTH,)
    yield f"{stem}embed_tokens.weight", (VOCAB, WIDTH)
    yield f"{stem}norm.weight", (WIDTH,)
    layers, heads = c["num_hidden_layers"], c["num_attention_heads"]
    gated = base == "gemma4"
    wide = c.get("num_global_key_value_heads") if not gated or c.get("attention_k_eq_v") else None
    said = dict(head_dim=c.get("global_head_dim", 512), num_key_value_heads=wide or c["num_key_value_heads"])
    for i in range(layers):
        far = c["layer_types"][i] == "full_attention" or i == layers - 1
        listed = c["per_layer_config"] or {} if "per_layer_config" in c else {str(i): said} if far else {}
        own = listed.get(str(i), {})
        head, kv = (
            own.get("head_dim", c["head_dim"]),
            own.get("num_key_value_heads", c["num_key_value_heads"]),
        )
        same = far and (not gated or c.get("attention_k_eq_v"))
        for name, size in dict(q=heads, k=kv, v=kv).items():
            if name != "v" or not same:
                yield f"{stem}layers.{i}.self_attn.{name}_proj.weight", (size * head, WIDTH)
            if name != "v":
                yield f"{stem}layers.{i}.self_attn.{name}_norm.weight", (head,)
        yield f"{stem}layers.{i}.self_attn.o_proj.weight", (WIDTH, heads * head)
        for name, size in dict(gate=(FFN, WIDTH), up=(FFN, WIDTH), down=(WIDTH, FFN)).items():
            yield f"{stem}layers.{i}.mlp.{name}_proj.weight", size
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        mixed = c.get("num_experts") and (not gated or c.get("enable_moe_block"))
        for name in [f"{n}_layernorm" for n in norms]:
            yield f"{stem}layers.{i}.{name}.weight", (WIDTH,)
        for where in [stem, encoder] if encoder else [stem]:
            yield f"{where}layers.{i}.layer_scalar", (1,)
        if mixed:
            count, size = c["num_experts"], c["moe_intermediate_size"]
            for name in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ):
                yield f"{stem}layers.{i}.{name}.weight", (WIDTH,)
            yield f"{stem}layers.{i}.router.scale", (WIDTH,)
            yield f"{stem}layers.{i}.router.proj.weight", (count, WIDTH)
            yield f"{stem}layers.{i}.router.per_expert_scale", (count,)
            yield f"{stem}layers.{i}.experts.gate_up_proj", (count, 2 * size, WIDTH)
            yield f"{stem}layers.{i}.experts.down_proj", (count, WIDTH, size)


def _rope(**found: Any) -> dict[str, Any]:
    return {"rope_scaling": found}


def _yarn(**more: Any) -> dict[str, Any]:
    return _rope(**{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **more})


def _long(**more: Any) -> dict[str, Any]:
    factors = dict(short_factor=[1.0, 1.4, 2.5], long_factor=[1.0, 3.0, 8.0])
    return _rope(**{"rope_type": "longrope", "original_max_position_embeddings": 32, **factors, **more})


def _window(**more: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": 5, **more}


def _text(**change: Any) -> dict[str, Any]:
    return {"text_config": change}


_WIDE = dict(beta_fast=2, beta_slow=0.1)  # bounds of the blend that lie apart, and between two dimensions
_DYNAMIC = _rope(rope_type="dynamic", factor=2.0)
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_DEFAULTS = dict(temperature=0.1, top_k=3, max_length=7, do_sample=True, repetition_penalty=3.0, num_beams=4)
_FULL, _NEAR = "full_attention", "sliding_attention"
_FAR = {"rope_parameters": {_FULL: {"factor": 3.0}}}
_NEWER = dict(rope_scaling=DROP, rope_theta=DROP, torch_dtype=DROP, dtype="float32")
_NEWER_YARN = {
    "rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

CASES = (
    # what transformers writes by itself, and what has no effect
    Case("qwen2", "qwen2"),
    Case("qwen2 generation defaults", "qwen2", _DEFAULTS),
    Case("qwen2 labels", "qwen2", dict(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}, num_labels=2)),
    Case("qwen2 training only", "qwen2", dict(attention_dropout=0.7, initializer_range=9.0)),
    Case("qwen2 attention_bias false", "qwen2", dict(attention_bias=False)),
    Case("qwen2 attention_bias true", "qwen2", dict(attention_bias=True)),
    Case("qwen2 newer names", "qwen2", {**_NEWER, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    # heads of the vocabulary
    Case("qwen2 tied", "qwen2", dict(tie_word_embeddings=True)),
    Case("qwen2 tied beside a head of its own", "qwen2", dict(tie_word_embeddings=True), head="own"),
    Case("qwen2 tied beside the same head", "qwen2", dict(tie_word_embeddings=True), head="same"),
    Case("qwen2 tie unsaid", "qwen2", dict(tie_word_embeddings=DROP)),
    Case("qwen2 tied as text", "qwen2", dict(tie_word_embeddings="false"),
        ("tie_word_embeddings", "'false'", "true or false")),
    # rotary embeddings
    Case("qwen2 rope_theta", "qwen2", dict(rope_theta=50)),
    Case("qwen2 rope_theta unsaid", "qwen2", dict(rope_theta=DROP)),
    Case("qwen2 linear", "qwen2", _rope(rope_type="linear", factor=4.0)),
    Case("qwen2 linear, older name", "qwen2", _rope(type="linear", factor=3)),
    Case("qwen2 dynamic", "qwen2", _DYNAMIC),
    Case("qwen2 dynamic, whole context", "qwen2", {**_DYNAMIC, "max_position_embeddings": LENGTH}),
    Case("qwen2 dynamic, beyond", "qwen2", {**_DYNAMIC, "max_position_embeddings": 12}),
    Case("qwen2 yarn", "qwen2", _yarn()),
    Case("qwen2 yarn attention_factor", "qwen2", _yarn(attention_factor=0.5)),
    Case("qwen2 yarn attention_factor null", "qwen2", _yarn(attention_factor=None)),
    Case("qwen2 yarn mscale and mscale_all_dim", "qwen2", _yarn(mscale=0.4, mscale_all_dim=3.0)),
    Case("qwen2 yarn mscale equal", "qwen2", _yarn(mscale=0.707, mscale_all_dim=0.707)),
    Case("qwen2 yarn mscale alone", "qwen2", _yarn(mscale=4.0)),
    Case("qwen2 yarn mscale_all_dim alone", "qwen2", _yarn(mscale_all_dim=4.0)),
    Case("qwen2 yarn mscale beside attention_factor", "qwen2",
        _yarn(mscale=0.4, mscale_all_dim=3.0, attention_factor=1.2)),
    Case("qwen2 yarn truncate false", "qwen2", {**_yarn(truncate=False, **_WIDE), "rope_theta": 20.0}),
    Case("qwen2 yarn truncate true", "qwen2", {**_yarn(truncate=True, **_WIDE), "rope_theta": 20.0}),
    Case("qwen2 yarn betas", "qwen2", _yarn(beta_fast=4, beta_slow=0.2)),
    Case("qwen2 yarn betas null", "qwen2", _yarn(beta_fast=None, beta_slow=None)),
    Case("qwen2 yarn backwards", "qwen2", _yarn(original_max_position_embeddings=4, truncate=False)),
    Case("qwen2 yarn original unsaid", "qwen2", _rope(rope_type="yarn", factor=4.0)),
    Case("qwen2 yarn original beside", "qwen2", {**_yarn(), "original_max_position_embeddings": 40}),
    Case("qwen2 yarn, newer names", "qwen2", {**_NEWER, "rope_parameters": _NEWER_YARN}),
    Case("qwen2 yarn unknown key", "qwen2", _yarn(mscale_y=2.0),
        ("rope_scaling.mscale_y", "2.0", "--ignore-config")),
    Case("qwen2 llama3 key under yarn", "qwen2", _yarn(low_freq_factor=2.0),
        ("rope_scaling.low_freq_factor", "2.0")),
    Case("qwen2 longrope", "qwen2", _long()),
    Case("qwen2 longrope, all of the original", "qwen2", _long(original_max_position_embeddings=LENGTH)),
    Case("qwen2 longrope, beyond", "qwen2", _long(original_max_position_embeddings=12)),
    Case("qwen2 longrope, one beyond", "qwen2", _long(original_max_position_embeddings=LENGTH - 1)),
    Case("qwen2 longrope factor", "qwen2", _long(factor=9.0)),
    Case("qwen2 longrope attention_factor", "qwen2", _long(attention_factor=1.7)),
    Case("qwen2 longrope original beside", "qwen2",
        {**_long(original_max_position_embeddings=9), "original_max_position_embeddings": 48}),
    Case("qwen2 longrope original unsaid", "qwen2", _long(original_max_position_embeddings=DROP, factor=2.0)),
    Case("qwen2 longrope too few factors", "qwen2", _long(short_factor=[1.0, 2.0]),
        ("rope_scaling.short", "3, one per frequency")),
    Case("qwen2 proportional", "qwen2", _rope(rope_type="proportional"),
        ("rope_scaling", "proportional", "longrope")),
    Case("qwen2 partial rotary", "qwen2", dict(partial_rotary_factor=0.5), ("partial_rotary_factor", "0.5", "1.0")),
    Case("qwen2 two ropes", "qwen2", {**_yarn(), "rope_parameters": _NEWER_YARN},
        ("rope_scaling", "beside rope_parameters")),
    # sliding windows
    Case("qwen2 window", "qwen2", _window()),
    Case("qwen2 window of all layers", "qwen2", _window(max_window_layers=0)),
    Case("qwen2 window of no layer", "qwen2", _window(max_window_layers=9)),
    Case("qwen2 window by layer_types", "qwen2", _window(layer_types=[_NEAR, _FULL, _NEAR])),
    Case("qwen2 window null", "qwen2", _window(sliding_window=None)),
    Case("qwen2 window of one", "qwen2", _window(sliding_window=1)),
    Case("qwen2 window behind yarn", "qwen2", {**_window(), **_yarn()}),
    Case("qwen2 layer_types, no window", "qwen2", dict(layer_types=[_FULL, _NEAR, _FULL]),
        ("layer_types", _NEAR, "no sliding window")),
    Case("qwen2 layer_types chunked", "qwen2", dict(layer_types=[_FULL, "chunked_attention", _FULL]),
        ("layer_types", "chunked_attention")),
    Case("qwen2 layer_types too short", "qwen2", _window(layer_types=[_FULL]), ("layer_types", "3, one a layer")),
    # other sizes and settings
    Case("qwen2 key heads null", "qwen2", dict(num_key_value_heads=None)),
    Case("qwen2 head_dim", "qwen2", dict(head_dim=10)),
    Case("qwen2 rms_norm_eps", "qwen2", dict(rms_norm_eps=0.3)),
    Case("qwen2 swish", "qwen2", dict(hidden_act="swish")),
    Case("qwen2 gelu", "qwen2", dict(hidden_act="gelu"), ("hidden_act", "gelu", "silu")),
    Case("qwen2 unknown key", "qwen2", dict(logit_scale=0.5),
        ("logit_scale", "0.5", "--ignore-config logit_scale")),
    Case("qwen2 size as text", "qwen2", dict(hidden_size="24"), ("hidden_size", "'24'", "an integer")),
    Case("qwen2 unknown null", "qwen2", dict(logit_scale=None), ("logit_scale", "None")),
    Case("qwen2 quantised", "qwen2", dict(quantization_config={"quant_method": "awq"}),
        ("quantization_config", "awq")),
    Case("qwen2 dtype", "qwen2", dict(torch_dtype="float8_e4m3fn"), ("dtype", "float8_e4m3fn", "bfloat16")),
    Case("qwen2 as mistral", "qwen2", dict(architectures=["MistralForCausalLM"]),
        ("architectures", "MistralForCausalLM")),
    Case("qwen2 model_type mistral", "qwen2", dict(model_type="mistral"), ("model_type", "mistral", "qwen2")),
    # Qwen3
    Case("qwen3", "qwen3"),
    Case("qwen3 tied", "qwen3", dict(tie_word_embeddings=True)),
    Case("qwen3 attention_bias", "qwen3", dict(attention_bias=True)),
    Case("qwen3 window", "qwen3", _window(max_window_layers=1)),
    Case("qwen3 head_dim unsaid", "qwen3", dict(head_dim=DROP), ("shape of", "by config.json")),
    Case("qwen3 llama3", "qwen3", _rope(**_LLAMA3, original_max_position_embeddings=16)),
    Case("qwen3 yarn", "qwen3", _yarn(truncate=False, mscale=0.3, mscale_all_dim=2.0, **_WIDE)),
    # Qwen3-MoE
    Case("qwen3_moe", "qwen3_moe"),
    Case("qwen3_moe not renormalised", "qwen3_moe", dict(norm_topk_prob=False)),
    Case("qwen3_moe norm_topk_prob unsaid", "qwen3_moe", dict(norm_topk_prob=DROP)),
    Case("qwen3_moe newer name", "qwen3_moe", dict(num_experts=DROP, num_local_experts=4)),
    Case("qwen3_moe dense layer", "qwen3_moe", dict(mlp_only_layers=[1])),
    Case("qwen3_moe sparse step", "qwen3_moe", dict(decoder_sparse_step=2)),
    Case("qwen3_moe window", "qwen3_moe", _window()),
    Case("qwen3_moe attention_bias", "qwen3_moe", dict(attention_bias=True)),
    Case("qwen3_moe one expert a token", "qwen3_moe", dict(num_experts_per_tok=1)),
    Case("qwen3_moe shared expert", "qwen3_moe", dict(shared_expert_intermediate_size=8),
        ("shared_expert_intermediate_size", "8")),
    # Llama
    Case("llama", "llama"),
    Case("llama attention_bias", "llama", dict(attention_bias=True)),
    Case("llama mlp_bias", "llama", dict(mlp_bias=True)),
    Case("llama both biases", "llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    Case("llama llama3", "llama", _rope(**_LLAMA3, original_max_position_embeddings=16)),
    Case("llama llama3 original unsaid", "llama", _rope(**_LLAMA3)),
    Case("llama llama3 incomplete", "llama", _rope(rope_type="llama3", factor=8.0), ("low_freq_factor", "a value")),
    Case("llama head_dim null", "llama", dict(head_dim=None)),
    Case("llama longrope", "llama", _long(rope_type=DROP, type="longrope")),
    Case("llama pretraining_tp", "llama", dict(pretraining_tp=2), ("pretraining_tp", "2", "1")),
    Case("llama sliding_window", "llama", dict(sliding_window=5), ("sliding_window", "5", "None")),
    # Gemma 4, the text model
    Case("gemma4", "gemma4"),
    Case("gemma4 keys apart from values", "gemma4", dict(attention_k_eq_v=False)),
    Case("gemma4 attention_k_eq_v unsaid", "gemma4", dict(attention_k_eq_v=DROP)),
    Case("gemma4 local sizes everywhere", "gemma4", dict(per_layer_config={})),
    Case("gemma4 listed sizes", "gemma4", dict(per_layer_config={"1": {"head_dim": 10}, "2": {"head_dim": 10}})),
    Case("gemma4 sizes of one layer", "gemma4", dict(per_layer_config={"1": {"head_dim": 10}}),
        ("per_layer_config", "[1, 2]")),
    Case("gemma4 nested unknown key", "gemma4", dict(per_layer_config={"1": {"sliding_window": 3}}),
        ("per_layer_config.1.sliding_window", "3")),
    Case("gemma4 rope factor", "gemma4", _FAR),
    Case("gemma4 rope unsaid", "gemma4", dict(rope_parameters=DROP)),
    Case("gemma4 rope of one kind", "gemma4", {"rope_parameters": {_NEAR: DROP}}, ("sliding_attention", "a value")),
    Case("gemma4 rope unknown key", "gemma4", {"rope_parameters": {_NEAR: {"mscale": 2.0}}},
        ("rope_parameters.sliding_attention.mscale", "2.0")),
    Case("gemma4 window", "gemma4", dict(sliding_window=3)),
    Case("gemma4 last layer sliding", "gemma4", dict(layer_types=[_FULL, _NEAR, _NEAR])),
    Case("gemma4 no soft cap", "gemma4", dict(final_logit_softcapping=None)),
    Case("gemma4 silu", "gemma4", dict(hidden_activation="silu")),
    Case("gemma4 experts", "gemma4", dict(enable_moe_block=True, **_EXPERTS)),
    Case("gemma4 experts, not enabled", "gemma4", _EXPERTS),
    Case("gemma4 beside a head of its own", "gemma4", head="own"),
    Case("gemma4 sees both ways", "gemma4", dict(use_bidirectional_attention="all"),
        ("use_bidirectional_attention", "all")),
    Case("gemma4 untied", "gemma4", dict(tie_word_embeddings=False), ("tie_word_embeddings", "False")),
    # DiffusionGemma
    Case("diffusion", "diffusion_gemma"),
    Case("diffusion local sizes everywhere", "diffusion_gemma", _text(per_layer_config={})),
    Case("diffusion per_layer_config null", "diffusion_gemma", _text(per_layer_config=None)),
    Case("diffusion listed sizes", "diffusion_gemma",
        _text(per_layer_config={"1": {"num_key_value_heads": 4}, "2": {"num_key_value_heads": 4}})),
    Case("diffusion key heads unsaid", "diffusion_gemma", _text(num_global_key_value_heads=DROP)),
    Case("diffusion soft cap", "diffusion_gemma", _text(final_logit_softcapping=3.0)),
    Case("diffusion rope factor", "diffusion_gemma", _text(**_FAR)),
    Case("diffusion one expert a token", "diffusion_gemma", _text(top_k_experts=1)),
    Case("diffusion window", "diffusion_gemma", _text(sliding_window=2)),
    Case("diffusion attention_k_eq_v", "diffusion_gemma", _text(attention_k_eq_v=False)),
    Case("diffusion unknown text key", "diffusion_gemma", _text(query_pre_attn_scalar=2),
        ("text_config.query_pre_attn_scalar", "2")),
    Case("diffusion text_config missing", "diffusion_gemma", dict(text_config=DROP), ("text_config", "a value")),
    Case("diffusion text_config a list", "diffusion_gemma", dict(text_config=[]), ("text_config", "an object")),
)  # fmt: skip
