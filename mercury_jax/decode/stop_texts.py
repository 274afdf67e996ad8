"""Stop texts: an answer ends where the first of them begins.

A stop text may begin and end inside of tokens, so it is looked for in the decoded text, on the host. `sample` runs the
device until a row that has stop texts commits tokens (a block, or one token of an autoregressive model), and
`end_stopped_rows` then ends the rows whose text holds one. The server feeds `StopMatcher` with what it streams.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.decoder import encodable_tokens
from mercury_jax.decode.session import Session
from mercury_jax.decode.thinking import decode_answer, is_thinking
from mercury_jax.types import LM


class StopMatcher:
    """Finds the first of some texts in a stream, however the stream is cut.

    Text that may be the beginning of a match is held back until the next push or `flush`.

    Args:
        texts: What to look for; empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self._longest = max(map(len, self.texts), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Takes the next text of the stream.

        Returns:
            Text that belongs to no match; the match, or None; what stands behind the match. Of several matches the
            one that ends first counts, of those that end at the same character the longest.
        """
        if not self.texts:
            return text, None, ""
        stream = self._held + text
        starts = [
            (at + len(found), -len(found), found) for found in self.texts if (at := stream.find(found)) >= 0
        ]
        if starts:
            end, _, found = min(starts)
            self._held = ""
            return stream[: end - len(found)], found, stream[end:]
        # The longest end of the stream that is a beginning of some text.
        first = max(0, len(stream) - self._longest + 1)
        cuts = (at for at in range(first, len(stream)) if any(t.startswith(stream[at:]) for t in self.texts))
        cut = next(cuts, len(stream))
        self._held = stream[cut:]
        return stream[:cut], None, ""

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Cuts a text where its first stop text begins, by the choice of `StopMatcher`.

    Args:
        text: Of an answer.
        stops: Stop texts.

    Returns:
        The text, and whether it was cut.
    """
    before, found, _ = StopMatcher(stops).push(text)
    return (text, False) if found is None else (before, True)


def check_stops(stop: Any, prompts: int) -> list[tuple[str, ...]]:
    """Checks the stop texts of a call.

    Args:
        stop: A text, a list of texts for all prompts, a list with one list of texts (or None) per prompt, or
            None.
        prompts: Of the call.

    Returns:
        The stop texts of each prompt; [] where no prompt has any.

    Raises:
        ValueError: It is anything else, an empty text, or a list of another length.
    """

    def texts(name: str, given: Any) -> tuple[str, ...]:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple) or not all(isinstance(x, str) and x for x in listed):
            raise refuse(name, given, "a text of at least one character, or a list of such texts")
        return tuple(listed)

    if stop is None or (isinstance(stop, list | tuple) and not stop):
        return []
    if isinstance(stop, str) or not isinstance(stop, list | tuple) or any(isinstance(x, str) for x in stop):
        return [texts("stop", stop)] * prompts
    if len(stop) != prompts:
        allowed = f"one list of texts for all, or {prompts}: one for each prompt"
        raise refuse("stop", f"{len(stop)} lists", allowed)
    return [() if one is None else texts(f"stop[{i}]", one) for i, one in enumerate(stop)]


def watched_rows(session: Session) -> np.ndarray | None:
    """Returns the rows of the state [B] whose commits the host wants to see; None where no row has a stop text."""
    if not any(session.stops):
        return None
    watch = np.zeros(session.state.done.shape[0], bool)
    watch[: session.rows] = [bool(stops) for stops in session.stops]
    return watch


def end_stopped_rows(lm: LM, session: Session, checked: np.ndarray) -> tuple[Session, np.ndarray]:
    """Ends the rows whose decided text holds one of their stop texts.

    Such a row keeps the tokens up to the one that completes the text before the stop text; that token may also hold
    the beginning of the stop text, which is no part of the answer's text.

    Args:
        lm: Its tokenizer decodes.
        session: With stop texts.
        checked: The committed tokens [B] of each row when it was last checked; at first zeros.

    Returns:
        The session, whose `stopped` has the answers of these rows and whose KV cache is valid up to their new ends;
        and the committed tokens of each row.
    """
    s = session.state
    small = (s.tokens, s.prompt, s.committed, s.end, s.done, s.cache_length, s.answer_budget)
    tokens, prompt, committed, end, done, cache_length, budget = map(np.array, jax.device_get(small))
    found: dict[int, str] = {}
    before = committed.copy()
    for i, stops in enumerate(session.stops):
        # While a row thinks, its text is no answer.
        if not stops or i in session.stopped or budget[i] > 0 or committed[i] == checked[i]:
            continue
        chat = session.prompts[i].chat
        ids = tokens[i, prompt[i] : end[i] if done[i] else committed[i]]
        if not done[i] and chat and is_thinking(lm.tokenizer, ids.tolist()):
            continue
        thinking, text = decode_answer(lm, ids, chat)
        # An incomplete character at the end may become another one.
        text, stopped = cut_at_stop(text if done[i] else text.rstrip("\ufffd"), stops)
        if stopped:
            found[i] = text
            end[i] = prompt[i] + _tokens_of_text(lm, ids, chat, thinking, text)
    if not found:
        return session, before
    rows = list(found)
    committed[rows], done[rows] = end[rows], True
    ready = np.asarray(encodable_tokens(session.config, jnp.asarray(committed)))
    cache_length[rows] = np.minimum(cache_length, np.maximum(ready, 0))[rows]
    state = s._replace(committed=committed, end=end, done=done, cache_length=cache_length)
    return dataclasses.replace(session, state=state, stopped=session.stopped | found), before


def _tokens_of_text(lm: LM, ids: np.ndarray, chat: bool, thinking: str | None, text: str) -> int:
    """The fewest first ids whose answer begins with a text, after the same thinking."""
    first, marks = 0, lm.tokenizer.thinking
    if chat and marks is not None and marks.close in ids:
        first = len(ids) - ids[::-1].tolist().index(marks.close)

    def complete(size: int) -> bool:
        before, shown = decode_answer(lm, ids[:size], chat)
        return before == thinking and shown.startswith(text)

    return bisect.bisect_left(range(len(ids)), True, lo=first, key=complete)
