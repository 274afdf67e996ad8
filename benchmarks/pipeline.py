"""The data pipeline of training at scale: tokens per second from shards, start and resume, memory.

The goals: from shards at least 5 million packed tokens a second and core, start and resume in under 5 seconds whatever
the corpus, and 2 GB of tokens under a limit of 1 GB of memory. Run with `python -m benchmarks.pipeline`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks import pipeline_worker
from benchmarks.script import Ints, run_script
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option
from mercury_jax.compilation import hardware
from mercury_jax.config import at_least
from mercury_jax.hub import NANO
from mercury_jax.tokenizer import SPECIAL, Tokenizer
from mercury_jax.training import data
from mercury_jax.training.data import corpus, shard_writer
from mercury_jax.training.data.documents import Files

GOAL_TOKENS, GOAL_SECONDS, GOAL_BYTES = 5e6, 5.0, 2**30
PATTERNS = ("bidirectional", "causal_encoder", "block_causal")
ROWS = 16
SHARD = 2**27  # tokens, as `mercury data pack` writes them
MEAN = 600  # tokens of a document; their lengths are log-normal, as those of web pages are


@dataclass(frozen=True, kw_only=True)
class PipelineBenchmark:
    """Measure batches from shards: speed, start, resume, memory.

    examples:
      python -m benchmarks.pipeline
      python -m benchmarks.pipeline --megabytes 10 200 --json

    `throughput`: positions of the rows that hold a token, and tokens of text
    (each counted once, though a causal encoder lays it out twice), by second of
    CPU time of one thread, through train.data.build with its default infilling.
    `start`: a fresh process, files not in the page cache, from behind the imports
    to the first batch, and the same with a state from the middle of an epoch. `memory`:
    a whole epoch of the largest corpus under RLIMIT_DATA and, where this user may
    make one, a cgroup with the same limit, which counts the page cache too.
    `direct`: the same texts from shards and tokenised at the start.
    Shards are synthetic, in a temporary folder that is removed.
    """

    rows: Ints = (256, 1024, 4096)
    """Positions of a row."""
    megabytes: Ints = (10, 200, 2000)
    """Sizes of the corpora, in MB of tokens."""
    seconds: Int = 3
    """CPU seconds of a throughput."""
    folder: Annotated[str | None, option("FOLDER")] = None
    """Where the temporary folder goes. Default: that of the system."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(PipelineBenchmark, argv, "python -m benchmarks.pipeline")
    at_least(1, rows=min(args.rows), megabytes=min(args.megabytes), seconds=args.seconds)
    show.check_writable("--out", args.out)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        records = measure(Path(folder), args.rows, args.megabytes, args.seconds)
        show.report(records, args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    if row["measure"] == "throughput":
        return (
            f"{row['pattern']}, row {row['row']}: {row['positions_per_second'] / 1e6:.1f} M positions and "
            f"{row['text_tokens_per_second'] / 1e6:.1f} M tokens of text by CPU second, {row['filled']:.1%} of "
            f"the rows filled (the goal is {row['at_least'] / 1e6:.0f} M)"
        )
    if row["measure"] == "start":
        return (
            f"{row['megabytes']} MB of tokens: first batch {row['seconds']:.3f} s after the imports "
            f"({row['import_seconds']:.1f} s), resumed {row['resume_seconds']:.3f} s; CPU time "
            f"{row['cpu_seconds']:.3f} and {row['resume_cpu_seconds']:.3f} s (the goal is {row['at_most']:.0f} s)"
        )
    if row["measure"] == "memory":
        return (
            f"an epoch of {row['megabytes']} MB under {row['limit']}: {row['anonymous_bytes'] / 2**20:.0f} MiB of "
            f"private memory, {row['file_bytes'] / 2**20:.0f} MiB of mapped files, "
            f"{row['tokens_per_second'] / 1e6:.1f} M tokens/s"
        )
    return (
        f"{row['documents']} files, {row['tokens']:,} tokens: first batch after {row['shards_seconds']:.3f} s from "
        f"shards and {row['direct_seconds']:.1f} s directly; then {row['shards_per_second'] / 1e6:.2f} and "
        f"{row['direct_per_second'] / 1e6:.2f} M positions by CPU second; packing took {row['pack_seconds']:.1f} s"
    )


def measure(
    folder: Path, rows: Sequence[int], megabytes: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Measures all of it; corpora are made in turn.

    Args:
        folder: For the shards.
        rows: Positions of a row.
        megabytes: Sizes of the corpora.
        seconds: CPU seconds of a throughput.

    Yields:
        The records.
    """
    about = {"hardware": hardware(), "rows": ROWS, "block": 32, "seed": 0}
    for number, size in enumerate(sorted(megabytes)):
        packed = folder / f"corpus{number}"
        documents = write_corpus(packed, size * 10**6)
        job = {
            "folder": str(packed),
            "rows": ROWS,
            "row": 4096,
            "pattern": PATTERNS[0],
            "prefetch": 0,
            "state": None,
        }
        known = {"megabytes": size, "tokens": size * 10**6 // 2, "documents": documents, **about}
        yield {"measure": "start", **_start(job), **known}
        if size == max(megabytes):
            yield {"measure": "memory", **_memory(job), **known}  # first: pages that this process maps stay
            for pattern in PATTERNS:
                for row in rows:
                    found = _throughput({**job, "pattern": pattern, "row": row}, seconds)
                    yield {"measure": "throughput", "pattern": pattern, "row": row, **found, **known}
    yield {"measure": "direct", **_against_direct(folder, seconds), **about}


def write_corpus(folder: Path, size: int) -> int:
    """Writes synthetic shards in the format of `train.data.corpus`.

    Args:
        folder: A new folder.
        size: Bytes of tokens.

    Returns:
        The number of documents.
    """
    folder.mkdir()
    rng, tokenizer, left, shards = (
        np.random.default_rng(0),
        Tokenizer.load(NANO / "tokenizer.model"),
        size // 2,
        [],
    )
    ids = rng.integers(len(SPECIAL), tokenizer.vocab_size, 2**24, dtype=np.uint16)
    while left:
        count, name = min(left, SHARD), f"train-{len(shards):05}"
        lengths = np.maximum(2, rng.lognormal(np.log(MEAN) - 0.5, 1, 2 * count // MEAN + 100)).astype(
            np.int64
        )
        ends = np.cumsum(lengths)
        index = np.concatenate([[0], ends[ends < count - 1], [count]]).astype("<i8")
        tokens = np.resize(ids, count)
        tokens[index[1:] - 1] = SPECIAL.eos
        tokens.tofile(folder / f"{name}{corpus.TOKENS}")
        index.tofile(folder / f"{name}{corpus.INDEX}")
        shards.append({"name": name, "documents": len(index) - 1, "tokens": count})
        left -= count
    sides = {"train": {"shards": shards}, "test": {"shards": []}}
    manifest = {
        "format": corpus.FORMAT, "version": corpus.VERSION, "dtype": "<u2", "prompts": False, "digest": str(size),
        "tokenizer": {"fingerprint": tokenizer.fingerprint}, **sides,
    }  # fmt: skip
    (folder / corpus.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return sum(shard["documents"] for shard in shards)


def _throughput(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Positions and tokens of text by second of CPU time of one thread, and positions by second with the default."""
    run = pipeline_worker.batches(job)
    for _ in range(3):
        next(run)
    state, count, begin = run.get_state(), 0, time.process_time()
    while (spent := time.process_time() - begin) < seconds:
        next(run)
        count += 1
    # The same batches again, to count what they hold.
    run.set_state(state)
    positions = tokens = 0
    for _ in range(min(count, 200)):
        batch = next(run)
        held = (batch.ranges[..., 1] > batch.ranges[..., 0]).any(-1)
        positions += int(held.sum())
        # A token stands in its canvas, or as a prompt in the clean positions alone.
        tokens += int(((batch.canvas >= 0) & (batch.tokens != SPECIAL.eos)).sum())
    share = ROWS * job["row"] * min(count, 200)
    speed = count * ROWS * job["row"] / spent
    ahead = pipeline_worker.batches({**job, "prefetch": 2})
    next(ahead)
    begin = time.perf_counter()
    for _ in range(max(count // 3, 1)):
        next(ahead)
    wall = max(count // 3, 1) * share / min(count, 200) / (time.perf_counter() - begin)
    ahead.close()
    found = positions / share * speed
    return {
        "positions_per_second": found, "text_tokens_per_second": tokens / share * speed, "filled": positions / share,
        "positions_per_second_prefetched": positions / share * wall, "at_least": GOAL_TOKENS,
        "within": found >= GOAL_TOKENS, "batches": count,
    }  # fmt: skip


def _start(job: dict[str, Any]) -> dict[str, Any]:
    """Fresh processes, with the files out of the page cache."""
    run = pipeline_worker.batches(job)
    next(run)
    state = run.get_state()
    for row in state["rows"].values():  # the middle of an epoch
        row["next"], row["offset"] = [_windows(job) // 2], [100]
    _drop(job["folder"])
    fresh = _worker({"what": "start", **job})
    _drop(job["folder"])
    resumed = _worker({"what": "start", **job, "state": state})
    again = {f"resume_{name}": value for name, value in resumed.items()}
    within = max(fresh["seconds"], resumed["seconds"]) <= GOAL_SECONDS
    return {**fresh, **again, "at_most": GOAL_SECONDS, "within": within}


def _memory(job: dict[str, Any]) -> dict[str, Any]:
    _drop(job["folder"])
    with _cgroup(GOAL_BYTES) as cgroup:
        more = {"what": "epoch", "limit": GOAL_BYTES, "cgroup": cgroup, "windows": _windows(job)}
        found = _worker({**job, **more})
        if cgroup:
            peaks = (Path(cgroup) / name for name in ("memory.max_usage_in_bytes", "memory.peak"))
            found["cgroup_peak_bytes"] = next(
                (int(path.read_text()) for path in peaks if path.exists()), None
            )
    limit = "RLIMIT_DATA of 1 GiB" + (" and a cgroup of 1 GiB" if cgroup else "")
    speed = found["tokens"] / found["seconds"]
    within = found["data_bytes"] <= GOAL_BYTES
    return {
        "limit": limit,
        "epoch_tokens": found.pop("tokens"),
        **found,
        "tokens_per_second": speed,
        "within": within,
    }


def _windows(job: dict[str, Any]) -> int:
    """Windows of an epoch that each row of the batch takes, rounded up: as the source counts them."""
    manifest = corpus.read_manifest(job["folder"])
    size = max(job["row"] // 32 * 32, corpus.WINDOW)
    return -(-sum(-(-shard["tokens"] // size) + 1 for shard in manifest["train"]["shards"]) // job["rows"])


def _against_direct(folder: Path, seconds: float) -> dict[str, Any]:
    """The interpreter's standard library from shards, and as the source that tokenises it at every start."""
    tokenizer = Tokenizer.load(NANO / "tokenizer.model")
    texts = [text for _, text in data.stdlib().documents("train")]
    (folder / "stdlib.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8"
    )
    begin = time.perf_counter()
    out, workers = folder / "stdlib", os.cpu_count() or 1
    manifest = shard_writer.pack(Files((str(folder / "stdlib.jsonl"),)), tokenizer, out, workers=workers)
    found: dict[str, Any] = {"pack_seconds": time.perf_counter() - begin, "workers": workers}
    for name, source in (
        ("shards", data.shards(str(out))),
        ("direct", data.jsonl(str(folder / "stdlib.jsonl"))),
    ):
        layout = pipeline_worker.layout("bidirectional", tokenizer)
        begin = time.perf_counter()
        run = data.build(
            data.mixture((source, 1)), tokenizer, layout, rows=ROWS, row=1024, seed=0, prefetch=0
        )
        next(run)
        found[f"{name}_seconds"] = time.perf_counter() - begin
        count, begin = 0, time.process_time()
        while (spent := time.process_time() - begin) < seconds:
            count += next(run).tokens.size
        found[f"{name}_per_second"] = count / spent
    return {**found, **{name: manifest["train"][name] for name in ("documents", "tokens")}, "row": 1024}


def _worker(job: dict[str, Any]) -> dict[str, Any]:
    job = {**job, "began": time.time()}
    command = [sys.executable, "-m", "benchmarks.pipeline_worker", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job['what']} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _drop(folder: str) -> None:
    """Drops the files of a folder from the page cache, which pages that a process maps would not leave."""
    gc.collect()
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _cgroup(limit: int) -> Iterator[str | None]:
    """A memory cgroup, of version 1 or 2; None where this user may not make one."""
    root, name = Path("/sys/fs/cgroup"), f"mercury-pipeline-{os.getpid()}"
    first = (root / "memory").is_dir()
    path = (root / "memory" if first else root) / name
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        yield None
        return
    try:
        yield str(path)
    finally:
        path.rmdir()


if __name__ == "__main__":
    sys.exit(run_script(run))
