"""Shapers by id: a bias on some ids, and ids that are never emitted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Knob, Part, shaper
from mercury_jax.decode.read import NEVER
from mercury_jax.decode.shape.scale import Logits, hold
from mercury_jax.decode.shape.tables import listed, packed, tables, targets, whole
from mercury_jax.types import View


def bias(table: Any) -> Part:
    """Add a number to the logits of some ids: {id: value} for all rows, or a list of these, one a row.

    A row of a list may be None or {}. OpenAI's logit_bias, without its limits of -100 and 100.
    """
    rows, alone = tables("logit_bias", table)
    for row in rows:
        for id, value in row.items():
            whole("logit_bias id", id)
            _finite(f"logit_bias[{id}]", value)
    ids = packed([list(row) for row in rows], np.int32, alone)
    values = packed([list(row.values()) for row in rows], np.float32, alone)
    return dataclasses.replace(_bias(ids=ids, values=values), name="bias")


def ban(ids: Any) -> Part:
    """Ids that are never emitted: a list for all rows, or a list of such lists (or None), one a row."""
    wanted = "a list of ids, or a list with such a list or None for each row"
    if not listed(ids):
        raise refuse("ban", ids, wanted)
    alone = not any(x is None or listed(x) for x in ids)
    rows = [ids] if alone else [() if x is None else x for x in ids]
    for row in rows:
        if not listed(row):
            raise refuse("ban", row, wanted)
    checked = [[whole("ban id", x) for x in row] for row in rows]
    return dataclasses.replace(_ban(ids=packed(checked, np.int32, alone)), name="ban")


@shaper(whole=False)
def _bias(logits: Logits, view: View, *, ids: Knob, values: Knob) -> Logits:
    ids = targets(ids, view.first, logits.shape[-1])
    return hold(logits, logits.at[:, ids].add(jnp.asarray(values, logits.dtype), mode="drop"))


@shaper(whole=False)
def _ban(logits: Logits, view: View, *, ids: Knob) -> Logits:
    return logits.at[:, targets(ids, view.first, logits.shape[-1])].set(NEVER, mode="drop")


def _finite(name: str, value: Any) -> None:
    """A number that float32 holds."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not abs(value) <= np.finfo(np.float32).max:
        raise refuse(name, value, "a finite number")
