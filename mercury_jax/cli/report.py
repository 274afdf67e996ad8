"""`mercury report`: training curves of one or several runs as an HTML page or an image.

It reads `metrics.jsonl` and `config.json` from the folders of the runs, also of runs in progress. The page is a single
HTML file without scripts: the curves as SVG, the last values, and the fields in which the recipes differ.
"""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mercury_jax import install
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Positional, option
from mercury_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the curves of one or several runs: losses, held-out metrics, speed.

    examples:
      mercury report runs/nano                        writes report.html
      mercury report runs/a runs/b --out compare.png
      mercury report runs/nano --metrics loss masked_accuracy

    RUN is the folder of a run, which may still be going on. The page is one HTML
    file: curves, last values, and where the recipes differ. Needs matplotlib.
    """

    runs: Annotated[Positional[tuple[str, ...]], option("RUN")]
    """Folders that `mercury train` wrote."""
    out: str = "report.html"
    """The file: .html, .png, .svg or .pdf."""
    metrics: Annotated[tuple[str, ...], option("NAME")] = ()
    """Draw only these metrics. Default: all."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(Report, argv, "mercury report")
    if not args.runs:
        raise refuse("RUN", None, "the folder of a run, such as runs/nano")
    found = read_runs(args.runs)
    path = write_report(found, args.out, args.metrics)
    if args.json:
        show.emit({"file": str(path), "runs": [one.name for one in found]})
    else:
        print(path)
    return 0


KINDS = (".html", ".png", ".svg", ".pdf")  # supported file types
FIRST = ("loss", "nats_per_token", "masked_accuracy", "masked_ce")  # panels that come first, in this order
NO_PANEL = ("step", "kind", "tokens")  # fields of a row that are not drawn
LOSSES = ("loss", "nats_per_token", "_ce")  # ends of the names of metrics that fall towards 0
LOG_SPAN = 30  # largest over smallest value of a loss, from which on its axis is logarithmic


@dataclass(frozen=True)
class RunCurves:
    """The metrics of a run.

    Attributes:
        name: Name of the folder of the run; the whole path if two runs have the same folder name.
        curves: (kind, metric) -> (steps, values); the kind is "train" or "eval".
        config: Dotted name of each field of the recipe -> value; without `out` and `resume`.
    """

    name: str
    curves: Mapping[tuple[str, str], tuple[list[int], list[float]]]
    config: Mapping[str, Any]


def read_runs(folders: Sequence[str | Path]) -> list[RunCurves]:
    """Reads the metrics of runs."""
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(folder: Path, name: str) -> RunCurves:
    from mercury_jax.training.report import METRICS  # here, because it imports JAX

    curves: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line of a run in progress may be incomplete.
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        writes = f"`mercury train` writes config.json and {METRICS} there"
        raise ValueError(f"there is no run in {folder}: {writes}") from None
    except ValueError as error:
        allowed = f"the folder of a run, with config.json and {METRICS} ({error})"
        raise refuse("run", str(folder), allowed) from None
    for row in rows:
        for metric, value in row.items():
            if metric not in NO_PANEL:
                steps, values = curves.setdefault((row["kind"], metric), ([], []))
                steps.append(row["step"])
                values.append(value)
    if not curves:
        raise refuse("run", str(folder), f"a run that has taken a step; {METRICS} has no row yet")
    fields = dict(_fields(config))
    return RunCurves(name, curves, {k: v for k, v in fields.items() if k not in ("out", "resume")})


def _fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _fields(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def write_report(runs: Sequence[RunCurves], path: str | Path, metrics: Sequence[str] = ()) -> Path:
    """Writes a page, or an image of the curves alone."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise refuse("out", str(path), f"a file that ends in {', '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        raise refuse("out", str(path), "a file in a folder that exists")
    found = {metric for run in runs for _, metric in run.curves}
    order = [m for m in FIRST if m in found] + sorted(found - set(FIRST))
    for metric in metrics:
        if metric not in found:
            raise refuse("metrics", metric, ", ".join(order))
    chosen = list(metrics) or order
    if path.suffix != ".html":
        path.write_bytes(_image(runs, chosen, path.suffix[1:]))
    else:
        path.write_text(_page(runs, chosen), encoding="utf-8")
    return path


def _image(runs: Sequence[RunCurves], metrics: Sequence[str], kind: str) -> bytes:
    """Draws one panel per metric: training as a line, evaluation as a dashed line with dots, one colour per run."""
    install.check("mercury report", "matplotlib", "plot")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which would look for a window system
    panels = [axes for line in figure.subplots(lines, columns, squeeze=False) for axes in line]
    for axes in panels[len(metrics) :]:
        axes.set_axis_off()
    for axes, metric in zip(panels, metrics):
        if _spans_decades(runs, metric):
            axes.set_yscale("log")
        for number, run in enumerate(runs):
            for kind_of_row, style in (("train", "-"), ("eval", "o--")):
                steps, values = run.curves.get((kind_of_row, metric), ([], []))
                if steps:
                    label = run.name if kind_of_row == "train" else f"{run.name}, held out"
                    axes.plot(
                        steps,
                        values,
                        style,
                        color=f"C{number % 10}",
                        label=label,
                        markersize=4,
                        linewidth=1.2,
                    )
        axes.set(title=metric, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    sink = io.BytesIO()
    # Text stays text in the SVG, so that a page can be searched. A fixed salt for the ids and no date make the files of
    # equal runs equal.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mercury"}):
        figure.savefig(sink, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return sink.getvalue()


def _spans_decades(runs: Sequence[RunCurves], metric: str) -> bool:
    """Whether a panel is a loss whose small values a linear axis would hide."""
    curves = [
        run.curves[kind, metric] for run in runs for kind in ("train", "eval") if (kind, metric) in run.curves
    ]
    values = [value for _, values in curves for value in values]
    return metric.endswith(LOSSES) and min(values) > 0 and max(values) > LOG_SPAN * min(values)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } svg { width: 100%; height: auto; }
td, th { border-bottom: 1px solid #ddd; padding: 0.2rem 0.8rem; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
"""


def _page(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    svg = _image(runs, metrics, "svg").decode()
    title = ", ".join(run.name for run in runs)
    last = [
        [f"{metric}, held out" if kind == "eval" else metric, *(_last(run, kind, metric) for run in runs)]
        for metric in metrics
        for kind in ("train", "eval")
        if any((kind, metric) in run.curves for run in runs)
    ]
    steps = [str(max(steps[-1] for steps, _ in run.curves.values())) for run in runs]
    names = sorted({name for run in runs for name in run.config})
    values = [[name, *(json.dumps(run.config.get(name)) for run in runs)] for name in names]
    differ = [row for row in values if len(set(row[1:])) > 1]
    head = ["", *(run.name for run in runs)]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>",
        svg[svg.index("<svg") :],
        "<h2>Last values</h2>", _table([["steps", *steps], *last], head),
    ]  # fmt: skip
    if differ:
        parts += ["<h2>What differs in the recipes</h2>", _table(differ, head)]
    parts += ["<h2>Recipe</h2>", _table(values, head)] if len(runs) == 1 else []
    return "\n".join(parts) + "\n</html>\n"


def _last(run: RunCurves, kind: str, metric: str) -> str:
    values = run.curves.get((kind, metric), ([], []))[1]
    return f"{values[-1]:.6g}" if values else ""


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    cells = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row) + "</tr>"
    return "<table>" + cells(head, "th") + "".join(cells(row, "td") for row in rows) + "</table>"
