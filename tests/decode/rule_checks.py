"""What every rule of masked diffusion must keep, and how the reference implementations decoded the same logits."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.decode.views import KEY, MASK, view, view_of

WIDTH = 8  # of every canvas made by hand: each further shape compiles each operation again


@functools.cache
def goldens():
    """The arrays of goldens/rules.npz; its README says how they were made."""
    with np.load(Path(__file__).parent / "goldens" / "rules.npz") as file:
        return dict(file)


def small(p, masked=None, **more):
    """`view` of up to 8 positions, all masks unless told, padded with decided ones."""
    rest = WIDTH - len(p)
    masked = [True] * len(p) if masked is None else masked
    return view([*p, *[0.0] * rest], [*masked, *[False] * rest], **more)


def takes(rule, p, masked=None, memory=(), **more):
    """The canvas of the given positions after one step of a rule."""
    return rule(KEY, small(p, masked, **more), memory)[0].canvas.tolist()[: len(p)]


def check_settles(rule, steps):
    """Decode 5 masks in `steps` steps: all get decided, what is given or decided stays, no answer holds a mask."""
    editable = np.asarray([False, False, True, True, True, False, True, True, True, True, False])
    canvas = jnp.where(
        editable, MASK, jnp.asarray([3, 3, 0, 0, 0, 4, 0, 0, 0, 0, MASK])
    )  # the last: a later block's
    logits = jax.random.normal(jax.random.key(5), (canvas.shape[0], 10)) * 2.5
    logits = logits.at[:, MASK].set(20.0).at[~editable, 1].set(30.0)  # what tempts a rule that forgets
    memory = rule.init(canvas, 10)
    for step in range(steps):
        v = view_of(
            logits, canvas, editable & (canvas == MASK), jax.random.fold_in(KEY, step), rule.temperature
        )
        v = v._replace(editable=jnp.asarray(editable), step=jnp.asarray(step), steps=jnp.asarray(steps))
        v = v._replace(alpha_t=jnp.asarray(step / steps), alpha_s=jnp.asarray((step + 1) / steps))
        proposal, memory = rule(jax.random.fold_in(KEY, 100 + step), v, memory)
        fixed, after, answer = ~np.asarray(v.masked), np.asarray(proposal.canvas), np.asarray(proposal.answer)
        assert (after == canvas)[fixed].all() and (answer == canvas)[fixed].all()
        assert MASK not in answer[editable]
        canvas = proposal.canvas
    assert MASK not in np.asarray(canvas)[editable]


def check_traces(rule):
    """The machine may vmap it with a parameter per row, and carry its memory through a loop. Nothing is compiled."""
    rows, canvas = 3, jnp.full(WIDTH, MASK)
    wide = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *jnp.shape(x)), jnp.asarray(x).dtype), tree
    )
    memory = wide(rule.init(canvas, 10))
    run = lambda key, v, memory, params: dataclasses.replace(rule, params=params)(key, v, memory)
    proposal, after = jax.eval_shape(jax.vmap(run), wide(KEY), wide(small([0.5])), memory, wide(rule.params))
    assert proposal.canvas.shape == proposal.answer.shape == (rows, WIDTH)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(after) == shapes(memory)


def follow(rule, logits, theirs, steps):
    """Yields (our next canvas, the reference's, its canvas before) for each step of one of its decodings.

    Our rule starts each step from the reference's canvas. Given tokens stand in front, so that no
    index of a rule may count from the block's first position.
    """
    mask, lead = logits.shape[-1] - 1, 18 - theirs.shape[1]
    front = np.full((lead, mask + 1), -5.0, np.float32)
    front[:, 0] = 5.0
    place = lambda tokens: jnp.asarray([1] * lead + tokens.tolist(), jnp.int32)
    editable = jnp.arange(18) >= lead
    memory = rule.init(place(theirs[0]), mask + 1)
    for step in range(steps):
        canvas = place(theirs[step])
        if not (theirs[step] == mask).any():
            return
        v = view_of(
            np.concatenate([front, logits[step].astype(np.float32)]), canvas, canvas == mask, mask=mask
        )
        v = v._replace(editable=editable, step=jnp.asarray(step), steps=jnp.asarray(steps))
        proposal, memory = rule(KEY, v, memory)
        ours = proposal.canvas.tolist()
        assert ours[:lead] == [1] * lead
        yield ours[lead:], theirs[step + 1].tolist(), theirs[step].tolist()


def check_follows(rule, name, steps):
    """Every step of every one of the reference's decodings is ours too."""
    kept = goldens()
    for logits, theirs in zip(kept["logits"], kept[name], strict=True):
        taken = list(follow(rule, logits, theirs, steps))
        assert taken
        for step, (ours, reference, _) in enumerate(taken):
            assert ours == reference, f"step {step}"
