"""A part is known by its name once it is decorated. Every number that a rule, logits processor or stop takes has a
range, and the check is that range."""

import dataclasses
import inspect
import math
import types
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.config import Finite
from mercury_jax.decode.registration import Probability

KINDS = {
    "rule": (mj.rules, "key, view, memory", "mj.rules.accept(view, view.masked), memory"),
    "logits_processor": (mj.processors, "logits, view", "logits * p"),
    "stopping_criterion": (mj.stopping, "view, proposal, memory", "view.step > p, memory"),
}


def execute(source, module="users_module"):
    """The names that a module of this source defines."""
    space = types.ModuleType(module)
    space.__dict__.update(mj=mj)
    exec(compile(source, f"{module}.py", "exec"), space.__dict__)
    return space


@pytest.fixture(autouse=True)
def clean():
    registries = [mj.rules.ALL, mj.processors.ALL, mj.stopping.ALL]
    before = [dict(x) for x in registries]
    yield
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decorated_function_is_registered_under_its_own_name(kind):
    home, arguments, result = KINDS[kind]
    source = f"@mj.{kind}\ndef users_own({arguments}, p=0.5):\n    return {result}"
    made = execute(source).users_own
    assert home.ALL["users_own"] is made and home.users_own is made
    assert made().name == "users_own"


def test_a_notebooks_cell_may_run_twice_and_its_last_run_counts():
    source = "@mj.rule\ndef users_own(key, view, memory, p={}):\n    return mj.rules.accept(view, view.masked), memory"
    execute(source.format(0.1))
    execute(source.format(0.2))
    assert mj.rules.users_own().params == {"p": 0.2}


def test_a_module_may_be_imported_under_two_names():
    source = "@mj.rule\ndef users_own(key, view, memory):\n    return view, memory"
    for module in ("__main__", "users_own"):
        exec(compile(source, "users_own.py", "exec"), {"mj": mj, "__name__": module})
    assert mj.rules.users_own.__module__ == "users_own"


@pytest.mark.parametrize(
    "decorator", ["@mj.rule", "@mj.rule(noise='absorbing')", "@mj.rule(name='threshold')"]
)
def test_the_name_of_another_modules_rule_is_refused(decorator):
    name = "threshold" if "name" not in decorator else "users_own"
    source = (
        f"{decorator}\ndef {name}(key, view, memory):\n    return mj.rules.accept(view, view.masked), memory"
    )
    with pytest.raises(ValueError, match="mercury_jax.decode.rules.masked defines threshold"):
        execute(source)
    assert mj.rules.threshold().params == {"p": 0.9}


def test_a_function_inside_another_one_is_a_value_only():
    @mj.rule
    def users_own(key, view, memory):
        return mj.rules.accept(view, view.masked), memory

    assert users_own().name == "users_own" and "users_own" not in mj.rules.ALL
    assert (
        mj.rule(lambda key, view, memory: (mj.rules.accept(view, view.masked), memory))().name == "<lambda>"
    )
    assert "<lambda>" not in mj.rules.ALL


def ours(registry):
    """What the package registers; other tests may register more."""
    return {name: make for name, make in registry.items() if make.__module__.startswith("mercury_jax.")}


MAKERS = ours(mj.rules.ALL | mj.processors.ALL | mj.stopping.ALL)
EACH = [(name, parameter) for name, make in MAKERS.items() for parameter in make.params]
CLOSE = 1e-6


def ends(allowed):
    """(numbers that are allowed, numbers that are not), each as near to an end of the range as can be."""
    step = 1 if allowed.integer else CLOSE
    inside, outside = [], [math.nan]
    for end, sign, opened in ((allowed.low, -1, allowed.open_low), (allowed.high, 1, allowed.open_high)):
        if math.isfinite(end):
            (outside if opened else inside).append(end)
            (inside if opened else outside).append(end - sign * step if opened else end + sign * step)
        else:
            (outside if opened or end < 0 else inside).append(end)
    return inside, [*outside, 1.5] if allowed.integer else outside


def test_every_registered_maker_is_walked():
    assert len(ours(mj.rules.ALL)) == 45 and len(EACH) >= 60
    public = {name for name, make in vars(mj.processors).items() if hasattr(make, "params")}
    assert public == set(ours(mj.processors.ALL))
    assert {name for name, make in vars(mj.stopping).items() if hasattr(make, "params")} == set(
        ours(mj.stopping.ALL)
    )


@pytest.mark.parametrize(("name", "parameter"), EACH)
def test_a_number_at_a_closed_end_is_taken_and_one_just_outside_is_refused(name, parameter):
    make = MAKERS[name]
    inside, outside = ends(make.ranges[parameter])
    assert outside and (
        make.params[parameter] is None or make.ranges[parameter].contains(make.params[parameter])
    )
    for value in inside:
        make(**{parameter: value})
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{name}\({parameter}=\) is .*allowed: a (whole )?number"):
            make(**{parameter: value})
    assert f"{parameter}: {make.ranges[parameter]}" in str(inspect.getdoc(make))


def test_numbers_of_rows_are_checked_one_by_one_and_traced_ones_pass():
    threshold = mj.rules.threshold
    for rows in (np.array([0.2, 1.0]), jnp.array([0.2, 1.0]), [0.2, 1]):
        np.testing.assert_allclose(threshold(rows).params["p"], [0.2, 1.0])
    for rows in (np.array([0.2, 1.5]), jnp.array([0.2, 1.5]), [0.2, 1.5]):
        with pytest.raises(ValueError, match=r"threshold\(p=\) is 1.5"):
            threshold(rows)
    assert jax.jit(lambda p: threshold(p).params["p"] * 2)(3.0) == 6.0


def test_a_rule_of_ones_own_states_its_range_and_is_checked():
    @mj.rule
    def mine(key, view, memory, *, p: Annotated[float, mj.rules.Between(0, 1)] = 0.5, free=3.0):
        return mj.rules.accept(view, view.masked), memory

    assert mine(1, -7.0).params == {"p": 1.0, "free": -7.0}
    for wrong in (dict(p=2), dict(p="1"), dict(p=True), dict(free=math.nan), dict(free=None)):
        with pytest.raises(ValueError, match=r"mine\((p|free)=\)"):
            mine(**wrong)


def test_a_range_may_be_stated_by_the_name_of_an_alias():
    def mine(key, view, memory, p: Probability = 0.5, q=1.0):
        return mj.rules.accept(view, view.masked), memory

    mine.__annotations__ |= {"p": "Probability", "q": "NameOfALocalScope"}
    assert set(mj.rule(mine).ranges) == {"p"}
    with pytest.raises(ValueError, match=r"mine\(p=\) is 2"):
        mj.rule(mine)(p=2)


def test_ranges_say_what_they_hold():
    said = {
        str(x): x
        for x in (
            mj.rules.Between(0, 1),
            mj.rules.Between(0, 3, integer=True),
            mj.rules.AtLeast(1, integer=True),
            mj.rules.Above(0),
            Finite(),
        )
    }
    assert list(said) == [
        "a number in [0, 1]", "a whole number in [0, 3]", "a whole number, 1 or more", "a number, above 0",
        "a number, finite",
    ]  # fmt: skip
    assert str(mj.rules.AtLeast(0, infinite=True)) == "a number, 0 or more, or infinity"


def test_truncation_by_all_of_the_probability_keeps_every_id():
    logits = jnp.log(jnp.full((1, 1000), 1e-3)) + jnp.arange(1000) * 1e-3
    assert (mj.processors.top_p(1.0)(logits, None) == logits).all()


def test_ranges_stand_in_the_order_of_the_parameters():
    for name, make in MAKERS.items():
        assert list(make.ranges) == [key for key in make.params if key in make.ranges], name


def test_parts_print_as_the_call_that_makes_them():
    chain = (mj.processors.top_k(3), mj.processors.ban([7]))
    sampler = mj.Sampler(mj.rules.threshold(0.8), chain, mj.stopping.steady(patience=2), temperature=0.5)
    assert repr(sampler.rule) == "threshold(p=0.8)" and repr(mj.stopping.filled()) == "filled()"
    assert repr(chain) == "(top_k(k=3), ban(ids=[7]))"
    assert "rule=threshold(p=0.8), processors=(top_k(k=3), " in repr(sampler) and "<function" not in repr(
        sampler
    )


@pytest.mark.parametrize(
    ("module", "wrong", "near"),
    [("processors", "banned", "ban"), ("processors", "logit_bias", "bias"), ("rules", "treshold", "threshold"),
     ("stopping", "stedy", "steady"), ("presets", "lada", "llada")],
)  # fmt: skip
def test_an_unknown_part_is_answered_with_the_nearest_and_dir_lists_parts_alone(module, wrong, near):
    module = getattr(mj, module)
    with pytest.raises(AttributeError, match=rf"{wrong}'.*\b{near}\b"):
        getattr(module, wrong)
    assert near in dir(module) and not {"np", "jax", "jnp", "Any", "refuse"} & set(dir(module))
    assert all(hasattr(module, name) for name in dir(module))


def test_a_block_ends_early_at_an_end_of_text_by_what_a_criterion_promises_not_by_its_name():
    def apply(params, tokens):  # the surest position is that of the first answer token, which ends the text
        at = jnp.arange(tokens.shape[1])
        return jnp.where(jnp.arange(9) == 3, (20.0 - at)[None, :, None], 0.0) * jnp.ones((len(tokens), 1, 1))

    @mj.stopping_criterion(needs_logits=False)
    def filled(view, proposal, memory):
        return mj.stopping.filled()(view, proposal, memory)

    lm = mj.from_function(apply, {}, vocab=9, context=32, mask=8, eos=3, check=False)
    made = lambda stop: mj.sample(
        lm, [5, 6], max_tokens=8, sampler=mj.Sampler(mj.rules.confidence(), stopping=stop)
    ).forwards[0]
    assert made(mj.stopping.filled()) == 1
    assert filled().name == "filled" and made(filled()) == 8
    assert made(dataclasses.replace(filled(), keeps_decided=True)) == 1
