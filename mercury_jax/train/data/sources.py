"""What to train on, as plain frozen values that a recipe can hold and JSON can write.

    mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))

A source says where its documents come from; `read` opens it, `streams` cuts it into examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mercury_jax.config import at_least, refuse

Split = Literal["train", "test"]
Kind = Literal["text", "jsonl", "hf", "stdlib"]


@dataclass(frozen=True, kw_only=True)
class Text:
    """Documents of running text, cut into chunks of at most `chunk` tokens, elsewhere in every epoch.

    where: a glob, or the name of a Hugging Face dataset. chunk: None takes the longest that fits a row.
    infill: share of the chunks in which only a span of each canvas is editable. held_out: share of the
    documents, by a hash of their text, that training never sees (stdlib: by its own rule, file by file).
    """

    kind: Kind
    where: str = ""
    field: str = "text"
    part: str = "train"  # of a Hugging Face dataset
    chunk: int | None = None
    infill: float = 0.3
    held_out: float = 0.0

    def __post_init__(self) -> None:
        _share(infill=self.infill, held_out=self.held_out)
        if self.chunk is not None:
            at_least(2, chunk=self.chunk)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Lines `{"messages": [{"role", "content"}, ...]}`: the last assistant turn is learnt."""

    kind: Literal["chat"] = "chat"
    where: str
    held_out: float = 0.0

    def __post_init__(self) -> None:
        _share(held_out=self.held_out)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Problems of a generator in `mercury_jax.train.generators`, drawn without end, as chats of one turn.

    thinking: the answer is preceded by its derivation, where the generator gives one. prefill: share of the training
    problems whose prompt already opens the thinking or holds all of it, as decoding with an effort begins an
    answer; a problem without a derivation then has an empty one. distinct: how many problems to draw before they
    repeat (None: no limit).
    """

    kind: Literal["generated"] = "generated"
    name: str
    thinking: bool = False
    prefill: float = 0.0
    distinct: int | None = None

    def __post_init__(self) -> None:
        _share(prefill=self.prefill)
        if self.prefill and not self.thinking:
            raise refuse("prefill", self.prefill, "0 without thinking=True")
        if self.distinct is not None:
            at_least(1, distinct=self.distinct)


Source = Text | Chat | Generated


@dataclass(frozen=True)
class Mixture:
    """Sources with weights: the share of training positions that each gets, up to a common factor."""

    sources: tuple[tuple[Source, float], ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise refuse("sources", self.sources, "at least one (source, weight)")
        for source, weight in self.sources:
            if not isinstance(source, get_args(Source)):
                raise refuse("source", source, "what text, jsonl, chat, hf, stdlib or generated returns")
            if not 0 < weight < float("inf"):
                raise refuse("weight", weight, "a number above 0")


def mixture(*sources: tuple[Source, float]) -> Mixture:
    """`mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))`."""
    return Mixture(tuple((source, float(weight)) for source, weight in sources))


def text(glob: str, *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0) -> Text:
    """Every UTF-8 file that the glob finds (`**` goes into folders) is one document."""
    return Text(kind="text", where=glob, chunk=chunk, infill=infill, held_out=held_out)


def jsonl(
    glob: str, field: str = "text", *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0
) -> Text:
    """Every line of the files is an object whose `field` is one document."""
    return Text(kind="jsonl", where=glob, field=field, chunk=chunk, infill=infill, held_out=held_out)


def hf(
    name: str,
    part: str = "train",
    field: str = "text",
    *,
    chunk: int | None = None,
    infill: float = 0.3,
    held_out: float = 0.0,
) -> Text:
    """The column `field` of one split of a Hugging Face dataset, where `datasets` is installed."""
    cut = {"chunk": chunk, "infill": infill, "held_out": held_out}
    return Text(kind="hf", where=name, part=part, field=field, **cut)


def stdlib(*, chunk: int | None = None, infill: float = 0.3) -> Text:
    """The built-in corpus `python-stdlib`: the source of the running interpreter's standard library."""
    return Text(kind="stdlib", where="python-stdlib", chunk=chunk, infill=infill)


def chat(glob: str, *, held_out: float = 0.0) -> Chat:
    """Conversations, one on each line of the files."""
    return Chat(where=glob, held_out=held_out)


def generated(
    name: str, *, thinking: bool = False, prefill: float = 0.0, distinct: int | None = None
) -> Generated:
    """Problems with verifiable answers; training draws only from the generator's train side. See `Generated`."""
    return Generated(name=name, thinking=thinking, prefill=prefill, distinct=distinct)


def _share(**fields: float) -> None:
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise refuse(name, value, "a share, 0 to 1")
