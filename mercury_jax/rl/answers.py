"""A model's own greedy answers as conversations in a file, from which a drafter or a student learns.

Each line is {"prompt": number, "messages": [..., {"role": "assistant", "content"}]}, which `training.data.chat` reads.
An answer that `max_tokens` cut off is kept: read as a chat, it ends with an end of turn that the model did not write.
An interrupted run goes on behind the last prompt in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mercury_jax.config import refuse
from mercury_jax.decode.inputs import Message, check_whole
from mercury_jax.decode.sample import sample
from mercury_jax.tasks.task import parse_json_line, read_lines
from mercury_jax.types import LM


def write_answers(
    lm: LM,
    prompts: Sequence[Sequence[Message]],
    path: str | Path,
    *,
    max_tokens: int = 256,
    batch: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Appends the greedy answers to some conversations to a file, a batch at a time.

    Args:
        lm: The model.
        prompts: Conversations, each a list of {"role", "content"}. After an interruption, the same ones.
        path: The file; what it holds already is kept.
        max_tokens: Largest number of tokens of an answer.
        batch: Conversations that are decoded together.
        progress: Called after each batch with its number of conversations.

    Returns:
        Number of answers in the file.

    Raises:
        ValueError: An argument is out of range, or the file holds other lines.
    """
    path, batch = Path(path), check_whole("batch", batch, 1, 1 << 16)
    kept, begin = _written(path)
    if begin > len(prompts):
        raise refuse("path", str(path), f"a file with answers to these {len(prompts)} prompts")
    progress(begin)
    with path.open("a", encoding="utf-8") as file:
        for at in range(begin, len(prompts), batch):
            asked = list(prompts[at : at + batch])
            # The last batch is filled up: another number of rows would be compiled anew.
            out = sample(
                lm, [*asked, *[asked[-1]] * (batch - len(asked))], max_tokens=max_tokens, temperature=0.0
            )
            lines = [
                {"prompt": at + i, "messages": [*messages, {"role": "assistant", "content": out.texts[i]}]}
                for i, messages in enumerate(asked)
                if out.texts[i].strip()
            ]
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
            kept += len(lines)
            progress(len(asked))
    return kept


def _written(path: Path) -> tuple[int, int]:
    """Returns the number of answers in a file and the next prompt, after removing a line that was cut off."""
    if not path.exists():
        return 0, 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    lines = whole.splitlines()
    try:
        return len(lines), 1 + json.loads(lines[-1])["prompt"] if lines else 0
    except (ValueError, KeyError, TypeError):
        allowed = 'a new file, or one with lines {"prompt": ..., "messages": ...}'
        raise refuse("path", str(path), allowed) from None


def conversations(path: str | Path, field: str = "messages") -> list[list[dict[str, Any]]]:
    """Reads prompts from a JSONL file.

    Args:
        path: The file.
        field: Key of each line: "messages", of which the last assistant turn is left out, or a text, which becomes a
            user's message.

    Returns:
        The conversations.

    Raises:
        ValueError: A line has no such key.
    """
    found = []
    for place, line in read_lines(path, "prompts"):
        value = parse_json_line(place, line).get(field)
        messages: Any = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if not messages or not isinstance(messages, list):
            raise refuse(f"{place}: {field}", value, "a text, or a list of messages")
        found.append(messages)
    return found
