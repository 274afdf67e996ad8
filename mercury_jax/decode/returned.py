"""Calls rules, shapers and stops and checks what they return, while a step is traced: a running program has none of it.

A part written by a user runs inside of a compiled loop, where a Python `if` or a wrong return would end in an error
about tracers or about the loop's carry, or would be cast without a word. Used by `row`, `sight` and `state`;
`check_sampler` traces one row's step before a program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Memory, Part, shown
from mercury_jax.types import Proposal, View

# What JAX raises where a function needs the value of an array that is only traced, and what to write instead.
TRACED = (
    (jax.errors.TracerBoolConversionError, "decides by a traced value in Python (if, while, and, or, not)",
     "jnp.where(condition, a, b), jax.lax.cond, or & | ~"),
    (jax.errors.TracerIntegerConversionError, "uses a traced value as a Python int (range, a shape, a list's index)",
     "arrays of fixed shapes, with jnp.where or a comparison in place of the number"),
    (jax.errors.TracerArrayConversionError, "gives a traced value to numpy", "the same function of jax.numpy"),
    (jax.errors.NonConcreteBooleanIndexError, "selects by a traced mask, which gives an unknown shape",
     "jnp.where(mask, a, b)"),
    (jax.errors.ConcretizationTypeError, "needs the number behind a traced value",
     "jax.numpy functions of fixed shapes, jnp.where, jax.lax.cond"),
)  # fmt: skip


def called(part: Part, function: Callable[..., Any], *args: Any, doing: str = "") -> Any:
    """What a function of a part returns; its errors of tracing and of shapes are said in words that name the part.

    Args:
        part: For the message.
        function: The part itself, or its `init`.
        *args: Arrays of one row, traced.
        doing: Which function of the part it is, for the message.

    Raises:
        ValueError: With the error as its cause. Errors of other kinds, such as a NameError, pass as they are.
    """
    name = f"{doing}the {part.kind} {part.name}"
    try:
        return function(*args)
    except (TypeError, ValueError, IndexError) as error:
        for kind, does, allowed in TRACED:
            if isinstance(error, kind):
                raise ValueError(f"{name} {does}; allowed: {allowed}") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{name} fails: {lines[0]}") from error


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
            f"what {name} returned", shown(returned), "(Proposal, memory); mj.settle makes a Proposal"
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
            raise refuse(f"{field} of the Proposal of {name}", shown(value), allowed)
    return proposal, _same(f"memory of {name}", fresh, memory)


def done_of(stop: Part, returned: Any, memory: Memory) -> tuple[jax.Array, Memory]:
    """(whether the block is done, memory) as a stop returned them; ValueError as `proposal_of`."""
    name = f"the stop {stop.name}"
    if type(returned) is not tuple or len(returned) != 2:
        raise refuse(f"what {name} returned", shown(returned), "(done, memory)")
    done, fresh = returned
    done = jnp.asarray(done) if isinstance(done, bool) else done
    if getattr(done, "shape", None) != () or getattr(done, "dtype", None) != jnp.bool_:
        raise refuse(f"done of {name}", shown(done), "one bool")
    return done, _same(f"memory of {name}", fresh, memory)


def logits_of(shaper: Part, returned: Any, logits: jax.Array) -> jax.Array:
    """The logits as a shaper returned them; ValueError as `proposal_of`."""
    kind = getattr(returned, "dtype", None)
    # A wider dtype is fine; in a narrower one the logit of what is forbidden would be infinite.
    wide = kind is not None and jnp.promote_types(kind, logits.dtype) == kind
    if getattr(returned, "shape", None) != logits.shape or not wide:
        allowed = f"logits {logits.dtype}{list(logits.shape)}"
        raise refuse(f"what the shaper {shaper.name} returned", shown(returned), allowed)
    return returned


def _same(name: str, fresh: Any, old: Any) -> Any:
    """The memory, if its leaves have the structure, shapes and dtypes that `init` gave them."""
    kinds = lambda tree: [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(fresh) != jax.tree.structure(old) or kinds(fresh) != kinds(old):
        raise refuse(name, shown(fresh), f"{shown(old)}, as init made it")
    return fresh
