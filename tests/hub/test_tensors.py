"""Laws of safetensors files: what is written comes back, one array at a time, and what is wrong is named."""

import json
import os
import weakref

import ml_dtypes
import numpy as np
import pytest

from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.checkpoint.header import DTYPES, parse

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
    return [(name, a.shape, a.dtype, lambda a=a: a) for name, a in named.items()]


def same(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "a.safetensors"
    tensors.write(path, sources(arrays()), {"format": "pt"})
    return path


def test_every_type_and_shape_comes_back(file, monkeypatch):
    found = tensors.header(file)
    assert found.metadata == {"format": "pt"} and set(found) == set(arrays())
    assert all(same(tensors.read(file, found[name]), a) for name, a in arrays().items())
    monkeypatch.setattr(tensors, "CHUNK", 1000)
    small = file.with_name("chunked.safetensors")
    tensors.write(small, sources(arrays()), {"format": "pt"})
    assert small.read_bytes() == file.read_bytes()


def test_rows_of_the_first_axis_are_read_alone(file):
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


def test_a_file_of_the_formats_own_library_reads(tmp_path):
    path = tmp_path / "official"
    data = (
        np.array([7, -8], np.int32).tobytes()
        + np.array([1.5, -2, 3.25], ml_dtypes.bfloat16).tobytes()
        + b"\1"
    )
    path.write_bytes(OFFICIAL + data)
    found = tensors.header(path)
    back = {name: tensors.read(path, entry) for name, entry in found.items()}
    assert found.metadata == {"format": "pt"} and [*back] == ["a/w", "b", "e", "m"]
    assert {n: (str(a.dtype), a.tolist()) for n, a in back.items()} == {
        "a/w": ("int32", [7, -8]),
        "b": ("bfloat16", [[1.5, -2.0, 3.25]]),
        "e": ("float16", []),
        "m": ("bool", True),
    }


def test_what_is_written_lies_aligned(file):
    found = tensors.header(file)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert length % 8 == 0 and min(e.start for e in found.values()) == 8 + length
    assert all(e.start % e.dtype.itemsize == 0 for e in found.values())


def test_one_array_is_held_at_a_time(tmp_path):
    alive = []

    def make(i):
        assert [ref for ref in alive if ref() is not None] == []
        array = np.full((50, 10), i, np.int64)
        alive.append(weakref.ref(array))
        return array

    tensors.write(tmp_path / "a", [(str(i), (50, 10), np.int64, lambda i=i: make(i)) for i in range(5)])
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
def test_a_write_that_fails_leaves_the_file_that_was(tmp_path, bad, words):
    path = tmp_path / "a"
    path.write_bytes(b"older")
    with pytest.raises((ValueError, KeyError), match=words):
        tensors.write(path, [("ok", (1,), np.float64, lambda: np.zeros(1)), bad])
    assert os.listdir(tmp_path) == ["a"] and path.read_bytes() == b"older"


def made(text, data=12):
    """A file whose header is `text`, with so many bytes of data."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + bytes(data)


def one(**change):
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | change
    return made(json.dumps({"w": {k: v for k, v in entry.items() if v is not ...}}))


def two(first, second, data=12):
    u8 = lambda offsets: {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}
    return made(json.dumps({"a": u8(first), "b": u8(second)}), data)


W = '"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}'
REFUSED = [
    (b"", "size of the file is 0"),
    (b"\0" * 7, "size of the file is 7"),
    (
        (2**63).to_bytes(8, "little") + b"{}",
        "length of the header is 9223372036854775808; allowed: 100000000",
    ),
    ((99).to_bytes(8, "little") + b"{}", "length of the header is 99; allowed: 2.*truncated"),
    (made(b'{"\xff":{}}'), "no UTF-8"),
    (made("[]"), r"first character is '\['"),
    (made(" {" + W + "}"), "first character is ' '"),
    (made(""), "first character is ''"),
    (made("{" + W), "header at character 1 "),
    (made("{" + W + ",}"), "header at character 55"),
    (made("{" + W + "}}"), "header at character 1 "),
    (made('{"w":3}'), "character 1 is '\"w\":3}'; allowed: an entry"),
    (made('{"w":' * 50_000), "header at character 1 "),
    (made('{"w":{"shape":' + "[" * 5_000 + "]" * 5_000 + "}}"), "nested too deeply"),
    (made('{"w":{"shape":[' + "9" * 5_000 + "]}}"), "character 1 "),
    (made('{"w":{"shape":[' + "1," * 50_000 + "1]}}"), "length of the entry at character 1 is 100"),
    (made('{"\ud800":{}}'), "no UTF-8"),
    (made('{"\\ud800":{}}'), "surrogates not allowed"),
    (made('{"w":{"dtype":NaN}}'), "NaN is no JSON"),
    (made('{"w":{"dtype":"F32","dtype":"F32"}}'), "a key stands twice"),
    (made("{" + W + "," + W + "}"), "a name in the header is 'w'"),
    (made('{"__metadata__":{},"__metadata__":{},' + W + "}"), "a name in the header is '__metadata__'"),
    (made('{"__metadata__":{"step":3},' + W + "}"), "metadata 'step' is 3; allowed: a string"),
    (one(shape=...), r"tensor 'w': its list of fields is \['data_offsets', 'dtype'\]"),
    (one(strides=[1]), "'strides'"),
    (one(dtype="F4"), "tensor 'w': dtype is 'F4'; allowed: F64, F32"),
    (one(dtype=["F32"]), r"dtype is \['F32'\]"),
    (one(shape=3), "shape is 3"),
    (one(shape=[True, 3]), r"shape is \[True, 3\]"),
    (one(shape=[3.0]), r"shape is \[3.0\]"),
    (one(shape=[-3]), r"shape is \[-3\]"),
    (one(shape=[1] * 65), "at most 64 whole numbers"),
    (one(shape=[2**32, 2**32]), "one of less than"),
    (one(shape=[0, 2**61, 2**61], data_offsets=[0, 0]), "one of less than"),
    (one(shape=[4]), r"data_offsets is \[0, 12\]; allowed: numbers 16 apart, the bytes of F32 \[4\]"),
    (one(dtype="F64"), "numbers 24 apart"),
    (one(data_offsets=[12, 0]), "numbers 12 apart"),
    (one(data_offsets=[0, 12, 12]), "two whole numbers"),
    (one(data_offsets=[False, 12]), "two whole numbers"),
    (one(data_offsets=[-12, 0]), "two whole numbers"),
    (one(data_offsets=[4, 16]), r"data_offsets is \[4, 16\]; allowed: 12 at most"),
    (one(shape=[2**40], data_offsets=[0, 2**42]), "12 at most, where the file ends: it is truncated"),
    (two([0, 8], [4, 12]), "offset of tensor 'b' is 4; allowed: 8; this overlaps"),
    (two([0, 12], [6, 6]), "offset of tensor 'b' is 6; allowed: 12; this overlaps"),
    (two([0, 4], [8, 12]), "offset of tensor 'b' is 8; allowed: 4; this leaves a gap"),
    (two([0, 4], [4, 8]), "size of the file is .* where its last tensor ends"),
]


@pytest.mark.parametrize("data, words", REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_header_is_refused_in_words(data, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as error:
        parse(data, len(data))
    assert len(str(error.value)) < 1000
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="x.safetensors.*" + words):
        tensors.header(path)


def test_what_is_no_file_or_no_tensor_is_refused(tmp_path):
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
