"""Writes a model in our own layout (`save`), or as a checkpoint for transformers, vLLM and SGLang (`save_hf`).

`convert` loads a model in either layout and writes it in the one that is asked for. `write_folder` writes Hugging
Face's layout, which `folder.py` reads, with one tensor in memory at a time.

`tiny_random` writes what the authors of a family publish, at a millionth of the size and with random weights, to try a
command or to test a program: the build of the model, the names and layout of the tensors, config.json, a tokenizer and
a chat template. The text that such a model writes means nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import DTypeLike

from mercury_jax import checkpoint, models, noise
from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.tensors import LazyTensor
from mercury_jax.config import Experts, ModelConfig, NoiseConfig, refuse, to_dict
from mercury_jax.hub.adapters import open_adapter
from mercury_jax.hub.family import Family, Opened, named_family, plain_build, writers
from mercury_jax.hub.folder import CONFIG, INDEX, SINGLE, Folder, find, read_json
from mercury_jax.hub.load import HEAD, NANO, check_mask, load, load_opened, open_checkpoint
from mercury_jax.hub.params import TensorSource, to_theirs
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.hub.tokenizer_files import own_files
from mercury_jax.images import VisionConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import check_not_quantised
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM, DrafterPasses, Params

EXPORTABLE = (
    "a build that a family of checkpoints has. With same_position, qk_norm and no predicts_next: block_causal "
    "with a mask (SDAR; recipe nano_sdar), bidirectional (tiny-A2D; recipe nano_bidirectional). Without a mask: "
    "block_causal with block 1 and predicts_next (Qwen3, or without qk_norm Llama; recipe twin_nano)"
)
SHARD = 5_000_000_000  # bytes of tensors in one file, the default of transformers
# Files that are copied when a checkpoint is converted to its own family.
BESIDE = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "README.md")


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "ours",
    family: str | None = None,
    dtype: str | None = None,
    mask: int | None = None,
    adapter: str | Path | None = None,
    ignore_config: Sequence[str] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Converts a saved model to our own layout or to Hugging Face's.

    If a checkpoint in Hugging Face's layout is written as the same family again, tensors that our model does not read
    (a vision tower) are copied unchanged, and so are config.json and generation_config.json. Our own layout and other
    families cannot hold such tensors, so they are dropped.

    Args:
        source: A folder, or an id on the Hugging Face hub.
        out: The new folder.
        to: "ours" (with checksums) or "hf" (for transformers, vLLM, SGLang).
        family: With "hf", the family to write. Default: the family of the source, otherwise the first that can hold the
            model.
        dtype: Dtype of the stored parameters. Default: unchanged.
        mask: The mask id, for a checkpoint that does not name it.
        adapter: A folder with a LoRA adapter of this model, which is merged.
        ignore_config: As in `load`.
        progress: Called after each parameter that was loaded, with its number of bytes.

    Returns:
        The folder.

    Raises:
        ValueError: No family can hold the model, or an argument is not allowed.
        CheckpointError: A file of the source is missing or damaged.
    """
    if to not in ("ours", "hf"):
        raise refuse("to", to, "ours, hf")
    stored = opened = open_checkpoint(source, mask=mask, verify=True, ignore_config=ignore_config)
    if opened.quantised is not None:  # quantised parameters are not written
        opened = stored = dataclasses.replace(
            opened, quantised=opened.quantised.widened("source", str(source))
        )
    found = None if adapter is None else open_adapter(adapter)
    opened = opened if found is None else found.config_for(opened, None)
    check_mask(opened, mask)
    lm = load_opened(opened, adapter=found, progress=progress)
    if to == "ours":
        return save(out, lm, opened.noise, dtype=dtype, overwrite=False)
    in_files = isinstance(opened.folder, Folder) and opened.folder.documents is None  # not of GGUF
    again = (
        opened.family is not None and in_files and (family is None or named_family(family) is opened.family)
    )
    if again and dataclasses.replace(opened.config, dtype=stored.config.dtype) == stored.config:
        return _save_again(out, lm, opened, dtype)
    return save_hf(out, lm, family=family, dtype=dtype)


def save(
    folder: str | Path,
    lm: LM,
    noise_config: NoiseConfig | None,
    *,
    dtype: DTypeLike | None = None,
    overwrite: bool = True,
) -> Path:
    """Writes a model in our own layout, which `load` reads.

    Args:
        folder: The folder to write.
        lm: The model.
        noise_config: The noise that it was trained with; None for an autoregressive model.
        dtype: Dtype of the stored parameters. Default: unchanged.
        overwrite: Replace an earlier model in that folder.

    Returns:
        The folder.

    Raises:
        ValueError: The parameters are quantised, or the folder holds other files.
    """
    _check_savable(lm)
    config = lm.model.config
    about = {
        "name": lm.name,
        "architecture": models.kind(config),
        "model": to_dict(config),
        "noise": None if noise_config is None or config.autoregressive else to_dict(noise_config),
        "forbidden": list(lm.corruption.forbidden),
        "tokenizer": lm.tokenizer.fingerprint,
        "card": dict(lm.card),
        "decoding": dict(lm.decoding),
    }
    proto = lm.tokenizer.proto
    return checkpoint.export(folder, lm.params, about, dtype, tokenizer=proto, overwrite=overwrite)


def save_hf(
    folder: str | Path,
    lm: LM,
    *,
    family: str | None = None,
    dtype: DTypeLike | None = None,
    shard: int = SHARD,
) -> Path:
    """Writes a model in Hugging Face's layout, as a checkpoint of a family that can hold it.

    Our own architecture has norms that multiply by 1 + scale, and scaled embeddings. Both factors are multiplied into
    the written parameters, which leaves the logits unchanged.

    Args:
        folder: The new folder.
        lm: The model.
        family: Name of the family. Default: the family that it was loaded from, otherwise the first that can hold it.
        dtype: Dtype of the stored parameters. Default: unchanged.
        shard: Largest number of bytes of tensors in one file.

    Returns:
        The folder.

    Raises:
        ValueError: No family can hold the model, or its parameters are quantised.
    """
    _check_savable(lm)
    config, params = plain_build(lm.model.config), _multiplied_out(lm.model.config, lm.params)
    chosen = _chosen_family(config, family, lm.card.get("family"))
    assert chosen.export is not None
    arrays = lazy_tensors(chosen.names(config), params, dtype)
    return write_folder(folder, chosen.export(config), arrays, shard=shard, extra=_tokenizer_files(lm))


def _check_savable(lm: LM) -> None:
    """Refuses a model whose parameters are not those of its architecture."""
    check_not_quantised(lm.params)
    if isinstance(lm.model.drafter, DrafterPasses):
        raise refuse(
            "lm", f"{lm.name} joined to a block drafter", "the model alone; save_drafter writes the other"
        )


def _save_again(out: str | Path, lm: LM, opened: Opened, dtype: str | None) -> Path:
    """Writes a model as its original checkpoint, including the tensors that the model does not read.

    config.json is kept except for the mask id and the dtype; unread tensors are copied in the dtype they are stored in.
    """
    folder, family = opened.folder, opened.family
    assert isinstance(folder, Folder) and family is not None
    arrays = lazy_tensors(family.names(opened.config), lm.params, dtype)
    # A stored copy of a tied head is left out: unread tensors keep their dtype, so with another `dtype` it would differ
    # from the embedding, and readers would take it for a head of its own.
    skip = {tensor.name for tensor in arrays} | ({HEAD} if opened.config.tied else set())
    arrays += [
        LazyTensor(name, entry.shape, entry.dtype, functools.partial(folder.read, name))
        for name, entry in folder.tensors.items()
        if name not in skip
    ]
    beside = {name: find(folder.path, name) for name in BESIDE}
    extra = {name: path.read_bytes() for name, path in beside.items() if path is not None}
    about = read_json(folder.path, CONFIG)
    if (mask := folder.config.get("mask_token_id")) is not None:  # it may come from the argument `mask`
        about["mask_token_id"] = mask
    if dtype is not None:  # the key has two names, and may also be in text_config
        for part in (about, about.get("text_config")):
            if isinstance(part, dict):
                part |= {key: np.dtype(dtype).name for key in ("dtype", "torch_dtype") if key in part}
    return write_folder(out, about, arrays, extra=extra | _tokenizer_files(lm))


def _tokenizer_files(lm: LM) -> dict[str, bytes]:
    tok = lm.tokenizer
    return dict(own_files(tok) if isinstance(tok, Tokenizer) else tok.files)


def _chosen_family(config: ModelConfig, wanted: str | None, own: str | None) -> Family:
    """Chooses the wanted family, else the one the model was loaded from, else the first that can hold the model."""
    able = writers(config)
    if wanted is not None:
        found = named_family(wanted)
        if found in able:
            return found
        names = ", ".join(f.name for f in able) or "none"
        raise refuse("family", wanted, f"{names}, which hold this model exactly")
    if not able:
        about = (
            f"{config.pattern} (block {config.block}), {models.kind(config)}, alignment {config.alignment}, "
            f"qk_norm {config.qk_norm}, qkv_bias {config.qkv_bias}, predicts_next {config.predicts_next}"
        )
        raise refuse("model", about, EXPORTABLE)
    return next((f for f in able if f.name == own), able[0])


def _multiplied_out(config: ModelConfig, params: Params) -> Params:
    """Converts parameters to the architecture of `plain_build`."""
    if plain_build(config) == config:
        return params
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    if config.scale_embed:
        # The factor applies to the input embedding only, so a tied head becomes a parameter of its own.
        if config.tied:
            flat["head"] = flat["embed"].T
        flat["embed"] = flat["embed"] * config.width**0.5
    if config.zero_centred:
        flat = {path: 1.0 + leaf if path.endswith("/scale") else leaf for path, leaf in flat.items()}
    return unflatten_dict(flat, sep="/")


def lazy_tensors(
    names: Mapping[str, TensorSource], params: Params, dtype: DTypeLike | None = None
) -> list[LazyTensor]:
    """Lists the tensors of a checkpoint. Each is made from our parameters only when it is written."""
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    paths: dict[str, list[str]] = {}  # tensor -> our parameters; several if they are rows of a fused tensor
    shapes: dict[str, tuple[int, ...]] = {}
    for path, source in names.items():
        for name, shape in source.shapes(flat[path].shape).items():
            paths.setdefault(name, []).append(path)
            shapes[name] = shape

    @functools.lru_cache(maxsize=1)  # a parameter's tensors follow each other: copy it from the device once
    def host(path: str) -> np.ndarray:
        array = np.asarray(jax.device_get(flat[path]))
        return array if dtype is None else array.astype(dtype, copy=False)

    def make(name: str) -> np.ndarray:
        parts = {(names[p].rows or (0,))[0]: to_theirs(names[p], host(p))[name] for p in paths[name]}
        ordered = [parts[row] for row in sorted(parts)]
        return ordered[0] if len(ordered) == 1 else np.concatenate(ordered, axis=0)

    kind = lambda name: np.dtype(dtype or flat[paths[name][0]].dtype)
    return [LazyTensor(name, shapes[name], kind(name), functools.partial(make, name)) for name in paths]


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    arrays: Iterable[LazyTensor],
    *,
    shard: int = SHARD,
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a checkpoint that transformers reads, with one tensor in memory at a time.

    The folder appears when it is complete.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise refuse("folder", str(folder), "a new or empty folder")
    shards: list[list[LazyTensor]] = [[]]
    names, size = set[str](), 0
    for tensor in arrays:
        if tensor.name in names:
            raise refuse("name of a tensor", tensor.name, "each name once")
        names.add(tensor.name)
        if shards[-1] and size + tensor.nbytes > shard:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    files = (
        [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    # The format of JSON that transformers writes, including the order of the keys.
    write = lambda value: (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    contents = {CONFIG: write(config), **(extra or {})}
    if count > 1:
        every = [tensor for part in shards for tensor in part]
        total = {
            "total_size": sum(t.nbytes for t in every), "total_parameters": sum(math.prod(t.shape) for t in every)
        }  # fmt: skip
        weight_map = {tensor.name: file for file, part in zip(files, shards) for tensor in part}
        contents[INDEX] = write({"metadata": total, "weight_map": weight_map})
    with manifest.complete_folder(folder) as work:
        for file, part in zip(files, shards, strict=True):
            tensors.write(work / file, part, {"format": "pt"})  # transformers requires this entry
        for name, data in contents.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            manifest.write_synced(work / name, data)
    return folder


CONTEXT = 512


PLAIN: Mapping[str, Any] = dict(
    width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, zero_centred=False, scale_embed=False, tied=False
)  # fmt: skip


EXPERTS = Experts(count=4, active=2, width=32)


BUILDS: Mapping[str, Mapping[str, Any]] = {
    "LLaDA": dict(kv_heads=4, pattern="bidirectional", block=32, qk_norm=False, norm_eps=1e-5),
    "LLaDA-MoE": dict(
        kv_heads=4, pattern="bidirectional", block=32, experts=dataclasses.replace(EXPERTS, renormalise=False)
    ),
    "LLaDA2.0, 2.1": dict(
        pattern="block_causal", block=32,
        experts=dataclasses.replace(
            EXPERTS, score="sigmoid", groups=2, active_groups=1, correction=True, shared=32, dense=(0,)
        ),
    ),
    "Dream": dict(pattern="bidirectional", block=32, qk_norm=False, qkv_bias=True, alignment="shifted"),
    "Fast-dLLM v2": dict(pattern="block_causal", block=32, qk_norm=False, qkv_bias=True, alignment="shifted"),
    "SDAR, TraDo": dict(pattern="block_causal", block=4),
    "Qwen3": dict(pattern="block_causal", block=1, predicts_next=True, mask=None),
    "DiffusionGemma": dict(
        block=32, window=16, global_layers=(1,), global_head_dim=32, global_kv_heads=1, keys_as_values=True,
        self_conditioning=True, encoder_scalars=True, experts=EXPERTS, mask=None,
    ),
}  # fmt: skip
# The vision tower of DiffusionGemma, without its ids; an image has at most 64 soft tokens.
TOWER: Mapping[str, Any] = dict(
    width=32, layers=2, heads=2, kv_heads=2, head_dim=16, ffn=64, patch=8, positions=1024, tokens=64
)
IMAGE_TOKENS = {"placeholder": "<|image|>", "begin": "<|image>", "end": "<image|>"}
IMAGE_CONTENT = """{%- if message['content'] is string or not message['content'] -%}
            {{- message['content'] or '' -}}
        {%- else -%}
            {%- for part in message['content'] -%}
                {{- '<|image|>' if part['type'] == 'image' else part['text'] -}}
            {%- endfor -%}
        {%- endif -%}"""


def _with_image_tokens(tokenizer: Tokenizer) -> tuple[HFTokenizer, dict[str, Any]]:
    """Adds the tokens of images to our own tokenizer, and images to its chat template; returns the ids, too."""
    files, ids = own_files(tokenizer), {name: tokenizer.vocab_size + i for i, name in enumerate(IMAGE_TOKENS)}
    data = json.loads(files["tokenizer.json"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": i, "content": IMAGE_TOKENS[name], **flags} for name, i in ids.items()]
    template = files["chat_template.jinja"].decode()
    template = template.replace("{{- message['content'] or '' -}}", IMAGE_CONTENT)
    files |= {"tokenizer.json": json.dumps(data).encode(), "chat_template.jinja": template.encode()}
    # Without our own file, which has no tokens for images.
    kept = {name: file for name, file in files.items() if name not in tokenizer.files}
    return HFTokenizer.of(kept, eos=tokenizer.eos, pad=tokenizer.pad), ids


def tiny_random(family: str, folder: str | Path, *, seed: int = 0, head_scale: float = 1.0) -> Path:
    """Writes a small checkpoint with random weights, in the format in which a family's authors publish theirs.

    It has two layers of width 64 (some 200,000 parameters), a context of 512 tokens, and the tokenizer and the chat
    template of the embedded model. DiffusionGemma also has a vision tower, and tokens for images. Every command takes
    it in place of a published checkpoint.

    Args:
        family: One of `BUILDS`; case, spaces and punctuation are ignored.
        folder: The new folder.
        seed: Of the weights.
        head_scale: Factor of the output head. At 1 all predictions are nearly uniform; at 8 some are certain, so that
            decoding rules differ in their passes.

    Returns:
        The folder.

    Raises:
        ValueError: No such family, the folder holds files, or `head_scale` is given for DiffusionGemma, whose head is
            its embedding table.

    Example:
        >>> lm = mj.load(mj.hub.tiny_random("LLaDA", "tiny-llada"))
    """
    plain = lambda name: re.sub(r"\W", "", name.lower())
    name = next((known for known in BUILDS if plain(known) == plain(family)), None)
    if name is None:
        raise refuse("family", family, "; ".join(BUILDS))
    tokenizer: Any = load(NANO).tokenizer
    ids = dict(
        vocab=tokenizer.vocab_size + 8,  # more ids than the tokenizer, as published models have
        mask=tokenizer.mask,
        pad=tokenizer.pad,
        eos=tokenizer.eos,
        context=CONTEXT,
    )
    if name == "DiffusionGemma":
        sizes = {key: x for key, x in PLAIN.items() if key not in ("zero_centred", "scale_embed", "tied")}
        tokenizer, image_ids = _with_image_tokens(tokenizer)
        vision = VisionConfig(**TOWER, **image_ids)
        config: ModelConfig = GemmaConfig(**{**sizes, **ids, **BUILDS[name], "vision": vision})
    else:
        config = ModelConfig(**{**PLAIN, **ids, **BUILDS[name]})
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(seed))
    if head_scale != 1.0:
        if "head" not in params:
            raise refuse("head_scale", head_scale, f"1.0 for {name}, whose head is its embedding table")
        params = {**params, "head": head_scale * params["head"]}
    lm = LM(model, params, tokenizer, noise.uniform(config.vocab))  # a checkpoint does not say its noise
    return save_hf(folder, lm, family=name)
