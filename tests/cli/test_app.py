"""Dispatch, and the cache of compiled programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mercury_jax import compilation as app

SCRIPT = """
import json, sys
if sys.argv[1] == "late":
    import jax
from mercury_jax import compilation as app
app.MIN_COMPILE_SECONDS = 0.0
folder = app.cache_compiled_programs()
import jax
jax.jit(lambda x: x + 1)(1.0)
print(json.dumps([folder and str(folder), jax.config.jax_compilation_cache_dir]))
"""


def kept(when, **environ):
    clean = {k: v for k, v in os.environ.items() if k not in (app.CACHE, "JAX_COMPILATION_CACHE_DIR")}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], capture_output=True, text=True,
        env=clean | {"PYTHONPATH": root} | environ, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_programs_are_cached_whether_jax_was_imported_before_or_not(tmp_path):
    for when in ("early", "late"):
        ours, jax = kept(when, MERCURY_CACHE=str(tmp_path / when))
        assert ours == jax and list(Path(ours).iterdir()), when


@pytest.mark.long
def test_the_environment_decides_about_the_cache(tmp_path):
    mine = str(tmp_path / "mine")
    assert kept("early", JAX_COMPILATION_CACHE_DIR=mine, MERCURY_CACHE=str(tmp_path)) == [None, mine]
    assert kept("early", MERCURY_CACHE="", HOME=str(tmp_path)) == [None, None]
    assert os.listdir(tmp_path) == ["mine"]


def test_the_cache_folder_depends_on_the_user_and_the_processor(monkeypatch):
    at_home = app.cache_folder({"XDG_CACHE_HOME": "/x"})
    assert at_home is not None and at_home.parent == Path("/x/mercury_jax")
    assert app.cache_folder({app.CACHE: "/y"}) == Path("/y") / at_home.name
    another = {"model name": "AMD EPYC(TM) 9R14 CPU @ 2.60GHz", "flags": "sse2 avx512f"}
    monkeypatch.setattr(app, "_processor", lambda: another)
    assert app.cache_folder({"XDG_CACHE_HOME": "/x"}) != at_home
    assert app.processor_name() == "AMD EPYC 9R14 (AVX-512)"
    assert app.cache_folder({app.CACHE: " "}) is None
