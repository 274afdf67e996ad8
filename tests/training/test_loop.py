"""Laws of the loop: a run that stops goes on bit for bit, and whatever stops it, what was saved stands."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import checkpoint
from mercury_jax.checkpoint import manifest
from mercury_jax.config import NoiseConfig
from mercury_jax.training import loop
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.report import RATES
from tests.training import tiny_training as tiny


def run(out, data=None, *, model=None, evaluate=None, preview=None, config_data=None, **fields):
    fields |= {"data": config_data} if config_data else {}
    return loop.run(
        tiny.config(out, **fields), model or tiny.model(), tiny.CORRUPTION, data or tiny.Data(),
        evaluate=evaluate, preview=preview,
    )  # fmt: skip


def rows(out, kind="train"):
    """The rows of metrics.jsonl that do not depend on the clock."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in RATES} for row in lines if row["kind"] == kind]


def saved(out):
    return checkpoint.steps(out / "checkpoints")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(out)


class Killed(Exception):
    pass


def at(number, do):
    """A hook of the data that acts before batch `number`."""
    return lambda n: do() if n == number else None


def fail():
    raise Killed


def test_a_run_learns_and_leaves_its_papers(whole):
    losses = [row["loss"] for row in rows(whole.out)]
    assert whole.step == 30 and whole.stopped is None and losses == sorted(losses, reverse=True)
    assert saved(whole.out) == [20, 30]
    assert [row["step"] for row in rows(whole.out)] == [10, 20, 30]
    assert rows(whole.out)[-1]["tokens"] == sum(int(tiny.batch(i).editable.sum()) for i in range(1, 31))
    written = json.loads((whole.out / "config.json").read_text())
    assert written["optim"]["lr"] == 1e-2 and written["objective"]["function"].endswith("objective")
    assert checkpoint.inspect(whole.out / "checkpoints")[1]["config"] == written


def test_the_noise_and_the_start_follow_the_seed(whole, tmp_path):
    again = run(tmp_path / "a")
    other = run(tmp_path / "b", seed=1, steps=10)
    chex.assert_trees_all_equal((again.params, again.ema), (whole.params, whole.ema))
    assert rows(tmp_path / "b")[0]["loss"] != rows(whole.out)[0]["loss"] and other.step == 10


@pytest.mark.long
@pytest.mark.parametrize("number", [13, 20])
def test_a_resumed_run_ends_equal_bit_for_bit(whole, tmp_path, number):
    with pytest.raises(Killed):
        run(tmp_path, tiny.Data(at(number, fail)))
    found = run(tmp_path, resume=True)
    chex.assert_trees_all_equal((found.params, found.ema), (whole.params, whole.ema))
    assert rows(tmp_path) == rows(whole.out)


def test_a_run_and_a_resumed_one_trace_the_update_once(tmp_path, monkeypatch):
    """A state or a batch that changes its type between two steps would compile the program again."""
    make_update = loop.steps.make_update
    monkeypatch.setattr(
        loop.steps, "make_update", lambda setup: chex.assert_max_traces(make_update(setup), n=1)
    )
    chex.clear_trace_counter()
    run(tmp_path, steps=12)
    chex.clear_trace_counter()
    run(tmp_path, steps=15, resume=True)
    with pytest.raises(AssertionError, match="traced > 1 times"):  # the counter counts
        run(tmp_path, steps=18, resume=True)
    chex.clear_trace_counter()


def test_resuming_a_finished_run_changes_nothing(whole):
    found = run(whole.out, resume=True)
    assert found.step == 30 and saved(whole.out) == [20, 30]
    chex.assert_trees_all_equal(found.params, whole.params)


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_later(whole, tmp_path, sign, capsys):
    stopped = run(tmp_path, tiny.Data(at(14, lambda: os.kill(os.getpid(), sign))))
    assert (stopped.step, stopped.stopped) == (15, sign.name) and saved(tmp_path) == [10, 15]
    assert f"{sign.name}: saved step 15" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    chex.assert_trees_all_equal(run(tmp_path, resume=True).params, whole.params)


def test_nan_stops_names_the_batch_and_leaves_the_last_good_checkpoint(tmp_path, whole):
    def poisoned(key, model, params, batch, corruption):
        loss = tiny.objective(key, model, params, batch, corruption)
        return loss._replace(per_example=loss.per_example / (batch.positions[0, 0] != 99))

    class Ill(tiny.Data):
        def __next__(self):
            batch = super().__next__()
            return batch._replace(positions=batch.positions + 99 * (self.number == 20))

    with pytest.raises(loop.Diverged, match=r"step 20: .*number 20 of the data.*step 10 stands") as error:
        run(tmp_path, Ill(), objective=poisoned)
    assert error.value.exit_code == 3 and saved(tmp_path) == [10]


def test_a_full_disk_stops_the_run_and_the_older_checkpoint_stands(tmp_path, monkeypatch):
    write = manifest.write

    def full(folder):
        if folder.name.startswith("00000020"):
            raise OSError(28, "No space left on device")
        write(folder)

    monkeypatch.setattr(manifest, "write", full)
    slowly = lambda number: time.sleep(1.0 if number > 20 else 0)
    data = tiny.Data(slowly)
    with pytest.raises(checkpoint.SaveFailed, match=r"step 20 .*disk is full.*steps \[10\] are unchanged"):
        run(tmp_path, data, steps=10**6)
    assert data.number < 30 and saved(tmp_path) == [10]  # it did not wait for the next save to find out


def test_what_an_interrupted_save_left_is_removed(tmp_path, capsys):
    (tmp_path / "checkpoints" / "00000010.tmp").mkdir(parents=True)
    run(tmp_path, steps=2)
    assert os.listdir(tmp_path / "checkpoints") == ["00000002"]
    assert "removed what an interrupted save left: 00000010.tmp" in capsys.readouterr().err


def refused(match, out, **fields):
    """The run is refused with these words before a batch is asked for."""
    untouched = tiny.Data(lambda number: pytest.fail("a batch was asked for"))
    with pytest.raises(ValueError, match=match):
        run(out, untouched, **fields)


def test_a_folder_with_checkpoints_is_refused_unless_resumed(whole):
    before = sorted(whole.out.rglob("*"))
    refused(r"out is .*holds step 30: resume it", whole.out)
    refused("steps is 20; allowed: 30 or more, the step of the checkpoint", whole.out, resume=True, steps=20)
    assert sorted(whole.out.rglob("*")) == before


def test_another_model_or_noise_cannot_resume(whole):
    wide = dataclasses.replace(tiny.model().config, width=16)
    with pytest.raises(ValueError, match="model.width is 16; allowed: 8, as in the checkpoint"):
        loop.resume_step(tiny.config(whole.out, resume=True, model=wide))
    refused(
        "noise.kind is 'uniform'; allowed: 'absorbing'",
        whole.out,
        resume=True,
        noise=NoiseConfig(kind="uniform"),
    )


def test_values_that_an_earlier_version_ignored_do_not_prevent_a_resume(whole, monkeypatch):
    path, about = checkpoint.inspect(whole.out / "checkpoints")
    for part, name, value in (("noise", "uniform", 0.7), ("lora", "alpha", 4.0)):
        about["config"][part][name] = value
    monkeypatch.setattr(loop.checkpoint, "inspect", lambda folder: (path, about))
    assert loop.resume_step(tiny.config(whole.out, resume=True)) == 30


def test_another_optimizer_or_an_average_cannot_resume(whole):
    muon = OptimConfig(optimizer="muon")
    refused(
        "optim.optimizer is 'muon'; allowed: 'adamw', as in the checkpoint",
        whole.out,
        resume=True,
        optim=muon,
    )
    refused("ema is 0.0; allowed: 0.9, as in the checkpoint to resume", whole.out, resume=True, ema=0.0)


@pytest.mark.long
def test_what_may_change_on_a_resume_is_listed_and_the_config_before_is_kept(tmp_path, capsys):
    run(tmp_path, steps=2)
    before = (tmp_path / "config.json").read_text()
    run(tmp_path, steps=2, resume=True)
    assert not list(tmp_path.glob("config_to_step_*"))  # nothing changed
    other = OptimConfig(lr=1e-2, warmup=3, clip=0.0)
    run(tmp_path, steps=3, resume=True, optim=other, accumulate=2, ema=0.5, objective=tiny.quiet)
    told = capsys.readouterr().err
    for words in (
        "optim.clip is 0.0 (was 1.0)",
        "accumulate is 2 (was 1)",
        "ema is 0.5 (was 0.9)",
        "objective.function",
    ):
        assert words in told
    kept = tmp_path / "config_to_step_2.json"
    assert json.loads(kept.read_text()) == json.loads(before)
    kept.write_text("kept")
    shutil.rmtree(sorted((tmp_path / "checkpoints").iterdir())[-1])
    run(tmp_path, steps=3, resume=True, optim=other)
    assert kept.read_text() == "kept"
    run(
        tmp_path, steps=4, resume=True, optim=OptimConfig(lr=1e-2, warmup=3, clip=2.0)
    )  # and back to clipping
    assert saved(tmp_path)[-1] == 4


@dataclasses.dataclass(frozen=True)
class Made:
    """Data that are made during the run, with a setting."""

    samples: int

    def batches(self, config, lm):
        raise NotImplementedError

    evaluator = batches


def test_settings_of_data_that_are_made_during_the_run_are_listed(tmp_path, capsys):
    run(tmp_path, steps=1, config_data=Made(4))
    run(tmp_path, steps=2, resume=True, config_data=Made(8))
    assert "data.samples is 8 (was 4)" in capsys.readouterr().err


def test_a_cut_checkpoint_says_how_to_continue_from_the_one_before(tmp_path):
    run(tmp_path, steps=20)
    for name in ("checkpoint.json", "manifest.json"):
        path = checkpoint.path_of(tmp_path / "checkpoints", 20) / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        refused("To continue from step 10 instead, move .*00000020 away", tmp_path, resume=True)
        path.write_bytes(whole)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run(tmp_path, steps=2)
    victim = max((tmp_path / "checkpoints").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data = bytearray(victim.read_bytes())
    data[50] ^= 1
    victim.write_bytes(data)
    refused(f"{victim.name} is damaged", tmp_path, resume=True)


def test_rows_must_fit_the_mesh(tmp_path):
    refused("batch / accumulate is 2; allowed: a multiple of 4", tmp_path, accumulate=4)


def test_data_that_ends_is_refused_in_words(tmp_path):
    def end():
        raise StopIteration

    with pytest.raises(ValueError, match="data is '5 batches'"):
        run(tmp_path, tiny.Data(at(5, end)))


def test_evaluation_and_samples_see_the_average(tmp_path):
    seen = []
    evaluate = lambda params: seen.append(jax.tree.map(np.asarray, params)) or {"bits": jnp.float32(2.0)}
    found = run(tmp_path, evaluate=evaluate, preview=lambda params: "once upon", steps=25, sample_every=20)
    assert len(seen) == 3
    chex.assert_trees_all_equal(seen[-1], found.ema)
    with pytest.raises(AssertionError, match="not equal"):
        chex.assert_trees_all_equal(found.ema, found.params)
    assert [(row["step"], row["bits"]) for row in rows(tmp_path, "eval")] == [(10, 2.0), (20, 2.0), (25, 2.0)]
    assert (tmp_path / "samples.txt").read_text().count("once upon") == 2
    assert found.metrics["eval/bits"] == 2.0


class Losses:
    """Evaluations with given losses, by the parameters: a resumed run, which takes steps again, finds the same ones."""

    def __init__(self, *values):
        self.values, self.seen, self.of = iter(values), [], {}

    def __call__(self, params):
        key = float(params["head"][0, 0])
        if key not in self.of:
            self.of[key] = next(self.values)
            self.seen.append(jax.tree.map(np.asarray, params))
        return {"loss": self.of[key]}


def test_the_model_is_that_of_the_best_evaluation(tmp_path, capsys):
    for direction, best in (("min", 1), ("max", 0)):
        losses = Losses(3.0, 1.0, 2.0)
        found = run(tmp_path / direction, evaluate=losses, steps=30, best=f"{direction}:loss")
        chex.assert_trees_all_equal(found.ema, losses.seen[best])
        assert (
            found.step == 30
            and f"the model is that of step {10 * (best + 1)}: {direction}:loss" in capsys.readouterr().err
        )


def test_a_run_ends_after_evaluations_without_a_better_one_and_may_be_continued(tmp_path, capsys):
    losses, how = Losses(3.0, 1.0, 2.0, 1.0, 0.5, 4.0), dict(steps=60, best="min:loss")
    found = run(tmp_path, evaluate=losses, patience=2, **how)
    assert (found.step, found.stopped, saved(tmp_path)[-1]) == (40, None, 40)
    assert "ended at step 40: 2 evaluations without a better one" in capsys.readouterr().err
    again = run(tmp_path, evaluate=losses, patience=2, resume=True, **how)
    assert again.step == 40
    chex.assert_trees_all_equal(again.ema, losses.seen[1])
    further = run(tmp_path, evaluate=losses, patience=4, resume=True, **how)
    assert further.step == 60
    chex.assert_trees_all_equal(further.ema, losses.seen[4])


def test_a_killed_run_finds_its_best_evaluation_again(tmp_path):
    losses, how = Losses(3.0, 2.0, 1.0, 2.0), dict(steps=40, save_every=20, best="min:loss")
    with pytest.raises(Killed):
        run(tmp_path, tiny.Data(at(34, fail)), evaluate=losses, **how)  # behind the best step, 30
    assert saved(tmp_path) == [20] and checkpoint.steps(tmp_path / "best") == [30]
    found = run(tmp_path, evaluate=losses, resume=True, **how)
    chex.assert_trees_all_equal(found.ema, losses.seen[2])
    assert found.step == 40
    # A best value of another metric does not compare: the only evaluation that is left is the best one.
    losses = Losses(0.5)
    found = run(tmp_path, evaluate=losses, resume=True, **how | dict(steps=50, best="max:loss"))
    chex.assert_trees_all_equal(found.ema, losses.seen[0])


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(best="loss"), "best is 'loss'; allowed: min:METRIC or max:METRIC"),
        (dict(best="min:loss", eval_every=0), 'best is .*; allowed: "" without evaluations'),
        (dict(patience=2), "patience is 2; allowed: 0 without best"),
    ],
)
def test_a_best_evaluation_needs_a_metric_that_there_is(tmp_path, fields, words):
    refused(words, tmp_path, evaluate=Losses(*range(9)), **fields)
    with pytest.raises(ValueError, match="best is 'min:bits'; allowed: min:loss"):
        run(tmp_path, evaluate=Losses(1.0), best="min:bits")


def test_the_next_update_is_dispatched_before_the_last_one_is_read(tmp_path, monkeypatch):
    order = []
    read = loop._Loop._read

    def recorded(self, newest=None):
        order.append(("read", self._pending and self._pending[0]))
        read(self, newest)

    monkeypatch.setattr(loop._Loop, "_read", recorded)
    run(tmp_path, tiny.Data(lambda number: order.append(("feed", number + 1))), steps=4, save_every=100)
    assert order[:6] == [("feed", 1), ("read", None), ("feed", 2), ("read", 1), ("feed", 3), ("read", 2)]


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, steps=2).step))
    thread.start()
    thread.join()
    assert found == [2]


def test_a_trace_holds_the_chosen_steps_and_changes_nothing(whole, tmp_path):
    found = run(tmp_path, profile=(3, 5))
    chex.assert_trees_all_equal(found.params, whole.params)
    (trace,) = (tmp_path / "profile" / "process_0").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    for wrong in ((0, 3), (5, 3), (1, 10_000)):
        with pytest.raises(ValueError, match=r"profile is .*first and last step"):
            tiny.config(tmp_path, profile=wrong)


@pytest.mark.long
def test_rows_of_a_resumed_run_do_not_depend_on_where_it_was_stopped(tmp_path):
    """The checkpoint of step 5 lies between the rows of steps 4 and 8."""
    fields = {"steps": 10, "log_every": 4, "save_every": 5}
    run(tmp_path / "whole", **fields)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000010")
    result = run(tmp_path / "cut", resume=True, **fields)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole") and len(rows(tmp_path / "cut")) == 3
    assert result.metrics["tokens"] == rows(tmp_path / "whole")[-1]["tokens"]
