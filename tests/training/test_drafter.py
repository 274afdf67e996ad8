"""Laws of training a block drafter: what its blocks see, that it learns, resumes, and is saved without its target."""

# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.config import DrafterConfig, NoiseConfig
from mercury_jax.models.drafter import join
from mercury_jax.rl.answers import conversations, write_answers
from mercury_jax.training.objectives import block_draft
from mercury_jax.training.objectives.block_draft import draw_blocks, sample_vocabulary, sampled_cross_entropy
from mercury_jax.training.objectives.objective import token_cross_entropy
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig
from mercury_jax.types import Batch, PackedPass
from tests.training import tiny_checkpoints

BLOCK = 4
DRAFTER = DrafterConfig(features=(0, 1), block=BLOCK, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=32)
OBJECTIVE = block_draft(anchors=6, decay=3.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a tiny random target, and the target."""
    folder = tmp_path_factory.mktemp("drafter")
    return folder, mj.load(tiny_checkpoints.checkpoint(folder / "base", "Qwen3"))


@pytest.fixture(scope="module")
def run(target):
    """A drafter that was trained on answers of the target."""
    folder, lm = target
    asked = [
        [{"role": "user", "content": f"{word} fox {i}"}] for word in tiny_checkpoints.WORDS for i in range(8)
    ]
    texts = mj.sample(lm, asked, **greedy(lm, 24)).texts
    turns = lambda messages, text: [*messages, {"role": "assistant", "content": text}]
    lines = [
        json.dumps({"messages": turns(*pair)}) for pair in zip(asked, texts, strict=True) if pair[1].strip()
    ]
    (folder / "answers.jsonl").write_text("\n".join(lines))
    config = recipe(folder, steps=60)
    return asked, config, mj.train(config)


def greedy(lm, tokens):
    """Answers of a random model in words that the tokenizer reads back as the same ids."""
    ids = lm.tokenizer.encode(" ".join(("the quick fox model", *tiny_checkpoints.WORDS)))
    return dict(max_tokens=tokens, temperature=0.0, logit_bias=dict.fromkeys(ids, 50.0))


def recipe(folder, **changes):
    made = TrainConfig(
        name="drafter", model=InitModel(), drafter=DRAFTER, objective=OBJECTIVE, init=str(folder / "base"),
        chats=str(folder / "answers.jsonl"), noise=NoiseConfig(kind="uniform"), batch=8, row=128, ema=0.0,
        optim=OptimConfig(lr=1e-2, warmup=2, decay="constant", weight_decay=0.0), out=str(folder / "run"),
        eval_every=0, sample_every=0, log_every=1, save_every=30,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def rows(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.mark.long
def test_a_trained_drafter_is_accepted_more_often_and_the_text_stays(target, run):
    (folder, lm), asked = target, run[0]
    drafter = mj.load_drafter(folder / "run" / "drafter")
    fresh = jax.jit(join(DRAFTER, lm.model).init)(jax.random.key(5))["drafter"]
    how = greedy(lm, 20)
    plain = mj.sample(lm, asked[:8], **how)
    trained, random = (
        mj.sample(lm, asked[:8], draft=x, **how)
        for x in (drafter, dataclasses.replace(drafter, params=fresh))
    )
    assert trained.texts == random.texts == plain.texts
    assert trained.draft.acceptance > random.draft.acceptance + 0.1
    first, last = rows(folder / "run")[0], rows(folder / "run")[-1]
    assert last["loss"] < 0.8 * first["loss"] and last["agrees_1"] > first["agrees_1"]
    assert 0 <= last["accepted"] <= BLOCK - 1
    # Neither the checkpoints nor the folder of the drafter hold the target.
    saved = {path.name: path for path in (folder / "run" / "checkpoints").glob("*/checkpoint.json")}
    names = json.loads(next(iter(saved.values())).read_text())["arrays"]
    assert names and not any("target" in name for name in names)
    assert sum(x.size for x in jax.tree.leaves(drafter.params)) == sum(x.size for x in jax.tree.leaves(fresh))
    # It drafts the ids of its training texts, and the end of an answer.
    ids, texts = set(drafter.config.ids), [out for out in plain.texts if out.strip()]
    assert (
        all(ids.issuperset(lm.tokenizer.encode(text)) for text in texts) and len(ids) < lm.model.config.vocab
    )


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_parameters(target, run):
    folder, (_, config, whole) = target[0], run
    mj.train(dataclasses.replace(config, out=str(folder / "half"), steps=30))
    again = mj.train(dataclasses.replace(config, out=str(folder / "half"), resume=True))
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


def packed(seed=0):
    """A row of two documents with prompts of 3 and 4 tokens, and padding."""
    lengths, prompts, slots = (14, 12), (3, 4), 30
    tokens = np.random.default_rng(seed).integers(10, 300, (1, slots))
    positions, ranges = np.zeros((1, slots), int), np.zeros((1, slots, 2, 2), int)
    editable, at = np.zeros((1, slots), bool), 0
    for n, prompt in zip(lengths, prompts, strict=True):
        own = np.arange(n)
        positions[0, at : at + n], editable[0, at + prompt : at + n] = own, True
        ranges[0, at : at + n, 0] = np.stack([own * 0 + at, at + own + 1], -1)
        at += n
    return jax.tree.map(jnp.asarray, Batch(tokens, positions, ranges, editable, np.full((1, slots), -1)))


def test_a_block_sees_nothing_after_its_anchor(target):
    """Another token moves the logits of exactly the blocks that start at it or after it, in its document."""
    model = join(DRAFTER, target[1].model)
    params = jax.jit(model.init)(jax.random.key(0))
    key, batch = jax.random.key(3), packed()

    @jax.jit
    def hidden(batch):
        read = model.apply(params, PackedPass(batch.tokens, batch.positions, batch.ranges)).blocks
        blocks = draw_blocks(key, model, batch, 8, BLOCK)
        return model.drafter.apply(params, read, batch.positions, blocks.given).last.reshape(
            8, BLOCK, -1
        ), blocks

    before, blocks = hidden(batch)
    anchors = np.asarray(blocks.given.ranges)[0].reshape(8, BLOCK, 2, 2)[:, 0, 0]  # [context start, anchor)
    assert len(set(anchors[:, 1])) == 8 and set(anchors[:, 0]) == {0, 14}
    for place in (1, 5, 9, 16, 20, 25):
        after = hidden(batch._replace(tokens=batch.tokens.at[0, place].add(1)))[0]
        moved = np.asarray(jnp.abs(after - before).max((1, 2)) > 0)
        np.testing.assert_array_equal(moved, (anchors[:, 0] <= place) & (place <= anchors[:, 1]))


def test_blocks_are_the_tokens_that_follow_in_the_answer(target):
    batch, model = packed(), join(DRAFTER, target[1].model)
    blocks = draw_blocks(jax.random.key(1), model, batch, 40, BLOCK)
    tokens = np.asarray(batch.tokens)[0]
    given = blocks.given.tokens.reshape(-1, BLOCK)
    ranges, ends = blocks.given.ranges.reshape(-1, BLOCK, 2, 2)[:, 0], {0: 14, 14: 26}
    found = []
    for i in np.flatnonzero(np.asarray(blocks.exists)[0, :, 0]):
        begin, anchor = map(int, ranges[i, 0])
        left = min(BLOCK - 1, ends[begin] - anchor - 1)
        assert given[i].tolist() == [tokens[anchor], *[-1] * (BLOCK - 1)]
        assert blocks.exists[0, i].sum() == left
        np.testing.assert_array_equal(blocks.target[0, i, :left], tokens[anchor + 1 : anchor + 1 + left])
        found.append(anchor)
    # Every token that an answer token follows: from the last one of the prompt to the last but one of the answer.
    assert sorted(found) == [*range(2, 13), *range(14 + 3, 14 + 11)]


def test_a_sampled_softmax_estimates_the_whole_one(target):
    """All ids of the batch count exactly; the mean over draws of the others' sum is theirs."""
    model = join(DRAFTER, target[1].model)
    params, batch = jax.jit(model.init)(jax.random.key(0)), packed()
    hidden = model.apply(params, PackedPass(batch.tokens, batch.positions, batch.ranges))
    logits = jax.jit(model.head)(params, hidden)

    @jax.jit
    def sampled(key):
        narrow, given = sample_vocabulary(key, model, params, batch, 64)
        found = narrow.head(given, hidden)
        assert found.shape == (1, 30, 30 + 64)
        ce, hit = sampled_cross_entropy(given, found, batch.tokens)
        return jnp.exp(ce), hit, found, given[1], given[2]

    odds, hits, found, chosen, weights = jax.vmap(sampled)(jax.random.split(jax.random.key(1), 2000))
    np.testing.assert_allclose(found[0], logits[..., chosen[0]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.exp(weights)[:, :30].sum(1), len(set(np.ravel(batch.tokens))), rtol=1e-5)
    ce, hit = token_cross_entropy(None, params, logits, batch.tokens)
    np.testing.assert_allclose(odds.mean(0), jnp.exp(ce), rtol=0.05)
    assert (hits >= hit).all() and odds.std(0).max() > 0  # fewer ids that could be more probable


def test_what_does_not_fit_is_refused_by_name(target):
    folder, lm = target
    chats = tiny_checkpoints.chats(folder / "chats.jsonl")
    config = recipe(folder, chats=str(chats))
    for change, match in [
        (dict(objective=block_draft(), drafter=None), "drafter is None"),
        (dict(drafter=dataclasses.replace(DRAFTER, features=(0, 9))), "drafter.features"),
        (dict(init=""), "init is ''"),
    ]:
        with pytest.raises(ValueError, match=match):
            mj.train(dataclasses.replace(config, out=str(folder / "other"), freeze="", **change))
    with pytest.raises(ValueError, match="freeze is 'head'"):
        recipe(folder, freeze="head")
    with pytest.raises(ValueError, match="folder is .*block drafter"):
        mj.load_drafter(mj.hub.NANO)


def test_answers_are_appended_behind_the_last_one(tmp_path):
    """An interrupted file, whose last line was cut off, gets the lines of an uninterrupted one."""
    lm, path, asked = mj.load(), tmp_path / "a.jsonl", [f"{n}+{n + 5}=" for n in range(111, 117)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"question": x}) + "\n" for x in asked))
    prompts = conversations(tmp_path / "asked.jsonl", "question")
    how = dict(max_tokens=48, batch=2)
    assert write_answers(lm, prompts, path, **how) == 6
    whole = path.read_text()
    assert next(json.loads(x)["messages"][-1]["content"] for x in whole.splitlines()) == "227"
    path.write_text(whole[: len(whole) // 2])
    write_answers(lm, prompts, path, **how)
    assert path.read_text() == whole
    path.write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match="path is"):
        write_answers(lm, prompts, path, **how)
