"""The rows of `mercury bench gpu` as one page: what each thing makes of the device, beside its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mercury_jax.bench.plot import check

Rows = Sequence[Mapping[str, Any]]


def page(rows: Rows, path: str | Path) -> Path:
    """Draw three panels, attention, decoding, training: shares of the measured ceilings. PNG, PDF or SVG."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(title, bars) for title, bars in _panels(rows) if bars]
    heights = [1.2 + 0.32 * len(bars) for _, bars in panels] or [1.0]
    figure = Figure(figsize=(11, 1.0 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(len(panels), 1), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, bars) in zip(grid, panels):
        _panel(axes, title, bars)
    first = rows[0]
    about = f"{first['hardware']}, JAX {first['jax']}, {first['date']}"
    most = f"{first['bytes_per_second'] / 1e9:.0f} GB/s copied, {first['flops_per_second'] / 1e12:.3g} TFLOP/s in bf16"
    figure.suptitle(f"{about}: {most}", fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)


def _panels(rows: Rows) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """(title, bars of (label, share, what stands beside it))."""
    kind = lambda name: [r for r in rows if r["experiment"] == name]
    attention = [
        (f"{r['shape']}: {r['way']}", r["share_of_bound"], f"{1e3 * r['seconds']:.3f} ms")
        for r in kind("attention") if "seconds" in r
    ]  # fmt: skip
    decoding = [
        (label(r), r["share_of_bound"],
         f"{1e3 * r['seconds_per_forward']:.2f} ms a pass, {r['tokens_per_second']:.0f} tokens/s")
        for r in kind("decoding")
    ]  # fmt: skip
    training = [
        (f"{r['model']}, {r['rows']} x {r['row']}", r["mfu"], f"{r['positions_per_second'] / 1e3:.0f}k positions/s")
        for r in kind("training")
    ]  # fmt: skip
    return [
        ("attention: share of the bound", attention), ("a pass of decoding: share of the bound", decoding),
        ("training: model FLOPs utilisation", training),
    ]  # fmt: skip


def label(row: Mapping[str, Any]) -> str:
    """What decoded, and how, of a row of decoding."""
    how = [
        "" if row.get("kernels", True) else "without our kernels",
        "loops as graphs" if row.get("env") else "",
    ]
    model = " ".join(filter(None, (row["model"], row["quantise"])))
    return ", ".join(filter(None, (model, f"batch {row['batch']}", f"prefix {row['prefix']}", *how)))


def _panel(axes: Any, title: str, bars: list[tuple[str, float, str]]) -> None:
    labels, shares, beside = zip(*bars)
    at = range(len(bars))
    axes.barh(at, shares, color="#0b5d94", height=0.62)
    axes.set_yticks(at, labels, fontsize="x-small")
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize="x-small")
    axes.set_xlim(0, max(1.0, *shares) * 1.35)
    axes.axvline(1.0, color="#777777", linewidth=0.8)
    for i, (share, text) in enumerate(zip(shares, beside)):
        axes.text(share, i, f"  {share:.0%}, {text}", va="center", fontsize="x-small")
    axes.set_title(title, fontsize="small", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
