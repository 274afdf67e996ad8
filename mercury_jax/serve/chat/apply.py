"""Apply: a file and a snippet that shows what to change in it, with the rest left out -> the file, changed.

Where the snippet says where its lines belong, `merge.py` writes the file, at once and exactly; a model is asked only
where it does not, and its reply is the file.
"""

from __future__ import annotations

from typing import NamedTuple

from mercury_jax.serve.chat import tags
from mercury_jax.serve.chat.filling import Ask
from mercury_jax.serve.chat.merge import merged
from mercury_jax.serve.chat.prompt import render
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.types import LM

ORIGINAL, UPDATE = "original_code", "update_snippet"
SYSTEM = """\
You merge a change into a file. The message holds the file (original_code) and a snippet of how parts of it should \
read (update_snippet), in which comments such as "... existing code ..." stand for what stays as it is. Write the \
whole merged file, and nothing else, between two lines of three backticks."""


class ApplyRequest(NamedTuple):
    """The file, the snippet, and all of the prompt as it was written."""

    original: str
    update: str
    text: str


def apply_request(content: str) -> ApplyRequest:
    """Refused naming the tags that are missing."""
    parts = {name: tags.inside(content, name) for name in (ORIGINAL, UPDATE)}
    for name, part in parts.items():
        if part is None:
            missing = f"{tags.open_tag(name)} ... {tags.close_tag(name)}"
            raise Refused(
                "messages", f"messages[0].content has no {missing}; allowed: a text with both parts"
            )
    return ApplyRequest(parts[ORIGINAL] or "", parts[UPDATE] or "", content)


def apply_merged(request: ApplyRequest, guess: bool = False) -> str | None:
    """The file, where the snippet alone says how; None: the model has to be asked. guess: for models that cannot be
    asked, less strict about what may be another version of a line."""
    return merged(request.original, tags.unfenced(request.update, request.original)[0], guess)


def apply_ask(lm: LM, request: ApplyRequest, instruct: bool = True) -> Ask:
    """A conversation. Refused where the model cannot have one, or (not instruct) does not follow instructions: a file
    merged by guesswork is a file lost."""
    if not instruct:
        said = f"messages[0].content does not say where its {UPDATE} belongs, and {lm.name} does not merge"
        raise Refused("messages", f"{said}; allowed: lines of the file on both sides of each change")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request.text}]
    return Ask(render(lm, messages), None, None, chat=True)


def apply_reply(request: ApplyRequest, text: str) -> str:
    """The file that a reply holds, with its last line ended as in the original."""
    code, _ = tags.unfenced(tags.bare(text.strip("\n"), ORIGINAL), request.original)
    code = tags.bare(code, ORIGINAL)
    ended = request.original.endswith("\n") and code and not code.endswith("\n")
    return code + "\n" if ended else code
