"""Capacities: enough, of few kinds, and never a quarter too much."""

import dataclasses

import pytest

from mercury_jax import models
from mercury_jax.bench.abstract_params import abstract_session
from mercury_jax.decode.state import QUANTUM, bucket
from tests.tiny import tiny


@pytest.mark.parametrize("quantum", [16, 64])
def test_a_capacity_is_enough_and_wastes_less_than_a_quarter(quantum):
    found = [bucket(size, quantum) for size in range(1, 70_001)]
    for size, room in enumerate(found, start=1):
        assert size <= room and room % quantum == 0
        assert room - size < max(quantum, size / 4), (size, room)
    assert found == sorted(found)
    kinds = sorted(set(found))
    assert [bucket(room, quantum) for room in kinds] == kinds  # a capacity is its own
    assert len(kinds) <= 8 + 4 * (70_000 // (8 * quantum)).bit_length()  # each kind is a program to compile


@pytest.mark.parametrize("context", [4096, 5000, 32_768, 262_144])
def test_a_row_that_fills_the_context_has_the_slots_that_it_needs_and_no_more(context):
    lm = tiny(block=32)
    lm = dataclasses.replace(
        lm, model=models.build(dataclasses.replace(lm.model.config, context=context, block=32))
    )
    for tokens in (context, context - 1, context // 2 + 1, context // 3, 600):
        session, _ = abstract_session(lm, 1, tokens)
        slots, need = session.state.tokens.shape[1], tokens + 32
        assert need <= slots <= bucket(need) and slots - need < max(QUANTUM, need / 4)
        assert slots < context + 32 + QUANTUM  # what no row of this model can use
        assert session.state.cache[0].k.shape[1] == slots


def test_beyond_262144_slots_a_capacity_still_wastes_less_than_a_quarter():
    for size in [
        2**k + d for k in range(18, 24) for d in (0, 1, 64, 2**k // 4 + 1, 2**k // 2 + 1, 3 * 2**k // 4 + 1)
    ]:
        assert size <= bucket(size) < 1.25 * size
