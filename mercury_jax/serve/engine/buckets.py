"""Buckets, the sizes of the batch, and the compiled program of each bucket.

The slots are one `State` of static size: number of rows, positions per row, and sampler level. The engine compiles a
few combinations, so that a small number of short requests does not pay for the largest batch; all running requests
share the cheapest compiled bucket that fits them. The largest bucket is compiled before the first request. The others
are compiled in the background, together with the small programs that move rows between buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.config import Plan
from mercury_jax.decode import image_prompts
from mercury_jax.decode.build_config import choose_method, draft_width, with_rings
from mercury_jax.decode.chunked_vocab import ChunkedVocab
from mercury_jax.decode.constrained import no_free_text, no_tokens
from mercury_jax.decode.image_prefill import encode_images_program
from mercury_jax.decode.sampler import LeaveOneOutMasks
from mercury_jax.decode.state import QUANTUM, DecodeConfig, State, bucket as padded_size, slots_for
from mercury_jax.images import Detail, Image
from mercury_jax.serve.engine import prefix_cache, programs, sampling_params as sampling
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.serve.engine.sampling_params import RuleSet
from mercury_jax.sharding import cache_shardings, dividing_axes, model_parallel_mesh, with_mesh
from mercury_jax.types import LM, Model

SMALLEST = 256  # positions per row of the smallest bucket; larger buckets double it
PREFILL_WIDTH = 256  # tokens per forward pass in the prefill of a long prompt; a multiple of every block size
NICE = 15  # niceness of the background compilation, as in `nice -n`
WARM_UP_BYTES = 256 << 20  # size limit of a KV cache that is allocated only to compile moves between buckets
NO_REQUEST = EngineRequest(prompt=(0,), max_tokens=1)


class Bucket(NamedTuple):
    """Rows of the batch, positions per row, and the sampler level (`sampling_params.PLAIN` to `TRUNCATION`)."""

    rows: int
    capacity: int
    level: int


class Buckets(NamedTuple):
    """The static properties of an engine, and the sizes that follow from them.

    Attributes:
        lm: The model, with its forward pass sharded over its mesh.
        rules: Decoding rules that requests may choose.
        config: Configuration of the engine.
        block: Positions of the active block.
        context: Maximum number of tokens of a request.
        rows: Numbers of rows, ascending: the powers of four below `config.slots`, and `config.slots`.
        capacities: Positions per row, ascending: SMALLEST times powers of two, and the size that the context needs.
        leave_one_out: Whether a rule predicts each token of the active block from a mask that does not attend to that
            token. These masks are appended to each canvas.
        bidirectional: Whether the canvas is the whole sequence, so that there is no prefill.
        mesh: The mesh that the model was loaded on. None: a single device.
    """

    lm: LM
    rules: RuleSet
    config: EngineConfig
    block: int
    context: int
    rows: tuple[int, ...]
    capacities: tuple[int, ...]
    leave_one_out: LeaveOneOutMasks
    bidirectional: bool
    mesh: Mesh | None

    @property
    def largest(self) -> Bucket:
        """The bucket that fits every batch."""
        return Bucket(self.rows[-1], self.capacities[-1], sampling.TRUNCATION)

    def capacity(self, tokens: int) -> int:
        """Returns the positions that a row needs for a request.

        Returns:
            Positions for these tokens and for one more canvas: the last canvas may begin at the last token. Rounded up
            to one of a few sizes.
        """
        masks = self.block if self.leave_one_out else 0
        if self.bidirectional:
            return padded_size(tokens) + masks
        return slots_for(tokens, self.width(tokens) + masks, self.context, QUANTUM)

    def width(self, capacity: int) -> int:
        """Returns the positions of a canvas in rows of `capacity` positions.

        A bidirectional canvas covers the whole row. A block-causal canvas is one block of the model's attention mask,
        also when the engine decodes smaller blocks.
        """
        config = self.lm.model.config
        if self.bidirectional:
            return capacity - (self.block if self.leave_one_out else 0)
        block_causal = config.pattern == "block_causal" and self.rules.own.speculate is None
        return config.block if block_causal else self.block

    def program(self, capacity: int, level: int) -> DecodeConfig:
        """Returns the static configuration of the decoder, which does not depend on the number of rows."""
        width = self.width(capacity)
        return with_rings(DecodeConfig(
            self.lm.model,
            self.lm.corruption,
            width=width,
            block=min(self.block, width),
            method=choose_method(self.lm, Plan(fuse_commit=0), self.rules.own),
            leave_one_out=self.leave_one_out,
            predict=ChunkedVocab(),
            logprobs=self.config.max_logprobs if level > sampling.PLAIN else None,
        ), longest_image_pass(self.lm.model) // 2)  # fmt: skip

    def sizes(self, capacity: int) -> programs.RowSizes:
        """Returns the sizes of the axes of a state whose rows have `capacity` positions."""
        model = self.program(capacity, sampling.PLAIN).model
        return programs.RowSizes(capacity, self.width(capacity), _cache_slots(model, capacity))

    def row(self, capacity: int, request: EngineRequest, cached: int = 0) -> State:
        """Makes the state of one row that starts a request."""
        tokens, prompt = np.zeros((1, capacity), np.int32), len(request.prompt)
        tokens[0, :prompt] = request.prompt
        # A thinking request first decodes up to its thinking budget; `answer_budget` is kept for the answer after it.
        end = prompt + (request.thinking or request.max_tokens)
        answer_budget = request.max_tokens if request.thinking else 0
        sizes = np.asarray((prompt, end, answer_budget, request.seed % 2**31, cached), np.int32)
        one = sampling.row_params(self.rules, request, sampling.PLAIN, self.lm, self.block)
        program = self.program(capacity, sampling.TRUNCATION)
        return programs.start_row(program, sampling.stack_rows(1, one), tokens, sizes)

    def idle(self, bucket: Bucket) -> State:
        """Makes a state without requests. It has buffers for log-probabilities at every sampler level."""
        order = np.full(bucket.rows, -1, np.int32)
        one = self.row(bucket.capacity, NO_REQUEST)
        return programs.move_rows(one, order, self.sizes(bucket.capacity))

    def moved(self, state: State, order: list[int], bucket: Bucket) -> State:
        """Moves rows into a new state of another bucket; the remaining rows of the new state are idle."""
        padded = np.full(bucket.rows, -1, np.int32)
        padded[: len(order)] = order
        moved = programs.move_rows(state, padded, self.sizes(bucket.capacity))
        return self.sharded(moved)

    def shardings(self, state: State) -> Any:
        """Makes the shardings of a state: rows over the mesh axis `data`, heads of the KV cache over `tensor`.

        Returns:
            A `State` of shardings; None on a single device.
        """
        mesh = self.mesh
        if mesh is None:
            return None
        rows = lambda leaf: NamedSharding(
            mesh, PartitionSpec(dividing_axes(("data",), leaf.shape[0], mesh) or None)
        )
        return jax.tree.map(rows, state)._replace(cache=cache_shardings(state.cache, mesh))

    def sharded(self, state: State) -> State:
        """Places a state on the model's mesh; returns it unchanged on a single device."""
        shardings = self.shardings(state)
        return state if shardings is None else jax.device_put(state, shardings)


def longest_image_pass(model: Model) -> int:
    """Returns the tokens of the widest prefill pass, which holds a whole image; 0 for a model that reads text only."""
    tower = model.vision
    return 0 if tower is None else padded_size(max(map(tower.config.budget, get_args(Detail))))


@functools.lru_cache(64)  # rows move between dispatches, which must not wait for a trace
def _cache_slots(model: Model, capacity: int) -> tuple[int, ...]:
    """Lists the slots of each leaf of the KV cache for rows of `capacity` positions; 0 for a leaf without slots."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.empty_cache(1, capacity)))
    return tuple(leaf.shape[1] if leaf.ndim > 1 else 0 for leaf in leaves)


def make_buckets(lm: LM, config: EngineConfig) -> Buckets:
    """Computes the sizes of an engine."""
    model, rules = lm.model.config, sampling.rule_set(lm, config.rules)
    block = config.block or model.block
    if rules.own.speculate is not None:  # a block is a draft and one more token
        block = draft_width(lm, block, rules.own.speculate)
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(lm.params))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh))
    buckets = Buckets(
        lm=dataclasses.replace(lm, model=with_mesh(lm.model, model_parallel_mesh(lm.params))),
        rules=rules,
        config=config,
        block=block,
        context=min(config.context or model.context, model.context),
        rows=(config.slots,),
        capacities=(),
        leave_one_out=rules.own.rule.leave_one_out,  # `rule_set` offers no other rule with such masks
        bidirectional=model.pattern == "bidirectional",
        mesh=next((mesh for mesh in meshes if mesh.size > 1), None),
    )
    most = buckets.capacity(buckets.context)
    if config.programs == "one":
        return buckets._replace(capacities=(most,))
    rows = {config.slots} | {4**i for i in range(8) if 4**i < config.slots}
    smaller = (SMALLEST << i for i in range(20))
    capacities = {most} | {x for x in smaller if x < most and buckets.width(x) > 0}
    return buckets._replace(rows=tuple(sorted(rows)), capacities=tuple(sorted(capacities)))


class CompiledPrograms:
    """`programs.run_passes` compiled for each bucket.

    The thread that starts the engine calls `start` and `stop`; the engine's thread reads `steps`, to which a background
    thread adds.

    Attributes:
        buckets: The sizes.
        largest: The bucket that is compiled first.
        steps: The programs compiled so far, (params, state, sampling, idle, limit) -> DispatchResult.
    """

    def __init__(self, buckets: Buckets):
        self.buckets = buckets
        self.largest = buckets.largest
        self.steps: dict[Bucket, Callable[..., programs.DispatchResult]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Only XLA's part of a compilation runs at low priority. Tracing holds the GIL: at low priority it would hold
        # the GIL for longer, and all other threads would wait.
        self._compiler = ThreadPoolExecutor(1, "mercury-xla", initializer=_yield_to_requests)

    def start(self, on_complete: Callable[[], None] = lambda: None) -> State:
        """Compiles the largest bucket, then starts to compile the others in the background."""
        state = self.buckets.sharded(self.buckets.idle(self.largest))
        # The prefill compiles in parallel with the step: each of the two compilations uses about one core.
        prefill = threading.Thread(target=self._warm_up_row, args=(self.largest.capacity,))
        prefill.start()
        self.steps[self.largest] = self._lower(self.largest).compile()
        prefill.join()
        if self._stop.is_set():
            return state
        state = self._warm_up(self.largest, state)
        if self.buckets.config.programs == "all" and not self._stop.is_set():
            self._thread = threading.Thread(
                target=self._compile_others, args=(on_complete,), name="mercury-compile", daemon=True
            )
            self._thread.start()
        return state

    def stop(self) -> None:
        """Waits for the running compilation, and starts no other."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._compiler.shutdown()

    @property
    def complete(self) -> bool:
        """Whether all buckets are compiled."""
        return bool(self.steps) and (self._thread is None or not self._thread.is_alive())

    def add(self, bucket: Bucket) -> None:
        """Compiles a bucket and the moves of rows between it and the other buckets, then makes it available."""
        compiled, buckets = self._compiler.submit(self._lower(bucket).compile).result(), self.buckets
        known = {(other.rows, other.capacity): other for other in self.steps}
        # Moves depend on rows and capacity only. Each is compiled by running it once on an idle state, unless the KV
        # caches would take too much memory; then the first real move compiles it.
        if (bucket.rows, bucket.capacity) not in known:
            state = buckets.sharded(buckets.idle(bucket))
            size = programs.tree_bytes(state.cache)
            if size <= WARM_UP_BYTES:
                state = self._warm_up(bucket, state)
                for other in known.values():
                    if size * other.rows * other.capacity <= WARM_UP_BYTES * bucket.rows * bucket.capacity:
                        buckets.moved(buckets.moved(state, [], other), [], bucket)
        # The last statement: `Slots.fit` in the engine's thread may choose the bucket from now on.
        self.steps[bucket] = compiled

    def _compile_others(self, on_complete: Callable[[], None]) -> None:
        """Compiles all other buckets at the lower levels, in the background thread.

        TRUNCATION is compiled for the largest bucket only, which serves every request with top-k, top-p or min-p.
        """
        buckets = self.buckets
        for capacity in buckets.capacities:
            for rows in reversed(buckets.rows):
                # Both levels of one size in turn: until a request finds its level, it runs in the largest bucket, which
                # takes several times as long a pass, for all rows.
                for level in (sampling.PLAIN, sampling.PROCESSORS):
                    if self._stop.is_set():
                        return
                    self.add(Bucket(rows, capacity, level))
        on_complete()

    def _lower(self, bucket: Bucket) -> Any:
        """Lowers `run_passes` for a bucket, from an abstract state, so that nothing is allocated."""
        buckets = self.buckets
        one = sampling.row_params(buckets.rules, NO_REQUEST, bucket.level, buckets.lm, buckets.block)
        state = jax.eval_shape(lambda: buckets.idle(bucket))
        shardings, run = buckets.shardings(state), programs.run_passes
        if shardings is not None:
            # The result is the input of the next dispatch, so both must have the same shardings.
            laid_out = lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)
            state, run = jax.tree.map(laid_out, state, shardings), programs.run_passes_sharded(shardings)
        return run.lower(
            buckets.program(bucket.capacity, bucket.level),
            buckets.lm.params,
            state,
            sampling.stack_rows(bucket.rows, one),
            np.zeros(bucket.rows, bool),
            np.int32(0),
            no_free_text(bucket.rows, buckets.rules.vocab) if bucket.level > sampling.PLAIN else None,
            buckets.config.passes,
        )

    def _warm_up(self, bucket: Bucket, state: State) -> State:
        """Runs each function that the engine calls between two dispatches once, so that it is compiled."""
        buckets = self.buckets
        row, chunk = self._warm_up_row(bucket.capacity), prefix_cache.chunk_size(buckets.lm.model.config)
        if buckets.config.prefix_bytes and chunk is not None and chunk <= bucket.capacity:
            whole = jax.tree.leaves(state.cache)
            # Chunks that a ring does not hold any more are stored without the leaves of its layers.
            old = [leaf if leaf.shape[1] == bucket.capacity else None for leaf in whole]
            for leaves in (whole, old) if any(leaf is None for leaf in old) else (whole,):
                keys = prefix_cache.cut_cache(leaves, np.int32(0), np.int32(0), chunk)
                row = prefix_cache.insert_cache(row, keys, np.int32(0))
        program = buckets.program(bucket.capacity, sampling.TRUNCATION)
        eos = np.full(bucket.rows, buckets.lm.model.config.eos, np.int32)
        unchanged = no_tokens(bucket.rows, program.width)
        state = buckets.sharded(programs.write_tokens(program, state, unchanged, eos))
        state = buckets.sharded(programs.place_row(state, np.int32(0), row))
        programs.row_logprobs(state, np.int32(0))
        return buckets.moved(state, [], bucket)

    def _warm_up_row(self, capacity: int) -> State:
        """Compiles the prefill of a long prompt; returns a row that went through it."""
        row = self.buckets.row(capacity, NO_REQUEST)
        if self.buckets.bidirectional:
            return row
        lm, program = self.buckets.lm, self.buckets.program(capacity, sampling.TRUNCATION)
        row = programs.encode_prompt(program, lm.params, row, PREFILL_WIDTH, np.int32(0))
        if lm.model.vision is None:
            return row
        # Images of the default detail; the first image of another one compiles its programs.
        c = lm.model.vision.config
        image = Image(np.zeros((c.patch * c.pool, c.patch * c.pool, 3), np.uint8), c.patch, c.pool, c.tokens)
        soft = image_prompts.soft_tokens(lm, [[image]], capacity)
        width = max(PREFILL_WIDTH, image_prompts.longest_image([[image]]))
        return encode_images_program(program, lm.params, row, width, np.int32(0), soft)


def _yield_to_requests() -> None:
    """Lowers the priority of the calling thread and of the compiler threads that it starts (Linux only).

    Otherwise XLA's compiler occupies every core of a small machine, and running streams stall while it compiles.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
