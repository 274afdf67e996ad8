"""edit(), open holes, FIM order: what stays, what changes, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from benchmarks import repair
from mercury_jax.decode.infill import (
    LengthSearch,
    candidate_lengths,
    fill,
    fim_prompt,
    join_pieces,
    split_fillings,
)
from mercury_jax.decode.request import Request
from mercury_jax.tokenizer import SPECIAL
from tests.tiny import PATTERNS, tiny

TEXT = "return value if count else total"


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
def test_edit_writes_the_spans_anew_and_holds_the_rest(pattern):
    lm = tiny(pattern)
    out = mj.edit(lm, TEXT, prompt="def x", spans=["count", (0, 6)], seed=1)
    pieces = ["return", " value if ", "count", " else total"]
    ids = [lm.tokenizer.encode(p) for p in pieces]
    at = np.cumsum([0, *map(len, ids)])
    assert len(out.tokens[0]) == at[-1]
    for i in (1, 3):
        assert out.tokens[0][at[i] : at[i + 1]].tolist() == ids[i]
    for change in out.changes[0]:
        assert at[0] <= change.at < at[1] or at[2] <= change.at < at[3]
    never = [lm.tokenizer.mask, lm.tokenizer.pad, lm.tokenizer.eos]
    assert not np.isin(out.tokens[0], never).any()


@pytest.mark.long
@pytest.mark.parametrize("several", [False, True])
def test_edit_writes_wrong_cells_of_a_sudoku_anew(several):
    lm, found = mj.load(), repair.wrong_answers(16, 5)
    spans = [[(i, i + 1) for i in sorted({c.at, *c.blanks[: 3 * several]})] for c in found]
    puzzles = [[{"role": "user", "content": c.puzzle}] for c in found]
    out = mj.edit(lm, [c.wrong for c in found], spans=spans, prompt=puzzles)
    assert sum(text == c.truth for text, c in zip(out.texts, found, strict=True)) >= 15


@mj.rule(stopping=mj.stopping.never)
def upper(key, view, memory):
    """Whatever stands there becomes the id above it, once."""
    first = view.editable & (view.step == 0)
    return mj.rules.propose(view, view.canvas + first), memory


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
def test_edit_starts_from_the_text_itself_and_never_changes_the_prompt(pattern):
    lm = tiny(pattern)
    ids = list(range(280, 300))
    out = mj.edit(lm, [ids, ids[:5]], prompt="def x", sampler=upper(), plan=mj.Plan(steps=2))
    assert [t.tolist() for t in out.tokens] == [[i + 1 for i in ids], [i + 1 for i in ids[:5]]]
    assert out.changes[1][0].at == 0


@mj.rule(stopping=mj.stopping.never)
def tells_the_end(key, view, memory):
    """Each token of the text becomes 280 + the number of end-of-text tokens that the model was shown."""
    ends = (view.canvas == SPECIAL.eos) & (jnp.arange(view.canvas.shape[0]) < view.used)
    return mj.rules.propose(
        view, jnp.where(view.editable, 280 + ends.sum(), view.canvas).astype(jnp.int32)
    ), memory


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
def test_edit_shows_end_of_text_up_to_the_block_as_training_does(pattern):
    lm = tiny(pattern)
    prompt, texts = list(range(290, 296)), [list(range(300, 300 + n)) for n in (3, 8, 11)]
    # A rule sees the active block alone: in a bidirectional model one that holds the whole canvas.
    plan = mj.Plan(steps=1, block=32 if pattern == "bidirectional" else None)
    out = mj.edit(lm, texts, prompt=prompt, sampler=tells_the_end(), plan=plan)
    for text, tokens in zip(texts, out.tokens, strict=True):
        trained = lm.model.layout(np.array([*prompt, *text]), len(prompt), SPECIAL.eos, False)
        fill = int(trained.positions.max()) + 1 - len(prompt) - len(text)
        assert len(tokens) == len(text) and tokens[-1] == 280 + fill


@pytest.mark.long
def test_edit_by_the_models_own_choice_ends_for_every_kind_of_noise():
    for kind in ("absorbing", "uniform", "hybrid"):
        lm = tiny(kind=kind)
        out = mj.edit(lm, TEXT)
        assert len(out.tokens[0]) == len(lm.tokenizer.encode(TEXT))
        assert not np.isin(out.tokens[0], [lm.tokenizer.mask, lm.tokenizer.pad]).any()


def test_a_plain_rule_leaves_a_settled_text_alone():
    assert mj.edit(tiny(), TEXT, sampler=mj.rules.threshold()).changes == [[]]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (dict(spans=["nowhere"]), "spans"),
        (dict(spans=[(3, 99)]), "spans"),
        (dict(spans=[(0, 6), (4, 9)]), "overlap"),
        (dict(spans=[]), "spans"),
        (dict(prompt=["a", "b"]), "prompt"),
    ],
)
def test_what_edit_cannot_do_is_refused_in_words(more, said):
    with pytest.raises(ValueError, match=said):
        mj.edit(tiny(), TEXT, **more)
    with pytest.raises(ValueError, match="context"):
        mj.edit(tiny(), "x " * 400)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_open_holes_are_filled_with_some_length_up_to_their_most(pattern):
    lm = tiny(pattern)
    parts = ["def x", mj.Hole(most=4), ":\n    return ", mj.Hole(most=3)]
    out = mj.infill(lm, parts, sampler=mj.rules.threshold(0.0))
    sizes = [len(lm.tokenizer.encode(p)) for p in parts if isinstance(p, str)]
    known = [t for p in parts if isinstance(p, str) for t in lm.tokenizer.encode(p)]
    tokens = out.tokens[0].tolist()
    assert tokens[: sizes[0]] == known[: sizes[0]]
    filled = len(tokens) - len(known)
    assert filled == out.filled[0] <= 7 and len(out.holes) == 2


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("pattern", "kind", "sampler"),
    [
        *((pattern, "absorbing", mj.rules.threshold(0.0)) for pattern in PATTERNS),
        *((pattern, "uniform", None) for pattern in ("causal_encoder", "bidirectional")),
        ("bidirectional", "absorbing", mj.rules.expand(expand=300, delete=301)),
    ],
)
def test_holes_without_a_token_between_them_are_filled_as_one(pattern, kind, sampler):
    """The text is that of one hole, and its filling is divided in the order of the holes."""
    lm = tiny(pattern, kind=kind)
    fill = lambda parts: mj.infill(lm, parts, sampler=sampler)
    one = fill(["def x", mj.Hole(3), "y"])
    for between in ([], [""], [[]]):
        out = fill(["def x", mj.Hole(1), *between, mj.Hole(2), *between, "y"])
        assert out.tokens[0].tolist() == one.tokens[0].tolist() and out.filled == [3]
        filling = out.tokens[0][-3 - len(lm.tokenizer.encode("y")) :].tolist()
        assert out.holes == [lm.tokenizer.decode(ids) for ids in (filling[:1], filling[1:3])]
    both = ["def x", mj.Hole(2), mj.Hole(1), "y", mj.Hole(1), mj.Hole(1)]
    assert fill(both).texts == fill(["def x", mj.Hole(3), "y", mj.Hole(2)]).texts
    opened = fill(["x", mj.Hole(most=2), mj.Hole(most=2)])
    assert opened.texts == fill(["x", mj.Hole(most=4)]).texts
    assert "x" + "".join(opened.holes) == opened.text
    if pattern != "block_causal":  # FIM order takes holes of one kind
        mixed = fill([mj.Hole(most=3), mj.Hole(2), "y"])
        assert mixed.text == "".join(mixed.holes) + "y" and 2 <= mixed.filled[0] <= 5
        assert len(lm.tokenizer.encode(mixed.holes[1])) == 2 or "\ufffd" in mixed.text


def test_a_growing_rule_decides_the_length_of_a_hole_itself():
    lm = tiny("bidirectional")
    out = mj.infill(lm, ["def x", mj.Hole(most=6), " total"], sampler=mj.rules.expand(expand=300, delete=301))
    tokens = out.tokens[0].tolist()
    before, after = lm.tokenizer.encode("def x"), lm.tokenizer.encode(" total")
    assert tokens[: len(before)] == before and tokens[-len(after) :] == after
    assert len(tokens) - len(before) - len(after) <= 7


@pytest.mark.long
def test_open_holes_that_share_their_growth_lose_no_token():
    """The first run may grow by what the last hole leaves: its parts are still the whole text."""
    lm = tiny("bidirectional")
    grows = mj.Sampler(mj.rules.expand(expand=300, delete=301), (mj.processors.bias({300: 50.0}),))
    out = mj.infill(lm, ["x", mj.Hole(2), mj.Hole(most=4), "y", mj.Hole(most=30)], sampler=grows)
    first, second, third = out.holes
    assert out.text == "x" + first + second + "y" + third


def test_candidates_reach_the_most_and_grow():
    for most in (1, 5, 8, 33, 100):
        sizes = candidate_lengths(most)
        assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))


def test_spare_rows_of_a_batch_change_nothing():
    lm, row = tiny("bidirectional"), [[20, 21], mj.Hole(most=3), [22]]
    request = Request(sampler=mj.rules.threshold(), plan=mj.Plan(steps=2))
    made = lambda rows: fill(lm, [row], request, search=LengthSearch(rows=rows))
    one, four = made(1), made(4)
    assert one.fillings[0][0].tolist() == four.fillings[0][0].tolist()
    assert one.forwards.tolist() == four.forwards.tolist()


def test_fillings_are_found_wherever_the_texts_have_moved():
    row = [[7, 8], mj.Hole(2), [9], mj.Hole(1), mj.Hole(1)]
    text, given = np.array([7, 8, 1, 2, 3, 9, 4]), np.array([1, 1, 0, 0, 0, 1, 0], bool)
    found = split_fillings(row[:4], text, given)
    assert [f.tolist() for f in found] == [[1, 2, 3], [4]]
    assert join_pieces(row[:4], found).tolist() == text.tolist()


def test_a_block_causal_model_gets_what_follows_in_fim_order():
    lm = tiny("block_causal")
    special = SPECIAL
    row = [[20, 21], mj.Hole(3), [22], mj.Hole(3), [23]]
    ids, hole = fim_prompt(lm, row, [])
    assert ids == [special.fim_prefix, 20, 21, special.fim_suffix, 22, 23, special.fim_middle]
    ids, _ = fim_prompt(lm, row, [np.array([5, 6, 7])])
    assert ids == [special.fim_prefix, 20, 21, 5, 6, 7, 22, special.fim_suffix, 23, special.fim_middle]
    out = mj.infill(lm, ["def x", mj.Hole(5), ":\n    return ", mj.Hole(3)])
    assert out.filled == [8]
    with pytest.raises(ValueError, match="fixed and of open"):
        mj.infill(lm, ["def x", mj.Hole(5), "y", mj.Hole()])
