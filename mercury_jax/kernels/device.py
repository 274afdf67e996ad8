"""Which device a program is compiled for, and which kernels it uses there.

The device is the machine's own, or a `types.Device` given to compile ahead of time. A kernel form (`checks`) is used
by default if `mercury bench gpu check` passed it on this device; `MERCURY_KERNELS=1` uses all forms,
`MERCURY_KERNELS=0` none. Both are read while a program is traced: a compiled program does not change.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from mercury_jax.config import refuse
from mercury_jax.kernels import checks
from mercury_jax.types import Device

SWITCH = "MERCURY_KERNELS"
HOPPER, BLACKWELL = "sm_90a", "sm_100a"  # with wgmma, with tcgen05
TPU = "tpu"  # of every generation: their kernels are the same
_BY_CAPABILITY = {"9.0": HOPPER, "10.0": BLACKWELL}


def target(kind: str) -> Device:
    """A device to compile for that is not in this machine.

    Compile for one device per process: Mosaic's cache does not distinguish them.

    Args:
        kind: "sm_90a", "sm_100a" or "tpu".

    Returns:
        The device.

    Raises:
        ValueError: For another kind.
    """
    if kind not in (allowed := (*_BY_CAPABILITY.values(), TPU)):
        raise refuse("device", kind, ", ".join(allowed))
    return Device(kind)


def present(device: Device | None = None) -> str | None:
    """The kind of device that a program is compiled for.

    Args:
        device: A device; None: the one of this machine.

    Returns:
        Its kind; None if no kernel is written for the machine's device.
    """
    if device is not None:
        return device.kind
    if jax.default_backend() != "gpu":
        return TPU if jax.default_backend() == "tpu" else None
    return _BY_CAPABILITY.get(str(getattr(jax.local_devices()[0], "compute_capability", None)))


def chosen(form: str, device: Device | None = None) -> str | None:
    """The kind of device whose kernel of a form is used by default; None: plain XLA computes it.

    Args:
        form: Of `checks.attention_form` or `checks.grouped_form`.
        device: To compile for; None: the device of this machine.
    """
    return present(device) if why_off(form, device) is None else None


def why_off(form: str, device: Device | None = None) -> str | None:
    """Why no kernel of a form is used by default.

    Args:
        form: Of `checks.attention_form` or `checks.grouped_form`.
        device: To compile for: all its kernels are used. None: the device of this machine.

    Returns:
        The reason in words; None: the kernel is used.
    """
    if present(device) is None:
        return f"no kernel is written for {_device_name()}"
    if device is not None or (switch := _switch()) == "1":
        return None
    if switch == "0":
        return f"{SWITCH}=0 switches all kernels off"
    forms = checks.read(_entry())
    if forms is None:
        return f"no kernel was checked on this {_device_name()} with these versions: run `mercury bench gpu check`"
    found = forms.get(form)
    if found is None:
        return f"{form} was not checked on this {_device_name()}: run `mercury bench gpu check`"
    if found.get("passed") is True:
        return None
    return f"{form} did not pass here: {found.get('why', 'no reason kept')}"


def status() -> dict[str, Any]:
    """The choice of kernels on this machine, for `mercury info`.

    Returns:
        {"chip": kind or None, "device": name, "rule": in words, "file": results of the check, "on": forms that are
        used, "off": {form: reason}}; on and off list the forms that were checked.
    """
    found: dict[str, Any] = {"chip": present(), "device": _device_name(), "file": None, "on": [], "off": {}}
    if found["chip"] is None:
        return found | {"rule": f"off: no kernel is written for {_device_name()}"}
    forms, file = checks.read(_entry()) or {}, checks.path()
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


def _device_name() -> str:
    return jax.local_devices()[0].device_kind


def _entry() -> str:
    return checks.entry_key(_device_name(), jax.__version__)
