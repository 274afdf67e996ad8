"""`mercury bench gpu` without a GPU: failures affect their own case only, results are stored, the budget is kept."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench import abstract_params as ap, hlo, timing
from mercury_jax.bench.gpu import check, commands, profile, tune
from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.bench.gpu.runner import GpuCase, Runner, append
from mercury_jax.cli import app, main
from mercury_jax.compilation import GRAPH_FLAGS, GRAPHS_FORM
from mercury_jax.ops import device as kernel_device, tuned
from mercury_jax.ops.attention.cases import AttentionShape
from mercury_jax.ops.experts.cases import GroupedShape
from mercury_jax.ops.tuned import GroupedKnobs

ROOT = Path(__file__).parents[2]
BROKEN = (sys.executable, str(Path(__file__).with_name("broken_worker.py")))


# --- processes


def scripted(script, budget=60.0, **how):
    """A runner whose children answer each case by a script that sees `args` and has `say`."""
    begin = "import json, os, sys, time\nsay = lambda **told: print(json.dumps(told), flush=True)\n"
    loop = "for line in sys.stdin:\n    args = json.loads(line)['args']\n"
    body = "".join(f"    {line}\n" for line in script.splitlines())
    said = []
    return Runner(budget, (sys.executable, "-c", begin + loop + body), said.append, **how), said


CHILD = """
if args.get('do') == 'hang': say(stage='in a kernel'); time.sleep(60)
if args.get('do') == 'crash': print('no such instruction', file=sys.stderr); os.abort()
if args.get('do') == 'refuse': say(failed='it cannot')
else: print('noise of a library'); say(row={'pid': os.getpid()}); say(done=True)
""".strip()


def asking(do="", **how):
    return GpuCase(do or "fine", "x", {"do": do}, **how)


def test_a_hang_a_crash_or_a_failure_affects_its_own_case_only():
    running, said = scripted(CHILD, beat=0.2)
    with closing(running):
        first, second = (running.run(asking())[0]["pid"] for _ in range(2))
        assert first == second  # a process serves while all goes well
        hung = running.run(asking("hang", limit=1.0))
        assert "killed after 1 s while in a kernel" in hung[0]["failed"] and hung[0]["killed"]
        third = running.run(asking())[0]["pid"]
        assert third != first
        crashed = running.run(asking("crash"))
        assert "signal SIGABRT: no such instruction" in crashed[0]["failed"]
        assert running.run(asking("refuse"))[0]["failed"] == "it cannot"
        assert running.run(asking())[0]["pid"] not in (first, third)
        for pid in (first, third):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    assert any("hang: in a kernel" in line and "of at most 1 s" in line for line in said)


def test_a_failure_in_a_used_process_is_repeated_in_a_new_one():
    script = "new = not globals().get('used'); used = True\nsay(row={'passed': new}); say(done=True)"
    running, _ = scripted(script)
    with closing(running):
        assert running.run(asking())[0]["passed"]
        (row,) = running.run(asking())
        assert row["passed"] and "in_a_used_process" in row


@pytest.mark.long
def test_no_case_begins_without_time_or_exceeds_the_budget():
    running, _ = scripted(CHILD, budget=2.0)
    with closing(running):
        began = time.monotonic()
        assert "killed" in running.run(asking("hang", limit=60.0, least=0.1))[0]["failed"]
        assert time.monotonic() - began < 4
        assert running.run(asking(least=0.5))[0]["not_run"] == "time"


def test_each_environment_has_its_own_process_and_kernels_are_not_forced(monkeypatch):
    monkeypatch.setenv("MERCURY_KERNELS", "1")
    monkeypatch.setenv("XLA_FLAGS", "--a")
    running, _ = scripted("say(row={**os.environ, 'pid': os.getpid()}); say(done=True)")
    with closing(running):
        (plain,) = running.run(asking())
        (told,) = running.run(asking(env=(("MERCURY_KERNELS", "0"), ("XLA_FLAGS", "--b"))))
    assert "MERCURY_KERNELS" not in plain and plain["XLA_FLAGS"] == "--a" and plain["pid"] != told["pid"]
    assert told["MERCURY_KERNELS"] == "0" and told["XLA_FLAGS"] == "--a --b"
    assert told["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" and told["PYTHONPATH"].startswith(str(ROOT))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a child with its parent")
def test_a_killed_command_leaves_no_process_on_the_device(tmp_path):
    """The child is in another process group, so it must end by itself."""
    script = (
        "from mercury_jax.bench.gpu.runner import *\n"
        "r = Runner(60); r.run(GpuCase('about', 'about', {}))\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(r._child._process.pid)); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
        time.sleep(0.1)
    child = int((tmp_path / "pid").read_text())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the child lives on")


def test_rows_are_appended_as_they_are_measured(tmp_path):
    file = tmp_path / "rows.jsonl"
    for n in range(2):
        append(str(file), {"n": n})
        assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == list(range(n + 1))


# --- check


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """broken(faults) -> rows of a check of the plain form of four head sizes, and what is stored of each form."""
    found = [
        commands._check_case("attention", AttentionShape(w, b=1, t=4, h=2, g=1, s=64, r=r), 25.0)
        for w in (64, 128, 256, 512)
        for r in (1, 2)
    ]
    found = [c._replace(args=c.args | {"seed": 0, "draws": 1}, env=commands.KERNELS) for c in found]
    monkeypatch.setattr(commands, "check_cases", lambda *a: found)
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    monkeypatch.setenv("MERCURY_ONCE", str(tmp_path / "once"))

    def run(only=(), **faults):
        monkeypatch.setenv("MERCURY_BREAK", json.dumps({k.strip("w"): v for k, v in faults.items()}))
        with closing(Runner(300.0, BROKEN, lambda line: None)) as running:
            rows = list(commands.check(running, small=True, only=only))
        return rows, kernel_device.read_checks(
            kernel_device.entry_key(jax.local_devices()[0].device_kind, jax.__version__)
        )

    return run


@pytest.mark.slow
def test_a_form_that_fails_is_off_and_the_others_are_decided(broken):
    rows, kept = broken(w128="crash", w256="nan", w512="wrong")
    verdicts = {row["form"]: row["verdict"] for row in rows if "verdict" in row}
    assert verdicts == {f"attention-{w}-bfloat16": "on" if w == 64 else "off" for w in (64, 128, 256, 512)}
    assert {form: told["passed"] for form, told in kept.items()} == {
        f: v == "on" for f, v in verdicts.items()
    }
    for width, reason in ((128, "SIGABRT"), (256, "NaN"), (512, "relative error 0.1")):
        assert reason in kept[f"attention-{width}-bfloat16"]["why"]
        later = [row for row in rows if row.get("form") == f"attention-{width}-bfloat16" and "not_run" in row]
        assert len(later) == 1


@pytest.mark.slow
def test_a_form_that_hangs_is_off_and_a_form_broken_by_an_earlier_case_is_on(broken, monkeypatch):
    monkeypatch.setattr(commands, "check_cases", lambda *a, found=commands.check_cases(): [
        c._replace(limit=6.0) if c.args["shape"]["width"] == 128 else c for c in found
    ])  # fmt: skip
    rows, kept = broken(w128="hang", w512="once")
    assert kept["attention-64-bfloat16"]["passed"] and kept["attention-512-bfloat16"]["passed"]
    assert "killed after 6 s" in kept["attention-128-bfloat16"]["why"]
    assert any("only here" in row.get("in_a_used_process", "") for row in rows)


@pytest.mark.slow
def test_a_part_of_a_name_selects_whole_forms_and_other_forms_keep_their_results(broken, monkeypatch):
    rows, kept = broken(w256="error")
    assert "ILLEGAL_ADDRESS" in kept["attention-256-bfloat16"]["why"]
    rows, kept = broken(only=["attention-256-bfloat16 b=1 t=4 h=2 g=1 s=64 r=2"])
    done = [row["case"].split()[0] for row in rows if "passed" in row and "case" in row]
    assert done == ["attention-256-bfloat16"] * 2
    assert all(told["passed"] for told in kept.values()) and len(kept) == 4


@pytest.mark.slow
def test_a_form_for_which_no_time_was_left_is_off(broken, monkeypatch):
    found = commands.check_cases()
    monkeypatch.setattr(commands, "check_cases", lambda *a: [*found[:3], found[3]._replace(least=1e9)])
    rows, kept = broken()
    assert kept["attention-64-bfloat16"]["passed"] and "time" in kept["attention-128-bfloat16"]["why"]
    assert [row["not_run"] for row in rows if "not_run" in row] == ["time"]


@pytest.mark.parametrize("which, count", [("sm_90a", 32), ("sm_100a", 16), ("tpu", 15)])
def test_forms_of_cases_have_the_names_that_the_kernels_look_up(which, count):
    names = set()
    for case in commands.check_cases(which, 0):
        names.add(case.form)
        if case.work in ("sanitizer", "graphs"):
            continue
        op, fields = check.OPERATIONS[case.args["operation"]], case.args["shape"]
        shape = op.table().shape(**fields)
        like = shape.check(op, kernel_device.target(which)).like
        if isinstance(shape, AttentionShape):
            assert case.form == op.form_of(*like, softcap=shape.softcap)
        elif isinstance(shape, GroupedShape):
            kinds = {"act": jax.nn.gelu if shape.gated else None}
            assert case.form == op.form_of(like[0], like[2], **kinds) + "-gradient" * shape.gradient
            sizes = shape.sizes(np.random.default_rng(0))
            starts = (np.cumsum(sizes) - sizes)[sizes > 0]
            assert sizes.sum() == shape.rows
            assert shape.experts == 1 or (set(starts % 8) == set(range(8)) and 0 in sizes)
        else:
            assert case.form == op.form_of(*like)
    assert len(names - {""}) == count


@pytest.mark.slow
def test_every_case_of_a_chip_is_lowered_for_it():
    """The first shape of each form, lowered for CUDA; this needs no chip."""
    todo = {}
    for case in commands.check_cases(kernel_device.HOPPER, 0):
        if "shape" in case.args and not case.args["shape"].get("softcap") and "float16-" not in case.name:
            todo.setdefault(case.form, case)
    for case in todo.values():
        device = kernel_device.target(kernel_device.HOPPER)
        one = check.checked(case.args["operation"], case.args["shape"], device)
        text = jax.jit(one.kernel).trace(*one.like).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text, case.name


def test_the_error_is_of_the_worst_row():
    want = np.random.default_rng(0).normal(size=(1, 50, 2, 8)).astype(np.float32)
    got = want.copy()
    assert check.worst((got,), (want,)) == 0
    got[0, 7, 1] *= 1.5
    assert 0.4 < check.worst((got,), (want,)) < 0.6
    got[0, 7, 1, 0] = np.nan
    assert check.worst((got,), (want,)) == np.inf
    nats = np.zeros((1, 50, 2), np.float32)
    gone = np.full_like(nats, -np.inf)
    assert check.worst((gone,), (gone,)) == 0 and check.worst((nats,), (gone,)) == np.inf


# --- models


@pytest.mark.slow
def test_a_gradient_may_be_twice_as_far_off_as_without_kernels_and_nothing_excuses_an_infinity():
    assert check.why_wrong(0.019, 0.0) is None
    assert check.why_wrong(0.021, 0.0) == "relative error 0.021 is more than 0.02"
    assert check.why_wrong(0.021, 0.0, plain=0.018) is None
    assert check.why_wrong(0.037, 0.0, plain=0.018) == "relative error 0.037 is more than 0.036"
    for error, moved, plain in (
        (0.5, 0.0, np.inf),
        (np.inf, 0.0, np.inf),
        (np.nan, 0.0, 0.0),
        (0.01, 0.1, 0.0),
        (0.01, np.nan, 0.0),
    ):
        assert check.why_wrong(error, moved, plain) is not None


@pytest.mark.long
def test_where_a_gradient_of_the_soft_cap_has_a_large_error_so_has_plain_bf16():
    """The case whose error on an H200 was 0.0206: at a difference of large sums, in both."""
    [case] = [
        c
        for c in commands.check_cases("sm_90a", 0)
        if "attention-64-bfloat16-softcap-gradient" in c.name and "t=1000" in c.name
    ]
    checked = check.checked(case.args["operation"], case.args["shape"], None)
    inputs, exact = checked.inputs(0)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(checked.reference)(*exact)
    assert checked.plain is not None
    assert 0.0206 / 2 < check.worst(jax.jit(checked.plain)(*inputs), want) < 0.03


@pytest.mark.long
def test_random_weights_have_the_right_deviation_and_differ_between_leaves():
    made = (ap.random_lm(profile.find("tiny"), kind) for kind in (None, "int8"))
    wide, small = ([x for x in jax.tree.leaves(lm.params) if x.ndim > 1] for lm in made)
    wide = [np.asarray(x, np.float32) for x in wide if x.size > 4000 and x.std() > 0]
    small = [np.asarray(x, np.float32) for x in small if x.dtype == jnp.int8]
    assert wide and small
    for x in wide:
        assert abs(x.std() - 0.02) < 1e-3 and abs(x.mean()) < 5 * 0.02 / np.sqrt(x.size)
    for x in small:
        assert (
            70 < x.std() < 78
            and abs(x.mean()) < 5 * 74 / np.sqrt(x.size)
            and abs(np.corrcoef(x[..., :-1].ravel(), x[..., 1:].ravel())[0, 1]) < 0.05
        )
    heads = [x.ravel()[:64].tobytes() for x in (*wide, *small)]
    assert len(set(heads)) == len(heads)


# --- the commands


@pytest.mark.long
def test_the_commands_import_neither_grain_nor_tyro_nor_rich(tmp_path):
    """Imports every module that the parent and a child need, without these packages; flax itself imports rich."""
    script = """
import builtins, sys
for name in ("grain", "tyro", "matplotlib", "starlette", "uvicorn", "jinja2", "tokenizers", "huggingface_hub", "torch"):
    sys.modules[name] = None
real = builtins.__import__
def ours(name, given=None, *more):
    if name.split(".")[0] == "rich" and str((given or {}).get("__name__", "")).startswith("mercury_jax"):
        raise ImportError("rich is imported by " + given["__name__"])
    return real(name, given, *more)
builtins.__import__ = ours
from mercury_jax.cli import app, main
from mercury_jax.compilation import GRAPH_FLAGS, GRAPHS_FORM
assert main(["bench", "gpu", "--help"]) == 0 and main(["bench", "gpu", "check", "--help"]) == 0
assert main(["--help"]) == main(["bench", "--help"]) == 0 and main(["info"]) == 2  # which says that tyro is missing
from mercury_jax.bench.gpu import commands, runner
from mercury_jax.bench.gpu import check, profile, tune
import mercury_jax as mj
mj.sample, mj.logits
from mercury_jax.training import objectives, optim, step
from mercury_jax.ops.attention import hopper
from mercury_jax.bench.gpu import interpreter
from mercury_jax.ops.experts import hopper_grouped_matmul as grouped_matmul
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_parent_never_starts_jax_on_a_device():
    script = """
import sys
from mercury_jax.bench.gpu import commands, runner
from mercury_jax.cli import bench_gpu, app
assert "jax" not in sys.modules or not sys.modules["jax"]._src.xla_bridge._backends
from mercury_jax.ops import device as kernel_device, tuned
kernel_device.entry_key("x", "y"), kernel_device.read_checks("z")
import jax
assert not jax._src.xla_bridge._backends
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "words, told",
    [(["check", "--budget", "0"], "--budget"),
     (["check", "--small", "--out", "/no/such/folder/rows.jsonl"], "--out"),
     (["chek"], "check is the nearest"), (["profile", "--seed", "1"], "--seed"),
     (["check", "--plot", "x.png"], "--plot")],
)  # fmt: skip
def test_bad_options_are_refused_before_anything_runs(words, told, capsys):
    assert main(["bench", "gpu", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_checks_a_form_reports_it_and_stores_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    out = tmp_path / "rows.jsonl"
    only = ["grouped-bfloat16 "]
    assert main(["bench", "gpu", "check", "--small", "--only", *only, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0]["case"] == "about" and rows[0]["versions"]["numpy"]
    one = next(r for r in rows if r.get("passed"))
    assert 0 < one["relative_error"] < 2e-2 and one["moved"] == 0
    assert all({"command", "hardware", "jax", "date"} <= r.keys() for r in rows)
    assert rows[-1]["verdict"] == "on" and json.loads((tmp_path / "kernels.json").read_text())
    assert "grouped-bfloat16: ON" in capsys.readouterr().out
    assert main(["bench", "gpu", "check", "--small", "--only", "nothing of that name"]) == 2


def test_info_says_which_kernels_are_on_and_why(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["rule"] == "off: no kernel is written for cpu"


def test_a_trace_is_summed_by_part_and_operation(tmp_path):
    """Of a loop of 12 steps with two layers, each with a product of 128 x 128 numbers."""

    @jax.jit
    def passes(x, w):
        def step(i, x):
            for layer in range(2):
                with jax.named_scope(f"block_{layer}"), jax.named_scope("mlp"):
                    x = jnp.tanh(x @ w)
            return x

        return jax.lax.fori_loop(0, 12, step, x)

    x = jnp.eye(128)
    passes(x, x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        passes(x, x).block_until_ready()
    [file] = tmp_path.glob("**/*.xplane.pb")
    name, events = profile.longest(file)
    assert name == "jit_passes"
    rows = profile.operations(profile.compiled(name, events), events, passes=12)
    assert {row["part"] for row in rows[:2]} == {"block/mlp"}
    products = [row for row in rows if row["bytes"] >= 2 * 3 * 128 * 128 * 4]
    assert [row["calls"] for row in products] == [2.0] and products[0]["part"] == "block/mlp"
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    # Traces of GPUs write loop_add_fusion.6 as loop_add_fusion_6, with the kernel's name beside it.
    on_gpu = [one._replace(op=one.op.replace(".", "_"), kernel="a kernel") for one in events]
    stray = profile.Event("no_such_op_7", 0, 1e9, "copy_7")
    again = profile.operations(profile.compiled(name, on_gpu), [*on_gpu, stray], passes=12)
    assert again[0]["part"] == profile.UNKNOWN and again[0]["operation"] == "copy"
    assert {row["part"]: row["bytes"] for row in again}["block/mlp"] == products[0]["bytes"]
    busy, span = profile.busy_and_span(events)
    assert 0 < busy <= span and 12 * max(row["seconds"] for row in rows) <= busy
    times = profile.busy_and_span([profile.Event("", *span) for span in ((0, 4), (1, 2), (7, 9))])
    assert times == pytest.approx((6e-9, 9e-9))


@pytest.mark.slow
def test_the_command_profiles_a_pass_and_draws_it(tmp_path, capsys):
    assert main(["bench", "gpu", "profile", "--small", "--json", "--png", str(tmp_path / "pass.png")]) == 0
    *_, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["passes"] > profile.MANY and row["busy_seconds"] + row["gap_seconds"] == pytest.approx(
        row["traced_seconds"]
    )
    assert {one["part"] for one in row["operations"]} >= {
        "Gemma/block/attention",
        "Gemma/block/moe.term",
        "decoder",
    }
    assert (tmp_path / "pass.png").stat().st_size > 5_000


# --- tune


def toy(sizes, wrong=(), unfit=lambda knobs: None):
    """A search over products whose time grows with `depth`; those with a tile in `wrong` are wrong."""

    def call(knobs, x, w):
        heavy = jax.lax.fori_loop(0, knobs.depth, lambda _, h: jnp.tanh(h @ w), x)
        result = x + 0 * heavy
        return result + (knobs.tile in wrong), result

    x = jnp.eye(256)
    start = GroupedKnobs(8, 1, 64, 2)
    return tune.Tunable("toy", "form", "shapes", start, unfit, x, [x], sizes, call, np.eye(256), 1.0)


def searched(monkeypatch, op, **values):
    monkeypatch.setattr(tune, "_grouped", lambda *a: op)
    args = {"operation": "grouped", "shape": {}, "values": values, "calls": 2}
    return list(tune.tune(args, lambda stage: None))


def test_a_search_ends_with_the_fastest_that_is_right(monkeypatch):
    rows = searched(monkeypatch, toy(2, wrong=(16,)), tile=(16, 24), depth=(1, 512))
    *variants, last = rows
    assert last["best"] and last["settings"]["depth"] == 1 and last["settings"]["tile"] != 16
    assert last["seconds"] < last["default_seconds"] and last["variants"] == len(variants)
    wrong = [row for row in variants if row["settings"]["tile"] == 16]
    assert wrong and all(
        "WRONG" in row["refused"] and "seconds" not in row and not row["best"] for row in wrong
    )


def test_what_does_not_fit_gets_fewer_stages_or_is_not_compiled(monkeypatch):
    unfit = lambda knobs: "too large" if knobs.depth * knobs.stages > 128 else None
    rows = searched(monkeypatch, toy(1, unfit=unfit), depth=(16, 512), stages=(2, 6))
    tried = [(row["settings"]["depth"], row["settings"]["stages"]) for row in rows[:-1]]
    assert len(set(tried)) == len(tried) and (16, 6) in tried and (64, 6) not in tried
    assert [row["refused"] for row in rows if row["settings"]["depth"] == 512] == ["too large"]


def test_a_kernel_that_spills_is_dropped(monkeypatch):
    report = "Compiling entry function 'toy_8_1_32_2_kernel' for 'sm_90a'\n"
    report += "0 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads\n"
    monkeypatch.setattr(hlo, "captured_output", lambda: contextlib.nullcontext(lambda: report))
    rows = {row["settings"]["depth"]: row for row in searched(monkeypatch, toy(1), depth=(16, 32))}
    assert "spill 8 bytes" in rows[32]["refused"] and "seconds" in rows[16]


def test_every_case_of_the_search_has_variants_that_fit():
    forms = {case.form for case in commands.check_cases(kernel_device.HOPPER, 0)}
    for case in commands.tune_cases():
        assert check.OPERATIONS[case.args["operation"]].table().shape(**case.args["shape"]).form in forms
        default, unfit = tune.choices(case.args["operation"], case.args["shape"])
        found = [one for one in tune.neighbours(default, case.args["values"], unfit) if unfit(one) is None]
        assert default in found and len(found) >= 4, case.name


@pytest.mark.slow
def test_the_command_tunes_and_check_checks_what_it_stored(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    only = ["--only", "experts", "--out", str(tmp_path / "rows.jsonl")]
    assert main(["bench", "gpu", "tune", "--small", *only]) == 0
    *_, last = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    [entry] = tuned.entries("cpu")
    assert entry["form"] == "grouped-int8" and entry["settings"] == last["settings"]
    cases = commands._with_tuned(commands.check_cases(None, 0, small=True), "cpu")
    assert not any("knobs" in case.name for case in cases)  # no case of a small check has that form
    shape = GroupedShape(**entry["shape"])
    monkeypatch.setattr(commands, "check_cases", lambda *a: [commands._check_case("grouped", shape, 60.0)])
    [_, case] = commands._with_tuned(commands.check_cases(), "cpu")
    [row] = check.check_form(case.args | {"seed": 0, "draws": 1}, lambda stage: None)
    assert row["passed"] and row["shape"]["knobs"] == entry["settings"]


# --- graphs


@pytest.mark.long
def test_loops_as_graphs_pass_only_where_each_call_decodes_the_same_tokens(monkeypatch):
    args = {"model": "tiny-causal", "layers": 2}
    [row] = check.graphs(args, lambda stage: None)
    assert row == {"passed": True}
    [right] = check.decoded(args, lambda stage: None)
    other = [right["tokens"][0], [[0] * len(right["tokens"][0][0])]]
    monkeypatch.setattr(check, "decoded", lambda *a: iter([{"tokens": other}]))
    [row] = check.graphs(args, lambda stage: None)
    assert row == {"passed": False, "why": "call 2 decoded other tokens"}


def test_commands_turn_loops_into_graphs_where_the_check_passed(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    monkeypatch.setenv("XLA_FLAGS", "--a")
    driver = tmp_path / "gpus/0000:01"
    driver.mkdir(parents=True)
    (driver / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert not app.loops_as_graphs(str(tmp_path / "gpus"))
    entry = kernel_device.entry_key("NVIDIA H200", jax.__version__)
    kernel_device.write_checks(entry, {GRAPHS_FORM: {"passed": False}}, "today")
    assert not app.loops_as_graphs(str(tmp_path / "gpus")) and os.environ["XLA_FLAGS"] == "--a"
    kernel_device.write_checks(entry, {GRAPHS_FORM: {"passed": True}}, "today")
    assert not app.loops_as_graphs(str(tmp_path / "nothing"))
    assert app.loops_as_graphs(str(tmp_path / "gpus")) and os.environ["XLA_FLAGS"] == f"--a {GRAPH_FLAGS}"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert not app.loops_as_graphs(str(tmp_path / "gpus"))


def test_the_read_probe_reads_every_tile_and_lowers_for_hopper():
    x = jnp.arange(64 * 37 * 128, dtype=jnp.int32).reshape(-1, 128)
    read = timing.read_tiles(x, 5, interpreted())
    assert read.tolist() == [int(x[64 * i :: 64 * 5, 0].sum()) for i in range(5)]
    traced = jax.jit(lambda x: timing.read_tiles(x, 132)).trace(
        jax.ShapeDtypeStruct((1 << 20, 128), jnp.int32)
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
