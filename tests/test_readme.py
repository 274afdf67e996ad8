"""Every code block of the README and of docs/ runs as it is written, and prints what it says.

A block is fenced as `python` or `bash`. `# -> text` lines are what the code above them prints, since the last such
lines; `...` stands for any text. Blocks that need an accelerator, the network or much time have
`<!-- not run: REASON -->` in the line above. Python blocks share one namespace; a bash block has an empty folder.

The recipe of a first training takes more than a minute: it is shortened here, and what the trained model says is
compared only with MERCURY_README=full, as .ci/run sets it.
"""

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORTER = {"mercury train my_recipe.py": ["--steps", "2", "--sample-every", "0", "--eval-every", "0"]}
FULL = os.environ.get("MERCURY_README") == "full"
RESULT = re.compile(r"# -> ?(.*)")
REASON = re.compile(r"<!-- not run: (.+) -->")


class Block(NamedTuple):
    """One fenced block: its place for messages, its language, its lines, and why it is not run."""

    place: str
    language: str
    lines: list[str]
    reason: str | None


def blocks_of(text: str, name: str = "README.md") -> list[Block]:
    """The fenced blocks of a page. AssertionError for a block that could neither be run nor is marked."""
    found, fence, before = [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if fence is None:
                marked = REASON.fullmatch(before)
                fence = Block(f"{name}:{number}", line[3:].strip(), [], marked[1] if marked else None)
                assert fence.reason or fence.language in ("python", "bash"), (
                    f"{fence.place}: run it, or say why not"
                )
            else:
                found.append(fence)
                fence = None
        elif fence is not None:
            fence.lines.append(line)
        else:
            assert not (line.startswith("    ") and not before.strip()), f"{name}:{number}: fence this block"
            assert "<!-- not run" not in line or REASON.fullmatch(line), (
                f"{name}:{number}: <!-- not run: REASON -->"
            )
        before = line
    assert fence is None, f"{name}: the last fence is open"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(), page.relative_to(ROOT).as_posix())]
RUN = [block for block in BLOCKS if block.reason is None]


def difference(place: str, want: list[str], got: str) -> list[str]:
    """A message where `got` is not what the page says; nothing where it is."""
    wanted = "\n".join(want) + "\n"
    same = doctest.OutputChecker().check_output(wanted, got.rstrip("\n") + "\n", doctest.ELLIPSIS)
    return [] if same else [f"{place} says\n{wanted}and the code prints\n{got}"]


def run_python(block: Block, namespace: dict) -> list[str]:
    """Runs a block statement by statement; returns what it prints otherwise than the page says."""
    source = "\n".join(block.lines)
    body = ast.parse(source).body
    wrong: list[str] = []
    printed = io.StringIO()
    for i, statement in enumerate(body):
        code = compile(ast.Module([statement], []), block.place, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        end = body[i + 1].lineno - 1 if i + 1 < len(body) else len(block.lines)
        behind = [line.strip() for line in block.lines[statement.end_lineno or 0 : end]]
        want = [found[1] for line in behind if (found := RESULT.fullmatch(line))]
        if want:
            wrong += difference(f"{block.place}, line {statement.lineno}", want, printed.getvalue())
            printed = io.StringIO()
    return wrong


def run_commands(block: Block, folder: Path, cache: Path) -> list[str]:
    """Runs the commands of a block one after the other, `mercury` of this tree."""
    wrong: list[str] = []
    shortened = False
    env = os.environ | {"PYTHONPATH": str(ROOT), "MERCURY_CACHE": str(cache), "COLUMNS": "100"}
    for i, line in enumerate(block.lines):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "mercury", f"{block.place}: {line!r} is no command of ours; mark the block"
        short = [] if FULL else SHORTER.get(" ".join(words), [])
        run = subprocess.run(
            [sys.executable, "-m", "mercury_jax", *words[1:], *short],
            cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if run.returncode:
            wrong.append(f"{block.place}: {line}\nends with {run.returncode}\n{run.stderr}")
        want = []
        for result in block.lines[i + 1 :]:
            if not (found := RESULT.fullmatch(result)):
                break
            want.append(found[1])
        if want and not shortened:
            wrong += difference(f"{block.place}: {line}", want, run.stdout)
        shortened = shortened or bool(short)
    return wrong


@pytest.mark.slow
def test_python_blocks_run_and_print_what_they_say():
    namespace: dict = {"__name__": "readme"}
    blocks = [block for block in RUN if block.language == "python"]
    assert len(blocks) > 5
    wrong = [message for block in blocks for message in run_python(block, namespace)]
    assert not wrong, "\n\n".join(wrong)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in RUN if b.language == "bash"], ids=lambda block: block.place)
def test_commands_run_and_print_what_they_say(block, tmp_path, cache):
    wrong = run_commands(block, tmp_path, cache)
    assert not wrong, "\n\n".join(wrong)


def test_shortened_commands_are_those_of_the_readme():
    lines = {
        " ".join(shlex.split(line, comments=True))
        for block in RUN
        for line in block.lines
        if "mercury " in line
    }
    assert set(SHORTER) <= lines


@pytest.mark.parametrize(
    "text, words",
    [
        ("```\nmercury info\n```\n", "run it, or say why not"),
        ("```yaml\na: 1\n```\n", "run it, or say why not"),
        ("text\n\n    mercury info\n", "fence this block"),
        ("<!-- not run -->\n```bash\nmercury info\n```\n", "not run: REASON"),
        ("```python\n1\n", "open"),
    ],
)
def test_a_block_that_is_neither_run_nor_marked_is_found(text, words):
    with pytest.raises(AssertionError, match=words):
        blocks_of(text)


def test_a_wrong_result_is_found(tmp_path):
    wrong = blocks_of("```python\nprint(1)\n# -> 1\nfor i in range(2):\n    print(i)\n# -> 0\n# -> 2\n```\n")[
        0
    ]
    [message] = run_python(wrong, {})
    assert "line 3" in message
    [told] = run_commands(
        Block("x", "bash", ["mercury --version", "# -> mercury_jax 9..."], None), tmp_path, tmp_path
    )
    assert "mercury_jax 0." in told
    with pytest.raises(AssertionError, match="no command of ours"):
        run_commands(Block("x", "bash", ["make test"], None), tmp_path, tmp_path)
