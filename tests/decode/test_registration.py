"""A part of a user's module is known by its name as soon as it is decorated."""

import types

import pytest

import mercury_jax as mj

KINDS = {
    "rule": (mj.rules, "key, view, memory", "mj.accept(view, view.masked), memory"),
    "logits_processor": (mj.processors, "logits, view", "logits * p"),
    "stopping_criterion": (mj.stopping, "view, proposal, memory", "view.step > p, memory"),
}


def execute(source, module="users_module"):
    """The names that a module of this source defines."""
    space = types.ModuleType(module)
    space.__dict__.update(mj=mj)
    exec(source, space.__dict__)
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
    source = (
        "@mj.rule\ndef users_own(key, view, memory, p={}):\n    return mj.accept(view, view.masked), memory"
    )
    execute(source.format(0.1))
    execute(source.format(0.2))
    assert mj.rules.users_own().params == {"p": 0.2}


@pytest.mark.parametrize(
    "decorator", ["@mj.rule", "@mj.rule(noise='absorbing')", "@mj.rule(name='threshold')"]
)
def test_the_name_of_another_modules_rule_is_refused(decorator):
    name = "threshold" if "name" not in decorator else "users_own"
    source = f"{decorator}\ndef {name}(key, view, memory):\n    return mj.accept(view, view.masked), memory"
    with pytest.raises(ValueError, match="mercury_jax.decode.rules.masked defines threshold"):
        execute(source)
    assert mj.rules.threshold().params == {"p": 0.9}


def test_a_function_inside_another_one_is_a_value_only():
    @mj.rule
    def users_own(key, view, memory):
        return mj.accept(view, view.masked), memory

    assert users_own().name == "users_own" and "users_own" not in mj.rules.ALL
    assert mj.rule(lambda key, view, memory: (mj.accept(view, view.masked), memory))().name == "<lambda>"
    assert "<lambda>" not in mj.rules.ALL
