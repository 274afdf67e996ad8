"""The embedded default: 1.8M parameters that solve small Sudokus, add up, and write the look of Python.

    mercury train configs/nano.py                       # 6,000 steps: one to two hours on two cores
    mercury train configs/nano.py --resume              # continue a run that was stopped
    mercury train configs/nano.py --init mercury_jax/assets/nano --out runs/more   # start from the embedded one

This recipe, with its seed, makes `mercury_jax/assets/nano` (on CPython 3.11, whose standard library it reads).

A causal encoder with a canvas of 32 tokens, masked diffusion. It is also taught to repair wrong tokens
of its canvas, for the rules that edit, and to predict the next token in its encoding pass, for decoding
that drafts and verifies with one set of weights. What it reaches, with sample counts and intervals,
is in `mercury_jax/assets/nano/README.md`, measured by `mercury eval`.
`configs/nano_gpu.py` is a larger one of its kind, for one GPU. `mercury convert --to hf` refuses a causal encoder;
`nano_sdar`, `nano_bidirectional` and `twin_nano` are recipes whose models other libraries read.
"""

from mercury_jax.config import ModelConfig
from mercury_jax.decode import rules
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_and_edited
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        name="nano",
        model=ModelConfig(
            vocab=1024, width=160, layers=6, heads=4, kv_heads=2, head_dim=32, ffn=432,
            pattern="causal_encoder", block=32, context=512, predicts_next=True,
        ),
        # The bound weighs a canvas at t by 1/t; beyond 4 that is mostly variance.
        objective=masked_and_edited(clip=4.0),
        # Some prompts open or hold the thinking, as decoding with an effort does.
        data=data.mixture(
            (data.generated("sudoku4", thinking=True, prefill=0.3), 0.30),
            (data.generated("add3", thinking=True, prefill=0.5), 0.45),
            (data.stdlib(), 0.25),
        ),
        optim=OptimConfig(optimizer="muon", lr=3e-3, warmup=100, decay="wsd", final=0.02, tail=0.25),
        steps=6000,
        batch=16,
        row=224,  # three Sudokus: a document is laid out twice, as its clean tokens and as its canvases
        ema=0.995,
        # Of several rules on 512 validation questions of each task, the fewest passes that lose at most two answers.
        sampler=rules.factor(0.2, accept_last=0),
        eval_every=500,
        eval_batches=8,
        sample_every=500,
        sample_prompts=("347+585=", "0200\n4302\n3401\n0004"),
        sample_chat=True,
        save_every=250,
        log_every=20,
    )  # fmt: skip
