"""The card of a model: what it was trained on, what it reaches, and the command that remakes each figure.

    python -m mercury_jax.evaluate.card --model DIR --run DIR --planning DIR --out DIR/README.md

Every task with questions is answered one token a step and by the model's own rule, which `sample` uses where none is
named; the summaries go to `evaluation.json` beside the card.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mercury_jax import hub
from mercury_jax.config import at_least, refuse
from mercury_jax.evaluate.report import Summary, line, table
from mercury_jax.evaluate.runner import ONE_A_STEP, compare, run
from mercury_jax.types import LM

MOST_SHARE, MOST_POINTS = 1 / 3, 2.0  # of the forwards, and of accuracy lost: what a parallel rule is to keep


class Item(NamedTuple):
    """A measurement: a task on its held-out side, or on a file of the planning folder."""

    task: str
    file: str | None = None
    limit: int | None = None  # None: the task's own, or the whole file


SUITE = (
    Item("sudoku4", None, 256),
    Item("sudoku4", "sudoku_4x4_4.jsonl"),
    Item("sudoku4", "sudoku_4x4_8.jsonl"),
    Item("add3", None, 256),
    Item("countdown3", None, 128),
    Item("countdown3", "cd3_test.jsonl", 300),
    Item("code-infill", None, 64),
    Item("code-bpb", None, 768),
)


def measure(
    lm: LM,
    planning: str | Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
    learnt: Collection[str] | None = None,
) -> list[Summary]:
    """Everything in `SUITE`; without a planning folder, without its files.

    Args:
        lm: The model.
        planning: Folder of the public test files.
        limit: The most questions of each task.
        say: Called with a line for each result.
        learnt: Tasks to ask, from `learnt_tasks`; None for all.

    Returns:
        Summaries in the order of `SUITE`.
    """
    suite = [item for item in SUITE if learnt is None or item.task in learnt]
    if limit is not None:
        at_least(1, limit=limit)
    if planning is not None:
        for item in suite:
            _file(planning, item)  # a missing file is refused now, not after minutes
    found: list[Summary] = []
    for item in suite:
        if item.file and planning is None:
            continue
        most = min(x for x in (item.limit, limit, 10**9) if x is not None)
        asked: dict[str, Any] = {"file": _file(planning, item), "limit": most}
        if item.task == "code-bpb":
            new = [run(lm, item.task, **asked).summary]
        else:
            new = compare(lm, item.task, **asked)
        # The limit as it was asked for: what the command needs, where a file has fewer lines.
        found += [{**s, "limit": most if most < 10**9 else None} for s in new]
        for summary in new:
            say(line(summary))
    return found


def learnt_tasks(recipe: Mapping[str, Any]) -> set[str] | None:
    """The tasks whose problems the data of a resolved recipe hold; None without a recipe."""
    if "data" not in recipe:
        return None
    sources = [source for source, _ in recipe["data"]["sources"]]
    code = {"code-infill", "code-bpb"} if any(s["kind"] == "stdlib" for s in sources) else set()
    return code | {s["name"] for s in sources if s["kind"] == "generated"}


def _file(planning: str | Path | None, item: Item) -> Path | None:
    if item.file is None or planning is None:
        return None
    path = Path(planning) / item.file
    if not path.is_file():
        raise refuse("planning", str(planning), f"a folder with {', '.join(i.file for i in SUITE if i.file)}")
    return path


def card(
    lm: LM,
    summaries: Sequence[Mapping[str, Any]],
    *,
    recipe: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    trained_on: str = "",
    evaluated_on: str = "",
) -> str:
    """Markdown. recipe: a run's `config.json`; trained: what `training` read of it; *_on: hardware in words."""
    parts = [
        f"# {lm.name}",
        _model(lm),
        "## Training",
        "\n".join(f"- {x}" for x in _training(lm.card, recipe or {}, trained or {}, trained_on)),
        "## What it reaches",
        _reading(evaluated_on),
        table(summaries),
        "\n".join(f"- {_claim(s)}" for s in summaries if "points" in s),
        "\n".join(f"- {line(s)}: {_nelbo(s)}" for s in summaries if "bits_per_byte" in s),
        "## Commands",
        "Each figure alone, with its seed; the files are those of the planning test sets. The whole card: "
        "`python -m mercury_jax.evaluate.card --model DIR --run DIR --planning DIR --out README.md`.",
        "```\n" + "\n".join(command(s) for s in summaries) + "\n```",
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _model(lm: LM) -> str:
    c = lm.model.config
    return (
        f"A diffusion language model of {lm.parameters / 1e6:.2f}M parameters: {c.layers} layers of width "
        f"{c.width}, pattern `{c.pattern}`, canvases of {c.block} tokens, a vocabulary of {c.vocab}."
    )


def _training(
    about: Mapping[str, Any], recipe: Mapping[str, Any], trained: Mapping[str, Any], hardware: str
) -> list[str]:
    """From the model's own card (recipe, seed) and from the run's folder."""
    lines = []
    if "recipe" in about:
        lines.append(
            f"recipe: `{about['recipe']}`, seed {about.get('seed', 0)}: `mercury train {about['recipe']}`"
        )
    lines += [f"data: {_mixture(recipe['data'])}"] if "data" in recipe else []
    if "step" in trained:
        lines.append(
            f"steps: {trained['step']} of {recipe.get('batch')} rows of {recipe.get('row')} positions, "
            f"{trained['tokens'] / 1e6:.1f}M scored tokens"
        )
        lines.append(f"time: {trained['seconds'] / 3600:.1f} hours of updates, by the logged tokens a second")
    return [*lines, f"hardware: {hardware or 'not recorded'}"]


def _mixture(data: Mapping[str, Any]) -> str:
    total = sum(weight for _, weight in data["sources"])
    shares = []
    for source, weight in data["sources"]:
        name = source.get("name") or Path(source.get("where", "")).name or source["kind"]
        shares.append(
            f"{100 * weight / total:.0f}% {name}{' with its derivation' * bool(source.get('thinking'))}"
        )
    return ", ".join(shares)


def _reading(hardware: str) -> str:
    return (
        f"Measured on {hardware or 'hardware that was not recorded'}. Each question is asked once; an answer is right "
        "where the generator's own check accepts it. Held-out questions were drawn from the side of the "
        "generator's split that training never sees; the problems of the planning files are all on that side (Sudokus "
        "up to a renaming of their digits: a rotated one may have been trained on). "
        "Intervals are Wilson's, 95%. Forwards and tokens are means "
        "an answer: forwards are denoiser passes (encoding the prompt not counted), tokens what was said, thinking "
        f"included. `{ONE_A_STEP}` accepts the most confident token of the canvas in each pass, the end of the text "
        "behind an answer too, so it may need more passes than the answer has tokens. The other rule is the model's "
        "default, which `sample` uses where none is named; no test question had a part in choosing it."
    )


def _claim(s: Mapping[str, Any]) -> str:
    kept = s["forwards_share"] <= MOST_SHARE and s["points"] >= -MOST_POINTS
    verdict = "within" if kept else "outside of"
    return (
        f"{s['task']}, {s['data']}: {s['rule']} takes {100 * s['forwards_share']:.0f}% of the forwards of "
        f"{ONE_A_STEP} ({s['forwards'] / max(s['tokens'], 1e-9):.2f} for each token of the answer), at "
        f"{s['points']:+.1f} points of accuracy (paired, 95% {s['points_low']:+.1f} to {s['points_high']:+.1f}, "
        f"n = {s['n']}): {verdict} a third of the forwards and 2 points"
    )


def _nelbo(s: Mapping[str, Any]) -> str:
    return (
        f"an upper bound over {s['n']} chunks of at most {s['row']} positions laid out, {s['tokens']} tokens"
    )


def command(s: Mapping[str, Any]) -> str:
    """The command line that gives this summary again."""
    words = ["mercury eval", s["task"]]
    words += [f"--file {s['data']}"] if s["data"].endswith(".jsonl") else []
    words += [f"--limit {s['limit']}"] if s.get("limit") else []
    words += ["--rule confidence"] if s.get("rule") == ONE_A_STEP else []
    return " ".join([*words, f"--seed {s['seed']}", "--json"])


def training(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(resolved recipe, {"step", "tokens", "seconds"}) of a training run's folder."""
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
    # A row's speed is that of the steps since the row before it; evaluation is not in it.
    made = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *rows], rows)]
    seconds = sum(n / r["tokens_per_second"] for n, r in zip(made, rows) if r.get("tokens_per_second"))
    return recipe, {"step": rows[-1]["step"], "tokens": rows[-1]["tokens"], "seconds": seconds}


def hardware() -> str:
    """This machine in words, without its name."""
    device = jax.devices()[0]
    cores = f"{os.cpu_count()} cores of a {platform.machine()} CPU"
    return cores if device.platform == "cpu" else f"{len(jax.devices())} x {device.device_kind}, {cores}"


def main(
    model: Path,
    out: Path,
    run: Path | None = None,
    planning: Path | None = None,
    limit: int | None = None,
    trained_on: str = "",
) -> None:
    """Measure a model and write its card.

    Args:
        model: folder that `train` or `hub.save` wrote.
        out: the card, a Markdown file; `evaluation.json` goes beside it.
        run: folder of the training run, for its data, steps and time.
        planning: folder with sudoku_4x4_4.jsonl, sudoku_4x4_8.jsonl and cd3_test.jsonl.
        limit: at most so many questions of each task (for a quick look).
        trained_on: the hardware that it was trained on, in words.
    """
    recipe, trained = training(run) if run else ({}, {})
    lm = hub.load(model)
    began = time.perf_counter()
    found = measure(
        lm, planning, limit, lambda text: print(text, file=sys.stderr, flush=True), learnt_tasks(recipe)
    )
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
        tyro.cli(main, prog="python -m mercury_jax.evaluate.card")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
