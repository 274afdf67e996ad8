"""Supervised fine-tuning of LLaDA, dense or with experts, on chats.

    mercury train configs/sft_llada.py --init GSAI-ML/LLaDA-8B-Instruct --chats "chats/*.jsonl"
    mercury train configs/sft_llada.py --init FOLDER --chats FILE.jsonl --lora.rank 8 --optim.lr 2e-4

Each line of a file is a conversation, {"messages": [{"role", "content"}, ...]} or of another form that
docs/fine-tuning.md lists. The last answer is learnt, with --turns all each answer. A conversation is rendered with the
checkpoint's own chat template; prompts are never masked, and an answer's loss is divided by its own length (arXiv
2502.09992, algorithm 2). Parameters are fp32, the arithmetic has the checkpoint's dtype.

The authors' own fine-tuning: 3 epochs, batches of 256, AdamW with weight decay 0.1 and a rate of 2.5e-5 that falls
linearly over the last tenth of the run.
"""

from mercury_jax.training.objectives import llada
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, MeshConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="sft_llada",
        model=InitModel(),  # that of the checkpoint in --init
        objective=llada(),
        optim=OptimConfig(lr=2.5e-5, warmup=50, decay="wsd", tail=0.1, final=0.1, b2=0.999),
        mesh=MeshConfig(data=1, fsdp=-1),  # parameters and optimizer divided over all devices
        steps=1000,
        batch=32,
        row=2048,
        remat="dots",
        ema=0.0,
        eval_every=0,
        sample_every=0,
        save_every=200,
    )
