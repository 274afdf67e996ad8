"""Checks of arguments that the public calls share: the model, the plan, the mesh, a session.

Each call runs them first, so that a wrong argument is named before anything is encoded or compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.types import LM, PackedPass, Params


def check_lm(lm: Any) -> None:
    """Raises ValueError unless `lm` is an LM that holds parameters."""
    if not isinstance(lm, LM):
        raise refuse("lm", lm, "a model as mj.load() returns it")
    # An empty dict is fine: a Model is a record of functions, which need not have parameters.
    leaves = jax.tree.leaves(lm.params)
    if lm.params is None or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise refuse("lm.params", lm.params, "the parameters of lm.model, a nested dict of arrays")


@contextlib.contextmanager
def naming_wrong_params(lm: LM) -> Iterator[None]:
    """Around a compiled pass: where tracing fails because the parameters are not the model's, says so.

    The check traces a pass of its own, which takes as long as the model's tracing, so it only runs after a failure.
    """
    try:
        yield
    except Exception as error:
        if (
            type(error) is not ValueError
        ):  # one of ours; the layers of a model raise subclasses and other kinds
            _check_params(lm)
        raise


def _check_params(lm: LM) -> None:
    def one_pass(params: Params) -> Any:
        at = jnp.zeros((1, 1), jnp.int32)
        time = jnp.zeros((1,)) if lm.model.config.timed else None
        hidden = lm.model.apply(params, PackedPass(at, at, jnp.zeros((1, 1, 2, 2), jnp.int32), time=time))
        return lm.model.head(params, hidden)

    try:
        jax.eval_shape(one_pass, lm.params)
    except Exception as error:  # whatever the architecture raises for parameters that are not its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        count = len(jax.tree.leaves(lm.params))
        raise refuse("lm.params", f"{count} arrays", f"the parameters of lm.model ({reason})") from error


def checked_plan(plan: Any) -> Plan:
    """The plan; None stands for the default one."""
    if plan is None:
        return Plan()
    if not isinstance(plan, Plan):
        raise refuse("plan", plan, "a Plan, such as mj.Plan(block=32, steps=16), or None")
    return plan


def checked_mesh(mesh: Any) -> Mesh | None:
    """The mesh with axes that the compiler shards (`AxisType.Auto`), whatever kind the user's are."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise refuse("mesh", mesh, "a jax Mesh, such as mj.mesh(data=4), or None")
    if "data" not in mesh.shape:
        raise refuse("mesh", f"axes {', '.join(mesh.axis_names)}", "a mesh with an axis named data")
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
