"""The check of TMA copies finds copies that a GPU would make differently from the interpreter."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from tests.ops import tma

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def copied(rows, start, size, transforms=TILED):
    """Copies `size` rows of x [rows, 128] from `start` on, which only the device knows, through shared memory."""
    x = jnp.asarray(np.arange(rows * 128).reshape(rows, 128) % 97, jnp.bfloat16)

    def through(at, x, out, there, full):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(at[0], size)], there, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(there, out)
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        through,
        out_type=jax.ShapeDtypeStruct((size, 128), x.dtype),
        scratch_types=[plgpu.SMEM((size, 128), x.dtype, transforms=transforms), plgpu.Barrier()],
        interpret=interpreted().interpret,
    )
    out = jax.jit(call)(jnp.full((1,), start, jnp.int32), x)
    np.testing.assert_array_equal(out, x[start : start + size])  # which the interpreter does at any start


@pytest.mark.parametrize("rows, start, size", [(32, 8, 16), (32, 16, 16), (8, 0, 8)])
def test_copies_of_whole_tiles_pass(rows, start, size, copies):
    copied(rows, start, size)
    assert [copy.load for copy in copies] == [True, False]


WRONG = {  # rows, start, size, transforms: what a chip does not do
    "starts within a tile": ((32, 13, 16), TILED, "10 of 16 elements of axis 0 are out of range"),
    "rows are not whole tiles": ((33, 8, 16), TILED, "axis 0 is not in whole tiles of 8"),
    "box of more than 256": ((264, 0, 264), (), "more than 256 elements along axis 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_copies_are_named(name, copies):
    shape, transforms, fault = WRONG[name]
    with pytest.raises(AssertionError, match=fault), tma.checked():
        copied(*shape, transforms)
    copies.clear()  # the fixture has seen them as well


def test_untiled_rows_may_start_anywhere(copies):
    copied(33, 13, 16, ())
    assert len(copies) == 2


def test_bytes_are_aligned():
    """A load of single rows of 20 numbers, as a tensor map; a store of one of them, which lies behind it in memory."""

    def faults(load, columns, start):
        whole = tma.View((8, 4 * columns), (start, 0), (1, columns), (True, False))
        return tma.Copy(load, 2, whole, tma.View((columns,), (0,), (columns,), (False,)), (), 0).faults()

    assert faults(True, 8, 3) == faults(False, 8, 3) == []
    assert "no multiple of 16 bytes" in faults(True, 5, 0)[0]
    assert "no multiple of 16 bytes" in faults(False, 5, 1)[0]
