"""The child process of `mercury bench gpu`: reads cases from standard input and answers with JSON lines.

{"work": name, "asked": {..}} is answered by {"stage": text} while it runs, {"row": {..}} for each result, and
{"done": true} or {"failed": why} at the end. It ends with its parent, or when its input ends.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Stage = Callable[[str], None]
Work = Callable[[dict[str, Any], Stage], Iterator[dict[str, Any]]]

# name of the work, and of its function -> module of this package, imported when it is needed
WORK = {
    "about": "check", "ceilings": "check", "attention": "check", "grouped": "check", "sanitizer": "check",
    "time_attention": "speed", "time_grouped": "speed",
    "decoding": "model", "slice_logits": "model", "training": "model", "transformers": "model",
}  # fmt: skip


def main() -> int:
    """Answers the cases on standard input, one after the other."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print to standard output must not mix with the answers
    for line in sys.stdin:
        answer(json.loads(line), lambda told: print(json.dumps(finite(told)), file=out, flush=True))
    return 0


def answer(case: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Runs one case and passes each line of its answer to `say`.

    Args:
        case: {"work": name, "asked": arguments}.
        say: Called with each line of the answer.
    """
    name = case["work"]
    try:
        work: Work = getattr(importlib.import_module(f"mercury_jax.bench.gpu.{WORK[name]}"), name)
        for row in work(case["asked"], lambda stage: say({"stage": stage})):
            say({"row": row})
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(place.filename).name}:{place.lineno})"
        say({"failed": f"{type(error).__name__}: {error}"[:600] + where})
    else:
        say({"done": True})


def end_with_parent() -> None:
    """Has the Linux kernel end this process with its parent, so that a killed command leaves nothing on the device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as text."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
