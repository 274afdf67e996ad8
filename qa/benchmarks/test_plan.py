"""`python -m benchmarks.plan` without the compilers: its cells, refusals by arithmetic, plans that were stopped."""

import functools
import itertools
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import plan
from mercury_jax import sharding
from mercury_jax.bench import abstract_params, chips, compile as compiling
from mercury_jax.cli import app

main = functools.partial(app.execute, plan.run)

BIG = "diffusiongemma-26b-a4b"
SOON = 0.01  # seconds in which no process gets anywhere


# --- which cells


def test_a_plan_is_the_product_of_its_lists_without_duplicates():
    found = plan.grid(["nano", "llada-8b"], ["t4", "h200", "t4"], ["none", "int8"], [512, 4096])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert {(r.quantise, r.context) for r in found[:4]} == {
        (None, 512)
    }  # a table is finished before the next
    assert [(r.model, r.target) for r in found[:3]] == [("nano", "t4"), ("nano", "h200"), ("llada-8b", "t4")]
    assert len(plan.grid()) == 6 * 9 and {(r.quantise, r.context) for r in plan.grid()} == {("int8", 4096)}


@pytest.mark.parametrize(
    "words, told",
    [("llada-7b", "llada-8b is the nearest"), ("nano --for h1000", "--for is 'h1000'"),
     ("nano --quantise int4", "--quantise is 'int4'; allowed: none"), ("nano --context 4m", "--context is '4m'"),
     ("nano --context 0", "--context is 0"), ("nano --for ,", "--for"), ("nano --dtype int7", "--dtype is 'int7'"),
     ("nano --limit 0", "--limit is 0"), ("nano --json --markdown", "--markdown"), ("nano --batch 0", "--batch is 0"),
     ("nano --what train", "option is '--what'")],
)  # fmt: skip
def test_a_bad_plan_is_refused_before_a_process_is_started(words, told, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err


def test_a_plan_of_chips_without_any_compiler_is_refused_as_a_whole(capsys, monkeypatch):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    assert main(["nano", "--for", "v5e-1,h200"]) == 2
    assert "[deviceless]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_chip_without_its_compiler_is_refused_beside_others(monkeypatch):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    tpu, gpu = plan.plan(plan.grid([BIG], ["v5e-1", "h200"]))
    assert tpu["status"] == "too large" and gpu["status"] == "refused" and "CUDA plugin" in gpu["reason"]


# --- refusals by arithmetic


@pytest.mark.long
def test_the_bytes_of_the_weights_are_those_of_the_abstract_parameters():
    for name, quantise in (("nano", None), ("nano", "int8"), ("mercury-100m", "fp8")):
        found = abstract_params.source(name, "bfloat16")
        mesh = sharding.mesh(devices=jax.devices()[:1])
        params = abstract_params.abstract_lm(found, mesh, quantise).params
        total = sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(params))
        assert abstract_params.weight_bytes(found, {}, quantise) == total
    found = abstract_params.source(BIG)
    whole, eighth = (abstract_params.weight_bytes(found, {"expert": n}) for n in (1, 8))
    assert whole / 8 < eighth < whole / 4  # experts lie over the devices, the rest is on each


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "model, target, quantise",
    [(BIG, "t4", "int8"), (BIG, "v6e-1", None), ("llada-8b", "t4", None), (BIG, "l4x2", None)],
)
def test_weights_that_do_not_fit_are_refused_without_a_compiler(model, target, quantise, tmp_path):
    out = tmp_path / "out.json"
    request = compiling.CompileRequest(model, target, quantise=quantise, weights_first=True)
    assert compiling.main(["program", json.dumps(request._asdict()), str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["fits"] is False and record["bytes_per_device"] == record["weight_bytes"] > record["memory"]


# --- cells that fail, and plans that were stopped


@pytest.fixture
def processes(monkeypatch):
    """The processes that are started, as a list that grows; that the compilers are missing is found by them only."""
    started, popen = [], subprocess.Popen

    def count(words, *args, **kwargs):
        started.append(words)
        return popen(words, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", count)
    monkeypatch.setattr(chips, "check_plugin", lambda chip: None)
    return started


@pytest.fixture
def dying(tmp_path):
    """A recipe that ends the process that compiles it, and no other."""
    path = tmp_path / "dying.py"
    path.write_text(
        "import os\n"
        "from mercury_jax.training.recipe import load_recipe\n"
        "if 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK' in os.environ:\n"
        "    os._exit(7)\n"
        "config = lambda: load_recipe('nano')\n"
    )
    return str(path)


@pytest.mark.long
def test_a_cell_that_fails_does_not_end_the_plan_and_is_tried_again(processes, dying, tmp_path):
    file = tmp_path / "plan.jsonl"
    requests = plan.grid([dying, BIG], ["t4"])
    records = list(plan.plan(requests, str(file)))
    assert [(r["model"], r["status"]) for r in records] == [(dying, "failed"), (BIG, "too large")]
    assert "ended with code 7" in records[0]["reason"]
    assert records[1]["reason"] == "weights of 25.3 GB do not fit into 15.8 GB" and len(processes) == 2
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    again = list(plan.plan(requests, str(file), limit=SOON))
    assert again[1] == records[1] and len(processes) == 2 + 1  # the second cell comes from the file
    assert again[0]["status"] == "failed" and "was stopped after 0.01 s" in again[0]["reason"]


@pytest.mark.slow
def test_a_stopped_plan_goes_on_where_it_was_stopped(processes, tmp_path):
    file = tmp_path / "plan.jsonl"
    requests = plan.grid([BIG], ["t4", "l4", "v5e-1"])
    first = list(itertools.islice(plan.plan(requests, str(file)), 2))
    file.write_bytes(file.read_bytes()[:-20])  # stopped while the second record was written
    records = list(plan.plan(requests, str(file)))
    assert len(processes) == 2 + 2 and records[0] == first[0]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    assert list(plan.plan(requests, str(file))) == records and len(processes) == 4
    # A record holds for its request, its build and its kind of weights only.
    others = [plan.grid([BIG], ["t4"], contexts=[2048]), plan.grid([BIG], ["t4"], dtype="float16")]
    others += [plan.grid([BIG], ["t4"], ["none"]), plan.grid([BIG], ["t4"], batch=2)]
    for n, other in enumerate(others, start=1):
        list(plan.plan(other, str(file), limit=SOON))
        assert len(processes) == 4 + n
    file.write_text(json.dumps(records[0] | {"build": "of another version"}) + "\n")
    list(plan.plan(requests[:1], str(file), limit=SOON))
    assert len(processes) == 4 + len(others) + 1


def test_a_build_changes_with_the_model_and_the_sources_of_its_program(tmp_path, monkeypatch):
    root = tmp_path / "mercury_jax"
    for name in ("decode/rule.py", "cli/table.py", "bench/targets/l4.txtpb"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("first")
    monkeypatch.setattr(plan, "ROOT", root)
    nano, other = abstract_params.source("nano"), abstract_params.source("nano", "float16")
    build = plan.build_of(nano)
    assert build == plan.build_of(abstract_params.source("nano")) != plan.build_of(other)
    (root / "cli/table.py").write_text("second")
    assert plan.build_of(nano) == build
    for name in ("decode/rule.py", "bench/targets/l4.txtpb"):
        (root / name).write_text("second")
        assert plan.build_of(nano) != build
        build = plan.build_of(nano)


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"request": {}}\n'])
def test_a_file_that_is_no_plan_is_refused_and_stays_as_it_is(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    file = tmp_path / "other.jsonl"
    file.write_text(text)
    assert main(["nano", "--for", "h200", "--out", str(file)]) == 2
    assert "line 1 is not a record of a plan" in capsys.readouterr().err and file.read_text() == text


# --- what people read


def record(model="nano", target="h200", status="compiled", quantise="int8", **more):
    request = compiling.CompileRequest(model, target, context=4096, quantise=quantise)._asdict()
    return {"request": request, "model": model, "for": target, "status": status, "dtype": "bfloat16", **more}


def fast(tokens, **more):
    return record(bytes_per_device=27.7e9, memory=150e9, implied={"tokens_per_second": tokens}, **more)


def test_a_cell_says_memory_and_speed_or_what_became_of_it():
    assert plan.cell_text(fast(1404.6)) == ("27.7 GB", "1,405 tok/s")
    assert plan.cell_text(fast(0.234)) == ("27.7 GB", "0.23 tok/s")
    assert plan.cell_text(fast(99, open_loops_per_pass=2)) == ("27.7 GB", "≤ 99 tok/s")
    assert plan.cell_text(record(status="too large", bytes_per_device=2.6e10)) == ("too large", "26.0 GB")
    assert plan.cell_text(record(status="refused", reason="no")) == ("refused", "")
    assert plan.cell_text(None) == ("", "")


def test_a_table_is_one_precision_and_context_and_lists_every_reason_below():
    rows = [
        fast(1404.6, model=BIG), fast(3.0, model=BIG, target="t4"), record("nano", status="refused", reason="why\nnot"),
        record("nano", status="failed", quantise=None, reason="it died"),
    ]  # fmt: skip
    first, second = plan.tables(rows)
    assert first.models == [BIG, "nano"] and first.targets == ["h200", "t4"]
    text = plan.markdown(first)
    assert f"| {BIG} | 27.7 GB, 1,405 tok/s | 27.7 GB, 3 tok/s |\n| nano | refused |  |\n" in text
    assert (
        text.startswith("Weights in int8, 1 x 4,096 positions:")
        and "| model | h200 (150.0 GB) | t4 (15.8 GB) |" in text
    )
    assert "\n- nano, h200: why not\n" in text and "- t4 has no bf16" in text and "roofline" not in text
    assert "- v5e-1: tokens per second at the roofline" in plan.markdown(
        plan.tables([fast(9.0, target="v5e-1")])[0]
    )
    assert "- nano, h200: it died" in plan.markdown(second) and "as stored" in second.title


@pytest.mark.slow
def test_the_command_prints_tables_markdown_or_records(processes, tmp_path, capsys):
    words = [BIG, "--for", "t4,l4", "--out", str(tmp_path / "plan.jsonl")]
    assert main([*words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["for"], r["status"], r["memory"]) for r in rows] == [
        ("t4", "too large", 15800000000), ("l4", "too large", 24000000000)
    ]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "2 of 2: diffusiongemma-26b-a4b for l4: too large, 25.3 GB" in shown.err
    assert "weights of 25.3 GB do not fit into 24.0 GB" in shown.out and "┃" in shown.out
    assert main([*words, "--markdown"]) == 0
    assert f"| {BIG} | too large, 25.3 GB | too large, 25.3 GB |" in capsys.readouterr().out
    assert len(processes) == 2 and len(Path(words[-1]).read_text().splitlines()) == 2
