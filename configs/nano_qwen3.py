"""nano as an autoregressive model of Qwen3's build, which can be written as a Hugging Face checkpoint.

    mercury train configs/nano_qwen3.py                      # two CPU cores: about an hour; not yet measured
    mercury convert runs/nano_qwen3/model out --to hf        # Qwen3ForCausalLM

It has no mask and no noise: every token is predicted from the tokens before it. `configs/nano_ar.py` is the
autoregressive twin that the diffusion objectives train, with canvases of one token; that one stays in our own format.
"""

import dataclasses

from mercury_jax.config import NoiseConfig
from mercury_jax.train.objectives import next_token
from mercury_jax.train.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    nano = load_recipe("nano")
    model = dataclasses.replace(nano.model, pattern="block_causal", block=1, predicts_next=True, mask=None)
    return dataclasses.replace(
        nano,
        name="nano_qwen3",
        model=model,
        noise=NoiseConfig(kind="uniform"),  # not used: the one kind that needs no mask
        objective=next_token(),
        sampler=None,
    )
