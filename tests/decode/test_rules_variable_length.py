"""Rules that insert and delete: the moving of positions by an oracle, each rule by hand, and runs to their end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode.rules import variable_length
from tests.decode.rule_loop import act, check, decode, table
from tests.decode.views import KEY, MASK, view

SIZE = 8


def filling(keep, extra, size):
    """Where positions go, in plain Python: (source, how many there are, before the cut)."""
    out = []
    for i, (k, e) in enumerate(zip(keep, extra)):
        out += [-1] * int(e) + ([i] if k else [])
    return (out + [-1] * size)[:size], len(out)


def test_rearrange_is_what_inserting_and_deleting_in_a_list_is():
    rng = np.random.default_rng(0)
    step = jax.jit(variable_length.rearrange)
    whole = jnp.zeros(SIZE, int), jnp.full(SIZE, SIZE)
    for _ in range(200):
        keep, extra = rng.random(SIZE) < 0.7, rng.integers(0, 3, SIZE) * (rng.random(SIZE) < 0.4)
        assert step(keep, extra, *whole).tolist() == filling(keep, extra, SIZE)[0]


def test_rearrange_stays_within_its_runs():
    rng = np.random.default_rng(1)
    step = jax.jit(
        lambda keep, extra, editable: variable_length.rearrange(
            keep, extra, *variable_length.editable_runs(editable)
        )
    )
    for _ in range(200):
        editable = rng.random(SIZE) < 0.7
        keep = ~editable | (rng.random(SIZE) < 0.6)
        extra = editable & (rng.random(SIZE) < 0.4)
        want, i = [], 0
        while i < SIZE:
            j = i + 1
            while editable[i] and j < SIZE and editable[j]:
                j += 1
            source, _ = filling(keep[i:j], extra[i:j], j - i)
            want += [s + i if s >= 0 else -1 for s in source]
            i = j
        assert step(keep, extra, editable).tolist() == want


def saying(token, p, canvas, editable, used=SIZE, **more):
    """A view whose position i says token[i] with p[i], and otherwise its own index."""
    p, token = np.asarray(p, float), np.asarray(token)
    probs = np.tile(((1 - p) / 10)[:, None], (1, 10))
    probs[np.arange(SIZE), np.arange(SIZE)] += (1 - p) * 0.1  # the second choice
    probs[np.arange(SIZE), token] = p
    probs[:, MASK] = 0
    probs = jnp.asarray(probs / probs.sum(1, keepdims=True))
    canvas, editable = jnp.asarray(canvas), jnp.asarray(editable)
    v, token, p = blank(), jnp.asarray(token), probs[np.arange(SIZE), token]
    reading = v.stats._replace(argmax=token, sample=token, p_argmax=p, p_sample=p)
    fields = dict(steps=20) | more
    return v._replace(
        canvas=canvas, answer=canvas, stats=reading, logits=jnp.log(probs + 1e-30), editable=editable,
        masked=editable & (canvas == MASK), used=jnp.asarray(used), **{k: jnp.asarray(x) for k, x in fields.items()},
    )  # fmt: skip


@functools.cache
def blank():
    return view([0.0] * SIZE, [True] * SIZE)


def outcome(rule, v, memory=None):
    memory = rule.init(v.canvas, 10) if memory is None else memory
    proposal, memory = act(KEY, rule, v, memory)
    n = int(proposal.used)
    return [x.tolist()[:n] for x in (proposal.canvas, proposal.answer, proposal.source)], memory


# -- DreamOn: 6 says "two of me", 7 says "none of me"


def test_expand_makes_two_masks_of_one_and_none_of_another():
    M = MASK
    canvas, editable = [1, M, M, M, 2, M, M, M], [False, True, True, True, False] + [False] * 3
    v = saying([0, 6, 3, 7, 0, 0, 0, 0], [0.95] * SIZE, canvas, editable, used=5, growth=3)
    (canvas, answer, source), left = outcome(variable_length.expand(6, 7), v)
    assert canvas == [1, M, M, 3, 2] and source == [0, -1, 1, 2, 4] and left == SIZE - 1
    # a new mask answers what its place would have said without either id, here its index
    assert answer == [1, 1, 1, 3, 2]
    (canvas, _, source), _ = outcome(variable_length.expand(6), v)  # 7 is a token like any other
    assert canvas == [1, M, M, 3, 7, 2] and source == [0, -1, 1, 2, 3, 4]


def test_expand_uses_the_room_there_is():
    M = MASK
    canvas, editable = [M, M, M, 2, M, M, M, M], [True] * 3 + [False] * 5
    say = functools.partial(saying, [6, 6, 3, 0, 0, 0, 0, 0], [0.95] * SIZE, canvas, editable, used=4)
    assert outcome(variable_length.expand(6), say(growth=1))[0][0] == [M, M, M, 3, 2]  # the second waits
    # Without room they are words: 0 and 1, which have 0.2 of what is left.
    assert outcome(variable_length.expand(6, p=0.7), say(growth=0))[0][0] == [M, M, 3, 2]
    assert outcome(variable_length.expand(6, p=0.1), say(growth=0))[0][0] == [0, 1, 3, 2]
    assert outcome(variable_length.expand(6, p=0.1), say(growth=4, step=19))[0][0] == [
        0,
        1,
        3,
        2,
    ]  # the last step
    assert outcome(variable_length.expand(6, p=0.1), say(growth=4), jnp.asarray(0))[0][0] == [
        0,
        1,
        3,
        2,
    ]  # budget spent
    assert 6 not in outcome(variable_length.expand(6, p=1.0), say(growth=0))[0][1]


def test_expand_with_p_one_settles_one_mask_a_step():
    M = MASK
    v = saying([0, 1, 2, 3, 4, 5, 6, 7], [0.9, 0.99] + [0.95] * 6, [M] * SIZE, [True] * SIZE)
    assert outcome(variable_length.expand(8, p=1.0), v)[0][0] == [M, 1] + [M] * 6


@pytest.mark.parametrize("seed", [0, 1])
def test_expand_ends_and_keeps_what_was_given(seed):
    M = MASK
    canvas, editable = [1, M, M, 2, M, M, 3, 4], [False, True, True, False, True, True, False, False]
    canvas, editable = canvas + [M] * 8, editable + [False] * 8
    given = [1, 2, 3, 4]
    seen = decode(
        variable_length.expand(6, 7, p=0.3),
        canvas,
        editable,
        table(seed, 16, 2.0),
        60,
        used=8,
        growth=8,
        temperature=1.0,
    )
    check(seen, canvas[:8], editable[:8])
    last = seen[-1]
    assert len(seen) < 60 and M not in last.canvas[: last.used]
    assert max(step.used for step in seen) <= 16
    assert any(step.used != 8 for step in seen)
    assert all(6 not in step.answer[: step.used] and 7 not in step.answer[: step.used] for step in seen)
    assert [int(x) for x in last.canvas[: last.used][~last.editable[: last.used]]] == given


# -- LLaDA2.2: 6 deletes, 7 inserts


def test_levenshtein_deletes_inserts_and_edits_in_one_step():
    M = MASK
    canvas, editable = [1, 5, 4, 3, M, 2, M, M], [False] + [True] * 7
    v = saying([0, 6, 4, 7, 5, 1, 0, 0], [0.95] * 5 + [0.8, 0.3, 0.2], canvas, editable)
    (canvas, answer, source), (first, seen) = outcome(variable_length.levenshtein(6, 7), v)
    # 5 goes, 4 stays, a mask before 3, the mask becomes 5, 2 becomes 1, the rest follows up to the length
    assert canvas == [1, 4, M, 3, 5, 1, M, M] and source == [0, 2, -1, 3, 4, 5, 6, 7]
    assert first.tolist() == [True, True, False, True, True, True, True, True]
    assert answer[:2] == [1, 4] and answer[3:6] == [3, 5, 1] and M not in answer
    (canvas, _, _), _ = outcome(variable_length.levenshtein(6, 7, p_edit=0.9), v)
    assert canvas == [1, 4, M, 3, 5, 2, M, M]  # 0.8 was not sure enough


def test_levenshtein_pads_and_cuts_within_the_run():
    M = MASK
    canvas, editable = [5, 4, 1, 3, 2, 5, 0, 0], [True, True, False, True, True, True, False, False]
    v = saying([6, 4, 0, 7, 2, 5, 0, 0], [0.9] * SIZE, canvas, editable)
    (canvas, _, source), _ = outcome(variable_length.levenshtein(6, 7), v)
    assert canvas == [4, M, 1, M, 3, 2, 0, 0] and source == [1, -1, 2, -1, 3, 4, 6, 7]


def test_levenshtein_settles_more_than_edits_bring_in():
    M = MASK
    canvas, editable = [M] * 5 + [0, 0, 0], [True] * 5 + [False] * 3
    v = saying([1, 2, 3, 4, 5, 0, 0, 0], [0.1, 0.2, 0.3, 0.4, 0.45, 0, 0, 0], canvas, editable)
    rule = variable_length.levenshtein(6, 7)
    _, seen = rule.init(v.canvas, 10)
    counts = []
    for first in ([1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]):
        (canvas, _, _), _ = outcome(rule, v, (jnp.asarray(first + [0] * 3, bool), seen))
        counts.append(5 - canvas.count(M))
    assert counts == [1, 3, 5]


def test_levenshtein_does_not_go_back():
    M = MASK
    rule, start = variable_length.levenshtein(6, 7), [M, M, M, 0, 0, 0, 0, 0]
    editable = [True] * 3 + [False] * 5
    v = saying([6, 6, 6, 0, 0, 0, 0, 0], [0.9, 0.8, 0.7] + [0] * 5, start, editable)
    # Deleting every mask and padding with masks would change nothing: so the surest says another word.
    assert outcome(rule, v)[0][0].count(M) == 2
    v = saying([2, 1, 1, 0, 0, 0, 0, 0], [0.9] * SIZE, [1, 1, 1, 0, 0, 0, 0, 0], editable)
    memory = rule.init(v.canvas, 10)
    assert outcome(rule, v, memory)[0][0][:3] == [2, 1, 1]
    been = memory[0], memory[1].at[3].set(jnp.asarray([2, 1, 1, 0, 0, 0, 0, 0]))
    assert outcome(rule, v, been)[0][0][:3] == [1, 1, 1]
    last = outcome(rule, v._replace(step=jnp.asarray(19)), memory)
    assert last[0][0][:3] == [1, 1, 1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_levenshtein_ends_and_keeps_what_was_given(seed):
    M, size = MASK, 10
    canvas, editable = [1, M, M, M, 2, M, M, M, M, 3], [False] + [True] * 3 + [False] + [True] * 4 + [False]
    moods = 3.0 * np.random.default_rng(seed).normal(size=(11, size, 10)).astype(np.float32)
    moody = lambda canvas: jnp.asarray(moods)[jnp.sum(canvas) % 11]
    seen = decode(variable_length.levenshtein(6, 7), canvas, editable, moody, 60)
    check(seen, canvas, editable)
    assert len(seen) <= 7 + 16 + 1 and M not in seen[-1].canvas
    assert all(x not in step.answer for x in (6, 7) for step in seen)
    assert any(np.any(step.source != np.arange(size)) for step in seen)


# -- DAEDAL: 5 ends the answer


def waiting(ends, n=4, **more):
    """Four masks; the given positions say 5 with the given probabilities."""
    M = MASK
    token = [5 if p else 1 for p in ends] + [1] * 4
    p = [q or 0.5 for q in ends] + [0.5] * 4
    v = saying(
        token, p, [M] * SIZE, [True] * n + [False] * (SIZE - n), used=n, **({"eos": 5, "growth": 4} | more)
    )
    return v._replace(stats=v.stats._replace(p_eos=v.stats.p_sample * (v.stats.argmax == 5)))


def test_ending_counts_the_last_positions_that_say_so():
    v = waiting([0.9, 0, 0.6, 0.8])
    p = np.asarray(v.stats.p_eos)
    np.testing.assert_allclose(variable_length.end_confidence(v, 2), (p[2] + p[3]) / 2, rtol=1e-6)
    np.testing.assert_allclose(variable_length.end_confidence(v, 8), (p[0] + p[2] + p[3]) / 8, rtol=1e-6)
    given = v._replace(editable=v.editable.at[3].set(False))
    np.testing.assert_allclose(variable_length.end_confidence(given, 8), (p[0] + p[2]) / 8, rtol=1e-6)


DECODING = variable_length.Growth(jnp.asarray(False), jnp.asarray(-1, jnp.int32))


def test_daedal_lengthens_until_the_end_is_seen():
    M, rule = MASK, variable_length.daedal(by=3, tail=4)
    (canvas, answer, source), memory = outcome(rule, waiting([0, 0, 0, 0.6]))
    assert canvas == [M] * 7 and source == [0, 1, 2, 3, -1, -1, -1] and memory.lengthening and M not in answer
    seen = waiting([0, 0.8, 0.7, 0.8])
    (canvas, answer, _), memory = outcome(rule, seen)
    assert (
        canvas == [M] * 4 + [5, 5] and answer[4:] == [5, 5] and not memory.lengthening
    )  # tail / 2 ends of text
    assert outcome(rule, seen._replace(growth=jnp.asarray(1)))[0][0] == [M] * 4 + [5]
    assert outcome(rule, seen, DECODING)[0][0] == [M, 5, M, M]  # the surest mask settles
    assert outcome(rule, waiting([0, 0, 0, 0.6], growth=2))[0][0] == [M] * 6
    full = outcome(rule, waiting([0, 0, 0, 0.6], growth=0))
    assert full[0][0] == [M] * 4 and not full[1].lengthening  # nothing fits, and nothing is accepted yet
    assert outcome(rule, waiting([0, 0, 0, 0.6], step=19))[0][0] == [M, M, M, 5]  # the last step
    assert len(outcome(rule, waiting([0, 0, 0, 0.6]), DECODING)[0][0]) == 4  # it has begun to fill
    assert outcome(rule, waiting([0, 0, 0, 0.8], eos=-1))[0][0] == [M, M, M, 5]  # nothing ends the answer


def test_daedal_lengthens_before_what_was_given():
    v = waiting([0, 0, 0, 0.6])
    v = v._replace(
        editable=v.editable.at[3].set(False), masked=v.masked.at[3].set(False), canvas=v.canvas.at[3].set(2)
    )
    (canvas, _, source), _ = outcome(variable_length.daedal(by=2, tail=2), v)
    assert canvas == [MASK] * 5 + [2] and source == [0, 1, 2, -1, -1, 3]
    (canvas, _, _), _ = outcome(variable_length.daedal(by=2, tail=2, p_end=0.0), v)
    assert canvas == [MASK] * 3 + [2]  # no end of text in front of what was given


def test_daedal_widens_the_mask_that_is_most_at_a_loss():
    M = MASK
    v = waiting([0, 0, 0, 0.6])
    p = jnp.asarray([0.95, 0.05, 0.02, 0.6] + [0.5] * 4)
    v = v._replace(stats=v.stats._replace(p_sample=p))
    (canvas, answer, source), _ = outcome(variable_length.daedal(by=3, tail=2), v, DECODING)
    assert canvas == [1, M, M, M, M, M] and source == [0, 1, -1, -1, 2, 3] and M not in answer
    # One more position is left: the two new masks move the last one out.
    cut = outcome(variable_length.daedal(by=3, tail=2), v._replace(growth=jnp.asarray(1)), DECODING)
    assert cut[0][2] == [0, 1, -1, -1, 2]
    assert len(outcome(variable_length.daedal(by=3, tail=2, p_low=0.01), v, DECODING)[0][0]) == 4
    assert len(outcome(variable_length.daedal(by=3, tail=2, p_full=0.2), v, DECODING)[0][0]) == 4


def test_daedal_decodes_its_blocks_from_the_left():
    M, rule = MASK, variable_length.daedal(by=3, tail=2, block=2, p_full=0.0)
    v = waiting([0.95, 0.5, 0.99, 0.95])
    (canvas, _, _), memory = outcome(rule, v, DECODING)
    assert canvas == [5, M, M, M] and memory.front == 0
    v = v._replace(canvas=v.canvas.at[0].set(5), masked=v.masked.at[0].set(False))
    (canvas, _, _), memory = outcome(rule, v, memory)
    assert canvas == [5, 5, M, M] and memory.front == 2


def test_daedal_ends_within_its_room():
    M = MASK
    canvas, editable = [1] + [M] * 3 + [2] + [M] * 11, [False] + [True] * 3 + [False] * 12
    rule = variable_length.daedal(by=3, tail=4, p_low=0.5)
    seen = decode(rule, canvas, editable, table(4, 16, 0.5), 40, used=5, growth=11, eos=5)
    check(seen, canvas[:5], editable[:5])
    assert seen[-1].used == 16 and M not in seen[-1].canvas and len(seen) < 40
    assert rule.params["start"] == 64
