"""Decides which kernels a program uses, from the device that it is compiled for and the results of kernel checks.

The device is the device of this machine, or a `types.Device` given to compile ahead of time. A *form* is a kernel for
one head size or dtype, such as "attention-128-bfloat16-int8". `mercury bench gpu check` runs all cases of each
form and writes the results to a small JSON file; a form is used by default if it passed on this device, with this JAX
and these sources of the kernels. `MERCURY_KERNELS=1` uses all forms, `MERCURY_KERNELS=0` none. All of this is read
while a program is traced: a compiled program does not change.

The file is `kernels.json` in `~/.cache/mercury_jax` (or `$XDG_CACHE_HOME/mercury_jax`, or the folder that
`MERCURY_CACHE` names), beside the compiled programs. `MERCURY_KERNEL_CHECKS` names another file, for example one
copied from a machine that no longer exists. With `MERCURY_CACHE` set to nothing and no `MERCURY_KERNEL_CHECKS` there
is no file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from mercury_jax.config import refuse
from mercury_jax.types import Device

SWITCH = "MERCURY_KERNELS"
FILE, FOLDER = "MERCURY_KERNEL_CHECKS", "MERCURY_CACHE"
HOPPER, BLACKWELL = "sm_90a", "sm_100a"  # matrix instructions: wgmma, tcgen05
TPU = "tpu"  # all generations use the same kernels
_BY_CAPABILITY = {"9.0": HOPPER, "10.0": BLACKWELL}


# --- the device


def target(kind: str) -> Device:
    """Returns a device to compile for that is not in this machine.

    Compile for one device per process: Mosaic's cache does not distinguish them.
    """
    if kind not in (allowed := (*_BY_CAPABILITY.values(), TPU)):
        raise refuse("device", kind, ", ".join(allowed))
    return Device(kind)


def present(device: Device | None = None) -> str | None:
    """Returns the kind of device that a program is compiled for."""
    if device is not None:
        return device.kind
    if jax.default_backend() != "gpu":
        return TPU if jax.default_backend() == "tpu" else None
    return _BY_CAPABILITY.get(str(getattr(jax.local_devices()[0], "compute_capability", None)))


# --- the kernels that are used


def chosen(form: str, device: Device | None = None) -> str | None:
    """Decides whether the kernel of a form is used by default."""
    return present(device) if why_off(form, device) is None else None


def why_off(form: str, device: Device | None = None) -> str | None:
    """Gives the reason why no kernel of a form is used by default."""
    if present(device) is None:
        return f"no kernel is written for {device_name()}"
    if device is not None or (switch := _switch()) == "1":
        return None
    if switch == "0":
        return f"{SWITCH}=0 switches all kernels off"
    forms = read_checks(entry_key(device_name(), jax.__version__))
    if forms is None:
        return f"no kernel was checked on this {device_name()} with these versions: run `mercury bench gpu check`"
    found = forms.get(form)
    if found is None:
        return f"{form} was not checked on this {device_name()}: run `mercury bench gpu check`"
    if found.get("passed") is True:
        return None
    return f"{form} did not pass here: {found.get('why', 'no reason kept')}"


def status() -> dict[str, Any]:
    """Reports which kernels are used on this machine, for `mercury info`.

    Returns:
        {"chip": kind or None, "device": name, "rule": in words, "file": results of the check, "on": forms that are
        used, "off": {form: reason}}; on and off list the forms that were checked.
    """
    found: dict[str, Any] = {"chip": present(), "device": device_name(), "file": None, "on": [], "off": {}}
    if found["chip"] is None:
        return found | {"rule": f"off: no kernel is written for {device_name()}"}
    forms, file = read_checks(entry_key(device_name(), jax.__version__)) or {}, checks_file()
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


def device_name() -> str:
    """The name of the first device, such as "NVIDIA H200"."""
    return jax.local_devices()[0].device_kind


# --- the file of checks


@functools.cache
def sources() -> str:
    """Hashes the source files of `mercury_jax.ops`: a changed kernel has to pass its check again."""
    folder, total = Path(__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        total.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def entry_key(device_kind: str, jax_version: str) -> str:
    """Names the entry of the file for a device, a JAX version and the current sources of the kernels."""
    return f"{device_kind}, jax {jax_version}, kernels {sources()}"


def checks_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Finds the path of the file."""
    environ = os.environ if environ is None else environ
    if file := environ.get(FILE, "").strip():
        return Path(file)
    folder = environ.get(FOLDER)
    if folder is not None:
        return Path(folder) / "kernels.json" if folder.strip() else None
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercury_jax" / "kernels.json"


def read_checks(entry: str) -> dict[str, dict[str, Any]] | None:
    """Reads an entry of the file."""
    found = read_json(checks_file(), _check_verdicts, {}).get(entry)
    return found["forms"] if found else None


def write_checks(entry: str, forms: Mapping[str, Mapping[str, Any]], date: str) -> Path | None:
    """Replaces one entry of the file and keeps the others."""
    if (file := checks_file()) is None:
        return None
    others = read_json(file, _check_verdicts, {})
    return replace_json(file, others | {entry: {"date": date, "forms": forms}})


def _check_verdicts(found: Any) -> None:
    forms = [form for entry in found.values() for form in entry["forms"].values()]
    if not all(isinstance(form["passed"], bool) for form in forms):
        raise ValueError("a form has no verdict")


def read_json(file: Path | None, check: Callable[[Any], None], empty: Any) -> Any:
    """Reads what was measured on a device. A damaged file, which `check` raises for, is empty, with a warning."""
    if file is None or not file.is_file():
        return empty
    stat = file.stat()
    # It changes whenever the file is replaced, even twice within one tick of the clock.
    found = _parse(file, check, (stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return empty if found is None else found


@functools.lru_cache(maxsize=4)
def _parse(file: Path, check: Callable[[Any], None], state: tuple[int, ...]) -> Any:
    del state  # only a key of the cache
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        check(found)
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"{file} is ignored, as if nothing was measured ({why}); delete it", stacklevel=2)
        return None


def replace_json(file: Path, value: Any) -> Path:
    """Writes a JSON file at once, so that a reader finds the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(file)
    return file
