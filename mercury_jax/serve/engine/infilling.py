"""Requests with a suffix: holes between two texts, filled one after the other in a thread beside the slots.

A model that sees both sides of a hole takes hole and suffix as one canvas, whose width depends on the request, so it
does not fit into a slot. A model that cannot see behind a hole gets the text in FIM order (`fim_order`) and runs in the
slots like any other request.
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

MAX_HOLE = 64  # most tokens of a hole whose length the model chooses: each length is a row of a batch
SUFFIX_TOKENS = 256  # most tokens of the suffix that the canvas holds
STEPS = 16  # denoising steps where the request names none
# An editor waits for the answer: lengths double, and texts of any length share a few programs.
GRID = LengthSearch(quantum=256, growth=2.0, rows=8)


class RequestCancelled(Exception):
    """The client has left while its hole was filled."""


def sees_suffix(lm: LM) -> bool:
    """Whether a canvas of the model can attend to text behind a hole."""
    config = lm.model.config
    return config.pattern == "bidirectional" or (
        config.pattern == "causal_encoder" and not config.autoregressive
    )


def fim_order(lm: LM, request: EngineRequest) -> EngineRequest:
    """A request with a suffix as one without, in FIM order (arXiv 2207.14255), where the model needs that.

    Args:
        lm: The model.
        request: Any request.

    Returns:
        The request; unchanged if it has no suffix, or if the model sees text behind a hole.

    Raises:
        ValueError: If the tokenizer has no tokens for FIM order.
    """
    if request.suffix is None or sees_suffix(lm):
        return request
    marks, begin = lm.tokenizer.fim, tuple(lm.tokenizer.begin)
    if marks is None:
        allowed = f"none: {lm.name} has no tokens for FIM order"
        raise refuse("suffix", f"{len(request.suffix)} tokens", allowed)
    before = request.prompt[len(begin) :] if request.prompt[: len(begin)] == begin else request.prompt
    prompt = (*begin, marks.prefix, *before, marks.suffix, *request.suffix, marks.middle)
    return dataclasses.replace(request, prompt=prompt, suffix=None)


class InfillWorker:
    """A queue of requests with a suffix, and the thread that fills their holes.

    Args:
        lm: The model.
        rules: Rules that requests may choose.
        limit: Most requests that wait.
        publish: Called in the thread with each request and its last snapshot.
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
        """Compiles the programs of an open hole in the thread, as soon as no request waits."""
        self._cold = sees_suffix(self._lm)
        self._changed.set()

    def stop(self) -> None:
        """Ends after the hole that is being filled; requests that wait are cancelled."""
        self._stop = True
        self.queue.close()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for handle in self.queue.unfinished:
            self._publish(handle, early_end(handle, "cancelled"))

    def _serve(self) -> None:
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
        """The last snapshot of a request."""
        lm, request = self._lm, handle.request
        # With `frames` the hole has a fixed length, so that there is one canvas to show.
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
        except Exception:  # a request that fails must not end the thread
            log.exception("a hole could not be filled")
            return early_end(handle, "error", "the engine failed")
        tokens = np.asarray(out.fillings[0][0], np.int32)
        n, yes = len(tokens), np.ones(len(tokens), bool)
        # A hole of a fixed length is complete, and so is one that was filled with less than it may take.
        finish = "length" if hole.tokens is None and n >= hole.most else "stop"
        return Snapshot(tokens, yes, yes.astype(np.float32), ~yes, n, n, int(out.forwards[0]), 0, finish)

    def _after_pass(self, handle: RequestHandle, frames: Frame, prompt: int, size: int | None) -> None:
        """Publishes what a hole of a fixed size holds after a pass. frames: [1, B, ...] on the host.

        Raises:
            RequestCancelled: If the client has left, or the engine ends.
        """
        if handle.cancelled or self._stop:
            raise RequestCancelled
        if size is not None and frames.used[0, 0] > 0:
            before = handle.latest or EMPTY_SNAPSHOT
            skip = max(prompt - int(frames.start[0, 0]), 0)
            shown = (frames.answer, frames.accepted, frames.confidence)
            tokens, accepted, confidence = (np.asarray(x[0, 0, skip : skip + size]) for x in shown)
            forced = np.zeros(len(tokens), bool)
            handle.publish(Snapshot(tokens, accepted, confidence, forced, 0, 0, before.forwards + 1, 0))
