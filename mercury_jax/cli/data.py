"""`mercury data pack`: tokenise a corpus once, into shards that training maps into memory; `mercury data info`: look
into them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    ConfigOptions,
    Flag,
    Float,
    Group,
    Int,
    OptionalFloat,
    OptionalInt,
    Positional,
    Repeated,
    option,
)
from mercury_jax.config import at_least, refuse
from mercury_jax.viz import readable

if TYPE_CHECKING:
    from mercury_jax.tokenizer import AnyTokenizer
    from mercury_jax.training.data.documents import DocumentReader

PREVIEW = 300  # characters of a document that `mercury data info` shows


@dataclass(frozen=True, kw_only=True)
class DataPack:
    """Tokenise a corpus once, into shards that training maps into memory.

    examples:
      mercury data pack "books/**/*.txt" --tokenizer tokenizer.model --out packed
      mercury data pack "web/*.jsonl.gz" "web/*.parquet" --field text
             --held-out 0.001 --tokenizer google/diffusiongemma-26B-A4B-it
             --out packed/web
      mercury data pack --hf HuggingFaceFW/fineweb:sample-10BT
             --tokenizer runs/mine/model --out packed/fineweb
      mercury data pack --chats chats.jsonl --tokenizer runs/mine/model
             --out packed/chats
      mercury data pack --generated add3 --count 100000 --thinking
             --tokenizer runs/mine/model --out packed/add3

    A recipe trains on the folder: data=data.shards("packed"). It starts and
    resumes at once, whatever the size, with the tokenizer that the folder keeps.

    A SOURCE is a glob in quotes. Files that end in .jsonl have a document a
    line, .parquet files one a row, any other file is one document; .gz and .zst
    are decompressed while they are read. Texts above 1,048,576 characters are
    cut behind a line into several documents. Memory does not depend on the size
    of the input. An interrupted pack goes on when the same command is run again:
    it reads the input again, but tokenises only what no complete shard holds. A
    complete pack is left as it is, if the input files have the same names, sizes
    and times of change.
    """

    source: Annotated[Positional[tuple[str, ...]], option("SOURCE")] = ()
    """Globs of text files, JSONL or Parquet."""
    tokenizer: Annotated[str, option("MODEL")]
    """A tokenizer.model, or the folder or Hugging Face id of a model."""
    out: Annotated[str, option("FOLDER")]
    """A new folder, or that of a pack of the same input, which is continued."""
    hf: Annotated[str | None, option("NAME[:CONFIG]")] = None
    """Instead of SOURCE: stream this Hugging Face dataset; needs the package `datasets`."""
    part: Annotated[str | None, option("NAME")] = None
    """With --hf and hf:NAME: the split. Default: train."""
    chats: Annotated[Repeated[tuple[str, ...]], option("GLOB")] = ()
    """Instead of SOURCE: files of conversations, or hf:NAME of a Hugging Face dataset; repeatable."""
    turns: Annotated[Literal["last", "all"], option("last|all")] = "last"
    """With --chats: train on the last assistant turn of each conversation, or on all of them."""
    generated: Annotated[str | None, option("TASK")] = None
    """Instead of SOURCE: the problems of a task, see `mercury info`."""
    count: OptionalInt = None
    """With --generated: how many."""
    thinking: Flag = False
    """With --generated: put the derivation before the answer."""
    prefill: OptionalFloat = None
    """With --generated: share of the prompts that already open the thinking or hold all of it. Default: 0."""
    seed: OptionalInt = None
    """With --generated: the seed of the run that would draw the same problems. Default: 0."""
    field: Annotated[str | None, option("NAME")] = None
    """Key or column of the text. Default: text."""
    bad_lines: Annotated[Literal["stop", "skip"], option("stop|skip")] = "stop"
    """What happens to a line without a text or a conversation, such as content: null, or above 64 MB: stop with an
    error that names it, or skip and count it."""
    held_out: Float = 0.0
    """Share of the documents that training never sees, chosen by a hash of their text. With --generated, this share of
    the number of problems is added from the test side of the task."""
    config: Annotated[ConfigOptions, Group] = dataclasses.field(default_factory=ConfigOptions)
    workers: OptionalInt = None
    """Processes that tokenise. Default: one for each core."""
    shard_tokens: Int = 2**27
    """Tokens of a shard: what an interruption loses at most."""
    json: Flag = False
    """Print one JSON object."""


def run_pack(argv: Sequence[str]) -> int:
    """Runs `mercury data pack`; returns its exit code."""
    args = arguments.read(DataPack, argv, "mercury data pack")
    reader = _reader(args)
    workers = (os.cpu_count() or 1) if args.workers is None else args.workers
    from mercury_jax.hub.tokenizer import unpack
    from mercury_jax.training.data import shard_writer

    tokenizer, begin = _tokenizer(args), time.perf_counter()
    complete = shard_writer.is_complete(args.out)
    with show.progress("bytes", f"packing into {args.out}", total=reader.size()) as update:
        manifest = shard_writer.pack(
            reader, tokenizer, args.out, held_out=args.held_out, workers=workers, shard_tokens=args.shard_tokens,
            unpack=unpack, progress=lambda read: update(advance=read),
        )  # fmt: skip
    record = _summary(args.out, manifest) | {"seconds": time.perf_counter() - begin, "workers": workers}
    if complete:
        show.say(f"{args.out} is complete already; nothing was read")
    if args.json:
        show.emit(record)
        return 0
    print("\n".join(_lines(record)))
    show.say(f'try: data=data.shards("{args.out}") in a recipe; mercury data info {args.out}')
    return 0


def _reader(args: DataPack) -> DocumentReader:
    """What to read; options that belong to another kind of source are refused."""
    from mercury_jax.training.data.chats import HUB
    from mercury_jax.training.data.documents import Files, HubStream, Problems
    from mercury_jax.training.data.sources import generated

    kinds = {
        "SOURCE": bool(args.source), "--hf": args.hf is not None, "--chats": bool(args.chats),
        "--generated": args.generated is not None,
    }  # fmt: skip
    given = [name for name, there in kinds.items() if there]
    if len(given) != 1:
        allowed = (
            "one of SOURCE, --hf, --chats and --generated; pack each into a folder of its own, and mix them"
        )
        raise refuse("SOURCE", " ".join(given), allowed)
    belongs = {
        "bad_lines": ("SOURCE", "--hf", "--chats"),
        "turns": ("--chats",), "part": ("--hf", "--chats"), "field": ("SOURCE", "--hf"), "count": ("--generated",),
        "thinking": ("--generated",),
        "prefill": ("--generated",), "seed": ("--generated",),
    }  # fmt: skip
    for name, owners in belongs.items():
        if getattr(args, name) not in (None, False, "stop", "last") and given[0] not in owners:
            raise refuse(
                f"--{name.replace('_', '-')}", getattr(args, name), f"with {' and '.join(owners)} only"
            )
    if args.generated is not None:
        if args.count is None:
            raise refuse("--count", None, "a number of problems, with --generated")
        source = generated(args.generated, thinking=args.thinking, prefill=args.prefill or 0.0)
        return Problems(source, args.count, args.seed or 0)
    field = args.field or "text"
    if args.hf is not None:
        return HubStream(args.hf, args.part or "train", field, bad_lines=args.bad_lines)
    hub = [name for name in args.chats if name.startswith(HUB)]
    if hub:
        if len(args.chats) > 1:
            raise refuse(
                "--chats", " ".join(args.chats), f"{hub[0]} alone; pack the others into another folder"
            )
        name, part = hub[0].removeprefix(HUB), args.part or "train"
        return HubStream(name, part, chats=True, turns=args.turns, bad_lines=args.bad_lines)
    if args.part is not None:
        raise refuse("--part", args.part, "with --hf, or --chats hf:NAME")
    return Files(args.chats or args.source, field, bool(args.chats), args.turns, args.bad_lines)


def _tokenizer(args: DataPack) -> AnyTokenizer:
    if Path(args.tokenizer).is_file():
        from mercury_jax.tokenizer import Tokenizer

        found = Tokenizer.load(args.tokenizer)
        return found if args.config.mask is None else found.with_mask(args.config.mask)
    from mercury_jax.hub import tokenizer_of

    with show.progress(text="loading the tokenizer"):
        return tokenizer_of(args.tokenizer, **args.config.given())


# --- mercury data info


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """Describe a folder of shards, and show some of its documents.

    examples:
      mercury data info packed
      mercury data info packed --samples 3 --seed 1
      mercury data info packed --verify        read all of it, compare hashes
      mercury data info packed --json
    """

    folder: Annotated[Positional[str], option("FOLDER")]
    """What `mercury data pack` wrote."""
    samples: Int = 1
    """Documents of the training side to show."""
    seed: Int = 0
    """Chooses them."""
    verify: Flag = False
    """Read every file and compare its hash with the manifest's."""
    json: Flag = False
    """Print one JSON object."""


def run_info(argv: Sequence[str]) -> int:
    """Runs `mercury data info`; returns its exit code."""
    args = arguments.read(DataInfo, argv, "mercury data info")
    at_least(0, samples=args.samples, seed=args.seed)
    from mercury_jax.hub.tokenizer import unpack
    from mercury_jax.training.data import corpus

    found = corpus.open_corpus(args.folder, "train")
    corpus.open_corpus(args.folder, "test")  # checks its files
    record = _summary(args.folder, found.manifest)
    if args.verify:
        _verify(Path(args.folder), found.manifest)
        record["verified"] = True
    tokenizer = unpack(corpus.shards(args.folder).tokenizer())
    documents = corpus.sample_documents(args.folder, tokenizer, "train", args.seed)
    record["samples"] = [{"tokens": n, "text": text} for n, text in islice(documents, args.samples)]
    if args.json:
        show.emit(record)
        return 0
    print("\n".join(_lines(record)))
    for sample in record["samples"]:
        text = sample["text"][:PREVIEW] + (" ..." if len(sample["text"]) > PREVIEW else "")
        print(f"\n--- a document of {sample['tokens']:,} tokens\n{readable(text)}")
    return 0


def _verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    files = {
        name: h
        for side in ("train", "test")
        for s in manifest[side]["shards"]
        for name, h in s["files"].items()
    }
    with show.progress("count", "verifying", total=len(files)) as update:
        for name, expected in files.items():
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            if found != expected:
                raise refuse(
                    f"hash of {folder / name}", found, f"{expected}, as in manifest.json: it is damaged"
                )
            update(advance=1)


def _summary(folder: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What both commands print of a manifest."""
    sides = {side: {k: manifest[side][k] for k in ("documents", "tokens")} for side in ("train", "test")}
    return {
        "folder": folder, **sides, "shards": sum(len(manifest[side]["shards"]) for side in sides),
        "dtype": manifest["dtype"].replace("<u", "uint").replace("2", "16").replace("4", "32"),
        "kind": "chats" if manifest["prompts"] else "text", "held_out": manifest["held_out"],
        "tokenizer": manifest["tokenizer"], "source": manifest["source"], "digest": manifest["digest"],
        "skipped": manifest.get("skipped", 0),
    }  # fmt: skip


def _lines(record: Mapping[str, Any]) -> list[str]:
    """A summary for people."""
    lines = [
        f"{'folder':10} {record['folder']}: {record['kind']}, {record['dtype']}, {record['shards']} shards"
    ]
    for side in ("train", "test"):
        counts = record[side]
        lines.append(f"{side:10} {counts['tokens']:,} tokens of {counts['documents']:,} documents")
    if record["skipped"]:
        lines.append(f"{'skipped':10} {record['skipped']:,} bad lines")
    packed = record["tokenizer"]
    lines.append(f"{'tokenizer':10} {packed['vocab_size']:,} ids, SHA-256 {packed['fingerprint'][:16]}...")
    lines.append(
        f"{'source':10} {', '.join(f'{k}={v}' for k, v in record['source'].items() if k != 'files_digest')}"
    )
    if "seconds" in record:
        tokens = sum(record[side]["tokens"] for side in ("train", "test"))
        speed = tokens / max(record["seconds"], 1e-9)
        lines.append(
            f"{'packed':10} in {record['seconds']:.1f} s, {speed:,.0f} tokens/s, workers: {record['workers']}"
        )
    if record.get("verified"):
        lines.append(f"{'verified':10} all files have the hashes of the manifest")
    return lines
