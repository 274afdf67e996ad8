"""Every code block of README.md, CONTRIBUTING.md and docs/ runs as it is written, and prints what it says.

A block is fenced as `python` or `bash`. `# -> text` lines are what the code above them prints, since the last such
lines; `...` stands for any text. The blocks of a page run in order, in one empty folder and one namespace:

    python                              runs in this process; a client asks that server, too
    bash                                `mercury` commands run in this process too; `curl` asks a server of the
                                        embedded model in place of the one at http://127.0.0.1:8000. A block that sets
                                        an environment variable is run by bash, whole
    <!-- file: NAME --> above a block   the block is written to that file, for the commands behind it
    <!-- not run: REASON --> above      needs an accelerator, the network or much time

The recipe of a first training takes more than a minute: it is shortened here, and what the trained model says is
compared only with MERCURY_README=full, as `.ci/run nightly` sets it.
"""

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.marks import slow_except

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
SHORTER = {
    "mercury train my_recipe.py": ["--steps", "2", "--sample-every", "0", "--eval-every", "0"],
    "mercury train sft_nano --chats lines.jsonl": ["--steps", "2"],
}
FULL = os.environ.get("MERCURY_README") == "full"
LONG = {"README.md", "CONTRIBUTING.md"}  # pages that take over ten seconds
LONG |= {
    "docs/command-line.md", "docs/decoder.md", "docs/evaluation.md", "docs/fine-tuning.md",
    "docs/hardware.md", "docs/responses-and-messages.md", "docs/sampling.md", "docs/scaling.md",
    "docs/search-and-rl.md", "docs/serving.md",
    "docs/your-model.md", "docs/your-rule.md",
}  # fmt: skip
SERVER = "http://127.0.0.1:8000"
RESULT = re.compile(r"# -> ?(.*)")
REASON = re.compile(r"<!-- not run: (.+) -->")
FILE = re.compile(r"<!-- file: ([\w.]+) -->")
SETS = re.compile(r"(export )?[A-Z_]+=")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """One fenced block: its place for messages, its language, its lines, why it is not run, the file it is."""

    place: str
    language: str
    lines: list[str]
    reason: str | None = None
    file: str | None = None


def blocks_of(text: str, name: str = "README.md") -> list[Block]:
    """The fenced blocks of a page. AssertionError for a block that could neither be run nor is marked."""
    found, fence, before = [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if fence is None:
                marked, named = REASON.fullmatch(before), FILE.fullmatch(before)
                reason, file = marked[1] if marked else None, named[1] if named else None
                fence = Block(f"{name}:{number}", line[3:].strip(), [], reason, file)
                assert reason or file or fence.language in ("python", "bash"), (
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


BLOCKS = {name: blocks_of((ROOT / name).read_text(), name) for name in PAGES}
RUN = {name: run for name, blocks in BLOCKS.items() if (run := [b for b in blocks if b.reason is None])}


def difference(place: str, want: list[str], got: str) -> list[str]:
    """A message where `got` is not what the page says; nothing where it is."""
    wanted = "\n".join(want) + "\n"
    same = doctest.OutputChecker().check_output(wanted, got.rstrip("\n") + "\n", doctest.ELLIPSIS)
    return [] if same else [f"{place} says\n{wanted}and the code prints\n{got}"]


def run_python(block: Block, namespace: dict, url: str = "") -> list[str]:
    """Runs a block statement by statement; returns what it prints otherwise than the page says."""
    source = "\n".join(block.lines).replace(SERVER, url)
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


def commands_of(block: Block) -> list[tuple[list[str], list[str]]]:
    """(words, results) of each command; one continues in the next line behind a backslash or an open quote."""
    found: list[tuple[list[str], list[str]]] = []
    command = ""
    for line in block.lines:
        if not command and (result := RESULT.fullmatch(line)):
            found[-1][1].append(result[1])
            continue
        command += line
        try:
            words = shlex.split(command.removesuffix("\\"), comments=True)
        except ValueError:  # an open quote
            command += "\n"
            continue
        if line.endswith("\\"):
            command = command.removesuffix("\\")
            continue
        command = ""
        if words:
            assert words[0] in ("mercury", "curl"), (
                f"{block.place}: {line!r}: not our command; mark the block"
            )
            found.append((words, []))
    assert not command, f"{block.place}: the last command is open"
    return found


def run_command(words: list[str], url: str = "") -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command in the current folder."""
    if words[0] == "curl":
        if not shutil.which("curl"):
            pytest.skip("no curl here")
        words = [word.replace(SERVER, url) for word in words]
        run = subprocess.run(words, capture_output=True, text=True, timeout=60)
        return run.returncode, run.stdout, run.stderr
    from mercury_jax.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    return code, out.getvalue(), err.getvalue()


def run_shell(block: Block) -> list[str]:
    """Runs a block that sets environment variables with bash; returns what it prints otherwise than the page says."""
    ours = ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS")  # those of the tests, which a reader has not set
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-e"], input="\n".join(block.lines), capture_output=True, text=True, timeout=600,
        env=environment,
    )  # fmt: skip
    if run.returncode:
        return [f"{block.place}\nends with {run.returncode}\n{run.stderr}"]
    want = [found[1] for line in block.lines if (found := RESULT.fullmatch(line))]
    return difference(block.place, want, run.stdout) if want else []


def run_commands(block: Block, url: str = "") -> list[str]:
    """Runs the commands of a block in the current folder; returns what they print otherwise than the page says."""
    wrong: list[str] = []
    shortened = False
    for words, want in commands_of(block):
        line = shlex.join(words)
        short = [] if FULL else SHORTER.get(line, [])
        code, out, err = run_command([*words, *short], url)
        if code:
            wrong.append(f"{block.place}: {line}\nends with {code}\n{err}")
        elif want and not shortened:
            wrong += difference(f"{block.place}: {line}", want, out)
        shortened = shortened or bool(short)
    return wrong


@pytest.fixture(scope="module")
def lm():
    """The embedded model, one for all pages: they share its compiled programs."""
    import mercury_jax as mj

    return mj.load()


@pytest.fixture(scope="module")
def url(lm):
    """The address of a server of the embedded model, started by the first page that asks it."""
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig
    from tests.serve.playground.served import Served

    with Served(Engine(lm, EngineConfig(slots=1, programs="one", rules=()))) as served:
        yield served.url.rstrip("/")


@pytest.fixture
def page(tmp_path, monkeypatch, lm):
    """An empty folder to run a page in. What the page registers and imports is forgotten afterwards."""
    import mercury_jax as mj
    from mercury_jax.cli import show
    from mercury_jax.decode import processors, rules, stopping

    load = mj.load
    nano = lambda source=None, **how: lm if source is None and not how else load(source, **how)
    monkeypatch.setattr(mj, "load", nano)
    monkeypatch.setattr(show, "load", nano)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    before, modules = [dict(kind.ALL) for kind in (rules, processors, stopping)], set(sys.modules)
    yield tmp_path
    for kind, names in zip((rules, processors, stopping), before, strict=True):
        kind.ALL.clear()
        kind.ALL.update(names)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", slow_except(RUN, *RUN.keys() - LONG))
def test_blocks_run_and_print_what_they_say(name, page, request):
    namespace: dict = {"__name__": "readme"}
    wrong: list[str] = []
    for block in RUN[name]:
        if block.file is not None:
            (page / block.file).write_text("\n".join(block.lines) + "\n")
        elif block.language == "python":
            asked = SERVER in "\n".join(block.lines)
            wrong += run_python(block, namespace, request.getfixturevalue("url") if asked else "")
        elif SETS.match("\n".join(block.lines)):
            wrong += run_shell(block)
        else:
            asked = any(words[0] == "curl" for words, _ in commands_of(block))
            wrong += run_commands(block, request.getfixturevalue("url") if asked else "")
    assert not wrong, "\n\n".join(wrong)


def test_the_readme_runs_python_and_commands():
    assert {block.language for block in RUN["README.md"]} == {"python", "bash"}
    lines = {
        shlex.join(words)
        for blocks in RUN.values()
        for block in blocks
        if block.language == "bash" and block.file is None and not SETS.match("\n".join(block.lines))
        for words, _ in commands_of(block)
    }
    assert set(SHORTER) <= lines


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [ROOT / name for name in PAGES], ids=PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "text, words",
    [("```\nmercury info\n```\n", "run it, or say why not"),
     ("```yaml\na: 1\n```\n", "run it, or say why not"), ("text\n\n    mercury info\n", "fence this block"),
     ("<!-- not run -->\n```bash\nmercury info\n```\n", "not run: REASON"), ("```python\n1\n", "open")],
)  # fmt: skip
def test_a_block_that_is_neither_run_nor_marked_is_found(text, words):
    with pytest.raises(AssertionError, match=words):
        blocks_of(text)


def test_a_wrong_result_is_found():
    [wrong] = blocks_of(
        "```python\nprint(1)\n# -> 1\nfor i in range(2):\n    print(i)\n# -> 0\n# -> 2\n```\n"
    )
    [message] = run_python(wrong, {})
    assert "line 3" in message
    [message] = run_commands(Block("x", "bash", ["mercury --version", "# -> mercury_jax 9..."]))
    assert "mercury_jax 0." in message
    [message] = run_commands(Block("x", "bash", ["mercury sample \\", "  --nothing", "# -> a text"]))
    assert "ends with 2" in message
    [message] = run_shell(Block("x", "bash", ["A=1 mercury --version", "# -> mercury_jax 9..."]))
    assert "mercury_jax 0." in message
    [message] = run_shell(Block("x", "bash", ["A=1 mercury nothing", "# -> a text"]))
    assert "ends with 2" in message
    with pytest.raises(AssertionError, match="not our command"):
        run_commands(Block("x", "bash", ["make test"]))


def test_a_wrong_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    for text in ("[a](none.md)", "# One `x.y`\n[a](#two)"):
        page.write_text(text)
        with pytest.raises(AssertionError, match=r"page\.md"):
            test_links_lead_to_files_and_headings(page)
    page.write_text("# One `x.y`, two\n[a](#one-xy-two) [b](page.md)")
    test_links_lead_to_files_and_headings(page)
