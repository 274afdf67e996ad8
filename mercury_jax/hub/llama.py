"""Llama 3: autoregressive, stretched rotary frequencies."""

from __future__ import annotations

from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family

LLAMA3 = Family(
    name="Llama 3",
    architectures=("LlamaForCausalLM",),
    checkpoints=("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B-Instruct"),
    config=decoder.autoregressive,
    names=decoder.names,
    noise=None,
    about="autoregressive; TinyLlama and other models of the same build too",
    ignored=decoder.IGNORED,
    export=lambda c: decoder.export(c, architectures=["LlamaForCausalLM"], model_type="llama"),
    licence="Llama community licence",
)
