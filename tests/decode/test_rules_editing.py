"""Rules that edit decided tokens, against cases computed by hand and runs to their end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode import stopping
from mercury_jax.decode.rules.remask import blind_editing, editing, resample, self_correct
from mercury_jax.decode.sampler import propose
from tests.decode.rule_loop import act, check, decode, table
from tests.decode.views import KEY, MASK, view


def believing(argmax, p, masked, canvas, editable=None):
    """A view whose position i believes argmax[i] with probability p[i]."""
    v = view(p, masked)
    token, p = jnp.asarray(argmax), jnp.asarray(p, jnp.float32)
    reading = v.stats._replace(argmax=token, sample=token, p_argmax=p, p_sample=p)
    editable = jnp.ones(len(p), bool) if editable is None else jnp.asarray(editable)
    canvas = jnp.asarray(canvas, jnp.int32)
    return v._replace(canvas=canvas, answer=canvas, stats=reading, leave_one_out=reading, editable=editable)


def written(rule, v):
    proposal, _ = act(KEY, rule, v)
    return proposal.canvas.tolist(), proposal.answer.tolist()


def test_editing_fills_and_replaces_in_one_step():
    masked = [True, True, False, False, False, False]
    v = believing(
        [1, 2, 3, 4, 5, 6],
        [0.96, 0.9, 0.95, 0.85, 0.99, 0.99],
        masked,
        [MASK, MASK, 8, 8, 5, 8],
        [True] * 5 + [False],
    )
    # sure mask, unsure mask, sure edit, unsure edit, agrees, given
    assert written(editing(), v) == ([1, MASK, 3, 8, 5, 8], [1, 2, 3, 8, 5, 8])
    assert written(editing(p=0.8, p_edit=0.8), v)[0] == [1, 2, 3, 4, 5, 8]
    assert written(editing(p=0.99, p_edit=1.0), v)[0] == [1, MASK, 8, 8, 5, 8]  # at least one mask


def test_blind_editing_asks_the_masks_that_cannot_see_the_token():
    v = believing([1, 8, 8], [0.5, 0.99, 0.99], [True, False, False], [MASK, 8, 8])
    blind = v.leave_one_out._replace(argmax=jnp.asarray([7, 3, 4]), p_argmax=jnp.asarray([0.99, 0.95, 0.5]))
    v = v._replace(leave_one_out=blind)
    assert written(editing(), v)[0] == [1, 8, 8]
    assert written(blind_editing(), v)[0] == [1, 3, 8]
    assert blind_editing().leave_one_out and not editing().leave_one_out


def spelling(canvas):
    """Wants 0 1 2 3 ... and is sure of a token once the one before it is right."""
    want = jnp.arange(canvas.shape[0])
    right = jnp.concatenate([jnp.array([True]), canvas[:-1] == want[:-1]])
    return jnp.where(right, 9.0, 0.5)[:, None] * jax.nn.one_hot(want, 10)


@pytest.mark.parametrize("rule", [editing(), blind_editing()], ids=lambda r: r.name)
def test_editing_ends_at_the_fixed_point(rule):
    canvas, editable = [0, MASK, MASK, 7, 7, 7, MASK, 7], [False, True, True, True, True, True, True, False]
    seen = decode(rule, canvas, editable, spelling, 20, leave_one_out=spelling)
    check(seen, canvas, editable)
    assert seen[-1].canvas.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert seen[-2].canvas.tolist() == seen[-1].canvas.tolist()  # one pass has looked and changed nothing
    assert seen[-3].canvas.tolist() != seen[-1].canvas.tolist()


def test_editing_edits_a_full_block_at_most_sixteen_times():
    restless = lambda canvas: 9.0 * jax.nn.one_hot((canvas + 1) % 5, 10)
    canvas = [MASK] * 4
    seen = decode(editing(), canvas, [True] * 4, restless, 40)
    full = [i for i, step in enumerate(seen) if MASK not in step.canvas]
    assert len(seen) == full[0] + 1 + 16
    check(seen, canvas, [True] * 4)


def test_fixed_point_waits_as_long_as_it_is_told():
    v = view([0.9, 0.9], [False, False])
    v = v._replace(editable=jnp.array([True, True]))
    same, other = propose(v, v.canvas), propose(v, v.canvas.at[0].set(3))
    masked = propose(v, v.canvas.at[0].set(MASK))

    def run(stop, proposals):
        memory, done = stop.init(v.canvas, 10), []
        for proposal in proposals:
            over, memory = stop(v, proposal, memory)
            done.append(bool(over))
        return done

    assert run(stopping.fixed_point(), [other, same]) == [False, True]
    assert run(stopping.fixed_point(2), [same, other, same, same]) == [False, False, False, True]
    assert run(stopping.fixed_point(0), [masked, other]) == [False, True]
    assert run(stopping.fixed_point(1, limit=2), [masked, other]) == [False, True]


# -- self-correction


def test_self_correct_first_fills_then_takes_the_surest_disagreement():
    logits = jnp.log(jnp.asarray([[0.9, 0.1, 0, 0], [0.3, 0.7, 0, 0], [0.2, 0.2, 0.6, 0]]) + 1e-12)
    logits = jnp.pad(logits, ((0, 0), (0, 6)), constant_values=-1e30)
    v = believing([0, 1, 2], [0.9, 0.7, 0.6], [False] * 3, [1, 0, 0])._replace(
        logits=logits, draw_logits=logits
    )
    cold = self_correct(t=0.0)
    assert written(cold, v) == ([0, 0, 0], [0, 0, 0])  # at t = 0 every draw has probability 1: leftmost
    # At t = 0.5 their odds are squared: 0.988, 0.845, 0.818; all of them drawn as the argmax under this key.
    assert written(self_correct(t=0.5, count=2), v)[0] == [0, 1, 0]
    given = v._replace(editable=jnp.array([False, True, True]))
    # Colder, the order turns: 1 / (1 + (3/7)^10) is less than 1 / (1 + 2 (1/3)^10).
    assert written(self_correct(t=0.1), given)[0] == [1, 0, 2]
    open_ = v._replace(canvas=v.canvas.at[2].set(MASK), masked=jnp.array([False, False, True]))
    assert written(cold, open_)[0] == [1, 0, 2]  # a mask is open: nothing is corrected


def test_resample_draws_at_its_temperature():
    p = np.array([0.6, 0.3, 0.1])
    logits = jnp.tile(jnp.log(p), (3000, 1))
    tokens, chance = jax.jit(resample)(KEY, logits, jnp.asarray(0.5))
    want = p**2 / np.sum(p**2)
    np.testing.assert_allclose(chance, want[np.asarray(tokens)], rtol=1e-5)
    share = np.bincount(tokens, minlength=3) / 3000
    assert np.all(np.abs(share - want) < 4 * np.sqrt(want * (1 - want) / 3000))


def test_self_correct_ends_at_a_fixed_point():
    canvas, editable = [0, 7, MASK, 7, 7, 5, 7, 7], [False, True, True, True, True, True, True, False]
    sure = lambda canvas: 9.0 * jax.nn.one_hot(jnp.arange(8), 10)
    seen = decode(self_correct(), canvas, editable, sure, 30)
    check(seen, canvas, editable)
    assert seen[-1].canvas.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(seen) == 1 + 4 + 1  # the mask, one token a step, and a look


def test_self_correct_gives_up_when_nothing_gets_better():
    """Every token wants to be another one: the agreement never rises, so patience runs out."""
    restless = lambda canvas: 9.0 * jax.nn.one_hot((canvas + 1) % 5, 10)
    rule = self_correct()
    seen = decode(rule, [1, 2, 3, 4], [True] * 4, restless, 60, stop=stopping.stalled(6))
    # The first step sets the best (one token of four agrees with that pass); seven more do not beat it.
    assert len(seen) == 1 + 7
    assert rule.stopping().params == {"patience": 32}


def test_stalled_counts_only_full_canvases():
    seen = decode(self_correct(), [MASK] * 8, [True] * 8, table(3, 8, 0.1), 8, stop=stopping.stalled(0))
    assert len(seen) == 8  # one mask a step, and no end before the last of them
