"""Prompts and replies of code completion: fill-in-the-middle (FIM) and next edit.

A next-edit request is one message with a file, the region of it that may change, the cursor and recent edits, each
between tags `<|name|>` and `<|/name|>`. Two layouts are supported. In the vendor's documentation, `<|code_to_edit|>` is
inside `<|current_file_content|>`; in the vendor's OpenAPI example, it follows the file and repeats a part of it.
Without `<|current_file_content|>`, the text around the region is the file.

The reply is the new region in a bare Markdown fence, or `None` without a fence if nothing changes. Editors depend on
this format: Zed strips exactly "```\\n" and "\\n```", and Kilo ignores replies without a fence.

`apply_edit` has the prompts that merge an update into a file.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mercury_jax.serve.chat.messages import render_prompt
from mercury_jax.serve.errors import invalid_request, invalid_value
from mercury_jax.types import LM

CURSOR = "<|cursor|>"
REGION, FILE, HISTORY = "code_to_edit", "current_file_content", "edit_diff_history"
SNIPPETS, SNIPPET = "recently_viewed_code_snippets", "recently_viewed_code_snippet"
NO_SUFFIX = "<|endoftext|>"  # clients send it instead of an empty suffix
NO_EDIT = "None"
MAX_HOLE = 64  # maximum characters, and so tokens, that a model without instructions rewrites
EDIT_INSTRUCTIONS = """\
You complete the work of a developer on code. The message shows snippets that were viewed lately \
(recently_viewed_code_snippets), the file (current_file_content), the region that may change (between \
<|code_to_edit|> and <|/code_to_edit|>), the cursor (<|cursor|>), and what was changed so far, the latest last \
(edit_diff_history). Write the whole region as it should read after the next change, and nothing else, between two \
lines of three backticks. Leave out the tags and the cursor. Where no change is to be expected, answer None."""
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*(?:\n|\Z)", re.MULTILINE)


class CodePrompt(NamedTuple):
    """The token ids of a code completion.

    Attributes:
        prompt: Token ids before the answer.
        suffix: Token ids after the hole. None: the answer continues the prompt.
        max_tokens: Maximum tokens that the answer can need. None: unknown.
        chat: Whether the answer is a turn of a conversation (`OutputParser(chat=)`).
    """

    prompt: tuple[int, ...]
    suffix: tuple[int, ...] | None = None
    max_tokens: int | None = None
    chat: bool = False


class EditInput(NamedTuple):
    """The parts of a next-edit message. The text of the file is before + region + after.

    Attributes:
        path: Path of the file; empty if the message does not name it.
        before: Code before the region.
        region: Code that may change, without the cursor tag.
        after: Code after the region.
        cursor: Position of the cursor in characters of the region. None: not marked.
        history: Earlier edits as diffs.
        snippets: Pairs of path and code.
        text: The message.
    """

    path: str
    before: str
    region: str
    after: str
    cursor: int | None
    history: str
    snippets: tuple[tuple[str, str], ...]
    text: str


def fim_prompt(lm: LM, prefix: str, suffix: str | None) -> CodePrompt:
    """Makes the prompt that fills the hole between prefix and suffix; without a suffix, continues the prefix."""
    behind = "" if suffix is None or suffix == NO_SUFFIX else suffix
    if not prefix and not behind:
        allowed = "a text of at least one character, or a suffix"
        raise invalid_value("prompt", prefix, allowed)
    return _hole_prompt(lm, prefix, behind)


def parse_edit(content: str) -> EditInput:
    """Splits the message of a next edit into its parts."""
    at = tagged_span(content, REGION)
    if at is None:
        missing = f"<|{REGION}|> ... <|/{REGION}|>"
        message = f"messages[0].content has no {missing}; allowed: a text that marks its region"
        raise invalid_request("messages", message)
    _check_one_region(content[slice(*at)])
    # Layout 1: the region is inside the file. Layout 2: the region follows the file and repeats a part of it, which is
    # searched; if it is not found, the region stands alone. Without a file, the text around the region is the file.
    region, file = _trimmed(content[slice(*at)]), tagged_span(content, FILE)
    if file is not None and file[0] <= at[0] <= file[1]:
        path, before = _split_path(content[file[0] : at[0] - len(f"<|{REGION}|>")].removeprefix("\n"))
        after = content[at[1] + len(f"<|/{REGION}|>") : file[1]].removesuffix("\n")
    elif file is None:
        path, before = _split_path(_without_sections(content[: at[0] - len(f"<|{REGION}|>")]).lstrip("\n"))
        after = _without_sections(content[at[1] + len(f"<|/{REGION}|>") :]).rstrip("\n")
    else:
        path, whole = _split_path(_trimmed(content[slice(*file)]))
        before, after = (whole, "") if not region.strip() else ("", "")
        # The cursor is marked in both the file and the region, or in one of them.
        for text, piece in ((whole, region), (whole.replace(CURSOR, ""), region.replace(CURSOR, ""))):
            if piece and piece in text:
                before, _, after = text.partition(piece)
                break
    snippets, snippet = [], tagged_span(content, SNIPPET, outer=False)
    while snippet is not None:
        first, _, code = _trimmed(content[slice(*snippet)]).partition("\n")
        snippets.append((first.removeprefix("code_snippet_file_path:").strip(), code))
        snippet = tagged_span(content, SNIPPET, snippet[1], outer=False)
    cursor = region.find(CURSOR)
    return EditInput(
        path,
        before.replace(CURSOR, ""),
        region.replace(CURSOR, "", 1),
        after.replace(CURSOR, ""),
        None if cursor < 0 else cursor,
        tagged_text(content, HISTORY) or "",
        tuple(snippets),
        content,
    )


def edit_prompt(lm: LM, edit: EditInput, instruct: bool) -> CodePrompt:
    """Makes the prompt of a next edit.

    Args:
        instruct: Whether the model follows instructions; it then gets the message as a conversation. Any other model
            fills a hole in the file (`rewritten_span`), with a budget of 1.5 times the tokens in the hole, plus 16.
    """
    if instruct:
        return instruction_prompt(lm, EDIT_INSTRUCTIONS, edit.text)
    start, end = rewritten_span(edit)
    before, after = edit.before + edit.region[:start], edit.region[end:] + edit.after
    if not (before + after).strip():
        message = "messages[0].content has only its region; allowed: a text with code around it"
        raise invalid_request("messages", message)
    budget = int(1.5 * len(lm.tokenizer.encode(edit.region[start:end]))) + 16
    return _hole_prompt(lm, before, after if after.strip() else "", budget)


def edit_reply(edit: EditInput, text: str, instruct: bool, finish: str = "stop") -> str:
    """Makes the content of the reply to a next edit.

    Args:
        finish: Finish reason. With "length" a conversation's answer was cut off; it is discarded, because half a region
            would delete the other half.
    """
    start, end = rewritten_span(edit)
    region = edit.region[:start] + text + edit.region[end:]
    if instruct:
        if finish == "length" or text.strip() in ("", NO_EDIT):
            return NO_EDIT
        region, fenced = unfenced(without_tags(text.strip("\n"), REGION), edit.region)
        region = without_tags(region, REGION)
        if CURSOR not in edit.region:
            region = region.replace(CURSOR, "")
        if region.strip() == NO_EDIT and (fenced or not region.startswith(" ")):
            return NO_EDIT
    return NO_EDIT if region == edit.region else f"```\n{region}\n```"


def rewritten_span(edit: EditInput) -> tuple[int, int]:
    """Selects the part of the region that a model without instructions rewrites.

    It is the line of the cursor (the last line if the cursor is not marked) and the lines around it, up to MAX_HOLE
    characters. Such a model sees neither the old text of the hole nor the edit history, so the hole is small. In the
    first line of a file, the text before the cursor is kept, because there would be no other code before the hole.

    Returns:
        (start, end), in characters of the region.
    """
    region, cursor = edit.region, len(edit.region) if edit.cursor is None else edit.cursor
    start, end = region.rfind("\n", 0, cursor) + 1, (region + "\n").index("\n", cursor)
    if end - start > MAX_HOLE:
        return max(start, cursor - MAX_HOLE // 2), min(end, cursor + MAX_HOLE // 2)
    while True:
        below = (region + "\n").index("\n", end + 1) if end < len(region) else end
        above = region.rfind("\n", 0, start - 1) + 1 if start else start
        if below > end and below - start <= MAX_HOLE:
            end = below
        elif above < start and end - above <= MAX_HOLE:
            start = above
        else:
            return (cursor if not start and not edit.before else start), end


def instruction_prompt(lm: LM, instructions: str, text: str) -> CodePrompt:
    """Makes a conversation of instructions and a text, for models that follow instructions."""
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": text}]
    return CodePrompt(render_prompt(lm, messages), chat=True)


def tagged_span(text: str, name: str, start: int = 0, outer: bool = True) -> tuple[int, int] | None:
    """Finds the text between the tags `<|name|>` and `<|/name|>`.

    Returns:
        (start, end) of the text between the tags; None if a tag is missing.
    """
    opening, closing = f"<|{name}|>", f"<|/{name}|>"
    first = text.find(opening, start)
    begin = first + len(opening)
    end = text.rfind(closing, begin) if outer else text.find(closing, begin)
    return None if first < 0 or end < 0 else (begin, end)


def tagged_text(text: str, name: str) -> str | None:
    """Extracts the text between two tags, without the line ends next to the tags."""
    at = tagged_span(text, name)
    return None if at is None else _trimmed(text[slice(*at)])


def unfenced(text: str, original: str = "") -> tuple[str, bool]:
    """Extracts the code of a reply: from the first Markdown fence to the last, or the whole text.

    Args:
        original: The code that the reply is a version of. If it contains fences itself, only a reply that begins with a
            fence counts as fenced.
    """
    first = _FENCE.search(text)
    if first is None or (_FENCE.search(original) and text[: first.start()].strip()):
        return text.strip("\n"), False
    closing = [m for m in _FENCE.finditer(text, first.end()) if m.group().strip() == first.group(1)]
    body = text[first.end() : closing[-1].start() if closing else len(text)]
    return body.removesuffix("\n"), True


def without_tags(text: str, name: str) -> str:
    """Removes the tags of the request around a reply."""
    for edge in (f"<|{name}|>\n", f"<|{name}|>"):
        text = text.removeprefix(edge)
    for edge in (f"\n<|/{name}|>", f"<|/{name}|>"):
        text = text.removesuffix(edge)
    return text


def _hole_prompt(lm: LM, before: str, behind: str, max_tokens: int | None = None) -> CodePrompt:
    """Makes the prompt of a hole between two texts.

    The engine needs at least one prompt token, so a hole at the start of a file gets a line end before it.
    """
    tok = lm.tokenizer
    prompt = (*tok.begin, *tok.encode(before)) or tuple(tok.encode("\n"))
    return CodePrompt(prompt, tuple(tok.encode(behind)) if behind else None, max_tokens)


def _check_one_region(region: str) -> None:
    """Refuses a second region: an opening tag after the closing tag that ends the first region.

    Tags that are part of the code, in pairs or a single closing tag, are allowed.
    """
    depth = 1
    for tag in re.finditer(re.escape(f"<|{REGION}|>") + "|" + re.escape(f"<|/{REGION}|>"), region):
        opens = "/" not in tag.group()
        if opens and depth < 1:
            regions = f"several regions <|{REGION}|> ... <|/{REGION}|>"
            raise invalid_request("messages", f"messages[0].content has {regions}; allowed: one region")
        depth += 1 if opens else -1


def _without_sections(text: str) -> str:
    """Removes the sections of snippets and edits from a text outside of the region."""
    for name in (SNIPPETS, SNIPPET, HISTORY):
        if at := tagged_span(text, name):
            text = text[: at[0] - len(f"<|{name}|>")] + text[at[1] + len(f"<|/{name}|>") :]
    for given, missing in ((f"<|{FILE}|>", f"<|/{FILE}|>"), (f"<|/{FILE}|>", f"<|{FILE}|>")):
        if given in text:
            message = (
                f"messages[0].content has {given} but no {missing}; allowed: both or neither of these tags"
            )
            raise invalid_request("messages", message)
    return text


def _trimmed(text: str) -> str:
    """Removes one line end at either side: tags stand on their own lines."""
    return text.removeprefix("\n").removesuffix("\n")


def _split_path(text: str) -> tuple[str, str]:
    """Splits off the first line if it names the path; returns (path, rest)."""
    first, _, rest = text.partition("\n")
    name = "current_file_path:"
    return (first.removeprefix(name).strip(), rest) if first.startswith(name) else ("", text)
