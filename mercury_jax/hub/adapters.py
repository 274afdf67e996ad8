"""LoRA adapters (arXiv 2106.09685) in PEFT's file format: `save_adapter` writes, and `load(adapter=)` merges them.

    adapter_config.json        rank, alpha and the targeted modules, as PEFT writes them
    adapter_model.safetensors  base_model.model.MODULE.lora_A.weight [rank, in] and lora_B.weight [out, rank]
    mercury.json               our config of the trained model, its noise, and the checksum of the tensors

MODULE has the name of the module in the checkpoints of the model's family, so that transformers and PEFT can load the
adapter onto the base model in Hugging Face's layout. A model that no family can hold gets our own names
(block_0.attention.q), which only `load` reads. An adapter written by PEFT has no mercury.json; then the config of the
base model applies.

Two cases need more than one pair of matrices per module:

    stacked experts  one parameter [E, out, in]; PEFT stores A as [E rank, in] and B as [out, rank E]. If two
                     parameters of a module are targeted, PEFT names the first one MODULE.base_layer.
    fused matrices   q, k and v of LLaDA2 are rows of one matrix. Their factors become one adapter with the sum of the
                     ranks: the A are stacked, and B is block diagonal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from mercury_jax import models
from mercury_jax.checkpoint import CheckpointError, manifest, tensors, unfit
from mercury_jax.checkpoint.tensors import LazyTensor, TensorEntry
from mercury_jax.config import ModelConfig, NoiseConfig, from_dict, refuse, to_dict
from mercury_jax.hub.family import Family, Opened, named_family, plain_build, writers
from mercury_jax.hub.params import TensorSource, shapes_of, to_ours
from mercury_jax.sharding import gather, matrix_axes
from mercury_jax.types import LM, LoraWeight

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "mercury.json"
PREFIX = "base_model.model."
FORMAT = 1
# Keys of adapter_config.json -> the values that are supported. Some ways to draw the first factors also change the
# base model (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA), and PEFT changes it again when it loads the adapter.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}  # fmt: skip
# Keys that are read, that only matter while an adapter is made or trained, or that say which modules have adapters, as
# the tensors do. Every other key must be null, false or empty: it could change the arithmetic.
OTHERS = """
    r lora_alpha rank_pattern alpha_pattern target_modules target_parameters
    exclude_modules layers_to_transform layers_pattern
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config megatron_core
    lora_dropout loftq_config eva_config corda_config lora_ga_config velora_config qalora_group_size
"""


class Factors(NamedTuple):
    """The two factors of one LoRA adapter, in PEFT's layout: the tensor changes by scale * b @ a.

    With E stacked experts, each expert has its own slice of both factors.

    Attributes:
        a: [E rank, in], or [rank, in] without experts; the expert varies slowest.
        b: [out, rank E], or [out, rank]; the expert varies fastest.
        scale: alpha / rank.
        rank: Rank per expert.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    rank: int

    def product(self, experts: int) -> np.ndarray:
        """Computes the change of the weight.

        Returns:
            [out, in] in fp32, or [E, out, in] for stacked experts.
        """
        a, b = self.a.astype(np.float32), self.b.astype(np.float32)
        if not experts:
            return np.float32(self.scale) * (b @ a)
        a, b = a.reshape(experts, self.rank, -1), b.reshape(len(b), self.rank, experts)
        return np.float32(self.scale) * np.einsum("ore,eri->eoi", b, a)


# --- names


def module_of(tensor: str) -> tuple[str, str]:
    """Splits the name of a tensor at its last dot.

    Returns:
        (module, parameter). The parameter of a torch Linear is "weight"; stacked experts have other names.
    """
    module, _, parameter = tensor.rpartition(".")
    return module, parameter


def own_names(model_shapes: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Makes tensor names for a model that no family can hold: our paths with dots, and matrices as [out, in].

    Args:
        model_shapes: Shapes of the parameters by path.
    """
    found = {}
    for path, like in model_shapes.items():
        if (axes := matrix_axes(path)) is not None:
            stem, _, last = path.replace("/", ".").rpartition(".")
            name = f"{stem}.weight" if last == "w" else f"{stem}.{last}"
            found[path] = TensorSource(name, axes.inputs, like.shape[0] if axes.batch else 0)
    return found


def family_for(config: ModelConfig, own: object) -> Family | None:
    """Chooses the family that names the modules of an adapter."""
    if isinstance(own, str):
        return named_family(own)
    return next(iter(writers(plain_build(config))), None)


def _sources(family: Family | None, config: ModelConfig) -> Mapping[str, TensorSource]:
    if family is None:
        return own_names(shapes_of(models.build(config)))
    return family.names(plain_build(config))


def _keys(sources: Mapping[str, TensorSource], targets: set[str]) -> dict[str, str]:
    """Maps the tensors of all targeted parameters to MODULE, the name in the adapter's keys."""
    found: dict[str, str] = {}
    inside: dict[str, list[str]] = {}  # stacked parameters of a module, in the order of the model
    for path, source in sources.items():
        if path in targets:
            for tensor in source.names:
                module, parameter = module_of(tensor)
                if parameter == "weight":
                    found[tensor] = module
                else:
                    inside.setdefault(module, []).append(tensor)
    # PEFT wraps a module once per targeted parameter, so the parameter that was wrapped first is the innermost.
    for module, stacked in inside.items():
        for i, tensor in enumerate(stacked):
            found[tensor] = module + ".base_layer" * (len(stacked) - 1 - i)
    return found


# --- writing


def save_adapter(
    folder: str | Path, lm: LM, noise_config: NoiseConfig | None, base: str, *, overwrite: bool = True
) -> Path:
    """Writes the LoRA adapters of a model in PEFT's format. All processes must call this.

    Args:
        folder: The folder to write.
        lm: The model, whose targeted matrices are `LoraWeight`s.
        noise_config: The noise that it was trained with; None for an autoregressive model.
        base: The base model of the adapters, as a `source` of `load`.
        overwrite: Replace an earlier adapter in that folder.

    Returns:
        The folder.

    Raises:
        ValueError: The model has no adapters, or the folder holds other files.
    """
    folder, config = Path(folder), lm.model.config
    flat: dict[str, Any] = flatten_dict(lm.params, sep="/")
    weights = {path: x for path, x in flat.items() if isinstance(x, LoraWeight)}
    if not weights:
        raise refuse("params", "no adapters", "a model that was trained with lora.rank above 0")
    if folder.exists() and any(folder.iterdir()) and not (overwrite and (folder / CONFIG).is_file()):
        raise refuse("folder", str(folder), "a new or empty folder, or one with an adapter")
    family = family_for(config, lm.card.get("family"))
    sources = _sources(family, config)
    host = lambda w: dataclasses.replace(w, base=None, a=gather(w.a), b=gather(w.b))
    found = _factors(sources, {path: host(x) for path, x in weights.items()})
    modules = _keys(sources, set(weights))
    about = _peft_config(found, modules, base)
    arrays: list[LazyTensor] = []
    for tensor, f in found.items():
        for alias in (modules[tensor], *(family.aliases(modules[tensor]) if family else ())):
            for part, array in (("A", f.a), ("B", f.b)):
                name = f"{PREFIX}{alias}.lora_{part}.weight"
                make = functools.partial(np.asarray, array)
                arrays.append(LazyTensor(name, array.shape, array.dtype, make))
    if family:
        for key in ("target_modules", "target_parameters"):
            about[key] = sorted({*about[key], *(x for name in about[key] for x in family.aliases(name))})
    if jax.process_index() == 0:
        _write(folder, about, arrays, _record(lm, noise_config, base, family))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("adapter")
    return folder


def _factors(sources: Mapping[str, TensorSource], weights: Mapping[str, LoraWeight]) -> dict[str, Factors]:
    """Converts the adapters of our parameters to PEFT's layout, by tensor of the checkpoint.

    Our a is [E, *in, rank] and our b is [E, rank, *out], without E for a plain matrix.
    """
    found: dict[str, Factors] = {}
    fused: dict[str, list[tuple[tuple[int, int, int], Factors]]] = {}
    for path, w in weights.items():
        source, rank = sources[path], w.a.shape[-1]
        if not source.inputs:
            raise refuse("lora.targets", path, "matrices that the family stores as torch does, [out, in]")
        count = w.a.shape[0] if source.experts else 1
        a = np.swapaxes(np.reshape(w.a, (count, -1, rank)), 1, 2)  # [E, rank, in]
        b = np.swapaxes(np.reshape(w.b, (count, rank, -1)), 1, 2)  # [E, out, rank]
        for i, part in enumerate(np.split(b, source.parts, axis=1)):  # gate and up share A
            if source.per_expert:
                for e, name in enumerate(source.names[i * count : (i + 1) * count]):
                    found[name] = Factors(a[e], part[e], w.scale, rank)
                continue
            stacked = np.moveaxis(part, 0, 2).reshape(part.shape[1], rank * count)  # [out, rank E]
            one = Factors(a.reshape(count * rank, -1), stacked, w.scale, rank)
            if source.rows is None:
                found[source.names[i]] = one
            else:
                fused.setdefault(source.names[i], []).append((source.rows, one))
    # Fused matrices: stack the A as [sum of ranks, in], and write each B into its own rows and columns of [out, ranks].
    for name, parts in fused.items():
        rank = sum(f.rank for _, f in parts)
        b, at = np.zeros((parts[0][0][2], rank), parts[0][1].b.dtype), 0
        for (first, last, _), f in parts:
            b[first:last, at : at + f.rank] = f.b
            at += f.rank
        found[name] = Factors(np.concatenate([f.a for _, f in parts]), b, parts[0][1].scale, rank)
    return found


def _peft_config(found: Mapping[str, Factors], modules: Mapping[str, str], base: str) -> dict[str, Any]:
    """Makes adapter_config.json. It lists full names of modules; PEFT would match a short name in every layer."""
    linear = [tensor for tensor in found if module_of(tensor)[1] == "weight"]
    ranks = [f.rank for f in found.values()]
    rank = min(ranks)
    scale = next(iter(found.values())).scale
    wide = {modules[tensor]: found[tensor].rank for tensor in found if found[tensor].rank != rank}
    return {
        "peft_type": "LORA", "base_model_name_or_path": base, "revision": None, "task_type": None,
        "inference_mode": True, "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "use_dora": False, "use_rslora": False, "init_lora_weights": True,
        "modules_to_save": None, "target_modules": [modules[tensor] for tensor in linear],
        "target_parameters": [tensor for tensor in found if tensor not in linear],
        "rank_pattern": {re.escape(name): r for name, r in wide.items()},
        "alpha_pattern": {re.escape(name): scale * r for name, r in wide.items()},
    }  # fmt: skip


def _record(lm: LM, noise_config: NoiseConfig | None, base: str, family: Family | None) -> dict[str, Any]:
    """Makes mercury.json, except for the checksum: what `Adapter.config_for` needs to rebuild the trained model."""
    config = lm.model.config
    return {
        "format": FORMAT, "base": base, "names": None if family is None else family.name, "name": lm.name,
        "architecture": models.kind(config), "model": to_dict(config),
        "noise": None if noise_config is None or config.autoregressive else to_dict(noise_config),
        "forbidden": list(lm.corruption.forbidden), "card": dict(lm.card), "decoding": dict(lm.decoding),
    }  # fmt: skip


def _write(
    folder: Path, about: Mapping[str, Any], arrays: list[LazyTensor], record: Mapping[str, Any]
) -> None:
    """Writes the three files."""
    with manifest.complete_folder(folder) as work:
        tensors.write(work / WEIGHTS, arrays, {"format": "pt"})
        manifest.write_synced(work / CONFIG, (json.dumps(about, indent=2, sort_keys=True) + "\n").encode())
        manifest.write_json(work / RECORD, {**record, "sha256": manifest.sha256(work / WEIGHTS)})


# --- reading


class Adapter(NamedTuple):
    """An opened adapter, before any tensor is read.

    Attributes:
        path: The folder.
        about: Contents of adapter_config.json.
        entries: Headers of its tensors, by name.
        record: Contents of mercury.json; None for an adapter written by PEFT.
    """

    path: Path
    about: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    record: Mapping[str, Any] | None

    def config_for(self, opened: Opened, dtype: str | None) -> Opened:
        """Replaces config, noise and sampling settings of the base model by those of the adapter's training."""
        r = self.record
        if r is None:
            return opened
        if r.get("format") != FORMAT or r.get("architecture") not in models.CONFIGS:
            raise refuse(f"{self.path / RECORD}: format", r.get("format"), f"{FORMAT}, by this version")
        config = from_dict(models.CONFIGS[r["architecture"]], r["model"])
        config = config if dtype is None else dataclasses.replace(config, dtype=dtype)  # pyright: ignore
        model = models.build(config)
        sizes = lambda m: {path: x.shape for path, x in shapes_of(m).items()}
        if sizes(model) != sizes(opened.model):
            allowed = f"an adapter of {opened.path}; this one belongs to {r['base']}"
            raise refuse("adapter", str(self.path), allowed)
        noise_config = None if r["noise"] is None else from_dict(NoiseConfig, r["noise"])
        return dataclasses.replace(
            opened, config=config, model=model, noise=noise_config, name=r["name"],
            card={**opened.card, **r["card"]}, decoding=r["decoding"],
        )  # fmt: skip

    @property
    def forbidden(self) -> tuple[int, ...] | None:
        """Ids that the trained model never emits; None for an adapter without mercury.json."""
        return None if self.record is None else tuple(self.record["forbidden"])

    def merged(self, opened: Opened, read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        """Wraps the reader of the base model's parameters so that it returns merged parameters.

        Returns:
            A reader that adds the adapter to targeted matrices. The sum is computed in fp32 and rounded to the dtype
            of the base model.
        """
        family = opened.family
        if self.record is not None:
            family = None if self.record["names"] is None else named_family(self.record["names"])
        elif family is None:
            family = family_for(opened.config, opened.card.get("family"))
        sources, shapes = _sources(family, opened.config), shapes_of(opened.model)
        modules = self._modules(sources, family)

        def merge(path: str) -> np.ndarray:
            host = read(path)
            source = sources.get(path)
            if source is None or not any(name in modules for name in source.names):
                return host
            # Compute the change in the layout of the checkpoint, then convert it exactly as the weight itself. Parts
            # without an adapter (only gate of gate_up, say) change by 0.
            stacked = 0 if source.per_expert else source.experts
            theirs = source.shapes(shapes[path].shape)
            change = lambda name: (
                self._read(modules[name]).product(stacked)
                if name in modules
                else np.zeros(theirs[name], np.float32)
            )
            added = to_ours(source, shapes[path].shape, change)
            return (host.astype(np.float32) + added).astype(host.dtype)

        return merge

    def _modules(self, sources: Mapping[str, TensorSource], family: Family | None) -> dict[str, str]:
        """Maps tensors of the checkpoint to modules of the adapter; refuses adapter tensors without a target."""
        parameters = set(self.about.get("target_parameters") or ())
        targeted = {
            path
            for path, source in sources.items()
            if any(
                f"{PREFIX}{module_of(name)[0]}.lora_A.weight" in self.entries
                if module_of(name)[1] == "weight"
                else any(name == p or name.endswith(f".{p}") for p in parameters)
                for name in source.names
            )
        }
        found = {
            tensor: module
            for tensor, module in _keys(sources, targeted).items()
            if f"{PREFIX}{module}.lora_A.weight" in self.entries
        }
        known = set()
        for module in found.values():
            copies = [module, *(family.aliases(module) if family else ())]
            known |= {f"{PREFIX}{name}.lora_{part}.weight" for name in copies for part in "AB"}
            self._check_equal(copies)
        if missing := sorted(known - set(self.entries)):
            raise CheckpointError(f"{self.path / WEIGHTS}: tensor {missing[0]!r} is missing")
        if surplus := sorted(set(self.entries) - known):
            raise CheckpointError(f"{self.path / WEIGHTS}: tensor {surplus[0]!r} has no place in the base")
        return found

    def _check_equal(self, copies: list[str]) -> None:
        """Checks that modules which share a weight have equal adapters, because our model has that weight once."""
        for part in "AB" if len(copies) > 1 else "":
            first, *others = (self._tensor(f"{PREFIX}{name}.lora_{part}.weight") for name in copies)
            if any(not np.array_equal(first, other) for other in others):
                where = f"{self.path}: adapters of {' and '.join(copies)}"
                raise refuse(where, "different", "equal ones: their weight is one")

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self.entries:
            raise CheckpointError(f"{self.path / WEIGHTS}: tensor {name!r} is missing")
        return tensors.read(self.path / WEIGHTS, self.entries[name])

    def _read(self, module: str) -> Factors:
        a, b = (self._tensor(f"{PREFIX}{module}.lora_{part}.weight") for part in "AB")
        rank = self._pattern("rank_pattern", module, self.about["r"])
        alpha = self._pattern("alpha_pattern", module, self.about["lora_alpha"])
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % rank:
            allowed = f"[{rank}, in] and [out, {rank}]"
            raise unfit(module, (a.shape, b.shape), allowed, self.path)
        return Factors(a, b, alpha / rank, rank)

    def _pattern(self, table: str, module: str, default: float) -> Any:
        """Looks up the rank or alpha of a module: the first pattern that matches the end of its name, as in PEFT."""
        for pattern, value in (self.about.get(table) or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default


def open_adapter(folder: str | Path) -> Adapter:
    """Opens a LoRA adapter: reads its config and the headers of its tensors, and verifies the checksum."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"adapter is {str(folder)!r}: this folder does not exist")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing: the folder holds no adapter in PEFT's format")
    about = manifest.read_json(path / CONFIG)
    for key, value in {"peft_type": None, **about}.items():
        if key in PLAIN and value not in PLAIN[key]:
            raise refuse(f"{path / CONFIG}: {key}", value, " or ".join(map(repr, PLAIN[key])))
        neutral = value is None or value is False or value in ([], {}, "")
        if key not in PLAIN and key not in OTHERS.split() and not neutral:
            allowed = "null, false or empty: it may change the arithmetic"
            raise refuse(f"{path / CONFIG}: {key}", value, allowed)
    for key in ("r", "lora_alpha"):
        value = about.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise refuse(f"{path / CONFIG}: {key}", value, "a number above 0")
    record = manifest.read_json(path / RECORD) if (path / RECORD).is_file() else None
    if record is not None and record.get("sha256") != manifest.sha256(path / WEIGHTS):
        raise CheckpointError(f"{path / WEIGHTS} is damaged: its SHA-256 differs from {RECORD}")
    return Adapter(path, about, tensors.header(path / WEIGHTS), record)
