"""Goldens of the timed and uniform families: histograms of what the references' own samplers draw on our checkpoints.

    python qa/parity/reference_dit.py FOLDER [mdlm bd3lm duo gidd]

FOLDER holds the public code, which this script imports and never copies: `mdlm`, `bd3lms` (kuleshov-group), `duo`
(s-sahoo/duo) and `gidd` (dvruette/gidd). It needs torch, transformers 4.57, einops and safetensors. Each family becomes
tests/conformance/goldens/<family>.safetensors, which `test_dit.py` reads.

A golden is what ROWS draws of one prompt hold: how often each id stands at each position, how often pairs of ids (as
`id % BINS`) stand at neighbouring positions, and how many passes a row takes. The samplers are methods of Lightning
modules: they run on an object that holds what they read, with the network of the checkpoint behind `forward`. What is
changed for the run: the canvas starts with a prompt, whose tokens are put back after each step; the end of text is
forbidden where a case says so, because the references go on after it.
"""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

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

TESTS = Path(__file__).parents[2] / "tests"
CHECKPOINTS = TESTS / "hub" / "goldens"
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
    """Counts of one case, by `name/what`; what follows an end of text counts as further ends."""
    x = np.asarray(x)[:, len(PROMPT) :]
    x = np.where(np.cumsum(x == EOS, axis=1) > 0, EOS, x)
    marginal = np.stack([np.bincount(x[:, i], minlength=VOCAB) for i in range(LENGTH)])
    pairs = [
        np.bincount(x[:, i] % BINS * BINS + x[:, i + 1] % BINS, minlength=BINS**2) for i in range(LENGTH - 1)
    ]
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


# --- BD3-LM


def bd3lm(folder: Path) -> dict[str, Any]:
    """`_semi_ar_sampler` of bd3lms' diffusion.py, first hitting, without its rejection of repetitive samples."""
    stub("hydra", "hydra.utils", "lightning", "torchmetrics", "dataloader", "metrics", "models", "utils")
    sys.path.insert(0, str(folder / "bd3lms"))
    diffusion = importlib.import_module("diffusion")
    package = types.ModuleType("bd3lm_hf")
    package.__path__ = [str(folder / "bd3lms" / "models" / "hf")]
    sys.modules["bd3lm_hf"] = package
    modeling = importlib.import_module("bd3lm_hf.modeling_bd3lm")
    config = modeling.BD3LMConfig.from_pretrained(CHECKPOINTS / "bd3lm", attn_backend="sdpa")
    net = modeling.BD3LM(config)
    net.load_state_dict(load_file(CHECKPOINTS / "bd3lm" / "model.safetensors"), strict=False)
    net.eval()
    found, block = {}, config.block_size
    for name, nucleus, rows in (("first_hitting", 1.0, 600), ("nucleus", 0.6, 400)):

        def backbone(x: Any, sigma: Any, store_kv: bool = False, sample_mode: bool = False) -> Any:
            logits = net(x, torch.zeros_like(sigma), sample_mode=True, return_dict=False)
            logits[..., EOS] = -1e9
            return logits

        def prior(rows: int, length: int, calls: list[int] = []) -> Any:  # noqa: B006
            calls.append(0)  # the first block is the prompt, the second masks
            return torch.tensor([PROMPT]) if len(calls) % 2 else torch.full((1, length), MASK)

        self = Bound(
            diffusion.Diffusion, config=namespace(
                sampling=dict(nucleus_p=nucleus, first_hitting=True, kv_cache=False, var_length=False),
                algo=dict(name="bd3lm"), model=dict(length=len(PROMPT) + LENGTH), loader=dict(eval_batch_size=1),
            ),
            parameterization="subs", cross_attn=True, time_conditioning=False, device="cpu", dtype=torch.float32,
            mask_index=MASK, neg_infinity=-1000000.0, block_size=block, num_tokens=len(PROMPT) + LENGTH,
            noise=importlib.import_module("noise_schedule").LogLinearNoise(), backbone=backbone, _sample_prior=prior,
            tokenizer=namespace(bos_token_id=PROMPT[0], eos_token_id=EOS),
        )  # fmt: skip
        drawn = [self._semi_ar_sampler(1, 5000, 2, len(PROMPT) + LENGTH) for _ in range(rows)]
        x = torch.cat([sample for sample, _ in drawn])
        found |= histogram(name, x, [passes for _, passes in drawn])
    return found


# --- DUO


def duo(folder: Path) -> dict[str, Any]:
    """`generate_samples` of duo's trainer_base.py with the posterior of its algo.py: ancestral, greedy tail, psi."""
    stub(
        "hydra", "hydra.utils", "lightning", "torchmetrics", "dataloader", "metrics", "models", "utils",
        "fsspec",
    )  # fmt: skip
    sys.path.insert(0, str(folder / "duo"))
    base, algo = importlib.import_module("trainer_base"), importlib.import_module("algo")
    net, found = network(folder, "duo"), {}
    linear = dict(time_profile="linear", high_frac=0.5, middle_frac=0.4)
    modes = dict(high_mode="pure-posterior", middle_mode="constant-0.5", low_mode="pure-posterior")
    remdm = dict.fromkeys(("high_mode", "middle_mode", "low_mode"), "max-capped-0.3")
    for name, predictor, removal, steps, psi in (
        ("ancestral", "ancestral", "ancestral", 6, dict(time_profile="linear")),
        ("greedy", "ancestral", "greedy", 4, dict(time_profile="linear")),
        ("psi_constant", "psi", "ancestral", 10, linear | modes),
        (
            "psi_max_capped",
            "psi",
            "ancestral",
            8,
            dict(time_profile="linear", high_frac=0.0, middle_frac=0.0) | remdm,
        ),
    ):
        calls: list[int] = []

        def backbone(x: Any, sigma: Any, calls: list[int] = calls, **_: Any) -> Any:
            calls.append(1)
            return net(x, sigma)

        self = Bound(
            algo.DUO_BASE, config=namespace(
                sampling=dict(predictor=predictor, steps=steps, noise_removal=removal, use_float64=True, psi=psi,
                              guid_weight=None),
            ),
            sampler=predictor, class_conditional=False, p_nucleus=1.0, time_conditioning=True, device="cpu",
            dtype=torch.float32, vocab_size=VOCAB, num_tokens=len(PROMPT) + LENGTH, noise=base.LogLinear(1e-3),
            backbone=backbone,
        )  # fmt: skip
        # The prompt is put back after each step.
        for method in ("_ancestral_update", "_psi_update"):
            plain = functools.partial(getattr(algo.DUO_BASE, method), self)

            def kept(*args: Any, plain: Any = plain, **given: Any) -> Any:
                p_x0, x = plain(*args, **given)
                x[:, : len(PROMPT)] = torch.tensor(PROMPT)
                return p_x0, x

            setattr(self, method, kept)
        draw = lambda rows, length: starts(rows, torch.randint(0, VOCAB, (rows, length)))
        self.prior_sample = draw
        x = self.generate_samples(ROWS)
        found |= histogram(name, x, len(calls))
    return found


# --- GIDD


def gidd(folder: Path) -> dict[str, Any]:
    """`GiddSampler` of gidd/sampling.py, with and without `min_p`."""
    net, found = network(folder, "gidd"), {}
    sampling = importlib.import_module("gidd.sampling")
    process = importlib.import_module("gidd.diffusion_process")

    class Tokenizer:
        mask_token_id = MASK

        def __len__(self) -> int:
            return VOCAB

    def model(z: Any, t: Any) -> Any:
        logits = net(z, t)
        logits[..., EOS] = -1e9
        return logits

    schedule = process.HybridDiffusion(Tokenizer(), p_uniform=0.2)
    for name, steps, min_p in (("ancestral", 8, 0.0), ("min_p", 12, 0.02)):
        sampler = sampling.GiddSampler(
            model, Tokenizer(), schedule, t_eps=1e-4, compile_step=False, min_p=min_p
        )
        step = sampler.sampling_step

        def kept(z: Any, t: Any, s: Any, step: Any = step) -> Any:
            z = step(z, t, s)
            z[:, : len(PROMPT)] = torch.tensor(PROMPT)
            return z

        noise = starts(ROWS, torch.full((1, len(PROMPT) + LENGTH), MASK))
        with mock.patch.object(schedule, "sample_prior", lambda shape, noise=noise: noise):
            object.__setattr__(sampler, "sampling_step", kept)
            sampler._modules.pop("sampling_step")
            x = sampler._do_generate(ROWS, steps, len(PROMPT) + LENGTH)
        left = x == MASK  # one position in some thousands; ours takes the argmax there
        print("masks left", int(left.sum()))
        x = torch.where(left, model(x, torch.full((1,), 1e-4)).argmax(-1), x)
        found |= histogram(name, x, steps)
    return found


FAMILIES = {f.__name__: f for f in (mdlm, bd3lm, duo, gidd)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        for chosen in sys.argv[2:] or FAMILIES:
            torch.manual_seed(0)
            save_file(
                FAMILIES[chosen](Path(sys.argv[1])),
                TESTS / "conformance" / "goldens" / f"{chosen}.safetensors",
            )
