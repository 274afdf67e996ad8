"""A child of `mercury bench gpu`: takes cases on standard input, one JSON object a line, and answers with JSON lines.

{"work": name, "asked": {..}} is answered by {"stage": text} as it goes on, {"row": {..}} for each result, and
{"done": true} or {"failed": why} at last. It ends with its parent, or where its input ends.
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

# name -> module of this package; the function has the name. Imported when asked for: most need only some of them.
WORK = {
    "about": "check", "ceilings": "check", "attention": "check", "grouped": "check", "sanitizer": "check",
    "time_attention": "speed", "time_grouped": "speed",
    "decoding": "model", "slice_logits": "model", "training": "model", "transformers": "peer",
}  # fmt: skip


def main() -> int:
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answer(json.loads(line), lambda told: print(json.dumps(finite(told)), file=out, flush=True))
    return 0


def answer(case: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Runs one case."""
    name = case["work"]
    try:
        work: Work = getattr(importlib.import_module(f"mercury_jax.bench.gpu.{WORK[name]}"), name)
        for row in work(case["asked"], lambda stage: say({"stage": stage})):
            say({"row": row})
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        say(
            {
                "failed": f"{type(error).__name__}: {error}"[:600]
                + f" ({Path(place.filename).name}:{place.lineno})"
            }
        )
    else:
        say({"done": True})


def end_with_parent() -> None:
    """On Linux the kernel ends this process with its parent: nothing holds the device when a command was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
