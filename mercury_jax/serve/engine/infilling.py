"""Infilling: requests with a suffix, whose answer fills the hole between prompt and suffix.

A model that attends to both sides of a hole takes hole and suffix as one canvas. The width of that canvas depends on
the request, so it does not fit into a slot: a separate thread fills these holes, one request at a time. For a model
that cannot attend to the suffix, the text is rearranged into FIM order (`fim_order`), and the request runs in a slot
like any other.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.infill import Hole, LengthSearch, Pieces, fill
from mercury_jax.decode.request import Request
from mercury_jax.decode.state import Frame
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.sampling_params import RuleSet, build_sampler, sampler_level
from mercury_jax.serve.engine.scheduler import RequestQueue
from mercury_jax.serve.engine.snapshots import early_end
from mercury_jax.types import LM

log = logging.getLogger(__name__)

MAX_HOLE = 64  # maximum tokens of a hole of open length; each candidate length is a row of a batch
SUFFIX_TOKENS = 256  # maximum tokens of the suffix in the canvas; the rest of the suffix is ignored
STEPS = 16  # denoising steps if the request sets none
# Code completion needs low latency: candidate lengths double, and texts of all lengths share a few compiled programs.
GRID = LengthSearch(quantum=256, growth=2.0, rows=8)


class RequestCancelled(Exception):
    """The request was cancelled, or the engine stopped, while the hole was being filled."""


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


class InfillWorker:
    """A queue of requests with a suffix, and the thread that fills their holes.

    Attributes:
        queue: The waiting requests, and the one that is being filled.
    """

    def __init__(
        self, lm: LM, rules: RuleSet, limit: int, publish: Callable[[RequestHandle, Snapshot], None]
    ):
        self._lm, self._rules, self._publish = lm, rules, publish
        self._changed = threading.Event()
        self.queue = RequestQueue(limit, 1, self._changed.set)
        self._stop, self._cold = False, False
        self._thread = threading.Thread(target=self._serve, name="mercury-infill", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def warm_up(self) -> None:
        """Makes the thread compile the programs of a hole of open length as soon as no request waits."""
        self._cold = sees_suffix(self._lm)
        self._changed.set()

    def stop(self) -> None:
        """Cancels all requests and ends the thread after the current denoising pass."""
        self._stop = True
        self.queue.close()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for handle in self.queue.unfinished:
            self._publish(handle, early_end(handle, "cancelled"))

    def _serve(self) -> None:
        """Runs the thread: fills holes in scheduling order, warms up once, and waits."""
        while not self._stop:
            handle = self.queue.take()
            if handle is not None:
                self._publish(handle, self._fill(handle))
            elif self._cold:
                self._cold = False
                eos = self._lm.model.config.eos
                example = EngineRequest(prompt=(eos,), suffix=(0,), max_tokens=MAX_HOLE, steps=1)
                self._fill(RequestHandle(example, self._changed.set))
            else:
                self._changed.wait()
                self._changed.clear()

    def _fill(self, handle: RequestHandle) -> Snapshot:
        """Fills the hole of a request; returns its last snapshot, also for an error or a cancellation."""
        lm, request = self._lm, handle.request
        # Normally the model chooses the length of the hole among several candidates, which decode as rows of a batch.
        # With `frames` the length is fixed to `max_tokens`, so that there is one canvas to show.
        open_hole = Hole(most=min(request.max_tokens, MAX_HOLE))
        hole = Hole(request.max_tokens) if request.frames else open_hole
        row: Pieces = [list(request.prompt), hole, list((request.suffix or ())[:SUFFIX_TOKENS])]
        try:
            sampler = build_sampler(self._rules, request, sampler_level(request))
            out = fill(
                lm,
                [row],
                Request(sampler=sampler, seed=request.seed, plan=Plan(steps=request.steps or STEPS)),
                on_frame=lambda frames: self._after_pass(handle, frames, len(request.prompt), hole.tokens),
                search=GRID,
            )
        except RequestCancelled:
            return early_end(handle, "cancelled")
        except ValueError as error:
            return early_end(handle, "error", str(error))
        except Exception:  # a failing request must not end the thread
            log.exception("a hole could not be filled")
            return early_end(handle, "error", "the engine failed")
        tokens = np.asarray(out.fillings[0][0], np.int32)
        n, yes = len(tokens), np.ones(len(tokens), bool)
        # "length" only if an open hole was filled to its maximum: then the model may have wanted more tokens.
        finish = "length" if hole.tokens is None and n >= hole.most else "stop"
        return Snapshot(tokens, yes, yes.astype(np.float32), ~yes, n, n, int(out.forwards[0]), 0, finish)

    def _after_pass(self, handle: RequestHandle, frames: Frame, prompt: int, size: int | None) -> None:
        """Publishes the content of a hole of fixed size after a denoising pass."""
        if handle.cancelled or self._stop:
            raise RequestCancelled
        if size is not None and frames.used[0, 0] > 0:
            before = handle.latest or EMPTY_SNAPSHOT
            # The canvas may begin before the hole: skip the tokens of the prompt.
            skip = max(prompt - int(frames.start[0, 0]), 0)
            shown = (frames.answer, frames.accepted, frames.confidence)
            tokens, accepted, confidence = (np.asarray(x[0, 0, skip : skip + size]) for x in shown)
            forced = np.zeros(len(tokens), bool)
            handle.publish(Snapshot(tokens, accepted, confidence, forced, 0, 0, before.forwards + 1, 0))
