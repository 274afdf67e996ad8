"""The commands `check`, `profile` and `tune`: the cases that each runs, and its rows as they are measured.

Each row names its command, case, device, versions and date. `check` stores which forms passed where `attend` and the
grouped product look for it (`kernels.device`). A case is data: the child process finds the work by its name.
With `small` the same code runs with small shapes on any machine. Imports no JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from mercury_jax.bench.gpu.runner import GpuCase, Row, Runner
from mercury_jax.compilation import GRAPH_FLAGS, GRAPHS_FORM
from mercury_jax.config import refuse

ABOUT = ("hardware", "platform", "devices", "jax", "python", "driver")
BF16, FP16, INT8, FP8 = "bfloat16", "float16", "int8", "float8_e4m3fn"
HOPPER, TPU = "sm_90a", "tpu"  # as in `kernels.device`, which would import JAX
KERNELS = (("MERCURY_KERNELS", "1"),)  # a check runs every form, whatever an earlier check found
# XLA would time candidates for the products of each reference, most of the time of a check; a kernel has no candidates.
UNTUNED = (("XLA_FLAGS", "--xla_gpu_autotune_level=0"),)
# ptxas reports which variants spill; it is silent about programs of a cache.
TUNING = (*KERNELS, ("MOSAIC_GPU_DUMP_PTXAS", "1"), ("JAX_ENABLE_COMPILATION_CACHE", "false"))
WIDTHS = (64, 128, 256, 512)  # head sizes
NORMS = ((3, 256), (256, 2816), (1024, 4096))  # rows and widths of hidden states
# Head size, tokens, query heads, key heads, slots: layers of DiffusionGemma, and tokens that are no whole tile.
HEADS = ((256, 256, 16, 8, 2048), (512, 256, 16, 2, 512), (256, 37, 12, 4, 64))
EXPERTS = {"up": (2816, 1408), "down": (704, 2816)}  # of DiffusionGemma: [inputs, outputs] of a matrix
# [inputs, outputs] of the products of a canvas: attention's output in local and global layers, gate and up, down.
DENSE = ((4096, 2816), (8192, 2816), (2816, 4224), (2112, 2816))
# Dtypes of tuned matrices, and whether the rows have 8 bits too.
TUNED = ((FP8, True), (INT8, False), (BF16, False), (INT8, True), (FP8, False))
GEMMA, MODEL_100M = "diffusiongemma-26b-a4b", "mercury-100m"
GRAPHS = ("XLA_FLAGS", GRAPH_FLAGS)


class Unmeasured(RuntimeError):
    """The device failed before any case ran."""

    exit_code = 1


# --- commands


def check(runner: Runner, *, small: bool = False, only: Sequence[str] = (), seed: int = 0) -> Iterator[Row]:
    """Checks every kernel form of this device. A form passes when all of its cases do, and is then used by default."""
    rows, first = measure_device(runner, "check", small, KERNELS)
    yield from rows
    same = first["same"]
    every = check_cases(first["chip"], seed, small) if first["chip"] or small else []
    every = _with_tuned(every, first["hardware"])
    chosen = matching(every, only)
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


def profile(runner: Runner, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Sums the time of a forward pass of the 26B model by operation, in int8, bf16 and with 8-bit rows."""
    rows, first = measure_device(runner, "profile", small)
    yield from rows
    for case in matching(profile_cases(small), only):
        for row in runner.run(case):
            yield first["same"] | {"case": case.name} | row


def tune(runner: Runner, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Searches the settings of kernels at the shapes of the 26B model, and stores the fastest of each at once."""
    rows, first = measure_device(runner, "tune", small, TUNING)
    yield from rows
    cases, same = matching(tune_cases(small), only), first["same"]
    if first["chip"] != HOPPER and not small:
        yield same | {"case": "kernels", "left_out": f"no kernel has settings for {first['hardware']}"}
        return
    from mercury_jax.kernels import tuned  # imports JAX, and starts it on no device

    kinds = {"grouped": tuned.GroupedKnobs, "attention": tuned.AttentionKnobs}
    for case in cases:
        for row in runner.stream(case):
            if row.get("best"):
                kept = ("form", "shapes", "settings", "relative_error")
                entry = {key: row[key] for key in kept} | {
                    "microseconds": 1e6 * row["seconds"],
                    "terabytes_per_second": 1e-3 * row["gigabytes_per_second"],
                    "jax": first["jax"], "date": same["date"],
                    "operation": case.args["operation"], "shape": case.args["shape"],
                }  # fmt: skip
                tuned.write(kinds[case.args["operation"]], first["hardware"], entry)
            yield same | {"case": case.name} | row


def measure_device(
    runner: Runner, command: str, small: bool, env: tuple[tuple[str, str], ...] = ()
) -> tuple[list[Row], Row]:
    """Finds the versions and the device; for `speed` and `model` also measures its roofline.

    Returns:
        The rows, and everything that is in them; `same` is what each later row repeats.
    """
    same: Row = {"command": command, "small": small, "date": str(date.today())}
    size = {"megabytes": 64, "width": 512} if small else {"megabytes": 2048, "width": 8192}
    rows, found = [], {}
    todo = [GpuCase("about", "about", {}, limit=90.0, env=env)]
    if command in ("speed", "model"):
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


def matching(found: list[GpuCase], only: Sequence[str]) -> list[GpuCase]:
    """Chooses cases by parts of their names."""
    chosen = [case for case in found if not only or any(part in case.name for part in only)]
    if not chosen and found:
        raise refuse("--only", list(only), f"parts of names: {'; '.join(case.name for case in found)}")
    return chosen


# --- cases


def check_cases(chip: str | None, seed: int, small: bool = False) -> list[GpuCase]:
    """The cases of every kernel form, those that models need first, each from its smallest shape up."""
    if small:
        tiny = dict(b=1, t=3, h=2, g=1, s=128, r=2)
        kinds = ({"width": 64}, {"width": 64, "int8": True}, {"width": 512})
        found = [_check_case("attention", {"dtype": BF16} | kind | tiny, 60.0) for kind in kinds]
        short = {"gradient": True} | tiny | {"s": 70}  # a length that is no multiple of a tile
        found.append(_check_case("attention", {"width": 64, "dtype": BF16} | short, 120.0))
        product = dict(dtype=BF16, rows=34, experts=4, inputs=64, outputs=64)
        kinds = ({}, {"gradient": True}, {"dtype": INT8, "outputs": 128, "gated": True})
        found += [_check_case("grouped", product | kind, 120.0) for kind in kinds]
        found.append(_check_case("norm", {"rows": 5, "width": 256}, 60.0))
        found.append(_check_case("norm", {"rows": 5, "width": 256, "active": 3}, 60.0))
        found.append(_check_case("routing", {"rows": 5, "experts": 128, "active": 3}, 60.0))
        sizes = {"rows": 16, "width": 256, "experts": 24, "active": 8}
        found.append(_check_case("dispatch", sizes, 60.0))
        found.append(_check_case("heads", dict(width=256, t=5, h=2, g=1, s=9), 60.0))
    elif chip is None:
        return []
    else:
        later = ({"int8": True}, {"softcap": 30.0}, {"dtype": FP16})
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
        else:  # the others have attention only
            found = [c for c in found if c.args["operation"] == "attention"]
    draws = 1 if small else 2
    env = KERNELS if small else KERNELS + UNTUNED
    found = [c._replace(args=c.args | {"seed": seed, "draws": draws}, env=env) for c in found]
    first = {
        c.args["operation"]: c for c in reversed(found)
    }  # the first case of attention, and of the grouped product
    some = sorted(first.values(), key=found.index)
    args = {"cases": [{"module": c.module, "work": c.work, "args": c.args} for c in some]}
    sanitizer = GpuCase("compute-sanitizer", "sanitizer", args, limit=120.0, least=30.0, env=env, alone=True)
    # Loops as graphs, in a model with the kernels. A small check compares two processes without the flag.
    args = {"model": "tiny-causal" if small else MODEL_100M, "layers": 2}
    env = env if small else (*env, GRAPHS)
    graphs = GpuCase("graphs", "graphs", args, 120.0, 20.0, form=GRAPHS_FORM, env=env, alone=True)
    return [*found, *[graphs] * (chip != TPU), sanitizer]


def _with_tuned(cases: list[GpuCase], hardware: str) -> list[GpuCase]:
    """The cases, and behind those of a form the settings that were tuned for it on this device."""
    from mercury_jax.kernels import tuned  # imports JAX, and starts it on no device

    like = {case.form: case for case in cases}
    more = []
    for entry in tuned.entries(hardware):
        case = _check_case(entry["operation"], entry["shape"] | {"knobs": entry["settings"]}, 45.0)
        if case.form in like:
            rest = {k: v for k, v in like[case.form].args.items() if k != "shape"}
            more.append(case._replace(args=case.args | rest, env=like[case.form].env))
    order = list(like)
    return sorted([*cases, *more], key=lambda case: order.index(case.form))


def _check_case(operation: str, shape: dict[str, Any], limit: float) -> GpuCase:
    """A case whose form has the name that `kernels.device` gives to its shape."""
    parts = [operation]
    if "dtype" in shape:  # other operations have one form
        parts += [str(shape[key]) for key in ("width", "dtype") if key in shape]
        parts += [kind for kind in ("int8", "gated", "softcap", "gradient") if shape.get(kind)]
    name = " ".join(["-".join(parts), *(f"{k}={v}" for k, v in shape.items() if k not in ("width", "dtype"))])
    args = {"operation": operation, "shape": shape}
    return GpuCase(name, "check_form", args, limit=limit, form="-".join(parts))


def _attention_cases(kind: dict[str, Any]) -> Iterator[GpuCase]:
    """The cases of one kind of form (int8 keys, soft-cap, fp16; {} for plain bf16) for each head size."""
    for width in WIDTHS:
        if width == 512 and "int8" in kind:
            continue  # the kernel's shared memory has no room to convert them
        shape = {"width": width, "dtype": BF16} | kind
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
    # The last has one matrix and the rows of one canvas, the dense products of a quantised model. Rows of 8 bits have
    # the forms of their matrices.
    sizes = (
        (200, 10, (128, 128)), (2048, 128, EXPERTS["down"]), (2048, 128, EXPERTS["up"]), (256, 1, (2816, 4224))
    )  # fmt: skip
    kinds = (BF16,) if kind.get("gradient") else (BF16, INT8, FP8)
    for dtype, (rows, experts, (inputs, outputs)) in itertools.product(kinds, sizes):
        shape = dict(dtype=dtype, rows=rows, experts=experts, inputs=inputs, outputs=outputs)
        yield _check_case("grouped", shape | kind, limit=30.0)
        if dtype != BF16:
            yield _check_case("grouped", shape | kind | {"rounded": True}, limit=30.0)


def tune_cases(small: bool = False) -> list[GpuCase]:
    """Products and attention of DiffusionGemma's layers, the most expensive first, with the values of each knob."""
    todo: list[tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]]]] = []
    if small:
        shape = dict(dtype=INT8, rows=24, experts=2, inputs=64, outputs=64)
        todo.append(("experts", "grouped", shape, {"tile": (8, 16)}))
        todo.append(
            (
                "attention",
                "attention",
                dict(width=64, dtype=BF16, full=True, b=1, t=4, h=1, g=1, s=256),
                {"splits": (1, 2)},
            )
        )
    else:
        up, down = (dict(rows=2048, experts=128, inputs=i, outputs=o) for i, o in EXPERTS.values())
        products = [("experts up", up | {"gated": True}), ("experts down", down)]
        products += [
            ("dense", dict(rows=256, experts=1, inputs=i, outputs=o, gated=o == 4224)) for i, o in DENSE
        ]
        steps = {"depth": (64, 128, 192, 256), "stages": (4, 6, 8, 12), "workers": (1, 2)}
        tiles = {True: (32, 48, 64, 96, 128), False: (24, 32, 48, 64)}  # whether it is one expert
        for (name, shape), (dtype, rounded) in itertools.product(products, TUNED):
            values = {"tile": tiles[shape["experts"] == 1]} | steps
            todo.append((name, "grouped", shape | {"dtype": dtype, "rounded": rounded}, values))
        values = {"splits": (1, 2, 4, 8), "workers": (1, 2), "keys": (64, 128), "stages": (2, 3, 4)}
        for s, (width, g) in itertools.product((2048, 8192), ((256, 8), (512, 2))):
            todo.append(
                (
                    "attention",
                    "attention",
                    dict(width=width, dtype=BF16, full=True, b=1, t=256, h=16, g=g, s=s),
                    values,
                )
            )
    how: Any = dict(limit=90.0, least=8.0, env=TUNING, module="mercury_jax.bench.gpu.tune")
    return [
        GpuCase(
            " ".join([name, *(f"{k}={v}" for k, v in shape.items())]), "tune",
            {"operation": operation, "shape": shape, "values": values, "calls": 0 if small else 24}, **how,
        )
        for name, operation, shape, values in todo
    ]  # fmt: skip


def profile_cases(small: bool = False) -> list[GpuCase]:
    """The operations of a pass of the 26B model, in int8, in bf16, and in fp8 with rows of 8 bits."""
    name, prefix = ("tiny", 64) if small else (GEMMA, 1024)
    return [
        GpuCase(
            f"profile of {name}, {kind or BF16}", "profile",
            {"model": name, "quantise": kind, "batch": 1, "prefix": prefix},
            limit=150.0, least=10.0 if small else 40.0, alone=not small, module="mercury_jax.bench.gpu.profile",
        )
        for kind in ((INT8,) if small else (INT8, None, "fp8_dynamic"))
    ]  # fmt: skip
