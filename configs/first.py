"""A first recipe: a 0.2M-parameter masked diffusion model that learns to add numbers of two digits.

    mercury train configs/first.py                            # one to two minutes on two CPU cores
    mercury sample "47+38=" --chat --model runs/first/model   # 85
    mercury eval add2 --model runs/first/model                # expected: 95% or more right

The loss falls from about 2 at step 50 to below 0.1 at the end. If it does not, compare with a fresh copy of the recipe
(`mercury init another.py`). Every field can be changed on the command line: `--steps 1000`.
"""

from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="first",  # the run lives in runs/<name>
        # What to learn. Each problem is a chat of one turn; thinking=True puts the written-out steps before the answer.
        # For conversations of your own, lines of {"messages": [{"role", "content"}, ...]}, of which 5% are kept for the
        # evaluation: data.chat("chats.jsonl", held_out=0.05). For texts: data.text("notes/**/*.txt", held_out=0.05),
        # data.jsonl("x.jsonl", held_out=0.05). With any of these, set vocab below. Several sources with weights:
        # data.mixture((data.text("notes/*.txt"), 0.7), (data.stdlib(), 0.3)).
        data=data.generated("add2", thinking=True),
        model=ModelConfig(
            # Of the tokenizer, which is trained on the data: 299 is all that sums allow. For a few pages of texts of
            # your own vocab=400, for more 1,000 to 32,000; what a text does not allow is refused with what it does.
            vocab=299,
            width=96,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=24,
            ffn=256,
            pattern="causal_encoder",  # the prompt is encoded causally, the canvas behind it sees everything
            block=8,  # tokens of a canvas, which are denoised together
            context=128,  # most tokens of prompt and answer
        ),
        objective=masked_elbo(clip=4.0),  # weights above 4 add more variance than they teach
        optim=OptimConfig(optimizer="muon", lr=5e-3, warmup=20, decay="wsd", final=0.02, tail=0.3),
        steps=800,
        batch=16,  # rows of an update
        row=128,  # positions of a row; several short problems share one
        ema=0.98,
        log_every=50,
        eval_every=400,
        sample_every=400,
        sample_prompts=("12+30=", "47+38="),  # shown while it trains
        sample_chat=True,
        save_every=400,
    )
