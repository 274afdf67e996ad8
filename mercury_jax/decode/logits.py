"""logits(): one denoising pass over canvases that the caller lays out, with its logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.state import check_equal_lengths
from mercury_jax.decode.token_stats import write_at
from mercury_jax.types import LM, Model, Params, Pass


def logits(
    lm: LM,
    canvas: inputs.Ids | Sequence[inputs.Ids],
    prompt: inputs.Prompts | None = None,
    *,
    time: float | Sequence[float] | np.ndarray | None = None,
) -> Float[Array, "B L V"]:
    """Runs one denoising pass over a canvas and returns its logits.

    Args:
        lm: The model.
        canvas: Ids [L] or [B, L] (lists, or an array of numpy or JAX), including masks and noise.
        prompt: The tokens before the canvas: None, a text, a conversation or ids, the same for all rows; or a list of
            these (or a 2-D array of ids) with one per row, which may differ in length.
        time: Time of the canvas in [0, 1], one number or one per row, for models that take it. None: the share of masks
            in the canvas.

    `lm`, arrays of ids and times may be traced: the function can be called under `jit`, `vmap` and `grad`. The values
    of traced ids and times are not checked, nor are NaN logits.

    Returns:
        Logits [B, L, V] aligned with the canvas, at least fp32, of all ids. For an autoregressive model, entry i
        predicts the token after position i of the canvas from the tokens up to it.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit; or the logits are NaN.

    Example:
        >>> mask = lm.corruption.mask
        >>> mj.logits(lm, [mask] * 8, prompt="import ").argmax(-1)
        >>> jax.grad(lambda lm: mj.logits(lm, canvas)[0, 0, 7])(lm).params
    """
    inputs.check_lm(lm)
    ids = _ids(lm, canvas, "canvas")
    rows, length = ids.shape
    if isinstance(prompt, Tracer):
        traced = _ids(lm, prompt, "prompt")
        if len(traced) not in (1, rows):
            raise refuse("prompt", prompt, f"ids [P], or [{rows}, P]: one prompt for each row of canvas")
        sizes = np.full(rows, traced.shape[1])
    else:
        before = [[]] * rows if prompt is None else inputs.prompt_rows(lm, prompt, rows, row="row of canvas")
        sizes = np.array([len(prefix) for prefix in before])
    if sizes.max() + length > lm.model.config.context:
        allowed = f"with its prompt at most {lm.model.config.context} tokens, the context"
        raise refuse("canvas", ids.shape, allowed)
    if not lm.model.hides_padding:
        check_equal_lengths("prompts", sizes)
    prefixes: Any = np.zeros((rows, int(sizes.max()) + length), np.int32)
    if isinstance(prompt, Tracer):
        prefixes = jnp.asarray(prefixes).at[:, : int(sizes.max())].set(traced)
    else:
        for row, prefix in zip(prefixes, before, strict=True):
            row[: len(prefix)] = prefix
    # `known`: how many tokens of the prompt can be encoded to the KV cache. The rest, such as an incomplete block of a
    # block-diffusion model, is fed together with the canvas. [B]
    with jax.ensure_compile_time_eval():
        known = np.asarray(lm.model.encodable(jnp.asarray(sizes, jnp.int32)))
    widths = int(known.max()), int((sizes - known).max()) + length
    arrays = (prefixes, ids, sizes.astype(np.int32), known.astype(np.int32), _times(lm, ids, time))
    with inputs.explain_wrong_params(lm):
        out = _pass(lm.model, widths, length, lm.params, *arrays)
    if not isinstance(out, Tracer):
        inputs.refuse_nan(np.asarray(jnp.isnan(out).any(axis=(1, 2))), "the denoising pass")
    return out


def _ids(lm: LM, ids: Any, name: str) -> Any:
    """Checks ids and returns them as whole numbers [B, L]: a numpy array, or the traced array."""
    allowed = "whole numbers [L] or [B, L], rows of one length of 1 or more"
    try:
        rows = jnp.atleast_2d(ids) if isinstance(ids, Tracer) else np.atleast_2d(np.asarray(ids))
    except ValueError:  # rows of several lengths
        raise refuse(name, ids, allowed) from None
    if rows.ndim != 2 or rows.size == 0 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise refuse(name, f"{rows.dtype}{list(rows.shape)}", allowed)
    if not isinstance(ids, Tracer) and (rows.min() < 0 or rows.max() >= lm.model.config.vocab):
        raise refuse(name, (int(rows.min()), int(rows.max())), f"ids in 0..{lm.model.config.vocab - 1}")
    return rows


def _times(lm: LM, canvas: Any, time: Any) -> Float[Array, "B"] | None:
    """Returns the time of each row's canvas [B]; None for models that take no time."""
    if not lm.model.config.timed:
        if time is not None:
            raise refuse("time", time, "None: this model takes no time")
        return None
    if time is None:
        if lm.corruption.mask is None:
            raise refuse("time", None, "a number in 0..1: the noise of this model leaves no masks to count")
        time = (canvas == lm.corruption.mask).mean(axis=1)
    if isinstance(time, Tracer) and time.shape in ((), (len(canvas),)):
        return jnp.broadcast_to(jnp.asarray(time, jnp.float32), (len(canvas),))
    t = np.zeros(0) if isinstance(time, Tracer) else np.asarray(time)
    t = t.astype(np.float32) if t.dtype.kind in "iuf" else np.full((), np.nan, np.float32)
    if t.shape not in ((), (len(canvas),)) or not ((t >= 0) & (t <= 1)).all():
        raise refuse("time", time, f"a number in 0..1, or one for each of the {len(canvas)} rows")
    return jnp.broadcast_to(t, (len(canvas),))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pass(
    model: Model,
    widths: tuple[int, int],
    length: int,
    params: Params,
    prefixes: Int[Array, "B S"],
    canvas: Int[Array, "B L"],
    sizes: Int[Array, "B"],
    known: Int[Array, "B"],
    time: Float[Array, "B"] | None,
) -> Float[Array, "B L V"]:
    """Encodes the first `known` tokens of each row, and denoises its canvas of `length` tokens at position `sizes`.

    `widths` holds the number of tokens of the encoding and of the denoising pass that the longest row needs.
    """
    rows, size = prefixes.shape
    text = jax.vmap(write_at)(prefixes, canvas, sizes)
    places = lambda start, width: jnp.minimum(start[:, None] + jnp.arange(width), size - 1)
    cut = lambda start, width: jnp.take_along_axis(text, places(start, width), axis=1)
    cache, zero = model.empty_cache(rows, size), jnp.zeros((rows,), jnp.int32)
    if widths[0]:
        everyone = jnp.ones((rows,), bool)
        clean = None if time is None else jnp.zeros_like(time)
        given = Pass(
            cut(zero, widths[0]), cache, zero, known, known, everyone, time=clean, length=sizes + length
        )
        _, cache = model.forward(params, given)
    # Attention within the canvas is bidirectional, in an autoregressive model causal.
    causal, rest = jnp.full((rows,), model.config.autoregressive), sizes + length - known
    given = Pass(cut(known, widths[1]), cache, known, rest, sizes + length, causal, time=time)
    hidden, _ = model.forward(params, given)
    # The pass also held the prompt tokens that were not encoded: take the columns of the canvas. [B, L]
    at = (sizes - known)[:, None] + jnp.arange(length)
    return jnp.take_along_axis(model.head(params, hidden), at[..., None], axis=1)
