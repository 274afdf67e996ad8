"""Loading a model: from a folder of ours, a checkpoint in Hugging Face's layout, or the Hugging Face hub.

`load` finds the folder (`folder_of`) and takes one of two ways:

    ours           manifest verified -> tokenizer, config -> parameters by their paths
    Hugging Face   config.json and headers read (`scan`) -> family -> our config, every tensor checked (`open_folder`)
                   -> memory checked -> parameters, one at a time (`load_opened`)

Sampling needs no trainer: nothing here imports grain, optax or orbax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import DTypeLike

from mercury_jax import checkpoint, models, noise
from mercury_jax.checkpoint import CheckpointError, manifest
from mercury_jax.checkpoint.export import CONFIG, PARAMS
from mercury_jax.config import ComputeType, ModelConfig, NoiseConfig, from_dict, one_of, refuse
from mercury_jax.hub.families import family_of
from mercury_jax.hub.family import Family
from mercury_jax.hub.folder import Folder, download, find, read_json, scan
from mercury_jax.hub.params import (
    check_memory,
    check_quantise,
    check_tensors,
    load_params,
    shapes_of,
    to_ours,
)
from mercury_jax.hub.tokenizer import HFTokenizer, IdTokenizer, unpack
from mercury_jax.models import cache
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.types import LM, Model, Params

NANO = Path(__file__).parents[1] / "assets" / "nano"  # the embedded model, which "nano" names everywhere
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?")
HEAD = "lm_head.weight"
COMPARE_CHUNK = 64_000_000  # bytes that are compared at a time
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def load(
    source: str | Path | None = None,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    kv: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """Loads a model for sampling, scoring, serving or further training.

    Args:
        source: None or "nano" for the embedded model; a folder that `mercury train` or `mercury convert` wrote; a
            folder in Hugging Face's layout; or an id such as "google/diffusiongemma-26B-A4B-it" or
            "org/name@revision", which is downloaded.
        dtype: "float32", "bfloat16", "float16", or "float64" under x64. Default: the checkpoint's own.
        quantise: "int8" or "fp8" stores each weight matrix so, with one scale per output. Default: not quantised.
        kv: "int8", "4bit" or "3bit" stores the KV cache so. Default: the dtype of the arithmetic.
        mask: The mask id of a masked diffusion model, where the checkpoint does not name it or names it wrongly.
        mesh: The devices that hold the parameters, such as `mj.mesh(tensor=8)`. Default: the first device.
        progress: Called with the number of bytes of each parameter that was loaded.

    Returns:
        The model with its parameters, tokenizer and noise process. Nothing in a checkpoint is ever executed.

    Raises:
        ValueError: The architecture is not supported, the model does not fit into memory, or it has no use for `mask`
            (it is autoregressive, or its noise has none).
        CheckpointError: A file or tensor is missing, damaged, or has another shape; the message names it.

    Example:
        >>> lm = mj.load()
        >>> lm = mj.load("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16", quantise="int8", kv="4bit")
    """
    cache.check_kv_kind(kv)
    check_quantise(quantise)
    source = NANO if source is None else source
    folder = folder_of(source)
    check_mask(folder, mask)
    if is_native(folder):
        lm = load_native(folder, dtype=dtype, quantise=quantise, mask=mask, mesh=mesh)
    else:
        opened = open_folder(folder, dtype=dtype, mask=mask)
        kind = None if dtype is None else jnp.dtype(dtype)
        name = str(source) if Path(source) != folder else None
        lm = load_opened(opened, dtype=kind, quantise=quantise, mesh=mesh, name=name, progress=progress)
    return dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, kv))


def config_of(source: str | Path, *, mask: int | None = None, **changes: Any) -> ModelConfig:
    """Reads the config of a saved model, for a recipe that starts from it.

    Args:
        source: As of `load`.
        mask: The mask id, where the checkpoint does not name it.
        **changes: Fields of the config to change.

    Returns:
        The config.

    Raises:
        ValueError: The config has no such field, or the model is not supported.

    Example:
        A masked diffusion model made from an autoregressive one:

        >>> hub.config_of("Qwen/Qwen3-0.6B", mask=151669, pattern="bidirectional", predicts_next=False)
    """
    folder = folder_of(source)
    if is_native(folder):
        found = native_config(manifest.read_json(folder / CONFIG)["config"], mask=mask)
    else:
        found = open_folder(folder, mask=mask).config
    names = [f.name for f in dataclasses.fields(found)]
    for name in changes:
        if name not in names:
            raise refuse("config", name, ", ".join(names))
    return dataclasses.replace(found, **({} if mask is None else {"mask": mask}), **changes)


def takes_mask(source: str | Path, mask: int) -> bool:
    """Says whether a checkpoint is one of masked diffusion, once the mask id is known; nothing is loaded.

    Args:
        source: As of `load`, or a config.json in Hugging Face's form.
        mask: The mask id.

    Returns:
        False for an autoregressive model, and for one whose noise has no mask. A recipe can make a diffusion model
        of the former (`config_of`).
    """
    path = Path(source) if Path(source).is_file() else folder_of(source)
    if is_native(path):
        return native_config(manifest.read_json(path / CONFIG)["config"]).mask is not None
    opened = open_config(path, mask=mask) if path.is_file() else open_folder(path, mask=mask)
    return opened.config.mask == mask


def check_mask(path: Path, mask: int | None) -> None:
    """Refuses a mask id that a model would not use.

    Args:
        path: As of `takes_mask`.
        mask: The mask id; None is always allowed.

    Raises:
        ValueError: The model is autoregressive, or its noise has no mask.
    """
    if mask is not None and not takes_mask(path, mask):
        raise refuse(
            "mask", mask, "None: this model is autoregressive, or its noise has no mask. A recipe makes a masked "
            f"diffusion model of an autoregressive one: model=hub.config_of({str(path)!r}, mask={mask}, "
            "pattern='bidirectional', predicts_next=False), and mercury train --init"
        )  # fmt: skip


def folder_of(source: str | Path) -> Path:
    """Finds the folder of a source, downloading it if it is an id that is not in the cache.

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
        f"source is {str(source)!r}; allowed: a folder of a saved model, an id such as 'org/name', or nano; "
        "this one does not exist"
    )


def is_native(folder: Path) -> bool:
    """Whether `export.save` wrote the folder, even if files of it are missing now."""
    return any((folder / name).is_file() for name in (manifest.NAME, PARAMS))


# --- Hugging Face's layout


class Opened(NamedTuple):
    """A checkpoint whose config was converted and whose tensors fit the model; no tensor is read yet.

    Attributes:
        folder: Its files.
        family: Its family.
        config: Our config.
        model: Our model.
    """

    folder: Folder
    family: Family
    config: ModelConfig
    model: Model

    @property
    def noise(self) -> NoiseConfig | None:
        """The noise that it was trained with; None for an autoregressive model."""
        found = self.family.noise
        return found(self.folder.config) if callable(found) else found

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype of most of its bytes; without tensors that of config.json."""
        if not self.folder.tensors:
            return np.dtype(jnp.dtype(self.config.dtype))
        sizes: dict[np.dtype, int] = {}
        for _, entry in self.folder.tensors.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=lambda kind: sizes[kind])

    @property
    def card(self) -> Mapping[str, Any]:
        """What is known of the checkpoint: family, architecture, licence and notes.

        The licence is the `license:` line of its README's header, else that of the family.
        """
        licence, readme = self.family.licence, find(self.folder.path, "README.md")
        if readme is not None:
            with readme.open("rb") as file:
                first, *lines = file.read(20_000).decode("utf-8", "replace").splitlines() or [""]
            header = lines[: lines.index("---")] if "---" in lines else lines
            named = [line.split(":", 1)[1].strip() for line in header if line.startswith("license:")]
            licence = named[0] if first == "---" and named else licence
        return {
            "family": self.family.name,
            "architecture": self.folder.config["architectures"][0],
            "licence": licence,
            "notes": list(self.folder.notes),
        }

    @property
    def decoding(self) -> Mapping[str, Any]:
        """How the checkpoint asks to be decoded, if its family knows how to read that; see `LM.decoding`."""
        if self.family.decoding is None:
            return {}
        generation = read_json(self.folder.path, "generation_config.json", optional=True)
        return self.family.decoding(self.folder.config, generation)

    @property
    def corruption(self) -> noise.Corruption:
        """The noise process; that of an autoregressive model is never used."""
        return noise.build(self.noise or NoiseConfig(kind="uniform"), self.config.vocab, self.config.mask)


def open_folder(folder: str | Path, *, dtype: str | None = None, mask: int | None = None) -> Opened:
    """Reads config.json and all headers, and checks each tensor against what the model needs.

    Args:
        folder: A checkpoint in Hugging Face's layout.
        dtype: Of the arithmetic. Default: the checkpoint's.
        mask: The mask id, where config.json has none or the wrong one.

    Returns:
        The opened checkpoint.

    Raises:
        ValueError: The model is not supported.
        CheckpointError: A file or tensor is missing or damaged.
    """
    found = scan(folder)
    _complete_ids(found)
    family, config = _converted(found, "config.json", mask)
    if config.tied and HEAD in found.tensors and not family.uses(HEAD, config):
        # As in transformers 5: under `tie_word_embeddings` two equal tensors are tied, two that differ are both used.
        embed = family.names(config)["embed"].name
        if not (isinstance(embed, str) and embed in found.tensors and _equal(found, embed, HEAD)):
            config = dataclasses.replace(config, tied=False)
    if dtype is not None:
        one_of(ComputeType, dtype=dtype)
        config = dataclasses.replace(config, dtype=dtype)
    opened = Opened(found, family, config, models.build(config))
    theirs = {name: tensor.entry.shape for name, tensor in found.tensors.items()}
    ours = {path: tuple(like.shape) for path, like in shapes_of(opened.model).items()}
    check_tensors(str(found.path), family, config, ours, theirs)
    for source in family.names(config).values():
        for name in source.names:
            kind = found.tensors[name].entry.dtype.name
            if kind not in FLOATS:
                error = refuse(f"dtype of {name}", kind, ", ".join(FLOATS.values()))
                raise CheckpointError(f"{found.path}: {error}")
    return opened


def open_config(path: str | Path, *, mask: int | None = None) -> Opened:
    """Converts a config.json alone, without tensors: what the model would be, and what it would need.

    Args:
        path: The file.
        mask: The mask id, where config.json has none or the wrong one.

    Returns:
        An opened checkpoint without tensors.

    Raises:
        ValueError: The model is not supported.
    """
    path = Path(path)
    found = Folder(path.parent, read_json(path.parent, path.name), {}, [])
    family, config = _converted(found, path.name, mask)
    return Opened(found, family, config, models.build(config))


def _converted(found: Folder, name: str, mask: int | None) -> tuple[Family, ModelConfig]:
    if mask is not None:
        found.config["mask_token_id"] = mask
    if (kind := found.config.get("quantization_config")) is not None:
        method = kind.get("quant_method") if isinstance(kind, Mapping) else kind
        allowed = "none: load the unquantised files, with quantise='int8' or 'fp8'"
        raise refuse(f"{found.path / name}: quantization_config", method, allowed)
    family, notes = family_of(found.config)
    found.notes.extend(notes)
    return family, family.read(found.config, str(found.path / name))


def _complete_ids(found: Folder) -> None:
    """Adds ids that config.json lacks: the mask of the tokenizer, and further ends of generation_config.json."""
    if found.config.get("mask_token_id") is None and (mask := _tokenizer_mask(found.path)) is not None:
        found.config["mask_token_id"] = mask
    more = read_json(found.path, "generation_config.json", optional=True).get("eos_token_id")
    listed = lambda x: [] if x is None else list(x) if isinstance(x, list) else [x]
    ends = list(dict.fromkeys([*listed(found.config.get("eos_token_id")), *listed(more)]))
    found.config["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None


def _tokenizer_mask(folder: Path) -> int | None:
    """The id of the tokenizer's `mask_token`."""
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
    listed = files("added_tokens.json").get(text)
    if isinstance(listed, int):
        return listed
    for entry in files("tokenizer.json").get("added_tokens") or []:
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return entry["id"]
    return None


def _equal(folder: Folder, one: str, other: str) -> bool:
    """Whether two tensors are equal; they are read in slices, up to the first difference."""
    a, b = folder.tensors[one].entry, folder.tensors[other].entry
    if a.shape != b.shape or a.dtype != b.dtype or not a.shape:
        return False
    rows = max(1, COMPARE_CHUNK * a.shape[0] // max(1, a.nbytes))
    cuts = [slice(i, min(i + rows, a.shape[0])) for i in range(0, a.shape[0], rows)]
    return all(np.array_equal(folder.read(one, cut), folder.read(other, cut)) for cut in cuts)


def load_opened(
    opened: Opened,
    *,
    dtype: np.dtype | None = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    name: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """Loads a checkpoint that was opened; each parameter goes from its file to the devices that hold it.

    Args:
        opened: From `open_folder`.
        dtype: Of the parameters. Default: that of most of the checkpoint's bytes.
        quantise: As of `load`.
        mesh: As of `load`.
        name: The model's name. Default: as config.json says, else the folder's.
        progress: As of `load`.

    Returns:
        The model.

    Raises:
        ValueError: The model does not fit into memory.
        CheckpointError: A file is damaged.
    """
    label = name or str(opened.folder.config.get("_name_or_path") or opened.folder.path.name)
    kind = opened.stored_dtype if dtype is None else dtype
    check_memory(opened.model, mesh, kind, quantise, label)
    return LM(
        model=opened.model,
        params=opened_params(opened, dtype=kind, quantise=quantise, mesh=mesh, progress=progress),
        tokenizer=_folder_tokenizer(opened.folder.path, opened.config),
        corruption=opened.corruption,
        name=label,
        card=opened.card,
        decoding=opened.decoding,
    )


def opened_params(
    opened: Opened,
    *,
    dtype: DTypeLike | None = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Params:
    """Reads the parameters of an opened checkpoint onto their devices, one at a time.

    Args:
        opened: From `open_folder`.
        dtype: Of parameters that are not quantised. Default: as stored.
        quantise: As of `load`.
        mesh: As of `load`.
        progress: As of `load`.

    Returns:
        The tree of parameters.
    """
    sources, shapes = opened.family.names(opened.config), shapes_of(opened.model)
    read = lambda path: to_ours(sources[path], shapes[path].shape, opened.folder.read)
    return load_params(opened.model, read, dtype=dtype, quantise=quantise, mesh=mesh, progress=progress)


def _folder_tokenizer(folder: Path, c: ModelConfig) -> AnyTokenizer:
    """The folder's tokenizer; ids alone if it has none."""
    there = {name: find(folder, name) for name in ("tokenizer.json", "vocab.json", "tokenizer.model")}
    if not any(there.values()):
        return IdTokenizer.of(c)
    if there["tokenizer.model"]:
        with contextlib.suppress(ValueError):  # a model of our own build, written for other libraries
            return Tokenizer.load(there["tokenizer.model"])
    return HFTokenizer.load(folder, mask=c.mask, eos=c.eos, pad=c.pad, ends=c.ends, vocab=c.vocab)


# --- our own folders


def native_config(data: Mapping[str, Any], dtype: str | None = None, mask: int | None = None) -> ModelConfig:
    """Reads the model's config from what `export.save` wrote.

    Args:
        data: The contents of config.json under "config".
        dtype: Of the arithmetic. Default: the config's.
        mask: The mask id. Default: the config's.

    Returns:
        The config.

    Raises:
        ValueError: The architecture is unknown.
    """
    name = data.get("architecture", "transformer")
    if name not in models.CONFIGS:
        raise refuse("architecture", name, ", ".join(models.CONFIGS))
    config = from_dict(models.CONFIGS[name], data["model"])
    changes = {"dtype": dtype, "mask": mask}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})


def native_noise(folder: Path) -> NoiseConfig | None:
    """Returns the noise that the model of our folder was trained with; None for an autoregressive one."""
    data = manifest.read_json(folder / CONFIG)["config"]
    return None if data["noise"] is None else from_dict(NoiseConfig, data["noise"])


def load_native(
    folder: Path,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    as_stored: bool = False,
) -> LM:
    """Loads a folder of ours after verifying the SHA-256 of every file.

    Args:
        folder: What `export.save` wrote.
        dtype: Of the arithmetic. Default: the config's.
        quantise: As of `load`.
        mask: As of `load`.
        mesh: As of `load`.
        as_stored: Keep the dtype of the parameters. Default: fp32 (fp64) where the arithmetic is.

    Returns:
        The model.

    Raises:
        CheckpointError: A file is missing or damaged.
        ValueError: Tokenizer and model do not belong together, or the model does not fit into memory.
    """
    found = checkpoint.load_exported(folder)
    data = found.config
    if found.tokenizer is None:
        raise CheckpointError(f"{found.path}: tokenizer.model is missing")
    tokenizer = unpack(found.tokenizer)
    config = native_config(data, dtype, mask)
    if tokenizer.vocab_size > config.vocab:  # a model may have ids without a text
        allowed = f"at most {config.vocab}, the model's vocab"
        raise refuse("tokenizer.vocab_size", tokenizer.vocab_size, allowed)
    if tokenizer.fingerprint != data["tokenizer"]:
        raise refuse("tokenizer", tokenizer.fingerprint, f"{data['tokenizer']}, the one it was trained with")
    if mask is not None:
        tokenizer = tokenizer.with_mask(mask)
    model = models.build(config)
    wide = config.dtype in ("float32", "float64") and not as_stored
    check_memory(model, mesh, config.dtype, quantise, data["name"])
    for name, like in shapes_of(model).items():
        entry = found.tensors.get(name)
        if entry is None or tuple(entry.shape) != tuple(like.shape):
            have = None if entry is None else tuple(entry.shape)
            raise CheckpointError(f"{found.path}: parameter {name} is {have}; the config needs {like.shape}")
    kind = jnp.dtype(config.dtype) if wide else None
    described = None if data["noise"] is None else from_dict(NoiseConfig, data["noise"])
    forbidden = tuple(data.get("forbidden", noise.specials(tokenizer, config.vocab)))
    return LM(
        model=model,
        params=load_params(model, found.read, dtype=kind, quantise=quantise, mesh=mesh),
        tokenizer=tokenizer,
        corruption=noise.build(
            described or NoiseConfig(kind="uniform"), config.vocab, config.mask, forbidden
        ),
        name=data["name"],
        card=data.get("card", {}),
        decoding=data.get("decoding", {}),
    )
