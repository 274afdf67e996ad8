"""The commands `check`, `speed`, `model` and `profile`: the cases that each runs, and its rows as they are measured.

Each row names its command, case, device, versions and date. `check` stores which forms passed where `attend` and the
grouped product look for it (`kernels.device`). A case is data: the child process finds the work by its name
(`runner.WORK`). With `small` the same code runs with small shapes on any machine. Imports no JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from mercury_jax.bench.gpu.runner import GpuCase, Row, Runner
from mercury_jax.config import refuse

ABOUT = ("hardware", "platform", "devices", "jax", "python", "driver")
BF16, FP16, INT8, FP8 = "bfloat16", "float16", "int8", "float8_e4m3fn"
HOPPER, BLACKWELL, TPU = "sm_90a", "sm_100a", "tpu"  # as in `kernels.device`, which would import JAX
KERNELS = (("MERCURY_KERNELS", "1"),)  # a check runs every form, whatever an earlier check found
# XLA would time candidates for the products of each reference, most of the time of a check; a kernel has no candidates.
UNTUNED = (("XLA_FLAGS", "--xla_gpu_autotune_level=0"),)
WIDTHS = (64, 128, 256, 512)  # head sizes
NORMS = ((3, 256), (256, 2816), (1024, 4096))  # rows and widths of hidden states
# Head size, tokens, query heads, key heads, slots: layers of DiffusionGemma, and tokens that are no whole tile.
HEADS = ((256, 256, 16, 8, 2048), (512, 256, 16, 2, 512), (256, 37, 12, 4, 64))
EXPERTS = {"up": (2816, 1408), "down": (704, 2816)}  # of DiffusionGemma: [inputs, outputs] of a matrix
GEMMA, MODEL_100M = "diffusiongemma-26b-a4b", "mercury-100m"
# By default XLA's command buffers leave loops out; with these flags the bodies of loops become CUDA graphs too.
GRAPHS = (
    "XLA_FLAGS",
    "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
)
OFF = ("MERCURY_KERNELS", "0")
PLAIN = "kernels off"  # in the name of a case with OFF

# Calls of attention that `speed` times: heads of DiffusionGemma's local and global layers, and of LLaDA.
_LOCAL, _GLOBAL, _LLADA = dict(h=16, g=8, width=256), dict(h=16, g=2, width=512), dict(h=32, g=8, width=128)
SHAPES = [
    dict(b=1, t=256, s=1024) | _LOCAL, dict(b=1, t=256, s=8192) | _LOCAL,
    dict(b=1, t=256, s=8192) | _LOCAL | {"int8": True}, dict(b=1, t=256, s=8192) | _GLOBAL,
    dict(b=1, t=32, s=1024) | _LLADA, dict(b=1, t=32, s=8192) | _LLADA,
    dict(b=8, t=256, s=1024) | _LOCAL, dict(b=8, t=32, s=1024) | _LLADA,
    dict(b=1, t=256, s=1024, h=12, g=4, width=64), dict(b=1, t=4096, s=4096) | _LLADA | {"causal": True},
    dict(b=8, t=2048, s=2048, h=12, g=4, width=64, causal=True, gradient=True),
    dict(b=2, t=4096, s=4096) | _LLADA | {"causal": True, "gradient": True},
]  # fmt: skip
SMALL_SHAPES = [
    dict(b=1, t=32, s=320, h=4, g=2, width=64),
    dict(b=1, t=256, s=256, h=4, g=2, width=64, causal=True),
    dict(b=1, t=256, s=256, h=4, g=2, width=64, causal=True, gradient=True),
]


class Unmeasured(RuntimeError):
    """The device failed before its roofline was measured."""

    exit_code = 1


# --- commands


def check(runner: Runner, *, small: bool = False, only: Sequence[str] = (), seed: int = 0) -> Iterator[Row]:
    """Checks every kernel form of this device. A form passes when all of its cases do, and is then used by default.

    Args:
        runner: Runs the cases within its budget.
        small: Few small shapes, interpreted where there is no GPU.
        only: Parts of names of cases; their forms are checked, and other forms keep the result of an earlier check.
        seed: Draws the inputs.

    Yields:
        A row for each case, and one for each form once it is decided.

    Raises:
        ValueError: No case has such a name.
        Unmeasured: The device failed before its roofline was measured.
    """
    rows, first = _measure_device(runner, "check", small, KERNELS)
    yield from rows
    same = first["same"]
    every = check_cases(first["chip"], seed, small) if first["chip"] or small else []
    chosen = _matching(every, only)
    names = {case.form for case in chosen if case.form}  # a form is decided by all of its cases
    todo = [case for case in every if case in chosen or case.form in names]
    if not todo:
        yield same | {"case": "kernels", "left_out": f"no kernel is written for {first['hardware']}"}
        return
    from mercury_jax.kernels import device as kernel_device  # imports JAX, and starts it on no device

    entry = kernel_device.entry_key(first["hardware"], first["jax"])
    forms: dict[str, Any] = dict(kernel_device.read_checks(entry) or {}) if only else {}
    # Until its check passes a form is not used. Each decision is stored at once, in case the command is interrupted.
    forms |= {
        case.form: {"passed": False, "why": "its check was not completed"} for case in todo if case.form
    }
    kernel_device.write_checks(entry, forms, same["date"])
    for form, cases in itertools.groupby(todo, key=lambda case: case.form):
        errors, why = [], ""
        for case in cases:
            rows = [{"not_run": f"an earlier case of {form} failed"}] if why else runner.run(case)
            for row in rows:
                yield same | {"case": case.name, "form": form or None} | row
            last = rows[-1] if rows else {}
            if last.get("passed") is True and not why:
                errors.append(last.get("relative_error", 0.0))
            elif not why:
                reasons = (last.get(name) for name in ("why", "failed", "refused", "not_run"))
                why = f"{case.name}: {next((r for r in reasons if r), 'it gave no result')}"[:300]
        if form:
            forms[form] = (
                {"passed": False, "why": why} if why else {"passed": True, "relative_error": max(errors)}
            )
            kernel_device.write_checks(entry, forms, same["date"])
            yield same | {"form": form, "verdict": "off" if why else "on"} | forms[form]


def measure(runner: Runner, command: str, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Times kernels (`speed`), whole models (`model`), or the operations of a forward pass (`profile`).

    Args:
        runner: Runs the cases within its budget.
        command: "speed": what passed `check` beside cuDNN and XLA as shares of the roofline, then a model with kernels
            and graphs on and off. "model": a slice of the 26B model with kernels and without, the whole model,
            transformers, and training. "profile": the operations of a pass of the 26B model, in int8 and in bf16.
        small: Small shapes and models, for a machine without a GPU.
        only: Parts of names of cases.

    Yields:
        A row for each case. `times_as_fast` compares with the fastest other implementation of the same shape, or with
        transformers.

    Raises:
        ValueError: No case has such a name.
        Unmeasured: The device failed before its roofline was measured.
    """
    rows, first = _measure_device(runner, command, small)
    yield from rows
    best: dict[str, float] = {}  # shape -> seconds of the fastest other implementation
    ours = None  # seconds of a pass of the model without quantisation
    cases = {"speed": speed_cases, "model": model_cases, "profile": profile_cases}[command]
    for case in _matching(cases(small), only):
        for row in runner.run(case):
            row = _with_shares(row, first)
            if "seconds" in row and "way" in row:
                shape = repr(row["shape"])
                if row["way"] != "ours":
                    best[shape] = min(best.get(shape, row["seconds"]), row["seconds"])
                elif shape in best:
                    row["times_as_fast"] = best[shape] / row["seconds"]
            if case.work == "decoding" and row.get("quantise") is None:
                ours = row.get("seconds_per_forward", ours)
            if case.work == "transformers" and ours and "seconds_per_forward" in row:
                row["times_as_fast"] = row["seconds_per_forward"] / ours
            yield first["same"] | {"case": case.name} | row


def _measure_device(
    runner: Runner, command: str, small: bool, env: tuple[tuple[str, str], ...] = ()
) -> tuple[list[Row], Row]:
    """Versions and the device, then its roofline: (their rows, what later rows need of these)."""
    same: Row = {"command": command, "small": small, "date": str(date.today())}
    size = {"megabytes": 64, "width": 512} if small else {"megabytes": 2048, "width": 8192}
    rows, found = [], {}
    todo = [GpuCase("about", "about", {}, limit=90.0, env=env)]
    if command != "profile":
        todo.append(GpuCase("roofline", "roofline", size, limit=60.0, env=env))
    for case in todo:
        row = runner.run(case)[-1]
        if "failed" in row or "not_run" in row:
            raise Unmeasured(f"the device could not be measured: {row.get('failed', 'no time')}")
        found |= row
        if case.work == "about":
            same |= {name: row[name] for name in ABOUT}
        rows.append(same | {"case": case.name} | row)
    return rows, found | {"same": same}


def _with_shares(row: Row, first: Row) -> Row:
    """The row with its seconds as a share of what the measured roofline allows."""
    seconds = row.get("seconds_per_forward", row.get("seconds"))
    if seconds is None or "flops" not in row:
        return row
    arithmetic = row["flops"] / first["flops_per_second"]
    if "bytes" not in row:
        return row | {"mfu": arithmetic / seconds}
    least = max(arithmetic, row["bytes"] / first["bytes_per_second"])
    return row | {"least_seconds": least, "share_of_bound": least / seconds}


def _matching(found: list[GpuCase], only: Sequence[str]) -> list[GpuCase]:
    chosen = [case for case in found if not only or any(part in case.name for part in only)]
    if not chosen and found:
        raise refuse("--only", list(only), f"parts of names: {'; '.join(case.name for case in found)}")
    return chosen


# --- cases


def check_cases(chip: str | None, seed: int, small: bool = False) -> list[GpuCase]:
    """The cases of every kernel form, those that models need first, each from its smallest shape up.

    Args:
        chip: The device as in `kernels.device`, such as "sm_90a"; None where no kernel is for it.
        seed: Draws the inputs.
        small: Few small shapes, which the interpreter runs in some seconds each.

    Returns:
        The cases in the order in which they run, those of a form together, NVIDIA's memory checker at the end.
    """
    if small:
        tiny = dict(b=1, t=3, h=2, g=1, s=128, r=2)
        kinds = ({"width": 64}, {"width": 64, "int8": True, "page": 128}, {"width": 512})
        found = [_check_case("attention", {"dtype": BF16} | kind | tiny, 60.0) for kind in kinds]
        short = {"gradient": True} | tiny | {"s": 70}  # a length that is no multiple of a tile
        found.append(_check_case("attention", {"width": 64, "dtype": BF16} | short, 120.0))
        product = dict(dtype=BF16, rows=90, experts=10, inputs=64, outputs=64)
        kinds = ({}, {"gradient": True}, {"dtype": INT8, "outputs": 128, "gated": True})
        found += [_check_case("grouped", product | kind, 60.0) for kind in kinds]
        found.append(_check_case("norm", {"rows": 5, "width": 256}, 60.0))
        found.append(_check_case("norm", {"rows": 5, "width": 256, "active": 3}, 60.0))
        found.append(_check_case("routing", {"rows": 5, "experts": 128, "active": 3}, 60.0))
        sizes = {"rows": 16, "width": 256, "experts": 24, "active": 8}
        found.append(_check_case("dispatch", sizes, 60.0))
        found.append(_check_case("heads", dict(width=256, t=5, h=2, g=1, s=9), 60.0))
    elif chip is None:
        return []
    else:
        later = (
            {"int8": True},
            {"page": 128},
            {"int8": True, "page": 128},
            {"softcap": 30.0},
            {"dtype": FP16},
        )
        found = [*_attention_cases({}), *_grouped_cases({}), *_grouped_cases({"gated": True})]
        found += [_check_case("norm", {"rows": rows, "width": width}, 25.0) for rows, width in NORMS]
        found.append(_check_case("norm", {"rows": 256, "width": 2816, "active": 8}, 25.0))
        experts = [{"rows": 256, "experts": n, "active": 8} for n in (128, 512)]
        found += [_check_case("routing", sizes, 25.0) for sizes in experts]
        experts.append({"rows": 32, "experts": 128, "active": 8})  # fewer tokens than experts
        found += [_check_case("dispatch", sizes | {"width": 2816}, 25.0) for sizes in experts]
        found += [
            _check_case("heads", dict(zip(("width", "t", "h", "g", "s"), sizes)), 25.0) for sizes in HEADS
        ]
        found += [*itertools.chain.from_iterable(map(_attention_cases, later))]
        found += _grouped_cases({"gradient": True})
        if chip == HOPPER:
            found += _training_cases()
        else:  # the others have attention without pages, the grouped product in Triton, or both
            attention, grouped = chip in (BLACKWELL, TPU), chip != TPU
            plain = lambda c: attention and c.work == "attention" and not c.args["shape"].get("page")
            found = [c for c in found if plain(c) or (grouped and c.work == "grouped")]
    draws = 1 if small else 2
    env = KERNELS if small else KERNELS + UNTUNED
    found = [c._replace(args=c.args | {"seed": seed, "draws": draws}, env=env) for c in found]
    first = {c.work: c for c in reversed(found)}  # the first case of attention, and of the grouped product
    args = {"cases": [{"work": c.work, "args": c.args} for c in sorted(first.values(), key=found.index)]}
    sanitizer = GpuCase("compute-sanitizer", "sanitizer", args, limit=120.0, least=30.0, env=env, alone=True)
    return [*found, sanitizer]


def _check_case(work: str, shape: dict[str, Any], limit: float) -> GpuCase:
    """A case whose form has the name that `kernels.device` gives to its shape."""
    if work == "attention":
        kinds = {"int8": "int8", "page": "paged", "softcap": "softcap", "gradient": "gradient"}
        parts = ["attention", str(shape["width"]), shape["dtype"]]
    elif work in ("norm", "routing", "dispatch", "heads"):
        kinds, parts = {}, [work]
    else:
        kinds, parts = {"gated": "gated", "gradient": "gradient"}, ["grouped", shape["dtype"]]
    form = "-".join([*parts, *(name for key, name in kinds.items() if shape.get(key))])
    name = " ".join([form, *(f"{k}={v}" for k, v in shape.items() if k not in ("width", "dtype"))])
    return GpuCase(name, work, {"shape": shape}, limit=limit, form=form)


def _attention_cases(kind: dict[str, Any]) -> Iterator[GpuCase]:
    """The cases of one kind of form (int8 keys, paged keys, soft-cap, fp16; {} for plain bf16) for each head size."""
    for width in WIDTHS:
        if width == 512 and "int8" in kind:
            continue  # the kernel's shared memory has no room to convert them
        shape = {"width": width, "dtype": BF16} | kind
        if "page" in kind and width == 256:
            shape["page"] = 64
        groups = {256: 8, 512: 2}.get(width, 4)
        sizes = [
            dict(b=1, t=8, h=4, g=2, s=256, r=1),  # few rows, so that the keys are split
            # Gaps, three ranges, and a last tile of rows that is not full.
            dict(b=2, t=40, h=16, g=groups, s=1152, r=3),
        ]
        if not kind:  # a batch of canvases, where nothing is split
            sizes.append(dict(b=8, t=256, h=16, g=groups, s=2048, r=2))
        limit = 45.0 if width == 512 else 25.0  # the widest takes several times as long to compile
        yield from (_check_case("attention", shape | size, limit) for size in sizes)


def _training_cases() -> Iterator[GpuCase]:
    """The cases of attention with its gradient, for each head size that has one."""
    for width, softcap in ((64, None), (128, None), (256, None), (64, 30.0), (256, 30.0)):
        shape = {"width": width, "dtype": BF16, "gradient": True} | ({"softcap": softcap} if softcap else {})
        sizes = (
            dict(b=1, t=200, h=4, g=2, s=210, r=1),  # lengths that are no multiple of a tile
            dict(b=2, t=1000, h=12, g=4, s=1152, r=3),  # gaps, and more tiles than in flight
        )
        yield from (_check_case("attention", shape | size, 40.0) for size in sizes)


def _grouped_cases(kind: dict[str, Any]) -> Iterator[GpuCase]:
    """The cases of the grouped product, of its gated form, or of the gradient of its rows (in bf16), for each dtype."""
    # The last has one matrix and the rows of one canvas, the dense products of a quantised model.
    sizes = (
        (200, 10, (128, 128)), (2048, 128, EXPERTS["down"]), (2048, 128, EXPERTS["up"]), (256, 1, (2816, 4224))
    )  # fmt: skip
    kinds = (BF16,) if kind.get("gradient") else (BF16, INT8, FP8)
    for dtype, (rows, experts, (inputs, outputs)) in itertools.product(kinds, sizes):
        shape = dict(dtype=dtype, rows=rows, experts=experts, inputs=inputs, outputs=outputs)
        yield _check_case("grouped", shape | kind, limit=30.0)


def speed_cases(small: bool = False) -> list[GpuCase]:
    """Attention and grouped products beside cuDNN and XLA; a model with kernels and CUDA graphs on and off."""
    todo: list[tuple[str, dict[str, Any], str]] = []
    for shape in SMALL_SHAPES if small else SHAPES:
        # cuDNN and XLA read no int8 keys; blockwise attention is what training falls back to.
        others = ("blockwise",) * shape.get("gradient", False) + ("cudnn", "xla") * (not shape.get("int8"))
        todo += [("attention", shape, way) for way in (*others, "ours")]
    product = (
        dict(rows=90, experts=10, width=64, inner=64)
        if small
        else dict(rows=2048, experts=128, width=2816, inner=704)
    )
    kinds = {BF16: ("ragged_dot", "tiles", "ours"), INT8: ("tiles", "ours")}
    routings = ("skewed",) if small else ("even", "random", "skewed")
    for (dtype, ways), routing in itertools.product(kinds.items(), routings):
        # XLA's ragged_dot multiplies every row by every expert: its time does not depend on the routing.
        some = [way for way in ways if way != "ragged_dot" or routing == routings[-1]]
        todo += [("grouped", product | {"dtype": dtype, "routing": routing}, way) for way in some]
    found = []
    for work, shape, way in todo:
        name = " ".join([work, *(f"{k}={v}" for k, v in shape.items())]) + f", {way}"
        found.append(GpuCase(name, f"time_{work}", {"shape": shape, "way": way}, limit=60.0))
    model = "tiny" if small else MODEL_100M
    args = {"model": model, "batch": 1, "prefix": 64 if small else 1024, "turns": 3 if small else 5}
    # On a CPU there are no graphs, and its XLA does not know the flag.
    for kernels, graphs in itertools.product((True, False), (False,) if small else (False, True)):
        name = f"decoding {model}, kernels {'on' if kernels else 'off'}, loops as "
        name += "graphs" if graphs else "XLA chooses"
        env = (() if kernels else (OFF,)) + ((GRAPHS,) if graphs else ())
        found.append(GpuCase(name, "decoding", args, limit=100.0, least=20.0, env=env, alone=not small))
    return found


def model_cases(small: bool = False) -> list[GpuCase]:
    """A slice of the 26B model with kernels and without, the whole model, transformers beside it, then training."""
    name, prefix = ("tiny", 64) if small else (GEMMA, 1024)
    kinds = (INT8,) if small else (INT8, None)
    todo: list[tuple[str, str, dict[str, Any], float]] = []
    slices = [
        (
            f"logits of a slice of {name}, {kind or BF16}", "slice_logits",
            {"model": name, "quantise": kind, "layers": 2 if small else 4}, 150.0,
        )
        for kind in kinds
    ]  # fmt: skip
    todo.append(slices[0])
    for kind in kinds:
        args = {"model": name, "quantise": kind, "batch": 1, "prefix": prefix, "turns": 3}
        todo.append((f"decoding {name}, {kind or BF16}", "decoding", args, 240.0))
    args = {"model": name, "prefix": prefix, "device": "cpu" if small else "cuda"}
    todo.append((f"transformers, {name}", "transformers", args, 150.0))
    trained = ((MODEL_100M, 32, 2048), ("mercury-350m", 16, 2048), ("mercury-1b", 8, 2048))
    for model, rows, row in (("tiny-causal", 2, 128),) if small else trained:
        args = {"model": model, "rows": rows, "row": row, "turns": 1 if small else 5}
        todo.append((f"training {model}, {rows} x {row}", "training", args, 120.0))
        if model == MODEL_100M:
            todo.append((f"training {model}, {rows} x {row}, {PLAIN}", "training", args, 120.0))
    least = 10.0 if small else 30.0
    return [
        GpuCase(
            case, work, args, limit=limit, least=least, alone=not small, env=(OFF,) if PLAIN in case else ()
        )
        for case, work, args, limit in [*todo, *slices[1:]]
    ]


def profile_cases(small: bool = False) -> list[GpuCase]:
    """The operations of a pass of the 26B model, in int8 and in bf16."""
    name, prefix = ("tiny", 64) if small else (GEMMA, 1024)
    return [
        GpuCase(
            f"profile of {name}, {kind or BF16}", "profile",
            {"model": name, "quantise": kind, "batch": 1, "prefix": prefix},
            limit=150.0, least=10.0 if small else 40.0, alone=not small,
        )
        for kind in ((INT8,) if small else (INT8, None))
    ]  # fmt: skip
