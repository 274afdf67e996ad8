"""The quality and the speed of typed decisions: `python -m benchmarks.decisions --model smollm2 --out rows.jsonl`.

300 labelled questions are of three kinds: what kind of thing a word names, small sums, the tone of plain sentences.
Half of them are answered by yes or no, half by one of several labels. A temperature is fitted to 150 other questions,
of other words, sums and sentences. A row says how good the probabilities are with one read, with several, and less
those about a blank state, before and after calibration, and how often an answer changes when the labels are listed in
reverse order. With `--clients`, a server is started, and rows say how many decisions it answers in a second.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

import mercury_jax as mj
from mercury_jax import compilation
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Int, option
from mercury_jax.decode.decide import Answer
from mercury_jax.decode.questions import MultipleChoice, Question
from mercury_jax.evaluate import calibration, wilson
from mercury_jax.evaluate.calibration import LabelledState

# The first half of each list belongs to the questions of the calibration, the second to those that are reported.
THINGS = {
    "bird": "robin sparrow eagle owl crow pigeon parrot swan",
    "fish": "salmon trout tuna shark cod carp herring eel",
    "fruit": "apple banana pear cherry grape peach plum mango",
    "tool": "hammer saw screwdriver drill chisel wrench pliers shovel",
    "vehicle": "car bus truck bicycle train tram ship motorcycle",
    "musical instrument": "piano violin guitar drum flute trumpet cello harp",
    "metal": "iron copper gold silver zinc lead tin nickel",
    "clothing": "shirt coat skirt sock glove scarf hat sweater",
    "country": "France Japan Brazil Egypt Canada India Norway Kenya",
    "insect": "ant bee beetle fly moth wasp mosquito butterfly",
}
SUBJECTS = "soup,hotel,film,book,train ride,concert,phone,garden,lesson,cake,museum,jacket,service,holiday,app,coffee"
TONES = {
    "positive": "wonderful,excellent,delightful,brilliant,great,lovely,superb,amazing",
    "negative": "terrible,awful,disappointing,dreadful,bad,horrible,poor,boring",
    "neutral": "described in the leaflet,mentioned on page four,on the second floor,listed in the table,"
    "on Tuesday,the same size as the other one,delivered at noon,made in 2014",
}
READS = 2
BLANK = "N/A"  # a state that says nothing


class Labelled(NamedTuple):
    """A question about a state, and the index of its right label."""

    kind: str
    state: str
    question: Question
    right: int

    @property
    def one(self) -> LabelledState:
        """The question in the form of a file's line."""
        return LabelledState(self.state, {"q": self.question}, {"q": self.right})

    def reversed(self) -> Labelled:
        """The same question with its labels in reverse order; of yes and no by naming no first."""
        assert isinstance(self.question, MultipleChoice)
        labels = list(self.question.labels)[::-1]
        return self._replace(
            question=self.question._replace(labels=labels), right=len(labels) - 1 - self.right
        )


def questions(count: int, half: int, seed: int) -> list[Labelled]:
    """Draws `count` questions of each kind, in turn yes/no and with labels, from one half of the words."""
    rng = np.random.default_rng((seed, half))
    part = lambda text, sep: text.split(sep)[half * len(text.split(sep)) // 2 :][: len(text.split(sep)) // 2]
    pick = lambda values: values[int(rng.integers(len(values)))]
    shuffled = lambda values: [values[i] for i in rng.permutation(len(values))]
    made = []
    for i in range(count):
        kinds = shuffled(list(THINGS))[:4]
        word = pick(part(THINGS[kinds[0]], " "))
        if i % 2:
            about = pick(kinds[:2])
            made.append(
                Labelled("things", word, yes_no(f"Is this a kind of {about}?"), int(about != kinds[0]))
            )
        else:
            labels = shuffled(kinds)
            question = MultipleChoice(labels, "What kind of thing is this?")
            made.append(Labelled("things", word, question, labels.index(kinds[0])))
        a, b = (int(x) for x in rng.integers(10 + 45 * half, 55 + 45 * half, 2))
        wrong = a + b + pick([-10, -2, -1, 1, 2, 10])
        if i % 2:
            shown = pick([a + b, wrong])
            made.append(
                Labelled("sums", f"{a} + {b} = {shown}", yes_no("Is this sum right?"), int(shown != a + b))
            )
        else:
            labels = [str(x) for x in shuffled([a + b, wrong, a + b + 20, a + b - 20])]
            made.append(
                Labelled(
                    "sums", f"{a} + {b}", MultipleChoice(labels, "What is the sum?"), labels.index(str(a + b))
                )
            )
        tone = pick(list(TONES))
        sentence = f"The {pick(part(SUBJECTS, ','))} was {pick(part(TONES[tone], ','))}."
        if i % 2:
            asked = pick(["positive", "negative"])
            made.append(Labelled("tones", sentence, yes_no(f"Is the tone {asked}?"), int(asked != tone)))
        else:
            labels = shuffled(list(TONES))
            made.append(
                Labelled("tones", sentence, MultipleChoice(labels, "What is the tone?"), labels.index(tone))
            )
    return made


def yes_no(text: str) -> Question:
    """A question of yes or no, as a choice, so that its labels can be listed in another order."""
    return MultipleChoice(["yes", "no"], text)


def measure(
    lm: mj.LM, asked: Sequence[Labelled], reads: int, less_blank: bool = False
) -> tuple[list[Answer], np.ndarray]:
    """The answers, on request less those about a state that says nothing, and the indices of the right labels."""
    ask = lambda labelled: calibration.decide_all(
        lm, [one.one for one in labelled], reads=reads, temperature=1.0
    )
    answers, right = ask(asked)
    if less_blank:
        blanks, _ = ask([one._replace(state=BLANK) for one in asked])
        answers = [less(answer, blank) for answer, blank in zip(answers, blanks, strict=True)]
    return answers, right


def less(answer: Answer, blank: Answer) -> Answer:
    """Takes the log-likelihoods about a blank state away, as in contextual calibration (arXiv 2102.09690)."""
    log_p = answer.log_p - blank.log_p
    [probabilities] = calibration.probabilities([dataclasses.replace(answer, log_p=log_p)], 1.0)
    return dataclasses.replace(answer, log_p=log_p, probabilities=probabilities)


def flips(found: Sequence[Any], reversed_: Sequence[Any]) -> dict[str, Any]:
    """How often the answer to a question is another label where the labels are listed in reverse order."""
    changed = sum(a.label != b.label for a, b in zip(found, reversed_, strict=True))
    low, high = wilson(changed, len(found))
    return {"flips": changed / len(found), "flips_interval": [low, high]}


def quality_rows(lm: mj.LM, count: int, seed: int) -> list[dict[str, Any]]:
    """A row for each way to ask, before and after calibration, and for each kind of question."""
    tuning, asked = (questions(n, half, seed) for half, n in ((0, count // 2), (1, count)))
    rows = []
    for reads, less_blank in ((1, False), (READS, False), (1, True)):
        fitted_on, labels = measure(lm, tuning, reads, less_blank)
        temperature = calibration.fit_temperature(fitted_on, labels.tolist())
        answers, right = measure(lm, asked, reads, less_blank)
        backwards, _ = measure(lm, [one.reversed() for one in asked], reads, less_blank)
        for kind in ("all", "things", "sums", "tones"):
            at = [i for i, one in enumerate(asked) if kind in ("all", one.kind)]
            chosen = [answers[i] for i in at]
            for name, t in (("before", 1.0), ("after", temperature)):
                figures = calibration.quality(calibration.probabilities(chosen, t), right[at].tolist(), seed)
                rows.append({
                    "model": lm.name, "questions": kind, "reads": reads, "less_blank": less_blank,
                    "calibration": name, "temperature": t, **figures,
                    **flips(chosen, [backwards[i] for i in at]), "tuning": len(tuning), "seed": seed,
                })  # fmt: skip
    return rows


def approximation_row(lm: mj.LM, count: int, seed: int) -> dict[str, Any]:
    """How far the probabilities of a denoiser depend on the order in which a label's tokens are predicted.

    The chain rule from left to right is compared with the bound of `mj.score`, which averages over all orders.
    """
    labelled = [one for one in questions(count, 1, seed) if one.question.labels != ["yes", "no"]]  # type: ignore
    differences = []
    for one in labelled:
        found = mj.decide(lm, one.state, {"q": one.question})["q"]  # type: ignore[index]
        assert isinstance(one.question, MultipleChoice)
        labels = list(one.question.labels)
        asked = f"{one.state}\n\n{mj.questions.prompt_of(one.question, range(len(labels)))}"
        scores = mj.score(lm, [{"role": "user", "content": asked}], labels, samples=64, thinking=False)
        bound = calibration.calibrated(np.asarray(scores.log_p), 1.0)
        differences.append(0.5 * np.abs(bound - found.probabilities).sum())
    return {
        "model": lm.name, "figure": "total variation from the bound over all orders", "n": len(labelled),
        "mean": float(np.mean(differences)), "largest": float(np.max(differences)),
    }  # fmt: skip


def serving_rows(url: str, model: str, clients: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Decisions a second of a server, each with eight questions about a state of its own."""
    named = {f"q{i}": {"type": "noul", "instructions": f"Is this a number above {i}?"} for i in range(8)}

    def ask_once(number: int) -> float:
        body = json.dumps(
            {"model": model, "state": f"The number is {number % 10}.", "questions": named}
        ).encode()
        request = urllib.request.Request(f"{url}/v1/decisions", body, {"Content-Type": "application/json"})
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert len(json.load(answer)["answers"]) == 8
        return time.perf_counter() - began

    rows = []
    for count in clients:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(ask_once, range(3 * count)))  # compiles
            began, times, sent = time.perf_counter(), [], 0
            while time.perf_counter() - began < seconds:
                times += pool.map(ask_once, range(sent, sent + 4 * count))
                sent += 4 * count
            took = time.perf_counter() - began
        rows.append({
            "model": model, "clients": count, "questions": 8, "decisions": len(times),
            "decisions_per_second": len(times) / took, "p50_ms": 1000 * float(np.median(times)),
        })  # fmt: skip
    return rows


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Measure typed decisions on labelled questions.

    examples:
      python -m benchmarks.decisions --model smollm2 --out rows.jsonl
      python -m benchmarks.decisions --model smollm2 --clients 1,8
    """

    model: Annotated[str | None, option("MODEL")] = None
    """Which model. Default: the embedded one."""
    count: Int = 100
    """Questions of each of the three kinds."""
    clients: Annotated[str | None, option("N,N")] = None
    """Instead of the quality, time a server with each of these numbers of clients."""
    seconds: Int = 20
    """How long each number of clients asks."""
    seed: Int = 0
    """Seed of the questions."""
    out: Annotated[str | None, option("Y.jsonl")] = None
    """Write the rows to this file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    args = arguments.read(Decisions, sys.argv[1:] if argv is None else argv, "benchmarks.decisions")
    machine = {"hardware": compilation.hardware()}
    if args.clients is not None:
        from qa.clients.served import serving

        name = args.model or "nano"
        with serving("--model", name, "--queue", "64") as server:
            server.wait("/ready")
            counts = [int(x) for x in args.clients.split(",")]
            rows = serving_rows(server.url, name, counts, float(args.seconds))
    else:
        lm = mj.load(args.model)
        rows = quality_rows(lm, args.count, args.seed)
        if not lm.model.config.autoregressive:
            rows.append(approximation_row(lm, min(args.count, 30), args.seed))
    rows = [row | machine for row in rows]
    for row in rows:
        show.emit(row)
    show.write_records(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
