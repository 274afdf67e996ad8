"""How good the probabilities of `mj.decide` are on labelled questions, and the temperature that improves them.

`mercury calibrate` asks the questions of a file (`read`, `decide_all`), fits a temperature (`fit_temperature`) and
describes the answers before and after (`quality`). The temperature is written beside the model, where `mj.load` finds
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mercury_jax import install
from mercury_jax.config import refuse
from mercury_jax.decode.decide import Answer, calibrated, decide
from mercury_jax.decode.questions import Question, Scale, YesNo, answer_labels, from_json
from mercury_jax.evaluate.runner import wilson
from mercury_jax.tasks.task import read_json_lines
from mercury_jax.types import LM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 10  # of the confidence, for the calibration error
RESAMPLES = 1000  # of the questions, for the intervals
TEMPERATURES = 0.05, 20.0  # the range in which one is fitted


class LabelledState(NamedTuple):
    """A state with questions, and the index of the right label of each."""

    state: Any
    questions: dict[str, Question]
    right: dict[str, int]


def read(path: str | Path) -> list[LabelledState]:
    """Reads a file of {"state", "questions", "answers"} lines.

    Args:
        path: A JSONL file. The questions have the form of Mercury's API; an answer is true or false, the label of a
            choice, or the level of a score.

    Returns:
        The states, in the order of the file.

    Raises:
        ValueError: Names the line and the field that does not fit.
    """
    found = []
    for place, data in read_json_lines(path, "FILE"):
        state, asked, answers = data.get("state"), data.get("questions"), data.get("answers")
        if not isinstance(state, str | dict):
            raise refuse(f"{place}: state", state, "a text or an object")
        if not isinstance(asked, dict) or not asked:
            raise refuse(f"{place}: questions", asked, "an object with at least one question")
        if not isinstance(answers, dict) or set(answers) != set(asked):
            raise refuse(f"{place}: answers", answers, f"an answer to each of {', '.join(asked)}")
        questions = {name: from_json(one, f"{place}: questions.{name}") for name, one in asked.items()}
        right = {
            name: _right(question, answers[name], f"{place}: answers.{name}")
            for name, question in questions.items()
        }
        found.append(LabelledState(state, questions, right))
    if not found:
        raise refuse("FILE", str(path), "at least one line")
    return found


def _right(question: Question, value: Any, name: str) -> int:
    """Returns the index of the right label."""
    labels = answer_labels(question)
    if isinstance(question, YesNo):
        value, allowed = {True: "yes", False: "no"}.get(value, value), "true, false"
    else:
        allowed = f"a level, 0 to {len(labels) - 1}" if isinstance(question, Scale) else ", ".join(labels)
    label = str(value) if isinstance(question, Scale) and isinstance(value, int) else value
    if label not in labels:
        raise refuse(name, value, allowed)
    return labels.index(label)


def decide_all(
    lm: LM,
    states: Sequence[LabelledState],
    *,
    progress: Callable[[int], None] = lambda done: None,
    **settings: Any,
) -> tuple[list[Answer], np.ndarray]:
    """Asks all questions, those of a state together.

    Args:
        lm: The model.
        states: Labelled states.
        progress: Called with the number of questions after each state.
        **settings: Settings of `decide`.

    Returns:
        The answers, and the index of the right label of each.
    """
    answers, right = [], []
    for one in states:
        found = decide(lm, one.state, one.questions, **settings)
        answers += [found[name] for name in one.questions]  # type: ignore[index]
        right += one.right.values()
        progress(len(one.right))
    return answers, np.array(right)


def probabilities(answers: Sequence[Answer], temperature: float | None = None) -> list[np.ndarray]:
    """Returns the probabilities of answers, as they are or at another temperature."""
    if temperature is None:
        return [one.probabilities for one in answers]
    return [calibrated(one.log_p, temperature).mean(axis=0) for one in answers]


def fit_temperature(answers: Sequence[Answer], right: Sequence[int]) -> float:
    """Finds the temperature at which the right labels are most likely, by golden-section search of its logarithm."""

    def nats(log_t: float) -> float:
        found = probabilities(answers, float(np.exp(log_t)))
        return -float(np.mean([np.log(max(p[i], 1e-300)) for p, i in zip(found, right, strict=True)]))

    low, high = np.log(TEMPERATURES)
    ratio = (np.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if nats(a) <= nats(b) else (a, high)
    return float(np.exp((low + high) / 2))


def quality(found: Sequence[np.ndarray], right: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Describes probabilities of labelled questions.

    Args:
        found: Probabilities [L] of each question.
        right: Index of the right label of each.
        seed: Seed of the resamples of the intervals.

    Returns:
        n; accuracy with its Wilson interval; the Brier score, sum over the labels of (p - [right])^2, 0 to 2; the
        expected calibration error over `BINS` bins of the confidence; nats of the right label. The last three with
        bootstrap intervals of 95% over the questions.
    """
    confidence = np.array([p.max() for p in found])
    hit = np.array([p.argmax() == i for p, i in zip(found, right, strict=True)], float)
    brier = np.array([((p - np.eye(len(p))[i]) ** 2).sum() for p, i in zip(found, right, strict=True)])
    nats = np.array([-np.log(max(p[i], 1e-300)) for p, i in zip(found, right, strict=True)])
    n, rng = len(hit), np.random.default_rng(seed)
    draws = rng.integers(0, n, (RESAMPLES, n))
    spread = lambda value: [float(x) for x in np.quantile([value(at) for at in draws], (0.025, 0.975))]
    whole = np.arange(n)
    ece = lambda at: calibration_error(confidence[at], hit[at])
    low, high = wilson(hit.sum(), n)
    return {
        "n": n, "accuracy": float(hit.mean()), "accuracy_interval": [low, high],
        "brier": float(brier.mean()), "brier_interval": spread(lambda at: brier[at].mean()),
        "ece": ece(whole), "ece_interval": spread(ece),
        "nats": float(nats.mean()), "nats_interval": spread(lambda at: nats[at].mean()),
    }  # fmt: skip


def calibration_error(confidence: np.ndarray, hit: np.ndarray) -> float:
    """Computes the expected calibration error: |accuracy - mean confidence| of each bin, weighted by its questions."""
    return sum(abs(right - sure) * count for sure, right, count in reliability(confidence, hit)) / len(hit)


def reliability(confidence: np.ndarray, hit: np.ndarray) -> list[tuple[float, float, int]]:
    """Returns mean confidence, accuracy and number of questions of each bin that has any."""
    at = np.minimum((confidence * BINS).astype(int), BINS - 1)
    inside = [at == i for i in range(BINS)]
    return [(float(confidence[x].mean()), float(hit[x].mean()), int(x.sum())) for x in inside if x.any()]


def plot_reliability(series: Mapping[str, Sequence[np.ndarray]], right: Sequence[int]) -> Figure:
    """Draws accuracy against confidence, a line for each of several probabilities of the same questions.

    Args:
        series: {name: probabilities [L] of each question}.
        right: Index of the right label of each question.

    Returns:
        The figure.
    """
    install.check("plot", "matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", label="calibrated")
    for name, found in series.items():
        hit = np.array([p.argmax() == i for p, i in zip(found, right, strict=True)], float)
        bins = np.array(reliability(np.array([p.max() for p in found]), hit))
        [line] = axes.plot(bins[:, 0], bins[:, 1], label=name)
        axes.scatter(
            bins[:, 0], bins[:, 1], s=8 + 200 * bins[:, 2] / bins[:, 2].sum(), color=line.get_color()
        )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    return figure
