"""Declared ranges: every record and every factory refuses what its annotations do not allow, and says what they do."""

import dataclasses
import math
from typing import Annotated, Literal, get_args, get_type_hints

import pytest

import mercury_jax as mj
from mercury_jax import noise, rl
from mercury_jax.config import AtLeast, Between, Experts, Range, RopeScaling, check_fields, checked, refuse_if
from mercury_jax.models.dit import DiTConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.training import data, objectives
from mercury_jax.training.data.documents import Problems
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, MeshConfig, TrainConfig

MODEL = mj.ModelConfig(vocab=64)
# What each is made with, beside its defaults.
RECORDS = {
    mj.ModelConfig: dict(vocab=64), GemmaConfig: dict(vocab=64), DiTConfig: dict(vocab=64, kv_heads=8),
    Experts: dict(count=4, active=2, width=8), RopeScaling: dict(kind="linear", factor=2.0),
    mj.NoiseConfig: {}, mj.Plan: {}, mj.Refresh: {}, OptimConfig: {}, LoraConfig: {}, MeshConfig: {}, InitModel: {},
    TrainConfig: dict(name="x", model=MODEL, objective=objectives.masked_elbo(), data=data.stdlib()),
    rl.GRPO: {}, rl.VRPO: {}, rl.FewSteps: {}, rl.Rollouts: dict(tasks=("add2",)), rl.Preferences: dict(where="x"),
    rl.Trajectories: dict(tasks=("add2",)), data.Text: dict(kind="stdlib"), data.Chat: dict(where="x"),
    data.Generated: dict(name="add2"), data.Shards: dict(where="x"),
    Problems: dict(source=data.generated("add2"), count=1),
    objectives.masked_elbo: {}, objectives.llada: {}, objectives.cart: {}, objectives.score_entropy: {},
    objectives.uniform_elbo: {}, objectives.gidd_elbo: {}, objectives.diffusion_gemma: {},
    objectives.masked_and_edited: {}, objectives.next_token: {},
    objectives.balanced: dict(objective=objectives.masked_elbo()),
    noise.polynomial: {}, noise.hybrid: dict(vocab=9, mask=8), mj.mesh: {},
}  # fmt: skip


def wrong_values(hint) -> list:
    """Values that an annotation does not allow: outside of its range, no number, no choice, of another type."""
    parts = [hint, *get_args(hint)]
    ranges = [x for part in parts for x in getattr(part, "__metadata__", ()) if isinstance(x, Range)]
    values = [None] if ranges and type(None) not in parts else []
    for x in ranges:
        low = [x.low if x.open_low else x.low - 1] if math.isfinite(x.low) else []
        high = [x.high if x.open_high else x.high + 1] if math.isfinite(x.high) else []
        values += [*low, *high, math.nan, "x", True]
    choices = [part for part in parts if isinstance(part, type(Literal["x"]))]
    return values + (["x", 3.5] if choices and not ranges else [])


@pytest.fixture(autouse=True)
def without_another_checker(request):
    """A checker of all annotations refuses what these tests pass first, in its own words."""
    if request.config.getoption("--jaxtyping"):
        pytest.skip("the type checker refuses it first")


@pytest.mark.parametrize("make", RECORDS, ids=lambda make: make.__name__)
def test_every_declared_field_and_argument_refuses_what_is_outside(make):
    given = RECORDS[make]
    make(**given)
    hints = get_type_hints(make, include_extras=True)
    fields = [f.name for f in dataclasses.fields(make) if f.init] if isinstance(make, type) else [*hints]
    for name in fields:
        for value in wrong_values(hints[name]) if name not in ("return", "devices", "forbidden") else ():
            with pytest.raises(ValueError, match=rf"\b{name} is {value!r}; allowed: "):
                make(**given | {name: value})


def test_words_say_type_and_range_and_several_fields_are_checked_together():
    @dataclasses.dataclass
    class Record:
        size: Annotated[int, AtLeast(1)] = 1
        share: Annotated[float, Between(0, 1)] | None = None
        kind: Literal["a", "b"] = "a"
        ids: tuple[int, ...] = ()
        pair: tuple[int, str] = (1, "x")
        own: Annotated[object, "anything"] = None

    check_fields(Record(own=Record))
    for fields, words in (
        (dict(size=0), r"p\.size is 0; allowed: a whole number, 1 or more$"),
        (dict(share=2.0), r"share is 2\.0; allowed: a number in \[0, 1\], or None$"),
        (dict(kind="c"), "kind is 'c'; allowed: a, b$"),
        (dict(ids=(1, "x")), "allowed: a tuple of a whole number$"),
        (dict(pair=(1,)), "allowed: a tuple of a whole number, a text$"),
    ):
        with pytest.raises(ValueError, match=words):
            check_fields(Record(**fields), "p.")
    with pytest.raises(ValueError, match="size is 3; allowed: at most 2"):
        refuse_if(Record(size=3), (False, "kind", "no"), (True, "size", "at most 2"))

    @checked
    def call(size: Annotated[int, AtLeast(1)], *, name: str = "x") -> int:
        return size

    assert call(2) == 2
    for wrong in (lambda: call(0), lambda: call(1, name=3)):
        with pytest.raises(ValueError, match="allowed: a (whole number|text)"):
            wrong()
    with pytest.raises(TypeError, match=r"call\(\) got an unexpected keyword argument"):
        call(1, other=3)
