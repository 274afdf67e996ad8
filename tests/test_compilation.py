"""Programs that decoding compiles: few, shared, kept between processes, and announced where one takes a while."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import compilation
from mercury_jax.compilation import compilations
from tests.tiny import tiny

FIRST_SAMPLE = """
import json, time
import mercury_jax as mj
import jax, jax.numpy as jnp
jnp.ones(3) + 1  # a user's own computation comes first
mj.sample, mj.load
began = time.process_time()
out = mj.sample(mj.load(), "1+1=", max_tokens=8)
print(json.dumps([time.process_time() - began, str(jax.config.jax_compilation_cache_dir), out.text]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["block_causal", "bidirectional"])
def test_calls_of_forty_sizes_share_twelve_programs(pattern):
    lm, rng = tiny(pattern, layers=1), np.random.default_rng(0)
    before = compilations()
    for _ in range(40):
        rows = int(rng.integers(1, 17))
        prompts = [rng.integers(3, 300, int(rng.integers(1, 101))).tolist() for _ in range(rows)]
        out = mj.sample(lm, prompts, max_tokens=int(rng.integers(8, 65)), sampler=mj.rules.threshold(0.3))
        assert len(out.texts) == rows
    assert compilations() - before <= 12


def run(script, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MERCURY_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=clean | {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"} | environ,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    (first, folder, text), (second, _, again) = (
        run(FIRST_SAMPLE, MERCURY_CACHE=str(tmp_path)) for _ in range(2)
    )
    assert text == again and Path(folder).parent == tmp_path
    assert second < 3 and second < first  # seconds of the processor, whatever else it does


@pytest.mark.long
def test_the_cache_is_off_where_its_folder_is_empty(tmp_path):
    assert run(FIRST_SAMPLE, MERCURY_CACHE="", HOME=str(tmp_path))[1] == "None" and not os.listdir(tmp_path)


def test_a_long_compilation_is_announced(monkeypatch, caplog):
    compilation.prepare()
    monkeypatch.setattr(compilation, "PATIENCE", 0.0)

    def compiled(name):
        def program(x):
            for _ in range(30):
                x = jnp.sin(x) @ x
            return x

        program.__name__ = name
        jax.jit(program)(jnp.ones((3, 3)))

    with caplog.at_level(logging.WARNING, "mercury_jax"):
        compiled("a_users_own")
        assert not caplog.records
        compiled("decode_program")
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling the decoder for new sizes (once")
