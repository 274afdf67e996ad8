"""Next edit and FIM: prompts are understood in both layouts, and editors understand the replies."""

import re
from types import SimpleNamespace

import pytest

from mercury_jax.serve.chat import code_prompts as code
from mercury_jax.serve.errors import ApiError
from mercury_jax.tokenizer import SPECIAL
from tests.serve.chat import checkpoint_tokenizers
from tests.serve.chat.editors import kilo, zed
from tests.tiny import tokenizer

TOK = tokenizer()
ABOVE, REGION, BELOW = "import os\n\n\n", "def f(x):\n    return 1", "\n\n\nprint(f(2))\n"
AT = 13  # of the cursor
MARKED = f"{REGION[:AT]}<|cursor|>{REGION[AT:]}"
SNIPPETS = """<|recently_viewed_code_snippets|>
<|recently_viewed_code_snippet|>
code_snippet_file_path: a/b.py
x = 1
y = 2
<|/recently_viewed_code_snippet|>

<|recently_viewed_code_snippet|>
code_snippet_file_path: c.py
z
<|/recently_viewed_code_snippet|>
<|/recently_viewed_code_snippets|>
"""
HISTORY = "<|edit_diff_history|>\n--- a\n+++ a\n-old\n+new\n<|/edit_diff_history|>"
DOCS = f"""{SNIPPETS}
<|current_file_content|>
current_file_path: src/f.py
{ABOVE}<|code_to_edit|>
{MARKED}
<|/code_to_edit|>{BELOW}
<|/current_file_content|>

{HISTORY}
"""
EXAMPLE = f"""{SNIPPETS}{HISTORY}
<|current_file_content|>
{ABOVE}{REGION}{BELOW}
<|/current_file_content|>
<|code_to_edit|>
{MARKED}
<|/code_to_edit|>"""


def lm_of(pattern: str = "causal_encoder", tok=TOK):
    return SimpleNamespace(
        tokenizer=tok, name="tiny", model=SimpleNamespace(config=SimpleNamespace(pattern=pattern))
    )


@pytest.mark.parametrize(("text", "path"), [(DOCS, "src/f.py"), (EXAMPLE, "")])
def test_both_layouts_of_a_next_edit_mean_the_same(text: str, path: str):
    found = code.parse_edit(text)
    assert (found.before, found.region, found.after) == (ABOVE, REGION, BELOW)
    assert (found.path, found.cursor, found.text) == (path, AT, text)
    assert found.history == "--- a\n+++ a\n-old\n+new"
    assert found.snippets == (("a/b.py", "x = 1\ny = 2"), ("c.py", "z"))


def test_empty_sections_and_unusual_prompts():
    empty = code.parse_edit(
        "<|current_file_content|>\n<|code_to_edit|>\n\n<|/code_to_edit|>\n<|/current_file_content|>"
    )
    assert empty[:5] == ("", "", "", "", None)
    only = code.parse_edit("<|code_to_edit|>\nx<|cursor|>\n<|/code_to_edit|>")
    assert (only.before, only.region, only.after, only.cursor) == ("", "x", "", 1)
    # In a file about the tags the outermost ones count.
    said = 'TAG = "<|/code_to_edit|>"'
    held = code.parse_edit(
        f"<|current_file_content|>\na\n<|code_to_edit|>\n{said}\n<|/code_to_edit|>\nb\n<|/current_file_content|>"
    )
    assert (held.before, held.region, held.after) == ("a\n", said, "\nb")
    for bad in ("", "fix my code", "<|code_to_edit|>\nx", "<|/code_to_edit|><|code_to_edit|>"):
        with pytest.raises(ApiError, match=r"messages\[0\].content has no <\|code_to_edit\|>") as raised:
            code.parse_edit(bad)
        assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "sections", [("", ""), (f"{SNIPPETS}\n", f"\n\n{HISTORY}\n"), (f"{SNIPPETS}{HISTORY}\n", "")]
)
def test_without_a_file_the_text_around_the_region_is_the_file(sections: tuple[str, str]):
    marked = f"{ABOVE}<|code_to_edit|>\n{MARKED}\n<|/code_to_edit|>{BELOW}"
    found = code.parse_edit(sections[0] + "current_file_path: src/f.py\n" + marked + sections[1])
    assert (found.path, found.before, found.region) == ("src/f.py", ABOVE, REGION)
    assert (found.after, found.cursor) == (BELOW.rstrip("\n"), AT)
    asked = code.edit_prompt(lm_of(), found, instruct=False)
    assert TOK.decode(asked.prompt).startswith(ABOVE) and TOK.decode(asked.suffix or ()).endswith(
        "print(f(2))"
    )
    for tag, other in (
        ("<|current_file_content|>", "<|/current_"),
        ("<|/current_file_content|>", "<|current_"),
    ):
        with pytest.raises(ApiError, match=f"has {re.escape(tag)} but no {re.escape(other)}"):
            code.parse_edit(f"{tag}\n{marked}")


def test_several_regions_are_refused_and_tags_in_the_code_are_not():
    one = "<|code_to_edit|>\nx\n<|/code_to_edit|>\n"
    for text in (f"{one}{one}", f"<|current_file_content|>\n{one}y\n{one}<|/current_file_content|>"):
        with pytest.raises(ApiError, match=r"has several regions <\|code_to_edit\|> .*; allowed: one region"):
            code.parse_edit(text)
    assert code.parse_edit(
        f"<|code_to_edit|>\n{one}{one}<|/code_to_edit|>"
    ).region == f"{one}{one}".removesuffix("\n")


NEW = "def f(x):\n    return x + 1"


@pytest.mark.parametrize(
    "written",
    [f"```\n{NEW}\n```", f"```python\n{NEW}\n```\n", f"Here it is:\n\n```py\n{NEW}\n```\nI added x.", NEW,
     f"\n{NEW}\n", f"<|code_to_edit|>\n{NEW}\n<|/code_to_edit|>",
     f"```\n<|code_to_edit|>\n{NEW}\n<|/code_to_edit|>\n```",
     f"<|code_to_edit|>\n```\n{NEW}\n```\n<|/code_to_edit|>",
     f"```\n{NEW.replace('x +', '<|cursor|>x +')}\n```", f"```\n{NEW}"],
)  # fmt: skip
def test_editors_get_the_region_whatever_the_model_puts_around_it(written: str):
    reply = code.edit_reply(code.parse_edit(DOCS), written, instruct=True)
    assert reply == f"```\n{NEW}\n```"
    assert zed(reply) == kilo(reply) == NEW


@pytest.mark.parametrize("written", ["None", "```\nNone\n```", " None\n", "", f"```\n{REGION}\n```", REGION])
def test_no_change_is_none_without_a_fence(written: str):
    reply = code.edit_reply(code.parse_edit(DOCS), written, instruct=True)
    assert reply == "None" and zed(reply) is None and kilo(reply) is None


def test_a_region_keeps_its_line_ends_fences_and_indentation():
    for region in ("\n  a\n", "", "x\n", "# Title\n```py\ncode\n```\nmore", "        deep"):
        request = code.parse_edit(f"<|code_to_edit|>\nold\n<|/code_to_edit|>\n{region}")
        reply = code.edit_reply(request, f"```\n{region}\n```", instruct=True)
        assert zed(reply) == kilo(reply) == region
        said = code.edit_reply(request._replace(region=f"{region}, old"), region, instruct=True)
        assert zed(said) == region or not region.strip() or region != region.strip("\n")
        filled = code.edit_reply(request._replace(before="b"), region, instruct=False)
        assert zed(filled) == kilo(filled) == region


def test_a_reply_that_was_cut_off_is_no_edit():
    request = code.parse_edit(DOCS)
    assert code.edit_reply(request, "```\ndef f(x):", instruct=True, finish="length") == "None"
    assert code.edit_reply(request, "def f(x):", instruct=False, finish="length") == "```\ndef f(x):\n```"


def test_an_edit_prompt_is_a_conversation_or_a_hole():
    request = code.parse_edit(DOCS)
    told = code.edit_prompt(lm_of(), request, instruct=True)
    assert told.chat and told.suffix is None and told.max_tokens is None
    assert told.prompt[0] == SPECIAL.system and TOK.decode(told.prompt).endswith(DOCS)
    asked = code.edit_prompt(lm_of(), request, instruct=False)
    assert (TOK.decode(asked.prompt), TOK.decode(asked.suffix or ())) == (ABOVE, BELOW)
    assert asked.max_tokens == int(1.5 * len(TOK.encode(REGION))) + 16 and not asked.chat
    # At the beginning of a file, what stands before the cursor is all there is to go on from.
    first = request._replace(before="")
    assert TOK.decode(code.edit_prompt(lm_of(), first, instruct=False).prompt) == REGION[:AT]
    assert zed(code.edit_reply(first, "new", instruct=False)) == REGION[:AT] + "new"
    with pytest.raises(ApiError, match="only its region"):
        code.edit_prompt(lm_of(), first._replace(region="", after="\n", cursor=0), instruct=False)


def test_the_rewritten_span_is_short_contains_the_cursor_and_keeps_the_rest():
    lines = [f"line {n} = {'x' * (n % 7)}" for n in range(30)] + ["long " * 40, "", "end"]
    region = "\n".join(lines)
    request = code.parse_edit(DOCS)._replace(region=region)
    for cursor in (*range(0, len(region) + 1, 7), len(region), None):
        start, end = code.rewritten_span(request._replace(cursor=cursor))
        at = len(region) if cursor is None else cursor
        assert 0 <= start <= at <= end <= len(region) and end - start <= 64
        whole = [edge in (0, len(region)) or "\n" in region[edge - 1 : edge + 1] for edge in (start, end)]
        assert all(whole) or "long" in region[start:end]
        asked = code.edit_prompt(lm_of(), request._replace(cursor=cursor), instruct=False)
        assert (
            TOK.decode(asked.prompt) + region[start:end] + TOK.decode(asked.suffix or ())
            == ABOVE + region + BELOW
        )
        assert len(TOK.encode(region[start:end])) <= 64 and (asked.max_tokens or 0) <= 64 * 1.5 + 16
        edited = zed(code.edit_reply(request._replace(cursor=cursor), "new", instruct=False))
        assert edited == region[:start] + "new" + region[end:]


def test_fim_fills_a_hole_or_continues_the_prefix():
    for suffix in (None, "", "<|endoftext|>"):
        assert code.fim_prompt(lm_of(), "def f", suffix)[:2] == (tuple(TOK.encode("def f")), None)
    gap = code.fim_prompt(lm_of(), "def f", "return")
    assert gap[:2] == (tuple(TOK.encode("def f")), tuple(TOK.encode("return")))
    first = code.fim_prompt(lm_of(), "", "return")  # the engine wants at least one token in front
    assert first[:2] == (tuple(TOK.encode("\n")), tuple(TOK.encode("return")))
    with pytest.raises(ApiError, match="prompt is ''") as raised:
        code.fim_prompt(lm_of(), "", "<|endoftext|>")
    assert raised.value.param == "prompt"


def test_a_begin_token_stands_in_front_of_a_hole_too():
    tok = checkpoint_tokenizers.without_tools("gemma")
    assert (
        code.fim_prompt(lm_of(tok=tok), "fox", "the").prompt == (*tok.begin, *tok.encode("fox")) and tok.begin
    )
