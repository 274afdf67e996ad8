"""The persistent cache of compiled programs, and the message that is logged while a program compiles for long.

`prepare` is called by the first `load` or decoding call of a process, and by the command line. The environment variable
`MERCURY_CACHE` sets the folder of the cache; an empty value turns the cache off, in the library and the command line.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

CACHE = "MERCURY_CACHE"  # environment variable: folder of the cache; empty: no cache
MIN_COMPILE_SECONDS = 0.1  # programs that compile faster are not stored
# By default XLA's command buffers leave loops out; with this flag the bodies of loops become CUDA graphs too.
GRAPH_FLAGS = (
    "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
)
GRAPHS_FORM = "graphs"  # its verdict of `mercury bench gpu check`, among those of kernels


def cache_compiled_programs(environ: Mapping[str, str] | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache, unless the user has set JAX's own cache or turned this one off.

    A second `mercury sample` then starts in a quarter of the time. Call it before JAX compiles its first program. The
    folder may be deleted at any time.
    """
    environ = os.environ if environ is None else environ
    folder = cache_folder(environ)
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    wanted = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": MIN_COMPILE_SECONDS,
    }
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        if jax.config.values["jax_compilation_cache_dir"] is not None:  # set by the user's program
            return None
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX decides at its first compilation whether there is a cache
    # Child processes read the environment.
    os.environ.update({name.upper(): str(value) for name, value in wanted.items()})
    return folder


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Finds the folder of the cache; None if the user has turned the cache off.

    Each kind of processor has its own folder: several machines may share a home folder, and code that XLA compiled for
    one processor may not run on another.
    """
    own = environ.get(CACHE)
    if own is not None and not own.strip():
        return None
    root = Path(own) if own else Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercury_jax"
    return root / f"xla-{hashlib.sha256(repr((platform.machine(), _processor())).encode()).hexdigest()[:12]}"


def _processor() -> dict[str, str]:
    """Returns the model and the instruction sets of this processor, as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {key: found[key] for key in ("model name", "flags", "Features") if key in found}


def processor_name() -> str:
    """Names the processor of this machine, for the figures that were measured on it."""
    found = _processor()
    name = re.sub(
        r"\((R|TM)\)|CPU|@.*", " ", found.get("model name", platform.processor() or platform.machine())
    )
    sets = {"avx512f": "AVX-512", "amx_tile": "AMX"}
    extra = [text for flag, text in sets.items() if flag in found.get("flags", "").split()]
    return " ".join(name.split()) + (f" ({', '.join(extra)})" if extra else "")


def hardware() -> str:
    """Names the devices and the processor of this machine, for the figures that were measured on them."""
    import jax

    devices, cores = jax.devices(), f"{os.cpu_count()} cores of {processor_name()}"
    return cores if devices[0].platform == "cpu" else f"{len(devices)} x {devices[0].device_kind}, {cores}"


# --- announcing compilation

# Programs of the decoding calls -> what the message calls them.
ANNOUNCED = {
    "decode_program": "decoder",
    "run_session": "decoder",
    "run_sharded_program": "decoder",
    "prefill": "prefill",
    "advance_particles": "search",
}
PATIENCE = 2.0  # seconds of compilation before anything is said


@functools.cache
def prepare() -> None:
    """Turns on the cache of compiled programs and the message about long compilations, once per process."""
    from jax import monitoring

    cache_compiled_programs()
    timers: dict[str, threading.Timer] = {}

    def announce(program: str) -> None:
        import jax

        kept = "" if jax.config.values["jax_compilation_cache_dir"] is None else "; kept for the next start"
        logging.getLogger("mercury_jax").warning("compiling the %s for new sizes (once%s)", program, kept)

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        # JAX reports when a program has been lowered, which is just before it is compiled, and when it is compiled.
        program = str(about.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if program not in ANNOUNCED:
            return
        if event.endswith("jaxpr_to_mlir_module_duration"):
            timers[program] = threading.Timer(PATIENCE, announce, (ANNOUNCED[program],))
            timers[program].daemon = True
            timers[program].start()
        elif event.endswith("backend_compile_duration") and program in timers:
            timers.pop(program).cancel()

    monitoring.register_event_duration_secs_listener(listen)


# --- counting compilations


@functools.cache
def _compilation_counter() -> list[int]:
    """Registers a counter of compiled programs. Cached, because JAX cannot remove a listener."""
    from jax import monitoring

    count = [0]

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        count[0] += event.endswith("backend_compile_duration")

    monitoring.register_event_duration_secs_listener(listen)
    return count


def compilations() -> int:
    """Returns the number of programs that were compiled since the first call of this function."""
    return _compilation_counter()[0]
