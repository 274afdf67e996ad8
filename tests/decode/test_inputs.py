"""Wrong calls: refused by name before anything is computed, whatever the argument."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import mercury_jax as mj
from mercury_jax.types import Proposal
from tests.tiny import tiny


def sampled(prompt="x", lm=None, **more):
    return mj.sample(tiny() if lm is None else lm, prompt, max_tokens=4, **more)


def rule_that(change, **kind):
    """A rule that accepts everything, its return changed."""

    @mj.rule(**kind)
    def mine(key, view, memory):
        return change(mj.rules.accept(view, view.masked), memory)

    return mine()


@mj.logits_processor
def narrow(logits, view):
    return logits[:, :5]


floats = rule_that(lambda proposal, memory: (proposal._replace(canvas=proposal.canvas + 0.5), memory))
short = rule_that(lambda proposal, memory: (proposal._replace(canvas=proposal.canvas[:2]), memory))
alone = rule_that(lambda proposal, memory: proposal)
forgets = rule_that(lambda proposal, memory: (proposal, ()), init=lambda canvas, vocab: jnp.zeros(3))
other = rule_that(lambda proposal, memory: ((proposal.canvas, proposal.answer), memory))
stops_twice = mj.stopping_criterion(lambda view, proposal, memory: (proposal.canvas > 0, memory))
Sampler, threshold, top_p = mj.Sampler, mj.rules.threshold, mj.processors.top_p


def deciding(decide):
    """A rule that does something with what it sees, before it accepts everything."""

    @mj.rule
    def mine(key, view, memory):
        return mj.rules.accept(view, decide(view)), memory

    return mine()


def accepts_if(view):
    return view.masked if view.stats.entropy.mean() > 1 else ~view.masked


@mj.logits_processor
def iffy(logits, view):
    return logits * 2 if view.step > 3 else logits


@mj.logits_processor
def half(logits, view):
    return logits.astype(jnp.float16)


@mj.stopping_criterion
def hasty(view, proposal, memory):
    return bool(view.step > 3), memory


def starting(init):
    return rule_that(lambda proposal, memory: (proposal, memory), init=init)


def broken(change):
    return dataclasses.replace(tiny(), params=change(tiny().params))


WRONG = {
    # prompts
    "bytes": (lambda: sampled(b"def x"), "prompt is b'def x'"),
    "list of bytes": (lambda: sampled([b"def x"]), r"prompt\[0\] is b'def x'"),
    "float ids": (lambda: sampled([5.0, 6.5]), r"prompt is \[5.0, 6.5\]"),
    "float array": (lambda: sampled(np.ones(3)), r"prompt is 'float64\[3\]'"),
    "3-D array": (lambda: sampled(np.ones((1, 2, 3), int)), r"prompt is 'int64\[1, 2, 3\]'"),
    "bool ids": (lambda: sampled([True, False]), "prompt is"),
    "text for an id": (lambda: sampled([5, "7"]), "prompt is"),
    # parameters of parts
    "threshold 1.5": (lambda: threshold(1.5), r"threshold\(p=\) is 1.5; allowed: a number in \[0, 1\]"),
    "threshold -1": (lambda: threshold(-1), r"threshold\(p=\) is -1"),
    "a row out of range": (lambda: threshold(np.array([0.5, 1.5])), r"threshold\(p=\) is 1.5"),
    "top_p 2": (lambda: top_p(2), r"top_p\(p=\) is 2"),
    "top_k -3": (lambda: mj.processors.top_k(-3), r"top_k\(k=\) is -3; allowed: a whole number, 1 or more"),
    "remdm_rescale 5": (lambda: mj.rules.remdm_rescale(5), r"remdm_rescale\(eta=\) is 5"),
    "one_of 7 of 2": (
        lambda: mj.rules.one_of([threshold(), mj.rules.confidence()], which=7),
        r"one_of\(which=\) is 7; allowed: a whole number in \[0, 1\]",
    ),
    "one_of stops and rules": (
        lambda: mj.rules.one_of([threshold(), mj.stopping.never()]),
        r"one_of parts\[1\]",
    ),
    "parameter of other rows": (lambda: sampled(sampler=threshold(np.array([0.5, 0.9]))), "shape of p"),
    # samplers
    "rule without its call": (lambda: sampled(sampler=threshold), "threshold without its call"),
    "processor without its call": (
        lambda: sampled(sampler=Sampler(threshold(), (top_p,))),
        r"sampler.processors\[0\].*without its call",
    ),
    "processors without a tuple": (
        lambda: sampled(sampler=Sampler(threshold(), top_p(0.9))),
        "sampler.processors is",
    ),
    "parts in the wrong order": (
        lambda: sampled(sampler=Sampler(top_p(0.9), (threshold(),))),
        "sampler.rule",
    ),
    "a processor as sampler": (
        lambda: sampled(sampler=top_p(0.9)),
        "sampler is 'the logits processor top_p'",
    ),
    "a rule as stop": (
        lambda: sampled(sampler=Sampler(threshold(), stopping=threshold())),
        "sampler.stopping",
    ),
    "a name as sampler": (lambda: sampled(sampler="threshold", logit_bias={5: 1.0}), "sampler"),
    # what parts return
    "canvas of floats": (lambda: sampled(sampler=floats), "canvas of the Proposal of the rule mine"),
    "canvas of another length": (lambda: sampled(sampler=short), r"canvas of .* whole numbers \[8\]"),
    "no memory": (lambda: sampled(sampler=alone), "what the rule mine returned"),
    "no proposal": (lambda: sampled(sampler=other), "what the rule mine returned"),
    "memory of another structure": (lambda: sampled(sampler=forgets), "memory of the rule mine"),
    "logits of another shape": (
        lambda: sampled(sampler=Sampler(threshold(), (narrow(),))),
        "the logits processor narrow",
    ),
    "done for each position": (
        lambda: sampled(sampler=Sampler(threshold(), stopping=stops_twice())),
        "done of the stopping criterion",
    ),
    # what parts do with traced values
    "a rule that asks a traced value": (
        lambda: sampled(sampler=deciding(accepts_if)),
        "^the rule mine decides by a traced value in Python .* allowed: jnp.where.* jax.lax.cond",
    ),
    "a rule that counts to a traced value": (
        lambda: sampled(sampler=deciding(lambda view: sum(view.masked for _ in range(view.used)) > 0)),
        "^the rule mine uses a traced value as a Python int",
    ),
    "a rule that uses numpy": (
        lambda: sampled(sampler=deciding(lambda view: np.sort(view.masked))),
        "^the rule mine gives .* to numpy",
    ),
    "a rule that selects by a traced mask": (
        lambda: sampled(sampler=deciding(lambda view: view.masked[view.masked])),
        "^the rule mine selects by a",
    ),
    "a rule that adds other shapes": (
        lambda: sampled(sampler=deciding(lambda view: view.masked & (jnp.arange(5) > 2))),
        "^the rule mine fails: ",
    ),
    "a rule that accepts numbers": (
        lambda: sampled(sampler=deciding(lambda view: view.stats.p_sample)),
        r"^the rule mine fails: which of mj.rules.accept is 'float32\[8\]'; allowed: bool\[8\]",
    ),
    "a processor that asks a traced value": (
        lambda: sampled(sampler=Sampler(threshold(), (iffy(),))),
        "^the logits processor iffy decides by a traced value",
    ),
    "logits of a narrower dtype": (
        lambda: sampled(sampler=Sampler(threshold(), (half(),))),
        r"what the logits processor half returned is 'float16\[8, 320\]'; allowed: logits float32\[8, 320\]",
    ),
    "a stop that asks a traced value": (
        lambda: sampled(sampler=Sampler(threshold(), stopping=hasty())),
        "^the stopping criterion hasty decides by a traced value",
    ),
    "init of other arguments": (
        lambda: sampled(sampler=starting(lambda canvas: canvas)),
        "^init of the rule mine fails: .*2 were given",
    ),
    "a stream refuses at its call": (
        lambda: mj.stream(tiny(), "x", sampler=deciding(accepts_if)),
        "^the rule mine decides by a traced value",
    ),
    # what parts are made of
    "a rule without memory": (
        lambda: mj.rule(lambda key, view: None),
        r"arguments of the rule <lambda> is '\(key, view\)'; allowed: \(key, view, memory\)",
    ),
    "a rule without view": (lambda: mj.rule(lambda key, memory: None), "then parameters"),
    "a rule of any keywords": (
        lambda: mj.rule(lambda key, view, memory, **more: None),
        "arguments of the rule",
    ),
    "arguments in another order": (lambda: mj.rule(lambda view, key, memory: None), "arguments of the rule"),
    "a processor without view": (
        lambda: mj.logits_processor(lambda logits: logits),
        r"logits processor .* allowed: \(logits, view\)",
    ),
    "a stop of two arguments": (
        lambda: mj.stopping_criterion(lambda view, memory: memory),
        r"stopping criterion .* allowed: \(view, proposal, memory\)",
    ),
    "a rule of a rule": (lambda: mj.rule(threshold), "the rule threshold'; allowed: a function of"),
    "a rule of a number": (lambda: mj.rule(3), "function of a rule is 3"),
    "a stop that is made already": (
        lambda: mj.rule(stopping=mj.stopping.never())(lambda key, view, memory: 0),
        "stopping of a rule",
    ),
    "noise that does not exist": (
        lambda: mj.rule(noise="mask")(lambda key, view, memory: 0),
        "noise of a rule",
    ),
    "a function of two arguments as sampler": (
        lambda: sampled(sampler=lambda key, view: 0),
        "arguments of the rule",
    ),
    "Sampler of a processor": (
        lambda: Sampler(top_p(0.9)),
        "sampler.rule is 'the logits processor top_p'; allowed: a rule",
    ),
    "Sampler of a stop": (
        lambda: Sampler(mj.stopping.never()),
        "sampler.rule is 'the stopping criterion never'",
    ),
    "Sampler without its call": (lambda: Sampler(threshold), "threshold without its call"),
    "misspelt parameter of a rule": (
        lambda: threshold(pp=0.9),
        r"threshold\(\) argument is 'pp'; allowed: p is the nearest; all: p",
    ),
    "misspelt parameter of a processor": (
        lambda: mj.processors.top_p(q=0.9),
        r"top_p\(\) argument is 'q'; allowed: p, crossing",
    ),
    "misspelt parameter of a stop": (
        lambda: mj.stopping.steady(patiense=2),
        "allowed: patience is the nearest; all: entropy, patience",
    ),
    "a parameter of none": (
        lambda: mj.rules.confidence(p=0.9),
        r"confidence\(\) argument is 'p'; allowed: none",
    ),
    # models
    "a name as model": (lambda: mj.sample("nano", "x"), "lm is 'nano'"),
    "a model in edit": (lambda: mj.edit("nano", "x"), "lm is 'nano'"),
    "a model in infill": (lambda: mj.infill("nano", ["x", mj.Hole(2)]), "lm is 'nano'"),
    "a model in score": (lambda: mj.score("nano", "x", "y"), "lm is 'nano'"),
    "a model in logits": (lambda: mj.logits("nano", [5]), "lm is 'nano'"),
    "no params": (lambda: sampled(lm=broken(lambda params: None)), "lm.params is None"),
    "missing params": (
        lambda: sampled(lm=broken(lambda p: {k: v for k, v in p.items() if k != "embed"})),
        "lm.params is",
    ),
    "params of another size": (
        lambda: sampled(lm=broken(lambda p: jax.tree.map(lambda x: x[..., :3], p))),
        "lm.params is",
    ),
    # other arguments
    "plan as a dict": (lambda: sampled(plan={}), "plan is {}"),
    "plan by position": (lambda: mj.Plan(8), r"Plan\(\) argument is 8"),
    "refresh as a text": (lambda: mj.Plan(refresh="dual"), "refresh is 'dual'"),
    "block as a text": (lambda: mj.Plan(block="8"), "block is '8'"),
    "mesh as a number": (lambda: sampled(mesh=4), "mesh is 4"),
    "mesh of other axes": (
        lambda: sampled(mesh=jax.make_mesh((1,), ("rows",))),
        "mesh is 'axes rows'; allowed: .* data",
    ),
    "state as a number": (lambda: sampled(state=5), "state is 5"),
    "state in stream": (lambda: mj.stream(tiny(), "x", state=5), "state is 5"),
    "guidance as a text": (lambda: sampled(guidance="2"), "guidance is '2'"),
    "guidance of other rows": (lambda: sampled(guidance=[1.0, 2.0, 3.0]), "guidance is"),
    "temperature of other rows": (lambda: sampled(temperature=[0.0, 1.0]), "shape of temperature"),
    "temperature as a text": (lambda: sampled(temperature="0"), "temperature is '0'"),
    "effort as a number": (lambda: sampled(effort=3), "effort is 3"),
    "effort out of range": (lambda: sampled(effort=mj.Effort(0, 1.5, 1.0)), "Effort.p is 1.5"),
    "passes 0": (lambda: sampled(passes=0), "passes is 0"),
    "parts as a number": (lambda: mj.infill(tiny(), 5), "parts is 5"),
    "text as floats": (lambda: mj.edit(tiny(), [0.5]), "text"),
    "text as a number": (lambda: mj.edit(tiny(), 5), "text is 5"),
    "spans as a number": (lambda: mj.edit(tiny(), "x", spans=5), "spans is 5"),
    "a rule that deletes in edit": (
        lambda: mj.edit(tiny(), "x", sampler=mj.rules.expand(delete=5)),
        "sampler.rule is 'expand'",
    ),
    "plan in edit": (lambda: mj.edit(tiny(), "x", plan={}), "plan is {}"),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_by_name(call, said):
    with pytest.raises((ValueError, TypeCheckError)) as error:
        call()
    if isinstance(error.value, TypeCheckError):  # with --jaxtyping alone
        pytest.skip("the type checker refuses it first")
    assert re.search(said, str(error.value)), error.value


def test_what_jax_says_of_a_rule_is_the_cause():
    with pytest.raises(ValueError) as error:
        sampled(sampler=deciding(accepts_if))
    assert isinstance(error.value.__cause__, jax.errors.TracerBoolConversionError)


def test_an_error_of_a_rules_own_code_stays_what_it_is():
    with pytest.raises(ZeroDivisionError):
        sampled(sampler=deciding(lambda view: view.masked & (1 / 0)))


@pytest.mark.long
def test_a_sampler_is_checked_once_for_all_values_of_its_parameters():
    calls = []

    @mj.rule
    def counted(key, view, memory, *, p=0.5):
        calls.append(1)
        return mj.rules.accept(view, view.masked & (view.stats.p_sample > p)), memory

    for p in (0.0, 0.1, 0.2):
        mj.sample(tiny(), "x", max_tokens=4, sampler=counted(p), plan=mj.Plan(steps=1))
        first = len(calls) if p == 0.0 else first
    assert len(calls) == first


def test_a_sampler_stays_a_tuple_that_jax_maps_over():
    sampler = Sampler(threshold(0.5), [top_p(0.9)], temperature=0.5)
    twice = jax.tree.map(lambda x: x * 2, sampler)
    assert isinstance(twice, Sampler) and twice.processors[0].params["p"] == 1.8 and twice.temperature == 1.0
    assert sampler._replace(temperature=0.0).rule is sampler.rule


@pytest.mark.long
def test_a_rule_may_return_any_kind_of_whole_numbers():
    small = rule_that(
        lambda proposal, memory: (proposal._replace(canvas=proposal.canvas.astype("int16")), memory)
    )
    plain = rule_that(lambda proposal, memory: (Proposal(*proposal), memory))
    assert sampled(sampler=small).texts == sampled(sampler=plain).texts


@pytest.mark.long
def test_one_temperature_a_row_may_be_a_list():
    lists, arrays = (sampled(["x", "y"], temperature=t, seed=3) for t in ([0.0, 1.0], np.array([0.0, 1.0])))
    assert lists.texts == arrays.texts


@pytest.mark.long
def test_prompts_may_be_arrays_of_jax_or_numpy():
    rows = np.array([[300, 301], [302, 303]])
    want = sampled(rows.tolist()).texts
    assert sampled(rows).texts == sampled(jnp.asarray(rows)).texts == want
    assert sampled(jnp.asarray(rows[1])).texts == sampled([302, 303]).texts
