"""The task `exact`: questions of one's own from a file, each with its one right answer.

    mercury eval exact --file questions.jsonl

A conversation asks for the answer; a text (`prompts="text"`, for models without a chat template) is continued.
Published test sets (GSM8K, HumanEval, MBPP, ...) are tasks of lm-evaluation-harness, see `harness`. Importing this file
adds the task to `runner.TASKS`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax.config import nearest, refuse
from mercury_jax.evaluate.runner import TASKS, EvalReport, EvalSettings, Evaluation, answer, summarise
from mercury_jax.tasks.task import read_json_lines
from mercury_jax.tokenizer import has_chat_template
from mercury_jax.types import LM

SHOTS = 4  # default number of examples of `EvalSettings.examples`
MAX_TOKENS = 64  # default maximum number of tokens of an answer, where no expected one is longer
PASS_AT = (1, 2, 5, 10, 20, 50, 100)  # the k of pass@k, where there are as many answers


class Question(NamedTuple):
    """A question of a file: its place (path:line), its text and the right answer."""

    name: str
    input: str
    output: str


def evaluate(lm: LM, settings: EvalSettings) -> EvalReport:
    """Asks every question `settings.samples` times, and compares the answers without their thinking.

    Returns:
        Accuracy (with several answers per question its mean, which is pass@1, and pass@k), its 95% interval and the
        cost; one row per answer, the answers of a question one after the other.
    """
    began = time.perf_counter()
    asked = read(settings)
    form = settings.prompts or ("chat" if has_chat_template(lm.tokenizer) else "text")
    prompts = [prompt for prompt in build_prompts(settings, asked, form) for _ in range(settings.samples)]
    owner = [question for question in asked for _ in range(settings.samples)]

    def grade(chosen: Sequence[int], texts: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "name": owner[i].name, "output": owner[i].output,
                "correct": text.strip() == owner[i].output.strip(),
            }
            for i, text in zip(chosen, texts, strict=True)
        ]  # fmt: skip

    # A line break ends an answer that continues a text, unless it would cut an expected one.
    ends = [end for end in ("\n", "\n\n") if not any(end in question.output for question in asked)]
    stop = () if form == "chat" else ends[:1]
    most = settings.max_tokens or _longest(lm, asked)
    rows, timed, about = answer(lm, prompts, settings, most, grade, stop=stop)
    assert settings.file is not None  # `check_settings` refuses None
    summary = {"task": "exact", "data": settings.file.name, **about, "prompts": form}
    summary |= {"shots": _shots(settings), "samples": settings.samples}
    counted = summarise(rows, timed, time.perf_counter() - began, settings.samples)
    right = [row["correct"] for row in rows]
    per_question = [sum(right[at : at + settings.samples]) for at in range(0, len(right), settings.samples)]
    for k in PASS_AT[: 0 if settings.samples == 1 else None]:
        if k <= settings.samples:
            counted[f"pass@{k}"] = sum(pass_at_k(settings.samples, c, k) for c in per_question) / len(asked)
    return EvalReport(summary | counted, rows)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimates the probability that at least one of k answers is right, without bias (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def check_settings(settings: EvalSettings) -> None:
    """Checks what only this task uses, before a model is loaded."""
    if settings.file is None:
        raise refuse("file", None, 'a JSON Lines file of {"input", "output"}')
    if settings.shots is not None and settings.examples is None:
        raise refuse("shots", settings.shots, "None without a file of examples")
    if settings.prompts not in (None, "chat", "text"):
        raise refuse("prompts", settings.prompts, "chat, text")
    build_prompts(settings, read(settings)[:1], "chat")


def read(settings: EvalSettings, examples: bool = False) -> list[Question]:
    """Reads the questions of a file."""
    path: Path | None = settings.examples if examples else settings.file
    argument, most = ("examples", _shots(settings)) if examples else ("file", settings.limit)
    assert path is not None
    found = []
    for place, record in read_json_lines(path, argument):
        texts = []
        for name in ("input", "output"):
            if not isinstance(text := record.get(name), str):
                raise refuse(f"{place}: {name}", text, "a string")
            texts.append(text)
        found.append(Question(place, *texts))
    if not found or (examples and len(found) < (most or 0)):
        raise refuse(
            argument, str(path), f"at least {most if examples else 1} questions; it has {len(found)}"
        )
    return found[:most]


def build_prompts(settings: EvalSettings, asked: Sequence[Question], form: str) -> list[Any]:
    """Writes the prompts."""
    shown = [
        (fill(settings, shot), shot.output)
        for shot in (read(settings, examples=True) if settings.examples else ())
    ]
    if form == "text":
        before = "".join(f"{question}{output}\n\n" for question, output in shown)
        return [before + fill(settings, question) for question in asked]
    turns = [
        {"role": role, "content": content}
        for pair in shown
        for role, content in zip(("user", "assistant"), pair)
    ]
    return [[*turns, {"role": "user", "content": fill(settings, question)}] for question in asked]


def fill(settings: EvalSettings, question: Question) -> str:
    """Returns a question's text, or the template with it in place of {input}; other braces stay."""

    def value(found: re.Match[str]) -> str:
        if found[1] != "input":
            raise refuse("template", found[0], nearest(found[1], ["input"]))
        return question.input

    return question.input if settings.template is None else re.sub(r"\{([a-z_]+)\}", value, settings.template)


def _longest(lm: LM, asked: Sequence[Question]) -> int:
    """Most tokens of an answer, so that no expected answer is cut."""
    return max(MAX_TOKENS, *(len(lm.tokenizer.encode(question.output)) for question in asked))


def _shots(settings: EvalSettings) -> int:
    """The number of examples before each question."""
    if settings.examples is None:
        return 0
    return SHOTS if settings.shots is None else settings.shots


TASKS["exact"] = Evaluation(
    "exact",
    'questions of your own with the one right answer, lines of {"input", "output"}; needs file',
    evaluate,
    check=check_settings,
    splits=("test",),
)
