"""Settings of the test session: platform, four devices, quick compiles, a cache of programs, optional shape checks."""

import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

# Four devices cost nothing measurable. The rest is about compiling, which is most of what the tests do: without
# optimisation, fusions or threads of its own a file of small programs takes 18 s of CPU time instead of 38 s, though
# what then runs is slower.
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if version("jaxlib") < "0.11":  # a later one ends the process at a flag that it no longer knows
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)


def pytest_addoption(parser):
    parser.addoption("--jaxtyping", action="store_true", help="check every shape annotation, with beartype")
    parser.addoption("--platform", default="cpu", help="JAX platform of the session (qa/gpu: cuda)")


@pytest.hookimpl(tryfirst=True)  # before pytest reads `-m "not slow"`
def pytest_collection_modifyitems(items):
    """Marks cases beyond those of `quick_cases` as slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        [count] = alike[0].get_closest_marker("quick_cases").args
        quick = {i * len(alike) // count for i in range(count)}  # spread evenly
        for i in set(range(len(alike))) - quick:
            alike[i].add_marker(pytest.mark.slow)


def pytest_configure(config):
    gc.set_threshold(50_000, 20, 10)  # tracing makes many objects and little garbage
    # JAX reads both variables when it is first imported, and subprocesses of tests inherit them.
    assert "jax" not in sys.modules, "jax was imported before conftest.py could choose its platform"
    os.environ["JAX_PLATFORMS"] = config.getoption("--platform")
    os.environ["MERCURY_CACHE"] = ""  # what a test compiles is not kept in the user's home
    if config.getoption("--platform") != "cpu":  # leave memory to the processes that tests start
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        given = os.environ.get("XLA_FLAGS", "").split()  # what the user has set stands
        names = {flag.split("=")[0] for flag in given}
        os.environ["XLA_FLAGS"] = " ".join(
            given + [flag for flag in FLAGS if flag.split("=")[0] not in names]
        )
        # Threads of XLA's CPU client. One device may wait in several collectives at once, each on a thread of its own:
        # with only one thread per device, the collectives of a training step on four devices deadlocked.
        os.environ.setdefault("NPROC", "16")

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a worker of xdist inherits it from the controller
        folder = tempfile.mkdtemp(prefix="mercury-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))

    if config.getoption("--jaxtyping"):
        from jaxtyping import install_import_hook

        import tests.shapes  # noqa: F401  the hook looks it up as an attribute of `tests`

        install_import_hook("mercury_jax", "tests.shapes.check")


# A compiled program holds some ten memory mappings, and Linux ends a process that wants more than 65,530. Compiling
# anew reads the cache on disk, so that forgetting early costs little and keeps a worker smaller.
MAPPINGS = 10_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forget what earlier modules compiled before the process runs out of mappings."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        import jax

        jax.clear_caches()
