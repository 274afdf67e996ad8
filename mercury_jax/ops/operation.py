"""`Op`: an operation in plain JAX with its kernels, and the one place where a program gets one of them.

Each operation is such a record: attention, grouped products, norms, head norms with RoPE and the cache write, routing,
dispatch, and the rounding of rows. `Op.run` computes it with the first implementation that a device has, that passed
its check there (`ops.device`) and that takes the call; otherwise in plain JAX.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.ops import device as kernel_device
from mercury_jax.ops.quantised_rows import QuantisedRows, refuse_gradient
from mercury_jax.types import Device

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
LABELS = {
    kernel_device.HOPPER: "Hopper (sm_90a)",
    kernel_device.BLACKWELL: "Blackwell (sm_100a)",
    kernel_device.TPU: "TPU",
}


class Kernel(NamedTuple):
    """One implementation of an operation. Both functions take what `Op.run` takes, but for `backend`.

    Attributes:
        refuses: Gives the reason why it does not compute a call, from shapes and dtypes; None: it does.
        run: Computes the call.
        kind: The kind of device that it is written for; None: it is XLA's, for every device.
        platforms: Platforms for which it is tried when a program is lowered.
        plain_gradient: Whether its gradient is computed by the plain form; otherwise it has its own, or none.
    """

    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    kind: str | None = kernel_device.HOPPER
    platforms: tuple[str, ...] = ("cuda",)
    plain_gradient: bool = True


class KernelCheck(NamedTuple):
    """A kernel at one shape beside its reference in fp32.

    Attributes:
        kernel: Function of the arrays.
        reference: The same in plain JAX and fp32.
        inputs: inputs(seed) -> (arrays of the kernel, of the reference): with NaN where nothing may be read for the
            kernel, without for the reference.
        like: The shapes of the kernel's arrays.
        plain: The reference on the arrays of the kernel, in their dtype; None where these hold NaN.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, Any]]
    like: tuple[Any, ...]
    plain: Callable[..., Any] | None = None


class Cases(NamedTuple):
    """Where the kernels of an operation are checked and compiled: the table of its module `cases`.

    Attributes:
        shape: The NamedTuple of the sizes at which it is checked, which JSON can hold. It has the name of the kernel's
            `form`, and check(op, device) -> `KernelCheck`.
        small: Shapes for a CPU, which interprets the kernels.
        checked: Shapes that `mercury bench gpu check` runs, with the seconds that each may take.
        later: Further ones, of forms that models need less.
        compiled: Shapes that are compiled ahead of time to read registers and spills.
        tuned: Names, shapes, and the values of each knob that `mercury bench gpu tune` tries, the most expensive first.
        tuned_small: The same for a CPU.
    """

    shape: Callable[..., Any]
    small: tuple[Any, ...]
    checked: tuple[tuple[Any, float], ...] = ()
    later: tuple[tuple[Any, float], ...] = ()
    compiled: tuple[Any, ...] = ()
    tuned: tuple[tuple[str, Any, Mapping[str, tuple[int, ...]]], ...] = ()
    tuned_small: tuple[tuple[str, Any, Mapping[str, tuple[int, ...]]], ...] = ()


class Op(NamedTuple):
    """An operation.

    Attributes:
        name: Its name in `mercury bench gpu check`.
        plain: plain(*arrays, **static): the operation in plain JAX, which is also its reference.
        kernels: Its other implementations by name, the fastest first.
        form: form(*arrays, **static) -> the form of a call, by which `ops.device` keeps what passed its check;
            None: the operation has one form, its name.
        fallback: What a program has without a kernel, in words.
        cases: The module that holds the table of its shapes under `CASES`, by name.
    """

    name: str
    plain: Callable[..., Any]
    kernels: Mapping[str, Kernel]
    form: Callable[..., str] | None = None
    fallback: str = "plain XLA"
    cases: str = ""

    def run(
        self, *arrays: Any, backend: str | None = None, device: Device | None = None, **static: Any
    ) -> Any:
        """Computes the operation.

        Args:
            *arrays: Trees of arrays, whose gradient may be taken.
            backend: Implementation, one of `kernels` or "reference"; None: the first one that is enabled for the
                platform that the program is lowered for and does not refuse the call.
            device: Device to compile for; None: the device of this machine.
            **static: Arguments that are no arrays.
        """
        if backend is not None:
            return self._named(backend, *arrays, device=device, **static)(*arrays)
        chosen = {name: self.choose(name, *arrays, device=device, **static) for name in PLATFORMS}
        runs = {name: self._function(one, device, static) for name, one in chosen.items()}
        default = chosen["tpu"]
        others = {name: runs[name] for name, one in chosen.items() if one is not default}
        if not others:
            return runs["tpu"](*arrays)
        return jax.lax.platform_dependent(*arrays, **others, default=runs["tpu"])

    def choose(
        self, platform: str, *arrays: Any, device: Device | None = None, **static: Any
    ) -> Kernel | None:
        """Finds the implementation of a call on a platform; None: the plain form."""
        enabled = kernel_device.chosen(self.form_of(*arrays, **static), device)
        how: Any = dict(device=device, **static)
        candidates = (one for one in self.kernels.values() if platform in one.platforms)
        return next(
            (
                one
                for one in candidates
                if one.kind in (None, enabled) and one.refuses(*arrays, **how) is None
            ),
            None,
        )

    def table(self) -> Cases:
        """The shapes at which the operation is checked, compiled and tuned."""
        return importlib.import_module(self.cases).CASES[self.name]

    def backend(self, device: Device | None) -> str:
        """Names the kernel for a kind of device; without one, Hopper's, whose error says that the device has none."""
        kind = kernel_device.present(device)
        kinds = {one.kind: name for name, one in self.kernels.items() if one.kind}
        return kinds.get(kind or "", kinds[kernel_device.HOPPER])

    def form_of(self, *arrays: Any, **static: Any) -> str:
        """Names the form of a call."""
        return self.name if self.form is None else self.form(*arrays, **static)

    def refuses(self, *arrays: Any, device: Device | None = None, **static: Any) -> str | None:
        """Gives the reason why no kernel of the device computes a call by default, from shapes and dtypes."""
        kind = kernel_device.present(device)
        name = next((name for name, one in self.kernels.items() if one.kind == kind), None)
        if name is None or kind is None:
            return f"the device is no {' or '.join(LABELS[one.kind] for one in self.kernels.values() if one.kind)}"
        why = self.kernels[name].refuses(*arrays, device=device, **static)
        return why or kernel_device.why_off(self.form_of(*arrays, **static), device)

    def _named(self, backend: str, *arrays: Any, device: Device | None, **static: Any) -> Callable[..., Any]:
        """The implementation that the caller named, or ValueError with its reason."""
        if backend == "reference":
            return self._function(None, device, static)
        if backend not in self.kernels:
            raise refuse("backend", backend, ", ".join((*self.kernels, "reference")))
        kernel = self.kernels[backend]
        if kernel.kind not in (None, kernel_device.present(device)):
            why = f"the device is no {LABELS[kernel.kind]}"
        else:
            why = kernel.refuses(*arrays, device=device, **static)
        if why is not None:
            allowed = f"one that takes these arguments ({why}); None picks the first that does"
            raise refuse("backend", backend, allowed)
        return self._function(kernel, device, static)

    def _function(
        self, kernel: Kernel | None, device: Device | None, static: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The function of the arrays that an implementation computes."""
        plain = functools.partial(self.plain, **static)
        if kernel is None:
            return plain
        run = functools.partial(kernel.run, device=device, **static)
        return _with_gradient_of(plain, run) if kernel.plain_gradient else run


def _with_gradient_of(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a kernel the gradient of the plain form. Rows of 8 bits have none."""
    run = jax.custom_vjp(kernel)

    def backward(arrays: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
        is_rounded = lambda x: isinstance(x, QuantisedRows)
        refuse_gradient(any(map(is_rounded, jax.tree.leaves((arrays, dy), is_leaf=is_rounded))))
        return jax.vjp(plain, *arrays)[1](dy)

    run.defvjp(lambda *arrays: (kernel(*arrays), arrays), backward)
    return run


def device_code(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call, because importing Mosaic is slow."""
    return lambda *args, **how: getattr(importlib.import_module(module), name)(*args, **how)


def beside_plain(
    op: Op,
    draw: Callable[[Any], tuple[Any, ...]],
    device: Device | None,
    view: Callable[..., Any] = lambda result, *arrays: result,
    **static: Any,
) -> KernelCheck:
    """The kernel of an operation beside its plain form in fp32.

    Args:
        draw: draw(key) -> the arrays.
        view: view(result, *arrays) -> what is compared of a result.
    """
    wide = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
    drawn = jax.jit(draw)

    def inputs(seed: int) -> tuple[Any, Any]:
        return (arrays := drawn(jax.random.key(seed))), arrays

    return KernelCheck(
        lambda *arrays: view(op.run(*arrays, backend=op.backend(device), device=device, **static), *arrays),
        lambda *arrays: view(op.plain(*jax.tree.map(wide, arrays), **static), *arrays),
        inputs,
        jax.eval_shape(draw, jax.eval_shape(jax.random.key, 0)),
    )


# --- kernels

Given = ParamSpec("Given")
Result = TypeVar("Result")


def traced_once(run: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorates a function that runs a kernel, so that all layers of the same shapes trace and lower it once.

    A program of DiffusionGemma calls kernels 362 times, and about 0.2 s of Python go into turning one call into the
    compiler's input. Called through `jax.jit`, a kernel is traced at the first call and lowered once for each program.

    Args:
        run: A function of arrays, trees of them, and hashable values such as sizes, dtypes and devices. It reads
            nothing else that may change.
    """

    @functools.wraps(run)
    def call(*args: Given.args, **how: Given.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, how))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}
        others = tuple((i, leaf) for i, leaf in enumerate(leaves) if i not in arrays)
        return _traced(arrays, run, tree, others)

    return call


@functools.partial(jax.jit, static_argnames=("run", "tree", "others"))
def _traced(
    arrays: dict[int, jax.Array], run: Callable[..., Any], tree: Any, others: tuple[tuple[int, Any], ...]
) -> Any:
    leaves = arrays | dict(others)
    args, how = jax.tree.unflatten(tree, [leaves[i] for i in range(len(leaves))])
    return run(*args, **how)
