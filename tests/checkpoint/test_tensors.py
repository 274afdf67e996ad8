"""Safetensors files: what is written is read back, one tensor at a time, and malformed files raise errors."""

import json
import os
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.checkpoint.tensors import DTYPES, LazyTensor

# By safetensors 0.8.0: {"a/w": int32 [7, -8], "b": bfloat16 [[1.5, -2, 3.25]], "e": float16 [0, 2], "m": True}.
OFFICIAL = (
    b'\x00\x01\x00\x00\x00\x00\x00\x00{"__metadata__":{"format":"pt"},"a/w":{"dtype":"I32","shape":[2],'
    b'"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]},"e":{"dtype":"F16",'
    b'"shape":[0,2],"data_offsets":[14,14]},"m":{"dtype":"BOOL","shape":[],"data_offsets":[14,15]}}'
)


def arrays():
    rng = np.random.default_rng(0)
    some = {f"layer.0/{name}": (3 * rng.standard_normal((4, 3))).astype(t) for name, t in DTYPES.items()}
    return some | {
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((3, 0, 2), np.int8),
        "transposed": np.arange(10_000.0).reshape(4, 2500).T,
        'ключ "\\\n': np.ones(1, np.uint8),
    }


def sources(named):
    return [LazyTensor(name, a.shape, a.dtype, lambda a=a: a) for name, a in named.items()]


def same(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "a.safetensors"
    tensors.write(path, sources(arrays()), {"format": "pt"})
    return path


def test_every_dtype_and_shape_round_trips(file, monkeypatch):
    found = tensors.header(file)
    assert safe_open(file, "numpy").metadata() == {"format": "pt"} and set(found) == set(arrays())
    assert all(same(tensors.read(file, found[name]), a) for name, a in arrays().items())
    monkeypatch.setattr(tensors, "WRITE_CHUNK", 1000)
    small = file.with_name("chunked.safetensors")
    tensors.write(small, sources(arrays()), {"format": "pt"})
    assert small.read_bytes() == file.read_bytes()


def test_rows_of_the_first_axis_can_be_read_alone(file):
    entry, whole = tensors.header(file)["transposed"], arrays()["transposed"]
    for rows in (slice(0, 7), slice(100, 2500), slice(5, 5), slice(None)):
        assert same(tensors.read(file, entry, rows), whole[rows])
    short = file.with_name("short")
    short.write_bytes(file.read_bytes()[: entry.start + 3 * 32])
    assert same(tensors.read(short, entry, slice(1, 3)), whole[1:3])
    with pytest.raises(CheckpointError, match=r"short is truncated: 32 bytes at \d+, its header says 64"):
        tensors.read(short, entry, slice(2, 4))
    for rows in (slice(0, 9, 2), slice(3, 2), slice(-1, None), slice(0, 2501)):
        with pytest.raises(ValueError, match="rows is slice"):
            tensors.read(file, entry, rows)
    with pytest.raises(ValueError, match="rows is slice"):
        tensors.read(file, tensors.header(file)["scalar"], slice(0, 1))


def test_a_file_that_the_package_wrote_is_read(tmp_path):
    path = tmp_path / "official"
    data = (
        np.array([7, -8], np.int32).tobytes()
        + np.array([1.5, -2, 3.25], ml_dtypes.bfloat16).tobytes()
        + b"\1"
    )
    path.write_bytes(OFFICIAL + data)
    found = tensors.header(path)
    back = {name: tensors.read(path, entry) for name, entry in found.items()}
    assert [*back] == ["a/w", "b", "e", "m"]
    assert {n: (str(a.dtype), a.tolist()) for n, a in back.items()} == {
        "a/w": ("int32", [7, -8]),
        "b": ("bfloat16", [[1.5, -2.0, 3.25]]),
        "e": ("float16", []),
        "m": ("bool", True),
    }


def test_written_tensors_are_aligned(file):
    found = tensors.header(file)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert length % 8 == 0 and min(e.start for e in found.values()) == 8 + length
    assert all(e.start % e.dtype.itemsize == 0 for e in found.values())


def test_writing_keeps_one_array_in_memory_at_a_time(tmp_path):
    alive = []

    def make(i):
        assert [ref for ref in alive if ref() is not None] == []
        array = np.full((50, 10), i, np.int64)
        alive.append(weakref.ref(array))
        return array

    tensors.write(
        tmp_path / "a", [LazyTensor(str(i), (50, 10), np.int64, lambda i=i: make(i)) for i in range(5)]
    )
    assert len(alive) == 5 and tensors.header(tmp_path / "a").keys() == set("01234")


def fail():
    raise KeyError("no such leaf")


@pytest.mark.parametrize(
    "bad, words",
    [
        (("w", (2,), np.float32, fail), "no such leaf"),
        (("w", (2,), np.float32, lambda: np.ones(3, np.float32)), r"tensor 'w' is \['float32', 3\]"),
        (("w", (2,), np.float32, lambda: np.ones(2)), r"tensor 'w' is \['float64', 2\]"),
        (("w", (2,), np.complex64, lambda: None), "dtype of tensor 'w' is 'complex64'"),
        (("ok", (2,), np.float32, lambda: None), "name of a tensor is 'ok'"),
        (("__metadata__", (2,), np.float32, lambda: None), "name of a tensor is '__metadata__'"),
        (("\ud800", (2,), np.float32, lambda: None), "surrogates"),
    ],
)
def test_a_failed_write_keeps_the_earlier_file(tmp_path, bad, words):
    path = tmp_path / "a"
    path.write_bytes(b"older")
    with pytest.raises((ValueError, KeyError), match=words):
        tensors.write(path, [LazyTensor("ok", (1,), np.float64, lambda: np.zeros(1)), LazyTensor(*bad)])
    assert os.listdir(tmp_path) == ["a"] and path.read_bytes() == b"older"


def made(text, data=12):
    """A file with the header `text` and `data` bytes of tensors."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + bytes(data)


def one(data=12, **change):
    """A file of one tensor, three float32, with some fields of its entry changed."""
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | change
    return made(json.dumps({"w": {k: v for k, v in entry.items() if v is not ...}}), data)


def two(first, second, data=12):
    u8 = lambda offsets: {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}
    return made(json.dumps({"a": u8(first), "b": u8(second)}), data)


W = '"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}'
# What the package refuses, one of each kind (`test_tensors_mutated` has thousands), and what only this module does.
REFUSED = [
    (b"", "header too small"),
    ((2**63).to_bytes(8, "little") + b"{}", "header too large"),
    ((99).to_bytes(8, "little") + b"{}", "invalid header length"),
    (made(b'{"\xff":{}}'), "invalid UTF-8"),
    (made("{" + W), "EOF"),
    (made('{"w":' * 50_000), "recursion limit"),
    (made('{"w":{"shape":[' + "1," * 50_000 + "1]}}"), "missing field `dtype`"),
    (made('{"__metadata__":{},"__metadata__":{},' + W + "}"), "duplicate field `__metadata__`"),
    (one(shape=...), "missing field `shape`"),
    (one(dtype="F4", shape=[24]), "tensor 'w': dtype is 'F4'; allowed: F64, F32"),
    (one(shape=[True, 3]), "invalid type: boolean"),
    (one(shape=[-3]), "invalid value: integer `-3`"),
    (one(shape=[3, *[1] * 64]), "tensor 'w': shape is .*; allowed: at most 64 axes"),
    (one(shape=[2**32, 2**32]), "overflow"),
    (one(shape=[0, 2**61, 2**61], data_offsets=[0, 0], data=0), "tensor 'w': shape is .*; allowed: at most 64 axes"),
    (one(dtype="F64"), "invalid shape, data type, or offset"),
    (one(data_offsets=[4, 16]), "invalid offset for tensor `w`"),
    (one(shape=[2**40], data_offsets=[0, 2**42]), "file not fully covered"),
    (two([0, 8], [4, 12]), "invalid offset for tensor `b`"),
]  # fmt: skip


@pytest.mark.parametrize("data, words", REFUSED, ids=range(len(REFUSED)))
def test_a_malformed_header_raises_an_error_that_names_the_file(data, words, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="x.safetensors.*" + words) as error:
        tensors.header(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "data",
    [made(" {" + W + "}"), made("{" + W + "," + W + "}"), one(strides=[1])],
    ids=["leading space", "the same entry twice", "an unknown field"],
)
def test_what_the_package_ignores_in_a_header_changes_no_tensor(data, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data[:-12] + np.arange(3, dtype=np.float32).tobytes())
    assert tensors.read(path, tensors.header(path)["w"]).tolist() == [0, 1, 2]


def test_a_long_header_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(one())
    monkeypatch.setattr(tensors, "MAX_HEADER", 10)
    with pytest.raises(
        CheckpointError, match=r"x.safetensors: length of the header is \d+; allowed: 10 bytes"
    ):
        tensors.header(path)


LARGEST = """
import json, resource, sys
from mercury_jax.checkpoint import CheckpointError, tensors
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
text = b'{"w":{"dtype":"U8","shape":[' + b"0," * (tensors.MAX_HEADER // 2 - 30) + b'0],"data_offsets":[0,0]}}'
open(sys.argv[1], "wb").write(len(text).to_bytes(8, "little") + text)
before = peak()
try:
    tensors.header(sys.argv[1])
except CheckpointError as error:
    print(json.dumps({"extra": peak() - before, "error": str(error)[-80:]}))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_the_longest_header_takes_a_bounded_amount_of_memory(tmp_path):
    path = tmp_path / "x.safetensors"
    run = subprocess.run([sys.executable, "-c", LARGEST, path], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["extra"] < 500 and "at most 64 axes" in found["error"]


def test_missing_files_and_invalid_booleans_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none", "/dev/zero"):
        with pytest.raises(CheckpointError, match="missing or not a file"):
            tensors.header(path)
    pointer = tmp_path / "pointer"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        tensors.header(pointer)
    lie = tmp_path / "lie"
    lie.write_bytes(made('{"m":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}', 0) + b"\1\2")
    with pytest.raises(CheckpointError, match="a byte of a BOOL tensor is 2; allowed: 0 or 1"):
        tensors.read(lie, tensors.header(lie)["m"])
