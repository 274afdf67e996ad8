"""Thousands of constrained answers of models, through the engine: `python -m benchmarks.grammar_models`.

Each answer has a schema, a prompt, a budget, a rule and a temperature drawn at random. Prints one JSON line:
answers, how many do not validate and how many are longer than their budget (both to be 0), how many attempts were
made again and how many answers were given up (an error of the server), what was refused and why, and what the
grammars cost. --schemas: a folder of schemas, one to a file; the default is our own.
"""

import argparse
import dataclasses
import importlib
import json
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import mercury_jax as mj
from benchmarks.grammar_clock import Clock
from mercury_jax import models
from mercury_jax.compilation import hardware
from mercury_jax.decode.constrained import RETRIES, RETRY_TEMPERATURE, kept_of, retry_seed
from mercury_jax.decode.grammar import Grammar, GrammarError, JSONSchema, compile
from mercury_jax.serve.engine import sampling_params
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest, RequestHandle
from mercury_jax.types import LM
from tests.decode.grammar_many import Unjudged, fault
from tests.decode.grammar_schemas import SCHEMAS

DOCUMENTS = Path(__file__).parents[1] / "tests/decode/documents"
SPARE = (0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 233)  # tokens above the shortest answer
WARMTH = (None, 0.0, 0.3, 0.7, 1.0, 1.5, 3.0)
RULES = ("threshold", "confidence", "entropy_bound", "random")
QUESTIONS = ("Reply in JSON.", "def main(", "12+34+5=", "An example, please: ", "Give every field a value.")


class Named(NamedTuple):
    """A schema that is honoured, and the grammar of it."""

    name: str
    schema: Any
    grammar: Grammar


class Asked(NamedTuple):
    """An answer under way."""

    named: Named
    job: EngineRequest
    ticket: RequestHandle


def model(which: str) -> LM:
    """nano, or a smaller model of its kind with random weights, wild enough to say anything."""
    nano = mj.load()
    if which == "nano":
        return nano
    wild = models.build(dataclasses.replace(nano.model.config, layers=2, width=64, ffn=128, heads=2))
    params = jax.jit(lambda key: jax.tree.map(lambda x: 3.0 * x, wild.init(key)))(jax.random.key(1))
    return dataclasses.replace(nano, model=wild, params=params, name="random weights", decoding={})


def schemas(folder: Path | None) -> dict[str, Any]:
    """Those of a folder, or our own: small ones and documents. What is no JSON is left out."""
    found = {} if folder else dict(SCHEMAS)
    for path in sorted((folder or DOCUMENTS).glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(errors="replace"))
        except ValueError:
            print(f"{path.name} is no JSON", file=sys.stderr)
    return found


def compiled(lm: LM, found: dict[str, Any], most: int, why: Counter[str]) -> list[Named]:
    """Up to `most` of the schemas that are honoured; the reasons of those that are refused are counted."""
    honoured = []
    for name, schema in found.items():
        if len(honoured) == most:
            break
        try:
            honoured.append(Named(name, schema, compile(lm.tokenizer, JSONSchema(schema))))
        except GrammarError as error:
            why[reason(error)] += 1
    return honoured


def reason(error: Exception) -> str:
    """What an error says, without the names and numbers of one schema."""
    short = re.sub(r"schema/\S*", "schema/...", str(error))
    short = re.sub(r"is '?.*?; allowed", "is ...; allowed", short)
    return re.sub(r"\d+", "N", re.sub(r'"[^"]*/[^"]*"', '"..."', short))[:120]


def job_of(lm: LM, named: Named, cut: bool, rng: np.random.Generator) -> EngineRequest:
    """A job for a schema; its budget may be a token too small, which is refused at admission."""
    pick = lambda values: values[int(rng.integers(len(values)))]
    thinks = bool(rng.random() < 0.2)
    said = [{"role": "user", "content": f"{pick(QUESTIONS)} {named.name}"}]
    job = EngineRequest(
        prompt=tuple(lm.tokenizer.render(said, thinking=thinks)),
        max_tokens=named.grammar.shortest + (-1 if rng.random() < 0.02 else pick(SPARE)),
        thinking=pick((4, 30, 90)) if thinks else 0,
        rule=pick(RULES), temperature=pick(WARMTH), seed=int(rng.integers(2**31)), steps=pick((0, 0, 4, 30)),
        presence_penalty=pick((0.0, 0.0, 1.5)), grammar=named.grammar,
        logit_bias={int(i): 20.0 for i in rng.integers(5, lm.tokenizer.vocab_size, pick((0, 0, 8)))},
    )  # fmt: skip
    more = dict(top_p=pick((1.0, 0.9)), top_k=pick((0, 40)), min_p=pick((0.0, 0.1)))
    return dataclasses.replace(job, **more) if cut else job


class Tally:
    """What came of the answers."""

    def __init__(self, lm: LM):
        self.lm = lm
        self.count: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.finish: Counter[str] = Counter()
        self.unjudged: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, asked: Asked) -> None:
        """Judge an answer, once it is there."""
        last, job = asked.ticket.wait(600), asked.job
        tokens = last.tokens.tolist()[answer_start(self.lm, asked) :]
        self.finish[str(last.finish)] += 1
        self.count.update(
            answers=1, tokens=len(tokens), passes=last.forwards, forced=int(last.forced.sum()),
            thinking=bool(job.thinking), over_budget=len(tokens) > job.max_tokens,
        )  # fmt: skip
        try:
            problem = fault(asked.named.schema, self.lm.tokenizer.decode(tokens))
        except Unjudged as error:
            self.unjudged[reason(error)] += 1
            return
        if problem is not None or last.finish not in ("stop", "length"):
            self.count["invalid"] += 1
            self.problems.append(f"{asked.named.name}: {problem} {last.finish} {last.message} {job}"[:2000])


def answer_start(lm: LM, asked: Asked) -> int:
    """The index of the first token behind the thinking."""
    marks = lm.tokenizer.thinking
    if not asked.job.thinking or marks is None:
        return 0
    return asked.ticket.wait(600).tokens.tolist().index(marks.close) + 1


def settled(engine: Engine, asked: Asked, tally: Tally) -> Asked | None:
    """An answer that passes the check of what its grammar leaves open; None after all attempts of the server."""
    first = asked.job
    for attempt in range(1, RETRIES + 2):
        last, at = asked.ticket.wait(600), answer_start(engine.lm, asked)
        tokens, forced = last.tokens[at:].tolist(), last.forced[at:].tolist()
        kept = kept_of(asked.named.grammar, tokens, forced, asked.job.kept, attempt)
        if kept is None:
            return asked
        if attempt <= RETRIES:
            tally.count["again"] += 1
            warm, seed = max(first.temperature or 0.0, RETRY_TEMPERATURE), retry_seed(first.seed, attempt)
            job = dataclasses.replace(first, seed=seed, temperature=warm, kept=kept)
            asked = asked._replace(job=job, ticket=engine.submit(job))
    tally.count["gave_up"] += 1
    return None


def ask(
    engine: Engine, pool: list[Named], args: argparse.Namespace, rng: np.random.Generator, tally: Tally
) -> Iterator[Asked]:
    """So many answers, each as it was asked for; what is refused at admission takes none of them."""
    left = args.count
    while left:
        named = pool[int(rng.integers(len(pool)))]
        job = job_of(engine.lm, named, args.cut, rng)
        submitted = engine.stats().submitted
        try:
            ticket = engine.submit(job)
        except ValueError as error:
            assert engine.stats().submitted == submitted  # nothing was computed
            tally.refused[reason(error)] += 1
            continue
        tally.count["not_refused"] += job.max_tokens < named.grammar.shortest
        left -= 1
        yield Asked(named, job, ticket)


def answers(
    engine: Engine, pool: list[Named], args: argparse.Namespace, rng: np.random.Generator, tally: Tally
) -> None:
    """All of them, with three times as many under way as there are slots."""
    waiting: deque[Asked] = deque()
    for asked in ask(engine, pool, args, rng, tally):
        waiting.append(asked)
        if len(waiting) >= 3 * args.slots:
            if (done := settled(engine, waiting.popleft(), tally)) is not None:
                tally.add(done)
            if tally.count["answers"] % args.tell == 0:
                print(dict(tally.count), file=sys.stderr, flush=True)
    while waiting:
        if (done := settled(engine, waiting.popleft(), tally)) is not None:
            tally.add(done)


def run(lm: LM, args: argparse.Namespace) -> dict[str, Any]:
    """A JSON-ready row of all answers."""
    rng, why = np.random.default_rng(args.seed), Counter[str]()
    found = schemas(args.schemas)
    found = {name: found[name] for name in rng.permutation(list(found)).tolist()}
    vars(importlib.import_module(Grammar.__module__))["COMPILE_SECONDS"] = args.seconds
    pool, tally = compiled(lm, found, args.most, why), Tally(lm)
    seats = EngineConfig(
        slots=args.slots, queue=4 * args.slots, context=512, block=args.block, max_logprobs=1
    )
    engine = Engine(lm, dataclasses.replace(seats, prefix_bytes=0, programs="one", rules=RULES))
    if not args.cut:  # the sorts of top-p and such are most of a pass on a CPU
        engine._compiled.largest = engine._compiled.largest._replace(level=sampling_params.PROCESSORS)
    engine.start()
    began, spent = time.monotonic(), time.process_time()
    with Clock() as clock:
        answers(engine, pool, args, rng, tally)
    seconds, spent, stats = time.monotonic() - began, time.process_time() - spent, engine.stats()
    engine.stop()
    total = sum(why.values()) + len(pool)
    row = {
        "experiment": "schemas", "model": lm.name, "schemas_from": args.name, "schemas": total, "honoured": len(pool),
        "checked": sum(named.grammar.fault is not None for named in pool),
        "refused_at_compile": sum(why.values()), "reasons": dict(why.most_common()),
        "refused_at_admission": dict(tally.refused.most_common()),
    }  # fmt: skip
    row |= {key: tally.count[key] for key in COUNTED} | {
        "unjudged": dict(tally.unjudged), "finish": dict(tally.finish),
        "tokens_per_pass": round(tally.count["tokens"] / max(tally.count["passes"], 1), 2),
        "device_passes": stats.device_passes, "seconds": round(seconds, 1), "cpu_seconds": round(spent, 1),
        "slots": args.slots, "block": engine.block, "cut": args.cut,
        "us_per_row_and_pass": round(clock.microseconds, 1), "us_median": round(clock.median, 1),
    }  # fmt: skip
    for problem in tally.problems[:50]:
        print("INVALID", problem, file=sys.stderr)
    return row


COUNTED = (
    "answers",
    "invalid",
    "over_budget",
    "not_refused",
    "thinking",
    "tokens",
    "forced",
    "passes",
    "again",
    "gave_up",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("random", "nano"), default="random")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--name", default="ours", help="what the row calls these schemas")
    parser.add_argument("--most", type=int, default=10_000, help="schemas that take part")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument(
        "--cut", action="store_true", help="some with top-p, top-k and min-p, which are slow here"
    )
    parser.add_argument("--block", type=int, help="positions of a canvas; the model's own by default")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="to compile one schema; this machine may be busy"
    )
    parser.add_argument("--tell", type=int, default=500, help="answers between two lines of progress")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    row = run(model(args.model), args)
    made = {name: version(name) for name in ("llguidance", "jsonschema", "jax")}
    print(json.dumps(row | {"seed": args.seed, "date": str(date.today()), "hardware": hardware(), **made}))
    sys.exit(bool(row["invalid"] or row["over_budget"] or row["not_refused"]))


if __name__ == "__main__":
    main()
