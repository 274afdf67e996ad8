"""Fine-tuning of the embedded model on chats of your own: three minutes on two CPU cores.

    mercury train configs/sft_nano.py --chats lines.jsonl
    mercury sample "347 backwards" --chat --model runs/sft_nano/model

Each line of the file is a conversation, {"messages": [{"role", "content"}, ...]}, whose last answer is learnt. The
README has an example with 500 lines. `sft_llada`, `sft_diffusion_gemma` and `adapt_qwen3` are the recipes for open
models.
"""

from mercury_jax.training import objectives
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="sft_nano",
        init="nano",
        model=InitModel(predicts_next=False),  # its encoding pass is not trained further
        objective=objectives.llada(clip=4.0),  # each answer counts the same, however long it is
        optim=OptimConfig(optimizer="muon", lr=2e-3, warmup=20, decay="wsd", final=0.02, tail=0.3),
        steps=300,
        batch=16,
        row=128,
        ema=0.98,
        eval_every=0,
        sample_every=0,
        save_every=100,
        log_every=20,
    )
