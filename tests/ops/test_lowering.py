"""Every shape lowers: to a device's kernel or, if the kernel refuses with a reason, to plain XLA."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mercury_jax.models import ops
from mercury_jax.models.weight_quant import FORMATS
from mercury_jax.ops import attend, device as kernel_device
from mercury_jax.ops.attention.inputs import quantise_int8
from mercury_jax.ops.experts import grouped_matmul
from mercury_jax.ops.tuned import GroupedKnobs

CHIPS = {  # backend: chip, platform of lowering, what stands in a program that has the kernel
    "hopper": (kernel_device.HOPPER, "cuda", "mosaic_gpu"),
    "blackwell": (kernel_device.BLACKWELL, "cuda", "mosaic_gpu"),
    "tpu": (kernel_device.TPU, "tpu", "tpu_custom_call"),
}
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
GPUS, ALL = {"hopper", "blackwell"}, {"hopper", "blackwell", "tpu"}
CASES = {  # B, T, H, G, S, K, R, dtype, int8: the backends that take it
    (1, 64, 12, 4, 129, 64, 2, BF16, False): ALL,
    (2, 33, 7, 7, 300, 128, 1, BF16, False): ALL,
    (1, 1, 6, 2, 321, 256, 3, FP16, False): GPUS,
    (1, 3, 2, 1, 131, 512, 2, BF16, False): {"hopper", "tpu"},
    (3, 65, 5, 5, 129, 128, 2, BF16, True): ALL,
    (1, 2, 1, 1, 1, 64, 1, BF16, False): GPUS,
    (1, 16, 4, 2, 300, 80, 1, BF16, False): set(),
    (1, 16, 4, 2, 300, 96, 1, BF16, True): set(),
    (1, 16, 4, 2, 257, 64, 4, FP32, False): {"tpu"},
}


def lowered(f, args, backend):
    """Whether the program of f(*args, device=) for the backend's device has a kernel."""
    kind, platform, mark = CHIPS[backend]
    f = functools.partial(f, device=kernel_device.target(kind))
    return mark in jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.long
@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("backend", CHIPS)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_attention_lowers_to_the_kernel_or_to_plain_xla(shape, backend):
    b, t, h, g, s, width, r, dtype, int8 = shape
    array = jax.ShapeDtypeStruct
    k = array((b, s, g, width), dtype)
    k = jax.eval_shape(quantise_int8, k) if int8 else k
    args = array((b, t, h, width), dtype), k, k, array((b, t, r, 2), jnp.int32)
    took = lowered(functools.partial(attend, softcap=30.0, residual=True, cached=True), args, backend)
    assert took == (backend in CASES[shape])
    if not took:
        device = kernel_device.target(CHIPS[backend][0])
        with pytest.raises(ValueError, match=f"'{backend}'; .* \\(.+\\)"):
            jax.eval_shape(lambda *xs: attend(*xs, backend=backend, device=device), *args)


@pytest.mark.long
@pytest.mark.parametrize(
    "rows, kind, knobs",
    [(33, BF16, None), (1, jnp.int8, GroupedKnobs(24, 1, 64, 3)), (100, jnp.float8_e4m3fn, None)],
)
def test_grouped_products_of_any_number_of_rows_lower_with_their_gradient(rows, kind, knobs):
    array = jax.ShapeDtypeStruct
    x, offsets = array((rows, 128), BF16), array((9,), jnp.int32)
    w = array((8, 128, 192) if kind == BF16 else (8, 192, 128), kind)
    scale = None if kind == BF16 else array((8, 192), FP32)

    def gradient(x, w, offsets, scale, device):
        y, back = jax.vjp(
            lambda x: grouped_matmul.grouped_matmul(x, w, offsets, scale, knobs=knobs, device=device), x
        )
        return back(y)

    assert lowered(gradient, (x, w, offsets, scale), "hopper")


@pytest.mark.parametrize("kind", [None, "int8", "fp8_dynamic"])
def test_the_products_of_a_canvas_lower_to_the_grouped_kernel(kind):
    array = jax.ShapeDtypeStruct
    shaped = lambda *shape: array(shape, BF16) if kind is None else FORMATS[kind].shapes(shape, 1, 0)

    def feed_forward(x, gate, up, down, device):
        return ops.local_dot(ops.local_gated_dot(x, gate, up, jax.nn.gelu, device), down, 1, device)

    args = array((2, 32, 128), BF16), shaped(128, 192), shaped(128, 192), shaped(192, 128)
    assert lowered(feed_forward, args, "hopper")


@pytest.mark.long
@pytest.mark.parametrize("backend", CHIPS)
def test_layers_of_the_same_shapes_lower_their_kernel_once(backend):
    array = jax.ShapeDtypeStruct
    k, ranges = array((1, 256, 2, 128), BF16), array((1, 16, 1, 2), jnp.int32)

    def layers(q, k, ranges, device):
        for scale in (0.1, 0.1, 0.1, 0.2):  # the last one needs a kernel of its own
            q = attend(q, k, k, ranges, scale=scale, cached=True, device=device)
        return q

    kind, platform, mark = CHIPS[backend]
    program = jax.jit(functools.partial(layers, device=kernel_device.target(kind)))
    text = (
        program.trace(array((1, 16, 4, 128), BF16), k, ranges).lower(lowering_platforms=(platform,)).as_text()
    )
    assert text.count(f"stablehlo.custom_call @{mark}") == 2
