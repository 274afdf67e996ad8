"""JSON out of order is valid whatever the model says, and takes few passes; what has no canvas is refused by name."""

import json

import numpy as np
import pytest
from jsonschema import Draft202012Validator

import mercury_jax as mj
from mercury_jax.decode.grammar import JSONCanvas
from tests.decode.grammar_schemas import record
from tests.tiny import tiny

INNER = record(flag={"type": "boolean"}, none={"type": "null"})
SCHEMA = record(
    kind={"enum": ["a", "bcd", "é"]}, n={"type": "integer", "minimum": -3, "maximum": 120}, inner=INNER,
    text={"type": "string", "minLength": 2, "maxLength": 7}, fixed={"const": {"x": [1, "y"]}},
)  # fmt: skip
PROMPTS = ["def x", "return y if x"]


def run(lm=None, **more):
    asked = {"max_tokens": 160, "schema": JSONCanvas(SCHEMA), "temperature": 1.0} | more
    return mj.sample(lm or tiny("bidirectional", 8, "absorbing"), PROMPTS, **asked)


@pytest.mark.parametrize("pattern", ["bidirectional", "causal_encoder"])
def test_every_answer_validates_and_a_seed_repeats(pattern):
    lm, judge = tiny(pattern, 8, "absorbing"), Draft202012Validator(SCHEMA)
    out = run(lm, n=4, seed=3)
    assert [text for text in out.texts if not judge.is_valid(json.loads(text))] == []
    assert len(set(out.texts)) > 1 and run(lm, n=4, seed=3).texts == out.texts
    assert out.texts == [lm.tokenizer.decode(ids.tolist()) for ids in out.tokens]
    assert out.forwards.max() == out.passes < max(out.lengths) / 2
    assert set(out.finish) == {"stop"}


def test_a_value_is_written_once_it_is_certain_enough():
    """A bound that every choice passes leaves two passes: one for the sizes, one for all values."""
    assert set(run(seed=1).forwards) != {2}
    sure = mj.sample(
        tiny("bidirectional", 8, "absorbing"), PROMPTS, max_tokens=160, schema=JSONCanvas(SCHEMA, p=1e-9)
    )
    assert sure.forwards.tolist() == [2, 2]


def test_the_embedded_model_takes_fewer_passes_than_the_gate():
    nano = mj.load()
    for seed, names in enumerate((["red", "green"], ["open", "closed", "draft"])):
        schema = record(
            kind={"enum": names}, on={"type": "boolean"}, n={"type": "integer", "minimum": 0, "maximum": 99}
        )
        gate = mj.sample(nano, "record = ", max_tokens=96, schema=schema, seed=seed)
        canvas = mj.sample(nano, "record = ", max_tokens=96, schema=JSONCanvas(schema), seed=seed)
        assert canvas.forwards[0] < gate.forwards[0]
        np.testing.assert_array_equal(Draft202012Validator(schema).is_valid(json.loads(canvas.text)), True)


REFUSED = [
    (
        dict(schema=JSONCanvas(record(a={"type": "array"}))),
        r"schema\.properties\.a is .*; allowed: in a JSONCanvas: const",
    ),
    (dict(schema=JSONCanvas(record(a={"type": "string"}))), r"schema\.properties\.a is"),
    (
        dict(schema=JSONCanvas({**SCHEMA, "required": ["n"]})),
        r"schema\.required is \['n'\]; allowed: all properties",
    ),
    (dict(schema=JSONCanvas(SCHEMA, p=0)), "schema.p is 0"),
    (dict(max_tokens=9), "max_tokens is 9; allowed: at least"),
    (dict(stop=["x"]), r"stop is \['x'\]; allowed: None with a JSONCanvas"),
    (dict(passes=3), "passes is 3; allowed: None with a JSONCanvas"),
    (dict(plan=mj.Plan(block=4)), "plan is Plan"),
    (dict(temperature=[0.0, 1.0]), "allowed: one number with a JSONCanvas"),
    (dict(lm=tiny("block_causal", 8, "absorbing")), "no canvas that it reads both ways"),
    (dict(lm=tiny("causal_encoder", 8, "uniform")), "has no mask"),
]


@pytest.mark.parametrize("wrong, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_has_no_canvas_is_refused_before_any_compute(wrong, words, monkeypatch):
    monkeypatch.setattr("mercury_jax.decode.canvas.logits", None)
    with pytest.raises(ValueError, match=words):
        run(**wrong)
