"""`Chat`, the source of conversations: files or a dataset, held in memory as ids."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np

from mercury_jax.config import Share, check_fields, refuse_if
from mercury_jax.tasks.task import parse_json_line
from mercury_jax.training.data import packing
from mercury_jax.training.data.conversations import (
    BadLines,
    Conversation,
    Turns,
    encode_conversation,
    read_conversation,
)
from mercury_jax.training.data.documents import Files, HubStream, Record
from mercury_jax.training.data.packing import DataSplit, Example, StreamSettings
from mercury_jax.training.data.sources import Seed, Stream, identity_of, shuffled_parts, sides_of, stream_of
from mercury_jax.types import LaidOutDocument

HUB = "hf:"  # begins the name of a dataset


@dataclass(frozen=True)
class Chat:
    """Conversations, in any of the forms of `conversations`; the loss is on the last assistant turn, or on each.

    In a recipe: `data.chat("chats/*.jsonl", held_out=0.1)`.

    Attributes:
        kind: Always "chat".
        where: A glob of files .jsonl, .json or .parquet; `**` descends into folders. Or hf:NAME[:CONFIG] of a Hugging
            Face dataset, which is streamed, or hf:FOLDER of one that was saved to the disk.
        turns: "last": train on the last assistant turn of a conversation; "all": on each, an example for each of them.
        held_out: Share of the conversations that are held out, selected by a hash of their text; at least one if the
            share is above 0.
        bad_lines: What happens to a line that is no conversation (`content: null` without a tool call, for example) or
            does not fit a row: "stop" with an error that names it, or "skip" it and print how many were skipped.
        part: Split of a Hugging Face dataset.
    """

    kind: Literal["chat"] = field(default="chat", init=False)
    where: str
    _: KW_ONLY
    turns: Turns = "last"
    held_out: Share = 0.0
    bad_lines: BadLines = "stop"
    part: str = "train"

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_if(self, (self.part != "train" and not self.where.startswith(HUB), "part", "train for files"))

    @property
    def reader(self) -> Files | HubStream:
        """Reads the records."""
        if self.where.startswith(HUB):
            name = self.where.removeprefix(HUB)
            return HubStream(name, self.part, chats=True, turns=self.turns, bad_lines=self.bad_lines)
        return Files((self.where,), chats=True, turns=self.turns, bad_lines=self.bad_lines)

    def conversations(self, split: DataSplit) -> list[tuple[str, Conversation]]:
        """Reads the conversations of one side of the split.

        Args:
            split: "train" or "test".

        Returns:
            Pairs (place, conversation). Each conversation ends with the assistant turn that is trained on.

        Raises:
            ValueError: A line is not such a conversation. The message names the file and the line.
        """

        def read(record: Record) -> Conversation:
            assert isinstance(record.value, bytes)
            return read_conversation(record.place, parse_json_line(record.place, record.value))

        found = self._good([(record.place, read, record) for record in self.reader.records(self.held_out)])
        sides = sides_of(self.where, self.held_out, [conversation.text for _, conversation in found])
        return [one for one, side in zip(found, sides) if side == split]

    def _good(self, calls: list[tuple[str, Callable[..., Any], Any]]) -> list[tuple[str, Any]]:
        """Calls functions on records, (place, function, argument); errors stop, or the records are skipped."""
        found, errors = list[tuple[str, Any]](), list[ValueError]()
        for place, function, argument in calls:
            try:
                found.append((place, function(argument)))
            except ValueError as error:
                if self.bad_lines == "stop":
                    raise
                errors.append(error)
        if errors:
            told = f"{self.where}: skipped {len(errors)} of {len(calls)} lines; the first: {errors[0]}"
            print(told, file=sys.stderr)
        return found

    def examples(self, settings: StreamSettings) -> list[tuple[str, Example]]:
        """Encodes the conversations of one side.

        Args:
            settings: Tokenizer, split, and the layouts and the row that an example must fit.

        Returns:
            Pairs (place, example), one for each assistant turn that is trained on.

        Raises:
            ValueError: A conversation cannot be rendered or does not fit a row. The message names the file and line.
        """

        def encoded(one: tuple[str, Conversation]) -> list[Example]:
            place, conversation = one
            examples = encode_conversation(settings.tokenizer, place, conversation, self.turns)
            for example in examples:
                for layout in settings.layouts or (settings.layout,):
                    # refuses one that does not fit
                    packing.lay_out(settings._replace(layout=layout), example, place)
            return examples

        found = self._good([(one[0], encoded, one) for one in self.conversations(settings.split)])
        return [(place, example) for place, examples in found for example in examples]

    def open(self, settings: StreamSettings) -> Stream | None:
        """Implements `DataSource.open`.

        Raises:
            ValueError: A conversation cannot be rendered or does not fit a row. The message names the file and line.
        """
        found = self.examples(settings)
        return self.stream(found, settings) if found else None

    def stream(self, found: list[tuple[str, Example]], settings: StreamSettings) -> Stream:
        """Makes the stream of examples that `examples` returned, in a new order for each epoch."""
        n = len(found)
        order = functools.lru_cache(2)(
            lambda epoch: np.random.default_rng((*settings.seed, epoch)).permutation(n)
        )

        def at(here: StreamSettings, index: int) -> LaidOutDocument:
            place, example = found[order(index // n)[index % n]]
            return packing.lay_out(here, packing.fill_up(here, example, index), place)

        return stream_of(at, settings, n, identity_of([x.ids for _, x in found]))

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`."""
        found = self.conversations("train")
        return shuffled_parts(["\n".join(turn["content"] for turn in one.messages) for _, one in found], seed)


chat = Chat
