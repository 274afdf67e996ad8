"""Laws of a run whose block changes: the layout follows the step, the texts go on, nothing is compiled again."""

import dataclasses
import functools
import json
import shutil

import chex
import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.config import ModelConfig
from mercury_jax.rl import Rollouts
from mercury_jax.training import data, loop
from mercury_jax.training.data import packing, shard_writer, sources
from mercury_jax.training.data.documents import Files
from mercury_jax.training.objectives import cross_entropy, masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import InitModel, TrainConfig
from mercury_jax.types import Batch
from tests.tiny import VOCAB, tokenizer
from tests.training.tiny_data import FIRST, Bytes, Numbers, assert_same, take

PATTERNS = ("block_causal", "causal_encoder")
BLOCKS = ((0, 1), (2, 4), (5, 16), (9, 2), (12, 8))  # as LLaDA2: it grows, and shrinks again at the end
LENGTHS = [7, 60, 3, 200, 41, 90, 16, 150, 33, 80]
STARTS = np.cumsum([FIRST, *LENGTHS])


def layouts(pattern, blocks=BLOCKS):
    make = lambda block: models.build(ModelConfig(vocab=Numbers.vocab_size, pattern=pattern, block=block))
    return [(first, make(block).layout) for first, block in blocks]


@pytest.fixture
def packed(tmp_path):
    """A corpus of numbers, all different, as shards; most of its texts are cut into pieces."""
    texts = [" ".join(map(str, range(a, a + n))) for a, n in zip(STARTS, LENGTHS)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    shard_writer.pack(Files((f"{tmp_path}/t.jsonl",)), Numbers(), tmp_path / "packed", shard_tokens=1500)
    return data.mixture((data.shards(f"{tmp_path}/packed", infill=0.0, chunk=40), 1))


@pytest.fixture(params=["documents", "shards"])
def start(request, mixed, packed):
    """start(pattern, ...) opens either kind of data in all layouts."""
    mixture, tok = (mixed, Bytes()) if request.param == "documents" else (packed, Numbers())
    setting = {"rows": 4, "row": 128, "seed": 3, "prefetch": 0}
    return lambda pattern="block_causal", layout=None, **more: data.build(
        mixture, tok, layout or layouts(pattern), **{**setting, **more}
    )


def canvas_sizes(batch):
    """Positions of every canvas."""
    sizes = [np.unique(row[row >= 0], return_counts=True)[1] for row in batch.canvas]
    return np.concatenate(sizes)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_batch_has_the_canvases_of_the_block_of_its_step(start, pattern):
    for n, batch in enumerate(take(start(pattern), 16)):
        block = [block for first, block in BLOCKS if first <= n][-1]
        sizes = canvas_sizes(batch)
        assert sizes.max() == block and (sizes == block).mean() > 0.95  # a short text has one short canvas
        # The first range of a canvas ends before the canvas, at as many clean tokens as its first position.
        begins = np.flatnonzero((batch.canvas[0] >= 0) & (np.diff(batch.canvas[0], prepend=-1) != 0))
        seen = batch.ranges[0, begins, 0, 1] - batch.ranges[0, begins, 0, 0]
        np.testing.assert_array_equal(seen, batch.positions[0, begins])


def test_one_stage_makes_the_batches_of_its_layout(start):
    one = layouts("block_causal")[2][1]
    assert_same(take(start(layout=[(0, one)]), 6), take(start(layout=one), 6))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_epoch_holds_every_number_once_but_for_less_than_a_block_at_a_change(packed, pattern):
    run = data.build(packed, Numbers(), layouts(pattern), rows=1, row=80, seed=1, prefetch=0)
    seen: set[int] = set()
    while True:  # to the first number that comes back, in the batch that begins the next epoch
        batch = next(run)
        ids = {int(i) for i in batch.tokens.ravel() if i >= FIRST}
        learnt = [int(i) for i in batch.tokens[batch.editable] if i >= FIRST]
        assert len(learnt) == len(set(learnt))
        if ids & seen:
            break
        seen |= ids
        # Of a text less than a block is a prompt, and it is filled up where it ends alone.
        block = [block for first, block in BLOCKS if first < run.get_state()["batches"]][-1]
        prompts = np.searchsorted(STARTS, sorted(ids - set(learnt)), side="right")
        assert np.bincount(prompts, minlength=1).max() < block
        ends = np.flatnonzero((batch.tokens[0] == Numbers.eos) & (batch.canvas[0] >= 0))
        ends = ends[batch.positions[0, ends] == batch.positions[0, ends - 1] + 1]  # not alone in its piece
        before = set(batch.tokens[0, ends - 1].tolist()) - {Numbers.eos}
        assert before <= set((STARTS - 1).tolist())
    assert run.get_state()["batches"] > BLOCKS[-1][0]
    assert sum(LENGTHS) - len(seen | ids) <= sum(block - 1 for _, block in BLOCKS[1:])


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state_goes_on_exactly_across_every_change(start, prefetch):
    whole = take(start(), 16)
    for taken in (1, 2, 4, 5, 8, 9, 13):  # before, at and behind changes
        run = start(prefetch=prefetch)
        take(run, taken)
        state = json.loads(json.dumps(run.get_state()))
        fresh = start(prefetch=prefetch)
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert_same(take(fresh, 16 - taken), whole[taken:])
        run.set_state(state)  # and in place
        assert_same(take(run, 3), whole[taken : taken + 3])


def test_two_processes_make_the_rows_of_one_and_go_on_from_its_state(start):
    one = start()
    whole = take(one, 4)
    state = one.get_state()
    whole += take(one, 10)
    parts = [start(index=i, count=2) for i in range(2)]
    joined = lambda n: [
        type(whole[0])(*map(np.concatenate, zip(*rows))) for rows in zip(*(take(p, n) for p in parts))
    ]
    assert_same(joined(14), whole)
    for part in parts:
        part.set_state(state)
    assert_same(joined(10), whole[4:])


def test_a_state_of_other_blocks_is_refused(start):
    other = start(layout=layouts("block_causal", ((0, 1), (3, 4), (5, 16), (9, 2), (12, 8))))
    with pytest.raises(
        ValueError, match=r"blocks is \[0, 3, 5, 9, 12\]; allowed: \[0, 2, 5, 9, 12\], as in the checkpoint"
    ):
        other.set_state(start().get_state())


@dataclasses.dataclass(frozen=True)
class Letters:
    """A source of a user, whose streams know nothing of layouts."""

    grows: bool = False

    def open(self, settings):
        ids = np.array(settings.tokenizer.encode("abcdefghijklmnop"), np.int32)
        laid = packing.lay_out(settings, packing.Example(ids, 0, True), "letters")
        size = packing.block_size(settings.layout) if self.grows else 1
        return sources.Stream(lambda index: laid, size)

    def texts(self, seed):
        yield "abc"


def test_a_source_of_the_users_own_is_opened_in_each_layout():
    build = functools.partial(data.build, rows=1, row=96, seed=0, prefetch=0)
    batches = take(build(data.mixture((Letters(), 1)), Bytes(), layouts("block_causal")), 7)
    assert [int(canvas_sizes(batch).max()) for batch in batches] == [1, 1, 4, 4, 4, 16, 16]
    with pytest.raises(ValueError, match="data is 'Letters'; allowed: .*the same examples in every block"):
        build(data.mixture((Letters(grows=True), 1)), Bytes(), layouts("block_causal"))


# --- a run


def test_blocks_of_one_token_and_shifted_logits_cost_what_next_tokens_cost():
    """Where growth starts from, an autoregressive model predicts exactly what it did."""
    config = dataclasses.replace(MODEL, block=1)
    shifted = models.build(dataclasses.replace(MODEL, alignment="shifted"))
    ids = np.arange(20, 50, dtype=np.int32)
    params = jax.jit(shifted.init)(jax.random.key(0))

    def costs(model, layout, masked):
        laid = layout(ids, 1, None)
        batch = Batch(*(x[None] for x in laid))  # pyright: ignore[reportArgumentType]
        xt = np.where(batch.editable, MODEL.mask, batch.tokens) if masked else batch.tokens
        following = np.roll(batch.tokens, -1, axis=1)
        target = batch.tokens if masked else following
        ce, _ = jax.jit(functools.partial(cross_entropy, model))(params, batch, xt, target)
        return np.asarray(ce[batch.editable] if masked else ce[0, :-1])

    single = models.build(config)
    once = models.build(
        dataclasses.replace(config, mask=None)
    ).layout  # each token stands once, as a clean one
    drawn, exact = costs(shifted, single.layout, True), costs(single, once, False)
    np.testing.assert_allclose(drawn, exact, atol=1e-5)


MODEL = ModelConfig(
    vocab=VOCAB, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, pattern="block_causal", block=8
)


def recipe(folder, **fields):
    tokenizer().save(folder / "tokenizer.model")
    settings = {
        "name": "grown", "model": MODEL, "objective": masked_elbo(complementary=True), "steps": 6, "batch": 4,
        "row": 64, "data": data.generated("add3"), "blocks": ((0, 1), (2, 4), (4, 8)), "optim": OptimConfig(lr=1e-2),
        "tokenizer": str(folder / "tokenizer.model"), "out": str(folder / "run"), "sample_every": 0, "eval_every": 6,
        "eval_batches": 1, "save_every": 3, "log_every": 1,
    }  # fmt: skip
    return TrainConfig(**(settings | fields))


def test_a_run_compiles_once_resumes_exactly_and_leaves_the_model_of_its_last_block(tmp_path, monkeypatch):
    make_update = loop.steps.make_update
    monkeypatch.setattr(
        loop.steps, "make_update", lambda setup: chex.assert_max_traces(make_update(setup), n=1)
    )
    chex.clear_trace_counter()
    whole = mj.train(recipe(tmp_path))
    chex.clear_trace_counter()
    params = jax.tree.map(np.asarray, whole.params)
    assert mj.load(tmp_path / "run" / "model").model.config == MODEL
    # From step 3, in the second stage, into the third.
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000006")
    again = mj.train(recipe(tmp_path, out=str(tmp_path / "cut"), resume=True))
    chex.clear_trace_counter()
    chex.assert_trees_all_equal(again.params, params)


REFUSED = {
    "late": ({"blocks": ((1, 8),)}, r"blocks is \(\(1, 8\),\); .*from 0 on"),
    "order": ({"blocks": ((0, 1), (4, 4), (4, 8))}, "whose first steps rise"),
    "size": ({"blocks": ((0, 3), (2, 8))}, "blocks that divide the largest, 8"),
    "zero": ({"blocks": ((0, 0), (2, 8))}, "blocks that divide the largest, 8"),
    "last": ({"blocks": ((0, 8), (2, 4))}, "8 as the last block, that of the model"),
    "never": ({"blocks": ((0, 4), (6, 8))}, "first steps below steps = 6"),
    "bidirectional": ({"model": dataclasses.replace(MODEL, pattern="bidirectional")}, "pattern bidirectional"),
    "unread": ({"model": InitModel(pattern="bidirectional")}, "pattern bidirectional"),
    "autoregressive": ({"model": dataclasses.replace(MODEL, block=1, mask=None), "blocks": ((0, 1),)}, "no mask"),
    "policy": ({"data": Rollouts(tasks=("add2",))}, "data = Rollouts, not documents"),
    "pairs": ({"blocks": (4, 8)}, "blocks is"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_do_not_fit_the_recipe_are_refused_by_name(tmp_path, name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, **fields)


def test_a_block_that_does_not_fit_the_row_is_refused_before_any_step(tmp_path):
    big = dataclasses.replace(MODEL, block=128)
    with pytest.raises(ValueError, match="row is 64; allowed: .* or more"):
        mj.train(recipe(tmp_path, model=big, blocks=((0, 1), (2, 128))))
