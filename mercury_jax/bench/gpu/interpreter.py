"""Mosaic GPU's interpreter, which runs the GPU kernels on a CPU, for tests and `mercury bench gpu check --small`.

When it is imported, this module adds to the interpreter what the kernels use and the installed JAX does not interpret:

- All versions: the programs of a cluster read each other's shared memory (`plgpu.cluster_ref`).
- Before JAX 0.11, where the interpreter is not public: register layouts, which mean nothing on a CPU; barriers of a
  cluster (`plgpu.ClusterBarrier`); and transposed views (`ref.transpose((1, 0))`), because the hardware transposes an
  operand of wgmma, or a stored tile, while it reads it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.ops.device import HOPPER
from mercury_jax.types import Device


def interpreted(kind: str = HOPPER, **params: Any) -> Device:
    """A GPU whose kernels run on the CPU.

    Args:
        **params: Fields of Mosaic GPU's `InterpretGPUParams`.
    """
    return Device(kind, _InterpretParams(**params))


class _TransposedRange(tuple[Any, ...]):
    """The range of a buffer that is seen transposed."""


def _support_transposed_views() -> None:
    """Teaches the interpreter of JAX 0.10 to read and write transposed views of shared memory."""
    from jax._src.pallas.mosaic.interpret import shared_memory, utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state.types import TransposeTransform

    to_range, validate = utils.to_range, gpu_callbacks._validate_transforms
    get = shared_memory.SharedMemory.get_buffer_content
    swap = shared_memory.SharedMemory.swap_buffer_content

    def to_range_transposed(transforms: Any) -> tuple[Any, ...]:
        """Slices, then at most one transposition of two axes, then at most the slice of everything."""
        kept = [t for t in transforms if not isinstance(t, TransposeTransform)]
        if len(kept) == len(transforms):
            return to_range(transforms)
        first = next(i for i, t in enumerate(transforms) if isinstance(t, TransposeTransform))
        whole = all(i.start == 0 and i.stride == 1 for t in kept[first:] for i in t.indices)
        if len(transforms) - len(kept) > 1 or transforms[first].permutation != (1, 0) or not whole:
            raise NotImplementedError(f"the interpreter reads no view by {transforms}")
        return _TransposedRange(to_range(kept[:first]))

    def read(self: Any, key: Any, rnge: Any, *args: Any, **options: Any) -> Any:
        value, *rest = get(self, key, tuple(rnge), *args, **options)
        return (value.T if isinstance(rnge, _TransposedRange) and value is not None else value, *rest)

    def write(self: Any, key: Any, rnge: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
        if isinstance(rnge, _TransposedRange):
            value, mask = (None if x is None else x.T for x in (value, mask))
        old, *rest = swap(self, key, tuple(rnge), value, mask, *args, **options)
        return (old.T if isinstance(rnge, _TransposedRange) and old is not None else old, *rest)

    utils.to_range = to_range_transposed
    gpu_callbacks._validate_transforms = lambda transforms: validate(
        [t for t in transforms if not isinstance(t, TransposeTransform)]
    )
    shared_memory.SharedMemory.get_buffer_content = read
    shared_memory.SharedMemory.swap_buffer_content = write


def _support_cluster_reads(program: str) -> None:
    """Teaches the interpreter to read the shared memory of another program of a cluster of one axis.

    An interpreted reference is the key of an allocation, an array of integers. The programs of a cluster make the same
    allocations, so that their keys differ only in the program's index. A read through `plgpu.cluster_ref` is thus a
    read without it, of the key with the index of the other program.
    """
    try:
        from jax._src.pallas.mosaic_gpu.core import ClusterRefTransform
        from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import HostAllocationKey
        from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter

        get = JaxprInterpreter._interpret_get_p
        place = [field.name for field in dataclasses.fields(HostAllocationKey)].index(program)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} has another Mosaic GPU interpreter than the versions that Mercury supports, 0.10.2 "
            "to 0.12: reads through plgpu.cluster_ref cannot be added to it. GPU kernels run on a CPU only with JAX "
            "0.10.2 to 0.12"
        ) from error

    def read(self: Any, eqn: Any, token: Any, values: Any) -> Any:
        key, *leaves = values()
        transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
        others = [t for t in transforms if isinstance(t, ClusterRefTransform)]
        if not others:
            return get(self, eqn, token, values)
        if len(self.cluster_dims) != 1 or len(others) != 1:
            raise NotImplementedError(f"{others} in a cluster of more than one axis: {self.cluster_dims}")
        key = key.at[..., place].set(others[0].idxs[0])
        leaves, tree = jax.tree.flatten(tuple(t for t in transforms if t is not others[0]))
        return get(self, eqn.replace(params={**eqn.params, "tree": tree}), token, lambda: [key, *leaves])

    interpreter: Any = JaxprInterpreter
    interpreter._interpret_get_p = read


def _support_cluster_barriers() -> None:
    """Teaches the interpreter of JAX 0.10 barriers of a cluster, which JAX 0.11 interprets itself.

    A cluster barrier is one barrier in each program; a program arrives at all of them, and waits for its own.
    """
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

    interpreter: Any = jaxpr_interpret.JaxprInterpreter
    allocate, arrive = interpreter._interpret_run_scoped_p, interpreter._interpret_barrier_arrive_p
    arrive_at = gpu_callbacks._barrier_arrive

    class OwnBarrier(core.BarrierType):
        """A program's own barrier of a cluster barrier."""

    def allocate_barriers(self: Any, eqn: Any, token: Any, values: Any) -> Any:
        for var in eqn.params["jaxpr"].invars:
            kind = getattr(getattr(var.aval, "inner_aval", None), "dtype", None)
            if isinstance(kind, core.ClusterBarrierType):
                arrivals = kind.num_arrivals * math.prod(self.cluster_dims)
                own = OwnBarrier(num_arrivals=arrivals, orders_tensor_core=kind.orders_tensor_core)
                var.aval = var.aval.update(inner_aval=var.aval.inner_aval.update(dtype=own))
        return allocate(self, eqn, token, values)

    def arrive_at_all(self: Any, eqn: Any, token: Any, values: Any) -> Any:
        # In the jaxpr of the allocation, references have the type from `allocate_barriers`; in jaxprs in it, the first.
        if not isinstance(eqn.invars[0].aval.inner_aval.dtype, (core.ClusterBarrierType, OwnBarrier)):
            return arrive(self, eqn, token, values)
        barrier, *transforms = values()
        key = jaxpr_interpret._get_barrier_allocation_key_from_inval(
            barrier, eqn.params["transforms_treedef"], transforms
        )
        device = jnp.int32(self.device_info.device_id)
        for index in range(math.prod(self.cluster_dims)):
            own = jnp.asarray(key).at[2].set(index)  # the place of the program's index in a key
            at = (device, self.grid_point_coords, self.thread_id, own)
            token = gpu_callbacks.call_barrier_arrive(token, *at, eqn.source_info)
        return token, []

    def arrive_when_allocated(*args: Any, **options: Any) -> Any:
        key = gpu_callbacks.HostAllocationKey.from_array(args[4])
        while key not in gpu_callbacks._get_shared_memory().mem:  # another program, which has not started yet
            time.sleep(1e-3)
        return arrive_at(*args, **options)

    gpu_callbacks._barrier_arrive = arrive_when_allocated
    interpreter._interpret_run_scoped_p = allocate_barriers
    interpreter._interpret_barrier_arrive_p = arrive_at_all


_InterpretParams: Any = getattr(plgpu, "InterpretGPUParams", None)
if _InterpretParams is None:
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as _InterpretParams
    from jax.interpreters import mlir

    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")
    _support_transposed_views()
    # Shared memory belongs to all threads of a program: the thread's index of its key is that of the program.
    _support_cluster_reads("thread_id")
    _support_cluster_barriers()
else:
    _support_cluster_reads("block_id")
