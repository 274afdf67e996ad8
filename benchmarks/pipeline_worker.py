"""One fresh process of `benchmarks.pipeline`: opens shards and reads batches, under a limit of memory.

Called with one JSON object, prints another one. See `start` and `epoch`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from mercury_jax.config import ModelConfig, Pattern
from mercury_jax.hub import NANO
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.training import data
from mercury_jax.training.data import pipeline  # noqa: F401  imports grain, which `data` leaves to the first use
from mercury_jax.types import Layout

IMPORTED = time.time()


def layout(pattern: Pattern, tokenizer: Tokenizer) -> Layout:
    """The layout of a model with canvases of 32 tokens."""
    return DocumentLayout(ModelConfig(vocab=tokenizer.vocab_size, block=32, pattern=pattern))


def batches(job: dict[str, Any]) -> Any:
    """The public path: a mixture of one source of shards."""
    tokenizer = Tokenizer.load(NANO / "tokenizer.model")
    mixture = data.mixture((data.shards(job["folder"]), 1))
    size = {"rows": job["rows"], "row": job["row"], "seed": 0, "prefetch": job["prefetch"]}
    return data.build(mixture, tokenizer, layout(job["pattern"], tokenizer), **size)


def start(job: dict[str, Any]) -> dict[str, float]:
    """Times opening the corpus, going on at a state if there is one, and the first batch; seconds of CPU time too."""
    begin, cpu = time.perf_counter(), time.process_time()
    run = batches(job)
    opened = time.perf_counter()
    if job["state"]:
        run.set_state(job["state"])
    next(run)
    done = time.perf_counter()
    return {
        "import_seconds": IMPORTED - job["began"], "open_seconds": opened - begin,
        "first_batch_seconds": done - opened, "seconds": done - begin, "cpu_seconds": time.process_time() - cpu,
    }  # fmt: skip


def epoch(job: dict[str, Any]) -> dict[str, float]:
    """Reads one epoch under a limit of memory; the greatest resident sizes that it saw, in bytes."""
    if job["cgroup"]:
        with open(os.path.join(job["cgroup"], "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    resource.setrlimit(resource.RLIMIT_DATA, (job["limit"], job["limit"]))
    run, tokens, count, most = batches(job), 0, 0, dict[str, int]()
    begin = time.perf_counter()
    while count % 100 or any(row["next"][0] < job["windows"] for row in run.get_state()["rows"].values()):
        tokens += int((next(run).canvas >= 0).sum())
        count += 1
        if count % 100 == 0:
            most = {name: max(size, most.get(name, 0)) for name, size in resident().items()}
    return {"batches": count, "tokens": tokens, "seconds": time.perf_counter() - begin, **most}


def resident() -> dict[str, int]:
    """Resident memory of this process: private pages, and pages of files, which the kernel can drop."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {
        name: 1024 * int(fields[key].split()[0])
        for name, key in (("anonymous_bytes", "RssAnon"), ("file_bytes", "RssFile"), ("data_bytes", "VmData"))
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps({"start": start, "epoch": epoch}[given["what"]](given)))
