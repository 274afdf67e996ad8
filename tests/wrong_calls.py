"""Wrong calls of the public names: what each call must say, and a check that it says so before it computes.

`python -m tests.wrong_calls` prints what every call answers. A call is refused well if it raises a ValueError of this
package (or the TypeError of Python itself, for a missing or unknown argument) whose message names the argument, and
what is allowed. The models of these calls raise `Computed` as soon as a pass is traced, so that a call which is
refused only then is found. `tests/test_wrong_calls.py` runs them; `tests/decode/test_inputs.py` has further ones.
"""

import dataclasses
import functools
import math
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mercury_jax as mj
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.decode.grammar import GrammarError
from tests.tiny import tiny

PACKAGE = str(Path(mj.__file__).parent)
KINDS = (
    ValueError,
    CheckpointError,
    GrammarError,
)  # themselves, not what JAX or Flax derives from ValueError
# What Python says of a call that does not fit a signature.
SIGNATURE = re.compile(
    r"unexpected keyword argument|missing \d+ required|takes .* positional argument|must be a"
)


class Computed(BaseException):
    """A pass of the model was traced: the call was not refused before any compute."""


def computed(*args: Any, **more: Any) -> Any:
    raise Computed


@functools.cache
def model(*which: Any, **changes: Any) -> mj.LM:
    """A tiny model none of whose passes may be traced."""
    lm = tiny(*which, **changes)
    return dataclasses.replace(lm, model=lm.model._replace(forward=computed, apply=computed))


def sample(prompt: Any = "x", lm: Any = None, **more: Any) -> Any:
    return mj.sample(model() if lm is None else lm, prompt, **{"max_tokens": 4} | more)


YES = mj.questions.YesNo("Is it?")
choice = mj.questions.MultipleChoice


def decide(questions: Any, lm: Any = None, state: Any = "x", **more: Any) -> Any:
    named = questions if isinstance(questions, dict) else {"question": questions}
    return mj.decide(model() if lm is None else lm, state, named, **more)


def stream(prompt: Any = "x", **more: Any) -> Any:
    return mj.stream(model(), prompt, **{"max_tokens": 4} | more)


def infill(parts: Any = ("x", mj.Hole(2)), lm: Any = None, **more: Any) -> Any:
    return mj.infill(model() if lm is None else lm, parts, **more)


def edit(text: Any = "x", lm: Any = None, **more: Any) -> Any:
    return mj.edit(model() if lm is None else lm, text, **more)


def score(prompt: Any = "x", completion: Any = "y", lm: Any = None, **more: Any) -> Any:
    return mj.score(model() if lm is None else lm, prompt, completion, **more)


def logits(canvas: Any = (5, 6), lm: Any = None, **more: Any) -> Any:
    return mj.logits(model() if lm is None else lm, canvas, **more)


def session() -> Any:
    """A finished session of the tiny model itself."""
    return mj.sample(tiny(), "x", max_tokens=4, keep=True).state


def table(params: Any, tokens: Any) -> Any:
    return params[tokens]


def own(apply: Any = table, params: Any = None, **changes: Any) -> mj.LM:
    """A function of one's own, some of its arguments wrong."""
    params = jnp.eye(12) if params is None else params
    return mj.from_function(apply, params, **{"vocab": 12, "context": 16, "mask": 10} | changes)


def decoder(lm: Any = None, **more: Any) -> Any:
    return mj.decoder(model() if lm is None else lm, **{"slots": 32} | more)


def init(ids: Any = ((5, 6),), made: Any = None, **more: Any) -> Any:
    """The state of a decoder of the tiny model."""
    made = decoder() if made is None else made
    return made.init(tiny().params, ids, **{"max_tokens": 4, "key": jax.random.key(0)} | more)


def log_probs(batch: Any = None, **more: Any) -> Any:
    """Log-probabilities of one answer."""
    batch = mj.rl.answer_batch(tiny(), "x", [[5, 6]]) if batch is None else batch
    return mj.rl.token_log_probs(model(), tiny().params, batch, **{"key": jax.random.key(0)} | more)


def recipe(**changes: Any) -> Any:
    from mercury_jax.training import data, objectives

    config = mj.ModelConfig(vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    fields = dict(name="wrong", model=config, objective=objectives.masked_elbo(), data=data.stdlib())
    return mj.TrainConfig(**fields | changes)


class Letters:
    """A tokenizer of one's own."""

    def __init__(self, ids: Any = (1, 2), text: Any = "ab", vocab_size: int = 10):
        self.ids, self.text, self.vocab_size = ids, text, vocab_size

    def encode(self, text: str) -> Any:
        return self.ids

    def decode(self, ids: Any) -> Any:
        return self.text


def rule(key, view, memory):
    return mj.rules.accept(view, view.masked), memory


threshold, Sampler, user = mj.rules.threshold, mj.Sampler, [{"role": "user", "content": "x"}]
long = [5] * 300  # the context of the tiny model is 256
Call = Callable[[], Any]
WRONG: dict[str, dict[str, tuple[Call, str]]] = {
    "sample: prompts": {
        "no prompt": (lambda: mj.sample(model()), "'prompt'"),
        "None": (lambda: sample(None), "prompt is None"),
        "an empty text": (lambda: sample(""), "prompt is ''"),
        "an empty text in a list": (lambda: sample(["x", ""]), r"prompt\[1\] is ''"),
        "an empty list": (lambda: sample([]), r"prompt is \[\]"),
        "a list of an empty list": (lambda: sample([[], [5]]), r"prompt\[0\] is \[\]"),
        "a number": (lambda: sample(5), "prompt is 5"),
        "a dict": (lambda: sample({"role": "user", "content": "x"}), "prompt is {"),
        "a set": (lambda: sample({"x"}), "prompt is {'x'}"),
        "an id outside of the vocabulary": (lambda: sample([320]), r"prompt id is 320; allowed: 0\.\.319"),
        "a negative id": (lambda: sample([[5], [-1]]), r"prompt\[1\] id is -1"),
        "lists too deep": (lambda: sample([[[5]]]), r"prompt\[0\]"),
        "ids and texts in one row": (lambda: sample([5, "x"]), "prompt is"),
        "an array of floats": (lambda: sample(jnp.ones(3)), "prompt is 'float32"),
        "an array of objects": (lambda: sample(np.array(["x", "y"])), "prompt is '<U1"),
        "a traced array": (lambda: jax.jit(lambda x: sample(x))(jnp.ones(3, int)), "prompt is .* concrete"),
        "a message without a role": (lambda: sample([{"content": "x"}]), r"messages\[0\]"),
        "a message of an unknown role": (lambda: sample([{"role": "nobody", "content": "x"}]), "nobody"),
        "a message of a number": (lambda: sample([{"role": "user", "content": 5}]), r"messages\[0\]"),
        "a message and a text": (lambda: sample([*user, "x"]), r"messages\[1\]"),
        "a prompt beyond the context": (lambda: sample(long), r"prompt\[0\] is '300 tokens'.*256"),
    },
    "sample: numbers": {
        "max_tokens beyond the context": (lambda: sample(max_tokens=256), r"max_tokens is 256; allowed: 1\.\."),
        "temperature of a row -1": (lambda: sample(["x", "y"], temperature=[0.0, -1.0]), "temperature is -1"),
        "temperatures in a list of lists": (lambda: sample(temperature=[[0.0]]), "temperature is"),
        "effort unknown": (lambda: sample(effort="max"), "effort is 'max'; allowed: instant, low"),
        "effort with a negative budget": (lambda: sample(effort=mj.Effort(-1, 0.9, 1.0)), "Effort.thinking is -1"),
        "effort of no steps": (lambda: sample(effort=mj.Effort(0, 0.9, 0.0)), "Effort.steps is 0"),
        "negative of other rows": (lambda: sample(guidance=1.0, negative=["y", "z"]), "negative is 'a list of 2'"),
        "negative of floats": (lambda: sample(guidance=1.0, negative=[0.5]), r"negative is \[0.5\]"),
    },
    "sample: values": {
        "a misspelt argument": (lambda: sample(max_token=4), "'max_token'"),
        "arguments by position": (lambda: mj.sample(model(), "x", 64), "positional"),
        "a logit_bias of names": (lambda: sample(logit_bias={"a": 1.0}), "'a'"),
        "a logit_bias outside of the vocabulary": (lambda: sample(logit_bias={999: 1.0}), "999"),
        "a logit_bias of a negative id": (lambda: sample(logit_bias={-1: 1.0}), "-1"),
        "a logit_bias of texts": (lambda: sample(logit_bias={5: "x"}), "'x'"),
        "a logit_bias of nan": (lambda: sample(logit_bias={5: float("nan")}), "nan"),
        "logit_bias of other rows": (lambda: sample(logit_bias=[{5: 1.0}] * 2), "rows|prompts"),
        "a sampler class": (lambda: sample(sampler=mj.Sampler), "sampler is <class"),
        "a plan as sampler": (lambda: sample(sampler=mj.Plan()), "sampler is Plan"),
        "a stop as sampler": (lambda: sample(sampler=mj.stopping.steady()), "stopping criterion steady"),
        "a refresh as plan": (lambda: sample(plan=mj.Refresh()), "plan is Refresh"),
        "a refresh of an exact cache": (lambda: sample(plan=mj.Plan(refresh=mj.Refresh())), "plan.refresh is"),
        "a revision of encoded blocks": (lambda: sample(plan=mj.Plan(revise=1)), "plan.revise is 1"),
        "a block that does not divide": (
            lambda: sample(lm=model("block_causal"), plan=mj.Plan(block=3)),
            "plan.block is 3; allowed: a divisor of 8",
        ),
        "a rule of other noise": (
            lambda: sample(lm=model(kind="uniform"), sampler=mj.rules.wino()), "sampler.rule is 'wino'"),
        "drafts of a model that cannot verify": (
            lambda: sample(sampler=mj.rules.autoregressive()), "sampler.speculate is 0"),
        "a mesh as a sharding": (
            lambda: sample(mesh=jax.sharding.SingleDeviceSharding(jax.devices()[0])), "mesh is SingleDevice"),
        "a state as an output": (lambda: sample(state=tiny()), "state is LM"),
        "a state of another model": (
            lambda: sample(lm=model(block=4), state=session()), "state is 'a session of another model'"),
        "more prompts than rows of the state": (lambda: sample(["x", "y"], state=session()), "prompt is '2 prompts'"),
        "a schema of an unknown type": (lambda: sample(schema={"type": "nosuch"}), "schema.*nosuch"),
        "schemas of other rows": (lambda: sample(schema=[True, True]), "schema is '2 of them'"),
        "a schema with passes": (lambda: sample(schema=True, passes=3), "passes is 3"),
        "a schema with guidance": (lambda: sample(schema=True, guidance=1.0), "guidance is 1.0"),
        "a schema without a tokenizer": (lambda: mj.sample(own(), [1], max_tokens=4, schema=True), "schema"),
        "a regex that does not parse": (lambda: sample(schema=mj.grammar.Regex("(")), "schema"),
        "a choice of nothing": (lambda: sample(schema=mj.grammar.Choice(())), "schema"),
        "params of numbers": (lambda: sample(lm=dataclasses.replace(tiny(), params={"embed": 1.0})), "lm.params is"),
    },
    "sample: batches": {
        "max_tokens of other rows": (lambda: sample(max_tokens=[4, 8]), "max_tokens is 'a list of 2'"),
        "max_tokens of a row 0": (lambda: sample(["x", "y"], max_tokens=[4, 0]), r"max_tokens.* 0"),
        "max_tokens of a row as a text": (lambda: sample(["x", "y"], max_tokens=[4, "8"]), "max_tokens.*'8'"),
        "max_tokens of a row beyond the context": (lambda: sample(["x", "y"], max_tokens=[4, 256]), "max_tokens.*256"),
        "no max_tokens": (lambda: sample(max_tokens=[]), "max_tokens is 'a list of 0'"),
        "max_tokens as a matrix": (lambda: sample(max_tokens=np.ones((1, 1), int)), r"max_tokens\[0\] is array"),
        "seeds of other rows": (lambda: sample(["x", "y"], seed=[1, 2, 3]), "seed is 'a list of 3'"),
        "a seed of a row -1": (lambda: sample(["x", "y"], seed=[1, -1]), "seed.* -1"),
        "a seed of a row as a text": (lambda: sample(["x", "y"], seed=[1, "2"]), "seed.*'2'"),
        "keys of other rows": (lambda: sample(["x", "y"], seed=jax.random.split(jax.random.key(0), 3)), "seed"),
        "a raw key": (lambda: sample(seed=jax.random.PRNGKey(0)), "seed is"),
        "efforts of other rows": (lambda: sample(["x", "y"], effort=["low"]), "effort is"),
        "an effort of a row unknown": (lambda: sample(["x", "y"], effort=["low", "max"]), "effort.*'max'"),
        "temperatures of other rows": (lambda: sample(["x", "y"], temperature=[0.0, 0.5, 1.0]), "temperature"),
        "no temperatures": (lambda: sample(temperature=[]), "temperature is"),
        "a temperature of a row as a text": (lambda: sample(["x", "y"], temperature=[0.0, "1"]), "temperature"),
        "stops of numbers": (lambda: sample(stop=[5]), "stop.* 5"),
        "stops of other rows": (lambda: sample(["x", "y"], stop=[["a"], ["b"], ["c"]]), "stop"),
        "stops of a row as a number": (lambda: sample(["x", "y"], stop=[["a"], 5]), "stop.*5"),
        "a stop with a schema": (lambda: sample(stop="x", schema=True), "stop is 'x'"),
        "a stop of ids": (lambda: mj.sample(own(), [1], max_tokens=4, stop=[[3]]), "stop"),
        "rules of other rows": (lambda: sample(["x", "y"], sampler=threshold([0.1, 0.2, 0.3])), "shape of p|p"),
        "guidance of a row nan": (lambda: sample(["x", "y"], guidance=[1.0, float("nan")]), "guidance is"),
        "a masked side of a model without masks": (
            lambda: sample(lm=model(kind="uniform"), guidance=1.0, negative="masked"), "negative is 'masked'"),
        "a state of other answers": (
            lambda: sample(["x", "y", "z"], state=mj.sample(tiny(), "x", n=2, max_tokens=4, keep=True).state),
            "prompt is '3 prompts'",
        ),
        "unequal max_tokens of a function without lengths": (
            lambda: mj.sample(own(), [[1], [2]], max_tokens=[3, 4]), r"lengths of the rows is \[4, 5\]"),
        "guidance of a function without lengths": (
            lambda: mj.sample(own(), [1], max_tokens=3, guidance=1.0), r"negative\[0\] is '0 tokens'"),
        "n of infill": (lambda: infill(n=2), "'n'"),
        "ids of floats to infill": (lambda: infill([[0.5], mj.Hole(2)]), r"parts\[0\]"),
        "ids outside of the vocabulary to infill": (lambda: infill([[320], mj.Hole(2)]), "320"),
        "a seed of other rows to infill": (lambda: infill(seed=[1, 2]), "seed is 'a list of 2'"),
        "a seed of other rows to edit": (lambda: edit(["x", "y"], seed=[1]), "seed is 'a list of 1'"),
        "temperatures of other rows to edit": (lambda: edit(temperature=[0.0, 1.0]), "temperature"),
        "max_tokens of other rows of stream": (lambda: stream(["x", "y"], max_tokens=[4]), "max_tokens is 'a list"),
    },
    "presets, soft masking": {
        "a block that does not divide": (lambda: mj.presets.llada(128, 64, 48), "block_length is 48"),
        "steps that do not divide": (
            lambda: mj.presets.llada(gen_length=64, block_length=32, steps=7), "steps is 7; allowed: a multiple"),
        "a top_k of 0": (lambda: mj.presets.dream(top_k=0), r"top_k.* 0"),
        "an alg_temp as a text": (lambda: mj.presets.dream(alg="entropy", alg_temp="x"), r"alg_temp.*'x'"),
        "a threshold of 2": (lambda: mj.presets.fast_dllm(threshold=2.0), "threshold.* is 2"),
        "a misspelt argument": (lambda: mj.presets.llada(gen_len=64), "'gen_len'"),
        "a name as model": (lambda: mj.soft_masking("nano", scale=0.5), "lm"),
        "soft masking without a scale": (lambda: mj.soft_masking(tiny()), "'scale'"),
        "a scale of 2": (lambda: mj.soft_masking(tiny(), scale=2.0), "scale.* 2"),
        "a soft scale as a text": (lambda: mj.soft_masking(tiny(), scale="x"), "scale.* 'x'"),
        "top_k 1.5": (lambda: mj.soft_masking(tiny(), scale=0.5, top_k=1.5), "top_k.* 1.5"),
        "soft masking of uniform noise": (lambda: mj.soft_masking(tiny(kind="uniform"), scale=0.5), "soft_masking"),
        "soft masking of a function": (lambda: mj.soft_masking(own(), scale=0.5), "soft_masking"),
        "hidden states as a text": (lambda: mj.rule(needs_hidden="yes")(rule), "needs_hidden of a rule is 'yes'"),
    },
    "stream": {
        "None": (lambda: stream(None), "prompt is None"),
        "an empty text": (lambda: stream(""), "prompt is ''"),
        "two temperatures": (lambda: stream(temperature=[0.0, 1.0]), "temperature"),
        "history": (lambda: stream(history=True), "'history'"),
        "logit_bias as a list": (lambda: stream(logit_bias=[{5: 1.0}] * 2), "rows|prompt"),
        "a prompt of a model's name": (lambda: mj.stream("nano", "x"), "lm is 'nano'"),
    },
    "infill": {
        "no parts": (lambda: infill([]), r"parts is \[\]"),
        "None": (lambda: infill(None), "parts is None"),
        "a text": (lambda: infill("x"), "parts is 'x'"),
        "a number": (lambda: infill([5]), r"parts\[0\] is 5"),
        "a text and a number": (lambda: infill(["x", 5]), "5"),
        "no hole": (lambda: infill(["x"]), r"parts\[0\] is \['x'\]; allowed: at least one Hole"),
        "the class Hole": (lambda: infill(["x", mj.Hole]), r"parts\[0\].*Hole"),
        "a row without parts": (lambda: infill([["x", mj.Hole(2)], 5]), r"parts\[1\] is 5"),
        "a hole of 0": (lambda: mj.Hole(0), "Hole.tokens is 0"),
        "a hole of a text": (lambda: mj.Hole("3"), "Hole.tokens is '3'"),
        "a hole of 1.5": (lambda: mj.Hole(1.5), "Hole.tokens is 1.5"),
        "a hole beyond the context": (lambda: infill(["x", mj.Hole(300)]), r"parts\[0\] is '301 tokens'"),
        "max_tokens": (lambda: infill(max_tokens=3), "'max_tokens'"),
        "temperature of other rows": (lambda: infill(temperature=[0.0, 1.0]), "temperature"),
        "a rule of other noise": (lambda: infill(sampler=mj.rules.wino(), lm=model(kind="uniform")), "'wino'"),
        "holes of both kinds in FIM order": (
            lambda: infill(["x", mj.Hole(2), "y", mj.Hole()], lm=model("block_causal")), r"parts\[0\] is 'holes of"),
        "messages": (lambda: infill(user), "parts"),
    },
    "edit": {
        "an empty text": (lambda: edit(""), "text is ''"),
        "no texts": (lambda: edit([]), r"text is \[\]"),
        "None": (lambda: edit(None), "text is None"),
        "a text and a number": (lambda: edit(["x", 5]), r"text\[1\] is 5"),
        "a conversation": (lambda: edit(user), r"text\[0\]|text is"),
        "an id outside of the vocabulary": (lambda: edit([320]), "text id is 320"),
        "a text beyond the context": (lambda: edit(long), r"text\[0\] and its prompt is '300 tokens'"),
        "a span beyond the text": (
            lambda: edit(spans=[(0, 9)]), r"spans is \(0, 9\); allowed: 0 <= start < end <= 1"),
        "a span that ends before it starts": (lambda: edit("abc", spans=[(2, 1)]), r"spans is \(2, 1\)"),
        "a span of texts": (lambda: edit(spans=[("a", "b")]), r"spans is \('a', 'b'\)"),
        "a span of one number": (lambda: edit(spans=[3]), "spans is 3"),
        "a piece that is not there": (lambda: edit("abc", spans=["x"]), "spans is 'x'.*0 times"),
        "a piece that is there twice": (lambda: edit("abab", spans=["ab"]), "spans is 'ab'.*2 times"),
        "spans that overlap": (lambda: edit("abc", spans=[(0, 2), (1, 3)]), "do not overlap"),
        "spans of other rows": (lambda: edit(["x", "y"], spans=[["x"]]), "spans is '1 lists'"),
        "spans beyond the ids": (lambda: edit([5, 6], spans=[(0, 3)]), r"spans is \(0, 3\)"),
        "a piece of ids": (lambda: edit([5, 6], spans=["x"]), "spans is"),
        "prompts of other rows": (lambda: edit(["x", "y"], prompt=["a", "b", "c"]), "prompt is 'a list of 3'"),
        "max_tokens": (lambda: edit(max_tokens=3), "'max_tokens'"),
        "a rule that inserts": (lambda: edit(sampler=mj.rules.daedal()), "sampler.rule is 'daedal'"),
        "an effort": (lambda: edit(effort="low"), "'effort'"),
    },
    "decide": {
        "no question": (lambda: decide({}), r"questions is \{\}; allowed: at least one question"),
        "a text as a question": (lambda: decide("Is it?"), r"question'\] is 'Is it\?'; allowed: a question"),
        "a name that is no text": (lambda: decide({1: YES}), "questions is 1; allowed: a text"),
        "an empty question": (lambda: decide(mj.questions.YesNo()), r"instructions is ''"),
        "no label": (lambda: decide(choice([])), "labels is '0 entries'; allowed: 1 to 255"),
        "a text as labels": (lambda: decide(choice("ab")), "labels is 'ab'; allowed: a list of labels"),
        "too many labels": (lambda: decide(choice([str(i) for i in range(256)])), "256 entries"),
        "a label twice": (lambda: decide(choice(["a", "a"])), r"labels\[1\] is 'a'; allowed: labels that"),
        "a blank label": (lambda: decide(choice(["a", " "])), r"labels\[1\] is ' '"),
        "a label that is no text": (lambda: decide(choice([1])), r"labels\[0\] is 1"),
        "levels by name": (lambda: decide(mj.questions.Scale({"a": "b"})), "levels is .* allowed: a list"),
        "a description that is no JSON": (
            lambda: decide(choice({"a": {"x": object()}})),
            r"labels\[0\] is .* allowed: a text, or an object or list of JSON",
        ),
        "no state": (lambda: decide(YES, state=[]), r"state is \[\]"),
        "a number as the state": (lambda: decide(YES, state=3), "state is 3; allowed: a text, an object of JSON"),
        "a state of ids": (lambda: decide(YES, state=[[5, 6]]), r"state\[0\] is \[5, 6\]"),
        "a state that is too long": (lambda: decide(YES, state="x y " * 200), "allowed: at most 256, the context"),
        "no reads": (lambda: decide(YES, reads=0), r"reads is 0; allowed: a whole number in 1\.\.64"),
        "negative second reads": (lambda: decide(YES, second_reads=-1), "second_reads is -1"),
        "a doubt above 1": (lambda: decide(YES, doubt=2), r"doubt is 2; allowed: a number in 0\.\.1"),
        "a temperature of 0": (lambda: decide(YES, temperature=0), "temperature is 0; allowed: a number above 0"),
        "a negative seed": (lambda: decide(YES, seed=-1), "seed is -1"),
    },
    "score": {
        "no completion": (lambda: mj.score(model(), "x"), "'completion'"),
        "prompt None": (lambda: score(None), "prompt is None"),
        "completion None": (lambda: score("x", None), "completion is None"),
        "an empty completion": (lambda: score("x", ""), "completion is ''"),
        "completions of other rows": (lambda: score(["x", "y"], ["a", "b", "c"]), "completion is '3 answers'"),
        "two prompts and one answer": (lambda: score(["x", "y"], "a"), "completion is 'one answer'"),
        "a conversation as answer": (lambda: score("x", user), "completion is 'a conversation'"),
        "floats": (lambda: score("x", [0.5]), r"completion is \[0.5\]"),
        "a posterior of masks": (lambda: score(posterior=True), "posterior is True; allowed: False: masks"),
        "beyond the context": (lambda: score(long, [5]), "prompt and completion is '301 tokens'"),
        "a temperature": (lambda: score(temperature=1.0), "'temperature'"),
    },
    "logits": {
        "an empty canvas": (lambda: logits([]), "canvas is"),
        "a text": (lambda: logits("abc"), "canvas is"),
        "None": (lambda: logits(None), "canvas is"),
        "rows of several lengths": (lambda: logits([[5], [5, 6]]), r"canvas is \[\[5\], \[5, 6\]\]"),
        "floats": (lambda: logits([0.5]), "canvas is 'float64"),
        "bools": (lambda: logits([True, False]), "canvas is 'bool"),
        "an id outside of the vocabulary": (lambda: logits([320]), r"canvas is \(320, 320\)"),
        "3 axes": (lambda: logits(np.ones((1, 1, 2), int)), r"canvas is 'int64\[1, 1, 2\]'"),
        "prompts of other rows": (lambda: logits([5, 6], prompt=["x", "y"]), "prompt is 'a list of 2'"),
        "beyond the context": (lambda: logits(long), "canvas is"),
        "a traced canvas of floats": (
            lambda: jax.jit(lambda x: logits(canvas=x))(jnp.ones(3)), "canvas is .*float32.*whole numbers"),
        "a time of 2": (lambda: logits(lm=own(lambda p, t, time: p[t]), canvas=[1], time=2.0), "time is 2.0"),
        "a time as a text": (lambda: logits(lm=own(lambda p, t, time: p[t]), canvas=[1], time="x"), "time is 'x'"),
        "times of other rows": (
            lambda: logits(lm=own(lambda p, t, time: p[t]), canvas=[1], time=[0.1, 0.2]), r"time is \[0.1, 0.2\]"),
    },
    "load": {
        "a folder that does not exist": (lambda: mj.load("nosuch"), "nosuch"),
        "a number": (lambda: mj.load(5), "source is 5"),
        "an empty text": (lambda: mj.load(""), "source is ''"),
        "a folder without a model": (lambda: mj.load(Path(__file__).parent), "config.json is missing"),
        "a dtype as a type": (lambda: mj.load(dtype=jnp.float32), "dtype is"),
        "a misspelt argument": (lambda: mj.load(quantize="int8"), "'quantize'"),
    },
    "Plan, Refresh": {
        "a plan by position": (lambda: mj.Plan(8), r"Plan\(\) argument is 8"),
        "a misspelt field": (lambda: mj.Plan(blocks=8), "'blocks'"),
        "other steps than times": (lambda: mj.Plan(times=(1.0, 0.5, 0.0), steps=3), "steps is 3"),
        "refresh without its call": (lambda: mj.Plan(refresh=mj.Refresh.dual), "refresh is"),
        "a refresh by position": (lambda: mj.Refresh(8), "positional"),
        "every as a text": (lambda: mj.Refresh.dual("2"), "every is '2'"),
        "a vicinity of -3": (lambda: mj.Refresh.vicinity(-3), "before is -3"),
    },
    "Sampler": {
        "nothing": (lambda: Sampler(), "'rule'"),
        "a misspelt field": (lambda: Sampler(threshold(), temp=1.0), "'temp'"),
        "a temperature as a text": (
            lambda: sample(sampler=Sampler(threshold(), temperature="x")), "temperature is 'x'"),
        "a temperature of -1": (lambda: sample(sampler=Sampler(threshold(), temperature=-1)), "temperature is -1"),
        "drafts as a text": (lambda: sample(sampler=Sampler(threshold(), speculate="x")), "sampler.speculate is 'x'"),
        "drafts of -1": (lambda: sample(sampler=Sampler(threshold(), speculate=-1)), "sampler.speculate is -1"),
        "drafts of 1.5": (lambda: sample(sampler=Sampler(threshold(), speculate=1.5)), "sampler.speculate is 1.5"),
        "a number as processor": (lambda: Sampler(threshold(), (5,)), r"sampler.processors\[0\] is 5"),
        "processors None": (lambda: Sampler(threshold(), None), "sampler.processors is None"),
        "a rule as constraint": (lambda: Sampler(threshold(), allow=(threshold(),)), r"sampler.allow\[0\]"),
        "a function as stop": (lambda: Sampler(threshold(), stopping=rule), "sampler.stopping is <function"),
        "a stop without its call": (
            lambda: Sampler(threshold(), stopping=mj.stopping.steady), "steady without its call"),
        "a class as rule": (lambda: Sampler(mj.Rule), "sampler.rule is <class"),
    },
    "rules": {
        "a text": (lambda: threshold("0.9"), r"threshold\(p=\) is '0.9'"),
        "None": (lambda: threshold(None), r"threshold\(p=\) is None"),
        "nan": (lambda: threshold(float("nan")), r"threshold\(p=\) is nan"),
        "True": (lambda: threshold(True), r"threshold\(p=\) is True"),
        "a list with a text": (lambda: threshold([0.9, "x"]), r"threshold\(p=\) is \[0.9, 'x'\]"),
        "a complex number": (lambda: threshold(1j), r"threshold\(p=\) is 1j"),
        "an empty list": (lambda: threshold([]), r"threshold\(p=\) is array\(\[\]"),
        "too many": (lambda: threshold(0.9, 0.8), r"threshold\(\) arguments is"),
        "one twice": (lambda: threshold(0.9, p=0.8), r"threshold\(\) argument"),
        "a rule that does not exist": (lambda: mj.rules.treshold(0.9), "no rule is called 'treshold'"),
        "a factor of -1": (lambda: mj.rules.factor(-1), r"factor\(f=\) is -1"),
        "an algorithm temperature of -1": (lambda: mj.rules.maskgit_plus(-1), r"maskgit_plus\(alg_temp=\) is -1"),
        "an id outside of the vocabulary": (lambda: sample(sampler=mj.rules.expand(expand=999)), "expand"),
        "parameters of other rows": (lambda: sample(sampler=threshold([0.5, 0.9])), "shape of p"),
        "parameters of a matrix": (lambda: sample(sampler=threshold(np.ones((1, 2)))), "p"),
        "one_of nothing": (lambda: mj.rules.one_of([]), "one_of"),
        "one_of a number": (lambda: mj.rules.one_of([5]), "one_of"),
        "one_of a rule": (lambda: mj.rules.one_of(threshold()), "one_of"),
        "one_of factories": (lambda: mj.rules.one_of([threshold, threshold]), "one_of|its call"),
        "effects of accept": (
            lambda: sample(sampler=lambda key, view, memory: (mj.rules.accept(view, True), memory)),
            "which of mj.rules.accept"),
        "propose another length": (
            lambda: sample(sampler=lambda key, view, memory: (mj.rules.propose(view, view.canvas[:2]), memory)),
            "canvas of mj.rules.propose",
        ),
        "propose a list": (
            lambda: sample(sampler=lambda key, view, memory: (mj.rules.propose(view, [1, 2]), memory)),
            "canvas of mj.rules.propose",
        ),
    },
    "processors, stopping": {
        "top_k 0": (lambda: mj.processors.top_k(0), r"top_k\(k=\) is 0"),
        "top_k 1.5": (lambda: mj.processors.top_k(1.5), r"top_k\(k=\) is 1.5"),
        "min_p 2": (lambda: mj.processors.min_p(2), r"min_p\(p=\) is 2"),
        "a temperature of -1": (lambda: mj.processors.temperature(-1), r"temperature\(t=\) is -1"),
        "a repetition of 0": (lambda: mj.processors.repetition(0), r"repetition\(p=\) is 0"),
        "a bias as a number": (lambda: mj.processors.bias(5), "bias.* is 5"),
        "a ban of a text": (lambda: mj.processors.ban("x"), "ban.* is 'x'"),
        "a ban of a negative id": (lambda: mj.processors.ban([-1]), "-1"),
        "a ban outside of the vocabulary": (
            lambda: sample(sampler=Sampler(threshold(), (mj.processors.ban([999]),))), "999"),
        "allow as a list of ids": (lambda: mj.processors.allow([5, 6]), "allow"),
        "allow of a negative position": (lambda: mj.processors.allow({-1: [5]}), "-1"),
        "a processor that does not exist": (lambda: mj.processors.topp(0.9), "no logits processor is called 'topp'"),
        "a stop that does not exist": (lambda: mj.stopping.stedy(), "no stopping criterion is called 'stedy'"),
        "steady of nan": (lambda: mj.stopping.steady(float("nan")), r"steady\(entropy=\) is nan"),
        "stalled for -1": (lambda: mj.stopping.stalled(-1), r"stalled\(patience=\) is -1"),
    },
    "decorators": {
        "a misspelt field of a rule": (lambda: mj.rule(nosuch=1)(rule), "nosuch"),
        "a field of another kind": (
            lambda: mj.logits_processor(init=lambda c, v: ())(lambda logits, view: logits), "init"),
        "a misspelt field of a stop": (
            lambda: mj.stopping_criterion(noise="uniform")(lambda view, proposal, memory: (True, memory)), "noise"),
        "a name as a number": (lambda: mj.rule(name=5)(rule), "name of a rule is 5"),
        "a name that is taken": (lambda: mj.rule(name="threshold")(rule), "name is 'threshold'"),
        "a source as a number": (lambda: mj.rule(source=5)(rule), "source of a rule is 5"),
        "init as a number": (lambda: mj.rule(init=5)(rule), "init of a rule is 5"),
        "a temperature as a text": (lambda: mj.rule(temperature="x")(rule), "temperature of a rule is 'x'"),
        "leave_one_out as a text": (lambda: mj.rule(leave_one_out="no")(rule), "leave_one_out of a rule is 'no'"),
        "needs_logits as a number": (
            lambda: mj.logits_processor(needs_logits=5)(lambda logits, view: logits), "needs_logits"),
        "noise of a mask": (lambda: mj.rule(noise="masked")(rule), "noise of a rule is 'masked'"),
        "noise as a list": (lambda: mj.rule(noise=["absorbing"])(rule), "noise of a rule is"),
        "a name by position": (lambda: mj.rule("mine"), "function of a rule is 'mine'"),
        "two positions": (lambda: mj.rule(rule, rule), "positional"),
        "a class": (lambda: mj.rule(dict), "function of a rule|arguments of the rule"),
        "a range out of order": (lambda: mj.rules.Between(1, 0), "1"),
        "a range of texts": (lambda: mj.rules.AtLeast("0"), "'0'"),
        "a rule that returns None": (
            lambda: sample(sampler=lambda key, view, memory: None), "what the rule <lambda> returned is 'None'"),
        "a rule that returns a list": (
            lambda: sample(sampler=lambda key, view, memory: [mj.rules.accept(view, view.masked), memory]),
            "what the rule",
        ),
    },
    "decoder": {
        "no slots": (lambda: mj.decoder(model()), "'slots'"),
        "slots beyond the context": (lambda: decoder(slots=257), r"slots is 257; allowed: .*\.\.256"),
        "a name as model": (lambda: decoder("nano"), "lm is 'nano'"),
        "a plan as sampler": (lambda: decoder(sampler=mj.Plan()), "sampler is Plan"),
        "a refresh of an exact cache": (lambda: decoder(plan=mj.Plan(refresh=mj.Refresh())), "plan.refresh is"),
        "a rule of other noise": (lambda: decoder(model(kind="uniform"), sampler=mj.rules.wino()), "'wino'"),
        "a rule without its call": (lambda: decoder(sampler=threshold), "threshold without its call"),
        "an id outside of the vocabulary": (lambda: decoder(sampler=mj.rules.expand(expand=999)), "999"),
        "a temperature": (lambda: decoder(temperature=1.0), "'temperature'"),
        "ids without a key": (lambda: decoder().init(tiny().params, [[5]]), "'key'"),
        "ids as a text": (lambda: init("x"), "ids is 'x'"),
        "ids of one row": (lambda: init([5, 6]), r"ids is 'int32\[2\]'"),
        "ids of floats": (lambda: init([[0.5]]), r"ids is 'float32\[1, 1\]'"),
        "ids of several lengths": (lambda: init([[5], [5, 6]]), r"ids is \[\[5\], \[5, 6\]\]"),
        "ids outside of the vocabulary": (lambda: init([[320]]), "ids.* 320"),
        "more ids than slots": (lambda: init([[5] * 33]), "ids is '33 tokens'"),
        "keys of other rows": (lambda: init(key=jax.random.split(jax.random.key(0), 3)), "key is"),
        "given of other shape": (lambda: init(given=jnp.ones((1, 3), bool)), r"given is 'bool\[1, 3\]'"),
        "given of numbers": (lambda: init(given=jnp.ones((1, 2), int)), "given is 'int32"),
        "parameters of other rows": (lambda: init(made=decoder(sampler=threshold([0.5, 0.9]))), "shape of p"),
        "params None": (lambda: decoder().init(None, [[5]], key=jax.random.key(0)), "params is None"),
        "a number as state": (lambda: decoder().run(tiny().params, 5), "state is 5"),
        "a number as state of a step": (lambda: decoder().step(tiny().params, 5), "state is 5"),
        "None as state": (lambda: decoder().run(tiny().params, None), "state is None"),
        "a number as state of an answer": (lambda: decoder().answer(5), "state is 5"),
        "passes 0": (lambda: decoder().run(tiny().params, init(), passes=0), "passes is 0"),
        "passes as a text": (lambda: decoder().run(tiny().params, init(), passes="3"), "passes is '3'"),
        "a state of another decoder": (
            lambda: decoder(slots=16, plan=mj.Plan(block=4)).run(tiny().params, init()), "state is"),
        "a fork of a row that does not exist": (
            lambda: decoder().fork(init(), [1], jax.random.key(0)), r"rows is \[1\]"),
        "a fork of floats": (lambda: decoder().fork(init(), [0.5], jax.random.key(0)), r"rows is \[0.5\]"),
        "a fork without a key": (lambda: decoder().fork(init(), [0], 3), "key is 3"),
        "a fork of a number": (lambda: decoder().fork(5, [0], jax.random.key(0)), "state is 5"),
        "params of another size": (
            lambda: mj.decoder(tiny(), slots=32).run(jax.tree.map(lambda x: x[..., :3], tiny().params), init()),
            "params is",
        ),
        "rows of a function that end before its slots": (
            lambda: mj.decoder(own(), slots=9).init(jnp.eye(12), [[1]], max_tokens=4, key=jax.random.key(0)),
            "lengths plus max_tokens is 5|lengths plus max_tokens is .*5",
        ),
    },
    "cache policies, lookahead": {
        "lookahead with a refresh": (
            lambda: sample(lm=model("bidirectional"), plan=mj.Plan(lookahead=2, refresh=mj.Refresh.dual())),
            "plan.lookahead is 2",
        ),
        "a policy without its call": (
            lambda: sample(lm=model("bidirectional"), plan=mj.Plan(refresh=mj.cache_refresh.dkv_decode)), "refresh is",
        ),
        "a Refresh of a model of blocks": (lambda: sample(plan=mj.Plan(refresh=mj.Refresh.dual())), "plan.refresh is"),
        "a policy of a function": (
            lambda: mj.sample(own(), [1], max_tokens=4, plan=mj.Plan(refresh=mj.cache_refresh.dkv_decode())),
            "plan.refresh is",
        ),
        "a policy of remasking by leave-one-out": (
            lambda: sample(
                lm=model("bidirectional"), sampler=mj.rules.wino(), plan=mj.Plan(refresh=mj.cache_refresh.dkv_decode())
            ),
            "plan.refresh is",
        ),
        "every 0": (lambda: mj.cache_refresh.dkv_decode(0), r"dkv_decode\(every=\) is 0"),
        "a list of numbers": (lambda: mj.cache_refresh.dkv_decode([2, 3]), r"dkv_decode\(every=\)"),
        "a misspelt parameter": (lambda: mj.cache_refresh.elastic_cache(gama=0.9), "'gama'"),
        "a function of two arguments": (
            lambda: mj.cache_refresh.cache_policy(lambda key, view: None), r"arguments of the cache policy"),
        "a misspelt field": (lambda: mj.cache_refresh.cache_policy(drifts=True)(rule), "'drifts'"),
        "drift as a text": (lambda: mj.cache_refresh.cache_policy(drift="no")(rule), "drift of a cache policy is 'no'"),
        "limit as a number": (lambda: mj.cache_refresh.cache_policy(limit=8)(rule), "limit of a cache policy is 8"),
        "a policy that returns None": (
            lambda: sample(
                lm=tiny("bidirectional"),
                plan=mj.Plan(refresh=mj.cache_refresh.cache_policy(lambda key, view, memory: None)()),
            ),
            "cache policy",
        ),
        "a policy that decides by a traced value": (
            lambda: sample(
                lm=tiny("bidirectional"),
                plan=mj.Plan(
                    refresh=mj.cache_refresh.cache_policy(lambda key, view, memory: (view.masked if view.step else 0))()
                ),
            ),
            "cache policy",
        ),
        "counts of other ids": (lambda: sample(sampler=mj.rules.pc_sampler([1.0, 2.0])), "counts"),
        "counts as a text": (lambda: mj.rules.pc_sampler("x"), "counts"),
        "counts of nan": (lambda: mj.rules.pc_sampler([float("nan")] * 320), "counts"),
        "delimiters outside of the vocabulary": (lambda: sample(sampler=mj.rules.adablock(delimiters=999)), "999"),
    },
    "rollout, search": {
        "n 0": (lambda: mj.rollout(model(), "x", n=0), "n is 0"),
        "no prompt": (lambda: mj.rollout(model()), "'prompt'"),
        "an empty text": (lambda: mj.rollout(model(), ""), "prompt is ''"),
        "a name as model": (lambda: mj.rollout("nano", "x"), "lm is 'nano'"),
        "max_tokens 0": (lambda: mj.rollout(model(), "x", max_tokens=0), "max_tokens is 0"),
        "a reward as a number": (lambda: mj.rollout(model(), "x", reward=5), "reward is 5"),
        "a temperature of -1": (lambda: mj.rollout(model(), "x", temperature=-1), "temperature is -1"),
        "a temperature as a text": (lambda: mj.rollout(model(), "x", temperature="1"), "temperature is '1'"),
        "a seed as a text": (lambda: mj.rollout(model(), "x", seed="0"), "seed is '0'"),
        "a stop": (lambda: mj.rollout(model(), "x", stop="y"), "'stop'"),
        "no reward": (lambda: mj.best_of_n(model(), "x"), "'reward'"),
        "a reward of best_of_n as a text": (lambda: mj.best_of_n(model(), "x", reward="length"), "reward is 'length'"),
        "n of best_of_n as a text": (lambda: mj.best_of_n(model(), "x", reward=len, n="8"), "n is '8'"),
        "a reward of one number": (
            lambda: mj.best_of_n(tiny(), "x", reward=lambda prompts, texts: 1.0, n=2, max_tokens=4),
            "what reward returned is",
        ),
        "a reward of texts": (
            lambda: mj.best_of_n(tiny(), "x", reward=lambda prompts, texts: texts, n=2, max_tokens=4),
            "what reward returned is",
        ),
        "a reward of nan": (
            lambda: mj.best_of_n(tiny(), "x", reward=lambda prompts, texts: [float("nan")] * 2, n=2, max_tokens=4),
            "what reward returned is",
        ),
        "a scale of -1": (lambda: mj.smc(model(), "x", reward=len, scale=-1), "scale.* -1"),
        "a scale as a text": (lambda: mj.smc(model(), "x", reward=len, scale="x"), "scale.* 'x'"),
        "an ess of 2": (lambda: mj.smc(model(), "x", reward=len, ess=2), "ess.* 2"),
        "every 0": (lambda: mj.smc(model(), "x", reward=len, every=0), "every is 0"),
        "temper -1": (lambda: mj.smc(model(), "x", reward=len, temper=-1), "temper.* -1"),
        "a twist that is a rule": (lambda: mj.smc(model(), "x", reward=len, twist=threshold()), "twist is"),
        "a reward that is no function": (lambda: mj.smc(model(), "x", reward=None), "reward is None"),
        "answers of other rows": (lambda: mj.rl.answer_batch(model(), ["x", "y"], ["a"]), "prompts is 'a list of 2'"),
        "no answers": (lambda: mj.rl.answer_batch(model(), "x", []), r"answers is \[\]"),
        "a size below the answers": (lambda: mj.rl.answer_batch(model(), "x", "value", size=0), "size is 0"),
        "answers of uniform noise": (lambda: mj.rl.answer_batch(model(kind="uniform"), "x", "y"), "lm is"),
        "steps of other lengths": (
            lambda: mj.rl.answer_batch(model(), "x", [[5, 6]], commit_step=[[0]]), "commit_step"),
        "an unknown estimator": (lambda: log_probs(estimator="elbow"), "estimator is 'elbow'; allowed: diffu_grpo"),
        "ratios out of order": (lambda: log_probs(estimator="coupled_grpo", ratios=(0.8, 0.2)), "ratios is"),
        "ratios as a number": (lambda: log_probs(estimator="coupled_grpo", ratios=0.5), "ratios is 0.5"),
        "a rollout as batch": (lambda: log_probs(batch=5), "batch is 'int'"),
        "no steps of the trajectory": (
            lambda: log_probs(estimator="trajectory", key=None), "commit_step|passes|batch"),
        "steps as a number": (lambda: mj.rl.answer_batch(model(), "x", [[5, 6]], commit_step=3), "commit_step is 3"),
        "a size of a function without an end": (lambda: mj.rl.answer_batch(own(), [1], [[2]], size=4), "size is 4"),
        "answers of several lengths of a function": (
            lambda: mj.rl.answer_batch(own(), [1], [[2], [3, 4]]), "lengths of the prompts with their answers"),
    },
    "mesh": {
        "devices that are missing": (lambda: mj.mesh(data=3), "mesh is .* number of devices"),
        "two sizes left": (lambda: mj.mesh(data=-1, fsdp=-1), "mesh.fsdp is -1"),
        "devices of texts": (lambda: mj.mesh(devices=["cpu"]), "devices is|devices.0. is"),
        "an axis that does not exist": (lambda: mj.mesh(model=2), "'model'"),
    },
    "train": {
        "a number": (lambda: mj.train(5), "config is 5"),
        "a name": (lambda: mj.train("nano"), "config is 'nano'"),
        "nothing": (lambda: mj.train(), "'config'"),
        "a config of nothing": (lambda: mj.TrainConfig(), "'name'"),
        "a misspelt field": (lambda: recipe(step=3), "'step'"),
        "an objective without its call": (
            lambda: recipe(objective=__import__("mercury_jax.training.objectives", fromlist=["x"]).masked_elbo),
            "Call it",
        ),
        "a batch that does not divide": (lambda: recipe(batch=16, accumulate=3), "accumulate is 3"),
        "a sampler as a text": (lambda: mj.train(recipe(sampler="threshold")), "sampler is 'threshold'"),
        "a tokenizer that does not exist": (lambda: mj.train(recipe(tokenizer="nosuch.model")), "nosuch.model"),
        "an init that does not exist": (lambda: mj.train(recipe(init="nosuch")), "nosuch"),
        "heads that do not divide": (lambda: mj.ModelConfig(vocab=9, heads=3, kv_heads=2), "kv_heads is 2"),
        "a mask outside of the vocabulary": (lambda: mj.ModelConfig(vocab=9, mask=9), "mask is 9"),
        "an unknown pattern": (lambda: mj.ModelConfig(vocab=9, pattern="full"), "pattern is 'full'"),
        "a context of 0": (lambda: mj.ModelConfig(vocab=9, context=0), "context is 0"),
        "an eos of -2": (lambda: mj.ModelConfig(vocab=9, eos=-2), "eos is -2"),
        "a share of 1": (lambda: mj.NoiseConfig(kind="hybrid", uniform=1.0), "uniform is 1.0"),
    },
    "tokenizer": {
        "a file that does not exist": (lambda: mj.Tokenizer.load("nosuch"), "nosuch"),
        "bytes of something else": (lambda: mj.Tokenizer(b"x"), "proto"),
        "a text": (lambda: mj.Tokenizer("x"), "proto"),
        "a vocabulary of 10": (lambda: mj.Tokenizer.train(["a b"], 10), "vocab_size is 10"),
        "a vocabulary as a text": (lambda: mj.Tokenizer.train(["a b"], "300"), "vocab_size is '300'"),
        "texts as a text": (lambda: mj.Tokenizer.train("a b", 300), "texts is 'a b'"),
        "texts of numbers": (lambda: mj.Tokenizer.train([5], 300), r"texts"),
        "a number to encode": (lambda: tiny().tokenizer.encode(5), "text"),
        "an id that does not exist": (lambda: tiny().tokenizer.decode([9999]), "9999"),
    },
    "from_function": {
        "a mask outside of the vocabulary": (lambda: own(mask=12), r"mask is 12; allowed: an id in 0\.\.11"),
        "a mask under uniform noise": (lambda: own(noise="uniform"), "mask is 10; allowed: None"),
        "an unknown noise": (lambda: own(noise="gauss"), "noise is 'gauss'; allowed: absorbing, uniform, hybrid"),
        "another vocab": (lambda: own(vocab=11), r"'float32\[2, 8, 12\]'; allowed: .*\[2, 8, 11\]"),
        "no context": (lambda: mj.from_function(table, jnp.eye(12), vocab=12, mask=10), "'context'"),
        "a block beyond the context": (lambda: own(block=17), r"block is 17; allowed: .*1\.\.16"),
        "a forbidden id that does not exist": (lambda: own(forbidden=[12]), "forbidden is 12"),
        "every id forbidden": (lambda: own(mask=None, noise="uniform", forbidden=range(12)), "forbidden"),
        "a Flax module": (lambda: own(apply=nn.Dense(12)), "apply"),
        "a class": (lambda: own(apply=nn.Dense), "apply is <class"),
        "a function of one argument": (
            lambda: own(apply=lambda tokens: tokens), r"arguments of apply is '\(tokens\)'"),
        "a further argument": (
            lambda: own(apply=lambda params, tokens, rngs: params[tokens]), "argument rngs of apply"),
        "positions alone": (lambda: own(apply=lambda p, t, positions: p[t]), "argument positions of apply"),
        "two ways to hide padding": (
            lambda: own(apply=lambda p, t, lengths, attention_mask: p[t]), "arguments of apply"),
        "params of a function": (lambda: own(params={"f": jnp.sin, "w": jnp.eye(12)}), r"params\['f'\] is"),
        "params of another shape": (lambda: own(params=jnp.eye(12)[:, :5]), r"'float32\[2, 8, 5\]'"),
        "logits of whole numbers": (lambda: own(apply=lambda p, t: p[t].astype(int)), r"'int32\[2, 8, 12\]'"),
        "logits and a state": (lambda: own(apply=lambda p, t: (p[t], {})), "returned is 'tuple'"),
        "no logits": (lambda: own(apply=lambda p, t: None), "returned is 'NoneType'"),
        "logits of one position": (lambda: own(apply=lambda p, t: p[t][:, 0]), r"'float32\[2, 12\]'"),
        "numpy": (lambda: own(apply=lambda p, t: np.asarray(p)[np.asarray(t)]), "cannot be compiled: it gives"),
        "an if": (
            lambda: own(apply=lambda p, t: p[t] if t.sum() > 0 else p[t] + 1), "cannot be compiled: it decides"),
        "an error of its own": (lambda: own(apply=lambda p, t: p["w"][t]), "apply.* fails: "),
        "variables of another module": (
            lambda: own(apply=nn.Dense(12).apply, params={"params": {"kernel": jnp.eye(3)}}), "apply.* fails: "),
        "the class of a tokenizer": (lambda: own(tokenizer=Letters), "tokenizer is <class"),
        "a tokenizer of more ids": (lambda: own(tokenizer=Letters(vocab_size=13)), "vocab is 12; allowed: 13"),
        "a tokenizer that encodes to texts": (
            lambda: mj.sample(own(tokenizer=Letters(ids=["a"])), "ab", max_tokens=2),
            r"tokenizer.encode returned is \['a'\]",
        ),
        "a tokenizer of other ids": (
            lambda: mj.sample(own(tokenizer=Letters(ids=[99])), "ab", max_tokens=2), r"returned is \[99, 99\]"),
        "a text without a tokenizer": (lambda: mj.sample(own(), "ab", max_tokens=2), "prompt is 'ab'; allowed: ids"),
        "beyond the context": (lambda: mj.sample(own(), [1, 2], max_tokens=15), "max_tokens is 15"),
        "a refresh": (
            lambda: mj.sample(own(), [1], max_tokens=4, plan=mj.Plan(refresh=mj.Refresh.dual())), "plan.refresh is"),
        "leave-one-out predictions": (
            lambda: mj.sample(own(), [1], max_tokens=4, sampler=mj.rules.wino()), "sampler.rule is 'wino'"),
        "rows of several lengths": (
            lambda: mj.sample(own(), [[1], [1, 2]], max_tokens=4), r"lengths of the rows is \[5, 6\]"),
    },
}  # fmt: skip

# Values of one argument: the error must say `argument is value`.
VALUES: dict[Callable[..., Any], dict[str, tuple[Any, ...]]] = {
    sample: dict(
        max_tokens=(0, -1, 1.5, "8", None, True), seed=(-1, 1.5, "0", None, 2 ** 31),
        temperature=(-1, math.nan, math.inf, {}), logprobs=(-1, 101, True), passes=(1.5, "3"),
        guidance=(math.nan, [1.0, 2.0], True), negative=("y",), history=(5,), keep=("no",), logit_bias=(5,),
        sampler=(5, [threshold()]), plan=(8,), mesh=(jax.devices(),), schema=(5, "json"),
        lm=(tiny().model, {"embed": jnp.ones(3)}), n=(0, 1.5, "2", [1, 2], True),
        stop=(5, "", ["x", ""], b"x"),
    ),
    stream: dict(
        stop=("",), n=(0,), every=(0, 1.5, True), seed=("0",), plan=({"steps": 3},), effort=("none",),
        max_tokens=(256,),
    ),
    mj.presets.llada: dict(
        remasking=("low",), steps=("64",), cfg_scale=(-1, "1"), gen_length=(0,), logits_eos_inf=(2,),
    ),
    mj.presets.dream: dict(
        alg=("topk",), top_p=(2.0, "0.9"), eps=("x",),
    ),
    mj.presets.fast_dllm: dict(
        dual_cache=(True,), use_cache=(1,),
    ),
    mj.Hole: dict(
        most=(0,),
    ),
    infill: dict(
        seed=("0",), sampler=("threshold",), mesh=(4,),
    ),
    edit: dict(
        spans=([], "x"), prompt=("",), seed=(1.5,), temperature=(-1,),
    ),
    score: dict(
        samples=(0, 1.5, "3"), seed=(-1,),
    ),
    logits: dict(
        time=(0.5,),
    ),
    mj.load: dict(
        dtype=("float7",), quantise=("int3", 8), kv=("2bit",), mask=(-1, "x", 7), mesh=(4,), progress=(True,),
    ),
    mj.Plan: dict(
        block=(0, 2.5, True), times=((0.5, 1.0), [1.0], (1.5, 0.0)), whole_blocks=(1,),
        steps=(-1, [1, 2], math.nan, math.inf), revise=(-1, None), refresh=(True,),
        lookahead=(-1, 1.5, "2", None),
    ),
    mj.Refresh: dict(
        every=(0, 1.5), before=(-1, "1", None), after=(0.5,),
    ),
    mj.rules.klass: dict(
        patience=(1.5,),
    ),
    mj.stopping.steady: dict(
        patience=("2",),
    ),
    decoder: dict(
        slots=(1, "32"), plan=({},), logprobs=(-1,),
    ),
    init: dict(
        lengths=([3], [1, 2], [0.5]), max_tokens=(-1, 31, "4"), key=(0,),
    ),
    mj.cache_refresh.dllm_cache: dict(
        ratio=(2,),
    ),
    mj.rules.dilated: dict(
        base=(1,),
    ),
    log_probs: dict(
        ratios=((0.2, 0.8),), samples=(0,), mask_prompt=(2.0,), key=(None, 3),
    ),
    mj.mesh: dict(
        data=(0, 1.5, "2"), tensor=(None, True), devices=([], 4),
    ),
    recipe: dict(
        name=("a b",), model=(5, {"vocab": 5}), objective=("masked",), data=("notes.txt",),
        noise=("absorbing",), optim=(0.001,), steps=(0, "100", 1.5), ema=(1.0,), seed=(-1,),
        sample_prompts=("x",),
    ),
    mj.ModelConfig: dict(
        vocab=("9",),
    ),
    mj.NoiseConfig: dict(
        kind=("gauss",), schedule=("sqrt",), power=(0, "2"),
    ),
    own: dict(
        mask=(None, "[MASK]"), vocab=("12",), context=(0,), eos=(12, 10), forbidden=("x",),
        alignment=("next",), name=(5,), check=(2,), apply=(5,), tokenizer=(5,),
    ),
}  # fmt: skip
for _call, _arguments in VALUES.items():
    WRONG[f"{_call.__name__}: one argument"] = {
        f"{name} {value!r}": (
            functools.partial(_call, **{name: value}), rf"\b{name}(=\))? is {re.escape(repr(value))}"
        )
        for name, values in _arguments.items()
        for value in values
    }  # fmt: skip


def answer(call: Call, said: str) -> str:
    """What is wrong with the answer to a wrong call; "" if nothing is."""
    try:
        call()
    except Computed:
        return "a pass was traced before the call was refused"
    except Exception as error:
        return complaint(error, said)
    return "accepted"


def complaint(error: Exception, said: str) -> str:
    """What is wrong with an error as the answer to a wrong call; "" if nothing is."""
    text = str(error)
    if isinstance(error, TypeError) and type(error) is TypeError and SIGNATURE.search(text):
        return "" if re.search(said, text) else f"does not say {said!r}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} of {Path(frame.filename).name}:{frame.lineno}"
    if (
        type(error) is AttributeError
        and re.search("there are|it has|is the nearest", text)
        and frame.filename.startswith(PACKAGE)
    ):
        return (
            "" if re.search(said, text) else f"does not say {said!r}: {text}"
        )  # Python's kind for an unknown name
    if type(error) not in KINDS or not frame.filename.startswith(PACKAGE):
        return f"{where}: {text[:200]}"
    if not re.search(said, text, re.DOTALL):
        return f"does not say {said!r}: {where}: {text[:300]}"
    return (
        ""
        if re.search(r"allowed|must|cannot|refused|fails|is missing|no complete", text)
        else f"does not say what is allowed: {text[:300]}"
    )


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for group, cases in WRONG.items():
        if chosen and not any(group.startswith(word) for word in chosen):
            continue
        for name, (call, said) in cases.items():
            found = answer(call, said)
            print(f"{'ok' if not found else 'WRONG':6}{group}: {name}{found and ': '}{found}", flush=True)
