"""Measured settings of kernels: they replace the heuristics where they hold, and change no result."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.ops import attend, device as kernel_device, tuned
from mercury_jax.ops.attention import hopper as hopper_attention
from mercury_jax.ops.attention.inputs import AttentionCall
from mercury_jax.ops.experts import grouped_matmul, hopper_grouped_matmul as hopper_grouped
from mercury_jax.ops.tuned import AttentionKnobs, GroupedKnobs

GPU = "NVIDIA L4"  # the package brings no settings for it
KNOBS = GroupedKnobs(16, 1, 64, 3)


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """An entry for one product on a GPU, in an empty cache."""
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    monkeypatch.setattr(kernel_device, "device_name", lambda: GPU)
    return {"form": "grouped-int8", "shapes": "up to 64 rows", "settings": KNOBS._asdict()}


def written(entry):
    """The file that holds an entry."""
    file = tuned.write(GroupedKnobs, GPU, entry)
    assert file is not None
    return file


def found(form="grouped-int8", shapes="up to 64 rows"):
    return tuned.find(GroupedKnobs, form, shapes, None)


def test_a_setting_is_found_for_its_device_form_and_shapes_only(entry, monkeypatch):
    assert found() is None
    file = tuned.write(GroupedKnobs, GPU, entry)
    assert file is not None and file.name == "nvidia-l4.json" and found() == KNOBS
    assert found(form="grouped-bfloat16") is None and found(shapes="up to 128 rows") is None
    assert tuned.find(GroupedKnobs, entry["form"], entry["shapes"], kernel_device.target("sm_90a")) is None
    monkeypatch.setattr(kernel_device, "device_name", lambda: "NVIDIA H100")
    assert found() is None


def test_a_later_setting_replaces_an_earlier_one_and_keeps_the_others(entry):
    other = entry | {"shapes": "up to 128 rows"}
    for one in (entry, other, entry | {"settings": KNOBS._replace(stages=7)._asdict()}):
        tuned.write(GroupedKnobs, GPU, one)
    assert found() == KNOBS._replace(stages=7) and found(shapes=other["shapes"]) == KNOBS
    assert len(list(tuned.entries(GPU))) == 2


def test_a_setting_measured_with_other_sources_is_ignored(entry):
    file = written(entry)
    [stored] = json.loads(file.read_text())
    file.write_text(json.dumps([stored | {"sources": "0" * 12}]))
    assert found() is None


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"form": "a", "shapes": "b", "sources": "c", "settings": {"tile": "x"}}]']
)
def test_a_damaged_file_is_ignored_with_a_warning(entry, text):
    written(entry).write_text(text)
    with pytest.warns(UserWarning, match="delete it"):
        assert found() is None


def test_a_product_is_run_with_measured_settings_where_they_fit(entry, monkeypatch):
    runs = []
    monkeypatch.setattr(kernel_device, "why_off", lambda *a: None)
    monkeypatch.setattr(kernel_device, "present", lambda device=None: kernel_device.HOPPER)

    def run(products, rows, knobs, *more, **how):
        runs.extend(knobs)
        return [jnp.zeros((rows[0], 128), jnp.bfloat16)]

    monkeypatch.setattr(hopper_grouped, "run", run)
    w, offsets = jnp.zeros((3, 128, 128), jnp.bfloat16), jnp.zeros(4, jnp.int32)
    settings = [None, KNOBS, KNOBS._replace(stages=500)]
    for rows, knobs in zip(
        (48, 47, 46), settings
    ):  # other sizes of a bucket, as JAX keeps what it has traced
        x = jnp.zeros((rows, 128), jnp.bfloat16)
        p = grouped_matmul.product_of(x, (w,), jnp.bfloat16, False, None)
        if knobs is not None:
            measured = {"form": p.form, "shapes": p.shapes, "settings": knobs._asdict()}
            tuned.write(GroupedKnobs, GPU, measured)
        jax.eval_shape(grouped_matmul.grouped_matmul, x, w, offsets)
    default, measured, unfit = runs
    assert measured == KNOBS != default == unfit


@pytest.mark.parametrize("kind, rounded", [("bfloat16", False), ("int8", False), ("int8", True)])
def test_what_the_heuristic_chooses_fits(kind, rounded):
    w = jnp.dtype(kind)
    for rows, experts in ((256, 1), (2048, 128), (1, 8), (16384, 128)):
        for inputs, outputs, gated in (
            (2816, 704, True),
            (704, 2816, False),
            (64, 64, False),
            (4096, 2816, False),
        ):
            x = w if rounded else jnp.dtype(jnp.bfloat16)
            p = grouped_matmul.Product(
                rows, experts, inputs, outputs, gated, False, x, w, jnp.dtype(jnp.bfloat16)
            )
            knobs = hopper_grouped.default_knobs(p, grouped_matmul.default_tile(p, experts))
            assert hopper_grouped.unfit(p, knobs) is None and knobs.stages > 1, (p, knobs)


@pytest.mark.parametrize(
    "knobs", [GroupedKnobs(8, 1, 64, 2), GroupedKnobs(24, 2, 128, 3), GroupedKnobs(48, 1, 192, 1)], ids=str
)
def test_settings_do_not_change_a_product(knobs):
    rng, sizes = np.random.default_rng(0), [5, 0, 30]
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((35, 384), (3, 384, 128)))
    run = lambda knobs: grouped_matmul.grouped_matmul(
        x, w, grouped_matmul.offsets_of(sizes), dtype=jnp.float32, knobs=knobs, device=interpreted()
    )
    np.testing.assert_allclose(run(knobs), run(None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("knobs", [AttentionKnobs(1, 64, 2, 1), AttentionKnobs(2, 64, 3, 2)], ids=str)
def test_settings_do_not_change_attention(knobs):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, n, h, 64)), jnp.bfloat16)
        for n, h in ((70, 2), (200, 1), (200, 1))
    )
    ranges = jnp.broadcast_to(jnp.asarray([[3, 90], [100, 200]], jnp.int32), (1, 70, 2, 2))
    call = AttentionCall(q, k, v, ranges, 0.125, device=interpreted())
    assert hopper_attention.unfit(call, knobs) is None
    got = hopper_attention.run(call, knobs=knobs)
    want = attend(*(x.astype(jnp.float32) for x in (q, k, v)), ranges, scale=0.125, backend="reference")
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)


def test_attention_says_which_settings_it_cannot_have():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    k, ranges = shape(1, 1024, 2, 256), jax.ShapeDtypeStruct((1, 256, 2, 2), jnp.int32)
    call = AttentionCall(shape(1, 256, 16, 256), k, k, ranges, 1.0)
    knobs = hopper_attention.default_knobs(call)
    assert hopper_attention.unfit(call, knobs) is None
    for changed, why in (
        (dict(keys=128), "registers"),
        (dict(stages=9), "shared memory"),
        (dict(splits=16), "tiles of keys"),
    ):
        assert why in str(hopper_attention.unfit(call, knobs._replace(**changed)))


def test_the_settings_of_the_package_were_measured_with_the_code_that_the_kernels_have_now():
    for file in (Path(tuned.__file__).parent / "tuned").glob("*.json"):
        for entry in json.loads(file.read_text()):
            kind = {"grouped": GroupedKnobs, "attention": AttentionKnobs}[entry["operation"]]
            assert entry["sources"] == tuned.code_hash(*tuned.SOURCES[kind]), file.name


def test_the_hash_of_code_leaves_out_what_changes_no_time(tmp_path):
    written = lambda name, text: (tmp_path / name).write_text(text) and str(tmp_path / name)
    first = written("a.py", '"""One."""\nimport jax\n\n\ndef f(x):\n    """Two."""\n    return x  \n')
    same = written("b.py", "import numpy\n# Why.\ndef f(x):\n    return x  \n")
    other = written("c.py", "def f(x):\n    return -x\n")
    assert tuned.code_hash(first) == tuned.code_hash(same) != tuned.code_hash(other)
