"""`mercury data pack` as a function: tokenises a corpus once, in several processes, into the files of `corpus.py`.

    main process   reads records and groups them to about BATCH bytes
    workers        parse and tokenise one group at a time, and choose the side of each document
    main process   writes the ids in the order of the corpus; at most 2 groups per worker are in flight

The files do not depend on the number of workers, and the memory in use does not depend on the size of the corpus.

A shard is written under temporary names, renamed when it is complete, and then recorded in progress-00000.json. After
an interruption, the next call reads the corpus again, skips the groups of complete shards without tokenising them, and
continues. manifest.json is written last; without it the folder cannot be opened.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mercury_jax.checkpoint.manifest import replace as replace_file
from mercury_jax.config import PositiveInt, ShareBelowOne, checked, refuse
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.training.data import corpus
from mercury_jax.training.data.documents import DocumentReader, Record, encode_record
from mercury_jax.training.data.packing import DataSplit

BATCH = 2**20  # bytes of text of a group, which a worker tokenises at once
SHARD_TOKENS = 2**27  # tokens of a shard, train and test together; 256 MB of uint16
PLAN = "plan.json"  # arguments of an unfinished pack
PART = ".tmp"  # suffix of a file that is being written
SIDES: tuple[DataSplit, ...] = ("train", "test")

Pairs = list[list[int]]  # lengths [prompt, answer] in tokens


class Encoded(NamedTuple):
    """The D documents of one side of a group, concatenated.

    Attributes:
        tokens: Ids of all documents [N].
        lengths: Number of tokens of each document [D].
        prompts: Number of leading tokens of each document that are never noised [D].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray


# The documents of a group on each side, and the number of its records that were skipped as bad lines.
EncodedGroup = tuple[dict[DataSplit, Encoded], int]
Encode = Callable[[list[Record], AnyTokenizer], EncodedGroup]  # `_encode` with the settings of the corpus


@checked
def pack(
    reader: DocumentReader,
    tokenizer: AnyTokenizer,
    out: str | Path,
    *,
    held_out: ShareBelowOne = 0.0,
    workers: PositiveInt = 1,
    shard_tokens: PositiveInt = SHARD_TOKENS,
    unpack: Callable[[bytes], AnyTokenizer] = Tokenizer,
    progress: Callable[[int], None] = lambda read: None,
) -> dict[str, Any]:
    """Tokenises a corpus into a folder that `data.shards` trains on; continues an interrupted pack.

    A folder with the complete pack of the same corpus is left as it is, so a job may call this each time it
    starts.

    Args:
        held_out: Share of the documents that are held out, selected by a hash of their text. For problems: number of
            additional problems from the test side of their task, as a share of `count`.
        unpack: Makes a tokenizer from `tokenizer.proto` in the workers.
    """
    folder, size = Path(out), max(tokenizer.vocab_size, tokenizer.eos + 1, tokenizer.end_turn + 1)
    plan = {
        "source": reader.facts(), "held_out": held_out, "shard_tokens": shard_tokens,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "dtype": "<u2" if size <= 2**16 else "<u4", "prompts": reader.prompts, "version": corpus.VERSION,
    }  # fmt: skip
    if is_complete(folder):
        complete = json.loads((folder / corpus.MANIFEST).read_text(encoding="utf-8"))
        _check_equal(plan, complete, f"the complete pack of {folder}")
        for side in SIDES:
            corpus.open_corpus(folder, side)  # raises if a file is missing or has another size
        return complete
    # Groups are cut by bytes of text, so they are the same on each call: complete shards end after a known group.
    done = _begin(folder, plan)
    replace_file(folder / corpus.TOKENIZER, tokenizer.proto)
    encode = functools.partial(_encode, reader=reader, held_out=held_out, dtype=plan["dtype"])
    skip = done[-1]["groups"] if done else 0
    writer = _ShardWriter(folder, plan, len(done), skip)
    groups = _group(reader.records(held_out), skip, progress)
    with _encoder(encode, tokenizer, workers, unpack) as encoded:
        for group in encoded(groups):
            writer.add(group)
            if writer.tokens >= shard_tokens:
                done.append(writer.close())
        if writer.tokens:
            done.append(writer.close())
    return _finish(folder, plan, done)


# --- the folder


def is_complete(folder: str | Path) -> bool:
    """Tells whether a folder holds a complete pack, not an interrupted one."""
    return (Path(folder) / corpus.MANIFEST).exists() and not (Path(folder) / PLAN).exists()


def _begin(folder: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Prepares the folder; returns the progress records of the complete shards of an interrupted pack."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PLAN).exists():
        if any(path.suffix != PART for path in folder.iterdir()):
            allowed = "a new or empty folder, or one with a pack of the same corpus"
            raise refuse("out", str(folder), allowed)
        replace_file(folder / PLAN, json.dumps(plan, indent=1).encode())
        return []
    before = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    _check_equal(plan, before, f"the unfinished pack of {folder}")
    done: list[dict[str, Any]] = []
    while (path := folder / _progress(len(done))).exists():
        done.append(json.loads(path.read_text(encoding="utf-8")))
    return done


def _check_equal(plan: dict[str, Any], before: dict[str, Any], where: str) -> None:
    """Refuses a pack whose arguments differ from those of the earlier one in the same folder."""
    for name, value in json.loads(json.dumps(plan)).items():
        if before.get(name) != value:
            raise refuse(name, value, f"{before.get(name)!r}, as in {where}; or choose another folder")


def _finish(folder: Path, plan: dict[str, Any], done: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes the manifest of the complete shards, and removes the files that only an unfinished pack needs."""
    manifest: dict[str, Any] = {"format": corpus.FORMAT, **plan}
    manifest["split"] = (
        "test where the first 48 bits of BLAKE2b of the document's text, as a share, are below held_out"
    )
    if "generated" in plan["source"]:
        manifest["split"] = "the sides of the task"
    manifest["skipped"] = sum(record.get("skipped", 0) for record in done)
    for side in SIDES:
        shards = [record[side] for record in done if record[side]]
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
        longest = _longest([], [pair for shard in shards for pair in shard["longest"]])
        listed = [{k: v for k, v in shard.items() if k != "longest"} for shard in shards]
        manifest[side] = {**counts, "longest": longest, "shards": listed}
    if not manifest["train"]["documents"]:
        where = plan["source"]
        if manifest["test"]["documents"]:
            raise refuse("held_out", plan["held_out"], f"a share that leaves some of {where} to train on")
        raise refuse("SOURCE", where, "a corpus with at least one document; this one is empty")
    # The digest covers what is trained on, not where it was read: equal corpora have equal digests.
    content = [manifest[k] for k in ("tokenizer", "dtype", "prompts", *SIDES)]
    manifest["digest"] = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    replace_file(folder / corpus.MANIFEST, json.dumps(manifest, indent=1).encode())
    for name in (PLAN, *map(_progress, range(len(done)))):
        (folder / name).unlink()
    return manifest


def _progress(number: int) -> str:
    return f"progress-{number:05}.json"


def _longest(found: Pairs, more: Pairs) -> Pairs:
    """Selects the pairs (prompt, answer) that no other pair exceeds in both lengths."""
    # In descending order of prompts, a pair counts only if its answer is longer than all before it.
    kept: Pairs = []
    for prompt, answer in sorted({(p, a) for p, a in [*found, *more]}, reverse=True):
        if not kept or answer > kept[-1][1]:
            kept.append([prompt, answer])
    return kept


class _ShardFile:
    """A file under a temporary name, with a running hash of its content."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(path.name + PART)
        self.file: IO[bytes] = self.part.open("wb")
        self.hash = hashlib.blake2b(digest_size=16)

    def append(self, array: np.ndarray) -> None:
        content = array.tobytes()
        self.file.write(content)
        self.hash.update(content)

    def close(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.part.rename(self.path)
        return self.hash.hexdigest()


class _ShardWriter:
    """Appends groups to the current shard, which has one file of each kind and side."""

    def __init__(self, folder: Path, plan: dict[str, Any], number: int, groups: int) -> None:
        self.folder, self.dtype, self.prompts = folder, plan["dtype"], plan["prompts"]
        self.number, self.groups = number, groups
        self._start()

    def _start(self) -> None:
        self.tokens = 0
        self.files: dict[DataSplit, dict[str, _ShardFile]] = {}
        self.skipped = 0
        self.counts = {side: {"documents": 0, "tokens": 0} for side in SIDES}
        self.longest: dict[DataSplit, Pairs] = {side: [] for side in SIDES}

    def add(self, group: EncodedGroup) -> None:
        """Appends the documents of one group."""
        self.groups += 1
        sides, skipped = group
        self.skipped += skipped
        for side, (tokens, lengths, prompts) in sides.items():
            if side not in self.files:
                ends = (corpus.TOKENS, corpus.INDEX, *[corpus.PROMPTS] * self.prompts)
                name = f"{side}-{self.number:05}"
                self.files[side] = {end: _ShardFile(self.folder / f"{name}{end}") for end in ends}
                self.files[side][corpus.INDEX].append(np.zeros(1, "<i8"))
            files, counts = self.files[side], self.counts[side]
            files[corpus.TOKENS].append(tokens)
            files[corpus.INDEX].append((counts["tokens"] + np.cumsum(lengths)).astype("<i8"))
            if self.prompts:
                files[corpus.PROMPTS].append(prompts.astype("<i4"))
                pairs = np.unique(np.stack([prompts, lengths - prompts], 1), axis=0).tolist()
                self.longest[side] = _longest(self.longest[side], pairs)
            counts["documents"] += len(lengths)
            counts["tokens"] += len(tokens)
            self.tokens += len(tokens)

    def close(self) -> dict[str, Any]:
        """Completes the current shard and writes its progress record."""
        # First all files, then the record: a record never refers to an incomplete shard.
        record: dict[str, Any] = {"groups": self.groups, "skipped": self.skipped, "train": None, "test": None}
        for side, files in self.files.items():
            digests = {file.path.name: file.close() for file in files.values()}
            name = f"{side}-{self.number:05}"
            record[side] = {
                "name": name,
                **self.counts[side],
                "files": digests,
                "longest": self.longest[side],
            }
        replace_file(self.folder / _progress(self.number), json.dumps(record).encode())
        self.number += 1
        self._start()
        return record


# --- reading and tokenising


def _group(records: Iterator[Record], skip: int, progress: Callable[[int], None]) -> Iterator[list[Record]]:
    """Yields groups of records of about `BATCH` bytes, without the first `skip` groups."""
    group, size, number = list[Record](), 0, 0
    for record in records:
        group.append(record)
        size += BATCH if isinstance(record.value, range) else len(record.value)
        if size >= BATCH:
            number += 1
            progress(size)
            if number > skip:
                yield group
            group, size = [], 0
    progress(size)
    if group and number + 1 > skip:
        yield group


def _encode(
    group: list[Record], tokenizer: AnyTokenizer, *, reader: DocumentReader, held_out: float, dtype: str
) -> EncodedGroup:
    """Tokenises the records of a group and concatenates the documents of each side."""
    found: dict[DataSplit, list[tuple[np.ndarray, int]]] = {side: [] for side in SIDES}
    skipped = 0
    for record in group:
        try:
            examples = list(encode_record(record, reader, tokenizer, held_out))
        except ValueError:
            if getattr(reader, "bad_lines", "stop") == "stop":
                raise
            skipped += 1
            continue
        for side, example in examples:
            if example.ids.max() > np.iinfo(dtype).max:
                raise refuse(f"{record.place}: largest id", int(example.ids.max()), "what vocab_size says")
            found[side].append((example.ids.astype(dtype), example.prompt))
    sides: dict[DataSplit, Encoded] = {
        side: Encoded(
            np.concatenate([ids for ids, _ in some]),
            np.array([len(ids) for ids, _ in some]),
            np.array([prompt for _, prompt in some]),
        )
        for side, some in found.items()
        if some
    }
    return sides, skipped


Encoder = Callable[[Iterator[list[Record]]], Iterator[EncodedGroup]]


@contextmanager
def _encoder(
    encode: Encode, tokenizer: AnyTokenizer, workers: int, unpack: Callable[[bytes], AnyTokenizer]
) -> Iterator[Encoder]:
    """Yields a function that tokenises groups in order, in this process or in a pool of workers."""
    if workers == 1:
        yield lambda groups: (encode(group, tokenizer) for group in groups)
        return
    # Spawned, not forked: this process may run threads of JAX, and a fork copies their locks but not the threads.
    context = multiprocessing.get_context("spawn")
    given = encode, tokenizer.proto, unpack
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=given)

    def encoded(groups: Iterator[list[Record]]) -> Iterator[EncodedGroup]:
        # Results are taken in the order of submission. The bounded queue limits how far the reader runs ahead of the
        # writer, and with it the memory in use.
        ahead: deque[Future[EncodedGroup]] = deque()
        for group in groups:
            ahead.append(pool.submit(_encode_in_worker, group))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    try:
        yield encoded
    finally:
        pool.shutdown(cancel_futures=True)


# In a worker process: its function and its tokenizer, which are sent once and not with every group.
_worker: tuple[Encode, AnyTokenizer] | None = None


def _start_worker(encode: Encode, proto: bytes, unpack: Callable[[bytes], AnyTokenizer]) -> None:
    global _worker
    _worker = encode, unpack(proto)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        # Without this thread, a worker whose parent was killed would wait for work forever.
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _encode_in_worker(group: list[Record]) -> EncodedGroup:
    assert _worker is not None
    encode, tokenizer = _worker
    return encode(group, tokenizer)
