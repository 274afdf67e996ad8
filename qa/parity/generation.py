"""Whole generations of DiffusionGemma by transformers' `generate`, with injected noise and every step recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import checkpoints
import noise
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

RECORDED = ("canvas", "logits", "argmax", "sampled", "accepted", "next", "finished", "margin")
SEED, ROWS, PROMPT, CANVASES = 22, 2, 24, 2  # a seed whose decisions are nowhere close to tipping


class Trace:
    """Stands in for torch's two sources of noise, and records each call of `_denoising_step`.

    The noise comes as `noise.drawn` gives it. Steps that a stop left out stay zero in what is recorded.
    """

    def __init__(self, model: Any, noise: dict[str, np.ndarray]):
        self.noise = {k: torch.from_numpy(v.copy()) for k, v in noise.items()}
        self.step_of = model._denoising_step
        self.canvas, self.step = -1, None
        self.sampled: Any = None
        self.records: list[tuple[int, int, dict[str, Any]]] = []

    def randint(self, low: int, high: int, size: tuple[int, ...], device: Any = None) -> Any:
        if self.step is None:
            self.canvas += 1
            return self.noise["first"][self.canvas].long()
        return self.noise["fresh"][self.canvas, self.step].long()

    def multinomial(self, probs: Any, num_samples: int) -> Any:
        """The inverse CDF of decode/read.py, `draw`."""
        uniforms = self.noise["uniforms"][self.canvas, self.step]
        cdf = probs.cumsum(-1).unflatten(0, uniforms.shape)
        aim = uniforms.clamp(max=1.0 - 1e-6)[..., None] * cdf[..., -1:]
        self.sampled = (cdf <= aim).sum(-1)
        self.edge = (cdf[..., :-1] - aim).abs().amin((-1, -2))
        return self.sampled.reshape(-1, 1)

    def denoise(self, **kwargs: Any) -> Any:
        sampler, before = kwargs["sampler"], kwargs["finished_denoising"].clone()
        self.step = kwargs["logits_processor"][0].max_denoising_steps - kwargs["cur_step"]
        out = self.step_of(**kwargs)
        canvas, argmax, logits, after = out
        stop = kwargs["diffusion_stopping_criteria"]
        record = dict(
            canvas=kwargs["current_canvas"], logits=logits, argmax=argmax, sampled=self.sampled,
            accepted=sampler.accepted_token_mask, next=canvas, finished=after.clone(),
            margin=torch.minimum(self.edge, margin(logits, sampler.entropy_bound, stop.confidence_threshold)),
        )  # fmt: skip
        for name in ("sampled", "accepted", "margin"):  # of rows that still denoise
            keep = ~before.reshape(-1, *[1] * (record[name].ndim - 1))
            record[name] = record[name] * keep.to(record[name].dtype)
        self.records.append((self.canvas, self.step, record))
        self.step = None
        return out


def margin(logits: Any, bound: float, confidence: float) -> Any:
    """[B] how far each row's decisions are from tipping: argmax, acceptance, stop."""
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    top = logits.topk(2, dim=-1).values
    ordered = entropy.sort(dim=-1).values
    spent = (ordered.cumsum(-1) - ordered - bound).abs().amin(-1)
    count = ((ordered.cumsum(-1) - ordered) <= bound).sum(-1, keepdim=True)
    padded = torch.cat([ordered, ordered[:, -1:] + 1], -1)
    rank = (padded.gather(-1, count) - padded.gather(-1, count - 1)).squeeze(-1)
    steady = (entropy.mean(-1) - confidence).abs()
    return torch.stack([(top[..., 0] - top[..., 1]).amin(-1), spent, rank, steady]).amin(0)


def generate(model: Any, tokens: Any, noise: dict[str, np.ndarray], settings: Any) -> dict[str, Any]:
    """sequences [B, P + C L], passes [B] of the decoder, and of every step what `RECORDED` names [C, N, B, ...]."""
    trace = Trace(model, noise)
    with (
        mock.patch.object(torch, "randint", trace.randint),
        mock.patch.object(torch, "multinomial", trace.multinomial),
        mock.patch.object(model, "_denoising_step", trace.denoise),
    ):
        out = model.generate(tokens, generation_config=settings)
    shape = noise["uniforms"].shape[:2]
    found = {}
    for name in RECORDED:
        like = trace.records[0][2][name]
        found[name] = torch.zeros((*shape, *like.shape), dtype=like.dtype)
        for canvas, step, record in trace.records:
            found[name][canvas, step] = record[name]
    new = out.sequences[:, tokens.shape[1] :]
    tokens_made = (new != settings.pad_token_id).sum(-1)
    passes = (tokens_made / out.tokens_per_forward).round().to(torch.int32)
    return dict(sequences=out.sequences, passes=passes, **found)


def golden(model: Any, folder: Path) -> None:
    """generation.safetensors beside a checkpoint: `generate` in float32, and in float64 with float64 noise."""
    settings = model.generation_config
    vocab, length = model.config.text_config.vocab_size, model.config.canvas_length
    sizes = dict(
        vocab=vocab, length=length, prompt=PROMPT, canvases=CANVASES, steps=settings.max_denoising_steps
    )
    numbers = {
        bits: noise.drawn(bits, seeds=[SEED + row for row in range(ROWS)], **sizes) for bits in (32, 64)
    }
    tokens = checkpoints.ids(77, (ROWS, PROMPT), vocab)
    runs = {32: generate(model, tokens, numbers[32], settings)}
    with checkpoints.wide():
        runs[64] = generate(checkpoints.lifted(model), tokens, numbers[64], settings)
    tensors = dict(tokens=tokens)
    for bits, run in runs.items():
        tensors |= {f"{k}_{bits}": torch.from_numpy(v.copy()) for k, v in numbers[bits].items()}
        tensors |= {f"{k}_{bits}": v for k, v in run.items() if (k, bits) != ("logits", 64)}
        seen = run["margin"][run["margin"] > 0]
        print(f"generation, {bits} bits: passes {run['passes'].tolist()}, least margin {seen.min():.1e}")
    checkpoints.write(folder, tensors, "generation", seed=str(SEED))
