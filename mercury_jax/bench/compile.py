"""`mercury bench compile`: programs of sampling, prefilling and training for devices that are not here.

The parent process checks the request (`compile_for`), starts a child, `python -m mercury_jax.bench.compile WORK
ARGUMENT OUT.json`, passes on what it is doing, and reads the report of ptxas from what it prints. In the child `lower`
makes the program and `compile_program` compiles it and reads its cost; `forms` lists the forms of our Pallas kernels,
and `compile_forms` compiles each of them. There is one child for each chip: the state of one compiler misleads the next
(an H200's after a B200's accepted kernels that it should refuse).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax import models, noise, sharding
from mercury_jax.bench import abstract_params, chips, hlo, traffic
from mercury_jax.bench.abstract_params import ModelSource, abstract_session, lower_prefill, lower_run
from mercury_jax.bench.chips import GPUS_PER_HOST, Chip, Target, datasheet_roofline, mesh_sizes
from mercury_jax.bench.gpu.commands import HOPPER, label, tune_cases
from mercury_jax.bench.gpu.tune import choices, neighbours
from mercury_jax.config import Experts, NoiseConfig, RematPolicy, at_least, one_of, refuse
from mercury_jax.models.ops import OPERATIONS
from mercury_jax.ops import device as kernel_device
from mercury_jax.ops.operation import KernelCheck
from mercury_jax.training import data, lora, objectives, optim, step as steps
from mercury_jax.training.recipe import MeshConfig, TrainConfig
from mercury_jax.types import Batch, Device, Model, Params

PROGRAMS = ("sample", "train", "prefill")
CONTEXT = {"sample": 32768, "prefill": 32768, "train": 2048}  # at most, where the request does not say
ROWS = 8  # of each device, in a training step where the request names no batch

# What a program needs and what there is, in the refusals of a TPU's compiler.
MEMORY = re.compile(
    r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) \w+"
    r"|required for [\w ]+ \(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)",
    re.ASCII,
)
UNIT = {"K": 2**10, "M": 2**20, "G": 2**30}


# Environment of the child process: it looks for no accelerator and uses no cache of programs.
ENV = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the CUDA plugin would ask the driver, which is missing, for its version
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask a cloud's metadata server for its topology
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so several processes may compile at once
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **hlo.PTXAS_ENV,
}
# XLA flags of the compiler for this machine; libtpu ends the process for a flag that it does not know.
HOST_FLAGS = ("--xla_cpu", "--xla_force_host", "--xla_backend", "--xla_llvm")


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
        remat: Of a training step, what each layer keeps for its backward pass. Default: the recipe's, else "none".
        weights_first: Compile nothing where the weights alone exceed the memory of a device.
        mask: As in `mercury_jax.load`.
        ignore_config: As in `mercury_jax.load`.
    """

    model: str
    target: str
    what: str = "sample"
    context: int | None = None
    batch: int | None = None
    quantise: str | None = None
    dtype: str | None = None
    mesh: str | None = None
    remat: str | None = None
    weights_first: bool = False
    mask: int | None = None
    ignore_config: Sequence[str] = ()


# --- the parent


Stage = Callable[[str], None]  # called with what is being done


class CompilerFailed(RuntimeError):
    """The compiling process ended without a result."""

    exit_code = 1


def compile_for(
    request: CompileRequest, stage: Stage = lambda text: None, limit: float | None = None
) -> dict[str, Any]:
    """Compiles a program for a chip that is not here.

    Returns:
        The record of `compile_program`, with the registers and spills of its GPU kernels as `kernels`.
    """
    target = chips.target(request.target)
    if request.what not in PROGRAMS:
        raise refuse("--what", request.what, ", ".join(PROGRAMS))
    mesh_sizes(request.mesh)
    for name in ("context", "batch"):
        if getattr(request, name) is not None:
            at_least(1, **{f"--{name}": getattr(request, name)})
    if request.quantise is not None and request.what == "train":
        allowed = (
            "no value with --what train: parameters are trained in fp32, beside adapters see lora.quantise"
        )
        raise refuse("--quantise", request.quantise, allowed)
    if request.remat is not None:
        one_of(RematPolicy, **{"--remat": request.remat})
        if request.what != "train":
            raise refuse(
                "--remat", request.remat, "with --what train only: other programs have no backward pass"
            )
    chips.check_plugin(target.chip)
    record, printed = _child("program", json.dumps(request._asdict()), request.target, stage, limit)
    if "kernels" not in record:
        record["kernels"] = hlo.gpu_kernels(printed)
    return record


def compile_all_kernels(
    target: str, stage: Stage = lambda text: None, tuning: bool = False
) -> list[dict[str, Any]]:
    """Compiles every form of each of our Pallas kernels for a GPU.

    Returns:
        The records of `compile_forms`.
    """
    found = chips.target(target).chip
    gpus = (kernel_device.HOPPER, kernel_device.BLACKWELL)
    if found.kernels not in gpus:
        names = [one.name for one in chips.ALL.values() if one.kernels in gpus]
        raise refuse("--for", target, f"{', '.join(names)}, the GPUs for which kernels are written")
    if tuning and found.kernels != HOPPER:
        raise refuse("--for", target, "an H100 or an H200, whose kernels have settings")
    chips.check_plugin(found)
    return _child("variants" if tuning else "kernels", target, target, stage)[0]["kernels"]


def _child(
    work: str, argument: str, target: str, stage: Stage, limit: float | None = None
) -> tuple[dict[str, Any], str]:
    """Runs `main` in a process of its own: (the record it wrote, all that was printed). ValueError for what it
    refuses."""
    late = threading.Event()
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(HOST_FLAGS)]
    lines: list[str] = []  # of standard error, without the stages
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder, "out.json"), Path(folder, "printed.txt")
        with printed.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", "mercury_jax.bench.compile", work, argument, str(out)], stdout=sink,
                stderr=subprocess.PIPE, env={**os.environ, **ENV, "XLA_FLAGS": " ".join(flags)}, text=True,
                errors="replace",
            )  # fmt: skip
            timer = threading.Timer(limit or 0.0, lambda: (late.set(), child.kill()))
            try:
                if limit is not None:
                    timer.start()
                for line in child.stderr or ():
                    name, _, about = line.rstrip().partition("stage: ")
                    if about and not name:
                        stage(about)
                    else:
                        lines.append(line.rstrip())
                code = child.wait()
            finally:
                timer.cancel()
                child.kill()
                child.wait()
        record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        text = printed.read_text(encoding="utf-8", errors="replace")
    if record is None and late.is_set():
        raise CompilerFailed(f"compiling for {target} was stopped after {limit:g} s")
    if record is None:
        text = f"the process that compiles for {target} ended with code {code}"
        raise CompilerFailed("\n".join([text, *lines[-3:]]).rstrip())
    if "refused" in record:
        raise ValueError(record["refused"])
    return record, "\n".join([text, *lines])


# --- lowering, in the child


class LoweredProgram(NamedTuple):
    """A lowered program, the sizes it was made for, and what one figure is for: a pass, an update."""

    lowered: Any
    mesh: Mesh
    context: int
    rows: int
    per: str


def lower(request: CompileRequest, found: ModelSource, target: Target) -> LoweredProgram:
    """Lowers the program that `sample()`, its prefill, or a training step runs on the devices of a target."""
    devices = list(target.describe().devices)[: target.devices]
    given = mesh_sizes(request.mesh)
    if request.what == "train":
        return _lower_train(request, found, target, devices, given)
    mesh = _mesh(given or default_mesh(found, len(devices)), devices)
    model = abstract_params.abstract_lm(found, mesh, request.quantise)
    model = dataclasses.replace(model, model=sharding.with_device(model.model, target.device))
    context = request.context or min(CONTEXT[request.what], found.config.context)
    rows = request.batch or mesh.shape["data"]
    alone = mesh.size == mesh.shape["data"] and mesh.size > 1  # every device decodes its own rows
    session, wide = abstract_session(
        model, rows, context, mesh=mesh if alone and request.what == "sample" else None
    )
    if request.what == "sample":
        return LoweredProgram(lower_run(model, session), mesh, context, rows, "pass")
    if wide is None:
        allowed = (
            f"sample: at a context of {context} the denoising passes of {found.name} encode the prompt too"
        )
        raise refuse("--what", "prefill", allowed)
    return LoweredProgram(lower_prefill(model, session, wide), mesh, context, rows, f"pass of {wide} tokens")


def default_mesh(found: ModelSource, devices: int) -> dict[str, int]:
    """Spreads experts, or heads, over the devices of a host; hosts decode rows of their own."""
    host = min(devices, GPUS_PER_HOST)
    return {"expert" if found.config.experts is not None else "tensor": host, "data": devices // host}


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
    c = recipe.model_config
    model = models.build(c, recipe.remat)
    corruption = noise.build(recipe.noise, c.vocab, c.mask)
    part = lora.partition(recipe.lora, recipe.freeze, model)
    frozen = () if part is None else _abstract_frozen(recipe, part, model, mesh)
    if recipe.lora.rank:
        model = model._replace(shardings=lora.adapted_shardings(recipe.lora, recipe.freeze, model))
    model = sharding.with_training_mesh(sharding.with_device(model, target.device), mesh)
    setup = steps.TrainSetup(
        model, recipe.objective, corruption, optim.optimizer(recipe.optim, recipe.steps, c.width),
        optim.schedule(recipe.optim, recipe.steps), recipe.accumulate, recipe.ema, part,
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
        lowered = steps.jit_update(steps.make_update(setup), state).lower(state, batch, frozen)
    return LoweredProgram(lowered, mesh, recipe.row, recipe.batch, "update")


def _abstract_frozen(recipe: TrainConfig, part: lora.Partition, model: Model, mesh: Mesh) -> Params:
    """The parameters that are not trained: beside adapters in the compute dtype or quantised, else in fp32."""
    if recipe.lora.quantise:
        dtype = jnp.dtype(model.config.dtype)
        return abstract_params.abstract_params(model, mesh, dtype, recipe.lora.quantise)
    shapes = jax.eval_shape(lambda key: part.split(model.init(key))[1], jax.eval_shape(jax.random.key, 0))
    where = sharding.shardings(shapes, model.shardings, mesh)
    dtype = jnp.dtype(model.config.dtype) if recipe.lora.rank else jnp.dtype(jnp.float32)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, dtype, sharding=at), shapes, where)


def _recipe(request: CompileRequest, found: ModelSource, count: int, given: dict[str, int]) -> TrainConfig:
    """The recipe with the changes of the request; of a model without one, bf16 arithmetic and an AdamW step."""
    changes: dict[str, Any] = {"mesh": MeshConfig(**given)} if given else {}
    changes |= {"row": request.context} if request.context else {}
    changes |= {"batch": request.batch} if request.batch else {}
    changes |= {"remat": request.remat} if request.remat else {}
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


# --- compiling, in the child


def compile_program(request: CompileRequest) -> dict[str, Any]:
    """Compiles a program in this process.

    Returns:
        A record with the sizes, memory, FLOP, collectives, calls, largest arrays and the roofline, all of one device;
        of a program that a TPU's memory cannot hold, only the memory. Where `weights_first` stopped the request, the
        sizes, and the weights as `bytes_per_device` and `weight_bytes`.
    """
    target = chips.target(request.target)
    stage(f"describing {request.target}")
    found = abstract_params.source(request.model, request.dtype, request.mask, request.ignore_config)
    record = {
        "model": found.name, "for": request.target, "what": request.what, "chip": target.chip.label,
        "devices": target.devices, "dtype": found.config.dtype, "quantise": request.quantise,
        "layers": found.config.layers, "jax": jax.__version__, "memory": int(target.chip.memory),
    }  # fmt: skip
    if request.weights_first:
        sizes = mesh_sizes(request.mesh) or default_mesh(found, target.devices)
        rest = target.devices // math.prod(n for n in sizes.values() if n > 0)
        sizes = {axis: rest if n == -1 else n for axis, n in sizes.items()}
        weights = abstract_params.weight_bytes(found, sizes, request.quantise)
        record["weight_bytes"] = weights
        if weights > target.chip.memory:
            return record | {"bytes_per_device": weights, "fits": False}
    stage(f"tracing {request.what} of {found.name}")
    made = lower(request, found, target)
    mesh = {name: size for name, size in made.mesh.shape.items() if size > 1}
    record |= {"mesh": mesh, "context": made.context, "batch": made.rows, "per": made.per}
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
        except jax.errors.JaxRuntimeError:
            # A jaxlib older than libtpu may not be able to read the program back.
            left = sorted(Path(folder).glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
            if not left:
                raise
            program = left[-1].read_text(encoding="utf-8")
    record |= cost(compiled, target.chip, found.config.dtype, request.what, program)
    if request.what == "sample":
        tokens = found.config.block * made.rows // made.mesh.shape["data"]
        record |= pass_record(program, target.chip, tokens, record["roofline"], found.config.experts)
    return record


def pass_record(
    program: str, chip: Chip, tokens: int, roofline: Mapping[str, Any], experts: Experts | None = None
) -> dict[str, Any]:
    """What a pass of a compiled program moves and launches on one device, and the time that this implies.

    Returns:
        `bytes_per_pass`, `kernels_per_pass` and so on; {} if the program has no loop of passes. Of a TPU only
        `implied`, of the roofline: `traffic` does not tell arrays in VMEM, where a TPU keeps activations, from others.
    """
    compute = roofline["compute_seconds"]
    if chip.platform == "tpu":
        once = traffic.PassCost(read=roofline["bytes"])
        return {"implied": traffic.implied(once, chip.bandwidth, tokens, compute)}
    chosen = None if experts is None else traffic.chosen_experts(experts.count, experts.active, tokens)
    found = traffic.pass_cost(hlo.parse(program), chosen)
    if found is None:
        return {}
    return {
        **({} if chosen is None else {"experts_per_pass": chosen}),
        "bytes_per_pass": found.bytes, "bytes_read_per_pass": found.read, "kernels_per_pass": found.kernels,
        "small_kernels_per_pass": found.small, "open_loops_per_pass": found.open_loops,
        "implied": traffic.implied(found, chip.bandwidth, tokens, compute),
    }  # fmt: skip


def refused_for_memory(message: str) -> dict[str, Any]:
    """The record of a program that a TPU's compiler refuses for its memory. ValueError for any other refusal."""
    found = MEMORY.search(message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        raise ValueError(f"the compiler refuses the program: {message.splitlines()[0][:400]}")
    parts = [part for part in found.groups() if part is not None]
    used, memory = (float(n) * UNIT[u] for n, u in (parts[:2], parts[2:]))
    nothing = {"temp_bytes": None, "flops": None, "collectives": {}, "kernels": [], "roofline": None}
    return {"bytes_per_device": int(used), "memory": int(memory), "fits": False, **nothing}


def cost(compiled: Any, chip: Chip, dtype: str, what: str, program: str | None = None) -> dict[str, Any]:
    """What a compiled program needs on one device.

    Args:
        compiled: Of `lowered.compile()`.
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


# --- kernels, in the child


class KernelForm(NamedTuple):
    """One form of a kernel. Tracing it for a chip raises ValueError where the kernel has no such form."""

    kernel: str
    shape: str
    check: KernelCheck
    fallback: str


def forms(name: str, tuning: bool = False) -> list[KernelForm]:
    """Lists all forms for a chip, in the order of compilation."""
    device = kernel_device.target(name)
    if tuning:
        return [*tuned_forms(device)]
    return [
        KernelForm(op.name, label(shape.form, shape), shape.check(op, device), op.fallback)
        for op in OPERATIONS
        for shape in op.table().compiled
    ]


def tuned_forms(device: Device) -> Iterator[KernelForm]:
    """What `mercury bench gpu tune` times first: the heuristic's settings, and those that differ in one of them."""
    tables = {op.name: (op, op.table()) for op in OPERATIONS}
    for case in tune_cases():
        operation, fields = case.args["operation"], case.args["shape"]
        op, table = tables[operation]
        default, unfit = choices(operation, fields)
        for knobs in neighbours(default, case.args["values"], unfit):
            if unfit(knobs) is None:
                check = table.shape(**fields)._replace(knobs=knobs._asdict()).check(op, device)
                yield KernelForm("tuned", f"{case.name}: {knobs}", check, "the heuristic's settings")


def compile_forms(name: str, tuning: bool = False) -> list[dict[str, Any]]:
    """Compiles every form for a target in this process.

    Returns:
        A record for each form: {kernel, shape} with what `hlo.gpu_kernels` reads of it, or with `refused`, why there is
        no such form, and `fallback`, what runs instead.
    """
    target = chips.target(name)
    stage(f"describing {name}")
    device = NamedSharding(Mesh(np.array(target.describe().devices[:1]), ("one",)), PartitionSpec())
    records: list[dict[str, Any]] = []
    todo = forms(target.chip.kernels, tuning)
    for n, form in enumerate(todo, start=1):
        stage(f"{form.kernel} {n} of {len(todo)}: {form.shape}")
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), form.check.like
        )
        record = {"kernel": form.kernel, "shape": form.shape}
        records.append(record)
        try:
            lowered = jax.jit(form.check.kernel).lower(*args)
        except ValueError as error:
            record |= {"refused": str(error), "fallback": form.fallback}
            continue
        with hlo.captured_output() as read:
            lowered.compile()
            found = hlo.gpu_kernels(read())
        if not found:
            raise RuntimeError(f"ptxas reports nothing for {form.kernel}, {form.shape}")
        # A gradient has several kernels: the record is of the one that needs more.
        record |= max(found, key=lambda row: (row["spill_bytes"], row["registers"]))
    return records


# --- the child process


def stage(text: str) -> None:
    """Prints what is being done for the parent process, which shows it as progress."""
    print(f"stage: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Compiles in this process and writes the record; of a bad request the reason as `refused`."""
    work, argument, out = argv
    try:
        if work != "program":
            record: dict[str, Any] = {"kernels": compile_forms(argument, work == "variants")}
        else:
            record = compile_program(CompileRequest(**json.loads(argument)))
    except (ValueError, FileNotFoundError) as error:
        record = {"refused": str(error)}
    Path(out).write_text(json.dumps(record), encoding="utf-8")
    return 2 if "refused" in record else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
