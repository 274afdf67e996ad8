"""Frames, labels and the top five: what the page is told is what the engine had."""

import json

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.playground import frames
from mercury_jax.viz import SPECIAL, label
from tests.marks import slow_except
from tests.serve.playground.scripted import shot
from tests.tiny import tiny


def walk(seed: int):
    """Snapshots of a canvas that grows, shrinks, changes and moves on to later blocks."""
    rng, start = np.random.default_rng(seed), 0
    for k in range(1, 30):
        start += int(rng.integers(0, 3)) * (k % 5 == 0)
        n = start + int(rng.integers(0, 9))
        settled = (np.arange(n) < start) | (rng.random(n) < 0.5)
        sure = np.where(np.arange(n) < start, 1.0, rng.random(n))
        forced = np.flatnonzero(rng.random(n) < 0.2).tolist()
        yield shot(
            rng.integers(0, 7, n).tolist(), settled.tolist(), sure.tolist(), k, forced=forced, start=start
        )


@pytest.mark.parametrize("seed", range(4))
def test_frames_rebuild_every_snapshot(seed):
    """Replayed from its changed cells alone, each pass has the snapshot's tokens, flags and confidences."""
    tokenizer, shown, cells, sure = tiny().tokenizer, frames.NO_CELLS, {}, {}
    for snapshot in walk(seed):
        shown, changed = frames.changed_cells(shown, snapshot)
        sent = json.loads(json.dumps(frames.frame_event(tokenizer, shown, changed, snapshot)))
        cells = {i: cell for i, cell in cells.items() if i < sent["n"]} | {c[0]: c for c in sent["cells"]}
        assert sorted(cells) == list(range(len(snapshot.tokens)))
        assert [cells[i][1] for i in range(sent["n"])] == snapshot.tokens.tolist()
        assert [bool(cells[i][3] & frames.ACCEPTED) for i in range(sent["n"])] == snapshot.accepted.tolist()
        assert [bool(cells[i][3] & frames.FORCED) for i in range(sent["n"])] == snapshot.forced.tolist()
        # In front of the active block a cell keeps the confidence that was seen there last.
        sure = {i: sure[i] if i < snapshot.start and i in sure else snapshot.confidence[i] for i in cells}
        np.testing.assert_allclose(
            [cells[i][4] for i in sure], list(sure.values()), atol=0.5 / frames.PRECISION
        )


def test_unchanged_cells_are_not_sent():
    a = shot([5, 6, 7], [1, 0, 0], [0.9, 0.2, 0.3], 1)
    shown, changed = frames.changed_cells(frames.NO_CELLS, a)
    assert changed.tolist() == [0, 1, 2]
    assert frames.changed_cells(shown, a)[1].tolist() == []
    assert (
        frames.changed_cells(shown, a._replace(confidence=np.float32([0.9, 0.2001, 0.3])))[1].tolist() == []
    )
    assert frames.changed_cells(shown, a._replace(accepted=np.array([True, True, False])))[1].tolist() == [1]
    assert frames.changed_cells(shown, a._replace(tokens=np.int32([5, 6, 8])))[1].tolist() == [2]


def test_labels_lose_no_byte():
    """Text cells and byte cells together spell what the tokens spell; control tokens spell nothing."""
    tok = tiny().tokenizer
    for token in range(tok.vocab_size):
        text, kind = label(tok, token)
        spelt = b"" if kind == SPECIAL else bytes.fromhex(text) if kind else text.encode()
        assert spelt == tok.pieces[token]
    assert label(tok, tok.eos) == ("eos", SPECIAL)
    assert label(tok, tok.vocab_size + 7) == (f"id {tok.vocab_size + 7}", SPECIAL)


@pytest.mark.long
@pytest.mark.parametrize(
    "pattern", slow_except(["causal_encoder", "bidirectional", "block_causal"], "block_causal")
)
def test_the_best_token_is_the_one_that_the_pass_showed(pattern):
    """The likeliest token of a cell, and its probability, are those of the frame: over blocks and passes."""
    lm, prompt, block = tiny(pattern), [40, 41, 42, 43, 44], 8
    before, held, start, seen = np.zeros(0, int), np.zeros(0, bool), -1, 0
    for moment in mj.stream(lm, prompt, max_tokens=13, sampler=mj.rules.confidence(), plan=mj.Plan(steps=3)):
        if moment.done and len(moment.tokens) < 13:
            break  # an end of text cut the canvas
        tokens = before if moment.start == start else moment.tokens[: moment.start]
        settled = np.arange(len(tokens)) < moment.start if moment.start != start else held
        for index in (moment.start, len(moment.tokens) - 1):
            canvas = frames.pass_input(
                lm, EngineRequest(prompt=tuple(prompt), max_tokens=13), tokens.tolist(), settled.tolist(), moment.start,
                index, block,
            )  # fmt: skip
            best = frames.top_tokens(lm, canvas)
            assert best.exact and abs(best.p[0] - moment.confidence[index]) < 1e-4
            if not moment.accepted[index]:
                assert best.ids[0] == moment.tokens[index]
            seen += 1
        before, held, start = moment.tokens, moment.accepted, moment.start
    assert seen >= 8


def test_uniform_noise_is_told_apart():
    """Without a mask, what a pass read is not known: it is drawn anew, and not claimed to be the same."""
    lm = tiny(kind="uniform")
    assert not frames.is_exact(lm) and frames.is_exact(tiny())
    canvas = frames.pass_input(
        lm, EngineRequest(prompt=(40, 41), max_tokens=8), [9, 9, 7], [1, 0, 1], 0, 1, 8
    )
    assert canvas.text[:3].tolist() == [40, 41, 9] and canvas.text[4] == 7 and len(canvas.text) == 10
    assert len(set(canvas.text[5:].tolist())) > 1
