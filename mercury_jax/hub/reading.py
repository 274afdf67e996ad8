"""A checkpoint in Hugging Face's layout as an LM: read, checked, fitted into memory, put on its devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mercury_jax import models, noise
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import ComputeType, ModelConfig, NoiseConfig, one_of, refuse
from mercury_jax.hub import assemble, files, ids, memory
from mercury_jax.hub.families import family_of, notes
from mercury_jax.hub.family import Family
from mercury_jax.hub.unread import Ids
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM, Model

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
HEAD = "lm_head.weight"
SLICE = 64_000_000  # bytes that are compared at a time
FLOATS = ("F64", "F32", "F16", "BF16")


class Opened(NamedTuple):
    """A folder that was understood: its family, our config and model; no tensor is read yet."""

    folder: files.Folder
    family: Family
    config: ModelConfig
    model: Model

    @property
    def noise(self) -> NoiseConfig | None:
        """How it was noised; None for an autoregressive model."""
        found = self.family.noise
        return found(self.folder.config) if callable(found) else found

    @property
    def stored(self) -> np.dtype:
        """The dtype of most of its floating numbers; without tensors that of config.json."""
        if not self.folder.tensors:
            return np.dtype(jnp.dtype(self.config.dtype))
        sizes: dict[np.dtype, int] = {}
        for place in self.folder.tensors.values():
            sizes[place.entry.dtype] = sizes.get(place.entry.dtype, 0) + place.entry.end - place.entry.start
        return max(sizes, key=lambda kind: sizes[kind])


def open_folder(folder: str | Path, *, dtype: str | None = None, mask: int | None = None) -> Opened:
    """Read config.json and every header, and check each tensor against what the model needs.

    dtype: of the arithmetic (None: the files'). mask: the mask id, where config.json has none or the wrong one.
    Raises ValueError for a model that we do not build, CheckpointError for damage.
    """
    found = files.scan(folder)
    ids.complete(found.path, found.config)
    family, config = _understood(found, files.CONFIG, mask)
    config = own_head(found, family, config)
    if dtype is not None:
        one_of(ComputeType, dtype=dtype)
        config = dataclasses.replace(config, dtype=dtype)
    opened = Opened(found, family, config, models.build(config))
    _check(opened)
    return opened


def open_config(path: str | Path, *, mask: int | None = None) -> Opened:
    """The model of a config.json without its tensors: what it would be, and what it would need."""
    path = Path(path)
    found = files.Folder(path.parent, files.read_json(path.parent, path.name), {}, [])
    family, config = _understood(found, path.name, mask)
    return Opened(found, family, config, models.build(config))


def _understood(found: files.Folder, name: str, mask: int | None) -> tuple[Family, ModelConfig]:
    """The family of a config.json and our config of it; `mask` goes before the one that it names."""
    if mask is not None:
        found.config["mask_token_id"] = mask
    if (kind := found.config.get("quantization_config")) is not None:
        method = kind.get("quant_method") if isinstance(kind, Mapping) else kind
        allowed = "none: load the unquantised files, with quantise='int8' or 'fp8'"
        raise refuse(f"{found.path / name}: quantization_config", method, allowed)
    family = family_of(found.config)
    found.notes.extend(notes(found.config, family))
    return family, family.read(found.config, str(found.path / name))


def own_head(folder: files.Folder, family: Family, config: ModelConfig) -> ModelConfig:
    """The config with `tied` off where the files hold a head that differs from the embedding.

    As transformers 5 does: under `tie_word_embeddings` two equal tensors are tied, and two that differ are both used.
    They are compared slice by slice, up to the first difference, so that neither is in memory whole.
    """
    if not config.tied or HEAD not in folder.tensors or family.uses(HEAD, config):
        return config
    embed = family.names(config)["embed"].name
    same = isinstance(embed, str) and embed in folder.tensors and _equal(folder, embed, HEAD)
    return config if same else dataclasses.replace(config, tied=False)


def _equal(folder: files.Folder, one: str, other: str) -> bool:
    a, b = folder.tensors[one].entry, folder.tensors[other].entry
    if a.shape != b.shape or a.dtype != b.dtype or not a.shape:
        return False
    rows = max(1, SLICE * a.shape[0] // max(1, a.end - a.start))
    cuts = [slice(i, min(i + rows, a.shape[0])) for i in range(0, a.shape[0], rows)]
    return all(np.array_equal(folder.read(one, cut), folder.read(other, cut)) for cut in cuts)


def _check(opened: Opened) -> None:
    theirs = {name: place.entry.shape for name, place in opened.folder.tensors.items()}
    ours = {path: tuple(like.shape) for path, like in assemble.shapes_of(opened.model).items()}
    where, names = str(opened.folder.path), opened.family.names(opened.config)
    assemble.check(where, opened.family, opened.config, names, ours, theirs)
    for leaf in names.values():
        for name in leaf.names:
            kind = opened.folder.tensors[name].entry.dtype
            if kind.name not in ("float64", "float32", "float16", "bfloat16"):
                raise CheckpointError(
                    f"{where}: " + str(refuse(f"dtype of {name}", kind.name, ", ".join(FLOATS)))
                )


def load(
    folder: str | Path,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    name: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """The LM in a folder; one parameter at a time goes from the file to the devices that hold it.

    dtype: of parameters and arithmetic (None: the files'). quantise: "int8" or "fp8" keeps matrices as that, with a
    scale for each output. mask: see `open_folder`. mesh: where it lies (None: the first device).
    """
    opened = open_folder(folder, dtype=dtype, mask=mask)
    kind = None if dtype is None else jnp.dtype(dtype)
    return load_opened(opened, dtype=kind, quantise=quantise, mesh=mesh, name=name, progress=progress)


def load_opened(
    opened: Opened,
    *,
    dtype: np.dtype | None = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    name: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """`load` of a folder that was opened. dtype: of the parameters (None: that of most of the files' numbers)."""
    assemble.check_kind(quantise)
    label = name or str(opened.folder.config.get("_name_or_path") or opened.folder.path.name)
    kind = opened.stored if dtype is None else dtype
    memory.check(opened.model, mesh, kind, quantise, label)
    params = assemble.params(
        opened.model, opened.family.names(opened.config), opened.folder.read, dtype=kind,
        quantise=quantise, mesh=mesh, progress=progress,
    )  # fmt: skip
    c = opened.config
    return LM(
        model=opened.model,
        params=params,
        tokenizer=_tokenizer(opened),
        corruption=corruption(opened.noise, c),
        name=label,
        card=card(opened),
        decoding=decoding(opened),
    )


def corruption(found: NoiseConfig | None, c: ModelConfig) -> noise.Corruption:
    """The noise that a checkpoint was trained with; an autoregressive one has none, and its prior is not used."""
    return noise.build(found or NoiseConfig(kind="uniform"), c.vocab, c.mask)


def card(opened: Opened) -> Mapping[str, Any]:
    """What is known of a checkpoint."""
    return {
        "family": opened.family.name,
        "architecture": opened.folder.config["architectures"][0],
        "licence": licence(opened),
        "notes": list(opened.folder.notes),
    }


def licence(opened: Opened) -> str:
    """The `license:` line of its README, else the family's."""
    readme = files.find(opened.folder.path, "README.md")
    if readme is not None:
        with readme.open("rb") as file:
            head = file.read(20_000).decode("utf-8", "replace").splitlines()
        if head[:1] == ["---"]:
            for line in head[1:]:
                if line.startswith("license:"):
                    return line.split(":", 1)[1].strip()
                if line == "---":
                    break
    return opened.family.licence


def decoding(opened: Opened) -> Mapping[str, Any]:
    """How the checkpoint asks to be decoded, where its family says how to read that."""
    if opened.family.decoding is None:
        return {}
    about = files.find(opened.folder.path, "generation_config.json")
    found = files.read_json(opened.folder.path, "generation_config.json") if about else {}
    return opened.family.decoding(opened.folder.config, found)


def _tokenizer(opened: Opened) -> Any:
    """The folder's tokenizer; ids alone where it has none."""
    c, folder = opened.config, opened.folder.path
    there = {name: files.find(folder, name) for name in TOKENIZERS}
    if not any(there.values()):
        return Ids(c)
    if there["tokenizer.model"]:
        with contextlib.suppress(ValueError):  # a model of our own build, written for others
            return Tokenizer.load(there["tokenizer.model"])
    from mercury_jax.hub.tokenizer import HFTokenizer

    return HFTokenizer.load(folder, mask=c.mask, eos=c.eos, pad=c.pad, ends=c.ends, vocab=c.vocab)
