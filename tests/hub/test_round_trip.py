"""Theirs -> ours -> theirs is exact for every family, and ours -> theirs -> ours too."""

import jax
import numpy as np
import pytest

from mercury_jax.checkpoint import tensors
from mercury_jax.hub import assemble, families, files, writing
from mercury_jax.hub.reading import open_folder
from tests.hub.goldens_of import NAMES, golden


@pytest.mark.parametrize("name", NAMES)
def test_theirs_to_ours_to_theirs_is_exact(name, tmp_path):
    g = golden(name)
    config = g.opened.config
    same = g.opened.family.export is not None  # Gemma 4 with other senses is written as its text model alone
    family = g.opened.family if same else families.writers(config)[0]
    assert family.export is not None and family.config(family.export(config)) == config
    arrays = writing.sources(family.names(config), g.params)
    written = files.scan(files.write_folder(tmp_path / "x", family.export(config), arrays, shard=60_000))
    if same:
        kept = {n for n in g.opened.folder.tensors if family.uses(n, config) or n in written.tensors}
        assert set(written.tensors) == kept
        for tensor in kept:
            np.testing.assert_array_equal(written.read(tensor), g.opened.folder.read(tensor))
    again = open_folder(tmp_path / "x", dtype="float32")
    assert again.config == config
    back = assemble.params(again.model, family.names(config), again.folder.read)
    jax.tree.map(np.testing.assert_array_equal, back, g.params)


def test_shards_are_as_small_as_asked(tmp_path):
    g = golden("qwen3")
    arrays = writing.sources(g.opened.family.names(g.opened.config), g.params)
    files.write_folder(tmp_path / "x", {}, arrays, shard=30_000)
    sizes = [p.stat().st_size for p in (tmp_path / "x").glob("*.safetensors")]
    largest = max(
        e.end - e.start for p in (tmp_path / "x").glob("*.safetensors") for e in tensors.header(p).values()
    )
    assert len(sizes) > 3 and max(sizes) < max(30_000, largest) + 10_000
