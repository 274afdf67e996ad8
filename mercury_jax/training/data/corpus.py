"""A corpus that was tokenised once: the files that `mercury data pack` writes, and the source that trains on them.

    FOLDER/manifest.json           contents of the folder; written last
    FOLDER/tokenizer.bin           the tokenizer that made the ids
    FOLDER/train-00000.tokens      ids of all documents, concatenated: little-endian uint16 or uint32 [N]
    FOLDER/train-00000.index       start of each document, and N: little-endian int64 [D + 1]
    FOLDER/train-00000.prompts     leading tokens of each document that are never noised: little-endian int32 [D]; chats
                                   only
    FOLDER/test-00000. ...         the same for held-out documents

Files are memory-mapped at their first use, so a corpus of any size opens at once.

Running text is read in windows of consecutive tokens. Each epoch shifts the windows of each shard by a random number of
tokens and shuffles them (`shuffle.permuted`). The documents in a window become pieces for `filling.RowFiller`. A
document that crosses the edge of a window is cut between canvases; the canvas on the edge belongs to the window with
its first token. In each epoch, each token is therefore in exactly one piece. The one exception is a part of a long text
(`documents.LONGEST_TEXT`) other than its last part: up to block - 1 tokens after its last whole canvas are not used,
since sampling never sees a shorter canvas. Chats are never cut. They are shuffled and packed document by document, as
from other sources.
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

from mercury_jax.config import Share, check_fields, refuse
from mercury_jax.tasks.task import mix
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.training.data import packing
from mercury_jax.training.data.filling import RowStream, TextWindow, key_of, permuted
from mercury_jax.training.data.packing import DataSplit, Example, StreamSettings
from mercury_jax.training.data.sources import Chunk, Stream, stream_of
from mercury_jax.types import LaidOutDocument, RowLayout

FORMAT, VERSION = "mercury_jax shards", 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.bin"
TOKENS, INDEX, PROMPTS = ".tokens", ".index", ".prompts"  # ends of file names
OPEN_SHARDS = 128  # shards mapped at a time; each holds up to three file descriptors
LOCATED = 16_384  # cached locations of windows: each is needed twice, to read ahead and to use it
WINDOW = 1024  # smallest window in tokens; a smaller one would read a disk page for few tokens
INFILL = 0.3  # default share of infilled pieces


class ShardFiles(NamedTuple):
    """One shard as the manifest describes it.

    Attributes:
        name: Name of its files, without the suffix.
        documents: Number of documents.
        tokens: Number of tokens of all documents.
    """

    name: str
    documents: int
    tokens: int


class Shard(NamedTuple):
    """The mapped files of one shard: ids [N], starts of documents [D + 1], prompts [D] or None, and the map of the ids.

    `pages` is the same memory as `tokens`, for `madvise`.
    """

    tokens: np.ndarray
    index: np.ndarray
    prompts: np.ndarray | None
    pages: mmap.mmap


class Corpus(NamedTuple):
    """One side of the split of a folder.

    Attributes:
        folder: The folder.
        manifest: Content of manifest.json.
        shards: The shards of this side.
    """

    folder: Path
    manifest: dict[str, Any]
    shards: tuple[ShardFiles, ...]

    def map(self, number: int) -> Shard:
        """Maps the files of one shard into memory."""
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
            # By default the kernel reads 128 KB around each page that is touched; a window needs only a few pages.
            pages.madvise(mmap.MADV_RANDOM)
        return Shard(np.frombuffer(pages, self.manifest["dtype"]), index, prompts, pages)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Reads the manifest of a folder of shards."""
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
    """Opens one side of the split of a folder, and checks the size of each file."""
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
    """A corpus that `mercury data pack` has tokenised. In a recipe: `data.shards("FOLDER")`.

    The held-out documents were chosen when the corpus was packed. The docstring of this module says how text is cut.

    Attributes:
        kind: Always "shards".
        where: The folder.
        chunk: Largest number of tokens of a piece of text; None for the largest that fits a row.
        infill: Share of the pieces of text in which only a span of each canvas is editable; None for 0.3.
    """

    kind: Literal["shards"] = field(default="shards", init=False)
    where: str
    _: KW_ONLY
    chunk: Chunk | None = None
    infill: Share | None = None

    def __post_init__(self) -> None:
        check_fields(self)

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
        """Opens a corpus of running text, which fills whole rows from windows."""
        layout, row = settings.layout, settings.row
        layouts = [x for x in settings.layouts or (layout,) if isinstance(x, RowLayout)]
        if not isinstance(layout, RowLayout) or len(layouts) < len(settings.layouts):
            allowed = "`Model.layout`, which lays out whole rows, for a source of shards"
            raise refuse("layout", layout, allowed)
        block = layout.block
        least = layout.sizes(2 * block - 1, block - 1).slots
        if least > row:
            raise refuse("row", row, f"{least} or more: one canvas and its prompt need as much")
        longest = min(x.fitting(row, 0) for x in layouts)
        if self.chunk is not None and not 2 * block <= self.chunk <= max(longest, 2 * block):
            raise refuse("chunk", self.chunk, f"{2 * block}..{longest}: two canvases, to what a row holds")
        # The canvas on the edge of a window is completed, so a piece is up to block - 1 tokens longer than its window.
        size = max(longest, WINDOW) if self.chunk is None else self.chunk - block + 1
        windows = TextWindows(corpus, layout, size, key_of("shards", *settings.seed), settings.tokenizer.eos)
        # No infilling on the test side, so that its loss is a bound for whole canvases.
        share = (INFILL if self.infill is None else self.infill) if settings.split == "train" else 0.0
        identity = corpus.manifest["digest"]
        eos, ahead = settings.tokenizer.eos, windows.read_ahead
        return RowStream(windows.at, ahead, windows.count, layout, eos, share, identity)

    def _documents(self, corpus: Corpus, settings: StreamSettings) -> Stream:
        """Opens a corpus of chats, which are never cut."""
        for name in ("chunk", "infill"):
            if getattr(self, name) is not None:
                allowed = f"None: {self.where} holds chats, which are never cut"
                raise refuse(name, getattr(self, name), allowed)
        bases = [0, *accumulate(shard.documents for shard in corpus.shards)]
        mapped = functools.lru_cache(OPEN_SHARDS)(corpus.map)
        size, key = bases[-1], key_of("shards", *settings.seed)

        for layout in settings.layouts or (settings.layout,):
            _check_longest(corpus, settings._replace(layout=layout))

        def at(here: StreamSettings, index: int) -> LaidOutDocument:
            # index -> place in the shuffled order of its epoch -> shard and document.
            epoch, i = divmod(index, size)
            i = permuted(i, size, mix(key + epoch))
            number = bisect_right(bases, i) - 1
            shard, d = mapped(number), i - bases[number]
            assert shard.prompts is not None  # `manifest["prompts"]` says so
            ids = shard.tokens[shard.index[d] : shard.index[d + 1]].astype(np.int32)
            place = f"document {d} of {corpus.folder / corpus.shards[number].name}"
            example = Example(ids, int(shard.prompts[d]), True)
            return packing.lay_out(here, packing.fill_up(here, example, index), place)

        return stream_of(at, settings, size, corpus.manifest["digest"])

    def tokenizer(self) -> bytes:
        """Reads the tokenizer of the folder.

        Returns:
            The bytes of `AnyTokenizer.proto`.

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
        """Implements `DataSource.texts`: decodes the documents of the train side, each once.

        Raises:
            ValueError: The tokenizer of the folder comes from a checkpoint, and only `mercury_jax.hub` can read it.
        """
        proto = self.tokenizer()
        if proto[:2] == b"PK":
            allowed = "a corpus packed with a SentencePiece tokenizer, to read its texts"
            raise refuse("shards", self.where, allowed)
        return (text for _, text in sample_documents(self.where, Tokenizer(proto), "train", key_of(*seed)))


def shards(folder: str, *, chunk: int | None = None, infill: float | None = None) -> Shards:
    """A corpus that `mercury data pack` has tokenised.

    Args:
        folder: The folder that the command wrote.
        chunk: Largest number of tokens of a piece of text; None for the largest that fits a row.
        infill: Share of the pieces of text in which only a span of each canvas is editable; None for 0.3. Must be None
            for chats.

    Returns:
        The source.
    """
    return Shards(folder, chunk=chunk, infill=infill)


def sample_documents(
    folder: str | Path, tokenizer: AnyTokenizer, split: DataSplit, key: int = 0
) -> Iterator[tuple[int, str]]:
    """Reads documents of a folder in a random order, each once."""
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
    """Refuses a row that is too short for some chat, when the source is opened instead of hours into the training."""
    # The manifest lists the pairs (prompt, answer) of lengths that no other document exceeds in both. The number of
    # positions grows with either length, so the other documents need no check. The one exception: in a block-wise model
    # a prompt that ends just before a block boundary may need more positions than a longer one, so it is tried too.
    block = packing.block_size(settings.layout)
    for prompt, answer in corpus.manifest[settings.split]["longest"]:
        for p in {prompt, max(0, (prompt + 1) // block * block - 1)}:
            ids = np.zeros(p + answer, np.int32)
            packing.lay_out(settings, Example(ids, p, True), f"the longest chats of {corpus.folder}")


class TextWindows:
    """The windows of one side of a corpus, in the shuffled order of each epoch.

    In the order of the corpus, window j of a shard is tokens [j * size - shift, (j + 1) * size - shift), with a shift
    in [0, size) drawn for each shard and epoch.
    """

    def __init__(self, corpus: Corpus, layout: RowLayout, size: int, key: int, eos: int) -> None:
        """Counts the windows."""
        self._corpus, self._layout, self._size, self._key, self._eos = corpus, layout, size, key, eos
        # A shifted shard overlaps one window more than ceil(tokens / size). Depending on the shift it may be empty.
        counts = (-(-shard.tokens // size) + 1 for shard in corpus.shards)
        self._bases = [0, *accumulate(counts)]
        self._first = [0, *accumulate(shard.tokens for shard in corpus.shards)]
        self._map = functools.lru_cache(OPEN_SHARDS)(corpus.map)
        self._locate = functools.lru_cache(LOCATED)(self._find)
        self.count = self._bases[-1]

    def _find(self, index: int) -> tuple[int, int, int, int]:
        """Finds (key of the epoch, number of the shard, begin, end); the window is empty if begin >= end."""
        epoch, i = divmod(index, self.count)
        key = mix(self._key + epoch)
        i = permuted(i, self.count, key)
        number = bisect_right(self._bases, i) - 1
        end = (i - self._bases[number] + 1) * self._size - mix(key + number) % self._size
        return key, number, max(0, end - self._size), min(end, self._corpus.shards[number].tokens)

    def read_ahead(self, index: int) -> None:
        """Asks the kernel to load a window into the page cache, without waiting."""
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
        # 1. The D documents with a token in [begin, end). The first and the last one may reach beyond the window.
        first = int(shard.index.searchsorted(begin, "right")) - 1
        bounds = np.array(shard.index[first : int(shard.index.searchsorted(end, "left")) + 1])
        start, stop = bounds[:-1], bounds[1:].copy()
        length = stop - start
        # 2. A prompt of random length below a block for each document, from a hash of its place in the corpus: canvases
        #    then start anywhere in a text. Both windows that share a document draw the same prompt.
        hashes = mix((start + self._first[number]).astype(np.uint64) ^ key)
        prompt = (hashes % np.minimum(self._layout.block, length).astype(np.uint64)).astype(np.int64)
        # 3. Cut the first and the last document at the first canvas boundary at or after the edge of the window. The
        #    rest of a document that was cut has no prompt.
        offset = self._layout.first_canvas(prompt)
        cuts = [self._cut(int(start[k] + offset[k]), x) for k, x in ((0, begin), (-1, end))]
        if stop[-1] > end:
            stop[-1] = min(cuts[1], int(stop[-1]))
        if start[0] < begin:
            start[0], prompt[0], offset[0] = min(cuts[0], int(stop[0])), 0, 0
        final = shard.tokens[stop - 1] == self._eos
        length = stop - start
        if not final.all():
            # A piece that does not end its text is shortened to whole canvases. The pieces cut above are whole already;
            # this concerns parts of long texts.
            length = np.where(
                final, length, offset + (length - offset) // self._layout.block * self._layout.block
            )
        # 4. Drop pieces with nothing to train on, and return indices relative to the first token that is left.
        kept = np.flatnonzero(length > prompt)
        start, length, prompt = start[kept], length[kept], prompt[kept]
        base = int(start[0]) if len(start) else 0
        stop = start + length
        tokens = shard.tokens[base : int(stop[-1]) if len(stop) else 0]
        return TextWindow(tokens, start - base, stop - base, prompt, key, self._first[number] + base)

    def _cut(self, canvas: int, place: int) -> int:
        """Finds the first canvas boundary at or after `place`, in a document whose first canvas starts at `canvas`."""
        return canvas + self._layout.block * max(1, -((canvas - place) // self._layout.block))
