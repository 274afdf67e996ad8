"""Random numbers and permutations as pure functions of a key and an index, without state and without arrays of size N.

`mix` hashes integers or arrays of them, `uniform` makes numbers in [0, 1) of hashes, and `permuted` is where an index
stands in a shuffled order. Sources of any size so have a global order for each epoch that costs no memory and is the
same in every process.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TypeVar

import numpy as np

MASK = 2**64 - 1
ROUNDS = 6  # four make a Feistel network a strong pseudo-random permutation (Luby and Rackoff 1988)

Number = TypeVar("Number", int, np.ndarray)


def key_of(*parts: object) -> int:
    """A 64-bit key of plain values, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")


def mix(x: Number) -> Number:
    """Hashes 64-bit integers: the output function of SplitMix64 (Steele et al. 2014). An int, or an array of uint64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), of the upper 53 bits of hashes."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def permuted(index: int, size: int, key: int) -> int:
    """Finds where an index stands in the order that belongs to a key.

    A Feistel network over pairs (l, r) of a square of just over `size` cells; a result outside of the range goes
    through it again (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: 0 to size - 1.
        size: How many there are.
        key: Decides the order.

    Returns:
        0 to size - 1, another one for every index.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        r, l = divmod(index, width)
        for number in range(ROUNDS):
            if number % 2:
                r = (r + mix(key + number ^ l << 8)) % height
            else:
                l = (l + mix(key + number ^ r << 8)) % width
        index = l + width * r
        if index < size:
            return index
