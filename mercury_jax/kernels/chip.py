"""Which chip a program is traced for: the machine's own, or one that is named while compiling ahead."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

import jax

from mercury_jax.config import refuse

SWITCH = "MERCURY_KERNELS"  # 1: kernels are chosen by themselves on the chip that is here
HOPPER, BLACKWELL = "sm_90a", "sm_100a"  # with wgmma, with tcgen05
TPU = "tpu"  # of every generation: their kernels are the same
_OF = {"9.0": HOPPER, "10.0": BLACKWELL}
_named: contextvars.ContextVar[str | None] = contextvars.ContextVar("chip", default=None)


@contextlib.contextmanager
def traced_for(name: str) -> Iterator[None]:
    """While programs are traced for a chip that is not here ("sm_90a", "sm_100a", "tpu"): their kernels are for it.

    Choose the chip once a process: neither jit's cache nor Mosaic's knows of it.
    """
    if name not in (allowed := (*_OF.values(), TPU)):
        raise refuse("chip", name, ", ".join(allowed))
    token = _named.set(name)
    try:
        yield
    finally:
        _named.reset(token)


def chip() -> str | None:
    """The chip whose kernels are chosen by themselves; None: plain XLA does all of it.

    On a machine that has the chip they wait for MERCURY_KERNELS=1: so far they were interpreted and compiled ahead,
    and not run on one.
    """
    return present() if _named.get() is not None or os.environ.get(SWITCH) == "1" else None


def present() -> str | None:
    """The chip that is here or traced for, if it is one that kernels are written for."""
    if (name := _named.get()) is not None:
        return name
    if jax.default_backend() != "gpu":
        return TPU if jax.default_backend() == "tpu" else None
    return _OF.get(str(getattr(jax.local_devices()[0], "compute_capability", None)))
