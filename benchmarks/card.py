"""Writes the card of a model: its training data, its results, and the command that reproduces each figure.

    python -m benchmarks.card --model DIR --run DIR --planning DIR --out DIR/README.md

Every task with questions is decoded twice, with one token per step and with the model's default rule. The summaries are
also written to `evaluation.json` beside the card.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax import hub
from mercury_jax.compilation import hardware
from mercury_jax.config import at_least, refuse
from mercury_jax.evaluate.runner import LEFT_TO_RIGHT, ONE_A_STEP, Summary, compare, line, run, table
from mercury_jax.types import LM

MAX_SHARE, MAX_POINTS = 1 / 3, 2.0  # goals of a parallel rule: share of the forwards, loss of points


class Measurement(NamedTuple):
    """One entry of the suite.

    Attributes:
        task: Name of the task.
        file: A file in the planning folder; None: the held-out questions.
        limit: Largest number of questions; None: the task's default, or the whole file.
    """

    task: str
    file: str | None = None
    limit: int | None = None

    def path(self, planning: str | Path | None) -> Path | None:
        """Finds the file in the planning folder."""
        if self.file is None or planning is None:
            return None
        path = Path(planning) / self.file
        if not path.is_file():
            files = ", ".join(item.file for item in SUITE if item.file)
            raise refuse("planning", str(planning), f"a folder with {files}")
        return path


SUITE = (
    Measurement("sudoku4", None, 256),
    Measurement("sudoku4", "sudoku_4x4_4.jsonl"),
    Measurement("sudoku4", "sudoku_4x4_8.jsonl"),
    Measurement("add3", None, 256),
    Measurement("countdown3", None, 128),
    Measurement("countdown3", "cd3_test.jsonl", 300),
    Measurement("code-infill", None, 64),
    Measurement("code-bpb", None, 768),
)

HOW_MEASURED = (
    "Measured on {hardware}. Each question is asked once; an answer is right "
    "if the task's own check accepts it. Held-out questions were drawn from the side of the "
    "task's split that training never sees; the problems of the planning files are all on that side (Sudokus "
    "up to a renaming of their digits: a rotated one may have been trained on). "
    "Intervals are Wilson's, 95%. Forwards and tokens are means "
    "per answer: forwards are denoiser passes (encoding the prompt not counted), tokens those of the answer with "
    f"its thinking. `{LEFT_TO_RIGHT}` decodes the same weights autoregressively, with a KV cache. `{ONE_A_STEP}` "
    "accepts the most confident token of the canvas in each pass, the end of the text after an answer too, "
    "so it may need more passes than the answer has tokens. The last rule of a task is the "
    "model's default, which `sample` uses where none is named; no test question had a part in choosing it."
)


def measure(
    lm: LM,
    planning: str | Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
    learnt: Collection[str] | None = None,
) -> list[Summary]:
    """Measures the entries of `SUITE`; without a planning folder, those with a file are left out."""
    suite = [item for item in SUITE if learnt is None or item.task in learnt]
    if limit is not None:
        at_least(1, limit=limit)
    # Refuse a missing file now, not after minutes of evaluation.
    files = {item: item.path(planning) for item in suite if planning is not None or item.file is None}
    found: list[Summary] = []
    for item, file in files.items():
        limits = [x for x in (item.limit, limit) if x is not None]
        options: dict[str, Any] = {"file": file, "limit": min(limits) if limits else None}
        if item.task == "code-bpb":
            new = [run(lm, item.task, **options).summary]
        else:
            new = compare(lm, item.task, **options)
        # Keep the limit that was passed, for `command`: a file may have fewer questions than that.
        new = [{**summary, "limit": options["limit"]} for summary in new]
        for summary in new:
            say(line(summary))
        found += new
    return found


def learnt_tasks(recipe: Mapping[str, Any]) -> set[str] | None:
    """Finds the tasks that a model was trained on.

    Args:
        recipe: The resolved recipe, `config.json` of a run; {} without one.
    """
    if "data" not in recipe:
        return None
    sources = [source for source, _ in recipe["data"]["sources"]]
    code = {"code-infill", "code-bpb"} if any(s["kind"] == "stdlib" for s in sources) else set()
    return code | {s["name"] for s in sources if s["kind"] == "generated"}


def card(
    lm: LM,
    summaries: Sequence[Mapping[str, Any]],
    *,
    recipe: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    trained_on: str = "",
    evaluated_on: str = "",
) -> str:
    """Writes the model card."""
    c = lm.model.config
    parts = [
        f"# {lm.name}",
        f"A diffusion language model of {lm.parameters / 1e6:.2f}M parameters: {c.layers} layers of width "
        f"{c.width}, pattern `{c.pattern}`, canvases of {c.block} tokens, a vocabulary of {c.vocab}.",
        "## Training",
        "\n".join(f"- {x}" for x in _training_lines(lm.card, recipe or {}, trained or {}, trained_on)),
        "## What it reaches",
        HOW_MEASURED.format(hardware=evaluated_on or "hardware that was not recorded"),
        table(summaries),
        "\n".join(f"- {_comparison(s)}" for s in summaries if "points" in s),
        "\n".join(
            f"- {line(s)}: an upper bound over {s['n']} chunks of at most {s['row']} positions laid out, "
            f"{s['tokens']} tokens"
            for s in summaries
            if "bits_per_byte" in s
        ),
        "## Commands",
        "Each figure alone, with its seed; the files are those of the planning test sets. The whole card: "
        "`python -m benchmarks.card --model DIR --run DIR --planning DIR --out README.md`.",
        "```\n" + "\n".join(command(s) for s in summaries) + "\n```",
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _training_lines(
    about: Mapping[str, Any], recipe: Mapping[str, Any], trained: Mapping[str, Any], hardware: str
) -> list[str]:
    """Lists facts of the training, from `LM.card` (recipe, seed) and from the folder of the run."""
    lines = []
    if "recipe" in about:
        name = about["recipe"]
        lines.append(f"recipe: `{name}`, seed {about.get('seed', 0)}: `mercury train {name}`")
    if "data" in recipe:
        sources, shares = recipe["data"]["sources"], []
        total = sum(weight for _, weight in sources)
        for source, weight in sources:
            name = source.get("name") or Path(source.get("where", "")).name or source["kind"]
            thinking = " with its derivation" * bool(source.get("thinking"))
            shares.append(f"{100 * weight / total:.0f}% {name}{thinking}")
        lines.append(f"data: {', '.join(shares)}")
    if "step" in trained:
        lines.append(
            f"steps: {trained['step']} of {recipe.get('batch')} rows of {recipe.get('row')} positions, "
            f"{trained['tokens'] / 1e6:.1f}M scored tokens"
        )
        lines.append(f"time: {trained['seconds'] / 3600:.1f} hours of updates, by the logged tokens a second")
    return [*lines, f"hardware: {hardware or 'not recorded'}"]


def _comparison(s: Mapping[str, Any]) -> str:
    good = s["forwards_share"] <= MAX_SHARE and s["points"] >= -MAX_POINTS
    verdict = "within" if good else "outside of"
    return (
        f"{s['task']}, {s['data']}: {s['rule']} takes {100 * s['forwards_share']:.0f}% of the forwards of "
        f"{s['compared_with']} ({s['forwards'] / max(s['tokens'], 1e-9):.2f} for each token of the answer), at "
        f"{s['points']:+.1f} points of accuracy (paired, 95% {s['points_low']:+.1f} to {s['points_high']:+.1f}, "
        f"n = {s['n']}): {verdict} a third of the forwards and 2 points"
    )


def command(s: Mapping[str, Any]) -> str:
    """Makes the command line that reproduces a summary.

    Args:
        s: A summary from `measure`.
    """
    words = ["mercury eval", s["task"]]
    words += [f"--file {s['data']}"] if s["data"].endswith(".jsonl") else []
    words += [f"--limit {s['limit']}"] if s.get("limit") else []
    rule = {ONE_A_STEP: "confidence", LEFT_TO_RIGHT: "autoregressive"}.get(s.get("rule", ""))
    words += [f"--rule {rule}"] if rule else []
    return " ".join([*words, f"--seed {s['seed']}", "--json"])


def read_run(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the folder of a training run.

    Returns:
        (resolved recipe, {"step", "tokens", "seconds"}); the second is {} if nothing was logged.
    """
    try:
        recipe = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(x) for x in text.split("\n") if x.strip()]
    except (OSError, ValueError) as error:
        wanted = f"a training run's folder with config.json and metrics.jsonl ({error})"
        raise refuse("run", str(folder), wanted) from None
    rows = [r for r in rows if r.get("kind") == "train"]
    if not rows:
        return recipe, {}
    # A row logs the tokens per second of the steps since the row before, without the time of evaluations.
    tokens = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *rows], rows)]
    seconds = sum(n / r["tokens_per_second"] for n, r in zip(tokens, rows) if r.get("tokens_per_second"))
    return recipe, {"step": rows[-1]["step"], "tokens": rows[-1]["tokens"], "seconds": seconds}


def main(
    model: Path,
    out: Path,
    run: Path | None = None,
    planning: Path | None = None,
    limit: int | None = None,
    trained_on: str = "",
) -> None:
    """Measures a model and writes its card."""
    recipe, trained = read_run(run) if run else ({}, {})
    lm = hub.load(model)
    began = time.perf_counter()
    say = lambda text: print(text, file=sys.stderr, flush=True)
    found = measure(lm, planning, limit, say, learnt_tasks(recipe))
    text = card(lm, found, recipe=recipe, trained=trained, trained_on=trained_on, evaluated_on=hardware())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    record = {
        "model": lm.name,
        "hardware": hardware(),
        "seconds": time.perf_counter() - began,
        "summaries": found,
    }
    (out.parent / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main, prog="python -m benchmarks.card")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
