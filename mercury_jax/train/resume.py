"""What resuming needs besides the state: may this run go on here, and where was its data."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mercury_jax import checkpoint
from mercury_jax.config import from_dict, refuse
from mercury_jax.train.recipe import TrainConfig, resolved

CHECKPOINTS = "checkpoints"


def ready(config: TrainConfig) -> int | None:
    """The step that `resume` goes on from, or None; refuses a folder with another run's checkpoints."""
    folder = config.folder / CHECKPOINTS
    newest = checkpoint.latest(folder)
    if newest is None:
        return None
    if not config.resume:
        allowed = f"a folder without checkpoints; {folder} holds step {newest}: resume it (--resume) or choose another"
        raise refuse("out", str(config.folder), allowed)
    saved, now = checkpoint.inspect(folder)[1]["config"], resolved(config)
    for part in ("model", "noise"):
        # A key that the checkpoint is too old to have stands at its default.
        had = resolved(from_dict(type(getattr(config, part)), saved[part]))
        for name, value in now[part].items():
            if had[name] != value:
                raise refuse(f"{part}.{name}", value, f"{had[name]!r}, as in the checkpoint to resume")
    return newest


def gather(state: Any) -> Any:
    """The data state of all processes: `state` with the `rows` of every process, on each of them.

    Any number of processes can go on from it. A single process's state is returned as it is.
    """
    if jax.process_count() == 1:
        return state
    mine = np.frombuffer(json.dumps(state).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(mine)))
    padded = np.pad(mine, (0, int(lengths.max()) - len(mine)))
    every = multihost_utils.process_allgather(padded)
    states = [json.loads(bytes(row[:length])) for row, length in zip(every, lengths)]
    return {**state, "rows": {number: row for one in states for number, row in one["rows"].items()}}
