"""The commands `check`, `profile` and `tune`: the cases that each runs, and its rows as they are measured.

Each row names its command, case, device, versions and date. `check` stores which forms passed where `attend` and the
grouped product look for it (`ops.device`). A case is data: the child process finds the work by its name.
With `small` the same code runs with small shapes on any machine. Importing this module imports no JAX.
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
BF16, INT8 = "bfloat16", "int8"
HOPPER, TPU = "sm_90a", "tpu"  # as in `ops.device`, which would import JAX
KERNELS = (("MERCURY_KERNELS", "1"),)  # a check runs every form, whatever an earlier check found
# XLA would time candidates for the products of each reference, most of the time of a check; a kernel has no candidates.
UNTUNED = (("XLA_FLAGS", "--xla_gpu_autotune_level=0"),)
# ptxas reports which variants spill; it is silent about programs of a cache.
TUNING = (*KERNELS, ("MOSAIC_GPU_DUMP_PTXAS", "1"), ("JAX_ENABLE_COMPILATION_CACHE", "false"))
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
    from mercury_jax.ops import device as kernel_device  # imports JAX, and starts it on no device

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
    from mercury_jax.ops import tuned  # imports JAX, and starts it on no device

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
    """The cases of every kernel form, those that models need first."""
    if not small and chip is None:
        return []
    tables = _tables(HOPPER if small else chip)
    if small:
        found = [_check_case(name, one, 120.0) for name, table in tables for one in table.small]
    else:
        found = [_check_case(name, *one) for name, table in tables for one in table.checked]
        found += [_check_case(name, *one) for name, table in tables for one in table.later]
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


def _tables(chip: str | None) -> list[tuple[str, Any]]:
    """The operations that have kernels for a device, with their shapes."""
    from mercury_jax.models.ops import OPERATIONS  # imports JAX, and starts it on no device

    return [
        (op.name, op.table()) for op in OPERATIONS if any(one.kind == chip for one in op.kernels.values())
    ]


def _with_tuned(cases: list[GpuCase], hardware: str) -> list[GpuCase]:
    """The cases, and after those of a form the settings that were tuned for it on this device."""
    from mercury_jax.ops import tuned  # imports JAX, and starts it on no device

    like, tables = {case.form: case for case in cases}, dict(_tables(HOPPER))
    more = []
    for entry in tuned.entries(hardware):
        shape = tables[entry["operation"]].shape(**entry["shape"])._replace(knobs=entry["settings"])
        case = _check_case(entry["operation"], shape, 45.0)
        if case.form in like:
            rest = {k: v for k, v in like[case.form].args.items() if k != "shape"}
            more.append(case._replace(args=case.args | rest, env=like[case.form].env))
    order = list(like)
    return sorted([*cases, *more], key=lambda case: order.index(case.form))


def label(name: str, shape: Any) -> str:
    """A name with the fields of a shape; the name of a form holds its width and dtype."""
    told = ("width", "dtype") if name == shape.form else ()
    return " ".join([name, *(f"{k}={v}" for k, v in shape._asdict().items() if v and k not in told)])


def _check_case(operation: str, shape: Any, limit: float) -> GpuCase:
    args = {"operation": operation, "shape": shape._asdict()}
    return GpuCase(label(shape.form, shape), "check_form", args, limit=limit, form=shape.form)


def tune_cases(small: bool = False) -> list[GpuCase]:
    """The shapes whose settings are searched, with the values of each knob."""
    how: Any = dict(limit=90.0, least=8.0, env=TUNING, module="mercury_jax.bench.gpu.tune")
    return [
        GpuCase(
            label(name, shape), "tune",
            {"operation": operation, "shape": shape._asdict(), "values": values, "calls": 0 if small else 24}, **how,
        )
        for operation, table in reversed(_tables(HOPPER))  # products take more of a pass than attention
        for name, shape, values in (table.tuned_small if small else table.tuned)
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
