"""Data sources: frozen values that a recipe holds, and how each of them becomes examples.

    mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))

`Text` is running text, `Generated` the problems of `mercury_jax.tasks`, `chats.Chat` conversations. To add a source,
write a frozen dataclass with the two methods of `DataSource` and use it in a recipe. A source reads and checks its
files when it is opened; an error names the file and the line, before any training.

An open source is a `Stream`, in which example i is a pure function of (seed, i). If an epoch has N examples, example i
is number i mod N of epoch i // N, in an order and with cuts drawn for that epoch. To resume, only i must be saved.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mercury_jax.config import AtLeast, PositiveInt, Share, check_fields, refuse, refuse_if
from mercury_jax.tasks import Problem, Task, draw, find
from mercury_jax.tasks.task import read_json_lines, read_text
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.training.data import packing
from mercury_jax.training.data.conversations import read_string
from mercury_jax.training.data.filling import RowStream
from mercury_jax.training.data.packing import DataSplit, Example, StreamSettings
from mercury_jax.types import LM, LaidOutDocument, Layout, Params

Chunk: TypeAlias = Annotated[int, AtLeast(2)]  # largest number of tokens of a piece of text
Seed = tuple[int, ...]
Document = tuple[str, str]  # (path or path:line for error messages, text)


class Stream(NamedTuple):
    """The examples of an open source.

    Attributes:
        at: at(index) -> the laid-out example of any index >= 0.
        size: Number of examples of an epoch; 0 if examples never repeat.
        identity: Digest of the content, for sources whose fields do not determine it (a folder may change).
        in_layout: in_layout(layout) -> a stream of the same examples in another layout, for runs whose block changes.
            None: the source is opened once for each layout.
    """

    at: Callable[[int], LaidOutDocument]
    size: int
    identity: str = ""
    in_layout: Callable[[Layout], Stream] | None = None


def stream_of(
    at: Callable[[StreamSettings, int], LaidOutDocument],
    settings: StreamSettings,
    size: int,
    identity: str = "",
) -> Stream:
    """Makes the stream of at(settings, index), in the layout of the settings or in another one."""
    in_layout = lambda layout: stream_of(at, settings._replace(layout=layout), size, identity)
    return Stream(functools.partial(at, settings), size, identity, in_layout)


@runtime_checkable
class DataSource(Protocol):
    """A source of a mixture. Implementations are frozen dataclasses of plain values."""

    def open(self, settings: StreamSettings) -> Stream | RowStream | None:
        """Reads, tokenises and checks the source.

        Args:
            settings: Tokenizer, layout, length of a row, seed, and the side of the split.

        Returns:
            A `Stream` of documents; or a `RowStream`, which fills whole rows without documents of other sources. None
            if the source has nothing on this side of the split.
        """
        ...

    def texts(self, seed: Seed) -> Iterator[str]:
        """Samples training texts, on which a tokenizer is trained.

        Args:
            seed: Decides the order.

        Returns:
            An iterator of texts in random order; it may be endless.
        """
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Data that need the model, such as its own answers: a source of batches instead of documents."""

    def batches(self, config: Any, lm: LM, /) -> Any:
        """Opens the data.

        Args:
            config: The recipe, a `TrainConfig`.
            lm: The model with the initial parameters of the run; without parameters if the run has no `init`.

        Returns:
            `loop.Batches`. If they also implement `loop.PolicyData`, they receive the current parameters.
        """
        ...

    def evaluator(self, config: Any, lm: LM, /) -> Callable[[Params], Mapping[str, float]]:
        """Makes the run's evaluation.

        Args:
            config: The recipe.
            lm: The model without parameters.

        Returns:
            A function of the parameters that returns metrics by name.
        """
        ...


@dataclass(frozen=True)
class Mixture:
    """Sources with weights. A weight is the share of the training positions of its source, up to a common factor."""

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
    """Mixes sources: `mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))`.

    Args:
        *sources: Pairs (source, weight). Weights are above 0 and need not sum to 1.

    Returns:
        The mixture.

    Raises:
        ValueError: There is no pair, or a pair is not a source and a positive number.
    """
    return Mixture(tuple((source, float(weight)) for source, weight in sources))


# --- running text


@dataclass(frozen=True, kw_only=True)
class Text:
    """Documents of running text, cut into pieces of at most `chunk` tokens, at different places in each epoch.

    Attributes:
        kind: How `where` is read; see `text`, `jsonl`, `hf` and `stdlib`.
        where: A glob, or the name of a Hugging Face dataset.
        field: The key (jsonl) or column (hf) of the text.
        part: The split of a Hugging Face dataset.
        chunk: Largest number of tokens of a piece; None for the largest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.
        held_out: Share of the documents that are held out, selected by a hash of their text, at least one if the
            share is above 0 (stdlib: `stdlib_files`).
    """

    kind: Literal["text", "jsonl", "hf", "stdlib"]
    where: str = ""
    field: str = "text"
    part: str = "train"
    chunk: Chunk | None = None
    infill: Share = 0.3
    held_out: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def documents(self, split: DataSplit) -> list[Document]:
        """Reads the texts of one side of the split; empty texts are left out.

        Args:
            split: "train" or "test".

        Returns:
            Pairs (place, text) in a fixed order. The test side may be empty.

        Raises:
            ValueError: Nothing can be read, or a line of JSONL is malformed.
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
        sides = sides_of(self.where, self.held_out, [text for _, text in found])
        return [document for document, side in zip(found, sides) if side == split]

    def open(self, settings: StreamSettings) -> Stream | None:
        """Implements `DataSource.open`."""
        chunk = packing.longest_piece(settings, self.chunk)
        documents = self.documents(settings.split)
        if not documents:
            return None
        tok, seed = settings.tokenizer, settings.seed
        # All tokens stay in memory as int32, so that each epoch can cut anywhere. `Shards` is for larger corpora.
        encoded = [np.array([*tok.encode(text), tok.eos], np.int32) for _, text in documents]
        tokens, lengths = np.concatenate(encoded), np.array([len(ids) for ids in encoded])
        epoch = functools.lru_cache(2)(
            lambda number: packing.cut_pieces(lengths, chunk, np.random.default_rng((*seed, 0, number)))
        )
        # All epochs have the same number of pieces. The cuts of two epochs are cached, because the rows of a batch may
        # be in different epochs.
        size = len(epoch(0).start)

        def at(here: StreamSettings, index: int) -> LaidOutDocument:
            # Each example has its own random generator, so it does not depend on the order of calls.
            rng = np.random.default_rng((*seed, 1, index))
            pieces, k = epoch(index // size), index % size
            ids = tokens[pieces.start[k] : pieces.stop[k]]
            # A prompt of random length below a block: canvases then start anywhere in a text, not only at multiples of
            # the block.
            prompt = int(rng.integers(min(packing.block_size(here.layout), len(ids))))
            piece = packing.fill_up(here, Example(ids, prompt, bool(pieces.final[k])), index)
            laid = packing.lay_out_piece(here, piece, self.where)
            # No infilling on the test side, so that its loss is a bound for whole canvases.
            infill = here.split == "train" and rng.random() < self.infill
            return packing.keep_spans(laid, rng) if infill else laid

        return stream_of(at, settings, size, identity_of(encoded))

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`."""
        return shuffled_parts([text for _, text in self.documents("train")], seed)


def text(glob: str, *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0) -> Text:
    """Text files: each UTF-8 file that the glob matches is one document.

    Args:
        glob: Glob of paths; `**` descends into folders.
        chunk: Largest number of tokens of a piece; None for the largest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.
        held_out: Share of the documents that are held out.

    Returns:
        The source.
    """
    return Text(kind="text", where=glob, chunk=chunk, infill=infill, held_out=held_out)


def jsonl(
    glob: str, field: str = "text", *, chunk: int | None = None, infill: float = 0.3, held_out: float = 0.0
) -> Text:
    """JSONL files: each line is an object whose `field` is one document.

    Args:
        glob: Glob of paths; `**` descends into folders.
        field: Key of the text.
        chunk: Largest number of tokens of a piece; None for the largest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.
        held_out: Share of the documents that are held out.

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
        part: Split of the dataset.
        field: Column of the text.
        chunk: Largest number of tokens of a piece; None for the largest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.
        held_out: Share of the documents that are held out.

    Returns:
        The source.
    """
    return Text(kind="hf", where=name, part=part, field=field, chunk=chunk, infill=infill, held_out=held_out)


def stdlib(*, chunk: int | None = None, infill: float = 0.3) -> Text:
    """The built-in corpus `python-stdlib`: the source code of the running interpreter's standard library.

    It comes with every Python installation, so recipes and tests that use it need no download.

    Args:
        chunk: Largest number of tokens of a piece; None for the largest that fits a row.
        infill: Share of the pieces in which only a span of each canvas is editable.

    Returns:
        The source.
    """
    return Text(kind="stdlib", where="python-stdlib", chunk=chunk, infill=infill)


# --- problems with checkable answers


@dataclass(frozen=True)
class Generated:
    """Problems of a task in `mercury_jax.tasks`, drawn endlessly, as chats of one turn.

    In a recipe: `data.generated("sudoku4", thinking=True)`. Training draws only from the train side of the task.

    Attributes:
        kind: Always "generated".
        name: Name of the task.
        thinking: Put the derivation of the answer, if the task has one, in front of the answer as thinking.
        prefill: Share of the training problems whose prompt includes the start of the thinking or all of it. Sampling
            with `effort` starts answers in this way. A problem without a derivation then has empty thinking.
        distinct: Number of different problems, after which they repeat; None for no limit.
    """

    kind: Literal["generated"] = field(default="generated", init=False)
    name: str
    _: KW_ONLY
    thinking: bool = False
    prefill: Share = 0.0
    distinct: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        find(self.name)
        refuse_if(self, (self.prefill and not self.thinking, "prefill", "0 without thinking=True"))

    @property
    def task(self) -> Task:
        """The task.

        Raises:
            ValueError: There is no task of this name.
        """
        return find(self.name)

    def problem(self, index: int, seed: Seed, split: DataSplit) -> Problem:
        """Draws one problem.

        Args:
            index: Number of the problem.
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
            tokenizer: Renders the turns.
            index: Number of the problem.
            seed: Decides problems and prefills.
            split: "train" or "test".

        Returns:
            The ids. The prompt is the question; with prefill it includes the start of the answer.

        Raises:
            ValueError: The problem is prefilled, but the tokenizer has no tokens around thinking.
        """
        problem = self.problem(index, seed, split)
        thinking = problem.thinking if self.thinking else None
        rng = np.random.default_rng((*seed, 2, index))
        # No prefill on the test side, so that losses with and without it are comparable.
        prefill = split == "train" and rng.random() < self.prefill
        if prefill and thinking is None:
            thinking = ""
        prompt, response = tokenizer.example(problem.input, problem.output, thinking)
        given = len(prompt)
        if prefill:
            marks = tokenizer.thinking
            if marks is None:
                raise refuse("prefill", self.prefill, "0: the tokenizer has no tokens around thinking")
            opening = rng.random() < 0.5  # the prompt includes the opening token only, or all of the thinking
            given += len(marks.opening) if opening else response.index(marks.close) + 1
        return Example(np.array(prompt + response, np.int32), given, True)

    def open(self, settings: StreamSettings) -> Stream:
        """Implements `DataSource.open`.

        Raises:
            ValueError: There is no such task, a row is too short for its problems, or the tokenizer has no thinking.
        """

        def at(here: StreamSettings, index: int) -> LaidOutDocument:
            example = packing.fill_up(here, self.example(here.tokenizer, index, here.seed, here.split), index)
            return packing.lay_out(here, example, f"a problem of {self.name}")

        for layout in settings.layouts or (settings.layout,):
            # A row that is too short for this task is refused now, not hours into the training.
            at(settings._replace(layout=layout), 0)
        return stream_of(at, settings, 0)

    def texts(self, seed: Seed) -> Iterator[str]:
        """Implements `DataSource.texts`: endless texts of prompt, thinking and answer, one per line."""
        index = 0
        while True:
            problem = self.problem(index, seed, "train")
            thinking = [problem.thinking] if self.thinking and problem.thinking else []
            yield "\n".join([problem.input, *thinking, problem.output])
            index += 1


generated = Generated


# --- reading files


def identity_of(documents: list[np.ndarray]) -> str:
    """Computes a digest of the tokens of all documents, which stands for the content wherever its files are."""
    found = hashlib.blake2b(digest_size=16)
    for ids in documents:
        found.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return found.hexdigest()


def side_of(text: str, held_out: float) -> DataSplit:
    """Chooses the side of a document by a hash of its text, so that equal documents are on the same side."""
    return "test" if _place(text) < held_out else "train"


def _place(text: str) -> float:
    """The first 48 bits of the hash of a text as a number in [0, 1), which a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def sides_of(where: str, held_out: float, texts: list[str]) -> list[DataSplit]:
    """Chooses the side of each text; refuses an empty corpus and one without a text to train on."""
    if not texts:
        raise refuse("glob", where, "files with at least one document; these are empty")
    sides: list[DataSplit] = [side_of(text, held_out) for text in texts]
    if held_out and "test" not in sides:
        # A share of few documents may select none. The one that a larger share would select first is held out then.
        first, last = min(map(_place, texts)), max(map(_place, texts))
        if first == last:
            raise refuse("held_out", held_out, f"0: {where!r} holds one document, which is not divided")
        sides = ["test" if _place(text) == first else "train" for text in texts]
    if "train" not in sides:
        raise refuse("held_out", held_out, f"a share that leaves some of {where!r} to train on")
    return sides


def find_paths(pattern: str, name: str = "glob") -> list[str]:
    """Finds the files that a glob matches.

    Args:
        pattern: The glob; `**` descends into folders.
        name: Of the field, for the error.

    Returns:
        Sorted paths, without folders and without links that lead to themselves.

    Raises:
        ValueError: The glob matches no file.
    """
    found = _matches(pattern.split("/"))
    # A link that leads to itself stays a link when it is resolved; one to a file that is missing is named on reading.
    paths = [x for x in found if not os.path.isdir(x) and not os.path.islink(os.path.realpath(x))]
    if not paths:
        raise refuse(name, pattern, "a glob that finds at least one file")
    return without_links(sorted(paths))


def without_links(paths: list[str]) -> list[str]:
    """Leaves out paths of a file that another path reaches too, through a link to a folder or to the file."""
    real = {path: os.path.realpath(path) for path in paths}
    first = {real[path]: path for path in sorted(paths, key=lambda p: real[p] == os.path.abspath(p))}
    return [path for path in dict.fromkeys(paths) if first[real[path]] == path]


def _matches(parts: list[str]) -> list[str]:
    """Expands a glob, given by its components; each folder below a `**` is entered once, whatever links lead to it."""
    if "**" not in parts:
        return glob.glob("/".join(parts))
    at = parts.index("**")
    tops = [os.path.join(top, "") for top in glob.glob("/".join(parts[:at]) or "/")] if at else [""]
    found, seen = set[str](), {os.path.realpath(top or ".") for top in tops}
    while tops:
        top = tops.pop(0)
        found.update(_matches([*glob.escape(top).split("/")[:-1], *(parts[at + 1 :] or ["*"])]))
        try:
            inside = sorted(os.scandir(top or "."), key=lambda entry: (entry.is_symlink(), entry.name))
        except OSError:  # no folder, or one that may not be read: `glob` passes over it, too
            continue
        for entry in inside:
            real = os.path.realpath(entry.path)
            if os.path.isdir(entry.path) and not entry.name.startswith(".") and real not in seen:
                seen.add(real)
                tops.append(os.path.join(top, entry.name, ""))
    return list(found)


def shuffled_parts(texts: list[str], seed: Seed) -> Iterator[str]:
    """Yields parts of at most 8,000 characters in random order, so that a small budget covers many files."""
    parts = [text[i : i + 8_000] for text in texts for i in range(0, len(text), 8_000)]
    return (parts[i] for i in np.random.default_rng(seed).permutation(len(parts)))


# Left out of the corpus: installed packages, the library's tests (twice its size), and machine-made tables.
_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "encodings", "pydoc_data", "lib-dynload", "__phello__",
}  # fmt: skip
_TABLES = {"html/entities.py", "sre_constants.py", "token.py", "keyword.py"}


@functools.cache
def stdlib_files(split: DataSplit) -> list[Document]:
    """Reads one side of the corpus `python-stdlib`.

    The hash of a file's path decides its side, so the sides are the same in every process and Python version. One file
    in 20 is on the test side.
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
            continue  # a few files demonstrate other encodings
        if text:
            found.append((path, text))
    return found
