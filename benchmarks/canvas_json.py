"""Passes for valid JSON, out of order and by the gate: `python -m benchmarks.canvas_json --count 100 --checked 10000`.

Objects of three to eight required properties (enums, booleans, integers, short texts), each asked once of both with
the same prompt. Then more answers on canvases of a tiny model with random weights, drawn at temperature 1, whose
validity alone is counted. Prints one JSON line.
"""

import argparse
import json
import random
import sys
from datetime import date
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

import mercury_jax as mj
from mercury_jax.compilation import hardware
from tests.tiny import tiny

NAMES = ["id", "name", "kind", "state", "level", "size", "flag", "color", "count", "code"]
WORDS = [
    "red",
    "green",
    "blue",
    "open",
    "closed",
    "draft",
    "low",
    "high",
    "medium",
    "north",
    "apple",
    "cat",
    "dog",
]


def drawn(pick: random.Random) -> dict[str, Any]:
    """A schema."""
    value = {
        "enum": lambda: {"enum": pick.sample(WORDS, pick.randint(2, 5))},
        "boolean": lambda: {"type": "boolean"},
        "integer": lambda: {"type": "integer", "minimum": 0, "maximum": pick.choice([9, 99, 200])},
        "text": lambda: {"type": "string", "minLength": 1, "maxLength": 6},
    }
    names = pick.sample(NAMES, pick.randint(3, 8))
    properties = {name: value[pick.choice(list(value))]() for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def valid(schema: Any, text: str) -> bool:
    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="schemas")
    parser.add_argument("--checked", type=int, default=10_000, help="answers whose validity is checked")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    lm, pick = mj.load(), random.Random(args.seed)
    schemas = [drawn(pick) for _ in range(args.count)]
    gate, canvas, tokens, invalid = list[int](), list[int](), list[int](), 0
    for schema in schemas:
        prompt = f"# {' '.join(schema['properties'])}\nrecord = "
        one = mj.sample(lm, prompt, schema=schema, max_tokens=192)
        other = mj.sample(lm, prompt, schema=mj.grammar.JSONCanvas(schema), max_tokens=192)
        gate.append(int(one.forwards[0]))
        canvas.append(int(other.forwards[0]))
        tokens.append(other.lengths[0])
        invalid += not valid(schema, one.text) or not valid(schema, other.text)
    n, wild = -(-args.checked // args.count), tiny("bidirectional", 8, "absorbing")
    for i, schema in enumerate(schemas):
        out = mj.sample(
            wild,
            "record = ",
            schema=mj.grammar.JSONCanvas(schema),
            n=n,
            max_tokens=192,
            temperature=1.0,
            seed=i,
        )
        invalid += sum(not valid(schema, text) for text in out.texts)
    ratio = np.array(gate) / np.array(canvas)
    row = {
        "experiment": "canvas", "model": lm.name, "schemas": args.count, "checked": n * args.count, "invalid": invalid,
        "gate_passes": round(float(np.mean(gate)), 2), "canvas_passes": round(float(np.mean(canvas)), 2),
        "tokens": round(float(np.mean(tokens)), 1), "ratio_median": round(float(np.median(ratio)), 2),
        "ratio_quartiles": np.percentile(ratio, [25, 75]).round(2).tolist(),
        "fewer_passes": int((ratio > 1).sum()), "seed": args.seed, "date": str(date.today()), "hardware": hardware(),
    }  # fmt: skip
    print(json.dumps(row))
    sys.exit(bool(invalid))


if __name__ == "__main__":
    main()
