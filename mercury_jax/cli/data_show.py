"""`mercury data show`: what a model learns from conversations, before it is trained on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import ConfigOptions, Flag, Group, Int, Positional, option
from mercury_jax.config import at_least
from mercury_jax.viz import readable

if TYPE_CHECKING:
    from mercury_jax.tokenizer import AnyTokenizer
    from mercury_jax.training.data.chats import Chat
    from mercury_jax.training.data.packing import Example, StreamSettings

ROWS, MOST_BATCHES = 8, 50  # rows of a batch, and batches, whose padding is counted
OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


@dataclass(frozen=True, kw_only=True)
class DataShow:
    """Show which tokens of conversations are trained on, and how well rows are used.

    examples:
      mercury data show chats.jsonl --model runs/mine/model
      mercury data show "sharegpt/*.json" --model tiny-llada --turns all --row 512
      mercury data show hf:org/name --model GSAI-ML/LLaDA-8B-Instruct --samples 1

    The tokens that are trained on are green; where the output is no terminal,
    they stand between two brackets. Nothing but the tokenizer and the config of
    the model is read.
    """

    source: Annotated[Positional[str], option("SOURCE")]
    """A glob of .jsonl, .json or .parquet files, or hf:NAME of a Hugging Face dataset."""
    model: Annotated[str, option("MODEL")]
    """The model that will be trained: a folder, a Hugging Face id, or a name such as nano."""
    turns: Annotated[Literal["last", "all"], option("last|all")] = "last"
    """Train on the last assistant turn of each conversation, or on all of them."""
    bad_lines: Annotated[Literal["stop", "skip"], option("stop|skip")] = "stop"
    """What happens to a line that is no conversation or does not fit a row."""
    part: Annotated[str, option("NAME")] = "train"
    """Split of a Hugging Face dataset."""
    row: Int = 256
    """Positions of a row, as in the recipe."""
    samples: Int = 3
    """Examples to print, from the first one on."""
    config: Annotated[ConfigOptions, Group] = dataclasses.field(default_factory=ConfigOptions)
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(DataShow, argv, "mercury data show")
    at_least(0, samples=args.samples)
    from mercury_jax import hub, models
    from mercury_jax.training.data.chats import Chat
    from mercury_jax.training.data.packing import StreamSettings

    layout = models.build(hub.config_of(args.model, **args.config.given())).layout
    tokenizer = hub.tokenizer_of(args.model, **args.config.given())
    source = Chat(args.source, turns=args.turns, bad_lines=args.bad_lines, part=args.part)
    settings = StreamSettings(tokenizer, layout, args.row, (0, 0), "train")
    examples = source.examples(settings)
    record = {
        "source": args.source, "turns": args.turns, **_counts(source, settings, examples),
        "samples": [_sample(tokenizer, place, example) for place, example in examples[: args.samples]],
    }  # fmt: skip
    if args.json:
        show.emit(record)
        return 0
    for sample in record["samples"]:
        _print_sample(sample)
    print("\n".join(_lines(record)))
    return 0


def _counts(source: Chat, settings: StreamSettings, found: list[tuple[str, Example]]) -> dict[str, Any]:
    """Counts the tokens of the examples, and the positions of the rows into which they are packed."""
    from mercury_jax.training.data.pipeline import PackedIterator, RowPacker

    examples = [example for _, example in found]
    laid = [settings.layout(x.ids, x.prompt, settings.tokenizer.eos) for x in examples]
    positions = sum(len(one.tokens) for one in laid)
    stream = source.stream(found, settings)
    packers = {n: RowPacker([stream], [1.0], ROWS, settings.row, 0, n) for n in range(ROWS)}
    batches = PackedIterator(packers, [(0, [stream])], settings.row, settings.tokenizer.pad, {})
    count = min(MOST_BATCHES, -(-positions // (ROWS * settings.row)))
    padded = [
        ~(batch.ranges[..., 1] > batch.ranges[..., 0]).any(-1) for batch in itertools.islice(batches, count)
    ]
    answers = sum(len(x.ids) - x.prompt for x in examples)
    return {
        "examples": len(examples), "tokens": sum(len(x.ids) for x in examples), "trained_on": answers,
        "fillers": sum(int(one.editable.sum()) for one in laid) - answers, "positions": positions,
        "longest": max(len(one.tokens) for one in laid), "row": settings.row,
        "rows": count * ROWS, "padding": float(np.mean(padded)),
    }  # fmt: skip


def _sample(tokenizer: AnyTokenizer, place: str, example: Example) -> dict[str, Any]:
    text = lambda ids: tokenizer.decode(ids.tolist(), skip_special=False)
    before, after = np.split(example.ids, [example.prompt])
    return {"place": place, "tokens": len(example.ids), "prompt": text(before), "trained_on": text(after)}


def _print_sample(sample: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    before, after = (readable(sample[key]) for key in ("prompt", "trained_on"))
    print(f"--- {sample['place']}, {sample['tokens']:,} tokens")
    if show.terminal():
        Console(highlight=False).print(Text.assemble((before, "dim"), (after, "bold green")))
    else:
        print(f"{before}{OPEN}{after}{CLOSE}")


def _lines(record: Mapping[str, Any]) -> list[str]:
    """The counts for people."""
    share = record["trained_on"] / record["tokens"]
    return [
        f"{'examples':10} {record['examples']:,}, of {record['tokens']:,} tokens; {share:.0%} are trained on",
        f"{'positions':10} {record['positions']:,} once laid out, with {record['fillers']:,} end-of-text fillers; "
        f"the longest example takes {record['longest']:,}",
        f"{'rows':10} of {record['row']:,} positions: {record['padding']:.1%} are padding "
        f"(in the first {record['rows']:,} rows)",
    ]
