"""Settings of the test session: the platform, four devices, quick compiles, shape checks on request."""

import os
import sys
from pathlib import Path

import pytest

# Four devices cost nothing measurable. LLVM's level 1 compiles small programs in 4.8 s where the default takes
# 7.1 s, and runs them as fast (level 0 compiles no faster and runs at half the speed).
# Without its expensive passes a decoding program compiles in 3.3 s of CPU time instead of 3.9 s.
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=1",
    "--xla_llvm_disable_expensive_passes=true",
)


def pytest_addoption(parser):
    parser.addoption("--jaxtyping", action="store_true", help="check every shape annotation, with beartype")
    parser.addoption("--platform", default="cpu", help="JAX platform of the session (tests/gpu: cuda)")


def pytest_configure(config):
    # JAX reads both variables when it is first imported, and subprocesses of tests inherit them.
    assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could choose its platform"
    os.environ["JAX_PLATFORMS"] = config.getoption("--platform")
    if config.getoption("--platform") == "cpu":
        given = os.environ.get("XLA_FLAGS", "").split()  # what the user has set stands
        names = {flag.split("=")[0] for flag in given}
        os.environ["XLA_FLAGS"] = " ".join(
            given + [flag for flag in FLAGS if flag.split("=")[0] not in names]
        )

    if config.getoption("--jaxtyping"):
        from jaxtyping import install_import_hook

        import tests.shapes  # noqa: F401  the hook looks it up as an attribute of `tests`

        install_import_hook("mercury_jax", "tests.shapes.check")


# A compiled program holds some ten memory mappings, and Linux ends a process that wants more than 65,530.
MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forget what earlier modules compiled before the process runs out of mappings."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        import jax

        jax.clear_caches()
