"""The records that the parts exchange, one each, and the legend of their shapes.

Shape legend, used in every signature of the package:

    B  rows of a batch       T  positions of one forward pass     S  slots of a KV cache
    L  positions of a canvas V  vocabulary                        R  key ranges a query may see (2)
    H  query heads           G  key/value heads                   K  width of one head
    D  model width           F  feed-forward width                N  layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

if TYPE_CHECKING:
    from mercury_jax.config import ModelConfig
    from mercury_jax.noise import Corruption
    from mercury_jax.tokenizer import AnyTokenizer

Tokens = Int[Array, "*shape"]
Key = PRNGKeyArray
Params = Any  # a plain nested dict of arrays
Cache = Any  # a pytree whose every leaf has the batch axis first
Carry = Any  # self-conditioning: what one pass hands to the next, or ()
Hidden = Any  # hidden states as `Model.head` reads them, leaves [B, T, ...]


def wide(dtype: Any) -> Any:
    """The dtype in which to normalise, exponentiate and sum: fp32, or fp64 where the input has it."""
    return jnp.promote_types(dtype, jnp.float32)


class Batch(NamedTuple):
    """Packed training rows, already laid out for the model's attention pattern (`Model.layout`).

    A document stands in a row as its clean tokens (encoded, never noised) followed by its
    canvases (noised). `ranges` says which slots of the same row each position may look at.
    """

    tokens: Int[Array, "B T"]  # clean ids everywhere; `corrupt` noises the editable ones
    positions: Int[Array, "B T"]  # absolute position in the document, for RoPE
    ranges: Int[Array, "B T R 2"]  # key ranges [start, end) inside the row; empty where padding
    editable: Bool[Array, "B T"]  # may be noised, and is scored
    canvas: Int[Array, "B T"]  # index of the canvas within the row, -1 outside of canvases


class Laid(NamedTuple):
    """One document laid out for a pattern (numpy); packed rows are concatenations of these."""

    tokens: Any  # int32 [T]
    positions: Any  # int32 [T]
    ranges: Any  # int32 [T, 2, 2], relative to the document's first slot
    editable: Any  # bool [T]
    canvas: Any  # int32 [T], -1 outside of canvases


class Loss(NamedTuple):
    """What an objective returns: the batch's loss is `sum(per_example) / sum(weight)`.

    Sums instead of means, so that gradient accumulation and data parallelism change nothing.
    """

    per_example: Float[Array, "B"]  # nats, summed over the row's scored tokens
    weight: Float[Array, "B"]  # how many tokens (or canvases) the sum stands for
    metrics: Mapping[str, tuple[Array, Array]]  # name -> (numerator, denominator), both scalars


class TokenStats(NamedTuple):
    """What rules need to know of the logits at each position of one row's canvas.

    Computed from all logits at once by `decode.token_stats`, or over chunks of a large vocabulary by
    `decode.chunked_vocab`. All values are those after the logits processors.
    """

    argmax: Int[Array, "L"]
    sample: Int[Array, "L"]  # a draw at the sampler's temperature; the argmax at temperature 0
    p_argmax: Float[Array, "L"]
    p_sample: Float[Array, "L"]
    p_canvas: Float[Array, "L"]  # probability of the token that the canvas holds now
    entropy: Float[Array, "L"]  # nats
    margin: Float[Array, "L"]  # p(first) - p(second)
    p_eos: Float[Array, "L"]  # probability of the end of text; 0 where no id ends the answer


class View(NamedTuple):
    """What rules, logits processors and stopping criteria see: one row, no batch axis. L is the active window."""

    canvas: Int[Array, "L"]  # state of the chain: tokens, and masks or noise
    answer: Int[Array, "L"]  # what would have been emitted after the previous step
    stats: TokenStats  # None while logits processors run
    leave_one_out: (
        TokenStats  # predicted by masks that do not see the token at their own position; on request
    )
    logits: Float[Array, "L V"]  # processed; only for parts that need them (`needs_logits`)
    editable: Bool[Array, "L"]  # in the active block and not given by the user
    masked: Bool[Array, "L"]  # editable and still the mask id; under uniform noise all that is editable
    used: Int[Array, ""]  # positions of the window that hold something
    growth: Int[Array, ""]  # positions by which the window may still grow
    noise: Int[Array, "L"]  # fresh tokens from the prior at time s; the mask id where there is one
    t: Float[Array, ""]  # time of this canvas, 1 = noise
    s: Float[Array, ""]  # time after this step, s < t
    alpha_t: Float[Array, ""]  # alpha(t)
    alpha_s: Float[Array, ""]  # alpha(s)
    step: Int[Array, ""]  # denoising steps taken on this block
    steps: Int[Array, ""]  # denoising steps that the block may take
    eos: Int[Array, ""]  # the id that ends the answer, -1 for none
    position: Int[Array, ""]  # position of the window's first token, counted from the end of the prompt
    output_counts: Int[Array, "V"]  # how often each id occurs in the answer before the window
    prompt_counts: Int[Array, "V"]  # how often each id occurs in the prompt
    first_id: int | Int[Array, ""] = 0  # id of the first logits column, where a processor sees one chunk of V


class Proposal(NamedTuple):
    """What a rule returns: the next state of the chain, and what would be emitted now.

    A rule that inserts or deletes positions also returns how many positions are used, and for each position the
    old position that it continues (-1: new); the decoder moves the given tokens and their flags along. Other
    rules keep the view's `used` and `source` = 0..L-1, as `accept` and `propose` do.
    """

    canvas: Int[Array, "L"]
    answer: Int[Array, "L"]
    used: Int[Array, ""]
    source: Int[Array, "L"]  # old index of each position, -1 = new


class Device(NamedTuple):
    """The accelerator that a program is compiled for, where it is not the one of this machine.

    kind: "sm_90a" (Hopper), "sm_100a" (Blackwell) or "tpu"; all kernels written for it are used.
    interpret: parameters of the interpreter that runs the kernels on a CPU (Mosaic GPU's `InterpretGPUParams`, or True
        for a TPU); None compiles them.
    """

    kind: str
    interpret: Any = None


class Pass(NamedTuple):
    """One forward pass over a KV cache: the arguments of `Model.forward`, a pytree.

    Row b's tokens stand at the absolute positions `start[b] .. start[b] + used[b]`, which are also their cache slots;
    the rest of its T tokens are neither read nor written. Keys at and after `end[b]` are hidden from it.

    Attributes:
        tokens: Ids [B, T].
        cache: From `Model.empty_cache`, with what earlier passes wrote.
        start: Position of each row's first token [B].
        used: How many of its T tokens each row uses [B]; 0 leaves the row and its cache as they are.
        end: End of what each row attends to [B].
        encoding: Rows that write committed tokens, with the model's causal pattern [B]; the others denoise, and each of
            their tokens attends to all of [0, end).
        self_cond: Of models with self-conditioning, what `Model.condition` returned for the pass before, leaves
            [B, T, ...]; () for none.
        time: Of models with `config.timed`, the noise level of each row [B] in 0..1, 0 for clean text; otherwise None.
        leave_one_out: A mask id. T more hidden states follow, each of a mask at one token's position that attends to
            every position but that one; their keys occupy the T slots from `end` on. None: without.
    """

    tokens: Int[Array, "B T"]
    cache: Cache
    start: Int[Array, "B"]
    used: Int[Array, "B"]
    end: Int[Array, "B"]
    encoding: Bool[Array, "B"]
    self_cond: Carry = ()
    time: Float[Array, "B"] | None = None
    leave_one_out: int | Int[Array, ""] | None = None


class PackedPass(NamedTuple):
    """One forward pass over packed rows without a cache: the arguments of `Model.apply`, a pytree.

    Attributes:
        tokens: Ids [B, T], laid out by `Model.layout`.
        positions: Positions in their documents [B, T], for RoPE.
        ranges: Key ranges [start, end) inside the row [B, T, R, 2].
        self_cond: As in `Pass`.
        time: Of models with `config.timed`, the noise level of each row [B] or of each position [B, T]; otherwise None.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    ranges: Int[Array, "B T R 2"]
    self_cond: Carry = ()
    time: Float[Array, "B"] | Float[Array, "B T"] | None = None


class Forward(Protocol):
    """`Model.forward`: one pass over a KV cache."""

    def __call__(
        self, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> tuple[Hidden, Cache]:
        """Hidden states and the cache with this pass's keys and values.

        Args:
            params: Parameters of the model.
            given: Tokens, cache and positions.
            mesh: Over which heads, hidden units and experts are divided by hand (`sharding.over`); None: XLA decides.
            device: To compile kernels for; None: the device of this machine.

        Returns:
            Opaque hidden states for `Model.head`, leaves [B, T, ...] (2 T with `leave_one_out`), and the cache.
        """
        ...


class Apply(Protocol):
    """`Model.apply`: one pass without a cache, for training and scoring. Differentiable."""

    def __call__(
        self, params: Params, given: PackedPass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> Hidden:
        """Hidden states of packed rows.

        Args:
            params: Parameters of the model.
            given: Tokens, positions and key ranges.
            mesh: Over whose axes `data` and `fsdp` the rows are sharded (`sharding.train_on`); None: XLA decides.
            device: To compile kernels for; None: the device of this machine.

        Returns:
            Opaque hidden states for `Model.head`, leaves [B, T, ...].
        """
        ...


class Model(NamedTuple):
    """A denoiser as a record of pure functions; `decode` and `train` know nothing else of it.

    init(key) -> params
    apply(params, PackedPass) -> hidden: a pass without a cache, for training and scoring.
    forward(params, Pass) -> (hidden, cache): a pass over a KV cache.
    head(params, hidden) -> logits [B, T, V], at least fp32, aligned with the canvas.
    condition(params, logits) -> self_cond of the next pass, or () for models without self-conditioning.
    part(params, hidden, first, size) -> logits of the ids first..first + size alone, as of `head`; None: the model
        computes only all of them.
    mix(params, weights [B,L,v], first) -> what the ids first..first + v add to self_cond with these weights, so that
        condition(params, x) is mix(params, softmax(x), 0); None: without self-conditioning.
    empty_cache(batch, slots) -> cache
    encodable(known[B]) -> int[B], how many of the known tokens may be written to the cache for good.
    layout(ids, prompt, fill=None, whole=None) -> Laid, a document as training sees it; with whole=False without
        the clean tokens that only the prediction of the next token needs.
    shardings: path rules, see `mercury_jax.sharding`.
    mesh: the mesh that `sharding.over` or `sharding.train_on` fixed for its passes, or None.
    """

    config: ModelConfig
    init: Callable[[Key], Params]
    apply: Apply
    forward: Forward
    head: Callable[[Params, Hidden], Array]
    condition: Callable[[Params, Array], Carry]
    empty_cache: Callable[[int, int], Cache]
    encodable: Callable[[Array], Array]
    layout: Callable[..., Laid]
    shardings: tuple[tuple[str, tuple[str | tuple[str, ...] | None, ...]], ...]
    part: Callable[..., Array] | None = None
    mix: Callable[..., Array] | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class LM:
    """A model one can talk to: functions, parameters, tokenizer and the noise it was trained with."""

    model: Model
    params: Params = field(repr=False)
    tokenizer: AnyTokenizer
    corruption: Corruption
    name: str = "unnamed"
    card: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # The rule, plan and temperature of its checkpoint, read by `decode.defaults`; empty: chosen by its noise.
    decoding: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> int:
        """Number of scalars in the parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))
