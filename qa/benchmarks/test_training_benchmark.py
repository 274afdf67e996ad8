"""`python -m benchmarks.training`: both loops take the same steps, and what is not supported is refused by name."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import training, training_loops as bench
from mercury_jax.cli.app import execute
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig
from mercury_jax.types import Batch
from tests.tiny import tiny, tokenizer

RECIPE = """
from qa.benchmarks.test_training_benchmark import recipe
def config():
    return recipe("TOKENIZER")
"""


def recipe(tokenizer_path: str) -> TrainConfig:
    return TrainConfig(
        name="tiny", objective=masked_elbo(), data=data.generated("add2"), tokenizer=tokenizer_path, row=64, batch=4,
        model=ModelConfig(vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8),
        optim=OptimConfig(warmup=1), log_every=2, save_every=2, ema=0.9,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path) -> str:
    tokenizer().save(tmp_path / "tokenizer.model")
    return str(tmp_path / "tokenizer.model")


@pytest.mark.slow
def test_both_loops_end_at_the_same_parameters(path, tmp_path, capsys):
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE.replace("TOKENIZER", path))
    argv = [str(file), "--steps", "2", "--pairs", "2", "--batch", "8", "--json"]
    assert execute(training.run, argv) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["batch"], row["row"], row["steps"], row["pairs"], row["save_every"]) == (8, 64, 2, 2, 2)
    assert row["difference"] < 1e-6 and row["recompilations"] == 0
    assert row["saves"] == 2 and row["ratio_of_totals"] > 0
    low, high = row["ratio_quartiles"]
    assert 0 < low <= row["ratio"] <= high and row["cpu_ratio"] > 0
    assert row["within"] == (row["ratio"] >= row["at_least"] == 0.97)
    assert row["positions_per_second"] == pytest.approx(8 * 64 * row["steps_per_second"])
    assert 0 < row["tokens_per_second"] <= row["positions_per_second"]
    assert 0 < row["attention_flops_per_step"] < row["flops_per_step"]
    assert 0 < row["mfu"] < 1 and row["peak_flops"] > 0


def test_the_difference_shows_other_parameters():
    one = {"a": jnp.ones(3), "b": jnp.full(2, 4.0)}
    assert bench.largest_difference(one, one) == 0
    assert bench.largest_difference(one, one | {"b": jnp.asarray([4.0, 5.0])}) == 0.25


def test_attention_counts_the_pairs_that_attend():
    """Of all pairs, the FLOPs are those of the six products of scores and values; a window takes pairs away."""
    lm = tiny()
    ranges = np.zeros((2, 8, 2, 2), np.int32)
    ranges[:, :, 0, 1] = 8  # each of 8 positions attends to 8
    zeros = np.zeros((2, 8), np.int32)
    rows = Batch(zeros, zeros, ranges, np.ones((2, 8), bool), zeros)  # type: ignore[arg-type]
    counts = bench.count_batches([rows], window=4)
    assert (counts.tokens, counts.pairs) == (16, 2 * 8 * 8) and counts.local_pairs < counts.pairs
    config = lm.model.config
    products = 6 * config.layers * 2 * config.heads * config.head_dim * 2 * 8 * 8  # 2 FLOPs a pair and number
    assert bench.attention_flops(config, counts) == products


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"accumulate": 2}, "accumulate"), ({"lora": LoraConfig(rank=1)}, "lora.rank"),
     ({"freeze": "embed"}, "freeze")],
)  # fmt: skip
def test_what_the_hand_written_loop_has_not_is_refused(path, changes, name):
    config = dataclasses.replace(recipe(path), **changes)
    with pytest.raises(ValueError, match=name):
        next(bench.compare(config, tokenizer(), steps=1, pairs=1))
