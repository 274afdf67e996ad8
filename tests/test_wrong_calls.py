"""Every wrong call is refused in words before it computes, and the check of that finds what is not."""

import jax.numpy as jnp
import pytest

import mercury_jax as mj
from mercury_jax.config import refuse
from mercury_jax.decode import processors, rules, stopping
from tests import wrong_calls
from tests.wrong_calls import WRONG, answer, sample

CASES = {f"{group}: {name}": case for group, cases in WRONG.items() for name, case in cases.items()}


@pytest.fixture(autouse=True)
def registries():
    """A wrong decorator must register nothing."""
    before = [dict(kind.ALL) for kind in (rules, processors, stopping)]
    yield
    assert [dict(kind.ALL) for kind in (rules, processors, stopping)] == before


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """A recipe that was not refused would write where it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("wrong"))
        yield


@pytest.mark.parametrize(("call", "said"), CASES.values(), ids=CASES)
def test_a_wrong_call_is_refused_in_words_before_any_compute(call, said):
    assert answer(call, said) == ""


def fails_inside():
    raise refuse("x", 3, "4")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: mj.rules.threshold(0.5), "accepted"),
        (lambda: sample(), "a pass was traced"),
        (lambda: jnp.ones(3) + jnp.ones(2), "TypeError of"),
        (lambda: jnp.reshape(jnp.ones(3), 2), "TypeError of"),
        (lambda: {}["x"], "KeyError of"),
        (lambda: mj.rules.threshold(1.5), "does not say 'x is 3'"),
        (fails_inside, ""),
    ],
)
def test_the_check_finds_calls_that_are_not_refused_in_words(call, found):
    assert answer(call, "x is 3").startswith(found)


def test_the_models_of_the_wrong_calls_are_right_ones():
    for name in ("stream", "infill", "edit", "score", "logits"):
        call = getattr(wrong_calls, name)
        assert answer(lambda call=call: list(call()), "") == "a pass was traced before the call was refused"
    assert wrong_calls.recipe().name == "wrong" and mj.sample(
        wrong_calls.own(), [1], max_tokens=2
    ).lengths == [2]
