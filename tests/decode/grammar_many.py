"""Thousands of constrained answers of a model that draws uniformly: `python -m tests.decode.grammar_many`.

Prints one JSON line: how many answers there were, how many do not validate (to be 0), tokens, and the
microseconds of CPU that a token took, masks and proposals included.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

from mercury_jax.decode.constrained import RETRIES, ConstrainedRow
from mercury_jax.decode.grammar import Grammar, JSONSchema, compile
from mercury_jax.tokenizer import Tokenizer
from tests.decode.grammar_schemas import SCHEMAS

NANO = Path(__file__).parents[2] / "mercury_jax/assets/nano/tokenizer.model"
WIDTH = 32  # tokens that the model proposes at once


class Unjudged(Exception):
    """The validator cannot read the schema: a regular expression that Python lacks, a reference without a target."""


def nano_tokenizer() -> Tokenizer:
    """The tokenizer of the embedded model, without its weights."""
    return Tokenizer.load(NANO)


class GaveUp(Exception):
    """No attempt gave an answer that satisfies what the grammar leaves to the check."""


class Run(NamedTuple):
    """One answer, and what it took."""

    tokens: list[int]
    forced: int
    passes: int
    attempts: int = 1


def allowed(bits: np.ndarray) -> np.ndarray:
    """The ids of a mask."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def generate(grammar: Grammar, budget: int, rng: np.random.Generator, vocab: int, sure: float = 0.9) -> Run:
    """Decode with uniform logits: the frontier's token drawn under the mask, what lies behind it without one.

    Where the grammar enforces a part of its schema, answers are checked and decoded again, as `mj.sample` does.
    """
    row, passes = ConstrainedRow(grammar.walk(budget)), 0
    for attempt in range(1, RETRIES + 2):
        row.begin(0)
        while not row.ended:
            before = len(row.committed)
            tokens = rng.integers(0, vocab, WIDTH)
            tokens[0] = rng.choice(allowed(row.bits()))
            row.propose(before, tokens.tolist(), [True, *(rng.random(WIDTH - 1) < sure).tolist()])
            assert len(row.committed) > before or row.ended, "a pass without progress"
            passes += 1
        if (again := row.again(attempt)) is None:
            return Run(row.committed, sum(row.forced), passes, attempt)
        row = again
    raise GaveUp(grammar.name)


def fault(schema: Any, text: str) -> str | None:
    """Why a text does not validate by the schema's own draft, its formats included; None where it does."""
    try:
        value = json.loads(text, parse_constant=_no_json)
    except ValueError as error:
        return f"{error}: {text!r}"
    kind = validator_for(schema, Draft202012Validator)
    try:
        found = best_match(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value))
    except Exception as error:
        raise Unjudged(f"{type(error).__name__}: {error}") from error
    return None if found is None else f"{found.message}: {text!r}"


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer, rng = nano_tokenizer(), np.random.default_rng(args.seed)
    grammars = {name: compile(tokenizer, JSONSchema(schema)) for name, schema in SCHEMAS.items()}
    names, began = list(grammars), time.process_time()
    tokens = forced = passes = drawing = 0.0
    invalid: list[str] = []
    for i in range(args.count):
        name = names[i % len(names)]
        grammar = grammars[name]
        spare = (0, 1, 8, 64, 300)[rng.integers(5)]
        run = generate(grammar, grammar.shortest + spare, rng, tokenizer.vocab_size)
        tokens, forced, passes = tokens + len(run.tokens), forced + run.forced, passes + run.passes
        before = time.process_time()
        problem = fault(SCHEMAS[name], tokenizer.decode(run.tokens))
        drawing += time.process_time() - before
        if problem is not None or len(run.tokens) > grammar.shortest + spare:
            invalid.append(f"{name}: {problem}")
    seconds = time.process_time() - began - drawing
    row = dict(
        answers=args.count, schemas=len(names), invalid=len(invalid), tokens=int(tokens), forced=int(forced),
        passes=int(passes), us_per_token=round(1e6 * seconds / tokens, 1), us_per_pass=round(1e6 * seconds / passes, 1),
    )  # fmt: skip
    print(json.dumps(row))
    for line in invalid[:20]:
        print(line)


if __name__ == "__main__":
    main()
