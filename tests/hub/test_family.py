"""A config.json that differs in a key or two: logits equal those of transformers, or the key is refused by name."""

import functools

import jax
import numpy as np
import pytest

import mercury_jax as mj
from tests.hub import mutations
from tests.hub.goldens_of import GOLDENS, limit, read_all
from tests.marks import slow_except

LOADED = [case for case in mutations.CASES if not case.refused]
REFUSED = [case for case in mutations.CASES if case.refused]
name_of = lambda case: case.name


@functools.cache
def said():
    return read_all(GOLDENS / "mutations.safetensors")


def logits_of(folder, case):
    """Logits behind the last token, whose prompt is in the cache; of DiffusionGemma those of the canvas."""
    lm = mj.load(folder)
    last = mutations.CANVAS if case.base == "diffusion_gemma" else 1
    ids = mutations.tokens(case)
    # Not compiled: every case is another model, and its single operations have been compiled for the one before.
    with jax.disable_jit():
        found = mj.logits(lm, ids[:, -last:], prompt=ids[0, :-last].tolist())
    return np.asarray(found if last > 1 else found[:, 0])


QUICK = [case for case in LOADED if case.base == "qwen3"]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", slow_except(LOADED, *QUICK), ids=name_of)
def test_logits_of_a_changed_config_equal_transformers(case, tmp_path):
    got, want = logits_of(mutations.write(tmp_path, case), case), said()[case.name]
    assert want.std() > 1.0
    assert np.abs(got - want).max() <= limit(said()[f"{case.name}, fp64_diff"])


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_an_unsupported_key_is_refused_by_name_and_value(case, tmp_path):
    with pytest.raises(ValueError) as error:
        logits_of(mutations.write(tmp_path, case), case)
    assert all(word in str(error.value) for word in case.refused), str(error.value)


def test_there_are_at_least_47_mutations_and_most_change_logits():
    assert len(mutations.CASES) >= 47 and set(said()) >= {case.name for case in LOADED}
    base = {case.base: said()[case.name] for case in reversed(LOADED) if not case.change}
    moved = [c.name for c in LOADED if np.abs(said()[c.name] - base[c.base]).max() > 0.01]
    assert len(moved) >= 40
