"""Which kernels are used by default: the forms that passed their check on this device."""

import json
import warnings

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.ops import attend, device as kernel_device
from mercury_jax.ops.attention.inputs import quantise_int8
from mercury_jax.ops.experts import grouped_matmul

shape = jax.ShapeDtypeStruct
FORCE = getattr(plgpu, "force_gpu_interpret_mode", params.force_gpu_interpret_mode)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A Hopper whose checks are kept in a file of the test: kept(forms) writes them."""
    monkeypatch.setattr(kernel_device, "present", lambda device=None: kernel_device.HOPPER)
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    monkeypatch.delenv(kernel_device.SWITCH, raising=False)
    entry = kernel_device.entry_key(jax.local_devices()[0].device_kind, jax.__version__)
    return lambda forms: kernel_device.write_checks(entry, forms, "2026-11-22")


def program(f, *args):
    """What a call is lowered to for CUDA: "mosaic_gpu" is in it where a kernel of ours is."""
    return jax.jit(lambda *xs: f(*xs)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def attention(int8=False, **how):
    k = shape((1, 256, 2, 128), jnp.bfloat16)
    k = jax.eval_shape(quantise_int8, k) if int8 else k
    q, seen = shape((1, 8, 4, 128), jnp.bfloat16), shape((1, 8, 2, 2), jnp.int32)
    return program(lambda *xs: attend(*xs, cached=True, **how), q, k, k, seen)


def training(width=128):
    """The program of the gradient of a call without a cache."""
    q, k = shape((1, 256, 4, width), jnp.bfloat16), shape((1, 256, 2, width), jnp.bfloat16)
    total = lambda q, k, seen: jnp.asarray(attend(q, k, k, seen), jnp.float32).sum()
    return program(jax.grad(total, argnums=(0, 1)), q, k, shape((1, 256, 2, 2), jnp.int32))


def products():
    """Whether the grouped product is taken, and how its gradient is made."""
    x, w = shape((40, 128), jnp.bfloat16), shape((4, 128, 64), jnp.bfloat16)
    offsets = shape((5,), jnp.int32)
    if grouped_matmul.GROUPED.refuses(x, w) is not None:
        return None

    def slope(x, w, offsets):
        return jax.grad(lambda x: grouped_matmul.grouped_matmul(x, w, offsets).astype(jnp.float32).sum())(x)

    return program(slope, x, w, offsets).count("custom_call @mosaic_gpu")


@pytest.mark.long
def test_only_forms_that_passed_are_used(kept):
    kept(
        {
            "attention-128-bfloat16": {"passed": True},
            "attention-128-bfloat16-int8": {"passed": False, "why": "NaN"},
        }
    )
    assert "mosaic_gpu" in attention()
    assert "mosaic_gpu" not in attention(int8=True)
    assert "mosaic_gpu" not in attention(softcap=3.0)  # a form that nobody checked


@pytest.mark.long
def test_attention_with_a_gradient_is_a_form_of_its_own(kept):
    kept({"attention-128-bfloat16": {"passed": True}})
    assert "mosaic_gpu" not in training()
    kept({"attention-128-bfloat16-gradient": {"passed": True}})
    assert training().count("custom_call @mosaic_gpu") == 3  # forward, dq, dk with dv
    assert "mosaic_gpu" not in training(64) and "mosaic_gpu" not in attention()


def test_the_gradient_of_the_grouped_product_is_a_separate_form(kept):
    kept({})
    assert products() is None
    kept({"grouped-bfloat16": {"passed": True}})
    forward = products()
    kept({"grouped-bfloat16": {"passed": True}, "grouped-bfloat16-gradient": {"passed": True}})
    assert forward == 0 and products() == 1  # of a gradient alone the forward product is not computed


def test_without_its_form_the_gradient_uses_a_loop_with_the_same_result(kept):
    kept({"grouped-bfloat16": {"passed": True}})
    rng, sizes = np.random.default_rng(0), np.array([9, 0, 20])
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((29, 64), (3, 64, 64)))
    with FORCE(interpreted().interpret):
        y, back = jax.vjp(lambda x: grouped_matmul.grouped_matmul(x, w, grouped_matmul.offsets_of(sizes)), x)
        (dx,) = back(y)
    full = np.asarray(w, np.float32)[np.repeat(np.arange(3), sizes)]
    want = np.einsum("mo,mio->mi", np.asarray(y, np.float32), full)
    assert np.abs(np.asarray(dx, np.float32) - want).max() < 1e-2 * np.abs(want).max()


@pytest.mark.long
def test_the_environment_variable_overrides_the_file(kept, monkeypatch):
    kept({"attention-128-bfloat16": {"passed": True}})
    monkeypatch.setenv(kernel_device.SWITCH, "0")
    assert "mosaic_gpu" not in attention() and "MERCURY_KERNELS=0" in str(
        kernel_device.why_off("attention-128-bfloat16")
    )
    monkeypatch.setenv(kernel_device.SWITCH, "1")
    assert "mosaic_gpu" in attention(int8=True)
    monkeypatch.setenv(kernel_device.SWITCH, "yes")
    with pytest.raises(ValueError, match="MERCURY_KERNELS is 'yes'; allowed: 1"):
        attention()


@pytest.mark.parametrize("other", ["chip", "jax", "sources"])
def test_results_of_another_device_version_or_source_do_not_count(kept, monkeypatch, other):
    kept({"attention-128-bfloat16": {"passed": True}})
    assert kernel_device.why_off("attention-128-bfloat16") is None
    if other == "chip":
        monkeypatch.setattr(kernel_device, "device_name", lambda: "NVIDIA H100")
    elif other == "jax":
        monkeypatch.setattr(jax, "__version__", "0.0.1")
    else:
        monkeypatch.setattr(kernel_device, "sources", lambda: "0123456789ab")
    assert "mercury bench gpu check" in str(kernel_device.why_off("attention-128-bfloat16"))


@pytest.mark.parametrize("text", ["{", "[]", '{"x": {"date": "", "forms": {"a": 3}}}', '{"x": 1}'])
def test_a_damaged_file_is_named_in_a_warning_and_ignored(kept, text, tmp_path):
    file = kept({"attention-128-bfloat16": {"passed": True}})
    file.write_text(text)
    kernel_device._parse.cache_clear()
    with pytest.warns(UserWarning, match=r"kernels\.json is ignored"):
        assert kernel_device.why_off("attention-128-bfloat16") is not None
    kept({"attention-128-bfloat16": {"passed": True}})  # and the next check writes it anew
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_device.why_off("attention-128-bfloat16") is None


def test_one_file_has_entries_of_several_devices(kept):
    file = kept({"grouped-int8": {"passed": True}})
    kernel_device.write_checks("another, jax 1, kernels 2", {"grouped-int8": {"passed": False}}, "2026-11-22")
    assert len(json.loads(file.read_text())) == 2 and kernel_device.why_off("grouped-int8") is None


def test_without_a_cache_folder_no_file_is_written(monkeypatch):
    assert kernel_device.checks_file({"MERCURY_CACHE": ""}) is None
    assert (
        str(kernel_device.checks_file({"MERCURY_CACHE": "", "MERCURY_KERNEL_CHECKS": "/a/b.json"}))
        == "/a/b.json"
    )
    assert str(kernel_device.checks_file({"MERCURY_CACHE": "/a"})) == "/a/kernels.json"
    assert str(kernel_device.checks_file({"XDG_CACHE_HOME": "/x"})) == "/x/mercury_jax/kernels.json"


def test_status_lists_the_forms_that_are_on_and_the_reasons_of_the_others(kept):
    kept(
        {"grouped-int8": {"passed": True}, "grouped-bfloat16": {"passed": False, "why": "relative error 0.5"}}
    )
    found = kernel_device.status()
    assert found["on"] == ["grouped-int8"] and "relative error 0.5" in found["off"]["grouped-bfloat16"]
    assert "check passed" in found["rule"]


def test_on_a_cpu_the_reason_is_that_no_kernel_is_written_for_it():
    assert "cpu" in kernel_device.status()["rule"] and "cpu" in str(kernel_device.why_off("grouped-int8"))
