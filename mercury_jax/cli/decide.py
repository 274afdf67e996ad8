"""`mercury decide`: typed questions about a text; `mercury calibrate`: the temperature of their probabilities."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    Flag,
    Float,
    Group,
    Int,
    Loading,
    OptionalFloat,
    Positional,
    Repeated,
    option,
)
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.decode.decide import DecideOutput
    from mercury_jax.decode.questions import Question

BAR = 24  # characters of a probability of 1


@dataclass(frozen=True, kw_only=True)
class Decide:
    """Answer questions about TEXT by probabilities.

    examples:
      mercury decide "I was charged twice." --ask "Is this about billing?"
      mercury decide "I was charged twice." --choose calm,angry --reads 4
      mercury decide --file mail.txt --questions questions.json --json

    --ask is answered by yes or no, --choose by one of its labels. A file of
    questions has the form of the HTTP API: {"tone": {"type": "choice",
    "instructions": "What is the tone?", "criteria": {"calm": null, "angry":
    "An upset message"}}}, with the types choice, noul (yes or no) and score.
    All questions are read in one forward pass.
    """

    text: Annotated[Positional[str | None], option("TEXT")] = None
    """What the questions are about; - reads standard input."""
    file: Annotated[str | None, option("PATH")] = None
    """Read the text from a file."""
    ask: Annotated[Repeated[tuple[str, ...]], option("QUESTION")] = ()
    """A question that is answered by yes or no; repeatable."""
    choose: Annotated[Repeated[tuple[str, ...]], option("A,B,...")] = ()
    """Labels, of which one describes the text; repeatable."""
    questions: Annotated[str | None, option("X.json")] = None
    """Read further questions from this file."""
    reads: Int = 1
    """Reads of each question, each with the labels in another order."""
    second_reads: Int = 0
    """Further reads of questions whose answer is in doubt."""
    doubt: Float = 0.5
    """Share of the largest entropy from which an answer is in doubt."""
    temperature: OptionalFloat = None
    """Calibration of the probabilities. Default: what mercury calibrate has written, or 1."""
    seed: Int = 0
    """Seed of the noise, for models that denoise random tokens."""
    json: Flag = False
    """Print one JSON object."""
    loading: Annotated[Loading, Group] = dataclasses.field(default_factory=Loading)


def run(argv: Sequence[str]) -> int:
    """Runs `mercury decide`; returns its exit code."""
    args = arguments.read(Decide, argv, "mercury decide")
    state = arguments.read_text_or_file("TEXT", args.text, args.file, False)
    questions = _questions(args)
    lm = args.loading.load()
    from mercury_jax.decode.decide import decide

    out = decide(
        lm, state, questions, reads=args.reads, second_reads=args.second_reads, doubt=args.doubt,
        temperature=args.temperature, seed=args.seed,
    )  # fmt: skip
    if args.json:
        show.emit(_record(out))
        return 0
    for name, answer in out.answers.items():
        print(name)
        for label, p, se in zip(answer.labels, answer.probabilities, answer.se, strict=True):
            spread = "" if answer.reads == 1 else f" ± {1.96 * se:.3f}"
            print(f"  {'█' * round(BAR * p):{BAR}} {p:.3f}{spread}  {label}")
    return 0


def _questions(args: Decide) -> dict[str, Question]:
    """The questions of the options and of the file, by name."""
    from mercury_jax.decode.questions import MultipleChoice, YesNo, from_json

    found: dict[str, Question] = {text: YesNo(text) for text in args.ask}
    for labels in args.choose:
        found[labels] = MultipleChoice([label.strip() for label in labels.split(",")])
    if args.questions is not None:
        try:
            data = json.loads(Path(args.questions).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise refuse("--questions", args.questions, f"a file of JSON ({error})") from None
        if not isinstance(data, Mapping):
            raise refuse("--questions", args.questions, "an object of questions by name")
        found |= {name: from_json(one, f"questions.{name}") for name, one in data.items()}
    if not found:
        raise refuse("--ask", None, "at least one --ask, --choose or --questions")
    return found


def _record(out: DecideOutput) -> dict[str, Any]:
    """What --json prints."""
    answers = {
        name: {
            "label": one.label, "confidence": one.confidence, "reads": one.reads,
            "probabilities": dict(zip(one.labels, one.probabilities.tolist(), strict=True)),
            "se": dict(zip(one.labels, one.se.tolist(), strict=True)),
        }
        for name, one in out.answers.items()
    }  # fmt: skip
    return {"answers": answers, "forwards": out.forwards, "prompt_tokens": out.prompt_tokens}


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Fit the temperature of decisions to labelled questions.

    examples:
      mercury calibrate labelled.jsonl --model runs/mine/model --reads 4
      mercury calibrate labelled.jsonl --out decisions.json --plot curve.png

    A line of FILE is {"state": "...", "questions": {...}, "answers": {...}},
    the questions as in the HTTP API; an answer is true or false, a label, or a
    level. The temperature is written beside the model. `mercury decide`, the
    server and mj.decide then use it. The figures before and after are those of
    the same lines: measure what it is worth on others.
    """

    file: Annotated[Positional[str], option("FILE")]
    """Labelled questions, one state a line."""
    reads: Int = 1
    """Reads of each question; as many as will be used later."""
    seed: Int = 0
    """Seed of the noise, for models that denoise random tokens."""
    out: Annotated[str | None, option("X.json")] = None
    """Write the temperature there instead of beside the model."""
    plot: Annotated[str | None, option("X.png")] = None
    """Draw accuracy against confidence, before and after."""
    json: Flag = False
    """Print one JSON object."""
    loading: Annotated[Loading, Group] = dataclasses.field(default_factory=Loading)


def run_calibrate(argv: Sequence[str]) -> int:
    """Runs `mercury calibrate`; returns its exit code."""
    args = arguments.read(Calibrate, argv, "mercury calibrate")
    from mercury_jax.evaluate import calibration
    from mercury_jax.hub.load import decisions_file

    states = calibration.read(args.file)
    out = Path(args.out) if args.out is not None else decisions_file(args.loading.model)
    show.check_writable("--out", str(out))
    show.check_writable("--plot", args.plot)
    lm = args.loading.load()
    with show.progress("count", "deciding", total=sum(len(one.right) for one in states)) as update:
        answers, right = calibration.decide_all(
            lm,
            states,
            reads=args.reads,
            seed=args.seed,
            temperature=1.0,
            progress=lambda done: update(advance=done),
        )
    temperature = calibration.fit_temperature(answers, right.tolist())
    series = {
        name: calibration.probabilities(answers, t) for name, t in (("before", 1.0), ("after", temperature))
    }
    figures = {name: calibration.quality(found, right.tolist()) for name, found in series.items()}
    record = {"temperature": temperature, "reads": args.reads, "questions": len(answers), **figures}
    out.write_text(show.as_json(record) + "\n", encoding="utf-8")
    if args.plot is not None:
        calibration.plot_reliability(series, right.tolist()).savefig(args.plot)
    if args.json:
        show.emit(record | {"out": str(out)})
        return 0
    for name, one in figures.items():
        low, high = one["accuracy_interval"]
        print(
            f"{name:6}  accuracy {one['accuracy']:.3f} ({low:.3f} to {high:.3f})  Brier {one['brier']:.3f}  "
            f"calibration error {one['ece']:.3f}  nats {one['nats']:.3f}"
        )
    show.say(f"temperature {temperature:.3f} of {len(answers)} questions, written to {out}")
    low, high = calibration.TEMPERATURES
    if not 1.01 * low < temperature < high / 1.01:
        show.say(
            f"that is an end of the range tried ({low:g} to {high:g}): label more questions, easy and hard ones"
        )
    return 0
