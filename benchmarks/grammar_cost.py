"""The share of a step that the grammars take on the host: `python -m benchmarks.grammar_cost --slots 1 32`.

Prints a JSON line for each number of rows, all of them under schemas of our own and with the model's block. A step is
a dispatch of one pass, from its sending to its result, of as many rows without a grammar. On a machine that does
other work too, steps_ms takes the fastest tenth; the host's part is time of its own thread.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any

from benchmarks.grammar_clock import Clock
from benchmarks.grammar_models import Named, compiled, model, schemas
from mercury_jax.compilation import hardware
from mercury_jax.serve.engine import sampling_params
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.serve.engine.scheduler import Slots
from mercury_jax.types import LM

ROOM = 89  # tokens above the shortest answer
LIMIT = 0.05  # of a step
LARGE = 10.0  # ms: a step of a large model on an accelerator


@contextmanager
def stepping() -> Iterator[list[float]]:
    """Seconds of each step that is dispatched and read meanwhile."""
    sent, read, found = Slots.dispatch, Slots.read, []
    times: list[float] = []

    def dispatch(self: Slots, params: Any) -> None:
        times.append(time.perf_counter())
        sent(self, params)

    def reads(self: Slots) -> Any:
        out = read(self)
        found.append(time.perf_counter() - times[-1])
        return out

    Slots.dispatch, Slots.read = dispatch, reads
    try:
        yield found
    finally:
        Slots.dispatch, Slots.read = sent, read


def jobs(lm: LM, pool: list[Named], count: int) -> list[EngineRequest]:
    """Answers to short prompts, each under the next schema."""
    prompt = tuple(lm.tokenizer.render([{"role": "user", "content": "Reply in JSON."}]))
    named = itertools.islice(itertools.cycle(pool), count)
    return [
        EngineRequest(
            prompt=prompt, max_tokens=n.grammar.shortest + ROOM, grammar=n.grammar, seed=i, temperature=0.7
        )
        for i, n in enumerate(named)
    ]


def answered(engine: Engine, asked: list[EngineRequest]) -> None:
    for ticket in [engine.submit(job) for job in asked]:
        ticket.wait(600)


def measured(lm: LM, pool: list[Named], slots: int, answers: int) -> dict[str, Any]:
    """Measures the server with `slots` requests at once; returns a row for JSON."""
    seats = EngineConfig(
        slots=slots, queue=4 * answers, context=512, prefix_bytes=0, programs="one", passes=1
    )
    engine = Engine(lm, dataclasses.replace(seats, rules=("threshold",)))
    engine._compiled.largest = engine._compiled.largest._replace(level=sampling_params.PROCESSORS)
    engine.start()
    asked = jobs(lm, pool, answers)
    answered(engine, asked[:slots])
    with Clock() as clock:
        answered(engine, asked)
    free = [
        dataclasses.replace(job, grammar=None, logit_bias={engine._ends[0]: -99.0}) for job in asked[:slots]
    ]
    with stepping() as steps:
        answered(engine, free)
    engine.stop()
    step = 1e3 * statistics.quantiles(steps, n=10)[0]
    host = 1e-3 * clock.microseconds * slots
    return {
        "experiment": "cost", "model": lm.name, "rows": slots, "block": engine.block, "answers": answers,
        "row_passes": len(clock.seconds["look"]), "us_per_row_and_pass": round(clock.microseconds, 1),
        "us_median": round(clock.median, 1), "host_ms_per_step": round(host, 2), "step_ms": round(step, 2),
        "step_ms_median": round(1e3 * statistics.median(steps), 2), "share": round(host / step, 4),
        "share_of_10_ms": round(host / LARGE, 4), "at_most": LIMIT, "within": host / step <= LIMIT,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--answers", type=int, default=96)
    args = parser.parse_args()
    lm = model("nano")
    pool = compiled(lm, schemas(None), args.answers, Counter())
    for slots in args.slots:
        row = measured(lm, pool, slots, args.answers if slots > 1 else args.answers // 3)
        print(json.dumps(row | {"date": str(date.today()), "hardware": hardware()}), flush=True)


if __name__ == "__main__":
    main()
