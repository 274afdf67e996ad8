"""Text <-> ids: our sentencepiece tokenizer, and the face that it shares with a checkpoint's own."""

from mercury_jax.tokenizer.ours import SPECIAL, Special, Tokenizer
from mercury_jax.tokenizer.protocol import AnyTokenizer, Fim, Messages, Thinking, lazy, valid

__all__ = ["SPECIAL", "AnyTokenizer", "Fim", "Messages", "Special", "Thinking", "Tokenizer", "lazy", "valid"]
