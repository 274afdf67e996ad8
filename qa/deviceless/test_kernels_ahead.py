"""Every form of every Pallas kernel for GPUs, compiled for chips that are not here: no spills, tensor cores used."""

import functools

import pytest

from mercury_jax.bench.compile import forms
from mercury_jax.cli import bench_compile
from mercury_jax.models.ops import OPERATIONS

PRODUCT = {"h200": "wgmma.mma_async", "b200": "tcgen05.mma"}
ROOM = 227 * 1024  # bytes of shared memory that a program may have, on both


@pytest.fixture(scope="module")
def records():
    """chip -> the records of all forms; each chip's compiler runs once, in a process of its own."""
    from mercury_jax.bench import compile as compiling

    return functools.cache(compiling.compile_all_kernels)


@pytest.mark.parametrize("target, chip", [("h200", "sm_90a"), ("b200", "sm_100a")])
def test_no_form_of_a_kernel_spills(records, target, chip):
    found = records(target)
    assert [(r["kernel"], r["shape"]) for r in found] == [(c.kernel, c.shape) for c in forms(chip)]
    made = [r for r in found if "refused" not in r]
    assert made
    for r in made:
        assert r["arch"] == chip and r["spill_bytes"] == r["stack_bytes"] == 0, r
        assert r["registers"], r
        assert 0 < r["shared_bytes"] <= ROOM, r


@pytest.mark.parametrize("target", PRODUCT)
def test_attention_is_made_of_the_chips_own_products(records, target):
    made = [r for r in records(target) if r["kernel"].startswith("attention")]
    for r in (r for r in made if "refused" not in r):
        assert r["products"].get(PRODUCT[target], 0) > 0 and len(r["products"]) == 1, r


def test_hopper_has_every_head_size(records):
    made = [r["shape"] for r in records("h200") if r["kernel"] == "attention" and "refused" not in r]
    for width in (64, 128, 256, 512):
        for dtype in ("bfloat16", "float16"):
            assert sum(f"attention-{width}-{dtype}" in shape for shape in made) >= 6


def test_hopper_has_a_gradient_of_the_head_sizes_of_training(records):
    made = [
        r["shape"]
        for r in records("h200")
        if r["kernel"] == "attention with its gradient" and "refused" not in r
    ]
    assert len(made) == 15  # of 64 and 256 with a soft-cap and without, of 128 without
    assert not any("attention-512-" in one or "attention-128-bfloat16-softcap" in one for one in made)


@pytest.mark.parametrize("target", PRODUCT)
def test_what_has_no_form_says_what_runs_instead(records, target):
    fallbacks = {op.name: op.fallback for op in OPERATIONS}
    for r in records(target):
        if "refused" in r:
            assert r["refused"] and r["fallback"] == fallbacks[r["kernel"]]
        line = bench_compile.kernel_line(r)
        assert r["shape"] in line and ("instead: " in line) == ("refused" in r)
