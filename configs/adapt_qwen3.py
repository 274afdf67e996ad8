"""A block diffusion model made of Qwen3, as SDAR is (arXiv 2510.06303), by fine-tuning on chats.

    mercury train configs/adapt_qwen3.py --init Qwen/Qwen3-0.6B --chats "chats/*.jsonl"
    mercury convert runs/adapt_qwen3/model out --to hf            # SDARForCausalLM, with the tokenizer's files

Qwen3 has no mask: the first id behind the tokenizer's last becomes it (151,669, as in SDAR). Blocks of 16 tokens see
themselves and what is before them, and position i predicts its own token. `--model.alignment shifted` lets position
i - 1 predict token i, as Qwen3 did and as Fast-dLLM v2 (arXiv 2509.26328) keeps it, which is made of Qwen2.5.
`--blocks 0 1 200 4 600 16` lets the block grow, from single tokens to the model's 16 (LLaDA2, arXiv 2512.15745).

Each line of a file is a conversation, {"messages": [{"role", "content"}, ...]} or of another form that
docs/fine-tuning.md lists. The last answer is learnt, with --turns all each answer. A model that keeps its knowledge
needs as much text as its authors used (SDAR 50B tokens, Fast-dLLM v2 1B): add
`data=data.mixture((data.text("corpus/**/*.txt"), 0.8), (data.chat("chats/*.jsonl"), 0.2))` in a copy of this recipe.
"""

from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, MeshConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="adapt_qwen3",
        model=InitModel(pattern="block_causal", block=16, alignment="same_position", predicts_next=False),
        objective=masked_elbo(clip=4.0),  # weights above 4 add more variance than they teach
        optim=OptimConfig(lr=1e-5, warmup=100, decay="cosine", final=0.1, b2=0.95),
        mesh=MeshConfig(data=1, fsdp=-1),  # parameters and optimizer divided over all devices
        steps=2000,
        batch=32,
        row=2048,
        remat="dots",
        ema=0.0,
        eval_every=0,
        sample_every=0,
        save_every=500,
    )
