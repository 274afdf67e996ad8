"""Code endpoints: what the engine is asked for a completion between two texts, an edit, a merge; what its reply means.

`fim` stands here; `edit.py` and `apply.py` are reached through here as well.
"""

from __future__ import annotations

from mercury_jax.serve.chat.apply import (
    ApplyRequest,
    apply_ask,
    apply_merged,
    apply_reply,
    apply_request,
)
from mercury_jax.serve.chat.edit import EditRequest, edit_ask, edit_reply, edit_request
from mercury_jax.serve.chat.filling import Ask, filled
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.types import LM

__all__ = [
    "ApplyRequest",
    "Ask",
    "EditRequest",
    "apply_ask",
    "apply_merged",
    "apply_reply",
    "apply_request",
    "edit_ask",
    "edit_reply",
    "edit_request",
    "fim",
]
NOTHING = "<|endoftext|>"  # what clients send for an empty suffix


def fim(lm: LM, prefix: str, suffix: str | None) -> Ask:
    """The text between prefix and suffix; without a suffix, what goes on behind the prefix.

    Refused where there is nothing on either side.
    """
    behind = "" if suffix is None or suffix == NOTHING else suffix
    if not prefix and not behind:
        raise Refused(
            "prompt", f"prompt is {prefix!r}; allowed: a text of at least one character, or a suffix"
        )
    return filled(lm, prefix, behind)
