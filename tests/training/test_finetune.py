"""Fine-tuning of open checkpoints: what recipes take from the checkpoint, learn, keep and write."""

import dataclasses
import gc
import hashlib
import json
import math
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import mercury_jax as mj
from mercury_jax import api, cli, hub, models
from mercury_jax.training import data
from mercury_jax.training.data.packing import StreamSettings
from mercury_jax.training.objectives import (
    balanced,
    diffusion_gemma,
    layout_of,
    masked_and_edited,
    masked_elbo,
    objective as parts,
)
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import MeshConfig, load_recipe
from mercury_jax.types import LaidOutDocument, LoraWeight
from tests.marks import slow_except
from tests.training.tiny_checkpoints import (
    FAMILIES,
    VOCAB,
    chats,
    checkpoint,
    config,
    losses,
    recipe,
    tokenizer,
)

PATTERNS = ("bidirectional", "block_causal")
RECIPES = {"LLaDA": "sft_llada", "Qwen3": "adapt_qwen3", "DiffusionGemma": "sft_diffusion_gemma"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """family -> a random checkpoint, and a file of chats beside them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    chats(folder / "chats.jsonl")
    made = {}

    def of(family):
        if family not in made:
            made[family] = checkpoint(folder / family, family)
        return made[family], folder / "chats.jsonl"

    return of


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize(
    "family, rank",
    slow_except([(f, r) for f in FAMILIES for r in (0, 4)], ("LLaDA", 4)),
)
def test_forty_steps_on_chats_lower_the_loss_and_leave_the_base_as_it_is(base, tmp_path, family, rank):
    folder, lines = base(family)
    before, params = sums(folder), mj.load(folder).params
    result = mj.train(recipe(family, folder, lines, tmp_path, rank))
    first, last = losses(tmp_path)
    assert last < 0.7 * first
    assert sums(folder) == before
    if rank:
        bases = jax.tree.map(
            lambda x: getattr(x, "base", x), result.params, is_leaf=lambda x: hasattr(x, "base")
        )
        jax.tree.map(np.testing.assert_array_equal, bases, params)
    # Merged or not: in both layouts the same model, that knows its chats, its noise and its ids.
    source, adapter = (folder, tmp_path / "adapter") if rank else (tmp_path / "model", None)
    lm = mj.load(source, adapter=adapter)
    written = hub.convert(source, tmp_path / "hf", to="hf", adapter=adapter)
    again = mj.load(written)
    trained = dataclasses.replace(again.model.config, predicts_next=lm.model.config.predicts_next)
    assert lm.model.config == trained and lm.model.config.mask in (None, lm.tokenizer.mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), lm.params, again.params)
    assert set(range(lm.tokenizer.vocab_size, VOCAB)) <= set(lm.corruption.forbidden)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_except(FAMILIES, "LLaDA"))
def test_a_packaged_recipe_runs_on_a_folder_and_a_file(base, tmp_path, family, capsys):
    folder, lines = base(family)
    argv = [
        "train", RECIPES[family], "--init", str(folder), "--chats", str(lines), "--out",
        str(tmp_path / "run"),
    ]  # fmt: skip
    argv += [
        "--steps", "2", "--batch", "4", "--row", "128", "--mesh.fsdp", "1", "--mesh.data", "-1", "--json",
    ]  # fmt: skip
    assert cli.main(argv) == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    lm, first = mj.load(said["model"]), hub.config_of(folder)
    c = lm.model.config
    assert (c.width, c.vocab, c.dtype) == (first.width, VOCAB, first.dtype) and lm.card["init"] == str(folder)
    if family == "Qwen3":  # the first id behind the tokenizer's last
        assert (c.mask, c.pattern, c.block, c.predicts_next) == (
            tokenizer(family).vocab_size, "block_causal", 16, False
        )  # fmt: skip
        assert hub.info(hub.convert(said["model"], tmp_path / "hf", to="hf"))["family"] == "SDAR, TraDo"
    else:
        assert (
            c == dataclasses.replace(first, predicts_next=c.predicts_next)
            and lm.decoding == mj.load(folder).decoding
        )


@pytest.mark.long
def test_the_encoder_of_diffusion_gemma_learns_every_end_of_text_of_the_last_canvas(base, tmp_path):
    """As in gemma's own data: the mean over all next tokens of prompt, answer and what completes the canvas."""
    folder, lines = base("DiffusionGemma")
    (tmp_path / "one.jsonl").write_text(lines.read_text().splitlines()[0])
    run = tmp_path / "run"
    mj.train(recipe("DiffusionGemma", folder, tmp_path / "one.jsonl", run, steps=1, save_every=1))
    [found] = [r["causal_ce"] for r in map(json.loads, (run / "metrics.jsonl").open()) if "causal_ce" in r]
    lm = mj.load(folder)
    prompt, answer = lm.tokenizer.example("red fox 0", "the quick red model")
    ids = np.array([*prompt, *answer, *[lm.tokenizer.eos] * (-len(answer) % lm.model.config.block)])
    at = np.arange(len(ids))
    ranges = np.zeros((len(ids), 2, 2), np.int32)
    ranges[:, 0, 1] = at + 1
    hidden = lm.model.apply(lm.params, mj.types.PackedPass(ids[None], at[None], ranges[None]))
    log_p = jax.nn.log_softmax(lm.model.head(lm.params, hidden))[0]
    assert found == pytest.approx(-float(log_p[at[:-1], ids[1:]].mean()), rel=1e-4)
    # Only DiffusionGemma's objective has its rows laid out so; other losses of next tokens stay as they are.
    answer = ids[: len(ids) - 5]
    clean = lambda one: int((layout_of(one, lm.model)(answer, len(prompt), 1, True).canvas < 0).sum())
    assert clean(diffusion_gemma()) == clean(balanced(diffusion_gemma())) == len(ids)
    assert clean(diffusion_gemma(encoder=0.0)) == clean(masked_and_edited()) == len(answer)


@pytest.mark.slow
def test_an_adapter_is_an_option_of_the_commands(base, tmp_path, capsys):
    folder, lines = base("LLaDA")
    result = mj.train(recipe("LLaDA", folder, lines, tmp_path / "run", 2, steps=1, save_every=1))
    adapter = ["--adapter", str(result.out / "adapter")]
    argv = ["sample", "red fox 1", "--chat", "--model", str(folder), *adapter, "--max-tokens", "8", "--json"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["forwards"] > 0
    assert cli.main(["convert", str(folder), str(tmp_path / "merged"), *adapter]) == 0
    want, got = mj.load(folder, adapter=adapter[1]).params, mj.load(tmp_path / "merged").params
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_chats_are_rendered_by_the_checkpoints_template_and_end_as_it_ends_an_answer(tmp_path):
    for family in FAMILIES:
        tok, seen = tokenizer(family), []

        def keep(ids, prompt, fill=None, all_clean=None, seen=seen):
            seen.append((list(ids), prompt))
            zeros = np.zeros(len(ids), np.int32)
            return LaidOutDocument(ids, zeros, np.zeros((len(ids), 2, 2), np.int32), zeros > 0, zeros)

        data.chat(str(chats(tmp_path / "c.jsonl"))).open(StreamSettings(tok, keep, 512, (0,), "train"))
        ids, prompt = seen[0]
        question, answer = tok.example("red fox 0", "the quick red model")
        assert ids == question + answer and prompt == len(question)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(init=""), "init is ''; allowed: a checkpoint, since this recipe takes its model from it"),
        (dict(chats=""), "chats is ''; allowed: files with conversations"),
        (dict(chats="nothing/*.jsonl"), "chats is 'nothing/"),
    ],
)
def test_what_a_recipe_lacks_is_refused_before_anything_is_loaded(base, tmp_path, monkeypatch, fields, words):
    folder, lines = base("LLaDA")
    made = dataclasses.replace(recipe("LLaDA", folder, lines, tmp_path), **fields)
    if "init" in fields:
        monkeypatch.setattr(hub, "load", lambda *args, **more: pytest.fail("the checkpoint was loaded"))
    with pytest.raises(ValueError, match=words):
        mj.train(made)


def test_a_mask_is_added_only_where_an_id_is_free(base, tmp_path):
    folder, lines = base("Qwen3")
    made = recipe("Qwen3", folder, lines, tmp_path)
    assert api._with_model(made).model.mask == tokenizer("Qwen3").vocab_size
    own = dataclasses.replace(made, model=dataclasses.replace(made.model, mask=400))
    assert api._with_model(own).model.mask == 400
    assert api._with_model(own).model.pattern == "block_causal"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_the_loaders_copy_is_freed_and_the_base_is_there_once(base, tmp_path, rank):
    """Bytes of live arrays on four devices, when the first update is traced: the state, the batch and nothing else."""
    folder, lines = base("LLaDA")
    found = []

    def held(
        tree,
    ):  # by the shardings: `addressable_shards` makes arrays, which would be counted from then on
        return sum(
            math.prod(x.sharding.shard_shape(x.shape))
            * x.dtype.itemsize
            * len(x.sharding.addressable_devices)
            for x in jax.tree.leaves(tree)
        )

    alive = lambda: held([x for x in jax.live_arrays() if not x.is_deleted()])

    def objective(*args):
        gc.collect()
        found.append(alive())
        return masked_elbo()(*args)

    config = recipe(
        "LLaDA", folder, lines, tmp_path, rank, objective=objective, steps=1, save_every=1, ema=0.0,
        mesh=MeshConfig(data=1, fsdp=4),
    )  # fmt: skip
    gc.collect()
    before = alive()
    params = mj.train(config).params
    flat = flatten_dict(params, sep="/")
    trained = [(w.a, w.b) for w in flat.values() if isinstance(w, LoraWeight)] if rank else params
    expected = held(params) + 2 * held(trained)  # two moments
    # A batch takes a seventh of a copy; the next one may be on its way to the devices already.
    assert expected <= found[-1] - before < expected + 0.5 * held(params)


class Stopped(Exception):
    """Raised in the place of the first step."""


@pytest.fixture
def told(monkeypatch, caplog):
    """told(config) -> what training says before its first step."""

    def stop(*args, **more):
        raise Stopped

    def run(config):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level("WARNING", "mercury_jax"):
            patch.setattr(api.loop, "run", stop)
            with pytest.raises(Stopped):
                mj.train(config)
        return caplog.text

    return run


@pytest.mark.long
def test_a_model_that_no_family_can_hold_is_said_before_the_first_step(base, tmp_path, told):
    folder, lines = base("Qwen3")
    config = recipe("Qwen3", folder, lines, tmp_path)
    assert "Hugging Face" not in told(config)
    shifted = dataclasses.replace(config, model=dataclasses.replace(config.model, alignment="shifted"))
    assert "`mercury convert --to hf` will refuse it" in told(shifted)


def test_a_default_decoding_that_is_not_kept_is_said_before_the_first_step(base, tmp_path, told):
    folder, lines = base("LLaDA")
    config = recipe("LLaDA", folder, lines, tmp_path)
    assert "is not kept" not in told(config)
    shifted = dataclasses.replace(config, model=dataclasses.replace(config.model, alignment="shifted"))
    assert "the default decoding of" in told(shifted)


def test_an_evaluation_that_reads_a_small_held_out_side_often_says_so(base, tmp_path, told):
    folder, lines = base("LLaDA")
    source = data.chat(str(lines), held_out=0.2)
    config = dataclasses.replace(
        recipe("LLaDA", folder, lines, tmp_path), chats="", data=source, eval_every=1, eval_batches=8
    )
    assert re.search(
        r"the 8 batches of an evaluation read them about \d+ times; --eval-batches", told(config)
    )
    assert "held-out data are small" not in told(dataclasses.replace(config, eval_every=0))


def test_an_answer_is_filled_up_to_a_length_that_is_drawn_for_it(base):
    _, lines = base("LLaDA")
    tok = tokenizer("LLaDA")
    made = {p: models.build(dataclasses.replace(config("LLaDA", tok), pattern=p)) for p in PATTERNS}
    opened = {
        (p, split): data.build(
            data.mixture((data.chat(str(lines), held_out=0.3), 1.0)), tok, model.layout,
            rows=64, row=256, seed=0, split=split, prefetch=0,
        )
        for p, model in made.items()
        for split in ("train", "test")
    }  # fmt: skip
    batches = {key: next(opened_one) for key, opened_one in opened.items()}
    sizes = {key: [np.bincount(r[r >= 0]) for r in x.canvas] for key, x in batches.items()}
    filled = np.concatenate(sizes["bidirectional", "train"])
    # Every length up to the row occurs, the short ones more often; held-out answers end with their block.
    assert set(filled) == set(range(32, 257, 32)) and np.median(filled) <= 128
    assert set(np.concatenate(sizes["bidirectional", "test"])) <= {32, 64}
    assert set(np.concatenate(sizes["block_causal", "train"])) == {32}
    # Fillers beyond the first end of text count together a quarter of the answer, whatever their number is.
    one = batches["bidirectional", "train"]
    batch = jax.tree.map(jax.numpy.asarray, one)
    weights = np.asarray(parts.token_weights(made["bidirectional"], batch))
    eos = one.tokens == tok.eos
    filler = one.editable & eos & np.pad(eos[:, :-1], ((0, 0), (1, 0)))
    for canvas, fills, editable, weight in zip(one.canvas, filler, one.editable, weights):
        for number in range(canvas.max() + 1):
            here = canvas == number
            text = weight[here & editable & ~fills]
            assert (text == 1).all()
            assert weight[here & fills].sum() == pytest.approx(min(len(text) / 4, (here & fills).sum()))
    np.testing.assert_array_equal(
        parts.token_weights(made["block_causal"], batches["block_causal", "train"]),
        batches["block_causal", "train"].editable,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LLaDA", "Dream"])
def test_a_tuned_bidirectional_model_answers_at_every_budget_up_to_its_row(tmp_path, family):
    turn = lambda role, content: {"role": role, "content": content}
    asked = {
        f"a {c} {a}": f"The {a} is {c}."
        for c in ("red", "blue", "green")
        for a in ("fox", "bee", "cat", "owl")
    }
    lines = [json.dumps({"messages": [turn("user", q), turn("assistant", a)]}) for q, a in asked.items()]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    hub.tiny_random(family, tmp_path / "tiny")
    tuned = dataclasses.replace(
        load_recipe("sft_llada"), init=str(tmp_path / "tiny"), chats=str(tmp_path / "chats.jsonl"), steps=100,
        batch=12, row=320, mesh=MeshConfig(data=-1, fsdp=1), out=str(tmp_path / "run"),
        optim=OptimConfig(lr=3e-3, warmup=5, decay="wsd", tail=0.1, final=0.1, b2=0.999),
    )  # fmt: skip
    lm = mj.load(mj.train(tuned).out / "model")
    for budget in (16, 32, 64, 128, 256):
        # Dream's default decodes the whole answer as one block; so few steps teach that at short budgets only.
        sampler = mj.Sampler(mj.rules.confidence()) if family == "Dream" and budget > 64 else None
        texts = mj.sample(lm, [[turn("user", q)] for q in asked], max_tokens=budget, sampler=sampler).texts
        assert sum(text.strip() == answer for text, answer in zip(texts, asked.values())) >= 11, budget
