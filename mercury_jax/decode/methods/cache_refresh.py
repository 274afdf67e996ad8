"""Adaptive cache reuse within a canvas: policies that choose which positions a pass recomputes.

With `Refresh` the recomputed positions are contiguous, and all positions are recomputed after a fixed number of steps.
A cache policy is a function of one row that chooses any positions in each pass, from the tokens, the age of each
position's keys, how much keys and values changed when they were last computed, and the last hidden states. It may also
hide positions from the attention.

    plan = mj.Plan(block=32, refresh=mj.cache_refresh.dkv_decode(every=8))

`key_reuse.py` runs the chosen positions. The others keep their keys and values in the cache, and their last hidden
states, from which the head computes logits inside the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import AtLeast, Between, refuse
from mercury_jax.decode.registration import Factory, part_decorator
from mercury_jax.decode.sampler import Memory, call_part
from mercury_jax.types import Hidden, Key, Model, Pass

NEVER = 1 << 30  # age of a position that no pass has computed


class CacheView(NamedTuple):
    """What a cache policy sees of one row, without a batch axis: the W positions of its canvas."""

    canvas: Int[Array, "W"]  # tokens and masks
    changed: Bool[Array, "W"]  # the token differs from that of the last pass
    masked: Bool[Array, "W"]  # undecided, in the active block or after it
    exists: Bool[Array, "W"]  # before the end of the row
    prompt: Bool[Array, "W"]  # before the answer
    block: Bool[Array, "W"]  # in the active block
    step: Int[Array, ""]  # denoising steps taken on this block
    passes: Int[Array, ""]  # denoising passes of the row so far
    age: Int[Array, "W"]  # passes since the position was computed; 1: by the last pass; NEVER: by none
    attended: Bool[Array, "W"]  # was attended to in the last pass
    # 1 - cosine similarity of the position's keys before and after their last computation, mean over layers and heads.
    key_drift: Float[Array, "W"]
    value_drift: Float[Array, "W"]  # the same for the position's values
    confidence: Float[Array, "W"]  # probability of the argmax in the last pass whose window held the position
    hidden: Hidden  # last hidden states, leaves [W, ...]


class Positions(NamedTuple):
    """What a cache policy returns: the positions that a pass computes and attends to.

    Attended positions that were never computed are always added to `compute`. If `attend` changes, all attended
    positions are computed.
    """

    compute: Bool[Array, "W"]  # positions to recompute
    attend: Bool[Array, "W"]  # positions that queries attend to; the others are hidden from every query


@runtime_checkable
class CachePolicyFunction(Protocol):
    """The function of a cache policy: chooses the positions of one row that a pass computes."""

    def __call__(self, key: Key, view: CacheView, memory: Memory, /) -> tuple[Positions, Memory]:
        """Chooses the positions of one row.

        Args:
            key: Key of this row and pass.
            view: What the policy sees of the row.
            memory: What the policy returned in the previous pass, or its `init`.

        Returns:
            The positions, and the memory for the next pass, with unchanged structure and shapes.
        """
        ...


def no_memory(width: int) -> Memory:
    """Returns the empty memory of a policy that carries nothing from pass to pass.

    Args:
        width: Unused.

    Returns:
        ().
    """
    return ()


def no_limit(window: int, params: dict[str, float]) -> int | None:
    """Returns None: the policy has no upper bound on the number of positions per pass.

    Args:
        window: Unused.
        params: Unused.

    Returns:
        None.
    """
    return None


@dataclass(frozen=True)
class CachePolicy:
    """A cache policy with its parameters, for `Plan(refresh=)`; made by the factories in `mj.cache_refresh`.

    Unlike the parameters of rules, those of policies are static: another value compiles another program.

    Attributes:
        function: The pure function, a `CachePolicyFunction` with further keyword parameters.
        params: The values of these parameters, as (name, value) pairs.
        name: Name for messages and reports.
        init: init(W) makes the memory before the first pass.
        limit: limit(L, params) gives the number of positions that most passes do not exceed; None: unknown. A forward
            pass of this width is compiled; passes with more positions run in a wider one.
        drift: Whether the policy reads `key_drift` or `value_drift`.
    """

    function: Callable[..., tuple[Positions, Memory]]
    params: Any
    name: str
    init: Callable[[int], Memory] = no_memory
    limit: Callable[[int, dict[str, float]], int | None] = no_limit
    drift: bool = False

    def __post_init__(self) -> None:
        for name, value in dict(self.params).items():
            if np.ndim(value) or isinstance(value, jax.Array):
                raise refuse(
                    f"{self.name}({name}=)", value, "one number: it is static, the same for all rows"
                )
        object.__setattr__(self, "params", tuple(sorted(dict(self.params).items())))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.params)})"

    def __call__(self, key: Key, view: CacheView, memory: Memory) -> tuple[Positions, Memory]:
        """Chooses the positions of one row, and checks what the function returns.

        Args:
            key: Key of this row and pass.
            view: What the policy sees of the row.
            memory: Memory from the previous pass.

        Returns:
            The positions, and the memory for the next pass.

        Raises:
            ValueError: The function fails, or does not return `Positions` of bool [W] and a memory.
        """
        found = call_part(
            f"the cache policy {self.name}", self.function, key, view, memory, **dict(self.params)
        )
        shape = view.canvas.shape
        fits = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Positions)
        if not fits or any(getattr(x, "shape", 0) != shape or x.dtype != jnp.bool_ for x in found[0]):
            allowed = f"(Positions of two bool{list(shape)}, memory)"
            raise refuse(f"what the cache policy {self.name} returns", type(found).__name__, allowed)
        return found


class Reuse(NamedTuple):
    """What is kept from earlier passes of B rows in addition to the KV cache; for the fields see `CacheView`."""

    canvas: Int[Array, "B W"]
    age: Int[Array, "B W"]
    attended: Bool[Array, "B W"]
    key_drift: Float[Array, "B W"]
    value_drift: Float[Array, "B W"]
    confidence: Float[Array, "B W"]
    hidden: Hidden
    memory: Memory


def first_reuse(policy: CachePolicy, model: Model, rows: int, width: int) -> Reuse:
    """Makes the record before the first pass, in which no position has been computed.

    Args:
        policy: The policy, whose `init` makes the memory.
        model: The model; the shapes of its hidden states are found by abstract evaluation.
        rows: Number of rows B.
        width: Size W of the canvas.

    Returns:
        The record of B rows.
    """

    def one_pass(key: Key) -> Hidden:
        at = jnp.zeros((1,), jnp.int32)
        self_cond = model.condition(None, jnp.zeros((1, width, 1)))
        time = jnp.zeros((1,)) if model.config.timed else None
        tokens, cache = jnp.zeros((1, width), jnp.int32), model.empty_cache(1, width)
        given = Pass(tokens, cache, at, at, at, jnp.zeros((1,), bool), self_cond, time)
        return model.forward(model.init(key), given)[0]

    like = jax.eval_shape(one_pass, jax.random.key(0))
    zeros = lambda dtype: jnp.zeros((rows, width), dtype)
    return Reuse(
        canvas=zeros(jnp.int32) - 1,
        age=zeros(jnp.int32) + NEVER,
        attended=zeros(bool),
        key_drift=zeros(jnp.float32),
        value_drift=zeros(jnp.float32),
        confidence=zeros(jnp.float32),
        hidden=jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), like),
        memory=jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), policy.init(width)),
    )


def cache_vectors(cache: Any, slots: Int[Array, "b T"] | None = None) -> tuple[list[Array], list[Array]]:
    """Collects the keys and values of every layer of a KV cache that stores them as arrays [b, S, G, K].

    Args:
        cache: KV cache, whose layers are records with the fields k and v.
        slots: The T slots to read in each row; None: all S.

    Returns:
        A list of keys and a list of values, one array [b, T, G, K] per layer. A list is empty if the cache stores
        that part in another form, such as quantised.
    """
    leaves = jax.tree_util.tree_flatten_with_path(cache)[0]
    of_rows = jax.vmap(lambda row, index: row[index])
    take = lambda x: x if slots is None else of_rows(x, slots)
    named = lambda name: [
        take(x) for path, x in leaves if getattr(path[-1], "name", None) == name and x.ndim == 4
    ]
    return named("k"), named("v")


def drift(before: list[Array], after: list[Array]) -> Float[Array, "b T"]:
    """Computes how much keys or values changed in a pass: 1 - cosine similarity, the mean over layers and heads.

    Args:
        before: Vectors of each layer before the pass [b, T, G, K].
        after: Vectors of each layer after it, with the same shapes.

    Returns:
        Values in [0, 2], fp32.
    """
    dot = lambda a, b: (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)
    cosine = lambda a, b: dot(a, b) * jax.lax.rsqrt(dot(a, a) * dot(b, b) + 1e-24)
    return 1.0 - jnp.stack([cosine(a, b).mean(-1) for a, b in zip(before, after, strict=True)]).mean(0)


# --- registration

# All policies that are registered, by name.
CACHE_POLICIES: dict[str, Factory[..., CachePolicy]] = {}
ALL = CACHE_POLICIES

Whole: TypeAlias = Annotated[int, AtLeast(1, integer=True)]


@overload
def cache_policy(function: Callable[..., tuple[Positions, Any]], /) -> Factory[..., CachePolicy]: ...
@overload
def cache_policy(
    *,
    name: str | None = None,
    source: str = "",
    init: Callable[[int], Memory] = no_memory,
    limit: Callable[[int, dict[str, float]], int | None] = no_limit,
    drift: bool = False,
) -> Callable[[Callable[..., tuple[Positions, Any]]], Factory[..., CachePolicy]]: ...
def cache_policy(function: Any = None, /, *, name: str | None = None, source: str = "", **fields: Any) -> Any:
    """Makes a cache policy of `function(key, view, memory, <parameters>) -> (Positions, memory)`.

    Args:
        function: A `CachePolicyFunction`. Parameters annotated with a range are checked.
        name: Name under which the policy is registered. None: the name of the function; a function defined inside
            another one is then not registered.
        source: Paper and equation, or reference implementation.
        fields: `init`, `limit` and `drift` of `CachePolicy`.

    Returns:
        A factory: call it with parameters to get a `CachePolicy`.

    Raises:
        ValueError: The name is taken by another policy.

    Example:
        >>> @mj.cache_refresh.cache_policy
        ... def masks_alone(key, view, memory, every: int = 4):
        ...     every_position = view.step % every == 0
        ...     return Positions(every_position | view.masked, view.exists), memory
    """
    decorate = part_decorator(CachePolicy, CACHE_POLICIES, name, source, fields, "cache policy")
    return decorate if function is None else decorate(function)


# --- policies


@cache_policy(source="dKV-Cache-Decode, arXiv 2505.15781, section 3.2; llada_dkv_cache_decode.py")
def dkv_decode(key: Key, view: CacheView, memory: Memory, every: Whole = 8) -> tuple[Positions, Memory]:
    """Computes the masks and the tokens that were just decided; a token is cached one pass after its decision.

    The key of a token changes most in the pass after the token has replaced its mask, so it is cached one step later.
    The first two steps of a block, and every `every`-th step, compute all positions.

    Args:
        key: Unused.
        view: What the policy sees of the row.
        memory: Unused.
        every: Steps between two computations of all positions (`cache_reloading_step`).

    Returns:
        The positions, and the unchanged memory.

    Departs from the reference: a token that a rule replaces or remasks is computed again.
    """
    whole = (view.step < 2) | (view.step % every == 0)
    return Positions(whole | view.masked | view.changed, view.exists), memory


@cache_policy(
    source="dKV-Cache-Greedy, arXiv 2505.15781, section 3.3; llada_dkv_cache_greedy.py",
    limit=lambda window, params: window + 2 * int(params["window"]),
)
def dkv_greedy(
    key: Key,
    view: CacheView,
    memory: Memory,
    every: Whole = 2,
    window: Annotated[int, AtLeast(0, integer=True)] = 4,
) -> tuple[Positions, Memory]:
    """Computes the tokens that were just decided, the masks that come next, and the masks near these.

    Args:
        key: Unused.
        view: What the policy sees of the row.
        memory: Unused.
        every: Steps between two computations of all positions.
        window: Number of masks computed around each predicted next mask, half of them on either side.

    Returns:
        The positions, and the unchanged memory.

    Departs from the reference, which draws the order of acceptance before the block (`remasking="random"`) and so knows
    which masks come next. Here they are predicted: the masks of the block with the highest confidence when they were
    last computed, as many as were just decided. For all other masks a rule sees the last hidden states.
    """
    # after: the masks predicted to come next. rank is 0 for the most confident mask. [W]
    open_masks = view.masked & view.block
    rank = jnp.argsort(jnp.argsort(jnp.where(open_masks, -view.confidence, jnp.inf)))
    after = open_masks & (rank < jnp.maximum((view.changed & view.block).sum(), 1))
    # Masks are numbered from the left, so that distances count masks only. left and right: the numbers of the nearest
    # predicted masks on both sides, by running maxima.
    number = jnp.cumsum(view.masked)
    left = jax.lax.cummax(jnp.where(after, number, -NEVER))
    right = -jax.lax.cummax(jnp.where(after, -number, -NEVER), reverse=True)
    near = view.masked & ((number - left <= window // 2) | (right - number <= -(-window // 2)))
    whole = view.step % every == 0
    return Positions(whole | view.changed | after | near, view.exists), memory


@cache_policy(source="dLLM-Cache, arXiv 2506.06295, algorithm 1", drift=True)
def dllm_cache(
    key: Key,
    view: CacheView,
    memory: Memory,
    prompt_every: Whole = 100,
    answer_every: Whole = 7,
    ratio: Annotated[float, Between(0, 1)] = 0.25,
) -> tuple[Positions, Memory]:
    """Computes the prompt rarely, the answer more often, and between these a share of the answer that moved most.

    Args:
        key: Unused.
        view: What the policy sees of the row.
        memory: Unused.
        prompt_every: Passes between two computations of the prompt (`prompt_interval_steps`).
        answer_every: Passes between two computations of the answer (`gen_interval_steps`).
        ratio: Share of the answer that the other passes compute (`transfer_ratio`).

    Returns:
        The positions, and the unchanged memory.

    Departs from the reference, which chooses in each layer: it projects the values of every token, compares them with
    the cached ones, and caches the outputs of attention and feed-forward. Here the choice is the same for all layers.
    Changed tokens come first, then those with the largest product of value drift at their last computation and passes
    since.
    """
    # rank: 0 for the position of the answer that is expected to have changed most. [W]
    answer = view.exists & ~view.prompt
    moved = jnp.where(view.changed, jnp.inf, view.value_drift * view.age)
    rank = jnp.argsort(jnp.argsort(jnp.where(answer, -moved, jnp.inf)))
    some = answer & (rank < jnp.floor(answer.sum() * ratio))
    prompt_due, answer_due = (view.passes % n == 0 for n in (prompt_every, answer_every))
    return Positions((view.prompt & prompt_due) | (answer & answer_due) | some, view.exists), memory


@cache_policy(
    source="Elastic-Cache, arXiv 2510.14973, algorithm 1",
    init=lambda width: (jnp.asarray(False), jnp.zeros(width, bool)),
    limit=lambda window, params: window + int(params["window"]) + int(params["track"]),
    drift=True,
)
def elastic_cache(
    key: Key,
    view: CacheView,
    memory: Memory,
    gamma: Annotated[float, Between(0, 1)] = 0.9,
    window: Whole = 32,
    track: Whole = 1,
) -> tuple[Positions, Memory]:
    """Computes a window of masks until the keys of a tracked token have moved, then every position once.

    Args:
        key: Unused.
        view: What the policy sees of the row.
        memory: Whether the last pass computed every position because of the test, and `view.changed` of that pass.
        gamma: Threshold of the cosine similarity between a tracked token's keys in two consecutive passes; below it
            every position is computed.
        window: Number of masks computed in each pass, from the left. Rules that read the whole block need at least the
            length of the block.
        track: Number of decided tokens before the first mask whose keys are tested.

    Returns:
        The positions, and the memory for the next pass.

    Departs from the paper, which tests the attention weights of the most attended token in each layer, and recomputes
    the layers above the first one that fails in the same pass. Here the tracked tokens are those before the first mask,
    the test reads the mean over the keys of all layers in the last pass, and all layers are recomputed one pass later.
    """
    masks = view.masked & (jnp.cumsum(view.masked) <= window)
    first = jnp.argmax(view.masked)
    at = jnp.arange(view.canvas.shape[0])
    tracked = (at < first) & (at >= first - track)
    # Only keys of the same token in consecutive passes are compared: in the first pass after its acceptance, the
    # previous key at a token's position is that of its mask.
    same = tracked & (view.age == 1) & ~view.changed & ~memory[1]
    moved = jnp.any(same & (view.key_drift > 1.0 - gamma)) & ~memory[0]
    return Positions(moved | masks | view.changed | tracked, view.exists), (moved, view.changed)


@cache_policy(
    source="DPad, arXiv 2508.14148, section 4; sampler.py and generate_dropout.py",
    init=lambda width: jnp.zeros(width, bool),
)
def suffix_pruning(
    key: Key,
    view: CacheView,
    memory: Memory,
    window: Whole = 256,
    sigma: Annotated[float, AtLeast(0)] = 4.0,
    scale: Annotated[float, AtLeast(0)] = 2.0,
    reuse: Annotated[int, Between(0, 2, integer=True)] = 0,
) -> tuple[Positions, Memory]:
    """Drops distant masks after the block from the attention: a window, and dropout that rises with the distance.

    A position at distance d after the block is kept with probability

        scale * exp(-(sigma d / (window - 1))^2 / 2) / sqrt(2 pi)    if d < window, otherwise 0.

    The kept positions are drawn once per block.

    Args:
        key: Key with which the positions are drawn.
        view: What the policy sees of the row.
        memory: The positions of the suffix that this block keeps, bool [W].
        window: Number of positions after the block that may be kept.
        sigma: Distance of the window's last position, in standard deviations.
        scale: Factor of the normal density.
        reuse: 0: every pass computes all kept positions. 1: after the first pass of a block, positions before the block
            are reused (prefix cache). 2: positions after the block are reused too (dual cache).

    Returns:
        The positions, and the kept part of the suffix.
    """
    # distance [W]: 0 for the first position after the block, negative in the block and before it.
    end = jnp.max(jnp.where(view.block, jnp.arange(view.canvas.shape[0]), -1)) + 1
    distance = jnp.arange(view.canvas.shape[0]) - end
    density = jnp.exp(-0.5 * (sigma * distance / max(window - 1, 1)) ** 2) / jnp.sqrt(2 * jnp.pi)
    drawn = jax.random.uniform(key, distance.shape) < scale * density
    suffix = jnp.where(view.step == 0, drawn & (distance >= 0) & (distance < window), memory)
    before = (distance < 0) & ~view.block
    computed = {0: view.exists, 1: ~before, 2: view.block}[int(reuse)]
    return Positions((view.step == 0) | computed, view.exists & (suffix | (distance < 0))), suffix
