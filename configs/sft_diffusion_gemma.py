"""Supervised fine-tuning of DiffusionGemma on chats.

    mercury train configs/sft_diffusion_gemma.py --init google/diffusiongemma-26B-A4B-it --chats "chats/*.jsonl"
    mercury train configs/sft_diffusion_gemma.py --init FOLDER --chats FILE.jsonl --lora.rank 8

Each line of a file is a conversation, {"messages": [{"role", "content"}, ...]} or of another form that
docs/fine-tuning.md lists. The last answer is learnt, with --turns all each answer. A conversation is rendered with the
checkpoint's own chat template. The noise is uniform over the ids of the tokenizer: no id is a mask. In full fine-tuning
the router stays as it is, so that no expert is starved by a small set of chats.

The reference's own recipe for LoRA: rank 8 on all matrices, Adam with b1 0.95 and b2 0.99, a rate of 1.5e-4 that falls
to a tenth over 2,000 steps, clipping at 1.
"""

from mercury_jax.config import NoiseConfig
from mercury_jax.training import objectives
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, MeshConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="sft_diffusion_gemma",
        model=InitModel(predicts_next=True),  # that of the checkpoint in --init, whose encoder is trained too
        objective=objectives.diffusion_gemma(),
        noise=NoiseConfig(kind="uniform"),
        optim=OptimConfig(
            lr=1.5e-4, warmup=50, decay="cosine", final=0.1, b1=0.95, b2=0.99, weight_decay=1e-4
        ),
        mesh=MeshConfig(data=1, fsdp=-1),  # parameters and optimizer divided over all devices
        freeze="router",
        steps=2000,
        batch=8,
        row=2048,
        remat="full",
        ema=0.0,
        eval_every=0,
        sample_every=0,
        save_every=500,
    )
