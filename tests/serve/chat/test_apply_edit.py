"""Apply: a snippet cut from an edited file gives back that file, or is left to the model."""

import random
import time

import pytest

from mercury_jax.serve.chat.apply_edit import (
    apply_prompt,
    apply_reply,
    apply_update,
    merge_update,
    parse_apply,
)
from mercury_jax.serve.errors import ApiError
from mercury_jax.tokenizer import SPECIAL
from tests.serve.chat.test_code_prompts import TOK, lm_of

MARK = "# ... existing code ..."
PYTHON = """\
import os
import re


def area(r):
    x = 1
    y = helper(r)
    return x * y


def helper(r):
    x = 2
    return r

class Shape:
    sides = 3

    def name(self):
        return "shape"

    def count(self):
        return self.sides
"""
SCRIPT = """\
const a = 1;

function f(x) {
  const y = g(x);
  log(y);
  return y;
}

function g(x) {
  return x;
}
"""


def change(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("file", "update", "expected"),
    [
        # A line between two anchors.
        (PYTHON, f"{MARK}\ndef helper(r):\n    x = 3\n    return r\n{MARK}", change(PYTHON, ("x = 2", "x = 3"))),
        # A value behind the only anchor, the rest of the block left out.
        (PYTHON, f"{MARK}\ndef helper(r):\n    x = 3\n    {MARK}", change(PYTHON, ("x = 2", "x = 3"))),
        # A whole block under its head: what is indented goes, what follows stays.
        (PYTHON, f"{MARK}\ndef area(r):\n    return 3 * r\n\n{MARK}",
         change(PYTHON, ("    x = 1\n    y = helper(r)\n    return x * y\n", "    return 3 * r\n"))),
        (SCRIPT, "// ... existing code ...\n\nfunction f(x) {\n  return 2 * x;\n}\n\n// ... rest of the code ...",
         change(SCRIPT, ("  const y = g(x);\n  log(y);\n  return y;\n", "  return 2 * x;\n"))),
        (SCRIPT, "function g(x) {\n  return -x;\n}\n", change(SCRIPT, ("  return x;", "  return -x;"))),
        # New lines: behind an anchor, before one, at the end, at the beginning.
        (PYTHON, f"import os\nimport sys as system\n{MARK}", change(PYTHON, ("os\n", "os\nimport sys as system\n"))),
        (PYTHON, f"{MARK}\n\ndef new():\n    pass\n\n\nclass Shape:\n{MARK}",
         change(PYTHON, ("class Shape", "def new():\n    pass\n\n\nclass Shape"))),
        (PYTHON, f"{MARK}\n\ndef last():\n    pass\n", PYTHON + "\ndef last():\n    pass\n"),
        (PYTHON, f"from __future__ import x\n\n{MARK}", "from __future__ import x\n\n" + PYTHON),
        # Two runs, and a removed line.
        (PYTHON, f"{MARK}\nimport re\nZ = 1\n{MARK}\nclass Shape:\n\n    def name(self):\n{MARK}",
         change(PYTHON, ("import re\n", "import re\nZ = 1\n"), ("    sides = 3\n\n", "\n"))),
        (SCRIPT, "// ...\n  const y = g(x);\n  return y;\n// ...", change(SCRIPT, ("  log(y);\n", ""))),
        # A whole file without marks, and nothing at all.
        ("a one\nb two\nc three", "a one\nb 2\nc three", "a one\nb 2\nc three"),
        (PYTHON, MARK, PYTHON),
        (PYTHON, "", PYTHON),
        ("", "new\n# ... existing code ...", "new\n"),
    ],
)  # fmt: skip
def test_a_snippet_is_merged_as_a_reader_would_merge_it(file: str, update: str, expected: str):
    assert merge_update(file, update) == expected


@pytest.mark.parametrize(
    ("file", "update"),
    [
        (PYTHON, f"{MARK}\ncompletely(new)\n{MARK}"),  # where?
        (PYTHON, "completely(new)"),
        ("def f():\n    go(1)\ndef f():\n    go(1)\n", f"{MARK}\ndef f():\n    go(2)\n{MARK}"),  # which?
        (SCRIPT, "function f(x) {\n  log(z);\n  // ... existing code ..."),  # is it another log(y)?
        (PYTHON, f"{MARK}\nclass Shape:\n    sides = 4\n{MARK}\nimport re\nZ = 1\n{MARK}"),  # out of order
        (
            PYTHON,
            f"{MARK}\nimport re\nclass Shape:\n    def name(self):\n{MARK}\n    x = 1\n    return 7\n{MARK}",
        ),
        ("a = 1\nb = 2\nc = 3\n", f"a = 1\nc = 4\n{MARK}"),  # b stands between
    ],
)
def test_an_ambiguous_update_is_left_to_the_model(file: str, update: str):
    assert merge_update(file, update) is None


def test_a_guess_takes_a_similar_line_for_a_new_one():
    update = "function f(x) {\n  log(z);\n  // ... existing code ..."
    assert merge_update(SCRIPT, update, guess=True) == change(SCRIPT, ("f(x) {\n", "f(x) {\n  log(z);\n"))


@pytest.mark.parametrize(
    "mark",
    [
        "// ... existing code ...", "# ... rest of the file ...", "/* ... existing code ... */", "-- ... existing ...",
        "<!-- ... existing code ... -->", "    # …", "... existing code ...", "// rest of code ...",
        "{/* ... existing */}", "// ... (existing code) ...", "# ... keep the rest ...", "// ... other methods",
    ],
)  # fmt: skip
def test_marks_of_omitted_code_in_many_languages(mark: str):
    assert (
        merge_update("a one\nb two\nc three\nd four", f"{mark}\nb two\nnew\n{mark}")
        == "a one\nb two\nnew\nc three\nd four"
    )


@pytest.mark.parametrize(
    "line", ["...", "    ...", "x = ...", "# what exists ...", "print('... existing code ...')"]
)
def test_code_is_not_taken_for_a_mark(line: str):
    assert merge_update("a one\nc three", f"a one\n{line}\nc three") == f"a one\n{line}\nc three"


def test_a_mark_that_the_file_contains_is_a_line_of_it():
    file, update = f"a one\n{MARK}\nb two\nc three", f"a one\n{MARK}\nc three"
    assert merge_update(file, update) == update


def test_snippets_of_random_edits_give_back_the_edited_file():
    rng = random.Random(0)
    for _ in range(300):
        file = [f"line{n} = {rng.randrange(9)}" for n in range(rng.randrange(12, 40))]
        edited, update, at = list[str](), [], 0
        while at < len(file):
            kept = file[at : at + rng.randrange(3, 8)]
            edited += kept
            at += len(kept)
            update += kept if not update else []
            gone = rng.randrange(3)
            new = [f"new{at}_{n}()" for n in range(rng.randrange(3))]
            if at + gone + 2 < len(file) and (gone or new):
                # One line of context on either side, and what lies between two changes left out.
                update += [
                    *([] if update and update[-1] == kept[-1] else [MARK, kept[-1]]),
                    *new,
                    file[at + gone],
                ]
                edited += new
                at += gone
        update.append(MARK)
        assert merge_update("\n".join(file), "\n".join(update)) == "\n".join(edited)


def test_no_input_takes_long():
    same, spaces, wide = "x = 1\n" * 20_000, " " * 400_000 + "y", "ab " * 200_000
    many, new = "\n".join(f"a{n} = 1" for n in range(20_000)), "b(1)\n" * 9000
    pairs = [(same, same), (same, f"x = 1\ny = 2\n{MARK}"), (spaces, spaces), (wide, f"{wide}\nq")]
    began = time.perf_counter()
    for file, update in [*pairs, (many, f"a0 = 1\n{new}{MARK}"), (many, f"{new}a9 = 1\n{new}a19 = 1{MARK}")]:
        merge_update(file, update)
    assert time.perf_counter() - began < 20.0


APPLY = "<|original_code|>\na = 1\nb = 2\n\n<|/original_code|>\n\n<|update_snippet|>\n{}\n<|/update_snippet|>"


def test_apply_merges_without_a_model_where_the_update_is_unambiguous():
    request = parse_apply(APPLY.format("# ... existing code ...\nb = 2\nc = 3"))
    assert apply_update(request) == "a = 1\nb = 2\nc = 3\n"
    fenced = parse_apply(APPLY.format("```python\n# ... existing code ...\nb = 2\nc = 3\n```"))
    assert apply_update(fenced) == "a = 1\nb = 2\nc = 3\n"
    unclear = parse_apply(APPLY.format("# ... existing code ...\nc = 3\n# ... existing code ..."))
    assert apply_update(unclear) is None
    asked = apply_prompt(lm_of(), unclear)
    assert (
        asked.chat and asked.prompt[0] == SPECIAL.system and TOK.decode(asked.prompt).endswith(unclear.text)
    )
    with pytest.raises(
        ApiError, match="does not say where its update_snippet belongs, and tiny does not merge"
    ):
        apply_prompt(lm_of(), unclear, instruct=False)
    for written in ("```py\na\nb\n```", "a\nb", "a\nb\n", "<|original_code|>\na\nb\n<|/original_code|>"):
        assert apply_reply(unclear, written) == "a\nb\n"
    page = "# Title\n```py\ncode\n```\nmore\n"
    held = parse_apply(
        f"<|original_code|>\n{page}\n<|/original_code|>\n<|update_snippet|>\n{{}}\n<|/update_snippet|>"
    )
    assert apply_reply(held, page) == apply_reply(held, f"```md\n{page}```") == page
    for missing in ("<|original_code|>a<|/original_code|>", "<|update_snippet|>a<|/update_snippet|>", "x"):
        with pytest.raises(ApiError, match="has no"):
            parse_apply(missing)
