"""Random numbers and permutations as pure functions of a key and an index, without state and without arrays of size N.

`mix` hashes integers, `uniform` turns hashes into numbers in [0, 1), and `permuted` shuffles 0 .. N - 1 without storing
the permutation. A corpus of any size thus has a global shuffled order for each epoch that needs no memory and is the
same in all processes.
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
    """Hashes plain values, such as a seed and a name, to a 64-bit key.

    Args:
        *parts: Values that JSON can write.

    Returns:
        A key in [0, 2**64), the same in every process and Python version.
    """
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")


def mix(x: Number) -> Number:
    """Hashes 64-bit integers with the output function of SplitMix64 (Steele et al. 2014).

    Args:
        x: A non-negative int, or an array of uint64. Array arithmetic wraps modulo 2**64 by itself; an int is masked.

    Returns:
        The hashes, of the same type and shape.
    """
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Turns hashes into uniform numbers.

    Args:
        hashes: uint64 of any shape.

    Returns:
        float64 in [0, 1), made of the upper 53 bits, the precision of a float64.
    """
    return (hashes >> np.uint64(11)) * 2.0**-53


def permuted(index: int, size: int, key: int) -> int:
    """Maps an index to its place in the shuffled order that a key defines: a permutation of 0 .. size - 1.

    A generalised Feistel cipher with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: Index in [0, size).
        size: Number of indices.
        key: Defines the permutation.

    Returns:
        The image of `index`, in [0, size). Different indices have different images.
    """
    # Indices are the cells l + width * r of a grid of at least `size` cells, as square as possible.
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        r, l = divmod(index, width)
        # A round adds a hash of one coordinate to the other one, which can be undone. So the rounds permute the grid.
        for number in range(ROUNDS):
            if number % 2:
                r = (r + mix(key + number ^ l << 8)) % height
            else:
                l = (l + mix(key + number ^ r << 8)) % width
        index = l + width * r
        # The grid has fewer than 2 sqrt(size) extra cells. An index that lands on one of them is encrypted again, which
        # keeps the map a permutation of the indices below `size`.
        if index < size:
            return index
