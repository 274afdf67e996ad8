"""Lowers and compiles the programs of sampling, prefilling and training for devices that are not here.

`lower` makes the program, `compile_program` compiles it and reads its cost. `bench.compile` runs it in a process of
its own.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mercury_jax import models, noise, sharding
from mercury_jax.bench import abstract_params, chips, hlo
from mercury_jax.bench.abstract_params import ModelSource
from mercury_jax.bench.chips import GPUS_PER_HOST, Chip, Target, datasheet_roofline, mesh_sizes
from mercury_jax.config import NoiseConfig, refuse
from mercury_jax.decode import abstract
from mercury_jax.train import data, objectives, optim, step as steps
from mercury_jax.train.recipe import MeshConfig, TrainConfig
from mercury_jax.types import Batch

PROGRAMS = ("sample", "train", "prefill")
CONTEXT = {"sample": 32768, "prefill": 32768, "train": 2048}  # at most, where the request does not say
ROWS = 8  # of each device, in a training step where the request names no batch

MEMORY = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) \w+", re.ASCII)  # in a TPU compiler's refusal
UNIT = {"K": 2**10, "M": 2**20, "G": 2**30}


class CompileRequest(NamedTuple):
    """What to compile.

    Attributes:
        model: As `abstract_params.source` takes it.
        target: As `chips.target` takes it.
        what: One of `PROGRAMS`.
        context: Positions of a row. Default: CONTEXT, at most the model's.
        batch: Rows. Default: one for each part of the mesh axis `data`; in training ROWS for each device.
        quantise: "int8" or "fp8" for weight matrices in 8 bits.
        dtype: Of parameters and arithmetic. Default: the model's.
        mesh: As `chips.mesh_sizes` takes it. Default: experts or heads over the devices of a host.
    """

    model: str
    target: str
    what: str = "sample"
    context: int | None = None
    batch: int | None = None
    quantise: str | None = None
    dtype: str | None = None
    mesh: str | None = None


class LoweredProgram(NamedTuple):
    """A lowered program, the sizes it was made for, and what one figure is for: a pass, an update."""

    lowered: Any
    mesh: Mesh
    context: int
    rows: int
    per: str


def stage(text: str) -> None:
    """Prints what is being done for the parent process, which shows it as progress."""
    print(f"stage: {text}", file=sys.stderr, flush=True)


# --- lowering


def lower(request: CompileRequest, found: ModelSource, target: Target) -> LoweredProgram:
    """Lowers the program that `sample()`, its prefill, or a training step runs on the devices of a target.

    Args:
        request: The program and its sizes.
        found: The model.
        target: The devices.

    Returns:
        The lowered program with the sizes that were chosen.

    Raises:
        ValueError: The mesh does not fit, or the model has no such program.
    """
    devices = list(target.describe().devices)[: target.devices]
    given = mesh_sizes(request.mesh)
    if request.what == "train":
        return _lower_train(request, found, target, devices, given)
    # By default experts, or heads, lie over the devices of a host, and hosts decode rows of their own.
    host = min(len(devices), GPUS_PER_HOST)
    spread = {"expert" if found.config.experts is not None else "tensor": host, "data": len(devices) // host}
    mesh = _mesh(given or spread, devices)
    model = abstract_params.abstract_lm(found, mesh, request.quantise)
    model = dataclasses.replace(model, model=sharding.with_device(model.model, target.device))
    context = request.context or min(CONTEXT[request.what], found.config.context)
    rows = request.batch or mesh.shape["data"]
    alone = mesh.size == mesh.shape["data"] and mesh.size > 1  # every device decodes its own rows
    session, wide = abstract.abstract_session(
        model, rows, context, mesh=mesh if alone and request.what == "sample" else None
    )
    if request.what == "sample":
        return LoweredProgram(abstract.lower_run(model, session), mesh, context, rows, "pass")
    if wide is None:
        allowed = (
            f"sample: at a context of {context} the denoising passes of {found.name} encode the prompt too"
        )
        raise refuse("--what", "prefill", allowed)
    return LoweredProgram(
        abstract.lower_prefill(model, session, wide), mesh, context, rows, f"pass of {wide} tokens"
    )


def _mesh(given: dict[str, int], devices: list[Any]) -> Mesh:
    """A mesh in which `data` takes the devices that the other axes leave, unless another axis is -1."""
    return sharding.mesh(**({"data": 1 if -1 in given.values() else -1} | given), devices=devices)


def _lower_train(
    request: CompileRequest, found: ModelSource, target: Target, devices: list[Any], given: dict[str, int]
) -> LoweredProgram:
    recipe = _recipe(request, found, len(devices), given)
    mesh = _mesh(dataclasses.asdict(recipe.mesh), devices)
    if recipe.batch // recipe.accumulate % sharding.row_shards(mesh):
        allowed = f"a multiple of {sharding.row_shards(mesh)}, the mesh's data * fsdp"
        raise refuse("batch / accumulate", recipe.batch // recipe.accumulate, allowed)
    model, c = models.build(recipe.model), recipe.model
    corruption = noise.build(recipe.noise, c.vocab, c.mask)
    model = sharding.with_training_mesh(sharding.with_device(model, target.device), mesh)
    setup = steps.TrainSetup(
        model, recipe.objective, corruption, optim.optimizer(recipe.optim, recipe.steps),
        optim.schedule(recipe.optim, recipe.steps), recipe.accumulate, recipe.ema,
    )  # fmt: skip
    state = steps.abstract_state(setup, mesh)
    rows = sharding.row_sharding(mesh)
    like: Any = lambda dtype, *more: jax.ShapeDtypeStruct(
        (recipe.batch, recipe.row, *more), dtype, sharding=rows
    )
    batch = Batch(
        tokens=like(jnp.int32), positions=like(jnp.int32), ranges=like(jnp.int32, 2, 2), editable=like(jnp.bool_),
        canvas=like(jnp.int32),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        lowered = steps.jit_update(steps.make_update(setup), state).lower(state, batch)
    return LoweredProgram(lowered, mesh, recipe.row, recipe.batch, "update")


def _recipe(request: CompileRequest, found: ModelSource, count: int, given: dict[str, int]) -> TrainConfig:
    """The recipe with the changes of the request; of a model without one, bf16 arithmetic and an AdamW step."""
    changes: dict[str, Any] = {"mesh": MeshConfig(**given)} if given else {}
    changes |= {"row": request.context} if request.context else {}
    changes |= {"batch": request.batch} if request.batch else {}
    if found.recipe is not None:
        return dataclasses.replace(found.recipe, model=found.config, **changes)
    if found.config.mask is None:
        allowed = f"sample, prefill, or a recipe: {found.name} has no mask, and no objective is known"
        raise refuse("--what", "train", allowed)
    plain: dict[str, Any] = dict(
        mesh=MeshConfig(data=-1, fsdp=min(count, GPUS_PER_HOST)),
        row=CONTEXT["train"],
        batch=ROWS * count,
        ema=0.0,
    )
    return TrainConfig(
        name="aot", model=found.config, objective=objectives.masked_elbo(), data=data.stdlib(),
        noise=found.noise or NoiseConfig(), **plain | changes,
    )  # fmt: skip


# --- compiling


def compile_program(request: CompileRequest) -> dict[str, Any]:
    """Compiles a program in this process.

    Returns:
        A record with the sizes, memory, FLOP, collectives, calls, largest arrays and the roofline, all of one device;
        of a program that a TPU's memory cannot hold, only the memory.
    """
    target = chips.target(request.target)
    stage(f"describing {request.target}")
    found = abstract_params.source(request.model, request.dtype)
    stage(f"tracing {request.what} of {found.name}")
    made = lower(request, found, target)
    record = {
        "model": found.name, "for": request.target, "what": request.what, "chip": target.chip.label,
        "devices": target.devices, "mesh": {name: size for name, size in made.mesh.shape.items() if size > 1},
        "context": made.context, "batch": made.rows, "dtype": found.config.dtype, "quantise": request.quantise,
        "per": made.per, "layers": found.config.layers, "jax": jax.__version__, "memory": int(target.chip.memory),
    }  # fmt: skip
    stage(f"compiling for {target.chip.label}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # A TPU's compiler leaves the program in the folder as text.
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = made.lowered.compile(options if target.chip.platform == "tpu" else None)
        except jax.errors.JaxRuntimeError as error:
            return record | refused_for_memory(str(error))
        record["compile_seconds"] = round(time.perf_counter() - began, 2)
        stage("reading the program")
        try:
            program = compiled.as_text()
        except (
            jax.errors.JaxRuntimeError
        ):  # a jaxlib older than libtpu may not be able to read the program back
            left = sorted(Path(folder).glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
            if not left:
                raise
            program = left[-1].read_text(encoding="utf-8")
    return record | cost(compiled, target.chip, found.config.dtype, request.what, program)


def refused_for_memory(message: str) -> dict[str, Any]:
    """The record of a program that a TPU's compiler refuses for its memory. ValueError for any other refusal.

    Raises:
        ValueError: The compiler refuses the program for another reason.
    """
    found = MEMORY.search(message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        raise ValueError(f"the compiler refuses the program: {message.splitlines()[0][:400]}")
    used, memory = (float(n) * UNIT[u] for n, u in ((found[1], found[2]), (found[3], found[4])))
    nothing = {"temp_bytes": None, "flops": None, "collectives": {}, "kernels": [], "roofline": None}
    return {"bytes_per_device": int(used), "memory": int(memory), "fits": False, **nothing}


def cost(compiled: Any, chip: Chip, dtype: str, what: str, program: str | None = None) -> dict[str, Any]:
    """What a compiled program needs on one device.

    Args:
        compiled: Of `lowered.compile()`.
        chip: The device.
        dtype: Of the products, for the roofline.
        what: One of `PROGRAMS`; an update also writes its arguments.
        program: HLO text. Default: what `compiled` prints.

    Returns:
        Bytes, FLOP, collectives, calls, largest arrays and the roofline.
    """
    module = hlo.parse(compiled.as_text() if program is None else program)
    memory = compiled.memory_analysis()
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    total = arguments + memory.temp_size_in_bytes + outputs - memory.alias_size_in_bytes
    flops = float((compiled.cost_analysis() or {}).get("flops") or hlo.products(module))
    moved = arguments + (outputs if what == "train" else 0)
    # The kernels of a GPU are in the report of ptxas, which the parent process reads.
    kernels = {"kernels": hlo.tpu_kernels(module)} if chip.platform == "tpu" else {}
    return kernels | {
        "bytes_per_device": total, "temp_bytes": memory.temp_size_in_bytes, "argument_bytes": arguments,
        "output_bytes": outputs, "aliased_bytes": memory.alias_size_in_bytes, "fits": total <= chip.memory,
        "flops": flops, "collectives": hlo.collectives(module), "calls": dict(hlo.calls(module)),
        "largest": hlo.largest(module), "roofline": datasheet_roofline(chip, dtype, flops, moved),
    }  # fmt: skip
