"""Laws of the report: rows of steps that will be taken again go, rates leave pauses out."""

import io
import json

from mercury_jax.training import report
from mercury_jax.training.report import Clock, Reporter


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
    rows = [{"step": n, "kind": "train"} for n in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 4')
    reporter = Reporter(tmp_path, "x", 40, 20)
    reporter.metrics(30, "eval", {"loss": 1.0})
    reporter.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["kind"]) for r in found] == [(10, "train"), (20, "train"), (30, "eval")]


def test_tokens_a_second_leave_pauses_out_and_time_left_does_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    clock = Clock(10)
    for step in range(1, 6):
        now[0] += 2.0
        clock.tick(step, 100)
        if step == 3:
            with clock.pause():
                now[0] += 4.0
    assert clock.speed() == 50.0
    assert clock.left(5) == 5 * (4 * 2.0 + 4.0) / 4


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(report.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(tmp_path, "mine", 40, 0)
    for step in range(1, 11):
        reporter.step(step, 100, 1.25)
    reporter.say("hello [brackets]")
    reporter.close()
    shown = screen.getvalue()
    assert "mine" in shown and "10/40" in shown and "loss 1.2500" in shown and "tokens/s" in shown
    assert "hello [brackets]" in shown


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path):
    quiet = Reporter(tmp_path, "x", 4, 0, quiet=True)
    quiet.step(1, 3, 0.5)
    quiet.metrics(1, "train", {"loss": 0.5})
    quiet.sample(1, "text")
    quiet.close()
    assert not list(tmp_path.iterdir())
