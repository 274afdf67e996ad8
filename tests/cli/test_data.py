"""mercury data pack and mercury data info: a corpus goes in, a recipe trains on the folder, mistakes are named."""

import json
import sys
from pathlib import Path

import pytest

from mercury_jax.cli import main
from tests.cli.run import objects, refused
from tests.tiny import tokenizer


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "tokenizer.model"
    tokenizer().save(path)
    return str(path)


@pytest.fixture
def packed(tmp_path, model, capsys) -> str:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"value {i}\n" * 20)
    out = str(tmp_path / "packed")
    call = ["data", "pack", f"{tmp_path}/*.txt", "--tokenizer", model, "--out", out, "--workers", "1"]
    [record] = objects(capsys, *call, "--held-out", "0.2", "--json")
    assert record["train"]["documents"] + record["test"]["documents"] == 40
    assert record["kind"] == "text" and record["dtype"] == "uint16" and record["folder"] == out
    return out


def test_info_describes_what_pack_wrote_and_shows_documents(packed, capsys):
    [record] = objects(capsys, "data", "info", packed, "--samples", "3", "--verify", "--json")
    assert record["verified"] and record["test"]["documents"] > 0
    for sample in record["samples"]:
        number = sample["text"].split()[1]
        assert sample["text"] == f"value {number}\n" * 20
    assert len({sample["text"] for sample in record["samples"]}) == 3
    assert main(["data", "info", packed]) == 0
    shown = capsys.readouterr().out
    assert f"{record['train']['tokens']:,} tokens" in shown and "value " in shown


def test_a_changed_byte_is_found_by_verify_alone(packed, capsys):
    path = Path(packed, "train-00000.tokens")
    tokens = bytearray(path.read_bytes())
    tokens[10] ^= 1
    path.write_bytes(tokens)
    assert main(["data", "info", packed]) == 0
    capsys.readouterr()
    assert f"hash of {path}" in refused(capsys, "data", "info", packed, "--verify")


def test_chats_and_problems_are_packed(tmp_path, model, capsys):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}))
    for what in (["--chats", f"{tmp_path}/c.jsonl"], ["--generated", "add2", "--count", "5", "--thinking"]):
        out = str(tmp_path / what[0])
        call = ["data", "pack", *what, "--tokenizer", model, "--out", out, "--workers", "1", "--json"]
        [record] = objects(capsys, *call)
        assert record["kind"] == "chats" and record["train"]["documents"] == (
            1 if what[0] == "--chats" else 5
        )


def test_what_cannot_be_asked_for_is_refused_in_one_line(tmp_path, model, packed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    base = ["--tokenizer", model, "--out", str(tmp_path / "new")]
    for words, said in (
        ([], "SOURCE is ''; allowed: one of SOURCE, --hf, --chats and --generated"),
        (["a.txt", "--hf", "x"], "SOURCE is 'SOURCE --hf'"),
        (["a.txt", "--count", "3"], "--count is 3; allowed: with --generated only"),
        (["a.txt", "--thinking"], "--thinking is True"),
        (
            ["--chats", "a.jsonl", "--part", "train"],
            "--part is 'train'; allowed: with --hf, or --chats hf:NAME",
        ),
        (["--chats", "hf:a", "--chats", "b.jsonl"], "--chats is 'hf:a b.jsonl'; allowed: hf:a alone"),
        (["a.txt", "--turns", "all"], "--turns is 'all'; allowed: with --chats only"),
        (["a.txt", "--part", "train"], "--part is 'train'; allowed: with --hf and --chats only"),
        (["--chats", "a.jsonl", "--field", "x"], "--field is 'x'; allowed: with SOURCE and --hf only"),
        (["--generated", "add2"], "--count is missing"),
        (["--generated", "add99", "--count", "3"], "--generated is 'add99'"),
        (["none/*.txt"], "finds at least one file"),
        (["--hf", "org/set", "--workers", "1"], "once the package `datasets` is installed"),
    ):
        assert said in refused(capsys, "data", "pack", *words, *base), words
    assert "as in the complete pack of" in refused(
        capsys, "data", "pack", f"{tmp_path}/1.txt", "--tokenizer", model, "--out", packed
    )
    assert "tokenizer" in refused(
        capsys, "data", "pack", "x", "--tokenizer", f"{tmp_path}/0.txt", "--out", "y"
    )
    assert "has completed" in refused(capsys, "data", "info", str(tmp_path))
    assert "allowed: info is the nearest" in refused(capsys, "data", "inf")


def test_help_lists_what_there_is(capsys):
    assert main(["data", "--help"]) == 0 and "pack" in capsys.readouterr().out
    assert main(["data", "pack", "--help"]) == 0
    assert "--held-out" in capsys.readouterr().out


RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="tiny", objective=masked_elbo(), data=data.shards("PACKED"), out="OUT",
        model=ModelConfig(vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8),
        steps=2, batch=4, row=64, eval_every=2, eval_batches=1, sample_every=0, save_every=1,
    )
"""


@pytest.fixture
def on_shards(packed, tmp_path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("PACKED", packed).replace("OUT", str(tmp_path / "run")))
    return str(path)


@pytest.mark.long
def test_a_recipe_trains_on_shards_with_the_tokenizer_that_they_hold(on_shards, packed, capsys):
    [done] = objects(capsys, "train", on_shards, "--steps", "1", "--eval-every", "0", "--json")
    [info], [about] = (
        objects(capsys, "info", done["model"], "--json"),
        objects(capsys, "data", "info", packed, "--json"),
    )
    assert done["step"] == 1 and info["tokenizer"] == about["tokenizer"]["fingerprint"]


@pytest.mark.slow
def test_a_run_on_shards_evaluates_on_their_other_side_and_resumes(on_shards, capsys):
    [first] = objects(capsys, "train", on_shards, "--json")
    assert first["step"] == 2 and "eval/nats_per_token" in first["metrics"]
    [more] = objects(capsys, "train", on_shards, "--steps", "3", "--resume", "--json")
    assert more["step"] == 3
