"""Which chip a program is traced for, and which forms of our kernels it uses there.

The device is the machine's own, or a `types.Device` that is given to compile ahead. A form is used by default
where `mercury bench gpu check` found it right on this chip (`kernels.checked`); `MERCURY_KERNELS=1` uses every form,
`MERCURY_KERNELS=0` none. Both are read while a program is traced: what is compiled stays as it is.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from mercury_jax.config import refuse
from mercury_jax.kernels import checked
from mercury_jax.types import Device

SWITCH = "MERCURY_KERNELS"
HOPPER, BLACKWELL = "sm_90a", "sm_100a"  # with wgmma, with tcgen05
TPU = "tpu"  # of every generation: their kernels are the same
_OF = {"9.0": HOPPER, "10.0": BLACKWELL}


def target(kind: str) -> Device:
    """The device "sm_90a", "sm_100a" or "tpu", to compile for one that is not in this machine.

    Compile for one device in a process: Mosaic's cache does not distinguish them.

    Raises:
        ValueError: For another kind.
    """
    if kind not in (allowed := (*_OF.values(), TPU)):
        raise refuse("device", kind, ", ".join(allowed))
    return Device(kind)


def present(device: Device | None = None) -> str | None:
    """The kind of `device`, or of this machine's device if it is one that kernels are written for; else None."""
    if device is not None:
        return device.kind
    if jax.default_backend() != "gpu":
        return TPU if jax.default_backend() == "tpu" else None
    return _OF.get(str(getattr(jax.local_devices()[0], "compute_capability", None)))


def chosen(form: str, device: Device | None = None) -> str | None:
    """The device whose kernel of `form` (`kernels.checked`) is used by default; None: plain XLA computes it."""
    return present(device) if why_off(form, device) is None else None


def why_off(form: str, device: Device | None = None) -> str | None:
    """Why no kernel of `form` is used by default, in words; None: one is. For a named `device` all are."""
    if present(device) is None:
        return f"no kernel is written for {_kind()}"
    if device is not None or (switch := _switch()) == "1":
        return None
    if switch == "0":
        return f"{SWITCH}=0 switches all kernels off"
    forms = checked.read(_entry())
    if forms is None:
        return f"no kernel was checked on this {_kind()} with these versions: run `mercury bench gpu check`"
    found = forms.get(form)
    if found is None:
        return f"{form} was not checked on this {_kind()}: run `mercury bench gpu check`"
    return (
        None
        if found.get("passed") is True
        else f"{form} did not pass here: {found.get('why', 'no reason kept')}"
    )


def status() -> dict[str, Any]:
    """What `mercury info` tells: {"chip", "device", "rule", "file", "on", "off"}; on, off: forms that were checked."""
    found: dict[str, Any] = {"chip": present(), "device": _kind(), "file": None, "on": [], "off": {}}
    if found["chip"] is None:
        return found | {"rule": f"off: no kernel is written for {_kind()}"}
    forms, file = checked.read(_entry()) or {}, checked.path()
    off = {form: why for form in forms if (why := why_off(form)) is not None}
    rule = {"1": f"all on: {SWITCH}=1", "0": f"all off: {SWITCH}=0"}.get(_switch())
    rule = rule or ("on where the check passed" if forms else str(why_off("")))
    on = [form for form in forms if form not in off]
    return found | {"rule": rule, "file": None if file is None else str(file), "on": on, "off": off}


def _switch() -> str:
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise refuse(SWITCH, value, "1 (every kernel), 0 (none), or unset (those that passed the check)")
    return value


def _kind() -> str:
    return jax.local_devices()[0].device_kind


def _entry() -> str:
    return checked.key(_kind(), jax.__version__)
