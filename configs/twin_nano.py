"""The autoregressive twin of nano: the same data, tokenizer and size, trained to predict the next token.

    mercury train configs/twin_nano.py                       # two CPU cores: half an hour; not yet measured
    mercury bench decode --rules factor --twin runs/twin_nano/model    # accuracy and speed beside nano's
    mercury convert runs/twin_nano/model out --to hf         # Qwen3ForCausalLM

It has no mask and no noise. A document stands in a row once, where nano's stands as clean tokens and as canvases: so a
row of 128 positions holds the documents of one of 224. `mj.score` and `mercury eval code-bpb` are exact.
"""

import dataclasses

from mercury_jax.config import NoiseConfig
from mercury_jax.training.objectives import next_token
from mercury_jax.training.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    nano = load_recipe("nano")
    model = dataclasses.replace(nano.model, pattern="block_causal", block=1, predicts_next=True, mask=None)
    return dataclasses.replace(
        nano,
        name="twin_nano",
        model=model,
        noise=NoiseConfig(kind="uniform"),  # not used: the one kind that needs no mask
        objective=next_token(),
        sampler=None,
        row=128,
    )
