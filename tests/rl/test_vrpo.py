"""Laws of preference optimisation: the loss of DPO on bounds, exact resumes, a margin that rises, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import rl
from mercury_jax.rl.vrpo import Preferences
from mercury_jax.training.recipe import TrainConfig
from tests.rl.test_rl import config as rollouts_config
from tests.tiny import tiny

WORDS = ("def", "return", "value", "total", "count", "print")


def lines(folder, count=24):
    """Pairs whose chosen answers say `return`, the rejected ones `print`; of both kinds of prompts."""
    records = []
    for i in range(count):
        ask = f"{WORDS[i % 6]} {WORDS[(i + i // 6) % 6]} {i}"
        prompt = {"prompt": ask} if i % 2 else {"messages": [{"role": "user", "content": ask}]}
        records.append(prompt | {"chosen": f"return {i % 3}", "rejected": "print x" + " y" * (i % 2)})
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def recipe(start, folder, out="run", **more) -> TrainConfig:
    given = dict(
        objective=rl.VRPO(samples=2, beta=0.5), data=rl.Preferences(lines(folder)), steps=4, batch=4, row=64
    )
    return rollouts_config(start, folder / out, **(given | more))


def first_batch(folder, start):
    lm = tiny()
    objective = rl.VRPO(samples=2, beta=0.5)
    config = recipe(start, folder, objective=objective)
    batches = Preferences(lines(folder)).batches(config, lm)
    return next(batches), objective, lm


@pytest.mark.slow
def test_with_the_reference_as_policy_the_loss_is_log_2_and_its_gradient_that_of_the_formula(tmp_path, start):
    batch, objective, lm = first_batch(tmp_path, start)

    @jax.jit
    @jax.value_and_grad
    def mean(params):
        loss = objective(jax.random.key(0), lm.model, params, batch, lm.corruption)
        return loss.per_example.sum() / loss.weight.sum()

    assert float(mean(lm.params)[0]) == pytest.approx(np.log(2), abs=1e-6)

    def plain(params, reference):
        """By hand: chosen answers have even places, rejected ones odd places."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.answers)
        key = jax.random.key(batch.seed[0])
        found = mj.rl.token_log_probs(lm, params, flat, key, estimator="elbo", samples=2).sum(1)
        gap = found - reference
        margin = 0.5 * (gap[0::2] - gap[1::2])
        return jnp.log1p(jnp.exp(-margin)).mean(), margin

    # Away from the reference, where the sigmoid is not a half.
    moved = jax.tree.map(lambda x: x * 1.1, lm.params)
    reference = np.asarray(batch.reference).reshape(-1)
    (want, margin), slopes = jax.jit(jax.value_and_grad(plain, has_aux=True))(moved, reference)
    value, grads = mean(moved)
    assert float(jnp.abs(margin).max()) > 0.05
    np.testing.assert_allclose(value, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, slopes)


@pytest.mark.slow
def test_a_run_that_was_resumed_ends_equal_and_microbatches_begin_at_the_reference(tmp_path, start):
    make = lambda out, **more: recipe(
        start, tmp_path, out, batch=8, accumulate=2, objective=rl.VRPO(samples=1), **more
    )
    whole = mj.train(make("whole"))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-4) and rows[0]["margin"] == pytest.approx(
        0, abs=1e-3
    )
    mj.train(make("half", steps=2))
    shutil.rmtree(tmp_path / "half" / "model")
    resumed = mj.train(make("half", resume=True))
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)


@pytest.mark.slow
def test_the_margin_of_held_out_pairs_rises_in_thirty_steps(tmp_path, start):
    data = Preferences(lines(tmp_path, 48), held_out=0.3)
    mj.train(recipe(start, tmp_path, data=data, steps=30, save_every=30, eval_every=1, eval_batches=2))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    margin = [row["margin"] for row in rows if row["kind"] == "train"]
    gap = [row["gap"] for row in rows if row["kind"] == "eval"]
    assert np.mean(margin[-5:]) > 1 and np.mean(margin[-5:]) > np.mean(margin[:5]) + 0.5
    assert gap[-1] > gap[0] + 2


@pytest.mark.parametrize(
    ("line", "words"),
    [({"chosen": "a", "rejected": "b"}, r"p\.jsonl:1: keys .*either prompt or messages"),
     ({"prompt": "q", "messages": [], "chosen": "a", "rejected": "b"}, "either prompt or messages"),
     ({"prompt": "q", "chosen": "a", "rejected": "a"}, r"p\.jsonl:1: rejected is 'a'; allowed: another text"),
     ({"prompt": "q", "chosen": "a"}, r"p\.jsonl:1: rejected is None; allowed: a string"),
     ({"prompt": 3, "chosen": "a", "rejected": "b"}, r"p\.jsonl:1: prompt is 3"),
     ({"messages": [{"role": "king"}], "chosen": "a", "rejected": "b"}, r"p\.jsonl:1: "),
     ({"prompt": "q", "chosen": "x" * 90, "rejected": "b"}, r"row is 64; .* or more, for .*p\.jsonl:1")],
)  # fmt: skip
def test_a_line_that_is_no_pair_is_refused_by_file_and_line(tmp_path, line, words):
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    with pytest.raises(ValueError, match=words):
        Preferences(f"{tmp_path}/p.jsonl").pairs(tiny(), 64, "train")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(objective=rl.GRPO()), "objective is 'GRPO'; allowed: rl.VRPO"),
        (dict(init=""), "init is ''; allowed: a model: it is the reference"),
        (dict(eval_every=2), "eval_every is 2; allowed: 0 where held_out"),
        (dict(data=rl.Rollouts(tasks=("add2",), n=4)), "objective is 'VRPO'; allowed: rl.GRPO"),
        (dict(blocks=((0, 8),)), "blocks is .*data = Preferences, not documents"),
    ],
)
def test_recipes_that_do_not_fit_are_refused_before_any_step(tmp_path, start, more, words):
    with pytest.raises(ValueError, match=words):
        mj.train(recipe(start, tmp_path, **(dict(tokenizer=f"{start}/tokenizer.model") | more)))
    assert not (tmp_path / "run" / "checkpoints").exists()
