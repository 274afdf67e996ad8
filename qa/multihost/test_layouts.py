"""Two and four processes train as one does, through the command line: losses, evaluation, previews, saved model."""

import chex
import pytest

import mercury_jax as mj
from mercury_jax import checkpoint
from tests.training import jobs

LAYOUTS = {
    "data": (2, "--mesh.data", "2"),
    "fsdp": (2, "--mesh.data", "1", "--mesh.fsdp", "2"),
    "tensor": (2, "--mesh.data", "1", "--mesh.tensor", "2"),
    "data_fsdp": (4, "--mesh.data", "2", "--mesh.fsdp", "2"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The recipe, and its run in one process."""
    root = jobs.write_recipe(tmp_path_factory.mktemp("layouts"))
    jobs.finish(root, "one", jobs.begin(root, 1, "one"))
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_processes_train_evaluate_preview_and_export_as_one(root, layout):
    processes, *mesh = LAYOUTS[layout]
    jobs.finish(root, layout, jobs.begin(root, processes, layout, *mesh))
    found, want = jobs.rows(root / layout), jobs.rows(root / "one")
    assert [(row["step"], row["kind"]) for row in found] == [(row["step"], row["kind"]) for row in want]
    assert (
        sum(row["kind"] == "train" for row in want) == 50 and sum(row["kind"] == "eval" for row in want) == 2
    )
    assert [row["digest"] for row in found] == [row["digest"] for row in want]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in want], abs=1e-5, rel=0)
    assert checkpoint.steps(root / layout / "checkpoints") == [40, 50]
    left, right = (mj.load(root / out / "model").params for out in (layout, "one"))
    chex.assert_trees_all_close(left, right, atol=1e-5, rtol=0)
    previews = (root / layout / "samples.txt").read_text()
    assert previews == (root / "one" / "samples.txt").read_text() and previews.startswith("=== step 50\n")
    out = mj.sample(mj.load(root / layout / "model"), "1+2=", max_tokens=64, seed=0)
    assert f"'1+2=' -> {out.text!r}" in previews
