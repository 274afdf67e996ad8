"""The record of an operation: which implementation a program gets, its gradient, and what each operation refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu import check
from mercury_jax.models.ops import OPERATIONS
from mercury_jax.ops.attention.inputs import quantise_int8
from mercury_jax.ops.device import BLACKWELL, HOPPER, target
from mercury_jax.ops.experts.op import COUNTED_ROWS
from mercury_jax.ops.norms.op import Projections
from mercury_jax.ops.operation import Kernel, Op
from tests.marks import slow_except

BY_NAME = {op.name: op for op in OPERATIONS}
CUBES = Op(
    "cubes",
    lambda x, times: times * x**3,
    {
        "wrong": Kernel(
            lambda x, times, device: "too few" if len(x) < 2 else None,
            lambda x, times, device: times * x**3 + x,  # other values and gradients than the plain form
        ),
    },
)


def computed(x, platform="cuda", **how):
    """Whether the program of `CUBES` for a platform is the kernel's."""
    run = jax.jit(lambda x: CUBES.run(x, times=2.0, **how))
    return "add" in run.trace(x).lower(lowering_platforms=(platform,)).as_text()


def test_a_program_has_the_kernel_of_its_device_and_platform_unless_it_refuses():
    hopper, x = target(HOPPER), jnp.arange(3.0)
    assert computed(x, device=hopper)
    assert not computed(x, "tpu", device=hopper) and not computed(x, device=target(BLACKWELL))
    assert not computed(x) and not computed(x[:1], device=hopper)
    assert CUBES.refuses(x, times=2.0, device=hopper) is None
    assert CUBES.refuses(x[:1], times=2.0, device=hopper) == "too few"
    assert CUBES.refuses(x, times=2.0) == "the device is no Hopper (sm_90a)"


def test_an_implementation_is_named_or_refused_with_its_reason():
    hopper, x = target(HOPPER), jnp.arange(3.0)
    run = lambda backend, x=x, device=hopper: CUBES.run(x, times=2.0, backend=backend, device=device)
    np.testing.assert_array_equal(run("wrong"), 2 * x**3 + x)
    np.testing.assert_array_equal(run("reference"), 2 * x**3)
    for backend, more, told in (
        ("other", {}, "wrong, reference"), ("wrong", {"x": x[:1]}, "too few"), ("wrong", {"device": None}, "no Hopper")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"backend is '{backend}'; allowed: .*{told}"):
            run(backend, **more)


def test_the_gradient_of_a_kernel_is_that_of_the_plain_form():
    total = lambda x: CUBES.run(x, times=2.0, backend="wrong", device=target(HOPPER)).sum()
    np.testing.assert_array_equal(jax.grad(total)(jnp.arange(3.0)), [0, 6, 24])


SMALL = {f"{op.name} {i}": (op, shape) for op in OPERATIONS for i, shape in enumerate(op.table().small)}


@pytest.mark.parametrize("name", slow_except(SMALL, "norm 1", "rows 0", "routing 0", "dispatch 0", "heads 0"))
def test_each_kernel_equals_its_reference_at_the_small_shapes_of_the_check(name):
    op, shape = SMALL[name]
    args = {"operation": op.name, "shape": shape._asdict(), "seed": 0, "draws": 1}
    [row] = check.check_form(args, lambda stage: None)
    assert row["passed"], row


@pytest.mark.parametrize("op", OPERATIONS, ids=[op.name for op in OPERATIONS])
def test_the_table_of_an_operation_holds_what_its_kernel_takes(op):
    table, device = op.table(), target(HOPPER)
    assert table.small and table.compiled
    for shape, limit in (*table.checked, *table.later):
        assert limit > 0 and table.shape(**shape._asdict()) == shape
        case = shape.check(op, device)
        jax.eval_shape(case.kernel, *case.like)


shape = jax.ShapeDtypeStruct
BF16, FP32 = jnp.bfloat16, jnp.float32


def heads(h=4, g=2, width=256, pairs=None, dtype=BF16, cached=BF16):
    k = shape((2, 3, g, width), dtype)
    kv = shape((2, 11, g, width), dtype if cached == jnp.int8 else cached)
    kv = (jax.eval_shape(quantise_int8, kv),) * 2 if cached == jnp.int8 else (kv, kv)
    table = (shape((2, 3, 1, pairs or width // 2), FP32),) * 2
    return Projections(shape((2, 3, h, width), dtype), k, k), None, table, kv, None  # pyright: ignore


def rows(n=256, width=2816, dtype=BF16):
    return (shape((n, width), dtype),)


def tokens(n=256, width=2816, dtype=BF16, ids=jnp.int32):
    return shape((n, width), dtype), shape((n, 8), ids)


def product(inputs=64, outputs=64, x=BF16, w=BF16, scale=None):
    return shape((5, inputs), x), shape((2, inputs, outputs), w), None, scale


# operation: static arguments, how arrays are made, and (what is changed, what the reason names)
REFUSED = {
    "norm": ({"eps": 1e-6}, rows, [({"dtype": FP32}, "float32"), ({"width": 2800}, "2800")]),
    "rows": ({"dtype": jnp.int8}, rows, [({"dtype": FP32}, "float32"), ({"n": 3, "width": 704}, "3 rows")]),
    "routing": (
        {"active": 8},
        lambda n=128, dtype=FP32: (shape((4, n), dtype), shape((n,), FP32)),
        [({"n": 60}, "60 experts"), ({"dtype": BF16}, "bfloat16")],
    ),
    "dispatch": (
        {"count": 128},
        tokens,
        [
            ({"dtype": FP32}, "float32"), ({"ids": jnp.int8}, "int8"), ({"width": 2800}, "2800"), ({"n": 5}, "40 rows"),
            ({"n": COUNTED_ROWS // 8 + 16}, f"{COUNTED_ROWS + 128} rows"), ({"count": 4096, "n": 16}, "16 programs"),
        ],
    ),
    "heads": (
        {"eps": 1e-6},
        heads,
        [
            ({"cached": jnp.int8}, "Int8Vectors"), ({"cached": FP32}, "float32"), ({"dtype": FP32}, "float32"),
            ({"width": 128}, "head size is 128"), ({"h": 64}, "64 query heads"), ({"pairs": 64}, "64 pairs"),
        ],
    ),
    "grouped": (
        {},
        product,
        [
            ({"x": FP32}, "rows are float32"), ({"w": jnp.int8}, "scale"), ({"outputs": 40}, "64 by 40"),
            ({"act": jax.nn.relu}, "relu"), ({"act": jax.nn.silu}, "64 by 64"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_names_what_its_kernel_refuses(name):
    static, arrays, changes = REFUSED[name]
    op, device = BY_NAME[name], target(HOPPER)
    assert op.refuses(*arrays(), device=device, **static) is None
    for where in (None, target(BLACKWELL), target("tpu")):
        assert "no Hopper (sm_90a)" in str(op.refuses(*arrays(), device=where, **static))
    for change, told in changes:
        how = static | {key: change.pop(key) for key in ("count", "act") if key in change}
        assert told in str(op.refuses(*arrays(**change), device=device, **how)), (change, how)
