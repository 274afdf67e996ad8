"""Decoding: one state machine under sample(), stream(), infill() and score().

What these return can be drawn, in notebooks and by `Output.plot` and `Output.save`. Decoding draws nothing itself: it
calls the functions of a `Pictures`, which `mercury_jax/__init__.py` takes from `mercury_jax.viz`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


class Pictures(NamedTuple):
    """The functions that draw what decoding returns."""

    output: Callable[[Any], str]  # HTML of an `Output`
    stream: Callable[[Any], str]  # HTML of a `StreamOutput`
    frame: Callable[[Any], str]  # HTML of a `Frame`
    plot: Callable[[Any, int], Figure]  # `Output.plot`
    save: Callable[[Any, str | Path, int, str, bool], Path]  # `Output.save`


pictures: Callable[[], Pictures]  # set by `mercury_jax/__init__.py`; imports what draws when it is called
