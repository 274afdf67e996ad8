"""The nano recipe for one GPU: a 29M-parameter model on the same data, in bfloat16.

    mercury train configs/nano_gpu.py                 # one H200 or H100; not yet measured
    mercury eval sudoku4 add3 countdown3 code-bpb --model runs/nano_gpu/model

The model, the batch and the steps are larger; everything else is `configs/nano.py`. Countdown and
9x9 Sudoku are what the larger budget is for.
"""

import dataclasses

from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    nano = load_recipe("nano")
    return dataclasses.replace(
        nano,
        name="nano_gpu",
        model=ModelConfig(
            vocab=4096, width=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1408,
            pattern="causal_encoder", block=32, context=1024, dtype="bfloat16",
            predicts_next=True,
        ),
        data=data.mixture(
            (data.generated("sudoku4"), 0.1),
            (data.generated("sudoku9"), 0.1),
            (data.generated("add3", thinking=True), 0.15),
            (data.generated("countdown3", thinking=True), 0.35),
            (data.stdlib(), 0.3),
        ),
        optim=OptimConfig(optimizer="muon", lr=2e-3, warmup=300, decay="wsd", final=0.02, tail=0.25),
        steps=20_000,
        batch=256,
        row=384,
        ema=0.999,
        eval_every=1000,
        save_every=1000,
        log_every=50,
    )  # fmt: skip
