"""The time of a forward pass by operation: times from JAX's profiler, names and bytes from the compiled program.

`profile` runs in a child process of `mercury bench gpu profile`; `operations` is its analysis, and needs no device.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

import mercury_jax as mj
from mercury_jax.bench import abstract_params as ap, hlo, traffic
from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import endless, timed
from mercury_jax.config import Experts, ModelConfig, Plan
from mercury_jax.decode import rules
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import LM

UNKNOWN = "not in the program's text"  # the part of a kernel whose instruction was not found
FEW, MANY = 4, 20  # denoising steps of the two calls whose difference is timed
# Parts of a JAX operation's name that say how it was traced, not what it belongs to.
TRACED = re.compile(
    r"(jit|vmap|pjit|transpose|jvp|shard_map|checkpoint)(\(|$)|while$|body$|cond$|branch_|closed_call$|$"
)


def find(name: str) -> ap.ModelSource:
    """A model by name: as `abstract_params.source`, or "tiny" (a DiffusionGemma), "tiny-causal" (a causal encoder)."""
    if name == "tiny":
        config: ModelConfig = GemmaConfig(
            vocab=512, width=64, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=128, block=32, context=512,
            experts=Experts(count=8, active=2, width=32), global_layers=(3,), window=64, global_head_dim=64,
            global_kv_heads=1, keys_as_values=True, self_conditioning=True, encoder_scalars=True, pad=0, eos=1,
        )  # fmt: skip
        return ap.ModelSource(name, config, ap.UNIFORM, jnp.dtype("float32"), ap.GEMMA_DECODING)
    if name == "tiny-causal":
        config = dataclasses.replace(
            ap.causal_encoder(64, 2, 4, 2, 16, 128), vocab=512, block=32, context=512, dtype="float32"
        )
        return ap.ModelSource(name, config, ap.MASKED, jnp.dtype("float32"))
    return ap.source(name)


def decoding_call(args: Row, stage: Stage) -> tuple[LM, Callable[..., tuple[float, int]]]:
    """A model with random weights, and a call of `mj.sample` that decodes with it.

    Args:
        args: `model`, `quantise`, `batch`, `prefix` tokens of the prompts, `tokens` of an answer (default: one canvas).
    """
    found, batch, prefix = find(args["model"]), args["batch"], args["prefix"]
    stage(f"filling the weights of {found.name}")
    lm = endless(ap.random_lm(found, args.get("quantise")))
    c = lm.model.config
    prompts = np.random.default_rng(0).integers(c.vocab // 4, c.vocab // 2, (batch, prefix)).tolist()
    rule = rules.confidence() if lm.corruption.mask is not None else None  # None: the model's own

    def call(steps: int, seed: int = 0) -> tuple[float, int]:
        out, seconds = timed(lambda: mj.sample(
            lm, prompts, max_tokens=args.get("tokens", c.block), sampler=rule, seed=seed,
            plan=Plan(block=c.block, steps=steps),
        ))  # fmt: skip
        return seconds, out.passes

    return lm, call


class Event(NamedTuple):
    """An execution of an instruction of a compiled program, in nanoseconds."""

    op: str
    start: float
    end: float
    kernel: str = ""  # the name that the device gives it; on a CPU that of the instruction


def profile(args: Row, stage: Stage) -> Iterator[Row]:
    """Traces one call of `mj.sample`, and sums its time by operation.

    XLA launches each kernel by itself while it is traced, without command buffers. So the gaps are those of plain
    launches; `seconds_per_forward` is of the same call without the profiler.

    Args:
        args: `model`, `quantise`, `batch` and `prefix` tokens of the prompts.
    """
    lm, call = decoding_call(args, stage)
    stage("compiling, and the first call")
    call(MANY)
    seconds, passes = call(MANY)
    stage("tracing")
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        # The host's own events tell nothing about a GPU, but they are all that there is on a CPU.
        options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 0
        with jax.profiler.trace(folder, profiler_options=options):
            call(MANY)
        stage("reading the trace")
        [file] = Path(folder).glob("**/*.xplane.pb")
        name, events = longest(file)
    program = compiled(name, events)
    rows = operations(program, events, passes)
    busy, span = busy_and_span(events)
    yield {
        "model": args["model"], "quantise": args.get("quantise"), "dtype": lm.model.config.dtype,
        "batch": args["batch"], "prefix": args["prefix"], "passes": passes, "program": name,
        "seconds_per_forward": seconds / passes, "traced_seconds": span / passes, "busy_seconds": busy / passes,
        "gap_seconds": (span - busy) / passes, "kernels": sum(row["calls"] for row in rows), "operations": rows,
    }  # fmt: skip


def longest(file: Path) -> tuple[str, list[Event]]:
    """Reads the program of a trace that took most time."""
    planes = list(ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    found: dict[str, list[Event]] = defaultdict(list)
    for plane in devices or planes:
        for line in plane.lines:
            # Lines of a device that are no streams repeat the events of its streams.
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if op := stats.get("hlo_op"):
                    module = str(stats.get("hlo_module", ""))
                    found[module].append(Event(str(op), event.start_ns, event.end_ns, event.name))
    if not found:
        raise RuntimeError(f"the trace has no instructions; its planes: {[plane.name for plane in planes]}")
    return max(found.items(), key=lambda item: sum(e.end - e.start for e in item[1]))


def compiled(name: str, events: Iterable[Event]) -> hlo.HloModule:
    """Finds the compiled program of this process whose instructions were traced."""
    ops = {plain(event.op) for event in events}
    texts = [
        module.to_string()
        for executable in jax.devices()[0].client.live_executables()
        for module in executable.hlo_modules()
        if module.name == name
    ]
    # Programs of several sizes have the same name.
    return max(
        map(hlo.parse, texts),
        key=lambda m: len(ops & {plain(op) for c in m.computations.values() for op in c}),
    )


def operations(program: hlo.HloModule, events: Iterable[Event], passes: int) -> list[Row]:
    """Sums the time of a program's instructions by the part of the model and the operation.

    Args:
        events: Executions of its instructions. Loops, branches and calls are left out: their instructions are traced.
            What the program's text does not name is listed by the name of its kernel, without bytes.

    Returns:
        A row for each part and operation, the longest first: `calls`, `seconds` and `bytes` of a pass, and the share
        of the time of all.
    """
    found = {
        plain(one.name): (among, one) for among in program.computations.values() for one in among.values()
    }
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for event in events:
        among, one = found.get(plain(event.op), ({}, None))
        if one is not None and one.op in hlo.VIEWS and event.kernel in ("", event.op):
            continue
        known = None if one is None or one.op in hlo.VIEWS else one
        part, name = (
            (part_of(known.text("op_name")), known.name) if known else (UNKNOWN, event.kernel or event.op)
        )
        row = sums[part, re.sub(r"[._\d]+$", "", name)]
        row[0] += 1
        row[1] += event.end - event.start
        row[2] += traffic.instruction_cost(program, among, known).bytes if known else 0
    every = sum(ns for _, ns, _ in sums.values())
    return [
        {
            "part": part, "operation": operation, "calls": calls / passes, "seconds": 1e-9 * ns / passes,
            "bytes": bytes / passes, "share": ns / every,
        }
        for (part, operation), (calls, ns, bytes) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]  # fmt: skip


def plain(name: str) -> str:
    """An instruction's name as traces have it: those of GPUs write "loop_add_fusion_6" for loop_add_fusion.6."""
    return re.sub(r"\W", "_", name)


def part_of(op_name: str) -> str:
    """The modules that a JAX operation belongs to, all layers as one: "Transformer/block/attention"."""
    modules = [re.sub(r"_\d+$", "", part) for part in op_name.split("/")[:-1] if not TRACED.match(part)]
    return "/".join(modules[:3]) or "decoder"


def busy_and_span(events: Iterable[Event]) -> tuple[float, float]:
    """Seconds in which at least one instruction ran, and seconds from the first to the last.

    Returns:
        (busy, span).
    """
    ordered = sorted((event.start, event.end) for event in events)
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1e-9 * busy, 1e-9 * (reached - ordered[0][0])
