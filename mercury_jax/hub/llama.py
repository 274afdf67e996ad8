"""Llama 3: autoregressive, stretched rotary frequencies."""

from __future__ import annotations

from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import BOOL, Keys

LLAMA3 = Family(
    name="Llama 3",
    architectures=("LlamaForCausalLM",),
    checkpoints=("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B-Instruct"),
    keys=decoder.KEYS.plus(decoder.BIAS).plus(
        Keys(
            used={"mlp_bias": BOOL},
            only={
                "model_type": ("llama",),
                "pretraining_tp": (1,),
                "sliding_window": (None,),
                "use_sliding_window": (False,),
            },
            unused={"max_sequence_length": "max_position_embeddings says it"},
        )
    ),
    config=decoder.autoregressive,
    names=decoder.names,
    noise=None,
    about="autoregressive; TinyLlama and other models of the same build too",
    ignored=decoder.IGNORED,
    export=lambda c: decoder.export(c, architectures=["LlamaForCausalLM"], model_type="llama"),
    licence="Llama community licence",
)
