"""`mercury chat` keeps the conversation, and `mercury completion` knows what the commands take."""

import io
import os
import re
import shutil
import subprocess
import sys

import pytest

import mercury_jax as mj
from mercury_jax.cli import chat, completion, main
from tests.cli.run import objects, refused


def talk(monkeypatch, capsys, lines: str, *argv: str) -> list[dict]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return objects(capsys, "chat", "--max-tokens", "12", "--json", *argv)


@pytest.mark.long
def test_each_answer_is_that_of_the_whole_conversation(monkeypatch, capsys, at_hand):
    lm, seen = mj.load(at_hand), [{"role": "system", "content": "Be\nbrief."}]
    lines = "/system Be\\nbrief.\ndef f\n\nx = 1\n"
    rows = talk(monkeypatch, capsys, lines, "--model", at_hand, "-e", "--system", "replaced")
    assert [row["messages"] for row in rows] == [2, 4]  # an empty line is none
    for line, row in zip(("def f", "x = 1"), rows, strict=True):
        seen.append({"role": "user", "content": line})
        assert row["text"] == mj.sample(lm, seen, max_tokens=12).text
        seen.append({"role": "assistant", "content": row["text"]})


def test_commands_change_the_conversation_and_are_no_messages(monkeypatch, capsys, at_hand):
    lines = "a\n/undo\nb\n/new\nc\n/system S\nd\n/what\n/quit\nnever\n"
    rows = talk(monkeypatch, capsys, lines, "--model", at_hand)
    assert [row["messages"] for row in rows] == [1, 1, 1, 2]


@pytest.mark.long
def test_the_embedded_model_answers_each_question_alone(monkeypatch, capsys):
    """It was trained on single questions: behind another one the second answer was wrong."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("347+585=\n120+345=\n/exit\nnever\n"))
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "932\n465\n"


def test_single_lines_are_no_conversation(monkeypatch, capsys, at_hand):
    rows = talk(monkeypatch, capsys, "a\nb\n", "--model", at_hand, "--system", "S", "--single")
    assert [row["messages"] for row in rows] == [2, 2]


@pytest.mark.long
def test_a_pipe_gets_one_text_a_line_and_escapes_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("0200\\n4302\\n3401\\n0004\n"))
    assert main(["chat", "-e"]) == 0
    assert capsys.readouterr().out == "1243\n4312\n3421\n2134\n"


@pytest.fixture
def typed(monkeypatch, at_hand):
    """typed(lines, replies, *options) -> (budgets, messages) of the answers to lines that are typed in a terminal.

    A reply that is an exception is raised.
    """

    def converse(lines, replies, *options):
        lines, replies, seen = iter(lines), iter(replies), []

        def read(prompt):
            for line in lines:
                return line
            raise EOFError

        def answer(lm, messages, args, how, person):
            seen.append((how["max_tokens"], [message["content"] for message in messages]))
            if isinstance(reply := next(replies), BaseException):
                raise reply
            return reply

        with monkeypatch.context() as patch:
            patch.setattr(chat.show, "terminal", lambda stream=None: True)
            patch.setattr("builtins.input", read)
            patch.setattr(chat, "_answer", answer)
            assert main(["chat", "--model", at_hand, *options]) == 0
        return seen

    return converse


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(typed, capsys):
    seen = typed(["first", "second"], [KeyboardInterrupt(), "reply"])
    assert [messages for _, messages in seen] == [["first"], ["second"]]  # the stopped question is forgotten
    assert "stopped" in capsys.readouterr().err


def test_the_default_budget_is_what_the_context_leaves(typed, at_hand, capsys):
    lm, seen = mj.load(at_hand), typed(["a", "b", "c", "/new", "d"], ["x" * 40, "y" * 80, "z"])
    turns = [("user", "a"), ("assistant", "x" * 40), ("user", "b")]
    whole = [{"role": role, "content": text} for role, text in turns]
    budgets = [budget for budget, _ in seen[:2]]
    assert budgets == [128 - len(lm.tokenizer.render(whole[:turns])) for turns in (1, 3)]
    said = capsys.readouterr().err  # the third question does not fit behind two long answers
    assert "conversation is '" in said and "fewer than the model's context of 128\n/new begins again" in said
    assert [messages for _, messages in seen[2:]] == [["d"]]


def test_with_thinking_the_default_leaves_room_for_it(typed):
    [(budget, _)] = typed(["a"], ["x"], "--effort", "low")
    assert 50 < budget < 64


def test_a_budget_that_does_not_fit_is_refused_by_its_option(typed, capsys):
    assert typed(["a"], [], "--max-tokens", "256") == []
    said = capsys.readouterr().err
    assert "--max-tokens is 256; allowed: 1..1" in said and "/new begins" not in said
    assert len(typed(["a", "b"], ["x" * 60], "--max-tokens", "100")) == 1  # fits without the first answer
    assert re.search(r"--max-tokens is 100; allowed: 1\.\.\d+: .*\n/new begins", capsys.readouterr().err)


@pytest.mark.long
def test_an_answer_that_the_context_ends_is_said_to_be_so(monkeypatch, capsys, at_hand):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert main(["chat", "--model", at_hand, "--temperature", "2"]) == 0
    assert "the answer ended at the model's context of 128 tokens\n" in capsys.readouterr().err


def test_pasted_lines_are_one_message(typed):
    [(_, messages)] = typed(["0200\n4302\n3401\n0004", "/quit"], ["x"])
    assert messages == ["0200\n4302\n3401\n0004"]


def test_the_help_of_a_conversation_says_how_several_lines_are_typed(typed, capsys):
    typed(["/help"], [])
    assert "several lines: paste it" in capsys.readouterr().err


def test_the_embedded_model_says_what_it_knows(monkeypatch, capsys):
    monkeypatch.setattr(chat.show, "terminal", lambda stream=None: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
    assert main(["chat"]) == 0
    assert "sums of up to three digits (347+585=) and 4x4 Sudokus" in capsys.readouterr().err


@pytest.mark.parametrize(
    "finish, thinking, told",
    [
        ("stop", "1+1", "the model gave no answer: it stopped while thinking '1+1'"),
        ("length", "1+1", "the answer ended while thinking: '1+1'; raise --max-tokens"),
        ("stop", None, "the model gave no answer"),
    ],
)
def test_an_empty_answer_gets_the_advice_that_fits(monkeypatch, capsys, finish, thinking, told):
    assert chat.show.no_answer(thinking, finish) == told


@pytest.mark.slow
def test_the_embedded_model_without_an_answer_says_so(monkeypatch, capsys):
    unlike = "What is the capital of France?"  # no question of its training
    told = "the model gave no answer: it stopped while thinking"
    assert main(["sample", "--chat", unlike]) == 0
    assert told in (said := capsys.readouterr().err) and "--max-tokens" not in said
    monkeypatch.setattr(sys, "stdin", io.StringIO(unlike + "\n"))
    assert main(["chat"]) == 0
    assert told in capsys.readouterr().err


PASTE = r"""
import os, pty, sys, time
pid, screen = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
said = b""
while b"[?2004h" not in said:  # readline asks the terminal to mark pastes
    said += os.read(screen, 1000)
os.write(screen, b"\x1b[200~0200\n4302\x1b[201~\r")
while b"END" not in said:
    said += os.read(screen, 1000)
print(said.split(b"GOT ")[1].split(b"END")[0].decode())
"""


def test_readline_returns_a_paste_as_one_text():
    """In a pseudo-terminal, marked as tmux and every terminal of today mark it."""
    pytest.importorskip("readline")
    program = "from mercury_jax.cli import chat; print('GOT', [next(chat._lines(True))], 'END')"
    command = [sys.executable, "-c", PASTE, program]
    env = os.environ | {"TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.strip() == r"['0200\n4302']", done.stderr


def test_only_near_names_are_suggested(capsys):
    for word, near in {"chatt": "chat", "bnch": "bench", "comp": "completion"}.items():
        assert f"{near} is the nearest" in refused(capsys, word)
    for word in ("foo", "zzz"):
        assert "nearest" not in refused(capsys, word)
    assert "the nearest of " in refused(capsys, "sample", "x", "--set", "3")  # of many names the nearest few


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "mercury.bash"
    path.write_text(completion.bash())
    return path


@pytest.mark.parametrize(
    "typed, found",
    [
        ("mercury ser", ["serve"]),
        ("mercury bench dec", ["decode"]),
        ("mercury sample x --max-t", ["--max-tokens"]),
        ("mercury train nano --optim.lr", ["--optim.lr"]),
        ("mercury chat --rule topk", ["topk_margin"]),
        ("mercury eval sudoku4", ["sudoku4"]),
        ("mercury data pack --held", ["--held-out"]),
        ("mercury sample x --rule threshold --p", ["--param", "--presence", "--p"]),
        ("mercury sample x --rule = klass --pati", ["--patience"]),  # bash takes --rule=klass apart so
        ("mercury sample x --rule = topk", ["topk_margin"]),
        ("mercury sample x --rule confidence --patien", []),
        ("mercury train na", ["nano", "nano_bidirectional", "nano_gpu", "nano_sdar"]),
        ("mercury train --js", ["--json"]),
        ("mercury init twin", ["twin_nano"]),
        ("mercury sample x --dtype b", ["bfloat16"]),
        ("mercury sample x --quantise ", ["int8", "fp8", "int8_dynamic", "fp8_dynamic"]),
        ("mercury chat --kv 4", ["4bit"]),
        ("mercury sample x --model ", ["runs", "two words"]),
        ("mercury sample x --model r", ["runs"]),
    ],
)
def test_bash_completes_commands_options_and_values(script, typed, found, tmp_path):
    for folder in ("runs", "two words"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file.txt").write_text("")
    program = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mercury; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    assert bash, "bash is part of what CI needs"
    done = subprocess.run(
        [bash, "-c", program, script, *typed.split(" ")], capture_output=True, text=True, cwd=tmp_path
    )
    assert sorted(filter(None, done.stdout.split("\n"))) == sorted(found) and done.stderr == ""


def test_the_options_are_those_that_the_parser_takes(capsys):
    assert "bash, zsh, fish" in refused(capsys, "completion", "tcsh")
    from mercury_jax.cli.arguments import option_names
    from mercury_jax.cli.sample import Sample

    for command, kind in (("sample", Sample), ("chat", chat.ChatCommand)):
        assert set(option_names(kind)) <= set(completion.options_of(command))
    assert re.search(r"^complete -c mercury .*-l max-tokens$", completion.fish(), re.MULTILINE)
