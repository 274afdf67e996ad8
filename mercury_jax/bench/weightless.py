"""Models without their weights: parameters as shapes on a mesh, from a checkpoint's config, a recipe or a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax import hub, models, noise
from mercury_jax.bench import known
from mercury_jax.config import ComputeType, ModelConfig, NoiseConfig, one_of, refuse
from mercury_jax.hub.load import WIDE, open_checkpoint
from mercury_jax.hub.params import quantised_axes, shapes_of
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
    opened = open_checkpoint(name)
    config, stored = opened.config, opened.stored_dtype
    # In our own layout, the dtype that `load` would give the parameters.
    stored = jnp.dtype(config.dtype) if opened.family is None and config.dtype in WIDE else stored
    return Source(opened.name, config, opened.noise, stored, opened.decoding)


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
    found: dict[str, Any] = {}
    for path, like in shapes_of(model).items():
        where = NamedSharding(mesh, partition_spec(path, like.shape, model.shardings, mesh))
        matrix = None if quantise is None else quantised_axes(path)
        if quantise is None or matrix is None:
            value: Any = jax.ShapeDtypeStruct(like.shape, dtype, sharding=where)
        else:
            value = _scaled(like.shape, quantise, matrix, where)
        found[path] = value
    return unflatten_dict(found, sep="/")


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
