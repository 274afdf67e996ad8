"""Reading a checkpoint and writing it again changes nothing, for every family and both layouts."""

import jax
import numpy as np
import pytest

from mercury_jax import hub
from mercury_jax.checkpoint import tensors
from mercury_jax.cli import main
from mercury_jax.hub import folder as folders
from mercury_jax.hub.export import lazy_tensors, write_folder, writers
from mercury_jax.hub.load import load_opened, open_checkpoint
from tests.hub import mutations
from tests.hub.goldens_of import GOLDENS, NAMES, golden


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_is_read_and_written_is_unchanged(name, tmp_path):
    g = golden(name)
    config = g.opened.config
    same = g.family.export is not None  # Gemma 4 with other senses is written as its text model alone
    family = g.family if same else writers(config)[0]
    assert family.export is not None and family.read(family.export(config)) == config
    arrays = lazy_tensors(family.names(config), g.params)
    written = folders.scan(write_folder(tmp_path / "x", family.export(config), arrays, shard=60_000))
    if same:
        kept = {n for n in g.opened.folder.tensors if family.uses(n, config) or n in written.tensors}
        assert set(written.tensors) == kept
        for tensor in kept:
            np.testing.assert_array_equal(written.read(tensor), g.opened.folder.read(tensor))
    again = open_checkpoint(tmp_path / "x", dtype="float32")
    assert again.config == config
    back = load_opened(again).params
    jax.tree.map(np.testing.assert_array_equal, back, g.params)


@pytest.mark.long
@pytest.mark.parametrize("name", ["diffusion_gemma", "gemma4_ple", "bd3lm", "qwen2_tied"])
def test_a_conversion_keeps_tensors_that_our_model_does_not_read(name, tmp_path):
    theirs = folders.scan(GOLDENS / name)
    out = tmp_path / "out"
    assert main(["convert", str(GOLDENS / name), str(out), "--to", "hf"]) == 0
    written = folders.scan(out)
    assert set(written.tensors) == set(theirs.tensors) and written.config == theirs.config
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(written.read(tensor), theirs.read(tensor))
    beside = [p.name for p in (GOLDENS / name).iterdir() if p.name == "generation_config.json"]
    assert all((out / x).read_bytes() == (GOLDENS / name / x).read_bytes() for x in beside)


def test_a_conversion_to_another_dtype_keeps_the_dtype_of_unread_tensors(tmp_path):
    out = hub.convert(GOLDENS / "gemma4_moe", tmp_path / "out", to="hf", dtype="bfloat16")
    written = folders.scan(out)
    kinds = {name: entry.dtype.name for name, entry in written.tensors.items()}
    assert {kinds[n] for n in kinds if "vision" in n} == {"float32"}
    assert {kinds[n] for n in kinds if n.startswith("model.language_model.")} == {"bfloat16"}
    assert written.config["dtype"] == "bfloat16"
    assert open_checkpoint(out).config.dtype == "bfloat16"


def test_unread_tensors_are_read_one_at_a_time(tmp_path, monkeypatch):
    order = []
    read, put = tensors.read, tensors._write_tensor
    monkeypatch.setattr(tensors, "read", lambda *a: (order.append("read"), read(*a))[1])
    monkeypatch.setattr(tensors, "_write_tensor", lambda *a: (put(*a), order.append("written"))[0])
    hub.convert(GOLDENS / "gemma4_moe", tmp_path / "out", to="hf")
    writing_them = order[order.index("written") :]
    assert "read" in writing_them
    assert all(writing_them[i + 1] == "written" for i, what in enumerate(writing_them) if what == "read")


def test_shards_have_at_most_the_requested_size(tmp_path):
    g = golden("qwen3")
    arrays = lazy_tensors(g.family.names(g.opened.config), g.params)
    write_folder(tmp_path / "x", {}, arrays, shard=30_000)
    sizes = [p.stat().st_size for p in (tmp_path / "x").glob("*.safetensors")]
    largest = max(
        e.nbytes for p in (tmp_path / "x").glob("*.safetensors") for e in tensors.header(p).values()
    )
    assert len(sizes) > 3 and max(sizes) < max(30_000, largest) + 10_000


WRITTEN = (
    "qwen2 yarn truncate false", "qwen2 dynamic", "qwen2 longrope factor", "qwen2 window by layer_types",
    "qwen3_moe window", "llama both biases", "diffusion local sizes everywhere",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", WRITTEN)
def test_a_config_survives_a_conversion_to_our_layout_and_back(name, tmp_path):
    case = next(case for case in mutations.CASES if case.name == name)
    hub.convert(mutations.write(tmp_path / "theirs", case), tmp_path / "ours")
    hub.convert(tmp_path / "ours", tmp_path / "again", to="hf")
    before, after = hub.load(tmp_path / "theirs"), hub.load(tmp_path / "again")
    assert after.model.config == before.model.config
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
