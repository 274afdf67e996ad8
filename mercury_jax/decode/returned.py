"""Checks of what rules, shapers and stops return, made while a step is traced: they cost nothing in a running program.

A part written by a user is called for the first time inside of a compiled loop, where a wrong return would end in an
error about the loop's carry, or would be cast without a word. Used by `row` and `sight`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Memory, Part
from mercury_jax.types import Proposal, View


def proposal_of(rule: Part, returned: Any, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """(proposal, memory) as a rule returned them.

    Args:
        rule: For the message.
        returned: What the call of the rule gave.
        view: What the rule saw; a proposal has its length L.
        memory: What the rule was given; the new one must have the same leaves.

    Raises:
        ValueError: Naming the rule and the field that is wrong.
    """
    name = f"the rule {rule.name}"
    if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[0], Proposal):
        raise refuse(
            f"what {name} returned", _shown(returned), "(Proposal, memory); mj.settle makes a Proposal"
        )
    proposal, fresh = returned
    length = view.canvas.shape[0]
    shapes = {"canvas": (length,), "answer": (length,), "n": (), "source": (length,)}
    for field, shape in shapes.items():
        value = getattr(proposal, field)
        found, kind = getattr(value, "shape", None), getattr(value, "dtype", None)
        if kind is None and isinstance(value, int) and shape == ():
            continue
        if found != shape or kind is None or not jnp.issubdtype(kind, jnp.integer):
            allowed = f"whole numbers {list(shape)}, such as int32"
            raise refuse(f"{field} of the Proposal of {name}", _shown(value), allowed)
    return proposal, _same(f"memory of {name}", fresh, memory)


def done_of(stop: Part, returned: Any, memory: Memory) -> tuple[jax.Array, Memory]:
    """(whether the block is done, memory) as a stop returned them; ValueError as `proposal_of`."""
    name = f"the stop {stop.name}"
    if type(returned) is not tuple or len(returned) != 2:
        raise refuse(f"what {name} returned", _shown(returned), "(done, memory)")
    done, fresh = returned
    done = jnp.asarray(done) if isinstance(done, bool) else done
    if getattr(done, "shape", None) != () or getattr(done, "dtype", None) != jnp.bool_:
        raise refuse(f"done of {name}", _shown(done), "one bool")
    return done, _same(f"memory of {name}", fresh, memory)


def logits_of(shaper: Part, returned: Any, logits: jax.Array) -> jax.Array:
    """The logits as a shaper returned them; ValueError as `proposal_of`."""
    kind = getattr(returned, "dtype", None)
    floats = kind is not None and jnp.issubdtype(kind, jnp.floating)
    if getattr(returned, "shape", None) != logits.shape or not floats:
        allowed = f"logits {list(logits.shape)} of the dtype {logits.dtype}"
        raise refuse(f"what the shaper {shaper.name} returned", _shown(returned), allowed)
    return returned


def _same(name: str, fresh: Any, old: Any) -> Any:
    """The memory, if its leaves have the structure, shapes and dtypes that `init` gave them."""
    kinds = lambda tree: [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(fresh) != jax.tree.structure(old) or kinds(fresh) != kinds(old):
        raise refuse(name, _shown(fresh), f"{_shown(old)}, as init made it")
    return fresh


def _shown(value: Any) -> str:
    """A value by the shapes and dtypes of its arrays: their numbers are not known while tracing."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(_shown(x) for x in value)
        return f"{type(value).__name__}({inner})" if hasattr(value, "_fields") else f"({inner})"
    return repr(value)
