"""Labelled decisions: their figures, the temperature that is fitted to them, and the two commands."""

import json

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.cli.app import main
from mercury_jax.decode.decide import Answer
from mercury_jax.evaluate import calibration

QUESTION = mj.questions.MultipleChoice(["a", "b", "c"])


def drawn(n, temperature, seed=0):
    """Answers whose right labels are drawn at a temperature of their own log-likelihoods."""
    rng = np.random.default_rng(seed)
    log_p = rng.normal(size=(n, 1, 3)) * 3
    answers = [Answer(QUESTION, calibration.calibrated(x, 1.0)[0], x[0] * np.nan, x) for x in log_p]
    right = [rng.choice(3, p=calibration.calibrated(x, temperature)[0]) for x in log_p]
    return answers, right


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_at_which_labels_were_drawn_is_found(temperature):
    answers, right = drawn(4000, temperature)
    found = calibration.fit_temperature(answers, right)
    assert found == pytest.approx(temperature, rel=0.08)
    before, after = (calibration.quality(calibration.probabilities(answers, t), right) for t in (None, found))
    assert after["nats"] <= before["nats"] and after["accuracy"] == before["accuracy"]
    assert after["ece"] < 0.03 and after["ece_interval"][0] <= after["ece"] * 1.5
    if temperature != 1.0:
        assert before["ece"] > 2 * after["ece"]


def test_figures_of_answers_that_are_known():
    p = [np.array(x) for x in ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6])]
    found = calibration.quality(p, [0, 1, 2])
    assert found["n"] == 3 and found["accuracy"] == pytest.approx(2 / 3)
    assert found["brier"] == pytest.approx((0 + 0.5 + 0.24) / 3)
    assert found["ece"] == pytest.approx((0 + 0.5 + 0.4) / 3)
    assert found["nats"] == pytest.approx(-(np.log(0.5) + np.log(0.6)) / 3)


LINE = {
    "state": "347+585=932",
    "questions": {
        "right": {"type": "noul", "instructions": "Is this right?"},
        "kind": {"type": "choice", "criteria": {"sum": None, "code": "A program"}},
        "size": {"type": "score", "criteria": ["small", "large"]},
    },
    "answers": {"right": True, "kind": "sum", "size": 1},
}


@pytest.fixture
def folder(tmp_path):
    """The embedded model in a folder of its own, since the calibration is written beside it."""
    import shutil

    from mercury_jax.hub.load import NANO

    return shutil.copytree(NANO, tmp_path / "model")


def test_a_calibration_is_written_beside_the_model_and_used(folder, tmp_path, capsys):
    file, plot = tmp_path / "lines.jsonl", tmp_path / "curve.png"
    file.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"state": {"sum": [1, 2]}}) + "\n")
    words = ["calibrate", str(file), "--model", str(folder), "--reads", "2", "--plot", str(plot), "--json"]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert (
        record["questions"] == 6 and record["before"]["n"] == 6 and plot.read_bytes().startswith(b"\x89PNG")
    )
    assert json.loads((folder / "decisions.json").read_text())["temperature"] == record["temperature"]
    lm = mj.load(folder)
    yes_no = {"right": mj.questions.YesNo("Is this right?")}
    state = "347+585=932"
    out, plain = mj.decide(lm, state, yes_no), mj.decide(mj.load(), state, yes_no)
    assert out.temperature == pytest.approx(record["temperature"]) and plain.temperature == 1.0
    at_one = mj.decide(lm, state, yes_no, temperature=1.0)
    np.testing.assert_allclose(at_one["right"].probabilities, plain["right"].probabilities)
    words = [
        "decide",
        LINE["state"],
        "--ask",
        "Is this right?",
        "--choose",
        "sum, code",
        "--model",
        str(folder),
    ]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["forwards"] == 1 and list(shown["answers"]["sum, code"]["probabilities"]) == ["sum", "code"]
    assert shown["answers"]["Is this right?"]["probabilities"]["yes"] == pytest.approx(
        out["right"].yes, abs=1e-5
    )
    assert main([*words, "--reads", "2"]) == 0
    assert "±" in capsys.readouterr().out
    (folder / "decisions.json").write_text('{"temperature": 0}')
    with pytest.raises(ValueError, match="temperature is 0; allowed: a number above 0"):
        mj.load(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": 3}, "lines.jsonl:1: state is 3; allowed: a text or an object"),
        ({"questions": {}}, "questions is {}"),
        ({"answers": {"right": True}}, "allowed: an answer to each of right, kind, size"),
        ({"answers": LINE["answers"] | {"right": "maybe"}}, "answers.right is 'maybe'; allowed: true, false"),
        ({"answers": LINE["answers"] | {"kind": "text"}}, "answers.kind is 'text'; allowed: sum, code"),
        ({"answers": LINE["answers"] | {"size": 2}}, "answers.size is 2; allowed: a level, 0 to 1"),
        ({"answers": LINE["answers"] | {"size": True}}, "answers.size is True"),
    ],
)
def test_a_wrong_line_is_refused_by_its_place(tmp_path, capsys, change, said):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE | change))
    assert main(["calibrate", str(file)]) == 2
    assert said in capsys.readouterr().err
