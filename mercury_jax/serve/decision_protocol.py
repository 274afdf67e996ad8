"""Requests and responses of POST /v1/decisions and /v1/systemone, in the forms of Mercury and of OpenAI.

Mercury's form has a `state` and questions by name; TypeSafe's client uses the same at /v1/systemone. OpenAI's form has
an `input` and a list of questions. Both become `AskedQuestions`; the answers are written in the form of the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from mercury_jax.decode.decide import MAX_READS, Answer, DecideOutput
from mercury_jax.decode.questions import MAX_LABELS, MultipleChoice, Question, Scale, YesNo
from mercury_jax.serve import errors
from mercury_jax.serve.protocol import JsonObject, RequestModel, ShortText, parse_request
from mercury_jax.serve.responses import Count

MAX_QUESTIONS = 400
Content = str | JsonObject | list[Any]  # a text, or JSON that the model reads as text
Probability = Annotated[float, Field(ge=0, le=1)]
IMAGES = "images are not read: this model reads text only"


class AskedQuestions(NamedTuple):
    """A request, whatever its form.

    Attributes:
        state: What the questions are about.
        questions: The questions by name; in OpenAI's form the names are their places in the list.
    """

    state: str | JsonObject
    questions: dict[str, Question]


class ReadFields(RequestModel):
    """The fields that both forms have. `reads` and the following ones are this server's own."""

    model: str = Field(min_length=1, max_length=256)
    """The model, by its name or one of its aliases."""
    reads: int = Field(1, ge=1, le=MAX_READS)
    """Reads of each question, each with the labels in another order; from two on the answers have standard errors."""
    second_reads: int = Field(0, ge=0, le=MAX_READS)
    """Further reads of questions whose answer is in doubt."""
    doubt: float = Field(0.5, ge=0, le=1)
    """Share of the largest entropy from which an answer is in doubt."""
    seed: int = Field(0, ge=0, lt=1 << 31)
    """Seed of the noise, for models that denoise random tokens."""


# --- Mercury's form


class YesNoCriteria(RequestModel):
    """What counts as an answer of yes or no."""

    true: Content | None = None
    """What counts as yes."""
    false: Content | None = None
    """What counts as no."""


class NoulQuestion(RequestModel):
    """A question of yes or no, or a statement."""

    type: Literal["noul"]
    instructions: Content | None = None
    """The question; it may be left out where `criteria` describes an answer."""
    criteria: YesNoCriteria | None = None
    """What counts as yes and as no."""


class ChoiceQuestion(RequestModel):
    """A question that is answered by one of some labels."""

    type: Literal["choice"]
    criteria: dict[str, Content | None] = Field(min_length=1, max_length=MAX_LABELS)
    """The labels and their descriptions, which may be null."""
    instructions: Content | None = None
    """What is asked."""


class ScoreQuestion(RequestModel):
    """A question that is answered by a level."""

    type: Literal["score"]
    criteria: list[Content] = Field(min_length=1, max_length=MAX_LABELS)
    """Descriptions of the levels 0, 1, ..."""
    instructions: Content | None = None
    """What is rated."""


NamedQuestion = Annotated[NoulQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class MercuryDecisionsRequest(ReadFields):
    """Body of POST /v1/decisions in Mercury's form, and of POST /v1/systemone."""

    state: Content
    """What all questions are about: a text, an object or a list."""
    questions: dict[str, NamedQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    """The questions by name."""
    assets: JsonObject | None = None
    """Not supported: this model reads text only."""

    def asked(self) -> AskedQuestions:
        """Returns the request in the form that the model reads."""
        if self.assets:
            raise errors.invalid_request("assets", f"assets has {len(self.assets)} entries, but {IMAGES}")
        refuse_images(self.state, "state")
        questions: dict[str, Question] = {}
        for name, one in self.questions.items():
            instructions = one.instructions or ""
            refuse_images(instructions, f"questions.{name}.instructions")
            if isinstance(one, NoulQuestion):
                criteria = one.criteria or YesNoCriteria()
                if not instructions and criteria.true is None and criteria.false is None:
                    raise errors.invalid_value(
                        f"questions.{name}.instructions",
                        one.instructions,
                        "a question, unless criteria has true or false",
                    )
                questions[name] = YesNo(instructions, criteria.true, criteria.false)
            elif isinstance(one, ChoiceQuestion):
                questions[name] = MultipleChoice(one.criteria, instructions)
            else:
                questions[name] = Scale(one.criteria, instructions)
        state = (
            self.state if isinstance(self.state, str | dict) else json.dumps(self.state, ensure_ascii=False)
        )
        return AskedQuestions(state, questions)

    def answered(self, out: DecideOutput, model: str) -> Mapping[str, Any]:
        """Writes the response."""
        answers: dict[str, Any] = {}
        for name, one in out.answers.items():
            probabilities = {label: float(p) for label, p in zip(one.labels, one.probabilities, strict=True)}
            if isinstance(one.question, YesNo):
                answers[name] = {"type": "noul", "noul": one.yes}
            elif isinstance(one.question, Scale):
                legend = {str(i): level for i, level in enumerate(one.question.levels)}
                answers[name] = {
                    "type": "score", "score": one.score, "confidence": one.confidence, "legend": legend,
                    "probabilities": probabilities,
                }  # fmt: skip
            else:
                answers[name] = {
                    "type": "choice", "choice": one.label, "confidence": one.confidence,
                    "probabilities": probabilities,
                }  # fmt: skip
            answers[name] |= _spread(one)
        usage = {"input_tokens": out.prompt_tokens, "output_tokens": out.label_tokens}
        return {"model": model, "answers": answers, "usage": usage}


def _spread(answer: Answer) -> dict[str, Any]:
    """The standard errors of the probabilities by label, where the question was read more than once."""
    if answer.reads == 1:
        return {}
    return {"standard_errors": {label: float(x) for label, x in zip(answer.labels, answer.se, strict=True)}}


def refuse_images(value: Any, param: str) -> None:
    """Refuses JSON that holds an image as chat messages do."""
    level = [value]
    while level:
        for one in level:
            if isinstance(one, dict) and one.get("type") in ("image_url", "input_image", "image"):
                raise errors.invalid_request(
                    param, f"{param} holds a part of type {one['type']}, but {IMAGES}"
                )
        inner = [
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = [one for values in inner for one in values]


# --- OpenAI's form


class DecisionTextPart(RequestModel):
    """A part of an input, a question or an answer that is text."""

    type: Literal["input_text", "output_text"]
    text: str
    """The text."""


class DecisionRefusalPart(RequestModel):
    """A part of an answer of the assistant in which it declined."""

    type: Literal["refusal"]
    refusal: str
    """The text."""


class DecisionJsonPart(RequestModel):
    """A part that is JSON, which the model reads as text."""

    type: Literal["input_json"]
    data: JsonObject | list[JsonObject]
    """An object, or a list of objects."""


class DecisionImagePart(RequestModel):
    """A part that is an image. Not supported: this model reads text only."""

    type: Literal["input_image"]


DecisionPart = Annotated[
    DecisionTextPart | DecisionRefusalPart | DecisionJsonPart | DecisionImagePart, Field(discriminator="type")
]
DecisionContent = str | Annotated[list[DecisionPart], Field(max_length=1024, fail_fast=True)]


class DecisionMessage(RequestModel):
    """A message of the input."""

    role: Literal["user", "developer", "system", "assistant"]
    content: DecisionContent
    """A text, or a list of parts."""


class DecisionCall(RequestModel):
    """A call of a function or of a custom tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: ShortText
    """The id to which the output refers."""
    name: ShortText
    """Name of the function or tool."""
    arguments: str = ""
    """The arguments of a function, as JSON."""
    input: str = ""
    """The input of a custom tool."""


class DecisionCallOutput(RequestModel):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ShortText
    """The id of the call."""
    output: DecisionContent
    """A text, or a list of parts."""


DecisionItem = DecisionMessage | DecisionCall | DecisionCallOutput


class PredicateQuestion(RequestModel):
    """How likely it is that a statement about the input is true."""

    type: Literal["predicate"]
    instructions: DecisionContent
    """The statement."""
    name: ShortText | None = None
    """Name of the question in the answer."""


class LabelledChoice(RequestModel):
    """One of the options of a choice."""

    value: str | bool
    """The option. A string and a boolean that read the same are refused."""
    description: str | None = None
    """When the option applies."""


class OptionsQuestion(RequestModel):
    """A choice among options."""

    type: Literal["choice"]
    instructions: DecisionContent
    """What is asked."""
    choices: list[LabelledChoice] = Field(min_length=2, max_length=MAX_LABELS)
    """The options."""
    name: ShortText | None = None
    """Name of the question in the answer."""


class Level(RequestModel):
    """A level of a rating."""

    label: str = Field(min_length=1)
    """Name of the level."""
    description: str | None = None
    """When the level applies."""


class LevelsQuestion(RequestModel):
    """A rating by ordered levels."""

    type: Literal["score"]
    instructions: DecisionContent
    """What is rated."""
    levels: list[Level] = Field(min_length=1, max_length=MAX_LABELS)
    """The levels, from the lowest to the highest."""
    name: ShortText | None = None
    """Name of the question in the answer."""


ListedQuestion = Annotated[PredicateQuestion | OptionsQuestion | LevelsQuestion, Field(discriminator="type")]


class OpenAIDecisionsRequest(ReadFields):
    """Body of POST /v1/decisions in OpenAI's form."""

    input: str | Annotated[list[DecisionItem], Field(min_length=1, max_length=2048, fail_fast=True)]
    """What all questions are about: a text, or messages and calls of tools."""
    questions: list[ListedQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    """The questions; the answers have the same order."""

    def asked(self) -> AskedQuestions:
        """Returns the request in the form that the model reads."""
        questions: dict[str, Question] = {}
        for i, one in enumerate(self.questions):
            instructions = _text(one.instructions, f"questions[{i}].instructions")
            if not instructions.strip():
                raise errors.invalid_value(f"questions[{i}].instructions", instructions, "a text")
            if isinstance(one, PredicateQuestion):
                questions[str(i)] = YesNo(instructions)
            elif isinstance(one, OptionsQuestion):
                labels = [_label(choice.value) for choice in one.choices]
                if twice := next((x for k, x in enumerate(labels) if x in labels[:k]), None):
                    raise errors.invalid_value(
                        f"questions[{i}].choices", twice, "values that differ as texts"
                    )
                described = {x: choice.description for x, choice in zip(labels, one.choices, strict=True)}
                questions[str(i)] = MultipleChoice(described, instructions)
            else:
                levels = [x.label if not x.description else f"{x.label}: {x.description}" for x in one.levels]
                questions[str(i)] = Scale(levels, instructions)
        return AskedQuestions(self._state(), questions)

    def _state(self) -> str:
        """The input as one text: a single message as it is, otherwise one paragraph for each item."""
        if isinstance(self.input, str):
            return self.input
        calls: dict[str, str] = {}
        written = []
        for i, item in enumerate(self.input):
            if isinstance(item, DecisionMessage):
                written.append((item.role, _text(item.content, f"input[{i}].content")))
            elif isinstance(item, DecisionCall):
                calls[item.call_id] = item.name
                written.append((f"call of {item.name}", item.arguments or item.input))
            else:
                if item.call_id not in calls:
                    known = ", ".join(calls) or "none, since no call comes before it"
                    raise errors.invalid_value(f"input[{i}].call_id", item.call_id, known)
                output = _text(item.output, f"input[{i}].output")
                written.append((f"output of {calls[item.call_id]}", output))
        if len(written) == 1 and written[0][0] == "user":
            return written[0][1]
        return "\n\n".join(f"{who}: {text}" for who, text in written)

    def answered(self, out: DecideOutput, model: str) -> Mapping[str, Any]:
        """Writes the response."""
        answers = []
        for one, answer in zip(self.questions, out.answers.values(), strict=True):
            p = [float(x) for x in answer.probabilities]
            found: dict[str, Any] = {"name": one.name, "type": one.type}
            if isinstance(one, PredicateQuestion):
                found |= {"probability": answer.yes}
            elif isinstance(one, OptionsQuestion):
                values = [choice.value for choice in one.choices]
                chances = [{"value": value, "probability": x} for value, x in zip(values, p, strict=True)]
                found |= {"choice": values[p.index(max(p))], "confidence": max(p), "probabilities": chances}
            else:
                chances = [
                    {"label": level.label, "value": i, "probability": x}
                    for i, (level, x) in enumerate(zip(one.levels, p, strict=True))
                ]
                found |= {"score": answer.score, "confidence": max(p), "probabilities": chances}
            answers.append(found | _spread(answer))
        usage = {
            "input_tokens": out.prompt_tokens, "output_tokens": out.label_tokens,
            "total_tokens": out.prompt_tokens + out.label_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        return {"model": model, "answers": answers, "usage": usage}


def _label(value: str | bool) -> str:
    """The text by which the model names an option."""
    return json.dumps(value) if isinstance(value, bool) else value


def _text(content: str | Sequence[Any], param: str) -> str:
    """Joins the parts of a content."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, DecisionImagePart):
            raise errors.invalid_request(f"{param}[{i}]", f"{param}[{i}] is an input_image, but {IMAGES}")
        if isinstance(part, DecisionJsonPart):
            texts.append(json.dumps(part.data, ensure_ascii=False))
        else:
            texts.append(part.refusal if isinstance(part, DecisionRefusalPart) else part.text)
    return "\n".join(texts)


DecisionsRequest: TypeAlias = MercuryDecisionsRequest | OpenAIDecisionsRequest


def parse_decisions(data: Mapping[str, Any]) -> DecisionsRequest:
    """Validates a body in the form that it has: OpenAI's has `input`, Mercury's `state`."""
    if "input" in data and "state" in data:
        raise errors.invalid_request("input", "input and state in one request; allowed: one of them")
    return parse_request(OpenAIDecisionsRequest if "input" in data else MercuryDecisionsRequest, data)


# --- responses, for the document


class _Usage(TypedDict):
    input_tokens: Count
    output_tokens: Count


class MercuryDecision(TypedDict):
    """Answers by the names of the questions: `noul`, or `choice` or `score` with confidence and probabilities."""

    model: str
    answers: dict[str, JsonObject]
    usage: _Usage


class OpenAIDecision(TypedDict):
    """Answers in the order of the questions: `probability`, or `choice` or `score` with probabilities."""

    model: str
    answers: list[JsonObject]
    usage: JsonObject
