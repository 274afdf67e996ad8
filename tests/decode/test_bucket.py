"""Laws of the ladder of capacities: enough, of few kinds, and never a quarter too much."""

import pytest

from mercury_jax.decode.program import bucket


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
