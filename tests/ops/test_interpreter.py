"""Programs of a cluster read each other's shared memory in the interpreter, in every version of JAX."""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from mercury_jax.bench.gpu import interpreter

GRID, PROGRAMS = 2, 3


def read_others(cluster, names):
    """Each program reads row 1 of the next program of its cluster, and all rows of program 0.

    Returns:
        x [grid, program, 2, 128], and for each program what its second thread read: [grid, program, 3, 128].
    """

    def read(x, out, own, arrived):
        tile, program = jax.lax.axis_index("tile"), jax.lax.axis_index("program")
        thread = jax.lax.axis_index("thread")
        following = jax.lax.rem(program + 1, jnp.int32(PROGRAMS))

        @pl.when(thread == 0)
        def _():
            own[...] = x[tile, program]
            plgpu.commit_smem()

        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived)

        @pl.when(thread == 1)
        def _():
            out[tile, program, 0] = plgpu.cluster_ref(own.at[1], {"program": following})[...]
            out[tile, program, pl.ds(1, 2)] = plgpu.cluster_ref(own, {"program": jnp.int32(0)})[...]
            plgpu.barrier_arrive(arrived)

        @pl.when(thread == 0)
        def _():
            plgpu.barrier_arrive(arrived)

        plgpu.barrier_wait(arrived)  # a program ends when no other one reads its shared memory

    call = plgpu.kernel(
        read,
        out_type=jax.ShapeDtypeStruct((GRID, PROGRAMS, 3, 128), jnp.float32),
        grid=(GRID,), grid_names=("tile",), cluster=cluster, cluster_names=names,
        num_threads=2, thread_name="thread",
        scratch_types=[
            plgpu.SMEM((2, 128), jnp.float32),
            plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=2),
        ],
        interpret=interpreter.interpreted(detect_races=True).interpret,
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(GRID, PROGRAMS, 2, 128)).astype(np.float32)
    return x, np.asarray(jax.jit(call)(x))


@pytest.mark.long
def test_programs_read_the_memory_of_the_program_that_they_name():
    x, out = read_others((PROGRAMS,), ("program",))
    np.testing.assert_array_equal(out[:, :, 0], np.roll(x[:, :, 1], -1, axis=1))
    np.testing.assert_array_equal(out[:, :, 1:], np.broadcast_to(x[:, :1], x.shape))


def test_clusters_of_two_axes_are_refused():
    with pytest.raises(NotImplementedError, match="cluster of more than one axis"):
        read_others((PROGRAMS, 1), ("program", "other"))


def test_an_interpreter_with_other_keys_is_refused(monkeypatch):
    key = dataclasses.make_dataclass("HostAllocationKey", ["memory_space_id", "device_id", "buffer_id"])
    monkeypatch.setattr(gpu_callbacks, "HostAllocationKey", key)
    with pytest.raises(NotImplementedError, match="another Mosaic GPU interpreter"):
        interpreter._support_cluster_reads("block_id")
