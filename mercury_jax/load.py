"""load(): a model from the package, from a folder, or from the Hugging Face hub.

Apart from `api.py` (training) on purpose: loading and sampling need no trainer, so this module must not import
grain, optax or orbax. A thin door to `hub.load`, which reads the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from mercury_jax import hub
from mercury_jax.types import LM


def load(
    source: str | Path | None = None,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    kv: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """Load a model for sampling, scoring, serving or further training.

    Args:
        source: None or "nano" for the embedded model; a folder that `mercury train` or `mercury convert` wrote; a
            folder in Hugging Face's layout; or an id such as "google/diffusiongemma-26B-A4B-it" or
            "org/name@revision", which is downloaded.
        dtype: "float32", "bfloat16", "float16", or "float64" under x64. Default: the checkpoint's own.
        quantise: "int8" or "fp8" stores each weight matrix so, with one scale per output. Default: not quantised.
        kv: "int8", "4bit" or "3bit" stores the KV cache so. Default: the dtype of the arithmetic.
        mask: The mask id of a masked diffusion model, where the checkpoint does not name it or names it wrongly.
        mesh: The devices that hold the parameters, such as `mj.mesh(tensor=8)`. Default: the first device.
        progress: Called with the number of bytes of each parameter that was loaded.

    Returns:
        The model with its parameters, tokenizer and noise process. Nothing in a checkpoint is ever executed.

    Raises:
        ValueError: The architecture is not supported, the model does not fit into memory, or it has no use for `mask`
            (it is autoregressive, or its noise has none).
        CheckpointError: A file or tensor is missing, damaged, or has another shape; the message names it.

    Example:
        >>> lm = mj.load()
        >>> lm = mj.load("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16", quantise="int8", kv="4bit")
    """
    return hub.load(
        hub.NANO if source is None else source,
        dtype=dtype,
        quantise=quantise,
        kv=kv,
        mask=mask,
        mesh=mesh,
        progress=progress,
    )
