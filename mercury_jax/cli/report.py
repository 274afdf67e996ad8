"""`mercury report`: the curves of training runs as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
    """Runs the command; returns its exit code.

    Raises:
        ValueError: A folder without metrics, or a file that cannot be written.
    """
    args = arguments.read(Report, argv, "mercury report")
    if not args.runs:
        raise refuse("RUN", None, "the folder of a run, such as runs/nano")
    from mercury_jax.train import curves

    found = curves.read_runs(args.runs)
    path = curves.write_report(found, args.out, args.metrics)
    if args.json:
        show.emit({"file": str(path), "runs": [one.name for one in found]})
    else:
        print(path)
    return 0
