"""Test sets that are read from a file: GSM8K, HumanEval and MBPP as they are published, and questions of one's own.

    mercury eval gsm8k --file test.jsonl
    mercury eval humaneval --file HumanEval.jsonl.gz --run-code sandbox --samples 10
    mercury eval exact --file questions.jsonl

A conversation asks for the whole answer; a text (`prompts="text"`, for models without a chat template) is continued.
The prompts are our own, so compare a figure with a published one only if its prompts are the same: `template` replaces
ours, and `harness` has the harness's. Programs in answers run in `sandbox`. Importing this file adds the tasks to
`runner.TASKS`.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax.config import nearest, refuse
from mercury_jax.evaluate import sandbox
from mercury_jax.evaluate.runner import (
    TASKS,
    EvalReport,
    EvalSettings,
    Evaluation,
    answer,
    summarise,
)
from mercury_jax.tasks import Split
from mercury_jax.tasks.task import read_json_lines
from mercury_jax.types import LM

SHOTS = 4  # default number of examples of `EvalSettings.examples`
MAX_TOKENS = 64  # default maximum number of tokens of an answer, where no expected one is longer
PASS_AT = (1, 2, 5, 10, 20, 50, 100)  # the k of pass@k, where there are as many answers


class TestQuestion(NamedTuple):
    """One question of a test set.

    Attributes:
        name: Its id in the file, or path:line.
        fields: What a template may name.
        output: The published answer, as an example shows it.
        check: check(answer, continues) tells whether the answer is right, or is the program that decides it.
            `continues` tells that the answer continues the text of the prompt.
    """

    name: str
    fields: Mapping[str, str]
    output: str
    check: Callable[[str, bool], bool | str]


class Prompts(NamedTuple):
    """How a test set asks.

    Attributes:
        template: The question, with fields of `TestQuestion` in braces.
        shown: The answer of an example, with {output} and the fields.
        stop: Texts that end an answer. None: the end of a line; or a blank line, if an expected answer has several
            lines; or nothing, if one has a blank line.
    """

    template: str
    shown: str
    stop: tuple[str, ...] | None = ()


class TestSet(NamedTuple):
    """A test set that is read from a file.

    Attributes:
        name: The name in `runner.TASKS`.
        about: Description in one line.
        read: read(path:line, object) is the question of a line, or None for one of another split.
        chat: Prompts of a conversation.
        text: Prompts of a text that is continued.
        max_tokens: Default maximum number of tokens of an answer. None: 64, or as many as the longest expected answer
            has.
        runs_code: Whether its answers are programs.
        splits: Which splits its file holds.
        origin: Which file it needs, for messages.
    """

    name: str
    about: str
    read: Callable[[str, Mapping[str, Any], Split], TestQuestion | None]
    chat: Prompts
    text: Prompts
    max_tokens: int | None
    runs_code: bool
    splits: tuple[Split, ...] = ("test",)
    origin: str = "the published file"


def evaluate(test_set: TestSet, lm: LM, settings: EvalSettings) -> EvalReport:
    """Asks every question `settings.samples` times and checks the answers without their thinking.

    Args:
        test_set: The questions.
        lm: The model.
        settings: The file, and how answers are decoded and checked.

    Returns:
        Accuracy (with several answers per question its mean, which is pass@1, and pass@k), its 95% interval and the
        cost; one row per answer, the answers of a question one after the other.
    """
    began = time.perf_counter()
    asked = read(test_set, settings)
    form = settings.prompts or ("chat" if _has_chat_template(lm) else "text")
    prompts = [
        prompt for prompt in build_prompts(test_set, settings, asked, form) for _ in range(settings.samples)
    ]
    owner = [question for question in asked for _ in range(settings.samples)]

    def grade(chosen: Sequence[int], texts: Sequence[str]) -> list[dict[str, Any]]:
        checked = [owner[i].check(text, form == "text") for i, text in zip(chosen, texts, strict=True)]
        programs = [program for program in checked if isinstance(program, str)]
        verdicts = iter(
            sandbox.run_all(programs, settings.run_code, settings.timeout) if settings.run_code else ()
        )
        graded = []
        for i, found in zip(chosen, checked, strict=True):
            verdict = next(verdicts) if isinstance(found, str) else sandbox.Verdict(found, None)
            about = {"name": owner[i].name, "output": owner[i].output}
            graded.append(about | {"correct": verdict.passed, "error": verdict.error})
        return graded

    stop = (test_set.chat if form == "chat" else test_set.text).stop
    stop = _line_end([question.output for question in asked]) if stop is None else stop
    most = settings.max_tokens or test_set.max_tokens or _longest(lm, asked)
    rows, timed, about = answer(lm, prompts, settings, most, grade, stop=stop)
    assert settings.file is not None  # `check_settings` refuses None
    summary = {"task": test_set.name, "data": settings.file.name, **about, "prompts": form}
    summary |= {"shots": _shots(settings), "samples": settings.samples}
    counted = summarise(rows, timed, time.perf_counter() - began, settings.samples)
    right = [row["correct"] for row in rows]
    per_question = [sum(right[at : at + settings.samples]) for at in range(0, len(right), settings.samples)]
    for k in PASS_AT[: 0 if settings.samples == 1 else None]:
        if k <= settings.samples:
            counted[f"pass@{k}"] = sum(pass_at_k(settings.samples, c, k) for c in per_question) / len(asked)
    return EvalReport(summary | counted, rows)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimates the probability that at least one of k answers is right, without bias (arXiv 2107.03374, eq. 1).

    Args:
        n: Number of answers to a question.
        correct: How many of them are right.
        k: At most n.

    Returns:
        1 - C(n - correct, k) / C(n, k).

    Raises:
        ValueError: `k` is not in 1..n, or `correct` not in 0..n.
    """
    if not 1 <= k <= n:
        raise refuse("k", k, f"1..{n}")
    if not 0 <= correct <= n:
        raise refuse("correct", correct, f"0..{n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


# --- files and prompts


def check_settings(test_set: TestSet, settings: EvalSettings) -> None:
    """Checks what only test sets use, before a model is loaded.

    Args:
        test_set: The questions.
        settings: All settings.

    Raises:
        ValueError: A setting is not allowed, or a file does not hold the test set.
    """
    if settings.file is None:
        raise refuse("file", None, f"{test_set.origin}: {test_set.about}")
    if settings.shots is not None and settings.examples is None:
        raise refuse("shots", settings.shots, "None without a file of examples")
    if settings.prompts not in (None, "chat", "text"):
        raise refuse("prompts", settings.prompts, "chat, text")
    if not test_set.runs_code and settings.run_code is not None:
        raise refuse("run_code", settings.run_code, f"None: the answers of {test_set.name} are not programs")
    if test_set.runs_code and settings.run_code is None:
        allowed = '"sandbox" or "unsandboxed": programs that the model writes are run on this machine'
        raise refuse("run_code", None, allowed)
    asked = read(test_set, settings)
    for form in ("chat", "text"):
        build_prompts(test_set, settings, asked[:1], form)
    if settings.run_code is not None:
        sandbox.check(settings.run_code)


def read(test_set: TestSet, settings: EvalSettings, examples: bool = False) -> list[TestQuestion]:
    """Reads the questions of a file.

    Args:
        test_set: The questions.
        settings: The file, the split and the limit.
        examples: Read `settings.examples` and its first `settings.shots` questions instead.

    Returns:
        At least one question.

    Raises:
        ValueError: The file cannot be read, has other fields, or no question of the split.
    """
    path: Path | None = settings.examples if examples else settings.file
    argument, most = ("examples", _shots(settings)) if examples else ("file", settings.limit)
    assert path is not None
    found = []
    for place, record in read_json_lines(path, argument):
        question = test_set.read(place, record, "train" if examples else settings.split)
        found += [question] if question else []
    if not found or (examples and len(found) < (most or 0)):
        allowed = f"at least {most if examples else 1} questions of {test_set.name}; it has {len(found)}"
        raise refuse(argument, str(path), allowed)
    return found[:most]


def build_prompts(
    test_set: TestSet, settings: EvalSettings, asked: Sequence[TestQuestion], form: str
) -> list[Any]:
    """Writes the prompts.

    Args:
        test_set: The prompts' templates.
        settings: `template` replaces the one of the test set; `examples` come before each question.
        asked: The questions.
        form: "chat" or "text".

    Returns:
        A conversation or a text for each question.

    Raises:
        ValueError: The template names a field that the test set does not have.
    """
    prompts = test_set.chat if form == "chat" else test_set.text
    template = prompts.template if settings.template is None else settings.template
    examples = read(test_set, settings, examples=True) if settings.examples else []
    shown = [
        (fill(template, shot.fields), fill(prompts.shown, {**shot.fields, "output": shot.output}))
        for shot in examples
    ]
    if form == "text":
        before = "".join(f"{question}{output}\n\n" for question, output in shown)
        return [before + fill(template, question.fields) for question in asked]
    turns = [
        {"role": role, "content": content}
        for pair in shown
        for role, content in zip(("user", "assistant"), pair)
    ]
    return [[*turns, {"role": "user", "content": fill(template, question.fields)}] for question in asked]


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Fills in a template.

    Args:
        template: A text with fields in braces.
        fields: Their values.

    Returns:
        The text with {name} replaced by the field of this name. Other braces stay.

    Raises:
        ValueError: There is no such field.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in fields:
            raise refuse("template", found[0], nearest(found[1], list(fields)))
        return fields[found[1]]

    return re.sub(r"\{([a-z_]+)\}", value, template)


def _line_end(outputs: Sequence[str]) -> tuple[str, ...]:
    """The text that ends an answer which continues a text, such that no expected answer is cut."""
    return next(((end,) for end in ("\n", "\n\n") if not any(end in output for output in outputs)), ())


def _longest(lm: LM, asked: Sequence[TestQuestion]) -> int:
    """Most tokens of an answer, so that no expected answer is cut."""
    return max(MAX_TOKENS, *(len(lm.tokenizer.encode(question.output)) for question in asked))


def _shots(settings: EvalSettings) -> int:
    """The number of examples before each question."""
    if settings.examples is None:
        return 0
    return SHOTS if settings.shots is None else settings.shots


def _has_chat_template(lm: LM) -> bool:
    try:
        return bool(lm.tokenizer.render([{"role": "user", "content": "x"}]))
    except ValueError:
        return False


def _texts(place: str, record: Mapping[str, Any], *names: str) -> list[str]:
    """Fields of a line that must be texts."""
    for name in names:
        if not isinstance(record.get(name), str):
            raise refuse(f"{place}: {name}", record.get(name), "a string")
    return [record[name] for name in names]


# --- questions of one's own


def _exact(place: str, record: Mapping[str, Any], split: Split) -> TestQuestion:
    del split
    question, right = _texts(place, record, "input", "output")
    return TestQuestion(
        place, {"input": question}, right, lambda text, continues: text.strip() == right.strip()
    )


# --- GSM8K

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
# Where an answer says which number is its result, the last such place counts, otherwise its last number.
MARKED = re.compile(rf"(?:####|answer is:?|\\boxed\{{)\s*\$?\s*({NUMBER})", re.IGNORECASE)


def final_number(text: str) -> Decimal | None:
    """Reads the result from a worked solution.

    Args:
        text: Such as "... #### 1,234", "the answer is $1234" or "\\boxed{1234}"; otherwise its last number counts.

    Returns:
        The number, or None.
    """
    found = MARKED.findall(text) or re.findall(NUMBER, text)
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
    except InvalidOperation:
        return None


def _gsm8k(place: str, record: Mapping[str, Any], split: Split) -> TestQuestion:
    del split
    question, solution = _texts(place, record, "question", "answer")
    right = final_number(solution)
    if right is None or "####" not in solution:
        raise refuse(f"{place}: answer", solution, "a solution that ends with #### and a number")
    shown = re.sub(r"<<.*?>>", "", solution)  # marks for a calculator
    return TestQuestion(
        place, {"question": question}, shown, lambda text, continues: final_number(text) == right
    )


# --- code

FENCE = re.compile(r"^ {0,3}```[^\n]*\n(.*?)(?:^ {0,3}```|\Z)", re.DOTALL | re.MULTILINE)


def extract_code(text: str, function: str | None = None) -> str:
    """Takes the code out of an answer.

    Args:
        text: The answer.
        function: Prefer the first block that defines this function.

    Returns:
        The first code block in Markdown, or the whole text. A block may lack its end.
    """
    blocks = FENCE.findall(text)
    defines = [block for block in blocks if function and _defines(block, function)]
    return (defines or blocks or [text])[0]


def _defines(code: str, function: str) -> bool:
    return re.search(rf"^(async )?def {re.escape(function)}\b", code, re.MULTILINE) is not None


def _humaneval(place: str, record: Mapping[str, Any], split: Split) -> TestQuestion:
    del split
    name, prompt, solution, test, function = _texts(
        place, record, "task_id", "prompt", "canonical_solution", "test", "entry_point"
    )

    def program(text: str, continues: bool) -> str:
        code = text if continues else extract_code(text, function)
        # A whole function stands behind the imports and helper functions of the prompt; a body continues the prompt.
        whole = not continues and _defines(code, function)
        before = prompt[: prompt.rfind(f"def {function}")] if whole else prompt
        return f"{before}{code}\n{test}\ncheck({function})\n"

    return TestQuestion(name, {"prompt": prompt, "function": function}, solution, program)


MBPP_IDS: dict[Split, range] = {"test": range(11, 511), "validation": range(511, 601), "train": range(1, 975)}


def _mbpp(place: str, record: Mapping[str, Any], split: Split) -> TestQuestion | None:
    number, tests = record.get("task_id"), record.get("test_list")
    if not isinstance(number, int):
        raise refuse(f"{place}: task_id", number, "a whole number")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise refuse(f"{place}: test_list", tests, "a list of strings")
    if number not in MBPP_IDS[split]:
        return None
    # "text" in the full file, "prompt" in the sanitised one.
    text, solution = _texts(place, record, "prompt" if "prompt" in record else "text", "code")
    setup = "\n".join([str(record.get("test_setup_code") or ""), *record.get("test_imports", [])])

    def program(answer: str, continues: bool) -> str:
        code = answer if continues else extract_code(answer)
        return "\n".join([setup, code, *tests, ""])

    return TestQuestion(str(number), {"text": text, "tests": "\n".join(tests)}, solution, program)


FUNCTION_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```")
TEST_SETS = (
    TestSet(
        "gsm8k",
        "word problems of grade school, test.jsonl of openai/grade-school-math",
        _gsm8k,
        Prompts('{question}\n\nWork it out step by step. End with a line "#### N" where N is the result.', "{output}"),
        Prompts("Question: {question}\nAnswer:", " {output}", ("\nQuestion:",)),
        max_tokens=256,
        runs_code=False,
    ),
    TestSet(
        "humaneval",
        "Python functions from their docstrings, HumanEval.jsonl.gz of openai/human-eval",
        _humaneval,
        Prompts("Write the whole of this Python function in one code block.\n\n```python\n{prompt}```",
                "```python\n{prompt}{output}```"),
        Prompts("{prompt}", "{output}", FUNCTION_ENDS),
        max_tokens=512,
        runs_code=True,
    ),
    TestSet(
        "mbpp",
        "short Python programs, mbpp.jsonl or sanitized-mbpp of google-research (test: ids 11 to 510)",
        _mbpp,
        Prompts("{text}\n\nWrite Python code in one code block. It must pass these tests:\n\n```python\n{tests}\n```",
                "```python\n{output}\n```"),
        Prompts('"""\n{text}\n{tests}\n"""\n', "{output}", ("\nassert", '\n"""', "\nprint", "\nif __name__")),
        max_tokens=512,
        runs_code=True,
        splits=("test", "validation"),
    ),
    TestSet(
        "exact",
        'questions of your own with the one right answer, lines of {"input", "output"}',
        _exact,
        Prompts("{input}", "{output}"),
        Prompts("{input}", "{output}", stop=None),
        max_tokens=None,
        runs_code=False,
        origin="a JSON Lines file",
    ),
)  # fmt: skip

TASKS.update({
    test_set.name: Evaluation(
        test_set.name,
        f"{test_set.about}; needs file",
        functools.partial(evaluate, test_set),
        check=functools.partial(check_settings, test_set),
        splits=test_set.splits,
    )
    for test_set in TEST_SETS
})  # fmt: skip
