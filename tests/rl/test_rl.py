"""Training on what the model decodes: the gradients of both objectives, exact resumes, rising rewards, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import rl
from mercury_jax.decode.rollout import pad_answers
from mercury_jax.rl.grpo import PolicyBatch
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig
from tests.marks import slow_except
from tests.tiny import tiny

KEY = jax.random.key(0)


def vowels(prompts, texts):
    """A reward that a random model can raise at once: the share of its characters that are one of six letters."""
    return [sum(c in "rtnefu" for c in text) / max(len(text), 1) for text in texts]


def config(start, out, **more) -> TrainConfig:
    base = dict(
        name="rl", model=tiny().model.config, objective=rl.GRPO(estimator="diffu_grpo"), init=start, out=str(out),
        data=rl.Rollouts(tasks=("add2",), n=4, max_tokens=8, reward=vowels), steps=4, batch=8, row=64, log_every=1,
        eval_every=0, sample_every=0, save_every=2, ema=0.0,
        optim=OptimConfig(lr=1e-2, warmup=1, decay="constant", weight_decay=0.0),
    )  # fmt: skip
    return TrainConfig(**(base | more))


def drawn(n=4, size=64):
    lm = tiny()
    r = mj.rollout(lm, ["x y", "def z"], n=n, max_tokens=8, reward=vowels, seed=3)
    return lm, r, pad_answers(r.batch(lm), size)


@pytest.mark.slow
def test_padded_answers_have_the_same_log_probs_and_a_short_row_is_refused():
    lm, r, padded = drawn()
    assert padded.ids.shape == (8, 64) and padded.index.shape == (8, 64)
    for how in (dict(estimator="trajectory"), dict(estimator="diffu_grpo", key=KEY, mask_prompt=0.0)):
        want = mj.rl.token_log_probs(lm, lm.params, r.batch(lm), **how)
        np.testing.assert_allclose(mj.rl.token_log_probs(lm, lm.params, padded, **how), want, atol=1e-5)
    with pytest.raises(ValueError, match="row is 8; allowed: 1[0-9] positions or more"):
        pad_answers(r.batch(lm), 8)


def batch(**more) -> PolicyBatch:
    _, r, answers = drawn()
    assert r.rewards is not None
    rng = np.random.default_rng(0)
    given = dict(
        answers=answers, rewards=r.rewards.astype(np.float32), advantages=rng.normal(size=8).astype(np.float32),
        seed=np.full(8, 7, np.uint32),
    )  # fmt: skip
    return PolicyBatch(**(given | more))


def gradient(objective, data):
    lm = tiny()

    def loss(params):
        found = objective(KEY, lm.model, params, data, lm.corruption)
        return found.per_example.sum() / found.weight.sum(), found

    return jax.jit(jax.grad(loss, has_aux=True))(lm.params)


@pytest.mark.parametrize("estimator", ["diffu_grpo", pytest.param("coupled_grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalise", ["answer", "token"])
def test_on_policy_the_gradient_is_that_of_reinforce(estimator, normalise):
    data, objective = batch(), rl.GRPO(estimator=estimator, normalise=normalise)
    grads, found = gradient(objective, data)
    lm, lengths = tiny(), np.asarray(data.answers.lengths)
    share = 1 / lengths[:, None] / 8 if normalise == "answer" else 1 / lengths.sum()

    def plain(params):
        log_p = mj.rl.token_log_probs(lm, params, data.answers, jax.random.key(7), estimator=estimator)
        return -(log_p * data.advantages[:, None] * share).sum()

    want = jax.jit(jax.grad(plain))(lm.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, want)
    assert float(found.metrics["reward"][0]) == pytest.approx(float(data.rewards.sum()), rel=1e-6)
    assert [float(x) for x in found.metrics["informative"]] == [8, 8]  # no advantage is 0


@pytest.mark.long
def test_what_left_the_clip_range_has_no_gradient_and_the_penalty_pulls_back():
    lm, data = tiny(), batch()
    old = np.array(mj.rl.token_log_probs(lm, lm.params, data.answers, jax.random.key(7)))
    far = old - np.sign(data.advantages)[:, None]  # the new policy already moved by e where it should
    objective = rl.GRPO(estimator="diffu_grpo", clip=0.2)
    clipped, found = gradient(objective, batch(old=far))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(clipped)) == 0.0
    assert float(found.metrics["clipped"][0] / found.metrics["clipped"][1]) == 1.0
    near, _ = gradient(objective, batch(old=old))
    same, _ = gradient(objective, batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), near, same)
    zero = np.zeros(8, np.float32)
    pulled, found = gradient(
        rl.GRPO(estimator="diffu_grpo", kl=0.5), batch(advantages=zero, reference=old + 0.1)
    )
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(pulled)) > 0
    assert float(found.metrics["informative"][0]) == 0.0  # equal rewards: the penalty alone moves the policy
    assert float(found.metrics["kl"][0] / found.metrics["kl"][1]) == pytest.approx(
        np.exp(0.1) - 1.1, rel=1e-3
    )


@pytest.mark.slow
def test_few_steps_is_the_cross_entropy_of_what_the_teacher_accepts_from_there_on():
    lm, data = tiny(), batch(rewards=np.array([1, 0, 1, 1, 0, 1, 1, 1], np.float32))
    _, found = gradient(rl.FewSteps(certainty=0.0, early=1.0), data)
    whole = jnp.asarray(data.answers.order) >= 0
    log_p = mj.rl.token_log_probs(lm, lm.params, data.answers, KEY, mask_prompt=0.0)
    counted = np.asarray(whole).sum(1) * (data.rewards > 0)
    np.testing.assert_allclose(found.weight, counted)
    inside = np.asarray(data.editable)
    if (inside == np.asarray(whole)).all():  # no end of text fills the canvas
        np.testing.assert_allclose(
            found.per_example, -np.asarray(log_p).sum(1) * (data.rewards > 0), rtol=1e-4
        )
    later, _ = gradient(rl.FewSteps(certainty=0.0, early=0.0), data), None
    assert (np.asarray(later[1].weight) <= counted).all() and np.asarray(
        later[1].weight
    ).sum() < counted.sum()
    sharper, certain = gradient(rl.FewSteps(certainty=2.0, early=1.0), data)
    assert float(certain.per_example.sum()) >= float(found.per_example.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "kl"), slow_except([(1, 0.0), (2, 0.1)], (2, 0.1)))
def test_a_run_that_was_resumed_ends_equal(start, tmp_path, updates, kl):
    data = rl.Rollouts(tasks=("add2",), n=4, max_tokens=8, reward=vowels, updates=updates)
    objective = rl.GRPO(estimator="diffu_grpo", kl=kl)
    make = lambda out, **more: config(start, tmp_path / out, data=data, objective=objective, **more)
    whole = mj.train(make("whole"))
    mj.train(make("half", steps=2))
    shutil.rmtree(tmp_path / "half" / "model")
    resumed = mj.train(make("half", resume=True))
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all("reward" in row and ("kl" in row) == (kl > 0) for row in rows)


@pytest.mark.slow
def test_a_reward_rises_through_the_command_that_users_run(start, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"""
from tests.rl import test_rl

def config():
    return test_rl.config({start!r}, "unused", steps=40, batch=32, save_every=40, eval_every=40, eval_batches=1)
"""
    )
    from mercury_jax.cli import main

    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reward = [row["reward"] for row in rows if row["kind"] == "train"]
    assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.1
    assert {"accuracy", "forwards"} <= set(rows[-1])


@pytest.mark.long
def test_distillation_trains_from_a_teacher_and_keeps_it(start, tmp_path):
    data = rl.Trajectories(tasks=("add2",), max_tokens=8)
    found = mj.train(config(start, tmp_path / "run", data=data, objective=rl.FewSteps(), steps=2))
    assert {"teacher_passes", "teacher_right"} <= set(found.metrics)
    assert (
        found.metrics["teacher_right"] == 0.0 and found.metrics["loss"] == 0.0
    )  # a random teacher is never right


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: rl.GRPO(estimator="exact"), "estimator is 'exact'; allowed: diffu_grpo"),
     (lambda: rl.GRPO(estimator="trajectory", samples=2), "samples is 2; allowed: None: trajectory takes passes"),
     (lambda: rl.GRPO(mask_prompt=0.0), "mask_prompt is 0.0; allowed: None: coupled_grpo takes samples, ratios"),
     (lambda: rl.GRPO(estimator="elbo", passes=9), "passes is 9; allowed: None: elbo takes samples"),
     (lambda: rl.GRPO(estimator="elbo", ratios=(0.1, 0.9)), r"ratios is \(0.1, 0.9\); allowed: None: elbo takes"),
     (lambda: rl.Rollouts(tasks=("chess",)), "task is 'chess'; allowed: sudoku4"),
     (lambda: rl.Trajectories(tasks=()), "tasks is .*at least one")],
)  # fmt: skip
def test_fields_that_do_not_fit_each_other_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(objective=rl.FewSteps()), "objective is 'FewSteps'; allowed: rl.GRPO"),
        (dict(data=rl.Trajectories(tasks=("add2",))), "objective is 'GRPO'; allowed: rl.FewSteps"),
        (dict(batch=12, data=rl.Rollouts(tasks=("add2",), n=8)), "batch is 12; allowed: a multiple of n = 8"),
        (dict(data=rl.Rollouts(tasks=("add2",), n=4, updates=3)),
         "save_every is 2; allowed: a multiple of updates = 3"),
        (dict(accumulate=2, objective=rl.GRPO(kl=0.1)),
         "accumulate is 2; allowed: 1 with several updates or a penalty"),
        (dict(init="", objective=rl.GRPO(kl=0.1)), "kl is 0.1; allowed: 0 without `init`"),
    ],
)  # fmt: skip
def test_recipes_that_do_not_fit_are_refused_before_any_step(start, tmp_path, more, words):
    given = dict(tokenizer=f"{start}/tokenizer.model") | more
    with pytest.raises(ValueError, match=words):
        mj.train(config(start, tmp_path / "run", **given))
    assert not (tmp_path / "run" / "checkpoints").exists()
