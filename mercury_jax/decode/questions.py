"""Typed questions for `mj.decide`: what is asked, the labels that may answer it, and the prompt that asks it.

`MultipleChoice` has labels of one's own, `YesNo` two, `Scale` the levels of a rubric. `prompt_of` writes the text of a
question after its state; `answer_labels` are the texts whose probabilities `decide.py` compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mercury_jax.config import refuse

MAX_LABELS = 255  # of a question
JSON: TypeAlias = str | Mapping[str, Any] | Sequence[Any]  # a text, or JSON that is written as one
Descriptions: TypeAlias = Mapping[str, JSON | None]


class MultipleChoice(NamedTuple):
    """A question that is answered by one of some labels.

    Attributes:
        labels: 1 to 255 labels, or {label: description}; a description may be None.
        instructions: What is asked. "": which of the labels describes the state.
    """

    labels: Sequence[str] | Descriptions
    instructions: JSON = ""


class YesNo(NamedTuple):
    """A question that is answered by yes or no, or a statement that is true or false.

    Attributes:
        instructions: The question or statement. It may be "" if `yes` or `no` is given.
        yes: What counts as yes; None: as the question says.
        no: What counts as no; None: as the question says.
    """

    instructions: JSON = ""
    yes: JSON | None = None
    no: JSON | None = None


class Scale(NamedTuple):
    """A question that is answered by a level of a rubric. The answer's `score` is the expected level.

    Attributes:
        levels: Descriptions of the levels 0, 1, ..., in ascending order.
        instructions: What is rated. "": the state.
    """

    levels: Sequence[JSON]
    instructions: JSON = ""


Question: TypeAlias = MultipleChoice | YesNo | Scale
ALLOWED = "a question of mj.questions: MultipleChoice(labels), YesNo(instructions) or Scale(levels)"


def as_text(value: JSON, name: str) -> str:
    """Returns a text as it is, and JSON as compact text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise refuse(name, value, "a text, or an object or list of JSON") from None


def answer_labels(question: Question) -> tuple[str, ...]:
    """Returns the labels of a question, in the order of its probabilities."""
    if isinstance(question, YesNo):
        return "yes", "no"
    if isinstance(question, Scale):
        return tuple(str(level) for level in range(len(question.levels)))
    return tuple(question.labels)


def descriptions(question: Question) -> list[JSON | None]:
    """Returns the description of each label; None for a label without a description."""
    if isinstance(question, YesNo):
        return [question.yes, question.no]
    if isinstance(question, Scale):
        return list(question.levels)
    return (
        list(question.labels.values())
        if isinstance(question.labels, Mapping)
        else [None] * len(question.labels)
    )


def check_question(question: Any, name: str) -> None:
    """Checks one question, before any compute."""
    if not isinstance(question, MultipleChoice | YesNo | Scale):
        raise refuse(name, question, ALLOWED)
    if isinstance(question, YesNo):
        if not question.instructions and question.yes is None and question.no is None:
            raise refuse(
                f"{name}.instructions", question.instructions, "a question, unless yes or no is described"
            )
        field = "instructions"
    else:
        field = "labels" if isinstance(question, MultipleChoice) else "levels"
        entries = getattr(question, field)
        if isinstance(entries, str) or not isinstance(entries, Sequence | Mapping):
            raise refuse(f"{name}.{field}", entries, f"a list of {field}")
        if not 1 <= len(entries) <= MAX_LABELS:
            raise refuse(f"{name}.{field}", f"{len(entries)} entries", f"1 to {MAX_LABELS}")
        if isinstance(entries, Mapping) and isinstance(question, Scale):
            raise refuse(f"{name}.levels", entries, "a list, from the lowest level to the highest")
    labels = answer_labels(question)
    for i, label in enumerate(labels):
        if not isinstance(label, str) or not label.strip():
            raise refuse(f"{name}.{field}[{i}]", label, "a text of at least one visible character")
        if label in labels[:i]:
            raise refuse(f"{name}.{field}[{i}]", label, "labels that differ")
    as_text(question.instructions, f"{name}.instructions")
    for i, text in enumerate(descriptions(question)):
        if text is not None:
            as_text(text, f"{name}.{field}[{i}]")


def order_of(question: Question, read: int, reads: int) -> list[int]:
    """Returns the order in which read `read` of `reads` lists the labels.

    A model prefers some places of a list, so each read lists them in another order: rotated evenly, and the levels of a
    scale, whose neighbours belong together, forwards and backwards in turn.
    """
    count = len(answer_labels(question))
    if isinstance(question, Scale):
        return list(range(count))[:: -1 if read % 2 else 1]
    shift = read * max(1, count // max(reads, 1)) % count
    return [(shift + i) % count for i in range(count)]


def prompt_of(question: Question, order: Sequence[int]) -> str:
    """Writes a question as the text that follows its state, with the labels listed in an order."""
    labels, about = answer_labels(question), descriptions(question)
    asked = as_text(question.instructions, "instructions")
    if not asked:
        asked = {
            MultipleChoice: "Which of these describes the text above?",
            Scale: "Which level describes the text above?",
        }.get(type(question), "Is this so?")
    line = lambda i: (
        labels[i] if about[i] is None else f"{labels[i]}: {as_text(about[i] or '', 'description')}"
    )
    listed = "\n".join(f"- {line(i)}" for i in order)
    return f"Question: {asked}\nPossible answers:\n{listed}\nReply with one of the possible answers and nothing else."


def from_json(data: Any, name: str = "question") -> Question:
    """Reads a question as {"type": "choice" | "noul" | "score", "instructions", "criteria"}, the form of Mercury's API.

    Args:
        data: The object.
        name: Name of the question in errors.

    Returns:
        The question.

    Raises:
        ValueError: Names the field that does not fit.
    """
    if not isinstance(data, Mapping):
        raise refuse(name, data, "an object with type, instructions and criteria")
    kind, criteria, asked = data.get("type"), data.get("criteria"), data.get("instructions") or ""
    if kind == "noul":
        if not isinstance(criteria, Mapping | None):
            raise refuse(f"{name}.criteria", criteria, "an object with true and false")
        question: Question = YesNo(asked, (criteria or {}).get("true"), (criteria or {}).get("false"))
    elif kind == "choice":
        if not isinstance(criteria, Mapping):
            raise refuse(f"{name}.criteria", criteria, "an object of labels and descriptions")
        question = MultipleChoice(criteria, asked)
    elif kind == "score":
        if not isinstance(criteria, list | tuple):
            raise refuse(f"{name}.criteria", criteria, "a list of levels")
        question = Scale(criteria, asked)
    else:
        raise refuse(f"{name}.type", kind, "choice, noul, score")
    check_question(question, name)
    return question
