"""Runs programs that a model wrote, each in a new interpreter, in a sandbox.

The sandbox is bubblewrap's (`bwrap`, a package of every Linux distribution): own namespaces for network, processes,
users and mounts. A program sees Python's standard library and the system's libraries, read-only, and nothing else of
this machine: no network, no folder of the user, no environment variables, no file that it can write. Limits on time and
memory hold in both modes. `test_sets` is the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal, NamedTuple

from mercury_jax.config import one_of, refuse

RunCode = Literal["sandbox", "unsandboxed"]
MEMORY = 1 << 30  # bytes of address space of one process
FILE = 1 << 24  # bytes of one file, in the mode without a sandbox
CHILD = Path(__file__).with_name("sandbox_child.py")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store")


class Verdict(NamedTuple):
    """How a program ended.

    Attributes:
        passed: It ran to its end without an exception.
        error: The exception, or why there is no report; None if it passed.
    """

    passed: bool
    error: str | None


def check(mode: RunCode) -> None:
    """Checks that programs can be run in this mode, by running one.

    Args:
        mode: "sandbox", or "unsandboxed" for a machine that is itself a sandbox: only the limits hold.

    Raises:
        ValueError: The mode is unknown, or does not work on this machine; the message says what to do.
    """
    one_of(RunCode, run_code=mode)
    other = 'or "unsandboxed", inside a container or a virtual machine that holds nothing of value'
    if os.name != "posix":
        raise refuse("run_code", mode, "Linux or macOS: the limits on a program need POSIX")
    if mode == "sandbox" and shutil.which("bwrap") is None:
        raise refuse("run_code", mode, f"a machine with bubblewrap (apt install bubblewrap), {other}")
    verdict = run("assert True", mode)
    if not verdict.passed:
        raise refuse("run_code", mode, f"a machine that can run it ({verdict.error}), {other}")


def run(program: str, mode: RunCode, seconds: float = 10.0) -> Verdict:
    """Runs one program.

    Args:
        program: Python source. It has passed if it runs to its end without an exception.
        mode: See `check`.
        seconds: Longest time, by the clock and of the processor.

    Returns:
        How it ended. What it prints is discarded.
    """
    secret = secrets.token_hex(16)
    limits = {"RLIMIT_CPU": int(seconds) + 1, "RLIMIT_FSIZE": FILE, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 256}
    if sys.platform == "linux":  # macOS does not limit the address space
        limits |= {"RLIMIT_AS": MEMORY, "RLIMIT_NPROC": 4096}
    request = json.dumps({"program": program, "secret": secret, "limits": limits})
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", CHILD.read_text(encoding="utf-8")]
    # An empty folder; in a file rather than a pipe the report has a size limit.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as told,
    ):
        process = subprocess.Popen(
            [*(_bubblewrap() if mode == "sandbox" else []), *python], stdin=subprocess.PIPE, stdout=report, stderr=told,
            cwd=folder, env={"PATH": os.environ.get("PATH", os.defpath)}, start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(request.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"no end within {seconds:g} s")
        finally:
            # Its whole session; in the sandbox, processes that left the session die with their namespace.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _verdict(process.returncode, _first(report), _first(told), secret)


def run_all(programs: Sequence[str], mode: RunCode, seconds: float = 10.0) -> list[Verdict]:
    """Runs programs, as many at a time as there are processors.

    Args:
        programs: See `run`.
        mode: See `check`.
        seconds: Longest time of one program.

    Returns:
        How each one ended, in the same order.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: run(program, mode, seconds), programs))


def _bubblewrap() -> list[str]:
    """The command that runs the command behind it in a sandbox."""
    visible = dict.fromkeys((*SYSTEM, sys.base_prefix, sys.base_exec_prefix))
    binds = [word for path in visible for word in ("--ro-bind-try", path, path)]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *binds, "--proc", "/proc",
        "--dev", "/dev", "--dir", "/tmp", "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/",
    ]  # fmt: skip


def _first(file: IO[bytes], most: int = 4096) -> str:
    """The first bytes of an open file as text."""
    file.seek(0)
    return file.read(most).decode(errors="replace")


def _verdict(code: int, report: str, told: str, secret: str) -> Verdict:
    """Reads the report of the child; without one, says how the process ended."""
    try:
        found = json.loads(report)
        if isinstance(found, dict) and secrets.compare_digest(str(found.get("secret")), secret):
            return Verdict(found["error"] is None, found["error"])
    except ValueError:
        pass
    lines = told.strip().splitlines()
    return Verdict(False, f"no report, exit code {code}" + (f": {lines[-1][:200]}" if lines else ""))
