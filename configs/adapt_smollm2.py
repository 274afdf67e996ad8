"""A block diffusion model made of SmolLM2-135M-Instruct, with adapters of rank 48 on all its matrices.

    mercury data answers prompts.jsonl answers.jsonl --field question --model smollm2
    mercury train configs/adapt_smollm2.py --init smollm2

Reads the model's own answers from answers.jsonl, so that it keeps its knowledge and its manner, and plain text from
text/*.txt. The block grows from single tokens, where the first loss is that of the autoregressive model, to 16
(LLaDA2, arXiv 2512.15745); logits stay shifted, as in Fast-dLLM v2 (arXiv 2509.26328). All 49,152 ids of the vocabulary
are taken: the mask is 16, <empty_output>, a mark in data sets of notebooks that no chat holds.

A row holds each text twice, clean and noised: 1,024 positions are at most 512 tokens, and longer answers are left out.
The default of 400 steps of 4 rows, at most 0.8 million tokens, shows the beginning of a curve; the authors of Fast-dLLM
v2 trained on a billion. At most 65 million: `--steps 4000 --batch 32 --blocks 0 1 200 4 800 8 1600 16`.
"""

from mercury_jax.training import data
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="adapt_smollm2",
        model=InitModel(pattern="block_causal", block=16, alignment="shifted", predicts_next=False, mask=16),
        data=data.mixture(
            (data.chat("answers.jsonl", bad_lines="skip"), 0.7), (data.text("text/*.txt"), 0.3)
        ),
        objective=masked_elbo(clip=4.0, complementary=True),
        lora=LoraConfig(rank=48),
        optim=OptimConfig(lr=5e-4, warmup=20, decay="cosine", final=0.1, b2=0.95, weight_decay=0.0),
        blocks=((0, 1), (40, 4), (120, 8), (200, 16)),
        steps=400,
        batch=4,
        row=1024,
        ema=0.0,
        eval_every=0,
        sample_every=0,
        save_every=50,
    )
