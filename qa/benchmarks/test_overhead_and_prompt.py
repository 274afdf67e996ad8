"""sample() against its bare forward passes, prefill of long prompts, and the command lines of the benchmarks."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import overhead, prompt
from benchmarks.timing import prompt_ids
from mercury_jax.bench.decode import SweepPoint
from mercury_jax.cli.app import execute
from mercury_jax.config import Plan
from mercury_jax.decode import rules, session as programs
from mercury_jax.decode.request import Request, start
from mercury_jax.types import Pass
from tests.tiny import tiny


@pytest.mark.long
def test_warm_calls_compile_nothing_and_make_the_passes_that_are_compared():
    [row] = overhead.compare(tiny(), [SweepPoint("threshold", {"p": 0.9})], batches=[2], tokens=16, pairs=2)
    assert row["recompilations"] == 0 and row["passes"] >= 1 + 16 // 8
    assert row["ratio"] > 0 and row["within"] == (row["ratio"] <= 1.10)
    low, high = row["ratio_quartiles"]
    assert low <= row["ratio"] <= high
    json.dumps(row)


def test_the_bare_loop_returns_the_logits_of_its_last_pass():
    lm, setting = tiny(), SweepPoint("threshold", {"p": 0.9})
    bare = overhead.BarePasses(lm, setting, 1, 16, passes=3)
    model, like, width = lm.model, bare.like, bare.like.canvas.shape[1]
    cache = jax.tree.map(jnp.copy, bare.cache)  # the loop donates its own
    _, logits = bare.run(bare.params, bare.cache, like, jnp.asarray(3))

    @jax.jit
    def forward(tokens, cache, start):
        n = jnp.asarray([width])
        given = Pass(tokens, cache, start, n, start + n, start < 0, like.self_cond)
        hidden, cache = model.forward(lm.params, given)
        return model.head(lm.params, hidden), cache

    known = len(prompt_ids(lm, 1)[0])
    for i in range(3):
        start = jnp.asarray([known + i * 16 // 3 // width * width])
        wanted, cache = forward((jnp.arange(width)[None] + i) % model.config.vocab, cache, start)
    np.testing.assert_allclose(logits, wanted, atol=1e-4)


@pytest.mark.slow
def test_prompts_grow_in_rising_order_with_a_cache_in_proportion():
    small, large = prompt.measure(tiny(), [120, 100], repeats=1)  # of equal capacity: one compilation
    assert (small["length"], large["length"], small["growth"]) == (100, 120, 1.0)
    assert large["cache_growth"] == pytest.approx(100 / 120)
    assert small["cache_bytes"] == small["slots"] * 2 * 32 * 4  # keys and values of one head
    assert small["sampled"] == large["sampled"] == 32 and small["layers_attending"] == 0
    json.dumps([small, large])


@pytest.mark.long
def test_one_layer_prefills_without_attention():
    def program(layers):
        lm = prompt.small_model(tiny(), 256, layers, 0)
        asked = prompt._request(lm, 128, 0)
        session = start(lm, Request(sampler=rules.threshold(), plan=Plan(), rows=asked))
        lowered = programs.prefill_program.lower(session.config, lm.params, session.state, 128)
        return lowered.compile().as_text()

    softmax = lambda text: text.count(" exponential(")
    assert softmax(program(1)) == 0 < softmax(program(2))


@pytest.mark.parametrize(
    "run, argv, words",
    [
        (overhead.run, ["--batches", "0", "--rules", "threshold"], ["batch", "0"]),
        (prompt.run, ["--lengths", "many"], ["--lengths", "'many'", "whole number"]),
        (prompt.run, ["--length", "8"], ["'--length'", "--lengths is the nearest"]),
    ],
)
def test_benchmarks_refuse_bad_input(run, argv, words, capsys):
    assert execute(run, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and [w for w in words if w not in err] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overhead", "peer", "pipeline", "prompt", "repair", "cache", "quantise"])
def test_every_benchmark_explains_itself(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"python -m benchmarks.{name}" in run.stdout and "examples:" in run.stdout
