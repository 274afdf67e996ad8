"""nano as a block-causal diffusion model of SDAR's build, which can be written as a Hugging Face checkpoint.

    mercury train configs/nano_sdar.py                       # two CPU cores: about an hour; not yet measured
    mercury convert runs/nano_sdar/model out --to hf         # SDARForCausalLM: config.json, safetensors, tokenizer.json

Blocks of 32 tokens see themselves and all blocks before, so the keys of finished blocks are cached exactly (BD3-LM,
arXiv 2503.09573; SDAR, arXiv 2510.06303). The mask diffusion bound trains it; nothing of its layers is our own
except the norms' 1 + scale and the embedding's factor, which the export multiplies out.
"""

import dataclasses

from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig, load_recipe


def config() -> TrainConfig:
    nano = load_recipe("nano")
    model = dataclasses.replace(nano.model, pattern="block_causal", block=32, predicts_next=False)
    return dataclasses.replace(nano, name="nano_sdar", model=model, objective=masked_elbo(clip=4.0), row=288)
