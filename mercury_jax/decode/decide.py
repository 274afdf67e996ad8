"""decide(): typed answers with probabilities, many questions about a state in one forward pass.

    state, questions -> prompts (`questions.py`) -> log p of every label (`label_scores.py`) -> mean over the reads

A read asks a question once. Several reads list the labels in other orders and, under uniform noise, draw other
canvases; their mean depends less on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.label_scores import (
    EncodedStates,
    Label,
    LabelledPrompt,
    encode_states,
    label_log_p,
    rows_of,
    rows_that_fit,
)
from mercury_jax.decode.questions import (
    Question,
    Scale,
    YesNo,
    answer_labels,
    as_text,
    check_question,
    order_of,
    prompt_of,
)
from mercury_jax.tokenizer import has_chat_template
from mercury_jax.types import LM

MAX_READS = 64
ANSWER = "\nAnswer:"  # how the prompt of a model without a chat template ends
State: TypeAlias = (
    str | Mapping[str, Any] | Sequence[inputs.Message]
)  # a text, an object of JSON, a conversation


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer to a question: a probability for each of its labels.

    Attributes:
        question: The question.
        probabilities: Probability of each label [L], the mean over the reads; they sum to 1.
        se: Standard error of each mean [L]; NaN for a single read.
        log_p: Log-likelihood of each label in each read [reads, L], not normalised over the labels.
    """

    question: Question
    probabilities: np.ndarray
    se: np.ndarray
    log_p: np.ndarray

    @property
    def reads(self) -> int:
        """Number of reads."""
        return len(self.log_p)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels; "yes" and "no" for `YesNo`, "0", "1", ... for `Scale`."""
        return answer_labels(self.question)

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[int(self.probabilities.argmax())]

    @property
    def confidence(self) -> float:
        """Probability of the most probable label."""
        return float(self.probabilities.max())

    @property
    def entropy(self) -> float:
        """Entropy of the probabilities as a share of the largest possible one, log L; 0 for a single label."""
        p = self.probabilities[self.probabilities > 0]
        return float(-(p * np.log(p)).sum() / np.log(len(self.labels))) if len(self.labels) > 1 else 0.0

    @property
    def yes(self) -> float:
        """Probability of yes; only of `YesNo`."""
        if not isinstance(self.question, YesNo):
            raise refuse("yes", type(self.question).__name__, "the answer to a YesNo question")
        return float(self.probabilities[0])

    @property
    def score(self) -> float:
        """Expected level; only of `Scale`."""
        if not isinstance(self.question, Scale):
            raise refuse("score", type(self.question).__name__, "the answer to a Scale question")
        return float(self.probabilities @ np.arange(len(self.labels)))

    def __repr__(self) -> str:
        order = np.argsort(-self.probabilities, kind="stable")[:5]
        shown = ", ".join(f"{self.labels[i]} {self.probabilities[i]:.3f}" for i in order)
        return f"Answer({shown}{', ...' if len(self.labels) > 5 else ''})"


@dataclass(frozen=True)
class DecideOutput:
    """The answers to all questions about one state.

    Attributes:
        answers: Answer to each question, by its name.
        forwards: Reading passes in which the questions took part. Passes that encode the state are not counted.
        prompt_tokens: Tokens of the state and of all questions; those that questions share are counted once.
        label_tokens: Tokens of the most probable labels.
        temperature: The temperature of calibration that was applied.
    """

    answers: Mapping[str, Answer]
    forwards: int
    prompt_tokens: int
    label_tokens: int
    temperature: float

    def __getitem__(self, name: str) -> Answer:
        """The answer to a question, by the question's name."""
        return self.answers[name]


class Settings(NamedTuple):
    """The settings of `decide`, checked."""

    reads: int = 1
    second_reads: int = 0
    doubt: float = 0.5
    temperature: float = 1.0
    seed: int = 0


class Asked(NamedTuple):
    """One question about one state, with the prompts of all of its reads.

    Attributes:
        state: Index of the state.
        name: Name of the question.
        question: The question.
        prompts: The prompt of each read, the second reads included.
    """

    state: int
    name: str
    question: Question
    prompts: list[LabelledPrompt]


@overload
def decide(
    lm: LM,
    state: str | Mapping[str, Any],
    questions: Mapping[str, Question],
    *,
    reads: int = ...,
    second_reads: int = ...,
    doubt: float = ...,
    temperature: float | None = ...,
    seed: int = ...,
) -> DecideOutput: ...
@overload
def decide(
    lm: LM,
    state: Sequence[State],
    questions: Mapping[str, Question],
    *,
    reads: int = ...,
    second_reads: int = ...,
    doubt: float = ...,
    temperature: float | None = ...,
    seed: int = ...,
) -> DecideOutput | list[DecideOutput]: ...
def decide(
    lm: LM,
    state: State | Sequence[State],
    questions: Mapping[str, Question],
    *,
    reads: int = 1,
    second_reads: int = 0,
    doubt: float = 0.5,
    temperature: float | None = None,
    seed: int = 0,
) -> DecideOutput | list[DecideOutput]:
    """Answers typed questions about a state: probabilities of the labels of each question, without sampling a text.

    The state is encoded once; all questions about it are rows of one forward pass over its KV cache. A label of several
    tokens is scored token by token, each given those before it, and the probabilities are normalised over the labels.
    For an autoregressive model they equal those of `mj.score` of each label. A model that denoises predicts each token
    at the first position of a canvas of noise; other orders of the tokens of a label would give other numbers.

    Args:
        lm: The model.
        state: What the questions are about: a text, an object of JSON, or a conversation; or a list of these.
        questions: {name: question}. A question is `mj.questions.MultipleChoice`, `YesNo` or `Scale`.
        reads: Reads of each question. Each read lists the labels in another order, and draws another canvas where the
            noise is uniform.
        second_reads: Further reads of the questions whose answer is in doubt after the first reads.
        doubt: Entropy from which an answer is in doubt, as a share of that of equal probabilities, 0 to 1.
        temperature: Divides the log-likelihoods before they are normalised. None: the one that `mercury calibrate` has
            written beside the model, or 1.
        seed: Seed of the noise on the canvas.

    Returns:
        A `DecideOutput`, whose `answers` hold an `Answer` for each question; for a list of states a list of them.

    Raises:
        ValueError: Names the argument that does not fit, before any compute; or the logits are NaN.

    Example:
        >>> tone = mj.questions.MultipleChoice({"calm": None, "angry": "An upset message"}, "What is the tone?")
        >>> billing = mj.questions.YesNo("Is this about billing?")
        >>> out = mj.decide(lm, "I was charged twice. Please help.", {"tone": tone, "billing": billing}, reads=4)
        >>> out["tone"].label, out["tone"].probabilities, out["billing"].yes, out["billing"].se
    """
    inputs.check_lm(lm)
    settings = check_settings(lm, reads, second_reads, doubt, temperature, seed)
    states, single = check_states(state)
    asked = [one for i, s in enumerate(states) for one in ask(lm, s, questions, settings, i)]
    decisions = answer(lm, asked, [settings] * len(states))
    return decisions[0] if single else decisions


def check_settings(
    lm: LM, reads: int, second_reads: int, doubt: float, temperature: float | None, seed: int
) -> Settings:
    """Checks the settings of `decide`."""
    calibrated = lm.card.get("decisions", {}).get("temperature", 1.0)
    number = lambda x: isinstance(x, int | float | np.number) and not isinstance(x, bool)
    if not number(doubt) or not 0 <= doubt <= 1:
        raise refuse("doubt", doubt, "a number in 0..1")
    if temperature is not None and not (number(temperature) and 0 < temperature < float("inf")):
        raise refuse("temperature", temperature, "a number above 0, or None")
    reads = inputs.check_whole("reads", reads, 1, MAX_READS)
    second_reads = inputs.check_whole("second_reads", second_reads, 0, MAX_READS)
    chosen = float(calibrated if temperature is None else temperature)
    return Settings(reads, second_reads, float(doubt), chosen, inputs.check_seed(seed))


def check_states(state: Any) -> tuple[list[Any], bool]:
    """Returns the states of a call, and whether it was a single one."""
    is_message = lambda x: isinstance(x, Mapping) and "role" in x
    single = isinstance(state, str | Mapping) or (
        isinstance(state, Sequence) and len(state) > 0 and is_message(state[0])
    )
    states = [state] if single else state
    if not isinstance(states, Sequence) or not states:
        raise refuse(
            "state", state, "a text, an object of JSON, a conversation, or a non-empty list of these"
        )
    for i, one in enumerate(states):
        messages = isinstance(one, Sequence) and not isinstance(one, str)
        if not isinstance(one, str | Mapping | Sequence) or (
            messages and not (one and all(map(is_message, one)))
        ):
            name = "state" if single else f"state[{i}]"
            raise refuse(name, one, "a text, an object of JSON, or a list of messages with role and content")
    return list(states), single


def ask(
    lm: LM, state: State, named: Mapping[str, Question], settings: Settings, index: int = 0
) -> list[Asked]:
    """Checks the questions about a state, and encodes the prompts of all of their reads."""
    if not isinstance(named, Mapping) or not named:
        raise refuse("questions", named, "at least one question, as {name: question}")
    chat, count = has_chat_template(lm.tokenizer), settings.reads + settings.second_reads
    if not chat and not isinstance(state, str | Mapping):
        raise refuse("state", "a conversation", f"a text: {lm.name} has no chat template")
    asked = []
    for at, (name, question) in enumerate(named.items()):
        if not isinstance(name, str):
            raise refuse("questions", name, "a text as the name of each question")
        check_question(question, f"questions[{name!r}]")
        labels = label_ids(lm, answer_labels(question), chat)
        prompts = []
        for read in range(count):
            text = prompt_of(question, order_of(question, read, count))
            ids = _prompt_ids(lm, state, text, chat)
            noise_seed = int(np.random.SeedSequence((settings.seed, at, read)).generate_state(1)[0])
            prompts.append(LabelledPrompt(index, ids, labels, rows_of(lm, ids, labels), noise_seed))
        asked.append(Asked(index, name, question, prompts))
    return asked


def _prompt_ids(lm: LM, state: State, question: str, chat: bool) -> list[int]:
    """Encodes a state and a question about it, up to where the answer begins."""
    if not chat:
        return inputs.encode_prompts(lm, f"{as_text(state, 'state')}\n\n{question}{ANSWER}")[0][0].ids
    if isinstance(state, str | Mapping):
        text = as_text(state, "state")
        messages = [{"role": "user", "content": f"{text}\n\n{question}" if text else question}]
    else:
        messages = [*state, {"role": "user", "content": question}]
    return inputs.encode_prompts(lm, messages)[0][0].ids


def label_ids(lm: LM, labels: Sequence[str], chat: bool) -> list[Label]:
    """Encodes labels as answers. If one is the beginning of another, all of them are closed by the end of the text."""
    encode = lm.tokenizer.encode
    if chat:
        ids = [tuple(encode(label)) for label in labels]
    else:  # the tokens that follow "Answer:", as the tokenizer splits the whole line
        before = encode(ANSWER)
        whole = [encode(f"{ANSWER} {label}") for label in labels]
        ids = [
            tuple(w[len(before) :] if w[: len(before)] == before else encode(f" {x}"))
            for w, x in zip(whole, labels, strict=True)
        ]
    if len(set(ids)) < len(ids):
        twice = next(label for i, label in enumerate(labels) if ids[i] in ids[:i])
        raise refuse("labels", twice, "labels that the tokenizer encodes to different ids")
    ordered = sorted(ids)
    if any(b[: len(a)] == a for a, b in itertools.pairwise(ordered)):
        ids = [(*label, lm.model.config.eos) for label in ids]
    return ids


def answer(lm: LM, asked: Sequence[Asked], settings: Sequence[Settings]) -> list[DecideOutput]:
    """Answers questions about several states, as many states together as fit into memory.

    Args:
        asked: The questions about all states, in the order of the states.
        settings: The settings of each state.
    """
    together = rows_that_fit(lm, max(len(prompt.ids) for one in asked for prompt in one.prompts))
    decisions = []
    for first in range(0, len(settings), together):
        group = [
            one._replace(
                state=one.state - first, prompts=[p._replace(state=p.state - first) for p in one.prompts]
            )
            for one in asked
            if first <= one.state < first + together
        ]
        decisions += _answer_together(lm, group, settings[first : first + together])
    return decisions


def _answer_together(lm: LM, asked: Sequence[Asked], settings: Sequence[Settings]) -> list[DecideOutput]:
    """Reads all questions in as few passes as possible, and those in doubt once more."""
    encoded = encode_states(lm, [p for one in asked for p in one.prompts])
    first = {i: settings[one.state].reads for i, one in enumerate(asked)}
    reads, passes = _read(lm, asked, {i: range(n) for i, n in first.items()}, encoded)
    answers = [_answer_of(one, reads[i], settings[one.state]) for i, one in enumerate(asked)]
    forwards = [passes] * len(settings)
    doubted = {
        i: range(first[i], len(one.prompts))
        for i, one in enumerate(asked)
        if len(one.prompts) > first[i] and answers[i].entropy >= settings[one.state].doubt
    }
    if doubted:
        more, passes = _read(lm, asked, doubted, encoded)
        for i, log_p in more.items():
            answers[i] = _answer_of(asked[i], np.concatenate([reads[i], log_p]), settings[asked[i].state])
        for state in {asked[i].state for i in doubted}:
            forwards[state] += passes
    decisions = []
    for state, chosen in enumerate(settings):
        mine = [(one, found) for one, found in zip(asked, answers, strict=True) if one.state == state]
        shared = encoded.prefixes[state]
        tokens = shared + sum(len(one.prompts[0].ids) - shared for one, _ in mine)
        named = sum(len(one.prompts[0].labels[int(found.probabilities.argmax())]) for one, found in mine)
        by_name = {one.name: found for one, found in mine}
        decisions.append(DecideOutput(by_name, forwards[state], tokens, named, chosen.temperature))
    return decisions


def _read(
    lm: LM, asked: Sequence[Asked], reads: Mapping[int, range], encoded: EncodedStates
) -> tuple[dict[int, np.ndarray], int]:
    """Returns the log-likelihoods [reads, L] of each question that is read, by its index, and the number of passes."""
    prompts = [asked[i].prompts[read] for i, those in reads.items() for read in those]
    found, passes = label_log_p(lm, prompts, encoded)
    each = iter(found)
    return {i: np.stack([next(each) for _ in those]) for i, those in reads.items()}, passes


def _answer_of(asked: Asked, log_p: np.ndarray, settings: Settings) -> Answer:
    """Averages the probabilities of the reads."""
    p = calibrated(log_p, settings.temperature)
    se = p.std(axis=0, ddof=1) / np.sqrt(len(p)) if len(p) > 1 else np.full(p.shape[1], np.nan)
    return Answer(asked.question, p.mean(axis=0), se, log_p)


def calibrated(log_p: np.ndarray, temperature: float) -> np.ndarray:
    """Computes probabilities over the labels, the last axis, from log-likelihoods at a temperature."""
    scaled = log_p / temperature
    p = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
