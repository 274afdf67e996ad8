"""The programs of sampling, prefilling and training, lowered for devices that are not here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mercury_jax import models, noise, sharding
from mercury_jax.bench.chips import HOST, Target
from mercury_jax.bench.weightless import Source, lm as weightless
from mercury_jax.config import NoiseConfig, refuse
from mercury_jax.decode import abstract
from mercury_jax.train import data, objectives, optim, step as steps
from mercury_jax.train.recipe import MeshConfig, TrainConfig
from mercury_jax.types import Batch

WHAT = ("sample", "train", "prefill")
CONTEXT = {"sample": 32768, "prefill": 32768, "train": 2048}  # at most, where the caller does not say
ROWS = 8  # of a device, in a training step whose batch nobody names


class Ask(NamedTuple):
    """What is compiled: of a model, for devices, in which sizes. None: as `Ask.filled` chooses."""

    model: str
    target: str
    what: str = "sample"
    context: int | None = None
    batch: int | None = None
    quantise: str | None = None
    dtype: str | None = None
    mesh: str | None = None


class Made(NamedTuple):
    """A lowered program, and in which sizes it was made."""

    lowered: Any
    mesh: Mesh
    context: int
    rows: int
    per: str  # what one figure is for: a pass, an update


def sizes(text: str | None) -> dict[str, int]:
    """`data=8,tensor=8` as numbers."""
    found = {}
    for pair in (text or "").split(",") if text else []:
        name, equals, value = pair.partition("=")
        if name not in sharding.AXES or not equals or not value.removeprefix("-").isdigit():
            raise refuse(
                "--mesh", text, f"{', '.join(f'{axis}=N' for axis in sharding.AXES)}, joined by commas"
            )
        found[name] = int(value)
    return found


def lower(ask: Ask, found: Source, target: Target) -> Made:
    """The program that `sample()`, its prefill, or a training step runs, for these devices."""
    devices = list(target.describe().devices)[: target.devices]
    given = sizes(ask.mesh)
    if ask.what == "train":
        return _train(ask, found, target, devices, given)
    on = _mesh(given or _spread(found, len(devices)), devices)
    model = weightless(found, on, ask.quantise)
    model = dataclasses.replace(model, model=sharding.with_device(model.model, target.device))
    context, rows = ask.context or min(CONTEXT[ask.what], found.config.context), ask.batch or on.shape["data"]
    alone = on.size == on.shape["data"] and on.size > 1  # every device decodes its own rows
    job, wide = abstract.abstract_session(
        model, rows, context, mesh=on if alone and ask.what == "sample" else None
    )
    if ask.what == "sample":
        return Made(abstract.lower_run(model, job), on, context, rows, "pass")
    if wide is None:
        raise refuse(
            "--what", "prefill", f"sample: the steps of {found.name} encode what is known at {context}"
        )
    return Made(abstract.lower_prefill(model, job, wide), on, context, rows, f"pass of {wide} tokens")


def _mesh(given: dict[str, int], devices: list[Any]) -> Mesh:
    return sharding.mesh(**({"data": 1 if -1 in given.values() else -1} | given), devices=devices)


def _spread(found: Source, count: int) -> dict[str, int]:
    """Over the devices of a host along experts, or heads; hosts decode rows of their own."""
    host = min(count, HOST)
    return {"expert" if found.config.experts is not None else "tensor": host, "data": count // host}


def _train(ask: Ask, found: Source, target: Target, devices: list[Any], given: dict[str, int]) -> Made:
    recipe = _recipe(ask, found, len(devices), given)
    on = _mesh(dataclasses.asdict(recipe.mesh), devices)
    if recipe.batch // recipe.accumulate % sharding.row_shards(on):
        allowed = f"a multiple of {sharding.row_shards(on)}, the mesh's data * fsdp"
        raise refuse("batch / accumulate", recipe.batch // recipe.accumulate, allowed)
    model, c = models.build(recipe.model), recipe.model
    corruption = noise.build(recipe.noise, c.vocab, c.mask)
    tx = optim.optimizer(recipe.optim, recipe.steps)
    model = sharding.with_training_mesh(sharding.with_device(model, target.device), on)
    state = steps.shapes(model, tx, recipe.ema > 0, on)
    update = steps.plain(
        model, recipe.objective, corruption, tx, optim.schedule(recipe.optim, recipe.steps),
        accumulate=recipe.accumulate, ema=recipe.ema,
    )  # fmt: skip
    with jax.set_mesh(on):
        lowered = steps.jitted(update, state).lower(state, batch(recipe.batch, recipe.row, on))
    return Made(lowered, on, recipe.row, recipe.batch, "update")


def _recipe(ask: Ask, found: Source, count: int, given: dict[str, int]) -> TrainConfig:
    """The recipe, with what the command line changes; where MODEL is none, bf16 arithmetic and an AdamW step."""
    changes: dict[str, Any] = {"mesh": MeshConfig(**given)} if given else {}
    changes |= {"row": ask.context} if ask.context else {}
    changes |= {"batch": ask.batch} if ask.batch else {}
    if found.recipe is not None:
        return dataclasses.replace(found.recipe, model=found.config, **changes)
    if found.config.mask is None:
        raise refuse(
            "--what",
            "train",
            f"sample, prefill, or a recipe: {found.name} says no objective, and has no mask",
        )
    plain: dict[str, Any] = dict(
        mesh=MeshConfig(data=-1, fsdp=min(count, HOST)), row=CONTEXT["train"], batch=ROWS * count, ema=0.0
    )
    described: Any = found.noise or NoiseConfig()
    objective = objectives.masked_elbo()
    return TrainConfig(
        name="ahead",
        model=found.config,
        objective=objective,
        data=data.stdlib(),
        noise=described,
        **plain | changes,
    )


def batch(rows: int, row: int, on: Mesh) -> Batch:
    """A batch of the data pipeline as shapes, its rows over the mesh."""
    like: Any = lambda dtype, *more: jax.ShapeDtypeStruct(
        (rows, row, *more), dtype, sharding=sharding.row_sharding(on)
    )
    return Batch(
        tokens=like(jnp.int32),
        positions=like(jnp.int32),
        ranges=like(jnp.int32, 2, 2),
        editable=like(jnp.bool_),
        canvas=like(jnp.int32),
    )
