"""The benchmark of the data pipeline: its synthetic corpora are real ones, and it counts what batches hold."""

import json

import pytest

from benchmarks import pipeline, pipeline_worker
from mercury_jax.training.data import corpus


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "SHARD", 2**16)
    documents = pipeline.write_corpus(tmp_path / "corpus", 400_000)
    found = corpus.open_corpus(tmp_path / "corpus", "train")
    assert [shard.tokens for shard in found.shards] == [2**16, 2**16, 2**16, 200_000 - 3 * 2**16]
    assert documents == sum(shard.documents for shard in found.shards) > 100
    folder = str(tmp_path / "corpus")
    return {
        "folder": folder, "rows": 16, "row": 256, "pattern": "causal_encoder", "prefetch": 0, "state": None,
    }  # fmt: skip


def test_throughput_counts_positions_and_tokens_of_text(job):
    row = pipeline._throughput(job, 0.05)
    assert 0.8 < row["filled"] <= 1 and row["batches"] > 3
    # A causal encoder has most tokens twice: clean and in a canvas.
    assert 0.4 < row["text_tokens_per_second"] / row["positions_per_second"] < 0.7
    assert row["within"] == (row["positions_per_second"] >= 5e6)
    json.dumps(row)


def test_an_epoch_ends_when_every_row_has_taken_its_windows(job):
    run, windows = pipeline_worker.batches(job), pipeline._windows(job)
    stream = corpus.shards(job["folder"]).open(settings())
    assert stream is not None and 0 <= windows * 16 - stream.size < 16
    next(run)
    assert all(row["next"][0] < windows for row in run.get_state()["rows"].values())


def settings():
    from mercury_jax.hub import NANO
    from mercury_jax.tokenizer import Tokenizer
    from mercury_jax.training.data.packing import StreamSettings

    tokenizer = Tokenizer.load(NANO / "tokenizer.model")
    layout = pipeline_worker.layout("causal_encoder", tokenizer)
    return StreamSettings(tokenizer, layout, 256, (0, 0), "train")
