"""Small random checkpoints in the real file format, and the same model in true float64."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

GOLDENS = Path(__file__).parents[2] / "tests/hub/goldens"


class Lifted(TorchFunctionMode):
    """Every cast to float32 becomes one to float64.

    `model.double()` alone leaves norms, softmaxes, rotary angles and the logits in float32, because the
    modelling code casts there; under this mode nothing is rounded to 24 bits on the way.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        swap = lambda x: torch.float64 if x is torch.float32 else x
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator, embed: float) -> np.ndarray:
    """A random tensor of a scale that fits its role; nothing is left at the ones and zeros of a fresh model."""
    last = name.rsplit(".", 1)[-1]
    if "q_norm" in name or "k_norm" in name:  # Gemma's scores are not divided by the root of the head's size
        return rng.uniform(0.4, 0.9, shape)
    if last in ("layer_scalar", "scale") or ("norm" in name and last == "weight"):
        return rng.uniform(0.7, 1.3, shape)
    if last == "per_expert_scale":
        return rng.uniform(0.5, 1.8, shape)
    if len(shape) < 2:
        return rng.normal(0.0, 0.3, shape)
    if "embed_tokens" in name or "lm_head" in name:
        return rng.normal(0.0, embed, shape)
    gain = 2.0 if ".router." in name or name.endswith("mlp.gate.weight") else 1.2
    if "self_conditioning.down" in name:  # stronger, it multiplies rounding errors several times a step
        gain = 0.3
    return rng.normal(0.0, gain / shape[-1] ** 0.5, shape)


@torch.no_grad()
def randomise(model: Any, seed: int, embed: float) -> None:
    """Redraw every parameter and every saved buffer in place, in the order of their names."""
    saved = set(model.state_dict())
    leaves = {k: v for k, v in (*model.named_parameters(), *model.named_buffers()) if k in saved}
    rng = np.random.default_rng(seed)
    for name in sorted(leaves):
        leaf = leaves[name]
        if leaf.isfinite().all():  # the bounds of clipped layers stay infinite
            leaf.copy_(torch.from_numpy(draw(name, tuple(leaf.shape), rng, embed)))


def save(model: Any, folder: Path, published: Callable[[dict], dict] | None = None, **how: Any) -> None:
    """`save_pretrained` into an emptied folder; `published` turns config.json into the older, published form."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **how)
    path = folder / "config.json"
    if published is not None:
        path.write_text(json.dumps(published(json.loads(path.read_text())), indent=2, sort_keys=True) + "\n")


def load(folder: Path, kind: Any) -> Any:
    """What the files say, in float32, with eager attention and the plain loop over experts."""
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {k: v for k, v in info.items() if v}
    assert not wrong, f"{folder.name}: {wrong}"
    return plain(model)


def plain(model: Any) -> Any:
    """Experts one after the other: the grouped kernels have no float64."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.eval()


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """float64 wherever a dtype is not named, and wherever float32 is."""
    torch.set_default_dtype(torch.float64)
    try:
        with Lifted(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def lifted(model: Any) -> Any:
    """The same weights in float64, with every derived constant recomputed; call under `wide`."""
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return plain(twin.double())


def both(model: Any, run: Callable[[Any], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`run` with the model in float32 and in float64."""
    with torch.no_grad():
        single = run(model)
    with wide():
        return single, run(lifted(model))


def difference(single: Any, double: Any) -> Any:
    """max |fp32 - fp64| as float64 [1]."""
    assert double.dtype == torch.float64
    return (single.double() - double).abs().max().reshape(1)


def write(folder: Path, tensors: dict[str, Any], name: str = "golden", **metadata: str) -> None:
    """One safetensors file, ids as int32."""
    narrow = lambda x: x.to(torch.int32) if x.dtype == torch.int64 else x
    save_file(
        {k: narrow(v).contiguous() for k, v in tensors.items()}, folder / f"{name}.safetensors", metadata
    )


def ids(seed: int, shape: tuple[int, int], vocab: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, shape))
