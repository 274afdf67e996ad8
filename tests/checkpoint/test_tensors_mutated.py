"""10,000 mutated safetensors files: each raises CheckpointError, or is read exactly as its own header says.

More of them, from the root of the repository:  python -m tests.checkpoint.test_tensors_mutated 100000
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.checkpoint.tensors import DTYPES, LazyTensor

SEED, COUNT = 7, 10_000
WORDS = """
    "F32" "BF16" "U8" "BOOL" "F4" "f32" "" "\\ud800" "\\u0000" null true 0 1 2 3 4 6 12 -1 1.0 1e3 1e999 NaN -Infinity
    007 +1 0x1 [] [0] [1] [2,3] [3,2] [6] [1,6] [0,0] [0,12] [12,0] [[2],3] [true,3] {} {"a":1} [null] [-1,1]
    [4294967296,4294967296] [0,4611686018427387904] [1,2, 9223372036854775807 18446744073709551616 1e "
"""
VALUES = (  # what a field, or one number of a list, is replaced by
    *WORDS.split(), "9" * 5000, "[" * 2000, "[" * 2000 + "]" * 2000, "[" + "1," * 70 + "1]",
    "[" + "0," * 9000 + "0]", " 3", "\t[2,\n3 ]", "\xa03", "\ufeff3", "é",
)  # fmt: skip
NAMES = (
    '"a"', '"b"', '"__metadata__"', '""', '"\\u0061"', '"\\udc00"', '"\x00"', '"a', "a",
    '"' + "n" * 20_000 + '"',
)  # fmt: skip


def original(path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(6, dtype=ml_dtypes.bfloat16),
        "flags": np.array([True, False, True]),
        "none": np.zeros((0, 5), np.int8),
        "one": np.array(5, np.int64),
    }
    tensors.write(
        path, [LazyTensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()], {"format": "pt"}
    )
    return path.read_bytes()


def flipped(rng, data):
    """Bits anywhere, the header's length included."""
    data = bytearray(data)
    for at in rng.integers(0, len(data), rng.integers(1, 4)):
        data[at] ^= 1 << rng.integers(8)
    return bytes(data)


def cut(rng, data):
    """Truncated, or longer than it should be."""
    if rng.random() < 0.7:
        return data[: rng.integers(len(data))]
    return data + rng.bytes(rng.integers(1, 20))


def lengthened(rng, data):
    """Another length of the header: near, far, or as big as the field."""
    length = int.from_bytes(data[:8], "little")
    choices = (length + int(rng.integers(-9, 10)), int(rng.integers(1 << 63)), 2**64 - 1, 10**8, 10**8 + 1, 0)
    return (choices[rng.integers(len(choices))] % 2**64).to_bytes(8, "little") + data[8:]


def spliced(rng, data):
    """A piece of the header left out, doubled or put elsewhere; the length follows."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    a, b = sorted(rng.integers(0, len(text), 2))
    where = rng.integers(len(text))
    new = (text[:a] + text[b:], text[:b] + text[a:], text[:where] + text[a:b] + text[where:])[rng.integers(3)]
    return len(new).to_bytes(8, "little") + new + data[8 + len(text) :]


def rewritten(rng, data):
    """The header as JSON with some of its values, keys or entries replaced, removed, doubled or moved."""
    length = int.from_bytes(data[:8], "little")
    pick = lambda options: options[rng.integers(len(options))]
    about = [
        [json.dumps(n), [[json.dumps(k), json.dumps(v)] for k, v in e.items()]]
        for n, e in json.loads(data[8 : 8 + length]).items()
    ]
    for _ in range(rng.integers(1, 3)):
        entry = pick(about)
        match rng.integers(8):
            case 0 | 1 if entry[1]:
                pick(entry[1])[1] = pick(VALUES)
            case 2 if entry[1]:
                field = pick(entry[1])
                field[1] = field[1].replace(pick("0123456789") or "0", pick(VALUES), 1)
            case 3 if len(about) > 1:
                other = pick(about)  # two swap what they have
                entry[1], other[1] = other[1], entry[1]
            case 4 if len(about) > 1:
                about.remove(entry)
            case 5:
                about.insert(rng.integers(len(about)), [pick((entry[0], *NAMES)), [[*f] for f in entry[1]]])
            case 6 if entry[1]:
                entry[1].insert(0, [pick((*NAMES, pick(entry[1])[0])), pick(VALUES)])
            case _:
                about.sort(key=lambda _: rng.random())
    text = ",".join(n + ":{" + ",".join(k + ": " + v for k, v in e) + "}" for n, e in about)
    new = ("{" + text + "}" + " " * rng.integers(9)).encode("utf-8", "surrogatepass")
    return len(new).to_bytes(8, "little") + new + data[8 + length :]


MUTATIONS = (flipped, cut, lengthened, spliced, rewritten, rewritten)


def outcome(data, path):
    """Returns "refused" or "intact"; raises AssertionError for anything in between."""
    path.write_bytes(data)
    try:
        found = tensors.header(path)
    except CheckpointError as error:
        return "refused" if len(str(error)) < 1000 and str(path) in str(error) else "refused in other words"
    base = 8 + int.from_bytes(data[:8], "little")
    said = json.loads(data[8:base].decode())  # the header, parsed by another library
    said.pop("__metadata__", {})
    assert found.keys() == said.keys()
    covered = base
    for name, entry in found.items():
        (start, end), dtype = said[name]["data_offsets"], DTYPES[said[name]["dtype"]]
        bits, covered = data[base + start : base + end], covered + end - start
        try:
            array = tensors.read(path, entry)
        except CheckpointError:
            assert dtype == np.bool_ and max(bits) > 1
            return "refused"
        assert (array.dtype, [*array.shape], array.tobytes()) == (dtype, said[name]["shape"], bits)
    assert covered == len(data)
    return "intact"


def run(folder, count, seed=SEED):
    """Outcomes of `count` mutations of one small file."""
    rng, data = np.random.default_rng(seed), original(folder / "original")
    assert outcome(data, folder / "mutant") == "intact"
    met = Counter()
    for i in range(count):
        mutate = MUTATIONS[i % len(MUTATIONS)]
        met[mutate.__name__, outcome(mutate(rng, data), folder / "mutant")] += 1
    return met


@pytest.mark.long
def test_a_mutated_file_raises_an_error_or_is_read_intact(tmp_path):
    met = run(tmp_path, COUNT)
    assert {outcome for _, outcome in met} == {"refused", "intact"}
    for mutate in (flipped, spliced, rewritten):
        assert met[mutate.__name__, "refused"] > 100
    assert met["flipped", "intact"] > 50 and met["rewritten", "intact"] > 50 and met["cut", "intact"] == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for what, times in sorted(run(Path(folder), int(sys.argv[1])).items()):
            print(*what, times)
