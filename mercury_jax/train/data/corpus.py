"""A corpus that was tokenised once: the files that `mercury data pack` writes, and the source that trains on them.

    FOLDER/manifest.json           what the folder holds; written last
    FOLDER/tokenizer.bin           the tokenizer that made the ids
    FOLDER/train-00000.tokens      ids of all documents, one behind the other: little-endian uint16 or uint32 [N]
    FOLDER/train-00000.index       where each document starts, and N: little-endian int64 [D + 1]
    FOLDER/train-00000.prompts     tokens of each document that are never noised: little-endian int32 [D]; chats only
    FOLDER/test-00000. ...         the same for documents that training never sees

Files are mapped into memory at the first use, so a corpus of any size opens at once. Running text is read in windows
of consecutive tokens. An epoch shifts the windows of every file by a number of tokens of its own and shuffles them
(`shuffle.permuted`). The documents in a window become pieces for `filling.RowFiller`. A document that crosses the edge
of a window is cut between canvases, and the canvas on the edge belongs to the window of its first token: in every epoch
each token is in exactly one piece. The one exception is a part of a long text (`documents.LONGEST_TEXT`) that does not
end it: what is left of it behind its last whole canvas, at most block - 1 tokens, is not used, as sampling has no short
canvases. Chats are never cut: document by document, shuffled too, they are packed like those of other sources.
"""

from __future__ import annotations

import functools
import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mercury_jax.config import at_least, refuse
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.train.data import packing
from mercury_jax.train.data.filling import RowStream, TextWindow
from mercury_jax.train.data.packing import DataSplit, Example, StreamSettings
from mercury_jax.train.data.shuffle import key_of, mix, permuted
from mercury_jax.train.data.sources import Stream
from mercury_jax.types import LaidOutDocument, Layout, RowLayout

FORMAT, VERSION = "mercury_jax shards", 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.bin"
TOKENS, INDEX, PROMPTS = ".tokens", ".index", ".prompts"  # ends of file names
OPEN_SHARDS = 128  # mapped at a time: each holds up to three file descriptors
LOCATED = 16_384  # windows that were read ahead and not used yet
WINDOW = 1024  # least tokens of a window: fewer would read a page of the disk for each
INFILL = 0.3


class ShardFiles(NamedTuple):
    """One shard as the manifest describes it.

    Attributes:
        name: Of its files, without the ends.
        documents: How many there are.
        tokens: Of all documents.
    """

    name: str
    documents: int
    tokens: int


class Shard(NamedTuple):
    """The mapped files of one shard: ids [N], starts of documents [D + 1], prompts [D] or None; the map of the ids."""

    tokens: np.ndarray
    index: np.ndarray
    prompts: np.ndarray | None
    pages: mmap.mmap


class Corpus(NamedTuple):
    """One side of a folder.

    Attributes:
        folder: Where it is.
        manifest: The content of manifest.json.
        shards: Of this side.
    """

    folder: Path
    manifest: dict[str, Any]
    shards: tuple[ShardFiles, ...]

    def map(self, number: int) -> Shard:
        """Maps the files of one shard, by its number.

        Raises:
            ValueError: Index and tokens do not belong together.
        """
        files = self.shards[number]
        path = self.folder / files.name

        def open_map(end: str) -> mmap.mmap:
            with open(f"{path}{end}", "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        index = np.frombuffer(open_map(INDEX), "<i8")
        if index[0] != 0 or index[-1] != files.tokens:
            allowed = f"0 and {files.tokens}, the tokens of manifest.json: the shard is damaged"
            raise refuse(f"{path}{INDEX}: first and last", [int(index[0]), int(index[-1])], allowed)
        prompts = np.frombuffer(open_map(PROMPTS), "<i4") if self.manifest["prompts"] else None
        pages = open_map(TOKENS)
        if hasattr(mmap, "MADV_RANDOM"):
            # Else the kernel reads 128 KB around every page that is touched, of which a window needs a few.
            pages.madvise(mmap.MADV_RANDOM)
        return Shard(np.frombuffer(pages, self.manifest["dtype"]), index, prompts, pages)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Reads what a folder of shards holds.

    Args:
        folder: Written by `mercury data pack`.

    Returns:
        The content of manifest.json.

    Raises:
        ValueError: There is none, or one of another format or version.
    """
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        allowed = "a folder that `mercury data pack` has completed; this one has no manifest.json"
        raise refuse("shards", str(folder), allowed) from None
    except (OSError, ValueError) as error:
        raise refuse("shards", str(folder), f"a folder whose manifest.json can be read ({error})") from None
    kind = (found.get("format"), found.get("version")) if isinstance(found, dict) else None
    if kind != (FORMAT, VERSION):
        raise refuse(f"{path}: format and version", kind, f"{(FORMAT, VERSION)}")
    return found


def open_corpus(folder: str | Path, split: DataSplit) -> Corpus:
    """Opens one side of a folder, and checks the size of every file.

    Args:
        folder: Written by `mercury data pack`.
        split: "train" or "test".

    Returns:
        The side, which may have no shards.

    Raises:
        ValueError: The folder is incomplete, or a file is missing or has another size than the manifest says.
    """
    folder, manifest = Path(folder), read_manifest(folder)
    shards = tuple(ShardFiles(**{k: s[k] for k in ShardFiles._fields}) for s in manifest[split]["shards"])
    width = np.dtype(manifest["dtype"]).itemsize
    for shard in shards:
        expected = {TOKENS: width * shard.tokens, INDEX: 8 * (shard.documents + 1)}
        if manifest["prompts"]:
            expected[PROMPTS] = 4 * shard.documents
        for end, size in expected.items():
            path = folder / f"{shard.name}{end}"
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                allowed = f"{size}, as in manifest.json: the shard is damaged; pack the corpus again"
                raise refuse(f"size of {path}", found, allowed)
    return Corpus(folder, manifest, shards)


@dataclass(frozen=True)
class Shards:
    """A corpus that `mercury data pack` has tokenised. A recipe writes `data.shards("FOLDER")`.

    What is held out was decided when the corpus was packed. See the top of this module for how text is cut.

    Attributes:
        kind: Always "shards".
        where: The folder.
        chunk: Most tokens of a piece of text; None for the longest that fits a row.
        infill: Share of the pieces of text in which only a span of each canvas is editable; None for 0.3.
    """

    kind: Literal["shards"] = field(default="shards", init=False)
    where: str
    _: KW_ONLY
    chunk: int | None = None
    infill: float | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            at_least(2, chunk=self.chunk)
        if self.infill is not None and not 0 <= self.infill <= 1:
            raise refuse("infill", self.infill, "a share, 0 to 1")

    def open(self, settings: StreamSettings) -> Stream | RowStream | None:
        """Implements `DataSource.open`.

        Raises:
            ValueError: The folder is incomplete or damaged, was packed with another tokenizer, or does not fit a row.
        """
        corpus = open_corpus(self.where, settings.split)
        packed, given = corpus.manifest["tokenizer"], settings.tokenizer
        if packed["fingerprint"] != getattr(given, "fingerprint", ""):
            allowed = f"{packed['fingerprint']}, with which {self.where} was packed; or pack the corpus again"
            raise refuse("tokenizer", getattr(given, "fingerprint", ""), allowed)
        if not corpus.shards:
            return None
        return (
            self._documents(corpus, settings) if corpus.manifest["prompts"] else self._rows(corpus, settings)
        )

    def _rows(self, corpus: Corpus, settings: StreamSettings) -> RowStream:
        """Running text, in windows."""
        layout, row = settings.layout, settings.row
        layouts = [x for x in settings.layouts or (layout,) if isinstance(x, RowLayout)]
        if not isinstance(layout, RowLayout) or len(layouts) < len(settings.layouts):
            raise refuse(
                "layout", layout, "`Model.layout`, which lays out whole rows, for a source of shards"
            )
        block = layout.block
        least = layout.sizes(2 * block - 1, block - 1).slots
        if least > row:
            raise refuse("row", row, f"{least} or more: one canvas and its prompt need as much")
        longest = min(x.fitting(row, 0) for x in layouts)
        if self.chunk is not None and not 2 * block <= self.chunk <= max(longest, 2 * block):
            raise refuse("chunk", self.chunk, f"{2 * block}..{longest}: two canvases, to what a row holds")
        # A piece is at most block - 1 tokens longer than its window, whose last canvas it completes.
        size = max(longest, WINDOW) if self.chunk is None else self.chunk - block + 1
        windows = TextWindows(corpus, layout, size, key_of("shards", *settings.seed), settings.tokenizer.eos)
        # The test side is never infilled, so that its loss is a bound on whole canvases.
        share = (INFILL if self.infill is None else self.infill) if settings.split == "train" else 0.0
        identity = corpus.manifest["digest"]
        eos, ahead = settings.tokenizer.eos, windows.read_ahead
        return RowStream(windows.at, ahead, windows.count, layout, eos, share, identity)

    def _documents(self, corpus: Corpus, settings: StreamSettings) -> Stream:
        """Chats, whole."""
        for name in ("chunk", "infill"):
            if getattr(self, name) is not None:
                raise refuse(
                    name, getattr(self, name), f"None: {self.where} holds chats, which are never cut"
                )
        bases = [0, *accumulate(shard.documents for shard in corpus.shards)]
        mapped = functools.lru_cache(OPEN_SHARDS)(corpus.map)
        size, key = bases[-1], key_of("shards", *settings.seed)

        def in_layout(layout: Layout) -> Stream:
            here = settings._replace(layout=layout)
            _check_longest(corpus, here)

            def at(index: int) -> LaidOutDocument:
                epoch, i = divmod(index, size)
                i = permuted(i, size, mix(key + epoch))
                number = bisect_right(bases, i) - 1
                shard, d = mapped(number), i - bases[number]
                assert shard.prompts is not None  # `manifest["prompts"]` says so
                ids = shard.tokens[shard.index[d] : shard.index[d + 1]].astype(np.int32)
                place = f"document {d} of {corpus.folder / corpus.shards[number].name}"
                return packing.lay_out(here, Example(ids, int(shard.prompts[d]), True), place)

            return Stream(at, size, corpus.manifest["digest"], in_layout)

        return in_layout(settings.layout)

    def tokenizer(self) -> bytes:
        """The tokenizer of the folder, as `AnyTokenizer.proto` wrote it.

        Raises:
            ValueError: The folder is incomplete.
        """
        read_manifest(self.where)
        try:
            return (Path(self.where) / TOKENIZER).read_bytes()
        except OSError as error:
            allowed = f"a folder with a {TOKENIZER} that can be read ({error.strerror})"
            raise refuse("shards", self.where, allowed) from None

    def texts(self, seed: tuple[int, ...]) -> Iterator[str]:
        """Implements `DataSource.texts`: documents of the train side without end, decoded.

        Raises:
            ValueError: The folder's tokenizer is a checkpoint's, which only `mercury_jax.hub` reads.
        """
        proto = self.tokenizer()
        if proto[:2] == b"PK":
            raise refuse(
                "shards", self.where, "a corpus packed with a SentencePiece tokenizer, to read its texts"
            )
        return (text for _, text in sample_documents(self.where, Tokenizer(proto), "train", key_of(*seed)))


def shards(folder: str, *, chunk: int | None = None, infill: float | None = None) -> Shards:
    """A corpus that `mercury data pack` has tokenised.

    Args:
        folder: What the command wrote.
        chunk: Most tokens of a piece of text; None for the longest that fits a row.
        infill: Share of the pieces of text with one editable span in each canvas; None for 0.3. Chats have none.

    Returns:
        The source.
    """
    return Shards(folder, chunk=chunk, infill=infill)


def sample_documents(
    folder: str | Path, tokenizer: AnyTokenizer, split: DataSplit, key: int = 0
) -> Iterator[tuple[int, str]]:
    """Reads documents of a folder in a random order, each once.

    Args:
        folder: Written by `mercury data pack`.
        tokenizer: Decodes them.
        split: "train" or "test".
        key: Decides the order.

    Yields:
        (tokens, text) of a document; in chats with its prompt, without special tokens.
    """
    corpus = open_corpus(folder, split)
    bases = [0, *accumulate(shard.documents for shard in corpus.shards)]
    mapped = functools.lru_cache(OPEN_SHARDS)(corpus.map)
    for i in range(bases[-1]):
        place = permuted(i, bases[-1], key)
        number = bisect_right(bases, place) - 1
        shard, d = mapped(number), place - bases[number]
        ids = shard.tokens[shard.index[d] : shard.index[d + 1]]
        yield len(ids), tokenizer.decode(ids.tolist())


def _check_longest(corpus: Corpus, settings: StreamSettings) -> None:
    """Refuses a row that is too short for a chat, now and not hours later.

    The manifest has the pairs (prompt, answer) that no other document exceeds in both. Positions grow with either; only
    in models of blocks a prompt that ends just before a block may need more than a longer one.
    """
    block = packing.block_size(settings.layout)
    for prompt, answer in corpus.manifest[settings.split]["longest"]:
        for p in {prompt, max(0, (prompt + 1) // block * block - 1)}:
            ids = np.zeros(p + answer, np.int32)
            packing.lay_out(settings, Example(ids, p, True), f"the longest chats of {corpus.folder}")


class TextWindows:
    """The windows of one side of a corpus, in the shuffled order of each epoch."""

    def __init__(self, corpus: Corpus, layout: RowLayout, size: int, key: int, eos: int) -> None:
        """Counts the windows.

        Args:
            corpus: Its files.
            layout: Says between which tokens a document may be cut.
            size: Tokens of a window.
            key: Decides shifts, order and prompts.
            eos: Id that ends a text.
        """
        self._corpus, self._layout, self._size, self._key, self._eos = corpus, layout, size, key, eos
        # A shift by 0 to size - 1 tokens needs one window more; some are empty.
        counts = (-(-shard.tokens // size) + 1 for shard in corpus.shards)
        self._bases = [0, *accumulate(counts)]
        self._first = [0, *accumulate(shard.tokens for shard in corpus.shards)]
        self._map = functools.lru_cache(OPEN_SHARDS)(corpus.map)
        self._locate = functools.lru_cache(LOCATED)(self._find)
        self.count = self._bases[-1]

    def _find(self, index: int) -> tuple[int, int, int, int]:
        """The key of the epoch, the number of the shard, and the tokens [begin, end) of it: none if begin >= end."""
        epoch, i = divmod(index, self.count)
        key = mix(self._key + epoch)
        i = permuted(i, self.count, key)
        number = bisect_right(self._bases, i) - 1
        end = (i - self._bases[number] + 1) * self._size - mix(key + number) % self._size
        return key, number, max(0, end - self._size), min(end, self._corpus.shards[number].tokens)

    def read_ahead(self, index: int) -> None:
        """Asks the kernel to read a window from the disk, and does not wait."""
        _, number, begin, end = self._locate(index)
        if begin < end and hasattr(mmap, "MADV_WILLNEED"):
            shard = self._map(number)
            first = begin * shard.tokens.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            shard.pages.madvise(mmap.MADV_WILLNEED, first, end * shard.tokens.itemsize - first)

    def at(self, index: int) -> TextWindow:
        """Finds the pieces of a window: a pure function of the key and the index."""
        key, number, begin, end = self._locate(index)
        shard = self._map(number)
        if begin >= end:
            none = np.zeros(0, np.int64)
            return TextWindow(shard.tokens[:0], none, none, none, key, 0)
        # The documents with a token in [begin, end), whose first and last may reach beyond.
        first = int(shard.index.searchsorted(begin, "right")) - 1
        bounds = np.array(shard.index[first : int(shard.index.searchsorted(end, "left")) + 1])
        start, stop = bounds[:-1], bounds[1:].copy()
        length = stop - start
        # Any length of the prompt, so that canvases start anywhere in a line, not only at multiples of a block.
        hashes = mix((start + self._first[number]).astype(np.uint64) ^ key)
        prompt = (hashes % np.minimum(self._layout.block, length).astype(np.uint64)).astype(np.int64)
        offset = self._layout.first_canvas(prompt)
        cuts = [self._cut(int(start[k] + offset[k]), x) for k, x in ((0, begin), (-1, end))]
        if stop[-1] > end:
            stop[-1] = min(cuts[1], int(stop[-1]))
        if start[0] < begin:
            start[0], prompt[0], offset[0] = min(cuts[0], int(stop[0])), 0, 0
        final = shard.tokens[stop - 1] == self._eos
        length = stop - start
        if not final.all():  # part of a long text, which does not end here: whole canvases only
            length = np.where(
                final, length, offset + (length - offset) // self._layout.block * self._layout.block
            )
        kept = np.flatnonzero(length > prompt)
        start, length, prompt = start[kept], length[kept], prompt[kept]
        base = int(start[0]) if len(start) else 0
        stop = start + length
        tokens = shard.tokens[base : int(stop[-1]) if len(stop) else 0]
        return TextWindow(tokens, start - base, stop - base, prompt, key, self._first[number] + base)

    def _cut(self, canvas: int, place: int) -> int:
        """The first place from `place` on between two canvases, of which the first starts at `canvas`."""
        return canvas + self._layout.block * max(1, -((canvas - place) // self._layout.block))
