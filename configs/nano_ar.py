"""The autoregressive twin of nano: the same data and size, the block-causal pattern at block 1.

    mercury train configs/nano_ar.py            # two CPU cores: about two hours; not yet measured
    mercury eval sudoku4 --model runs/nano_ar/model

Autoregression is diffusion with canvases of one token, so everything that trains, samples and
scores nano does the same for its twin; `mj.score` is then exact.
"""

import dataclasses

from mercury_jax.train.objectives import autoregressive
from mercury_jax.train.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    nano = load_recipe("nano")
    twin = dataclasses.replace(nano.model, pattern="block_causal", block=1, predicts_next=False)
    return dataclasses.replace(nano, name="nano_ar", model=twin, objective=autoregressive(), row=256)
