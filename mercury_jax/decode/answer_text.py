"""The text of an answer on the host: where thinking ends, where a stop text begins, and how empty answers are avoided.

Thinking: a chat model may end its text inside its thinking, directly after it, or before any visible character.
`sample`, `stream` and the server then close the thinking section and continue generation, with the first token of the
answer restricted to ids that show text. This works with any weights.

Stop texts: an answer ends where the first one begins. It may begin or end within a token, so it is searched for in the
decoded text. `sample` runs the device until a row with stop texts commits tokens (a block, or one token of an
autoregressive model), and `end_stopped_rows` then ends the rows whose text contains one. The server passes the text
that it streams to `StopMatcher`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.session import Session
from mercury_jax.decode.state import PREFILL
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM

# --- thinking


def is_thinking(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> bool:
    """Says whether a reply ends inside its thinking section."""
    marks = tokenizer.thinking
    if marks is None:
        return False
    inside = opened
    for i in ids:
        inside = i == marks.opening[0] or (inside and i != marks.close)
    return inside


def close_thinking_ids(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> tuple[int, ...]:
    """Appends the closing token to a reply that ends inside its thinking section."""
    ids = tuple(ids)
    marks = tokenizer.thinking
    return ids if marks is None or not is_thinking(tokenizer, ids, opened) else (*ids, marks.close)


def decode_answer(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """Decodes emitted ids to (thinking or None, answer); an answer to a raw text has no thinking."""
    if chat:
        return lm.tokenizer.split_answer(ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())


def closed_thinking(tokenizer: AnyTokenizer, prompt: Iterable[int], reply: Iterable[int]) -> tuple[int, ...]:
    """Returns the closed thinking section of a reply without an answer; generation continues after it.

    The ids after the thinking section show no text and would use up `max_tokens`, so they are dropped.
    """
    ends = {*tokenizer.ends, tokenizer.pad, tokenizer.end_turn}
    text = itertools.takewhile(lambda i: i not in ends, map(int, reply))
    closed = close_thinking_ids(tokenizer, text, is_thinking(tokenizer, prompt))
    marks = tokenizer.thinking
    if marks is None or marks.close not in closed:
        return ()
    return closed[: len(closed) - closed[::-1].index(marks.close)]


def continuation_prompt(
    tokenizer: AnyTokenizer, prompt: Iterable[int], thinking: tuple[int, ...], max_tokens: int, context: int
) -> tuple[Prompt, int]:
    """Builds the prompt for an answer after a closed thinking section, even if thinking has filled the context.

    Thinking is cut so that the answer can have a quarter of the context after the prompt, or `max_tokens` if that is
    less. A thinking section that is cut is closed again.
    """
    prompt = tuple(prompt)
    left = context - len(prompt)
    # The answer gets what the thinking section leaves, and at least a quarter of the context after the prompt.
    answer = min(max_tokens, max(left - len(thinking), left // 4, 1))
    kept = thinking[: left - answer]
    marks = tokenizer.thinking
    if marks is not None and len(kept) < len(thinking) and is_thinking(tokenizer, kept):
        kept = (*kept[:-1], marks.close)
    return Prompt([*prompt, *kept], True), answer


@functools.lru_cache(4)
def visible_ids(tokenizer: AnyTokenizer, vocab: int) -> np.ndarray:
    """Finds the ids that show text by themselves, as a mask for `processors.allow_bits`.

    Returns:
        uint32 [1, ceil(vocab / 32)]; bit v % 32 of word v // 32 belongs to id v.
    """

    def shows(piece: bytes) -> bool:
        try:
            return any(c.isprintable() and not c.isspace() for c in piece.decode())
        except UnicodeDecodeError:  # a part of a character
            return False

    hidden = {tokenizer.pad, tokenizer.mask, *tokenizer.ends}
    visible = np.array([i not in hidden and shows(piece) for i, piece in enumerate(tokenizer.pieces[:vocab])])
    visible = np.pad(visible, (0, -(-vocab // 32) * 32 - len(visible)))
    return np.packbits(visible, bitorder="little").view(np.uint32)[None]


# --- stop texts


class StopMatcher:
    """Finds the first of several texts in a stream, wherever the stream is split.

    Text that may be the beginning of a match is held back until the next `push` or `flush`.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self._longest = max(map(len, self.texts), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Adds the next text of the stream.

        Returns:
            The text before the match, or all text that cannot belong to a match; the match, or None; the text after the
            match. Of several matches the one that ends first is returned, of those with the same end the longest.
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
        # Hold back the longest suffix of the stream that is a prefix of one of the texts.
        first = max(0, len(stream) - self._longest + 1)
        cuts = (at for at in range(first, len(stream)) if any(t.startswith(stream[at:]) for t in self.texts))
        cut = next(cuts, len(stream))
        self._held = stream[cut:]
        return stream[:cut], None, ""

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Cuts a text where its first stop text begins; `StopMatcher` defines the first one."""
    before, found, _ = StopMatcher(stops).push(text)
    return (text, False) if found is None else (before, True)


def check_stops(stop: Any, prompts: int, name: str = "stop") -> list[tuple[str, ...]]:
    """Checks the stop texts of a call.

    Args:
        stop: A text, a list of texts for all prompts, a list with one list of texts (or None) per prompt, or
            None.
    """

    def texts(name: str, given: Any) -> tuple[str, ...]:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple) or not all(isinstance(x, str) and x for x in listed):
            raise refuse(name, given, "a text of at least one character, or a list of such texts")
        return tuple(listed)

    if stop is None or (isinstance(stop, list | tuple) and not stop):
        return []
    if isinstance(stop, str) or not isinstance(stop, list | tuple) or any(isinstance(x, str) for x in stop):
        return [texts(name, stop)] * prompts
    if len(stop) != prompts:
        allowed = f"one list of texts for all, or {prompts}: one for each prompt"
        raise refuse(name, f"{len(stop)} lists", allowed)
    return [() if one is None else texts(f"{name}[{i}]", one) for i, one in enumerate(stop)]


def watched_rows(session: Session) -> np.ndarray | None:
    """Returns which rows of the state have stop texts [B], so that the host must see their commits; None if none."""
    if not any(session.stops):
        return None
    watch = np.zeros(session.state.done.shape[0], bool)
    watch[: session.rows] = [bool(stops) for stops in session.stops]
    return watch


def end_stopped_rows(lm: LM, session: Session, checked: np.ndarray) -> tuple[Session, np.ndarray]:
    """Ends the rows whose committed text contains one of their stop texts.

    Such a row keeps its tokens up to the one that completes the text before the stop text. That token may also contain
    the beginning of the stop text, so the text of the answer is kept separately, in `Session.stopped`.

    Args:
        checked: Number of committed tokens of each row when it was last checked [B]; zeros at first.

    Returns:
        The session, in which these rows are done and their KV cache is valid up to the new ends; and the number of
        committed tokens of each row before that [B].
    """
    s = session.state
    small = (s.tokens, s.prompt, s.committed, s.limits.end, s.done, s.cache_length, s.limits.answer_budget)
    tokens, prompt, committed, end, done, cache_length, budget = map(np.array, jax.device_get(small))
    found: dict[int, str] = {}
    before = committed.copy()
    for i, stops in enumerate(session.stops):
        # Stop texts apply to the answer only, not to the thinking section.
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
    # Cut the rows on the device as well; keys of tokens beyond the new ends become invalid.
    rows = list(found)
    committed[rows], done[rows] = end[rows], True
    ready = np.asarray(session.config.encodable(jnp.asarray(committed)))
    ready = np.minimum(cache_length, np.maximum(ready, 0))
    if session.config.model.config.window is not None:
        # Layers with a window keep the keys of the window and of PREFILL or more positions before it
        # (`models.cache.ring_size`). A row that is cut further back is encoded again.
        ready[cache_length - ready > PREFILL] = 0
    cache_length[rows] = ready[rows]
    limits = s.limits._replace(end=end)
    state = s._replace(committed=committed, limits=limits, done=done, cache_length=cache_length)
    return dataclasses.replace(session, state=state, stopped=session.stopped | found), before


def _tokens_of_text(lm: LM, ids: np.ndarray, chat: bool, thinking: str | None, text: str) -> int:
    """Finds the smallest number of leading ids whose answer begins with `text`, after the same thinking section."""
    first, marks = 0, lm.tokenizer.thinking
    if chat and marks is not None and marks.close in ids:
        first = len(ids) - ids[::-1].tolist().index(marks.close)

    def complete(size: int) -> bool:
        before, shown = decode_answer(lm, ids[:size], chat)
        return before == thinking and shown.startswith(text)

    return bisect.bisect_left(range(len(ids)), True, lo=first, key=complete)
