"""Goldens of the timed and uniform families: histograms of what the references' own samplers draw on our checkpoints.

    python tests/conformance/reference_dit.py FOLDER [mdlm bd3lm duo gidd]

FOLDER holds the public code, which this script imports and never copies: `mdlm`, `bd3lms` (kuleshov-group), `duo`
(s-sahoo/duo) and `gidd` (dvruette/gidd). It needs torch, transformers 4.57, einops and safetensors. Each family becomes
goldens/<family>.safetensors, which `test_dit.py` reads.

A golden is what ROWS draws of one prompt hold: how often each id stands at each position, how often pairs of ids (as
`id % BINS`) stand at neighbouring positions, and how many passes a row takes. The samplers are methods of Lightning
modules: they run on an object that holds what they read, with the network of the checkpoint behind `forward`. What is
changed for the run: the canvas starts with a prompt, whose tokens are put back after each step; the end of text is
forbidden where a case says so, because the references go on after it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parent / "hub" / "goldens"
ROWS, LENGTH, BINS = 4096, 8, 12
PROMPT = [5, 17, 33, 41, 8, 60, 22, 11]
VOCAB, MASK, EOS = 97, 96, 95


class Bound:
    """Stands in for a Lightning module: its methods by name, everything else as given."""

    def __init__(self, kind: type, **fields: Any):
        self.__dict__.update(fields, kind=kind)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self.kind, name), self)


def stub(*names: str) -> None:
    """Registers empty modules for packages that a run imports and does not use."""
    for name in names:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        module.__getattr__ = lambda attribute: mock.MagicMock()  # type: ignore[method-assign]
        sys.modules[name] = module
    if "lightning" in names:
        sys.modules["lightning"].LightningModule = object
    if "torchmetrics" in names:
        sys.modules["torchmetrics"].aggregation = types.SimpleNamespace(MeanMetric=object)


def namespace(**fields: Any) -> Any:
    """A config: nested attributes."""
    nested = lambda x: namespace(**x) if isinstance(x, dict) else x
    return types.SimpleNamespace(**{k: nested(v) for k, v in fields.items()})


def network(folder: Path, name: str) -> Any:
    """The checkpoint in GIDD's class of the network that MDLM, DUO and GIDD share (it needs no flash-attn)."""
    sys.path.insert(0, str(folder / "gidd"))
    stub("flash_attn_missing")
    models = importlib.import_module("gidd.models.modeling_dit")
    config = models.DITConfig(
        hidden_size=32, timestep_cond_dim=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
        max_seq_len=len(PROMPT) + LENGTH, attention_dropout=0.0,
    )  # fmt: skip
    net = models.DIT(config)
    stored = load_file(CHECKPOINTS / name / "model.safetensors")
    kept = {k.removeprefix("backbone."): v for k, v in stored.items() if "rotary" not in k}
    missing, surplus = net.load_state_dict(kept, strict=False)
    assert not surplus and all("rotary" in k for k in missing), (missing, surplus)
    return net.eval()


def starts(rows: int, noise: Any) -> Any:
    """A canvas: the prompt, then noise."""
    x = noise.clone()
    x[:, : len(PROMPT)] = torch.tensor(PROMPT)
    return x.expand(rows, -1).clone()


def histogram(name: str, x: Any, passes: Any) -> dict[str, Any]:
    """Counts of one case, by `name/what`."""
    x = np.asarray(x)[:, len(PROMPT) :]
    marginal = np.stack([np.bincount(x[:, i], minlength=VOCAB) for i in range(LENGTH)])
    pairs = [np.bincount(x[:, i] % BINS * BINS + x[:, i + 1] % BINS, minlength=BINS**2) for i in range(LENGTH - 1)]
    counts = np.bincount(np.broadcast_to(np.asarray(passes), len(x)), minlength=2 * LENGTH)
    print(name, "passes", dict(enumerate(counts.tolist())), "most frequent", marginal.max(1).tolist())
    found = dict(marginal=marginal, pairs=np.stack(pairs), passes=counts)
    return {f"{name}/{key}": torch.from_numpy(value.astype(np.int32)) for key, value in found.items()}


# --- MDLM


def mdlm(folder: Path) -> dict[str, Any]:
    """`_sample` of mdlm's diffusion.py, predictor ddpm_cache and ddpm."""
    stub("hydra", "hydra.utils", "lightning", "torchmetrics", "dataloader", "models", "utils")
    sys.path.insert(0, str(folder / "mdlm"))
    diffusion = importlib.import_module("diffusion")
    net = network(folder, "mdlm")
    found = {}
    for steps in (4, 16):
        accepted = torch.zeros(ROWS, dtype=torch.long)

        def backbone(x: Any, sigma: Any) -> Any:
            logits = net(x, torch.zeros_like(sigma))  # time_conditioning: false
            logits[..., EOS] = -1e9
            return logits

        def counted(self: Any, x: Any, t: Any, dt: Any, p_x0: Any = None, accepted: Any = accepted) -> Any:
            p_x0, after = diffusion.Diffusion._ddpm_caching_update(self, x, t, dt, p_x0=p_x0)
            accepted += (after != x).any(-1)
            return p_x0, after

        sampling = dict(steps=steps, noise_removal=True)
        self = Bound(
            diffusion.Diffusion, config=namespace(
                sampling=sampling, noise=dict(type="loglinear"), loader=dict(eval_batch_size=ROWS),
                model=dict(length=len(PROMPT) + LENGTH),
            ),
            parameterization="subs", sampler="ddpm_cache", time_conditioning=False, device="cpu", mask_index=MASK,
            neg_infinity=-1000000.0, noise=importlib.import_module("noise_schedule").LogLinearNoise(),
            backbone=backbone, T=0, _sample_prior=lambda rows, length: starts(rows, torch.full((1, length), MASK)),
        )  # fmt: skip
        self._ddpm_caching_update = functools.partial(counted, self)
        x = self._sample()
        # The passes that a row alone would take: one for each step that changes it (the cache serves the others).
        found |= histogram(f"ancestral_{steps}", x, accepted)
    return found


FAMILIES = {f.__name__: f for f in (mdlm,)}

if __name__ == "__main__":
    with torch.no_grad():
        for chosen in sys.argv[2:] or FAMILIES:
            torch.manual_seed(0)
            save_file(FAMILIES[chosen](Path(sys.argv[1])), HERE / "goldens" / f"{chosen}.safetensors")
