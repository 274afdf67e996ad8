"""The measurement of an accelerator, on a machine that has none: its arithmetic, its rows, and what it leaves out."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench import gpu, gpu_attention, gpu_models, gpu_page, gpu_peer, gpu_training, gpu_worker
from mercury_jax.bench.ceilings import Ceilings, per_call
from mercury_jax.bench.known import find
from mercury_jax.cli import main

WORDS, RUN = gpu.words, subprocess.run
MOST = Ceilings(bandwidth=1e9, matmul=1e12)
SHAPE = gpu_attention.Shape("some", 1, 4, 300, 4, 2, 8)


def test_the_bound_is_whichever_takes_longer():
    assert MOST.bound(2e9, 1e12) == 2.0 and MOST.bound(1e9, 3e12) == 3.0


def test_a_call_of_a_chain_runs_on_what_the_one_before_gave():
    seen = []
    assert per_call(lambda x: seen.append(1) or x + 1, jnp.zeros(()), calls=5, repeats=1) > 0
    assert len(seen) == 5  # traced once, in one program


def test_work_of_attention_is_counted_from_its_definition():
    """Two products of T x S x K a head; keys and values read, queries read, the result written."""
    bytes, flops = gpu_attention.work(SHAPE)
    assert bytes == 2 * (2 * 300 * 2 * 8 + 2 * 4 * 4 * 8) and flops == 2 * 2 * 4 * 300 * 8 * 4
    assert gpu_attention.work(SHAPE._replace(causal=True))[1] == flops / 2


def test_every_way_is_timed_against_the_reference_or_says_why_not(monkeypatch):
    monkeypatch.setattr(gpu_attention, "per_call", lambda *a: 0.5)
    rows = {row["way"]: row for row in gpu_attention.measure(MOST, [SHAPE])}
    assert rows["reference"]["relative_error"] < 0.02 and rows["jax xla"]["relative_error"] < 0.02
    assert rows["reference"]["times_as_fast_as_jax"] == 1.0 and "cuDNN" in rows["jax cudnn"]["refused"]
    wrong = {"wrong": lambda q, k, v, ranges: q + 1}
    monkeypatch.setattr(gpu_attention, "ways", lambda shape: wrong)
    (row,) = gpu_attention.measure(MOST, [SHAPE])
    assert row["relative_error"] > 0.1


def test_the_load_of_a_pass_counts_experts_once_each_and_products_of_the_active_alone():
    """DiffusionGemma: 25.2B parameters, 3.8B of them active; every expert is read, few of them multiply."""
    asked = gpu_models.Running("diffusiongemma-26b-a4b", prefix=1024)
    found = gpu_models.weightless.source(asked.name)
    lm = gpu_models.weightless.lm(found, gpu_models.sharding.mesh(devices=jax.devices()[:1]))
    bytes, flops = gpu_models.load(lm, asked)
    assert 50e9 < bytes < 54e9 and 1.9e12 < flops < 2.3e12


def test_a_training_row_is_full_and_its_work_is_six_a_parameter_and_position():
    c = find("mercury-100m").config()
    data = gpu_training.batch(c, 2, 2048)
    assert data.tokens.shape == (2, 2048) and data.editable[0].sum() == data.editable[1].sum() >= 1024
    params = {"a": jax.ShapeDtypeStruct((10, 10), jnp.float32), "b": jax.ShapeDtypeStruct((10,), jnp.float32)}
    alone = gpu_training.flops(params, c, data._replace(ranges=np.zeros_like(data.ranges)))
    assert alone == 6 * 100 * 2 * 2048


def test_what_fails_or_comes_too_late_has_a_row_and_the_others_are_measured(monkeypatch):
    def fails(most):
        raise MemoryError("too large")

    steps = [
        gpu.Step("large", fails),
        gpu.Step("small", lambda most: iter([{"mfu": most.matmul}]), kernels=False),
    ]
    monkeypatch.setattr(gpu, "steps", lambda *a: steps)
    most = {"bytes_per_second": 1.0, "flops_per_second": 2.0}
    asked = {"small": True, "only": [], "from": 0, "to": 2, "seconds": 60, "most": most}

    def said(**more):
        out = []
        with monkeypatch.context() as m:
            m.setenv("MERCURY_KERNELS", "0")
            m.setattr(jax, "clear_caches", lambda: None)
            gpu_worker.work(asked | more, out.append)
        return out

    told = said()
    assert [x["at"] for x in told if "at" in x] == [0, 1, 2]
    bad, good = (x["row"] for x in told if "row" in x)
    assert (
        "too large" in bad["failed"]
        and good["mfu"] == 2.0
        and (bad["kernels"], good["kernels"]) == (True, False)
    )
    assert [x["row"]["left_out"] for x in said(seconds=-1) if "row" in x] == ["the minutes were over"] * 2


def scripted(monkeypatch, *scripts):
    """Children of `measure`, one after another: Python that sees what it was asked as `asked`."""
    left = list(scripts)

    def run(command, *more):
        return WORDS([sys.executable, "-c", f"import time; asked = {command[-1]!r}\n{left.pop(0)}"], *more)

    monkeypatch.setattr(gpu, "words", run)


def test_a_step_that_hangs_or_breaks_costs_its_own_row_alone(monkeypatch):
    """The next process goes on behind it, and is told the ceilings instead of measuring them again."""
    todo = [gpu.Step(name, lambda most: iter([])) for name in "abcd"]
    monkeypatch.setattr(gpu, "steps", lambda *a: todo)
    most = dict(experiment="ceilings", hardware="x", platform="y", devices=1, jax="z", date="0")
    say = lambda told: f"print({json.dumps(told)!r}, flush=True)"
    row = lambda name: say({"row": {"experiment": name}})
    scripted(
        monkeypatch,
        "\n".join([say({"row": most}), say({"at": 0}), row("a"), say({"at": 1}), "time.sleep(60)"]),
        "\n".join(
            ["assert '\"from\": 2' in asked", say({"at": 2}), "import sys; sys.exit('no such kernel')"]
        ),
        "\n".join(['assert \'"hardware": "x"\' in asked', say({"at": 3}), row("d"), say({"at": 4})]),
    )
    got = list(gpu.measure(patience=3.0))
    assert [r["experiment"] for r in got] == ["ceilings", "a", "b", "c", "d"]
    assert (
        "silent for 3 s" in got[2]["failed"]
        and "no such kernel" in got[3]["failed"]
        and got[3]["hardware"] == "x"
    )
    scripted(monkeypatch, "import sys; sys.exit('no device')")
    with pytest.raises(gpu.Unmeasured, match="no device"):
        list(gpu.measure())


def test_the_peer_is_left_out_where_it_is_not_installed_and_compared_where_it_is(monkeypatch):
    absent = "import sys; sys.modules['torch'] = None; exec(open(sys.argv[1]).read())"
    monkeypatch.setattr(
        gpu_peer.subprocess,
        "run",
        lambda command, **how: RUN([*command[:1], "-c", absent, *command[1:]], **how),
    )
    row = gpu_peer.peer(gpu.GEMMA)
    assert row["experiment"] == "peer" and "install torch" in row["left_out"]
    ours = dict(experiment="decoding", model=gpu.GEMMA.name, quantise=None, batch=1, kernels=True, env=[])
    theirs = {"experiment": "peer", "seconds_per_forward": 0.3}
    told = [{"experiment": "ceilings"}, ours | {"seconds_per_forward": 0.1}, theirs]
    monkeypatch.setattr(gpu, "words", lambda *a: iter([*({"row": row} for row in told), {"at": 10**6}]))
    assert list(gpu.measure())[-1]["times_as_fast"] == pytest.approx(3.0)


def test_steps_are_chosen_by_parts_of_their_names():
    assert {s.name.split()[0] for s in gpu.steps(only=["attention", "training"])} == {"attention", "training"}
    assert len(gpu.steps()) == len({s[:1] + s[2:] for s in gpu.steps()})  # each differs in what it does
    with pytest.raises(ValueError, match="--only"):
        gpu.steps(only=["nothing of that name"])


def test_the_command_measures_a_small_model_and_draws_its_page(tmp_path, capsys):
    out, plot = tmp_path / "rows.jsonl", tmp_path / "page.png"
    only = ["decoding nano prefix", "attention prefill", "training"]
    assert main(["bench", "gpu", "--small", "--only", *only, "--out", str(out), "--plot", str(plot)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["experiment"] for r in rows if "failed" in r or "left_out" in r] == []
    assert {r["experiment"] for r in rows} == {"ceilings", "decoding", "attention", "training"}
    told = next(r for r in rows if r["experiment"] == "decoding")
    assert told["passes"] == [gpu_models.SHORT, gpu_models.LONG] and told["seconds_per_forward"] > 0
    assert plot.stat().st_size > 10_000 and "a pass" in capsys.readouterr().out
    with pytest.raises(ValueError, match="plot"):
        gpu_page.page(rows, tmp_path / "page.txt")
