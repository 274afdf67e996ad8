"""Rules run to their end on one row, by a model that is a plain function of the canvas."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.decode import stopping
from mercury_jax.decode.token_stats import forbid, token_stats
from tests.decode.views import MASK, view_of


class Step(NamedTuple):
    canvas: np.ndarray
    answer: np.ndarray
    editable: np.ndarray
    used: int
    source: np.ndarray


# Compiled once for each rule and shape: the parameters are arguments.
act = jax.jit(lambda key, rule, view, memory=(): rule(key, view, memory))


def decode(
    rule,
    canvas,
    editable,
    model,
    steps,
    *,
    leave_one_out=None,
    used=None,
    growth=0,
    eos=-1,
    stop=None,
    alpha=lambda t: 1 - t,
    key=0,
    temperature=None,
):
    """Every step of a block, until the stop says so or the steps are used up.

    model, leave_one_out: canvas [L] -> logits [L, V]. Given tokens move along where the rule moves them.
    """
    stop = stop or (rule.stopping or stopping.filled)()
    warmth = rule.temperature if temperature is None else temperature
    size = len(canvas)

    @jax.jit
    def one(key, canvas, editable, used, growth, step, memory):
        draw, do = jax.random.split(jax.random.fold_in(key, step))
        t, s = 1 - step / steps, 1 - (step + 1) / steps
        view = view_of(
            model(canvas),
            canvas,
            editable & (canvas == MASK),
            draw,
            warmth,
            eos=eos,
            editable=editable,
            used=used,
            growth=growth,
            step=step,
            steps=jnp.asarray(steps),
            t=t,
            s=s,
            alpha_t=alpha(t),
            alpha_s=alpha(s),
        )
        view = view._replace(eos=jnp.asarray(eos))
        if leave_one_out is not None:
            logits = forbid(jnp.asarray(leave_one_out(canvas), jnp.float32), (MASK,))
            view = view._replace(
                leave_one_out=token_stats(logits, canvas, logits.argmax(-1), jnp.asarray(eos))
            )
        proposal, mine = rule(do, view, memory[0])
        done, its = stop(view, proposal, memory[1])
        old = proposal.source
        editable = jnp.where(old >= 0, editable[jnp.maximum(old, 0)], True) & (
            jnp.arange(size) < proposal.used
        )
        return proposal, editable, done, (mine, its)

    state = jnp.asarray(canvas, jnp.int32), jnp.asarray(editable), jnp.asarray(size if used is None else used)
    memory, seen = (rule.init(state[0], 10), stop.init(state[0], 10)), []
    for step in range(steps):
        left = jnp.asarray(growth) - (state[2] - (size if used is None else used))
        proposal, editable, done, memory = one(jax.random.key(key), *state, left, jnp.asarray(step), memory)
        state = proposal.canvas, editable, proposal.used
        seen.append(
            Step(
                *(np.asarray(x) for x in (*proposal[:2], editable)),
                int(proposal.used),
                np.asarray(proposal.source),
            )
        )
        if done:
            break
    return seen


def check(seen, canvas, editable, answers=True):
    """The laws of every run: given tokens keep their token and order, answers never hold the mask."""
    given = [int(c) for c, e in zip(canvas, editable) if not e]
    for step in seen:
        held = ~step.editable[: step.used]
        assert step.canvas[: step.used][held].tolist() == given
        assert step.answer[: step.used][held].tolist() == given
        assert not answers or MASK not in step.answer[: step.used]


def table(seed, size=8, scale=1.0):
    """Logits that do not depend on the canvas; the compiler must not know, it would fold them for seconds."""
    logits = scale * np.random.default_rng(seed).normal(size=(size, 10)).astype(np.float32)
    return lambda canvas: logits + 0.0 * canvas[:, None]
