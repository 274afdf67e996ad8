"""The three commands `check`, `speed` and `model`: generators of rows, as they are measured.

Each row names its command, case, device, versions and date. `check` stores which forms passed where `attend` and the
grouped product look for it (`kernels.device`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from mercury_jax.bench.gpu import cases
from mercury_jax.bench.gpu.runner import GpuCase, Row, Runner
from mercury_jax.config import refuse

ABOUT = ("hardware", "platform", "devices", "jax", "python", "driver")


class Unmeasured(RuntimeError):
    """The device failed before its roofline was measured."""

    exit_code = 1


def check(runner: Runner, *, small: bool = False, only: Sequence[str] = (), seed: int = 0) -> Iterator[Row]:
    """Checks every kernel form of this device. A form passes when all of its cases do, and is then used by default.

    Args:
        runner: Runs the cases; its clock has the budget.
        small: Few small shapes, interpreted where there is no GPU.
        only: Parts of names of cases; their forms are checked, and other forms keep the result of an earlier check.
        seed: Draws the inputs.

    Yields:
        A row for each case, and one for each form once it is decided.

    Raises:
        ValueError: No case has such a name.
        Unmeasured: The device failed before its roofline was measured.
    """
    told, first = _begun(runner, "check", small, cases.KERNELS)
    yield from told
    every = cases.check(first["chip"], seed, small) if first["chip"] or small else []
    chosen = _matching(every, only)
    forms = {case.form for case in chosen if case.form}  # a form is decided by all of its cases
    todo = [case for case in every if case in chosen or case.form in forms]
    if not todo:
        yield first["same"] | {"case": "kernels", "left_out": f"no kernel is written for {first['hardware']}"}
        return
    verdicts = _Verdicts(first, whole=not only, cases=todo)
    for case in todo:
        failed = verdicts.failed(case.form)
        rows = [{"not_run": f"an earlier case of {case.form} failed"}] if failed else runner.run(case)
        for row in rows:
            yield first["same"] | {"case": case.name, "form": case.form or None} | row
        yield from (first["same"] | row for row in verdicts.add(case, rows))


class _Verdicts:
    """Decides forms as the results of their cases arrive, and stores each decision at once, in case the command is
    interrupted."""

    def __init__(self, first: Row, whole: bool, cases: Sequence[GpuCase]) -> None:
        from mercury_jax.kernels import device as kernel_device  # imports JAX, and starts it on no device

        self._checks, self._date = kernel_device, first["same"]["date"]
        self._entry = kernel_device.entry_key(first["hardware"], first["jax"])
        self._forms = {} if whole else dict(kernel_device.read_checks(self._entry) or {})
        self._left: dict[str, int] = {}
        for case in cases:
            if case.form:
                self._left[case.form] = self._left.get(case.form, 0) + 1
        self._errors: dict[str, float] = {}
        for form in self._left:  # until its check passes, a form is not used
            self._forms[form] = {"passed": False, "why": "its check was not completed"}
        self._save()

    def failed(self, form: str) -> bool:
        """Whether a case of this form has failed."""
        return bool(form) and self._left[form] < 0

    def add(self, case: GpuCase, rows: Sequence[Row]) -> Iterator[Row]:
        """Takes the rows of a case; yields the row of its form once that is decided."""
        form, last = case.form, rows[-1] if rows else {}
        if not form or self.failed(form):
            return
        if last.get("passed") is True:
            self._errors[form] = max(self._errors.get(form, 0.0), last["relative_error"])
            self._left[form] -= 1
            if self._left[form]:
                return
            self._forms[form] = {"passed": True, "relative_error": self._errors[form]}
        else:
            reasons = (last.get(name) for name in ("why", "failed", "refused", "not_run"))
            why = next((str(r) for r in reasons if r), "it gave no result")
            self._left[form] = -1
            self._forms[form] = {"passed": False, "why": f"{case.name}: {why}"[:300]}
        yield (
            {"form": form, "verdict": "on" if self._forms[form]["passed"] else "off"}
            | self._forms[form]
            | {"file": self._save()}
        )

    def _save(self) -> str | None:
        file = self._checks.write_checks(self._entry, self._forms, self._date)
        return None if file is None else str(file)


def speed(runner: Runner, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Times what passed `check` beside cuDNN and XLA, as shares of the roofline; then a model with kernels and graphs
    on and off. Arguments as of `check`.

    Args:
        runner: Runs the cases.
        small: Small shapes and models, for a machine without a GPU.
        only: Parts of names of cases.

    Yields:
        A row for each case.
    """
    told, first = _begun(runner, "speed", small)
    yield from told
    best: dict[str, float] = {}  # shape -> seconds of the fastest other implementation
    for case in _matching(cases.speed(small), only):
        for row in runner.run(case):
            row = _shares(row, first)
            if "seconds" in row and "way" in row:
                shape = repr(row["shape"])
                if row["way"] != "ours":
                    best[shape] = min(best.get(shape, row["seconds"]), row["seconds"])
                elif shape in best:
                    row["times_as_fast"] = best[shape] / row["seconds"]
            yield first["same"] | {"case": case.name} | row


def model(runner: Runner, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Measures a slice of the 26B model with kernels and without, the whole model, transformers, and training.
    Arguments as of `check`.

    Args:
        runner: Runs the cases.
        small: Small shapes and models, for a machine without a GPU.
        only: Parts of names of cases.

    Yields:
        A row for each case.
    """
    told, first = _begun(runner, "model", small)
    yield from told
    ours = None
    for case in _matching(cases.model(small), only):
        for row in runner.run(case):
            row = _shares(row, first)
            if case.work == "decoding" and row.get("quantise") is None:
                ours = row.get("seconds_per_forward", ours)
            if case.work == "transformers" and ours and "seconds_per_forward" in row:
                row["times_as_fast"] = row["seconds_per_forward"] / ours
            yield first["same"] | {"case": case.name} | row


def _begun(
    runner: Runner, command: str, small: bool, env: tuple[tuple[str, str], ...] = ()
) -> tuple[list[Row], Row]:
    """Measures the device: (rows of it and of its roofline, what later rows need of these)."""
    same: Row = {"command": command, "small": small, "date": str(date.today())}
    rows, found = [], {}
    for case in cases.about(small, env):
        row = runner.run(case)[-1]
        if "failed" in row or "not_run" in row:
            raise Unmeasured(f"the device could not be measured: {row.get('failed', 'no time')}")
        found |= row
        if case.work == "about":
            same |= {name: row[name] for name in ABOUT}
        rows.append(same | {"case": case.name} | row)
    return rows, found | {"same": same}


def _shares(row: Row, first: Row) -> Row:
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
