"""Sizes of the batch ("buckets"), and the compiled program of each.

The slots are one `State` whose sizes are static: rows, positions per row, and what the sampler can do. A few of each
are compiled, so that few and short requests do not pay for the largest batch; a request runs in the smallest bucket
with room for it and its neighbours. The largest bucket is compiled before the first request, the others in a
background, together with the small programs that move rows between buckets.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.decode.constrained import no_tokens
from mercury_jax.decode.decode_config import QUANTUM, DecodeConfig, bucket as padded_size, slots_for
from mercury_jax.decode.sampler import LeaveOneOutMasks
from mercury_jax.decode.state import State
from mercury_jax.serve.engine import prefix_cache, programs, sampling_params as sampling
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.serve.engine.sampling_params import RuleSet
from mercury_jax.sharding import cache_shardings, dividing_axes, model_parallel_mesh, with_mesh
from mercury_jax.types import LM

SMALLEST = 256  # positions per row of the smallest bucket; the next ones double
PREFILL_WIDTH = 256  # tokens of a forward pass that encodes a long prompt; whole blocks of every block size
NICE = 15  # of the background compilation, as `nice -n`
WARM_UP_BYTES = 256 << 20  # most bytes of a KV cache that exists only to compile the moves between buckets
NO_REQUEST = EngineRequest(prompt=(0,), max_tokens=1)


class Bucket(NamedTuple):
    """Rows of the batch, positions per row, and the sampler level (`sampling_params.PLAIN` to `TRUNCATION`)."""

    rows: int
    capacity: int
    level: int


class Buckets(NamedTuple):
    """What is fixed for an engine, and the sizes that follow from it.

    Attributes:
        lm: The model, with its forward pass sharded over its mesh.
        rules: Decoding rules that requests may choose.
        config: Configuration of the engine.
        block: Positions of the active block.
        context: Most tokens of a request.
        rows: Numbers of rows, ascending: powers of four, and `config.slots`.
        capacities: Positions per row, ascending: SMALLEST times powers of two, and what the context needs.
        leave_one_out: A rule reads the active block by masks that do not see its tokens; they follow each canvas.
        bidirectional: The canvas of the model is the whole sequence, so prompts are not prefilled.
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
        """Positions of a row that holds `tokens` tokens, and one canvas more, which the last one may need."""
        masks = self.block if self.leave_one_out else 0
        if self.bidirectional:
            return padded_size(tokens) + masks
        return slots_for(tokens, self.width(tokens) + masks, self.context, QUANTUM)

    def width(self, capacity: int) -> int:
        """Positions of a canvas in rows of `capacity` positions."""
        config = self.lm.model.config
        if self.bidirectional:
            return capacity - (self.block if self.leave_one_out else 0)
        block_causal = config.pattern == "block_causal" and self.rules.own.speculate is None
        return config.block if block_causal else self.block

    def program(self, capacity: int, level: int) -> DecodeConfig:
        """The static sizes of the decoder; the number of rows is not part of them.

        Args:
            capacity: Positions of a row.
            level: Of the sampler.

        Returns:
            What a compiled step closes over.
        """
        width = self.width(capacity)
        return DecodeConfig(
            self.lm.model,
            self.lm.corruption,
            width=width,
            block=min(self.block, width),
            leave_one_out=self.leave_one_out,
            speculative=self.rules.own.speculate is not None,
            logprobs=self.config.max_logprobs if level > sampling.PLAIN else None,
        )

    def row(self, capacity: int, request: EngineRequest, cached: int = 0) -> State:
        """A state of one row that starts a request.

        Args:
            capacity: Positions of the row.
            request: The request.
            cached: Tokens of its prompt whose keys and values the caller writes into the row.

        Returns:
            A state of one row, with a KV cache of `capacity` positions.
        """
        tokens, prompt = np.zeros((1, capacity), np.int32), len(request.prompt)
        tokens[0, :prompt] = request.prompt
        end = prompt + (request.thinking or request.max_tokens)
        answer_budget = request.max_tokens if request.thinking else 0
        sizes = np.asarray((prompt, end, answer_budget, request.seed % 2**31, cached), np.int32)
        one = sampling.row_params(self.rules, request, sampling.PLAIN, self.lm, self.block)
        program = self.program(capacity, sampling.TRUNCATION)
        return programs.start_row(program, sampling.stack_rows(1, one), tokens, sizes)

    def idle(self, bucket: Bucket) -> State:
        """A state without requests. It has room for log-probabilities at every level."""
        order = np.full(bucket.rows, -1, np.int32)
        one = self.row(bucket.capacity, NO_REQUEST)
        return programs.move_rows(one, order, bucket.capacity, self.width(bucket.capacity))

    def moved(self, state: State, order: list[int], bucket: Bucket) -> State:
        """The rows `order` of a state in a state of another bucket, followed by idle rows.

        Args:
            state: The old state.
            order: Indices of rows of the old state.
            bucket: The new bucket; it has at least as many rows.

        Returns:
            The new state, on the model's mesh.
        """
        padded = np.full(bucket.rows, -1, np.int32)
        padded[: len(order)] = order
        moved = programs.move_rows(state, padded, bucket.capacity, self.width(bucket.capacity))
        return self.sharded(moved)

    def shardings(self, state: State) -> Any:
        """A `State` of shardings: rows over the mesh axis `data`, heads of the KV cache over `tensor`.

        Returns:
            None on a single device.
        """
        mesh = self.mesh
        if mesh is None:
            return None
        rows = lambda leaf: NamedSharding(
            mesh, PartitionSpec(dividing_axes(("data",), leaf.shape[0], mesh) or None)
        )
        return jax.tree.map(rows, state)._replace(cache=cache_shardings(state.cache, mesh))

    def sharded(self, state: State) -> State:
        """The state on the model's mesh; unchanged on a single device."""
        shardings = self.shardings(state)
        return state if shardings is None else jax.device_put(state, shardings)


def make_buckets(lm: LM, config: EngineConfig) -> Buckets:
    """The sizes of an engine.

    Args:
        lm: The model.
        config: Configuration of the engine.

    Returns:
        The sizes.

    Raises:
        ValueError: For a rule in `config.rules` that the model cannot decode with.
    """
    model, rules = lm.model.config, sampling.rule_set(lm, config.rules)
    block = config.block or model.block
    if rules.own.speculate is not None:
        block = min(block, rules.own.speculate + 1)
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
        leave_one_out=rules.own.rule.leave_one_out,  # other rules of an engine have no such masks
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

    `start` and `stop` belong to the thread that starts the engine, the rest to the engine's thread.

    Args:
        buckets: The sizes.

    Attributes:
        buckets: The sizes.
        largest: The bucket that is compiled first.
        steps: The compiled programs so far, (params, state, sampling, idle, limit) -> DispatchResult.
    """

    def __init__(self, buckets: Buckets):
        self.buckets = buckets
        self.largest = buckets.largest
        self.steps: dict[Bucket, Callable[..., programs.DispatchResult]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Only XLA's part of a compilation yields: a thread that traces holds Python's lock, and all would wait for it.
        self._compiler = ThreadPoolExecutor(1, "mercury-xla", initializer=_yield_to_requests)

    def start(self, on_complete: Callable[[], None] = lambda: None) -> State:
        """Compiles the largest bucket, then starts to compile the others in the background.

        Args:
            on_complete: Called in the background thread when all buckets are compiled.

        Returns:
            An idle state of the largest bucket.
        """
        state = self.buckets.sharded(self.buckets.idle(self.largest))
        # Prefill compiles beside the step: each of the two takes about one core.
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
        """Starts no further compilation, and waits for the one that runs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._compiler.shutdown()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compile."""
        return bool(self.steps) and (self._thread is None or not self._thread.is_alive())

    def add(self, bucket: Bucket) -> None:
        """Compiles a bucket, and the moves of rows between it and the others; then it is used."""
        compiled, buckets = self._compiler.submit(self._lower(bucket).compile).result(), self.buckets
        known = {(other.rows, other.capacity): other for other in self.steps}
        if (bucket.rows, bucket.capacity) not in known:
            state = buckets.sharded(buckets.idle(bucket))
            size = programs.tree_bytes(state.cache)
            if size <= WARM_UP_BYTES:
                state = self._warm_up(bucket, state)
                for other in known.values():
                    if size * other.rows * other.capacity <= WARM_UP_BYTES * bucket.rows * bucket.capacity:
                        buckets.moved(buckets.moved(state, [], other), [], bucket)
        self.steps[bucket] = compiled

    def _compile_others(self, on_complete: Callable[[], None]) -> None:
        buckets = self.buckets
        for level in (sampling.PLAIN, sampling.PROCESSORS):
            for capacity in buckets.capacities:
                for rows in reversed(buckets.rows):
                    if self._stop.is_set():
                        return
                    self.add(Bucket(rows, capacity, level))
        on_complete()

    def _lower(self, bucket: Bucket) -> Any:
        buckets = self.buckets
        one = sampling.row_params(buckets.rules, NO_REQUEST, bucket.level, buckets.lm, buckets.block)
        state = jax.eval_shape(lambda: buckets.idle(bucket))
        shardings, run = buckets.shardings(state), programs.run_passes
        if shardings is not None:  # the result must lie where the next dispatch expects it
            laid_out = lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)
            state, run = jax.tree.map(laid_out, state, shardings), programs.run_passes_sharded(shardings)
        return run.lower(
            buckets.program(bucket.capacity, bucket.level),
            buckets.lm.params,
            state,
            sampling.stack_rows(bucket.rows, one),
            np.zeros(bucket.rows, bool),
            np.int32(0),
            buckets.config.passes,
        )

    def _warm_up(self, bucket: Bucket, state: State) -> State:
        """Runs what happens between two dispatches once, so that no request waits for its compilation.

        Args:
            bucket: The bucket of `state`.
            state: An idle state; donated.

        Returns:
            An idle state again.
        """
        buckets = self.buckets
        row, chunk = self._warm_up_row(bucket.capacity), prefix_cache.chunk_size(buckets.lm.model.config)
        if buckets.config.prefix_bytes and chunk is not None and chunk <= bucket.capacity:
            keys = prefix_cache.cut_cache(state.cache, np.int32(0), np.int32(0), chunk)
            row = prefix_cache.insert_cache(row, keys, np.int32(0))
        program = buckets.program(bucket.capacity, sampling.TRUNCATION)
        eos = np.full(bucket.rows, buckets.lm.model.config.eos, np.int32)
        unchanged = no_tokens(bucket.rows, program.width)
        state = buckets.sharded(programs.write_tokens(program, state, unchanged, eos))
        state = buckets.sharded(programs.place_row(state, np.int32(0), row))
        programs.row_logprobs(state, np.int32(0))
        return buckets.moved(state, [], bucket)

    def _warm_up_row(self, capacity: int) -> State:
        """A row that has been through the passes that encode a long prompt."""
        row = self.buckets.row(capacity, NO_REQUEST)
        if self.buckets.bidirectional:
            return row
        program = self.buckets.program(capacity, sampling.TRUNCATION)
        return programs.encode_prompt(program, self.buckets.lm.params, row, PREFILL_WIDTH, np.int32(0))


def _yield_to_requests() -> None:
    """Lowers the priority of the calling thread, and of the compiler's threads, which inherit it (Linux only).

    Otherwise XLA's compiler takes every core of a small machine, and running streams halt while it compiles.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
