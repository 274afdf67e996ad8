"""Writes checkpoints as GGUF files: by the writer, the names and the quantisers of the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np

from mercury_jax.hub.folder import scan

ARCHITECTURES = {  # class of transformers -> (its architecture, whether queries and keys are permuted)
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, True),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, False),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, False),
    "Qwen3MoeForCausalLM": (gguf.MODEL_ARCH.QWEN3MOE, False),
    "DreamModel": (gguf.MODEL_ARCH.DREAM, False),
    "LLaDAModelLM": (gguf.MODEL_ARCH.LLADA, True),
    "LLaDAMoEModelLM": (gguf.MODEL_ARCH.LLADA_MOE, False),
}
# Where the fp16 scales of a block are, for types that the package reads but does not write.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_gguf(folder: Path, out: Path, kind="F32", *, change=lambda writer: None, part=0, parts=1) -> dict:
    """Writes a folder in Hugging Face's layout as one file, or one part of several.

    Args:
        kind: The type of its matrices, or a function from their names to it.

    Returns:
        The numbers that the file holds, by the names of the checkpoint: what a reader has to find.
    """
    checkpoint = scan(folder)
    config, stored = checkpoint.config, {name: checkpoint.read(name) for name in checkpoint.tensors}
    arch, permuted = ARCHITECTURES[config["architectures"][0]]
    pick = lambda *keys: next((config[key] for key in keys if config.get(key) is not None), None)
    layers, heads = pick("num_hidden_layers", "n_layers"), int(pick("num_attention_heads", "n_heads") or 0)
    kv_heads = int(pick("num_key_value_heads", "n_kv_heads") or heads)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(layers)
    writer.add_context_length(pick("max_position_embeddings", "max_sequence_length"))
    writer.add_embedding_length(pick("hidden_size", "d_model"))
    writer.add_feed_forward_length(pick("intermediate_size", "mlp_hidden_size", "dense_intermediate_size"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(pick("rms_norm_eps"))
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(float(ropes.get("rope_theta") or config.get("rope_theta", 10_000.0)))
    if (experts := config.get("num_experts")) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(pick("moe_intermediate_size", "expert_intermediate_size"))
    if config.get("mask_token_id") is not None:
        writer.add_mask_token_id(config["mask_token_id"])
        writer.add_causal_attention(False)
        writer.add_diffusion_shift_logits(config["architectures"][0] == "DreamModel")
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends if isinstance(ends, int) else ends[0])
    if config.get("pad_token_id") is not None:
        writer.add_pad_token_id(config["pad_token_id"])
    if ropes.get("rope_type") == "llama3":  # llama.cpp stores what each frequency is divided by
        writer.add_tensor("rope_freqs.weight", llama3_factors(ropes, head_dim, config["rope_theta"]))
    if parts > 1:
        writer.add_uint16("split.count", parts)
        writer.add_uint16("split.no", part)
    change(writer)

    maps = [
        gguf.get_tensor_name_map(one, layers) for one in (arch, gguf.MODEL_ARCH.QWEN3)
    ]  # some layers are dense
    name_of = lambda name: next(
        filter(None, (m.get_name(name, try_suffixes=(".weight", ".bias")) for m in maps))
    )
    kind_of = kind if callable(kind) else lambda name: kind
    held, stacks, made = {}, {}, []
    for name, array in stored.items():
        array, wide = np.asarray(array), array.ndim > 1
        numbers = as_stored(np.asarray(array, np.float32), kind_of(name) if wide else "F32")
        held[name] = numbers[1]
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = numbers[0]
            continue
        raw = numbers[0]
        if permuted and any(part in name for part in ("q_proj.", "k_proj.")):
            count = heads if "q_proj." in name else kv_heads
            raw = raw.reshape(count, 2, len(raw) // count // 2, -1).swapaxes(1, 2).reshape(raw.shape)
        made.append((name_of(name), raw, kind_of(name) if wide else "F32"))
    for name, experts in stacks.items():
        raw = np.stack([experts[e] for e in range(len(experts))])
        made.append((name_of(name), raw, kind_of(name)))
    for name, raw, stored_as in made[part::parts]:
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[stored_as])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def as_stored(array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a matrix in a type, and the numbers that they stand for."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in SCALES:  # blocks of random bits, with scales that keep the numbers small
        size, nbytes = gguf.GGML_QUANT_SIZES[number]
        shape = (*array.shape[:-1], array.shape[-1] // size * nbytes)
        raw = np.random.default_rng(array.shape[0]).integers(0, 256, shape, np.uint8)
        blocks = raw.reshape(-1, nbytes)
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    elif kind == "F32":
        return array, array
    else:
        raw = gguf.quantize(array, number)
    return raw, gguf.dequantize(raw, number)


def llama3_factors(rope: dict, head_dim: int, theta: float) -> np.ndarray:
    """How Llama 3.1 divides its frequencies: long waves by `factor`, short ones not, those between smoothly."""
    wave = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, length = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    smooth = (length / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(wave < length / high, 1, np.where(wave > length / low, rope["factor"], between)).astype(
        np.float32
    )
