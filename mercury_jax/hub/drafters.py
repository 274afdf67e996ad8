"""Saves and loads block drafters in our own layout: a folder with the drafter alone, which names its target's sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mercury_jax import checkpoint
from mercury_jax.config import DrafterConfig, from_dict, refuse, to_dict
from mercury_jax.models import drafter as drafters
from mercury_jax.types import LM, BlockDrafter, DraftMethod, LookupDrafter, Params

LOOKUP = "lookup"
SMOLLM2_DRAFTER = Path(__file__).parents[1] / "assets" / "smollm2-drafter"  # of the package, by its name


def drafter_of(config: DrafterConfig, lm: LM, params: Params, name: str) -> BlockDrafter:
    """Makes a block drafter from its parameters.

    Args:
        config: Sizes of the drafter.
        lm: Its target; the parameters are not read.
        params: Parameters of the drafter.
        name: Name of the drafter.

    Returns:
        The drafter.
    """
    target = {key: getattr(lm.model.config, key) for key in ("vocab", "width", "layers")}
    target["tokenizer"] = lm.tokenizer.fingerprint
    return BlockDrafter(config, target, params, functools.partial(drafters.join, config), name)


def save_drafter(
    folder: str | Path,
    drafter: BlockDrafter,
    *,
    dtype: DTypeLike | None = jnp.bfloat16,
    card: Mapping[str, Any] | None = None,
    overwrite: bool = True,
) -> Path:
    """Writes a block drafter to a folder, which `load_drafter` reads.

    Args:
        folder: The folder to write.
        drafter: The drafter.
        dtype: Dtype of the stored parameters; None: unchanged.
        card: Metadata of the training, JSON-ready.
        overwrite: Replace an earlier drafter in that folder.

    Returns:
        The folder.
    """
    about = {
        "name": drafter.name, "architecture": "drafter", "drafter": to_dict(drafter.config),
        "target": dict(drafter.target), "card": dict(card or {}),
    }  # fmt: skip
    return checkpoint.export(folder, drafter.params, about, dtype, overwrite=overwrite)


def load_drafter(folder: str | Path, *, method: DraftMethod = "same_seed") -> BlockDrafter | LookupDrafter:
    """Loads a block drafter, the argument `draft=` of `mj.sample`.

    Args:
        folder: A folder that `mercury train` wrote with a recipe that has a `drafter`; "smollm2-drafter", the one in
            the package, for `mj.load("smollm2")`; or "lookup", which drafts what followed the last tokens earlier in
            the text, for any autoregressive model.
        method: How drafts are accepted at a temperature above 0; see `mj.Draft.method`. "lookup" has only
            "same_seed".

    Returns:
        The drafter.

    Raises:
        ValueError: The folder holds another kind of model, or "lookup" cannot do the method, or there is no such
            folder.
        CheckpointError: A file is missing or damaged.

    Example:
        >>> drafter = mj.load_drafter("runs/drafter_smollm2/drafter")
        >>> mj.sample(lm, prompts, draft=drafter).draft.acceptance
    """
    path = Path(folder)
    if folder == LOOKUP and not path.exists():
        if method != "same_seed":
            raise refuse("method", method, "same_seed, for lookup: its drafts have no probabilities")
        return LookupDrafter()
    if folder == SMOLLM2_DRAFTER.name and not path.exists():
        path = SMOLLM2_DRAFTER
    if not path.is_dir():
        allowed = f"a folder that mercury train wrote, {SMOLLM2_DRAFTER.name} or {LOOKUP}"
        raise refuse("drafter", str(folder), allowed)
    opened = checkpoint.load_exported(path, np.float32)
    about = opened.config
    if "drafter" not in about:
        raise refuse("folder", str(folder), "a folder with a block drafter; mj.load reads other models")
    config = from_dict(DrafterConfig, about["drafter"])
    params = jax.tree.map(jnp.asarray, opened.params)
    join = functools.partial(drafters.join, config)
    return BlockDrafter(config, about["target"], params, join, about["name"], method)
