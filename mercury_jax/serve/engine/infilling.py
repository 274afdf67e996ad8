"""Infilling: requests with a suffix, whose answer fills the hole between prompt and suffix.

A model that attends to both sides of a hole takes hole and suffix as one canvas. The width of that canvas depends on
the request, so it does not fit into a slot: a `SideWorker` fills these holes, one request at a time. For a model that
cannot attend to the suffix, the text is rearranged into FIM order (`fim_order`), and the request runs in a slot
like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.infill import Hole, LengthSearch, Pieces, fill
from mercury_jax.decode.request import Request
from mercury_jax.decode.state import Frame
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.sampling_params import RuleSet, build_sampler, sampler_level
from mercury_jax.serve.engine.side_worker import RequestCancelled
from mercury_jax.types import LM

MAX_HOLE = 64  # maximum tokens of a hole of open length; each candidate length is a row of a batch
SUFFIX_TOKENS = 256  # maximum tokens of the suffix in the canvas; the rest of the suffix is ignored
STEPS = 16  # denoising steps if the request sets none
# Code completion needs low latency: candidate lengths double, and texts of all lengths share a few compiled programs.
GRID = LengthSearch(quantum=256, growth=2.0, rows=8)
EXAMPLE_HOLE = EngineRequest(prompt=(0,), suffix=(0,), max_tokens=MAX_HOLE, steps=1)  # compiles its programs


def sees_suffix(lm: LM) -> bool:
    """Says whether the canvas of a model can attend to the text after a hole."""
    config = lm.model.config
    return config.pattern == "bidirectional" or (
        config.pattern == "causal_encoder" and not config.autoregressive
    )


def fim_order(lm: LM, request: EngineRequest) -> EngineRequest:
    """Rearranges a request with a suffix into FIM order (arXiv 2207.14255), if the model needs it.

    The prompt becomes prefix mark, prompt, suffix mark, suffix, middle mark; the model continues it with the middle.

    Returns:
        A request without a suffix. The request itself if it has no suffix, or if the model attends to text after a
        hole.
    """
    if request.suffix is None or sees_suffix(lm):
        return request
    marks, begin = lm.tokenizer.fim, tuple(lm.tokenizer.begin)
    if marks is None:
        allowed = f"none: {lm.name} has no tokens for FIM order"
        raise refuse("suffix", f"{len(request.suffix)} tokens", allowed)
    # Tokens that begin a text stay at the very front, before the prefix mark.
    before = request.prompt[len(begin) :] if request.prompt[: len(begin)] == begin else request.prompt
    prompt = (*begin, marks.prefix, *before, marks.suffix, *request.suffix, marks.middle)
    return dataclasses.replace(request, prompt=prompt, suffix=None)


def fill_hole(lm: LM, rules: RuleSet, handle: RequestHandle, stopping: Callable[[], bool]) -> Snapshot:
    """Fills the hole of a request. Implements `side_worker.Decode`."""
    request = handle.request
    # Normally the model chooses the length of the hole among several candidates, which decode as rows of a batch.
    # With `frames` the length is fixed to `max_tokens`, so that there is one canvas to show.
    open_hole = Hole(most=min(request.max_tokens, MAX_HOLE))
    hole = Hole(request.max_tokens) if request.frames else open_hole
    row: Pieces = [list(request.prompt), hole, list((request.suffix or ())[:SUFFIX_TOKENS])]

    def after_pass(frames: Frame) -> None:
        if handle.cancelled or stopping():
            raise RequestCancelled
        publish_hole(handle, frames, hole.tokens)

    out = fill(
        lm,
        [row],
        Request(
            sampler=build_sampler(rules, request, sampler_level(request)),
            seed=request.seed,
            plan=Plan(steps=request.steps or STEPS),
        ),
        on_frame=after_pass,
        search=GRID,
    )
    tokens = np.asarray(out.fillings[0][0], np.int32)
    n, yes = len(tokens), np.ones(len(tokens), bool)
    # "length" only if an open hole was filled to its maximum: then the model may have wanted more tokens.
    finish = "length" if hole.tokens is None and n >= hole.most else "stop"
    return Snapshot(tokens, yes, yes.astype(np.float32), ~yes, n, n, int(out.forwards[0]), 0, finish)


def publish_hole(handle: RequestHandle, frames: Frame, size: int | None) -> None:
    """Publishes the content of a hole of fixed size after a denoising pass."""
    if size is None or not frames.used[0, 0] > 0:
        return
    before = handle.latest or EMPTY_SNAPSHOT
    # The canvas may begin before the hole: skip the tokens of the prompt.
    skip = max(len(handle.request.prompt) - int(frames.start[0, 0]), 0)
    shown = (frames.answer, frames.accepted, frames.confidence)
    tokens, accepted, confidence = (np.asarray(x[0, 0, skip : skip + size]) for x in shown)
    forced = np.zeros(len(tokens), bool)
    handle.publish(Snapshot(tokens, accepted, confidence, forced, 0, 0, before.forwards + 1, 0))
