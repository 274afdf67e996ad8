"""Sources of training data: frozen values that a recipe holds, and how each of them becomes examples.

    mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))

`Text` is running text, `Chat` conversations, `Generated` the problems of `mercury_jax.tasks`. A source of your own
is a frozen dataclass with the two methods of `DataSource`; a recipe uses it as it is. Everything that cannot be read
is refused when a source is opened, by file and line, before any training.

An open source is a `Stream`: example i is a pure function of (seed, i). Of a source with N examples an epoch, i is
number i mod N of epoch i // N, in an order and with cuts drawn for that epoch; so to resume is to remember i.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mercury_jax.config import at_least, refuse
from mercury_jax.tasks import TASKS, Problem, Task, draw
from mercury_jax.tasks.task import read_json_lines, read_text
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.train.data import packing
from mercury_jax.train.data.filling import RowStream
from mercury_jax.train.data.packing import DataSplit, Example, StreamSettings
from mercury_jax.types import LM, LaidOutDocument, Layout, Params

Seed = tuple[int, ...]
Messages = list[dict[str, str]]  # of a conversation: {"role", "content"}
Document = tuple[str, str]  # (where it was read, for messages: a path or path:line; its text)


class Stream(NamedTuple):
    """The examples of one source.

    Attributes:
        at: at(index) lays out the example of any index >= 0.
        size: Examples of an epoch, 0 if they never repeat.
        identity: Tells sources apart that are equal in all else, such as folders of the same name.
        in_layout: in_layout(layout) lays the same examples out in another way, for runs whose block changes; None: the
            source is opened once for each layout.
    """

    at: Callable[[int], LaidOutDocument]
    size: int
    identity: str = ""
    in_layout: Callable[[Layout], Stream] | None = None


@runtime_checkable
class DataSource(Protocol):
    """What a mixture needs of a source. Implementations are frozen dataclasses of plain values."""

    def open(self, settings: StreamSettings) -> Stream | RowStream | None:
        """Reads, tokenises and checks the source; None if it has nothing on the test side.

        A `RowStream` fills whole rows by itself, which no other source's documents share.
        """
        ...

    def texts(self, seed: Seed) -> Iterator[str]:
        """Yields texts of the train side in random order, from which a tokenizer is trained."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Data that are made with the model, such as its own answers: batches of their own kind instead of documents."""

    def batches(self, config: Any, lm: LM, /) -> Any:
        """Opens the data.

        Args:
            config: The recipe.
            lm: The model, with the parameters that the run starts from; without any where it starts from none.

        Returns:
            `loop.Batches`; those that are `loop.PolicyData` receive the current parameters.
        """
        ...

    def evaluator(self, config: Any, lm: LM, /) -> Callable[[Params], Mapping[str, float]]:
        """Makes the run's evaluation.

        Args:
            config: The recipe.
            lm: The model without parameters.

        Returns:
            params -> metrics by name.
        """
        ...


@dataclass(frozen=True)
class Mixture:
    """Sources with weights: the share of the training positions that each gets, up to a common factor."""

    sources: tuple[tuple[DataSource, float], ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise refuse("sources", self.sources, "at least one (source, weight)")
        for source, weight in self.sources:
            if not isinstance(source, DataSource) or not dataclasses.is_dataclass(source):
                raise refuse("source", source, "what text, jsonl, chat, hf, stdlib or generated returns")
            if not 0 < weight < float("inf"):
                raise refuse("weight", weight, "a number above 0")


def mixture(*sources: tuple[DataSource, float]) -> Mixture:
    """Mixes (source, weight) pairs: `mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))`."""
    return Mixture(tuple((source, float(weight)) for source, weight in sources))


def _check_shares(**fields: float) -> None:
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise refuse(name, value, "a share, 0 to 1")


# --- running text


@dataclass(frozen=True, kw_only=True)
class Text:
    """Documents of running text, cut into pieces of at most `chunk` tokens, elsewhere in every epoch.

    Attributes:
        kind: How `where` is read; see `text`, `jsonl`, `hf` and `stdlib`.
        where: A glob, or the name of a Hugging Face dataset.
        field: The key (jsonl) or column (hf) of the text.
        part: The split of a Hugging Face dataset.
        chunk: Most tokens of a piece; None for the longest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.
        held_out: Share of the documents, by a hash of their text, that training never sees (stdlib: `stdlib_files`).
    """

    kind: Literal["text", "jsonl", "hf", "stdlib"]
    where: str = ""
    field: str = "text"
    part: str = "train"
    chunk: int | None = None
    infill: float = 0.3
    held_out: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(infill=self.infill, held_out=self.held_out)
        if self.chunk is not None:
            at_least(2, chunk=self.chunk)

    def documents(self, split: DataSplit) -> list[Document]:
        """Reads the texts of one side, in a fixed order; empty ones are left out.

        Raises:
            ValueError: Nothing can be read, or a line of JSONL is broken. The test side may be empty.
        """
        if self.kind == "stdlib":
            return stdlib_files(split)
        if self.kind == "text":
            found = [(path, read_text(path, "glob")) for path in find_paths(self.where)]
        else:
            if self.kind == "jsonl":
                lines = (line for path in find_paths(self.where) for line in read_json_lines(path, "glob"))
                values = ((place, record.get(self.field)) for place, record in lines)
            else:
                try:
                    import datasets  # pyright: ignore[reportMissingImports]
                except ImportError:
                    allowed = "any, once the package `datasets` is installed"
                    raise refuse("source", f"hf({self.where!r})", allowed) from None
                table = datasets.load_dataset(self.where, split=self.part)
                if self.field not in table.column_names:
                    raise refuse("field", self.field, ", ".join(table.column_names))
                values = ((f"{self.where}:{i}", value) for i, value in enumerate(table[self.field]))
            found = [(place, read_string(f"{place}: {self.field}", value)) for place, value in values]
        found = [(place, text) for place, text in found if text]
        sides = _sides(self.where, self.held_out, [text for _, text in found])
        return [document for document, side in zip(found, sides) if side == split]

    def open(self, settings: StreamSettings) -> Stream | None:
        """Implements `DataSource.open`."""
        chunk = packing.longest_piece(settings, self.chunk)
        documents = self.documents(settings.split)
        if not documents:
            return None
        tok, seed = settings.tokenizer, settings.seed
        # All tokens stay in memory, 4 bytes each: epochs can then cut anywhere.
        encoded = [np.array([*tok.encode(text), tok.eos], np.int32) for _, text in documents]
        tokens, lengths = np.concatenate(encoded), np.array([len(ids) for ids in encoded])
        epoch = functools.lru_cache(2)(
            lambda number: packing.cut_pieces(lengths, chunk, np.random.default_rng((*seed, 0, number)))
        )
        # Every epoch has as many pieces; two epochs stay in memory, as rows of a batch may be in different ones.
        size = len(epoch(0).start)

        def in_layout(layout: Layout) -> Stream:
            here, block = settings._replace(layout=layout), packing.block_size(layout)

            def at(index: int) -> LaidOutDocument:
                # A generator of its own for each example: what it draws does not depend on the order of calls.
                rng = np.random.default_rng((*seed, 1, index))
                pieces, k = epoch(index // size), index % size
                ids = tokens[pieces.start[k] : pieces.stop[k]]
                # Any length of the prompt, so that canvases start anywhere in a line, not only at multiples of a block.
                prompt = int(rng.integers(min(block, len(ids))))
                laid = packing.lay_out_piece(here, Example(ids, prompt, bool(pieces.final[k])), self.where)
                # The test side is never infilled, so that its loss is a bound on whole canvases.
                infill = settings.split == "train" and rng.random() < self.infill
                return packing.keep_spans(laid, rng) if infill else laid

            return Stream(at, size, in_layout=in_layout)

        return in_layout(settings.layout)

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`."""
        return _shuffled_parts([text for _, text in self.documents("train")], seed)


def text(glob: str, *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0) -> Text:
    """Text files: every UTF-8 file that the glob finds is one document.

    Args:
        glob: Paths; `**` goes into folders.
        chunk: See `Text`, as for the other arguments.
        infill: Share of the pieces with one editable span in each canvas.
        held_out: Share of the documents that training never sees.

    Returns:
        The source.
    """
    return Text(kind="text", where=glob, chunk=chunk, infill=infill, held_out=held_out)


def jsonl(
    glob: str, field: str = "text", *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0
) -> Text:
    """JSONL files: every line is an object whose `field` is one document.

    Args:
        glob: Paths; `**` goes into folders.
        field: Key of the text.
        chunk: See `Text`, as for the other arguments.
        infill: Share of the pieces with one editable span in each canvas.
        held_out: Share of the documents that training never sees.

    Returns:
        The source.
    """
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
    """A Hugging Face dataset; needs the package `datasets`.

    Args:
        name: Name of the dataset.
        part: The split of it to read.
        field: Column of the text.
        chunk: See `Text`, as for the other arguments.
        infill: Share of the pieces with one editable span in each canvas.
        held_out: Share of the documents that training never sees.

    Returns:
        The source.
    """
    return Text(kind="hf", where=name, part=part, field=field, chunk=chunk, infill=infill, held_out=held_out)


def stdlib(*, chunk: int | None = None, infill: float = 0.3) -> Text:
    """The built-in corpus `python-stdlib`: the source of the running interpreter's standard library.

    Every machine that runs us has it, so that recipes and tests that use it need no download.

    Args:
        chunk: Most tokens of a piece; None for the longest that fits a row.
        infill: Share of the pieces with one editable span in each canvas.

    Returns:
        The source.
    """
    return Text(kind="stdlib", where="python-stdlib", chunk=chunk, infill=infill)


# --- conversations


@dataclass(frozen=True)
class Chat:
    """Conversations: lines `{"messages": [{"role", "content"}, ...]}`, of which the last assistant turn is learnt.

    A recipe writes `data.chat("chats/*.jsonl", held_out=0.1)`.

    Attributes:
        kind: Always "chat".
        where: A glob; `**` goes into folders.
        held_out: Share of the conversations, by a hash of their text, that training never sees.
    """

    kind: Literal["chat"] = field(default="chat", init=False)
    where: str
    _: KW_ONLY
    held_out: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(held_out=self.held_out)

    def conversations(self, split: DataSplit) -> list[tuple[str, Messages]]:
        """Reads the conversations of one side as (place, messages); each ends in the assistant turn that is learnt.

        Raises:
            ValueError: A line is no such conversation; names the file and the line.
        """
        lines = (line for path in find_paths(self.where) for line in read_json_lines(path, "glob"))
        found = [(place, read_turns(place, record)) for place, record in lines]
        sides = _sides(self.where, self.held_out, [json.dumps(messages) for _, messages in found])
        return [conversation for conversation, side in zip(found, sides) if side == split]

    def open(self, settings: StreamSettings) -> Stream | None:
        """Implements `DataSource.open`.

        Raises:
            ValueError: A conversation cannot be rendered or does not fit a row; names the file and the line.
        """
        examples = [
            (encode_turns(settings.tokenizer, place, messages), place)
            for place, messages in self.conversations(settings.split)
        ]
        n = len(examples)
        order = functools.lru_cache(2)(
            lambda epoch: np.random.default_rng((*settings.seed, epoch)).permutation(n)
        )

        def in_layout(layout: Layout) -> Stream:
            here = settings._replace(layout=layout)
            laid = [packing.lay_out(here, *example) for example in examples]
            return Stream(lambda i: laid[order(i // n)[i % n]], n, in_layout=in_layout)

        return in_layout(settings.layout) if examples else None

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`."""
        found = self.conversations("train")
        return _shuffled_parts(["\n".join(m["content"] for m in messages) for _, messages in found], seed)


chat = Chat


# --- problems with checkable answers


@dataclass(frozen=True)
class Generated:
    """Problems of a task in `mercury_jax.tasks`, drawn without end, as chats of one turn.

    A recipe writes `data.generated("sudoku4", thinking=True)`. Training draws only from the train side of the task.

    Attributes:
        kind: Always "generated".
        name: Name of the task.
        thinking: The answer is preceded by its derivation, if the task has one.
        prefill: Share of the training problems whose prompt already opens the thinking or holds all of it, as decoding
            with an effort begins an answer; a problem without a derivation then has an empty one.
        distinct: Problems that are drawn before they repeat; None for no limit.
    """

    kind: Literal["generated"] = field(default="generated", init=False)
    name: str
    _: KW_ONLY
    thinking: bool = False
    prefill: float = 0.0
    distinct: int | None = None

    def __post_init__(self) -> None:
        _check_shares(prefill=self.prefill)
        if self.prefill and not self.thinking:
            raise refuse("prefill", self.prefill, "0 without thinking=True")
        if self.distinct is not None:
            at_least(1, distinct=self.distinct)

    @property
    def task(self) -> Task:
        """The task; ValueError if there is none of this name."""
        if self.name not in TASKS:
            raise refuse("generated", self.name, ", ".join(sorted(TASKS)))
        return TASKS[self.name]

    def problem(self, index: int, seed: Seed, split: DataSplit) -> Problem:
        """Draws one problem.

        Args:
            index: Its number.
            seed: Equal seeds give equal problems.
            split: "train" or "test".

        Returns:
            The problem.
        """
        if self.distinct is not None and split == "train":
            index %= self.distinct
        return draw(self.task, np.random.default_rng((*seed, index)), split)

    def example(self, tokenizer: AnyTokenizer, index: int, seed: Seed, split: DataSplit) -> Example:
        """Encodes one problem as a chat.

        Args:
            tokenizer: Writes the turns.
            index: Number of the problem.
            seed: Decides problems and prefills.
            split: "train" or "test".

        Returns:
            Its ids; the question is the prompt, and where it is prefilled the start of the answer too.

        Raises:
            ValueError: It is prefilled and the tokenizer has no tokens around thinking.
        """
        problem = self.problem(index, seed, split)
        thinking = problem.thinking if self.thinking else None
        rng = np.random.default_rng((*seed, 2, index))
        # Never on the test side, so that its losses stay comparable.
        prefill = split == "train" and rng.random() < self.prefill
        if prefill and thinking is None:
            thinking = ""
        prompt, response = tokenizer.example(problem.input, problem.output, thinking)
        given = len(prompt)
        if prefill:
            marks = tokenizer.thinking
            if marks is None:
                raise refuse("prefill", self.prefill, "0: the tokenizer has no tokens around thinking")
            opening = rng.random() < 0.5  # the prompt opens the thinking, or holds all of it
            given += len(marks.opening) if opening else response.index(marks.close) + 1
        return Example(np.array(prompt + response, np.int32), given, True)

    def open(self, settings: StreamSettings) -> Stream:
        """Implements `DataSource.open`.

        Raises:
            ValueError: There is no such task, a row is too short for its problems, or the tokenizer has no thinking.
        """

        def in_layout(layout: Layout) -> Stream:
            here = settings._replace(layout=layout)

            def at(index: int) -> LaidOutDocument:
                example = self.example(settings.tokenizer, index, settings.seed, settings.split)
                return packing.lay_out(here, example, f"a problem of {self.name}")

            at(0)  # a row that is too short for this task is refused now, not hours later
            return Stream(at, 0, in_layout=in_layout)

        return in_layout(settings.layout)

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`: prompt, thinking and answer, a line each, without end."""
        index = 0
        while True:
            problem = self.problem(index, seed, "train")
            thinking = [problem.thinking] if self.thinking and problem.thinking else []
            yield "\n".join([problem.input, *thinking, problem.output])
            index += 1


generated = Generated


# --- reading files


def side_of(text: str, held_out: float) -> DataSplit:
    """Chooses the side of a document by a hash of its text, so that equal documents stay together.

    Args:
        text: The whole text; of a conversation its turns as JSON.
        held_out: Share of the test side.

    Returns:
        "train" or "test".
    """
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return "test" if int.from_bytes(digest) / 2**48 < held_out else "train"


def _sides(where: str, held_out: float, texts: list[str]) -> list[DataSplit]:
    """The side of each text."""
    if not texts:
        raise refuse("glob", where, "files with at least one document; these are empty")
    sides: list[DataSplit] = [side_of(text, held_out) for text in texts]
    if "train" not in sides:
        raise refuse("held_out", held_out, f"a share that leaves some of {where!r} to train on")
    return sides


def find_paths(pattern: str) -> list[str]:
    """The files that a glob finds, sorted; `**` finds folders too, which are left out.

    Raises:
        ValueError: It finds none.
    """
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise refuse("glob", pattern, "a glob that finds at least one file")
    return paths


def read_turns(place: str, record: Mapping[str, object]) -> Messages:
    """Reads a conversation up to the last assistant turn, which is learnt.

    Args:
        place: Where the record was read, for messages.
        record: With `messages`, a list of objects with role and content.

    Returns:
        Role and content of each turn; what follows the last assistant turn cannot be learnt and is left out.

    Raises:
        ValueError: It is no conversation, or has no assistant turn that follows another one.
    """
    given = record.get("messages")
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        raise refuse(f"{place}: messages", given, "a list of objects with role and content")
    turns = [{k: read_string(f"{place}: {k}", m.get(k)) for k in ("role", "content")} for m in given]
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if len(turns) < 2:
        raise refuse(f"{place}: messages", given, "an assistant turn that follows another turn")
    return turns


def encode_turns(tokenizer: AnyTokenizer, place: str, turns: Messages) -> Example:
    """Encodes a conversation whose last turn is learnt.

    Args:
        tokenizer: Writes the turns.
        place: Where they were read, for messages.
        turns: Of `read_turns`.

    Returns:
        Ids, with all turns but the last one as the prompt.

    Raises:
        ValueError: The tokenizer cannot write a turn.
    """
    try:
        prompt = tokenizer.render(turns[:-1])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    ids = [*prompt, *tokenizer.encode(turns[-1]["content"]), end_of_answer(tokenizer)]
    return Example(np.array(ids, np.int32), len(prompt), True)


def end_of_answer(tokenizer: AnyTokenizer) -> int:
    """The id that ends an answer to a chat: the template's where the decoder ends there too, else the end of text."""
    ends = tokenizer.end_turn in (*tokenizer.ends, tokenizer.pad)
    return tokenizer.end_turn if ends and tokenizer.end_turn is not None else tokenizer.eos


def read_string(name: str, value: object) -> str:
    """Checks that a value is a text that UTF-8 can write: JSON may spell half of a surrogate pair.

    Args:
        name: What messages call it.
        value: The value.

    Returns:
        The text.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(name, value[:40], "valid Unicode, without lone surrogates") from None
    return value


def _shuffled_parts(texts: list[str], seed: Seed) -> Iterator[str]:
    """Parts of at most 8,000 characters in random order, so that a small budget sees parts of many files."""
    parts = [text[i : i + 8_000] for text in texts for i in range(0, len(text), 8_000)]
    return (parts[i] for i in np.random.default_rng(seed).permutation(len(parts)))


# Installed packages are not the library; its tests are twice its size; the rest are tables made by machine.
_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "encodings", "pydoc_data", "lib-dynload", "__phello__",
}  # fmt: skip
_TABLES = {"html/entities.py", "sre_constants.py", "token.py", "keyword.py"}


@functools.cache
def stdlib_files(split: DataSplit) -> list[Document]:
    """Reads one side of the corpus `python-stdlib`.

    A hash of a file's path decides its side, in every process and every Python version: 1 in 20 is on the test side.

    Args:
        split: "train" or "test".

    Returns:
        (relative path, text) of each file, in the order of the paths.
    """
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[Document]()
    for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
        *folders, name = path.split("/")
        built = name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
        digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
        side = "train" if int.from_bytes(digest, "big") % 20 else "test"
        if built or _LEFT_OUT.intersection(folders) or path in _TABLES or side != split:
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few files show other encodings
        if text:
            found.append((path, text))
    return found
