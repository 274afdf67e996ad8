"""Next edit: a file with a region that the user works on, and how that region goes on.

Two layouts of the prompt are read: the documentation's, where `<|code_to_edit|>` stands inside of
`<|current_file_content|>`, and the one of the vendor's OpenAPI example, where it stands behind it and repeats part of
the file. The reply is the rewritten region between bare fences, or `None` without any where nothing changes: editors
strip exactly "```\\n" and "\\n```" (Zed), or take nothing that has no fence (Kilo).
"""

from __future__ import annotations

from typing import NamedTuple

from mercury_jax.serve.chat import tags
from mercury_jax.serve.chat.filling import Ask, filled
from mercury_jax.serve.chat.prompt import render
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.types import LM

REGION, FILE, HISTORY = "code_to_edit", "current_file_content", "edit_diff_history"
SNIPPET = "recently_viewed_code_snippet"
NO_EDIT = "None"
HOLE = 64  # characters, which are at most as many tokens of code
SYSTEM = """\
You complete the work of a developer on code. The message shows snippets that were viewed lately \
(recently_viewed_code_snippets), the file (current_file_content), the region that may change (between \
<|code_to_edit|> and <|/code_to_edit|>), the cursor (<|cursor|>), and what was changed so far, the latest last \
(edit_diff_history). Write the whole region as it should read after the next change, and nothing else, between two \
lines of three backticks. Leave out the tags and the cursor. Where no change is to be expected, answer None."""


class EditRequest(NamedTuple):
    """A prompt, taken apart. The file reads before + region + after; cursor: characters into the region (None: not
    marked); snippets: (path, code); text: all of it, as it was written."""

    path: str
    before: str
    region: str
    after: str
    cursor: int | None
    history: str
    snippets: tuple[tuple[str, str], ...]
    text: str


def edit_request(content: str) -> EditRequest:
    """Refused, naming the tags, where no region is marked."""
    at = tags.span(content, REGION)
    if at is None:
        missing = f"{tags.open_tag(REGION)} ... {tags.close_tag(REGION)}"
        raise Refused(
            "messages", f"messages[0].content has no {missing}; allowed: a text that marks its region"
        )
    raw = tags.trimmed(content[slice(*at)])
    file = tags.span(content, FILE)
    if file is not None and file[0] <= at[0] <= file[1]:
        path, before = _path(content[file[0] : at[0] - len(tags.open_tag(REGION))].removeprefix("\n"))
        after = content[at[1] + len(tags.close_tag(REGION)) : file[1]].removesuffix("\n")
    else:
        path, whole = _path("" if file is None else tags.trimmed(content[slice(*file)]))
        before, after = _around(whole, raw)
    cursor = raw.find(tags.CURSOR)
    return EditRequest(
        path, before.replace(tags.CURSOR, ""), raw.replace(tags.CURSOR, "", 1), after.replace(tags.CURSOR, ""),
        None if cursor < 0 else cursor, tags.inside(content, HISTORY) or "", _snippets(content), content,
    )  # fmt: skip


def edit_ask(lm: LM, request: EditRequest, instruct: bool) -> Ask:
    """instruct: the model follows instructions, and gets the text as a conversation. Any other fills a hole in the file
    (`hole`), with room for half as much again as stands there."""
    if instruct:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request.text}]
        return Ask(render(lm, messages), None, None, chat=True)
    start, end = hole(request)
    before, after = request.before + request.region[:start], request.region[end:] + request.after
    if not (before + after).strip():
        raise Refused(
            "messages", "messages[0].content has only its region; allowed: a text with code around it"
        )
    room = int(1.5 * len(lm.tokenizer.encode(request.region[start:end]))) + 16
    return filled(lm, before, after if after.strip() else "", room)


def edit_reply(request: EditRequest, text: str, instruct: bool, finish: str = "stop") -> str:
    """The content of the reply. finish: "length" where the model ran out of room; half a region would delete the rest
    of it, and is no edit."""
    start, end = hole(request)
    made = request.region[:start] + text + request.region[end:]
    region = _rewritten(request, text, finish) if instruct else made
    if region is None or region == request.region:
        return NO_EDIT
    return f"```\n{region}\n```"


def hole(request: EditRequest) -> tuple[int, int]:
    """(start, end) of what a model that takes no instructions writes anew, in characters of the region.

    The line of the cursor (the last one where it is not marked), and lines around it as long as all of them are
    short: such a model sees neither the old text nor the history, so it is given little to undo, and whatever stood
    there fits into the hole. At the beginning of a file, what stands before the cursor stays.
    """
    region, cursor = request.region, len(request.region) if request.cursor is None else request.cursor
    start, end = region.rfind("\n", 0, cursor) + 1, (region + "\n").index("\n", cursor)
    if end - start > HOLE:
        start, end = max(start, cursor - HOLE // 2), min(end, cursor + HOLE // 2)
        return start, end
    while True:
        below = (region + "\n").index("\n", end + 1) if end < len(region) else end
        above = region.rfind("\n", 0, start - 1) + 1 if start else start
        if below > end and below - start <= HOLE:
            end = below
        elif above < start and end - above <= HOLE:
            start = above
        else:
            return (cursor if not start and not request.before else start), end


def _rewritten(request: EditRequest, text: str, finish: str) -> str | None:
    """The region that a reply holds; None for no edit."""
    if finish == "length" or text.strip() in ("", NO_EDIT):
        return None
    code, fenced = tags.unfenced(tags.bare(text.strip("\n"), REGION), request.region)
    code = tags.bare(code, REGION)
    if tags.CURSOR not in request.region:
        code = code.replace(tags.CURSOR, "")
    return None if code.strip() == NO_EDIT and (fenced or not code.startswith(" ")) else code


def _path(text: str) -> tuple[str, str]:
    """(path, what stands behind its line)."""
    first, _, rest = text.partition("\n")
    name = "current_file_path:"
    return (first.removeprefix(name).strip(), rest) if first.startswith(name) else ("", text)


def _around(whole: str, region: str) -> tuple[str, str]:
    """What stands before and behind a region in a file that holds it, its cursor marked in both or in one."""
    plain = whole.replace(tags.CURSOR, ""), region.replace(tags.CURSOR, "")
    for text, piece in ((whole, region), plain):
        if piece and piece in text:
            return text[: text.index(piece)], text[text.index(piece) + len(piece) :]
    return (whole, "") if not region.strip() else ("", "")


def _snippets(content: str) -> tuple[tuple[str, str], ...]:
    found, at = [], tags.span(content, SNIPPET, outer=False)
    while at is not None:
        first, _, code = tags.trimmed(content[slice(*at)]).partition("\n")
        found.append((first.removeprefix("code_snippet_file_path:").strip(), code))
        at = tags.span(content, SNIPPET, at[1], outer=False)
    return tuple(found)
