"""Laws of the sandbox: a program passes only by running to its end, and reaches nothing outside.

The isolation is bubblewrap's; without it (macOS, or a machine where it is not installed) those tests are skipped, and
the laws of the verdict are checked in the mode without a sandbox.
"""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from mercury_jax.evaluate import sandbox

isolated = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the limits need POSIX")
MODES = [pytest.param("sandbox", marks=isolated), "unsandboxed"]


@pytest.mark.parametrize("mode", MODES)
def test_a_program_passes_only_by_running_to_its_end(mode):
    wrong = {
        "assert 1 == 2, 'no'": "AssertionError: no",
        "import sys; sys.exit(0)": "SystemExit: 0",
        "import os; os._exit(0)": "no report, exit code 0",
        "def f(:": "SyntaxError",
        "def f(): f()\nf()": "RecursionError",
        "x = bytearray(3 << 30)": "MemoryError",
        "import numpy": "ModuleNotFoundError",
        # A report of its own, on the descriptor behind standard output too, does not have the secret.
        """import os
for fd in range(1, 9):
    try: os.write(fd, b'{"secret": "", "error": null}')
    except OSError: pass
os._exit(0)""": "no report, exit code 0",
    }
    found = sandbox.run_all(["print('fine')", *wrong], mode)
    assert found[0] == sandbox.Verdict(True, None)
    for (program, error), verdict in zip(wrong.items(), found[1:], strict=True):
        assert not verdict.passed and (verdict.error or "").startswith(error), (program, verdict)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_without_an_end_is_killed(mode, program):
    began = time.monotonic()
    assert sandbox.run(program, mode, 0.7) == sandbox.Verdict(False, "no end within 0.7 s")
    assert time.monotonic() - began < 10


@isolated
def test_nothing_of_the_machine_is_reached_from_the_sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("MERCURY_SECRET", "1")
    secret = tmp_path / "secret.txt"
    secret.write_text("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for program, error in {
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)": "ConnectionRefusedError",
            f"open({str(secret)!r})": "FileNotFoundError",
            f"open({str(Path.cwd() / 'pyproject.toml')!r})": "FileNotFoundError",
            "open('/etc/passwd')": "FileNotFoundError",
            "open('/tmp/x', 'w')": "OSError: [Errno 30] Read-only",
            "open('/dev/shm/x', 'w')": "OSError: [Errno 30] Read-only",
            f"import os; os.kill({os.getpid()}, 0)": "ProcessLookupError",
            "import os; os.environ['MERCURY_SECRET']": "KeyError",
        }.items():
            verdict = sandbox.run(program, "sandbox")
            assert not verdict.passed and (verdict.error or "").startswith(error), (program, verdict)
            # The same program does reach it without the sandbox, but for what it must not write.
            if "Errno 30" not in error and "MERCURY" not in program:
                assert sandbox.run(program, "unsandboxed").passed or "passwd" in program, program


@isolated
def test_no_process_outlives_its_program():
    mark = f"60.{os.getpid()}"
    fork = f"""import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep({mark})
    os._exit(0)"""
    sandbox.run(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {fork!r}])", "sandbox")
    deadline = time.monotonic() + 5
    while alive := [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_a_missing_sandbox_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*unsandboxed"):
        sandbox.check("sandbox")
    with pytest.raises(ValueError, match="run_code"):
        sandbox.check("docker")
