"""Lossless drafting without a model: the draft is what followed the last tokens when they stood in the text before.

The last n tokens of a row, n at most `LookupDrafter.ngram`, are searched in its prompt and answer; the longest match
counts, and of several the latest. What followed it is the draft, repeated if it reaches the end of the text. Each pass
verifies a draft as in `block_drafter`. It costs no pass, and pays where answers repeat what was said: the baseline that
a trained drafter has to beat ("prompt lookup decoding", the `ngram` method of vLLM).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from mercury_jax.decode.methods.acceptance import look_up_row
from mercury_jax.decode.methods.block_drafter import BlockDrafts, drafted_method
from mercury_jax.decode.state import DecodeConfig, Method, State, update_rows
from mercury_jax.types import Params


def prompt_lookup(ngram: int) -> Method:
    """Makes the method of a model with a `LookupDrafter`."""
    return drafted_method("prompt_lookup", look_up, ngram)


def look_up(
    config: DecodeConfig, params: Params, state: State, rows: Bool[Array, "B"]
) -> tuple[State, tuple[()]]:
    """Drafts for some rows; a row whose last token is new has no draft. Implements `block_drafter.Drafting`."""
    del params
    search = functools.partial(look_up_row, config.width - 1, config.method.settings[1])
    draft, length = jax.vmap(search)(state.tokens, state.cache_length)
    found = length > 0
    canvas = jnp.concatenate([state.canvas[:, :1], draft], axis=1)
    used = jnp.where(found, state.used, jnp.minimum(state.used, 1))
    slot: BlockDrafts = state.method
    slot = slot._replace(forwards=slot.forwards + (rows & found))
    changes: dict[str, Any] = dict(canvas=canvas, answer=canvas, used=used)
    return update_rows(state, rows, changes)._replace(method=slot), ()
