"""The public face: every name is there, the embedded model works, and what does not fit is refused."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import hub, tasks
from mercury_jax.checkpoint import CheckpointError, manifest
from mercury_jax.config import NoiseConfig
from mercury_jax.decode.edit import EditOutput
from mercury_jax.decode.infill import InfillOutput
from mercury_jax.decode.sample import LogProbs
from mercury_jax.decode.search import SearchOutput
from mercury_jax.decode.stream import StreamOutput
from mercury_jax.tokenizer import Tokenizer
from tests.tiny import tiny


def test_every_public_name_is_there_and_no_other():
    for name in mj.__all__:
        assert getattr(mj, name) is not None
    assert set(mj.__all__) <= set(dir(mj))
    with pytest.raises(AttributeError, match="nosuch"):
        mj.nosuch  # noqa: B018


def test_every_field_of_a_public_record_is_described_where_help_shows_it():
    records = [
        mj.rl.AnswerBatch,
        mj.rl.Rollout,
        EditOutput,
        InfillOutput,
        LogProbs,
        SearchOutput,
        StreamOutput,
    ]
    records += [x for name in mj.__all__ if isinstance(x := getattr(mj, name), type)]
    for record in records:
        own = record._fields if hasattr(record, "_fields") else record.__dataclass_fields__
        told = re.findall(r"^ +([\w, ]+):(?= )", record.__doc__ or "", re.MULTILINE)
        told = {name for names in told for name in names.split(", ")}
        missing = [f for f in own if f[0] != "_" and f not in told]
        assert not missing, f"{record.__name__}: {missing}"


def test_the_embedded_model_solves_sudoku_it_has_not_seen():
    lm, task = mj.load(), tasks.TASKS["sudoku4"]
    rng = np.random.default_rng(3)
    puzzles = [tasks.draw(task, rng, "test").input for _ in range(32)]
    out = mj.sample(lm, [[{"role": "user", "content": p}] for p in puzzles], max_tokens=32)
    right = sum(task.check(p, text) for p, text in zip(puzzles, out.texts, strict=True))
    assert right >= 26 and out.forwards.mean() < 16


def test_the_embedded_model_is_small():
    assert sum(f.stat().st_size for f in hub.NANO.iterdir()) <= 16_000_000


def test_a_saved_model_loads_as_it_was(tmp_path):
    lm = tiny()
    hub.save(tmp_path / "lm", lm, NoiseConfig())
    again = mj.load(tmp_path / "lm")
    jax.tree.map(np.testing.assert_array_equal, lm.params, again.params)
    assert again.model.config == lm.model.config and again.tokenizer.fingerprint == lm.tokenizer.fingerprint
    assert mj.sample(lm, "def x", max_tokens=9).text == mj.sample(again, "def x", max_tokens=9).text


@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("name", ["params.safetensors", "config.json", "tokenizer.model", "manifest.json"])
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(tmp_path, harm, name):
    hub.save(tmp_path / "lm", tiny(), NoiseConfig())
    path = tmp_path / "lm" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flipped" else data[:-7])
    with pytest.raises(CheckpointError, match=name.split(".")[0]):
        mj.load(tmp_path / "lm")


def test_another_tokenizer_is_refused(tmp_path):
    lm = tiny()
    other = Tokenizer.train([f"{i} apples and {i + 1} pears" for i in range(200)], 305)
    hub.save(tmp_path / "a", lm, NoiseConfig())
    (tmp_path / "a" / "tokenizer.model").write_bytes(other.proto)
    manifest.write(tmp_path / "a")
    with pytest.raises(ValueError, match="tokenizer is .*the one it was trained with"):
        mj.load(tmp_path / "a")


def test_a_config_with_an_unknown_or_missing_key_is_refused(tmp_path):
    hub.save(tmp_path / "lm", tiny(), NoiseConfig())
    path = tmp_path / "lm" / "config.json"
    whole = json.loads(path.read_text())
    for change, named in (({"colour": 3}, "colour"), ({"vocab": None}, "vocab")):
        model = {k: v for k, v in (whole["config"]["model"] | change).items() if v is not None}
        path.write_text(json.dumps(whole | {"config": whole["config"] | {"model": model}}))
        manifest.write(tmp_path / "lm")
        with pytest.raises(ValueError, match=named):
            mj.load(tmp_path / "lm")


def test_what_is_no_model_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        mj.load(tmp_path / "nothing")
    shutil.copy(__file__, tmp_path)
    with pytest.raises(CheckpointError):
        mj.load(tmp_path)


@pytest.mark.long
def test_what_a_repl_prints_is_short(capsys):
    lm = mj.load()
    assert repr(lm) == "LM(nano: 1.8M parameters, transformer, absorbing noise, blocks of 32, context 512)"
    out = mj.sample(lm, ["def f(x):", "class A"], max_tokens=24, history=True, keep=True)
    cost = f"tokens={sum(out.lengths)}, forwards={sum(out.forwards)}, seconds="
    assert repr(out).startswith(f"Output(2 answers, the first text={out.text!r}, {cost}")
    [*_, last] = mj.stream(lm, "def f(x):", max_tokens=8)
    decoder = mj.decoder(lm, mj.rules.threshold(0.9), slots=96)
    assert out.state is not None
    shown = [lm.model, out, out.history[0], out.state, out.state.state, last, decoder, decoder.config]
    assert max(len(repr(record)) for record in shown) < 600
    assert "threshold" in repr(decoder) and "accepted=bool[2,32]" in repr(out.history[0])


def test_a_model_is_printed_under_every_transformation():
    lm, printed = tiny(), []
    jax.jit(lambda lm: printed.append(repr(lm)))(lm)
    jax.eval_shape(lambda lm: printed.append(repr(lm)), lm)
    printed.append(repr(jax.eval_shape(lambda lm: lm, lm)))
    assert set(printed) == {repr(lm)}
    empty, odd = jax.tree.map(lambda x: None, lm), jax.tree.map(lambda x: object(), lm)
    assert "without parameters" in repr(empty) and " parameters" not in repr(odd)
    out = mj.sample(lm, "def x", max_tokens=4, history=True, keep=True)
    jax.jit(lambda frame: printed.append(repr(frame)))(out.history[0])
    assert "start=int32[1]" in printed[-1]
    assert out.state is not None
    state = jax.tree.map(lambda x: x.copy(), out.state.state)
    jax.jit(lambda s: s, donate_argnums=0)(state)
    assert "tokens=int32[1," in repr(state)  # its buffers are gone
