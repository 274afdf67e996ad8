"""nano with full attention: every token of prompt and answer sees every other, as in LLaDA and Dream.

    mercury train configs/nano_bidirectional.py            # two CPU cores: a few minutes
    python -m benchmarks.cache runs/nano_bidirectional/model   # what reusing its keys costs and brings
    mercury convert runs/nano_bidirectional/model out --to hf   # A2DQwen3LMHeadModel, as dllm's tiny-A2D models

It goes on from the embedded model: who sees whom is no matter of parameters, so a few hundred steps turn
a causal encoder into a bidirectional denoiser.
"""

import dataclasses

from mercury_jax.training.objectives import masked_and_edited
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    base = load_recipe("nano")
    return dataclasses.replace(
        base,
        name="nano_bidirectional",
        init="nano",
        model=dataclasses.replace(base.model, pattern="bidirectional", predicts_next=False),
        objective=masked_and_edited(clip=4.0, causal=0.0),
        optim=OptimConfig(optimizer="muon", lr=2e-3, warmup=20, decay="wsd", final=0.02, tail=0.5),
        steps=300,
        batch=16,
        row=192,
        eval_every=0,
        sample_every=0,
        save_every=100,
    )
