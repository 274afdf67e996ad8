"""The chat template: messages -> ids, and the ids of an answer -> what was thought and what was said.

    <|system|>text<|end_turn|>
    <|user|>text<|end_turn|>
    <|assistant|>[<|think|>text<|end_think|>]text<|eos|>

without the line breaks. This is the template of our own tokenizer; one with a template of its own is asked to
write by that. Turns of the history close with `end_turn`, a sampled answer with `eos`. Roles
are control ids, so no text inside a message can open a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mercury_jax.tokenizer import AnyTokenizer, Special

ROLES = ("system", "user", "assistant", "tool")


def render(
    tok: AnyTokenizer,
    messages: Sequence[Mapping[str, str]],
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of a conversation of `{"role", "content"}` messages, open for an answer unless told otherwise.

    `thinking` also opens the thinking, so that the answer must begin with it; without it the model decides.
    ValueError for no messages, an unknown role, or content that is missing or no text.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
    special = _special(tok)
    if special is None:
        return tok.render(messages, thinking, add_generation_prompt)
    ids: list[int] = []
    for i, message in enumerate(messages):
        role, content = _checked(i, message)
        ids += [getattr(special, role), *tok.encode(content), special.end_turn]
    if add_generation_prompt:
        ids.append(special.assistant)
        ids += [special.think] * thinking
    return ids


def example(
    tok: AnyTokenizer, prompt: str, answer: str, thinking: str | None = None
) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids) to train on: a user turn open for the answer; the answer up to `eos`."""
    special = _special(tok)
    if special is None:
        return tok.example(prompt, answer, thinking)
    response = [*tok.encode(answer), special.eos]
    if thinking is not None:
        response = [special.think, *tok.encode(thinking), special.end_think, *response]
    return render(tok, [{"role": "user", "content": prompt}]), response


def split_answer(tok: AnyTokenizer, ids: Iterable[int]) -> tuple[str | None, str]:
    """(thinking or None, answer) of sampled ids: `split_answer(tok, example(tok, p, a, t)[1]) == (t, a)`.

    Ends at the first `eos`, `end_turn` or `pad`. Works as well when the prompt opened the thinking;
    thinking that never closes leaves an empty answer.
    """
    special = _special(tok)
    if special is None:
        return tok.split_answer(ids)
    said: list[int] = []
    for i in map(int, ids):
        if i in (special.eos, special.end_turn, special.pad):
            break
        said.append(i)
    if special.end_think in said:
        close = said.index(special.end_think)
        return tok.decode(said[:close]), tok.decode(said[close + 1 :])
    if special.think in said:
        return tok.decode(said), ""
    return None, tok.decode(said)


def _special(tok: Any) -> Special | None:
    """Our fixed ids; a checkpoint's tokenizer has none."""
    return getattr(tok, "special", None)


def _checked(i: int, message: Mapping[str, str]) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}]: {message!r}; must be a mapping with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"messages[{i}].role: {role!r}; must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"messages[{i}].content: {content!r}; must be a str")
    return role, content
