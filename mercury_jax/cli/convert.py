"""`mercury convert`: a Hugging Face checkpoint as a folder of ours, or a folder of ours as one of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import ConfigOptions, Flag, Group, Positional, option

DTYPES, LAYOUTS = ("float32", "bfloat16", "float16"), ("ours", "hf")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model in the other layout: Hugging Face's as ours, or ours as theirs.

    examples:
      mercury convert Qwen/Qwen3-0.6B runs/qwen3         to train on or to serve
      mercury convert runs/mine/model out --to hf        for transformers, vLLM
      mercury convert runs/mine/model out --to hf --family sdar --dtype bfloat16
      mercury convert BASE out --adapter runs/mine/adapter      merge an adapter
    """

    source: Annotated[Positional[str], option("MODEL")]
    """Folder, GGUF file or Hugging Face id of a model."""
    out: Annotated[Positional[str], option("OUT")]
    """A new folder."""
    to: Annotated[str, option("LAYOUT")] = "ours"
    """ours, or hf."""
    family: Annotated[str | None, option("NAME")] = None
    """With --to hf: the model family to write. Default: the first that fits."""
    dtype: Annotated[str | None, option("NAME")] = None
    """Type of the parameters: float32, bfloat16, float16. Default: as they are."""
    adapter: Annotated[str | None, option("FOLDER")] = None
    """LoRA adapter of the model, which is merged."""
    config: Annotated[ConfigOptions, Group] = field(default_factory=ConfigOptions)
    json: Flag = False
    """Print one JSON object that describes the model."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(Convert, argv, "mercury convert")
    out = Path(args.out)
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    arguments.require(
        (args.to in LAYOUTS, "--to", args.to, ", ".join(LAYOUTS)),
        (args.family is None or args.to == "hf", "--family", args.family, "with --to hf only"),
        (args.dtype in (None, *DTYPES), "--dtype", args.dtype, ", ".join(DTYPES)),
        (empty, "OUT", args.out, "a new or empty folder"),
    )
    from mercury_jax import hub

    with show.progress("bytes", f"loading {args.source}") as update:
        hub.convert(
            args.source, out, to=args.to, family=args.family, dtype=args.dtype, adapter=args.adapter,
            progress=lambda read: update(advance=read), **args.config.given(),
        )  # fmt: skip
    record = hub.info(out, mask=args.config.mask if args.adapter is None else None)
    if args.json:
        show.emit(record)
    else:
        print(f"{record['name']}: {record['parameters']:,} parameters, {record['family']}, in {out}")
    return 0
