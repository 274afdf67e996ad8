"""Passes and seconds of a text of 200 lines that is rewritten with one change: `python -m benchmarks.predicted`.

The model first writes the text. Then that text with a line changed, inserted or left out is the prediction
(`draft_text=`), and the answer is compared with the one without a prediction, with lookup beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import mercury_jax as mj
from mercury_jax import compilation
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Float, Int, option

PROMPT = """import random

# A list of English sentences, one a line.
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "She sells sea shells by the sea shore.",
"""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Measure predicted outputs on a pretrained model.

    examples:
      python -m benchmarks.predicted --out rows.jsonl
    """

    model: Annotated[str, option("MODEL")] = "smollm2"
    """Which model; one that predicts the next token."""
    lines: Int = 200
    """Lines of the text."""
    max_tokens: Int = 2400
    """Most tokens of the text."""
    temperature: Float = 0.0
    """Sampling temperature."""
    out: Annotated[str | None, option("Y.jsonl")] = None
    """Write the rows to this file."""


def predictions(lines: list[str]) -> dict[str, list[str]]:
    """The text with one change in its middle."""
    middle = len(lines) // 2
    changed = f"{lines[middle]}  # changed"
    return {
        "the text itself": lines,
        "a line changed": [*lines[:middle], changed, *lines[middle + 1 :]],
        "a line inserted": [*lines[:middle], "    # A line that the model does not write.", *lines[middle:]],
        "two lines left out": [*lines[:middle], *lines[middle + 2 :]],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    args = arguments.read(Predicted, sys.argv[1:] if argv is None else argv, "benchmarks.predicted")
    lm = mj.load(args.model)
    how: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": 1}
    lines = mj.sample(lm, PROMPT, **how).text.split("\n")[: args.lines]
    how["max_tokens"] = len(lm.tokenizer.encode("\n".join(lines)))
    ways: dict[str, dict[str, Any]] = {"none": {}, "lookup": {"draft": "lookup"}}
    ways |= {name: {"draft_text": "\n".join(text)} for name, text in predictions(lines).items()}
    rows, whole = [], None
    for name, way in ways.items():
        mj.sample(lm, PROMPT, **how, **way)  # compiles
        began = time.perf_counter()
        out = mj.sample(lm, PROMPT, **how, **way)
        whole = out.text if whole is None else whole
        rows.append({
            "model": lm.name, "prediction": name, "lines": len(lines), "tokens": int(out.lengths[0]),
            "passes": int(out.forwards[0]), "seconds": time.perf_counter() - began, "equal": out.text == whole,
            "temperature": args.temperature, "hardware": compilation.hardware(),
        })  # fmt: skip
        show.emit(rows[-1])
    show.write_records(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
