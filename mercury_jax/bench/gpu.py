"""One look at an accelerator in some minutes: its own ceilings, then kernels, models and training against them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

import jax

from mercury_jax.bench import gpu_attention, gpu_models, gpu_training
from mercury_jax.bench.ceilings import Ceilings, ceilings
from mercury_jax.bench.gpu_models import Running

Row = dict[str, Any]
Step = Callable[[], Iterator[Row]]

MODELS = (
    Running("diffusiongemma-26b-a4b"), Running("diffusiongemma-26b-a4b", "int8"), Running("mercury-100m"),
    Running("mercury-100m", batch=64), Running("llada-8b", prefix=256), Running("llada-8b", "int8", prefix=256),
)  # fmt: skip
TRAINED = (("mercury-100m", 32), ("mercury-350m", 16), ("mercury-1b", 8))
SMALL = (Running("nano", prefix=64), Running("nano", "int8", prefix=64))
SMALL_SHAPES = [
    gpu_attention.Shape("canvas 32 over 320, batch 2, heads 4/2 of 64", 2, 32, 320, 4, 2, 64),
    gpu_attention.Shape("prefill 256, heads 4/2 of 64", 1, 256, 256, 4, 2, 64, causal=True),
]


def measure(small: bool = False, minutes: float = 8.0) -> Iterator[Row]:
    """JSON-ready rows as they are measured; the first has the ceilings. small: what a laptop can do in a minute.

    Behind `minutes` nothing new begins; what was left out has a row that says so. A model or kernel that fails, for
    memory or else, has a row with the reason, and the others are measured.
    """
    began, about = time.monotonic(), _about()
    most = ceilings(64, 512) if small else ceilings()
    yield about | {
        "experiment": "ceilings",
        "bytes_per_second": most.bandwidth,
        "flops_per_second": most.matmul,
    }
    for name, step in _steps(most, small):
        if time.monotonic() - began > 60 * minutes:
            yield about | {"experiment": name, "left_out": f"{minutes:g} minutes were over"}
            continue
        try:
            for row in step():
                yield about | row
        except Exception as error:  # too little memory for one of them says nothing of the others
            yield about | {"experiment": name, "failed": f"{type(error).__name__}: {error}"[:500]}
        jax.clear_caches()


def _steps(most: Ceilings, small: bool) -> Iterator[tuple[str, Step]]:
    """The most wanted first, in case that time runs out."""
    once = lambda call: lambda: iter([call()])
    for asked in SMALL if small else MODELS:
        yield (
            f"decoding {asked.name} {asked.quantise or ''}".strip(),
            once(partial(gpu_models.decoding, most, asked)),
        )
    for shape in SMALL_SHAPES if small else gpu_attention.table():
        yield f"attention {shape.name}", partial(gpu_attention.measure, most, [shape])
    for name, rows in (("nano", 2),) if small else TRAINED:
        size = 128 if small else 2048
        yield f"training {name}", once(partial(gpu_training.training, most, name, rows, size))


def _about() -> Row:
    device = jax.devices()[0]
    return {
        "hardware": device.device_kind, "platform": device.platform, "devices": jax.device_count(),
        "jax": jax.__version__, "date": str(date.today()),
    }  # fmt: skip
