"""The engine: continuous batching of requests over one model.

One thread repeats the same step: free the slots of cancelled requests, admit waiting requests, dispatch the next
denoising passes to the device, and publish the results of earlier passes. The device runs one dispatch ahead of the
host. The exception is a batch with a grammar-constrained row that does not write free text: the host must read each
pass of that row before the next one.

    submit -> RequestQueue -> prefix cache, prefill -> Slots -> Snapshots -> RequestHandle
                \\-> SideWorker (requests with a suffix or a prediction) --------/
    decide -> DecisionWorker (typed questions) -> Future
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode import image_prompts
from mercury_jax.decode.constrained import ConstrainedRow
from mercury_jax.decode.decide import Asked, DecideOutput, Settings
from mercury_jax.decode.image_prefill import encode_images_program
from mercury_jax.decode.state import State
from mercury_jax.images import Image
from mercury_jax.models import cache
from mercury_jax.serve.engine import predicting, programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import PREFILL_WIDTH, CompiledPrograms, make_buckets
from mercury_jax.serve.engine.deciding import DecisionWorker
from mercury_jax.serve.engine.infilling import EXAMPLE_HOLE, SUFFIX_TOKENS, fill_hole, fim_order, sees_suffix
from mercury_jax.serve.engine.memory import check_memory
from mercury_jax.serve.engine.prefix_cache import PrefixCache
from mercury_jax.serve.engine.request import (
    ContextLengthExceeded,
    EngineConfig,
    EngineRequest,
    EngineStats,
    RequestHandle,
    RequestRejected,
    Snapshot,
)
from mercury_jax.serve.engine.scheduler import ReadDispatch, RequestQueue, Slots, may_run
from mercury_jax.serve.engine.side_worker import SideWorker
from mercury_jax.serve.engine.snapshots import RunningRequest, early_end, final_snapshot, pass_snapshots
from mercury_jax.types import LM

log = logging.getLogger(__name__)

PREFILL_CHUNK = 1024  # tokens of a long prompt that are prefilled between two dispatches
_COUNTERS = EngineStats._fields[EngineStats._fields.index("submitted") :]


@dataclasses.dataclass
class ChunkedPrefill:
    """The chunked prefill of a long prompt.

    Attributes:
        run: The request.
        row: Its state of one row, outside of the slots until the prompt is encoded.
        upto: Position up to which the prompt is encoded.
    """

    run: RunningRequest
    row: State
    upto: int


def _check_weights(lm: LM) -> None:
    """Refuses weights on devices of other processes, and weights of 4 bits on a mesh.

    Requests are scheduled in one process. The engine compiles its programs ahead of time, and JAX's check of the
    arguments of such a program takes the packed layout of a committed array of 4 bits for another layout (jax 0.10.2).
    """
    for x in jax.tree.leaves(lm.params):
        if not getattr(x, "is_fully_addressable", True):
            raise ValueError(
                "the mesh has devices of several processes, and one process serves: use those of one host"
            )
        if x.dtype in (jnp.int4, jnp.float4_e2m1fn) and getattr(x, "committed", False):
            raise refuse("mesh", f"a mesh of weights in {x.dtype}", "None: 4 bits are served on one device")


class Engine:
    """Serves a model that `mj.load` has loaded.

        engine = Engine(lm, EngineConfig(slots=8))
        engine.start()
        handle = engine.submit(EngineRequest(prompt=(5, 6, 7), max_tokens=32))
        handle.wait().tokens

    Requests join and leave the batch between two steps, and no request triggers a compilation. `submit`, `stats`,
    `drain` and all methods of a handle may be called from any thread.

    Attributes:
        lm: The model, with the KV cache format of the configuration.
        config: The configuration, with `passes` filled in.
        buckets: Sizes of the batch.
        context: Maximum number of tokens of a request: prompt, thinking and answer.
        block: Tokens of a block.
        rules: Decoding rules that requests may choose.
        ready: Whether requests are served.
        closing: Whether new requests are rejected.
    """

    def __init__(self, lm: LM, config: EngineConfig = EngineConfig()):
        # Several passes per dispatch amortise the host's work where a pass takes a few milliseconds. On a CPU a pass
        # takes long anyway, and a dispatch of several passes would delay admission and snapshots.
        if config.passes is None:
            config = dataclasses.replace(config, passes=1 if jax.default_backend() == "cpu" else 4)
        if config.kv is not None:
            lm = dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, config.kv))
        _check_weights(lm)
        check_memory(lm, config)
        self.lm, self.config = lm, config
        self.buckets = make_buckets(lm, config)
        self.context, self.block, self.rules = self.buckets.context, self.buckets.block, self.buckets.rules
        self.ready, self.closing = False, False
        self._ends = (lm.model.config.eos, *lm.model.config.ends)
        self._changed = threading.Condition()
        self._has_news, self._stopping = False, False
        self._queue = RequestQueue(config.queue, config.slots, self._wake)
        self._compiled = CompiledPrograms(self.buckets)
        self._prefix_cache = PrefixCache(lm.model.config, config.prefix_bytes)
        fill = functools.partial(fill_hole, lm, self.rules)
        hole = EXAMPLE_HOLE if sees_suffix(lm) else None
        self._infilling = SideWorker("mercury-infill", fill, config.queue, self._publish_beside, hole)
        predict = functools.partial(predicting.decode_predicted, lm, self.rules, self.context)
        self._predicting = SideWorker(
            "mercury-predict", predict, config.queue, self._publish_beside, predicting.EXAMPLE
        )
        self._beside = (self._infilling, self._predicting)
        self._deciding = DecisionWorker(lm, config.queue + config.slots, self._count_decisions)
        self._slots: Slots | None = None
        self._prefill: ChunkedPrefill | None = None
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="mercury-engine", daemon=True)

    def start(self) -> None:
        """Compiles the largest bucket, then serves; the other buckets compile in the background."""
        self._slots = Slots(self.buckets, self._compiled, self._compiled.start(self._warm_up))
        if self._stopping:  # `stop` was called during the compilation
            return
        self._thread.start()
        for worker in self._beside:
            worker.start()
        self._deciding.start()
        self.ready = True

    def _warm_up(self) -> None:
        for worker in self._beside:
            worker.warm_up()

    def submit(self, request: EngineRequest) -> RequestHandle:
        """Validates and queues a request."""
        if request.suffix is not None:
            request = fim_order(self.lm, request)
        tokens = request.max_length + min(len(request.suffix or ()), SUFFIX_TOKENS)
        if not request.prompt:
            raise refuse("prompt", request.prompt, "at least one token")
        if tokens > self.context:
            raise ContextLengthExceeded(tokens, self.context)
        if request.images and self.lm.model.vision is None:
            raise refuse("images", f"{len(request.images)} images", "none: the model has no vision tower")
        if request.logprobs is not None and not 0 <= request.logprobs <= self.config.max_logprobs:
            raise refuse("logprobs", request.logprobs, f"0..{self.config.max_logprobs}")
        if request.grammar is not None:
            # Raises if no answer of the grammar fits into `max_tokens`.
            request.grammar.walk(request.max_tokens)
        # Building the sampler checks every sampling parameter. Doing it here raises the error in the caller's thread.
        sampling.build_sampler(self.rules, request, sampling.TRUNCATION)
        handle = RequestHandle(request, self._wake)
        try:
            self._queue_of(request).add(handle)
        except Exception:
            self._counts["rejected"] += 1
            raise
        self._counts["submitted"] += 1
        return handle

    def decide(self, asked: list[Asked], settings: Settings) -> Future[DecideOutput]:
        """Queues the questions about one state, as `decode.decide.ask` makes them."""
        try:
            found = self._deciding.submit(asked, settings)
        except RequestRejected:
            self._counts["rejected"] += 1
            raise
        self._counts["submitted"] += 1
        return found

    def _queue_of(self, request: EngineRequest) -> RequestQueue:
        """Returns the queue of a request: that of the slots, or of a worker beside them."""
        if request.suffix is not None:
            return self._infilling.queue
        verified = request.prediction and request.grammar is None and not request.visible
        return self._predicting.queue if verified else self._queue

    def drain(self, timeout: float | None = None) -> bool:
        """Rejects new requests and waits until all accepted ones have finished."""
        self.closing, queues = True, (self._queue, *(worker.queue for worker in self._beside))
        for queue in (*queues, self._deciding):
            queue.close()
        until = None if timeout is None else time.monotonic() + timeout
        while any(queue.unfinished for queue in (*queues, self._deciding)):
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def stop(self) -> None:
        """Cancels all requests and ends the threads. May be called while the engine still compiles."""
        self.closing = True
        self._queue.close()
        for worker in self._beside:
            worker.stop()
        self._deciding.stop()
        self._wake(stop=True)
        if self._thread.ident is not None:
            self._thread.join()
        for handle in self._queue.unfinished:
            handle.publish(early_end(handle, "cancelled"))
        self._compiled.stop()
        self.ready = False

    @property
    def compiled(self) -> bool:
        """Whether all buckets are compiled. Benchmarks wait for it."""
        return self.ready and self._compiled.complete

    def stats(self) -> EngineStats:
        """Returns counters since the start, and gauges of the current state.

        `kv_used` counts the largest possible length of each running request, not the tokens decoded so far.
        """
        slots = self._slots
        running = [] if slots is None else [run for run in slots.requests if run is not None]
        tokens = sum(run.handle.request.max_length for run in running)
        rows, capacity = (1, 1) if slots is None else slots.bucket[:2]
        kv_bytes = 0 if slots is None else programs.tree_bytes(slots.state.cache)
        return EngineStats(
            waiting=len(self._queue),
            running=len(running),
            slots=self.config.slots,
            capacity=capacity,
            kv_bytes=kv_bytes,
            kv_used=kv_bytes * tokens // (rows * capacity),
            prefix_bytes=self._prefix_cache.bytes,
            **{name: self._counts[name] for name in _COUNTERS},
        )

    def _publish_beside(self, handle: RequestHandle, final: Snapshot) -> None:
        """Counts and publishes the end of a request beside the slots. Called in the thread of a `SideWorker`."""
        outcome = {"cancelled": "cancelled", "error": "failed"}.get(final.finish or "", "finished")
        self._counts.update({outcome: 1, "forwards": final.forwards, "tokens": len(final.tokens)})
        handle.publish(final)

    def _count_decisions(self, count: int) -> None:
        """Counts decisions that one pass has answered. Called in the thread of `DecisionWorker`."""
        self._counts.update({"finished": count, "forwards": count, "device_passes": 1})

    def _wake(self, stop: bool = False) -> None:
        """Wakes the engine's thread from its wait in `_step`."""
        with self._changed:
            self._has_news = True
            self._stopping = self._stopping or stop
            self._changed.notify()

    # Everything below runs in the engine's own thread.

    def _run(self) -> None:
        while not self._stopping:
            assert self._slots is not None
            try:
                self._step(self._slots)
            except Exception:
                # A failing step must not end the server. The state was donated to the failed computation and may be
                # gone, so all running requests end with an error and the engine continues with empty slots.
                log.exception("the engine failed; running requests are lost")
                for handle in self._queue.running:
                    self._end_early(handle, "error", "the engine failed")
                empty = self.buckets.sharded(self.buckets.idle(self._compiled.largest))
                self._prefill, self._slots = None, Slots(self.buckets, self._compiled, empty)

    def _step(self, slots: Slots) -> None:
        """Runs one step: cancel, admit, dispatch, publish; waits for news if there is nothing to do."""
        for handle in self._queue.take_cancelled():
            self._end_early(handle, "cancelled")
        for slot, run in enumerate(slots.requests):
            if run is not None and run.handle.cancelled:
                self._end_early(run.handle, "cancelled")
                slots.requests[slot] = None
        if self._prefill is not None and self._prefill.run.handle.cancelled:
            self._end_early(self._prefill.run.handle, "cancelled")
            self._prefill = None
        self._admit(slots)
        if slots.running:
            slots.apply_grammars()
            slots.dispatch(self.lm.params)
        # Read every pending dispatch except the one just sent, so that the device computes while the host publishes.
        # A grammar may have to see that dispatch too before the next one; if no request runs, none will follow.
        while slots.pending and (len(slots.pending) > 1 or slots.constrained or not slots.running):
            self._publish(slots, slots.read())
        # Idle: wait for `submit`, `cancel` or `stop`. If requests wait that could not be admitted, check again soon.
        if not slots.running and not slots.pending and self._prefill is None:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news, timeout=0.01 if len(self._queue) else None)
                self._has_news = False

    def _end_early(self, handle: RequestHandle, finish: str, message: str = "") -> None:
        """Counts a request as cancelled or failed, and publishes its last snapshot."""
        self._counts["cancelled" if finish == "cancelled" else "failed"] += 1
        handle.publish(early_end(handle, finish, message))

    def _admit(self, slots: Slots) -> None:
        """Prefills the next chunk of a long prompt, and fills free slots from the queue."""
        # One chunk per step: running requests get a dispatch between two chunks, so a long prompt delays them by one
        # chunk at most.
        if (prefill := self._prefill) is not None:
            # The host must not send a whole prompt ahead: requests that arrive now, and other models on this device,
            # would wait for all of it.
            jax.block_until_ready(prefill.row.cache_length)
            request = prefill.run.handle.request
            self._encode_chunk(prefill)
            if prefill.upto >= len(request.prompt):  # the prompt is encoded: the request moves into a slot
                self._prefill = None
                slots.fit(request)
                slots.admit(prefill.run, prefill.row)

        def may_start(handle: RequestHandle) -> bool:
            """Says whether a request may start now. Only one chunked prefill runs at a time."""
            request = handle.request
            if self._prefill is not None and self._needs_prefill(len(request.prompt), request.images):
                return False
            return may_run(handle.request, [other.request for other in running], self.config.slots)

        # `running` includes the chunked prefill, whose request has no slot yet but needs one later.
        while len(running := self._queue.running) < self.config.slots:
            handle = self._queue.take(may_start)
            if handle is None:
                break
            self._start_request(slots, handle)
        slots.fit()

    def _needs_prefill(self, tokens: int, images: Sequence[Image] = ()) -> bool:
        """Whether a prompt of this length is prefilled in its own forward passes.

        A shorter prompt is prefilled by the passes of the batch, which read no images. Bidirectional models have no
        prefill.
        """
        return bool(images) or (not self.buckets.bidirectional and tokens > 2 * self.block)

    def _encode_chunk(self, prefill: ChunkedPrefill) -> None:
        """Encodes the next chunk of a long prompt. It ends after the first image in it, whose passes are wider."""
        request, upto = prefill.run.handle.request, prefill.upto + PREFILL_CHUNK
        program = self.buckets.program(prefill.row.tokens.shape[1], sampling.TRUNCATION)
        image = next((image for image in request.images if image.end > prefill.upto), None)
        if image is not None and image.at < upto:
            upto, width = image.end, max(PREFILL_WIDTH, image_prompts.longest_image([[image]]))
            soft = image_prompts.soft_tokens(self.lm, [[image]], prefill.row.tokens.shape[1])
            prefill.row = encode_images_program(
                program, self.lm.params, prefill.row, width, np.int32(upto), soft
            )
        else:
            prefill.row = programs.encode_prompt(
                program, self.lm.params, prefill.row, PREFILL_WIDTH, np.int32(upto)
            )
        prefill.upto = upto

    def _start_request(self, slots: Slots, handle: RequestHandle) -> None:
        """Puts a request into a slot, or starts the chunked prefill of its prompt."""
        request = handle.request
        prefix = self._prefix_cache.find(request.prompt, self._salt(request))
        # In a layer with a sliding window, the rest of an image attends to the whole image, also to what lies further
        # back than the window and is not in the chunks. An image is therefore cached whole or not at all.
        for image in reversed(request.images):
            if image.at < prefix.tokens < image.end:
                prefix = self._prefix_cache.find(request.prompt[: image.at + 1], self._salt(request))
        slots.fit(request)
        row = self.buckets.row(slots.bucket.capacity, request, prefix.tokens)
        row = self._prefix_cache.insert(row, prefix.chunks)
        cached, revises = prefix.tokens, self.rules.revises[self.rules.index(request.rule)]
        run = RunningRequest(handle, cached, prefix.recent, revises)
        marks = self.lm.tokenizer.thinking
        if request.thinking and marks is not None:
            run.end_think = marks.close
        if request.grammar is not None:
            run.gate = ConstrainedRow(request.grammar.walk(request.max_tokens), request.kept)
            if not request.thinking:
                run.gate.begin(len(request.prompt))
        self._counts["cached_tokens"] += cached
        self._counts["prompt_tokens"] += len(request.prompt)
        left = [image for image in request.images if image.end > cached]
        if self._needs_prefill(len(request.prompt) - cached, left):
            self._prefill = ChunkedPrefill(run, row, cached)
        else:
            slots.admit(run, row)

    def _salt(self, request: EngineRequest) -> str:
        """The salt of a request in the prefix cache.

        Keys that other RoPE frequencies have rotated are not shared, nor those of other images: all placeholders have
        the same id.
        """
        longest = len(request.prompt) + request.max_tokens + (request.thinking and request.thinking + 1)
        rope = self.lm.model.config.rope_of(longest)
        more = [str(rope)] if rope else []
        more += [image.digest for image in request.images]
        return "\0".join([*more, request.cache_salt])

    def _publish(self, slots: Slots, read: ReadDispatch) -> None:
        """Publishes the snapshots of a dispatch, and finishes the requests that are done."""
        frames, report = read.frames, read.report
        self._counts.update({"device_passes": read.passes, "dispatches": 1})
        for slot, run in enumerate(read.requests):
            if run is None or run.handle.finished:
                continue
            before = run.forwards
            shown = pass_snapshots(run, frames, read.passes, report, slot, self._ends)
            self._counts["forwards"] += run.forwards - before
            for snapshot in shown:
                run.handle.publish(snapshot)
            if report.done[slot]:
                self._finish(slots, run, report, slot)

    def _finish(self, slots: Slots, run: RunningRequest, report: programs.DispatchReport, slot: int) -> None:
        """Frees the slot of a finished row, and publishes its last snapshot."""
        request, end = run.handle.request, int(report.end[slot])
        # `slot` indexes the dispatch that was read. Rows may have moved to another bucket since, so the row of the
        # current state is looked up again.
        now_at = slots.requests.index(run)
        logprobs = None
        if request.logprobs is not None:
            logprobs = jax.device_get(programs.row_logprobs(slots.state, np.int32(now_at)))
        encoded = report.tokens[slot, : min(int(report.cache_length[slot]), end)].tolist()
        self._prefix_cache.keep(slots.state, now_at, encoded, self._salt(request), run.recent)
        slots.requests[now_at] = None
        final = final_snapshot(run, report, slot, self._ends, logprobs)
        self._counts["failed" if final.finish == "error" else "finished"] += 1
        self._counts["tokens"] += len(final.tokens)
        self._queue.record_duration(time.monotonic() - run.handle.arrival_time)
        run.handle.publish(final)
