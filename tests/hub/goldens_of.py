"""Golden checkpoints as the tests read them: what the reference computed, and our model of the same files."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.checkpoint import tensors
from mercury_jax.hub.family import Family, Opened
from mercury_jax.hub.load import load_opened, open_checkpoint
from mercury_jax.types import Pass

GOLDENS = Path(__file__).with_name("goldens")
NAMES = sorted(p.parent.name for p in GOLDENS.glob("*/config.json"))


class Golden(NamedTuple):
    name: str
    opened: Opened
    params: dict
    said: dict[str, np.ndarray]  # what the reference was given and what it computed

    @property
    def family(self) -> Family:
        assert self.opened.family is not None  # it is for checkpoints in our own layout
        return self.opened.family


@functools.cache
def golden(name: str) -> Golden:
    folder = GOLDENS / name
    said = read_all(folder / "golden.safetensors")
    mask = int(said["mask_id"][0]) if "mask_id" in said else None
    opened = open_checkpoint(folder, mask=mask, dtype="float32")
    return Golden(name, opened, load_opened(opened, dtype=jnp.dtype("float32")).params, said)


def limit(own: np.ndarray) -> float:
    """Largest difference that counts as equal, given the reference's own between float32 and float64."""
    return max(1e-4, 4 * float(own.max()))


def read_all(path: Path) -> dict[str, np.ndarray]:
    return {name: tensors.read(path, entry) for name, entry in tensors.header(path).items()}


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, given):
    hidden, cache = model.forward(params, given)
    return model.head(params, hidden), cache


def logits_of(g: Golden, tokens: np.ndarray) -> np.ndarray:
    """Our logits of whole rows: clean text for models that encode, one canvas for bidirectional ones."""
    return logits_of_model(g.opened.model, g.params, tokens)


def logits_of_model(model, params, tokens: np.ndarray, canvas: int = 0) -> np.ndarray:
    """The same of any model; with `canvas`, of that many last tokens as a canvas behind the others."""
    rows, known = len(tokens), tokens.shape[1] - canvas
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    encoding = jnp.full((rows,), model.config.pattern != "bidirectional")
    cache = model.empty_cache(rows, known + canvas)
    given = Pass(jnp.asarray(tokens[:, :known]), cache, full(0), full(known), full(known), encoding)
    out, cache = forward(model, params, given)
    if canvas:
        ends = full(known), full(canvas), full(known + canvas)
        out, _ = forward(model, params, Pass(jnp.asarray(tokens[:, known:]), cache, *ends, ~encoding))
    return np.asarray(out)


__all__ = [
    "GOLDENS", "NAMES", "Golden", "forward", "golden", "limit", "logits_of", "logits_of_model", "read_all",
]  # fmt: skip
