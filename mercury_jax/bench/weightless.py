"""Models without their weights: parameters as shapes on a mesh, from a checkpoint's config, a recipe or a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax import hub, models, noise
from mercury_jax.bench import known
from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.export import CONFIG, PARAMS
from mercury_jax.config import ComputeType, ModelConfig, NoiseConfig, from_dict, one_of, refuse
from mercury_jax.hub.load import native_config, open_config, open_folder
from mercury_jax.hub.params import insert, quantised_axes, shapes_of
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.weight_quant import WEIGHT_KINDS, QuantisedWeight
from mercury_jax.sharding import partition_spec
from mercury_jax.train.recipe import TrainConfig, load_recipe
from mercury_jax.types import LM, Model


class Source(NamedTuple):
    """What MODEL says. stored: dtype of its parameters. recipe: how it is trained, where it is a recipe."""

    name: str
    config: ModelConfig
    noise: NoiseConfig | None
    stored: Any
    decoding: Mapping[str, Any] = {}
    recipe: TrainConfig | None = None


def source(name: str, dtype: str | None = None) -> Source:
    """MODEL as a source; dtype: of parameters and arithmetic, instead of its own. ValueError in words."""
    found = _found(name)
    if dtype is None:
        return found
    one_of(ComputeType, **{"--dtype": dtype})
    return found._replace(config=dataclasses.replace(found.config, dtype=dtype), stored=jnp.dtype(dtype))


def _found(name: str) -> Source:
    path = Path(name)
    if path.suffix == ".py":
        recipe = load_recipe(path)
        return Source(recipe.name, recipe.model, recipe.noise, jnp.dtype("float32"), recipe=recipe)
    if not path.is_file() and not path.is_dir() and name != hub.NANO.name:
        one = known.find(name)
        config = one.config()
        return Source(name, config, one.noise, jnp.dtype(config.dtype), one.decoding)
    folder = path if path.is_file() else hub.folder_of(name)
    if path.is_dir() or name == hub.NANO.name:
        if hub.is_native(folder):
            return _native(folder)
        opened = open_folder(folder)
    else:
        opened = open_config(folder)
    title = str(opened.folder.config.get("_name_or_path") or folder.resolve().stem)
    return Source(title, opened.config, opened.noise, opened.stored_dtype, opened.decoding)


def _native(folder: Path) -> Source:
    """A folder of ours: its config, and the dtype that `load` would give its parameters."""
    data = manifest.read_json(folder / CONFIG)["config"]
    config = native_config(data)
    kinds = [entry.dtype for entry in tensors.header(folder / PARAMS).values()]
    wide = config.dtype in ("float32", "float64")
    stored = config.dtype if wide else max(set(kinds), key=kinds.count)
    described = None if data["noise"] is None else from_dict(NoiseConfig, data["noise"])
    return Source(data["name"], config, described, jnp.dtype(stored), data.get("decoding", {}))


def lm(found: Source, mesh: Mesh, quantise: str | None = None) -> LM:
    """The model as `load(mesh=)` would lay it out, every parameter a shape with its sharding."""
    c = found.config
    model = models.build(c)
    corruption = noise.build(found.noise or NoiseConfig(kind="uniform"), c.vocab, c.mask)
    params = shapes(model, mesh, found.stored, quantise)
    return LM(model, params, IdTokenizer.of(c), corruption, found.name, decoding=found.decoding)


def shapes(model: Model, mesh: Mesh, dtype: Any, quantise: str | None = None) -> Any:
    """Parameters as shapes: in `dtype`, or matrices as 8 bits with scales that lie whole on every device."""
    if quantise is not None and quantise not in WEIGHT_KINDS:
        raise refuse("--quantise", quantise, ", ".join(WEIGHT_KINDS))
    tree: dict[str, Any] = {}
    for path, like in shapes_of(model).items():
        where = NamedSharding(mesh, partition_spec(path, like.shape, model.shardings, mesh))
        matrix = None if quantise is None else quantised_axes(path)
        if quantise is None or matrix is None:
            value: Any = jax.ShapeDtypeStruct(like.shape, dtype, sharding=where)
        else:
            value = _scaled(like.shape, quantise, matrix, where)
        insert(tree, path, value)
    return tree


def _scaled(
    shape: tuple[int, ...], quantise: str, matrix: tuple[int, int], where: NamedSharding
) -> QuantisedWeight:
    inputs, batch = matrix
    one = WEIGHT_KINDS[quantise](np.ones((1,) * len(shape)), inputs, batch)
    whole = NamedSharding(where.mesh, PartitionSpec())
    scale = (*shape[:batch], *shape[batch + inputs :])
    return QuantisedWeight(
        jax.ShapeDtypeStruct(shape, one.values.dtype, sharding=where),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct(scale, one.scale.dtype, sharding=whole),  # pyright: ignore[reportArgumentType]
    )
