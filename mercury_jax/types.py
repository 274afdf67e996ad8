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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

if TYPE_CHECKING:
    from mercury_jax.config import ModelConfig
    from mercury_jax.noise import Corruption
    from mercury_jax.tokenizer import AnyTokenizer

Tokens = Int[Array, "*shape"]
Key = PRNGKeyArray
Params = Any  # a plain nested dict of arrays
Cache = Any  # a pytree whose every leaf has the batch axis first
Carry = Any  # what one pass hands to the next (self-conditioning), or ()


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


class Reading(NamedTuple):
    """What one pass over the vocabulary tells of each position of one row's canvas."""

    argmax: Int[Array, "L"]
    sample: Int[Array, "L"]  # a draw at the sampler's temperature
    p_argmax: Float[Array, "L"]
    p_sample: Float[Array, "L"]
    p_canvas: Float[Array, "L"]  # probability of the token that stands there now
    entropy: Float[Array, "L"]  # nats
    margin: Float[Array, "L"]  # p(first) - p(second)
    p_eos: Float[Array, "L"]  # probability of the end of text; 0 where nothing ends the answer


class View(NamedTuple):
    """What a decoding rule may look at: one row, no batch axis. L is the active window of the canvas."""

    canvas: Int[Array, "L"]
    answer: Int[Array, "L"]  # what would have been emitted after the step before
    reading: Reading
    blind: Reading  # the same, read by masks that cannot see the token they stand for; rules ask for it
    logits: Float[Array, "L V"]  # shaped; only for parts that say so (`parts.Part.whole`)
    editable: Bool[Array, "L"]  # in the active block and not given by the user
    masked: Bool[Array, "L"]  # editable and still the mask id; under uniform noise all that is editable
    n: Int[Array, ""]  # used positions of the window
    room: Int[Array, ""]  # positions by which the window may still grow
    noise: Int[Array, "L"]  # fresh tokens from the prior at time s; the mask id where there is one
    t: Float[Array, ""]  # the time of this canvas, 1 = noise
    s: Float[Array, ""]  # the time after this step, s < t
    keep_t: Float[Array, ""]  # alpha(t)
    keep_s: Float[Array, ""]  # alpha(s)
    step: Int[Array, ""]  # steps taken on this block
    steps: Int[Array, ""]  # steps that the block may take
    eos: Int[Array, ""]  # the id that ends the answer, -1 for none
    at: Int[Array, ""]  # position of the window's first token, counted from the end of the prompt
    said: Int[Array, "V"]  # how often each id stands in the answer before the window
    told: Int[Array, "V"]  # how often each id stands in the prompt
    first: Any = 0  # the id of the logits' first column, where a shaper sees a part of the vocabulary


class Proposal(NamedTuple):
    """What a rule returns: the next state of the chain, and what we would emit now.

    A rule that inserts or deletes also says how many positions are used now, and for each position
    which old one it continues (-1: it is new); the machine moves the given tokens and their flags
    along. Other rules leave `n` as the view's and `source` as 0..L-1, as `settle` does.
    """

    canvas: Int[Array, "L"]
    answer: Int[Array, "L"]
    n: Int[Array, ""]
    source: Int[Array, "L"]  # old index of each position, -1 = new


class Model(NamedTuple):
    """A denoiser as a record of pure functions; `decode` and `train` know no more of it.

    init(key) -> params
    apply(params, tokens[B,T], positions[B,T], ranges[B,T,R,2], carry) -> hidden
        one pass without a cache: training, scoring.
    Both take time[B] as well (apply also [B,T]) where `config.timed`: the time of the noise, 0 for clean text.
    forward(params, tokens[B,T], cache, start[B], n[B], end[B], encoding[B], carry, blind=None)
            -> (hidden, cache)
        tokens stand at absolute positions start..start+n; keys past `end` are hidden. Rows that
        encode use the family's causal pattern, rows that denoise see all of [0, end). With `blind`
        (a mask id) T more hidden states follow, of masks that each see all but the token at their
        position; their keys lie in the T slots behind `end`.
    head(params, hidden) -> logits, at least fp32, aligned with the canvas; hidden is opaque, its
        leaves are [B, T, ...].
    condition(params, shaped_logits) -> carry, or () for models without self-conditioning.
    part(params, hidden, first, size) -> logits of the ids first..first + size alone, as of `head`; None: the model
        makes only all of them.
    mix(params, weights [B,L,v], first) -> what the ids first..first + v add to the carry with these weights, so that
        condition(params, x) is mix(params, softmax(x), 0); None: without self-conditioning.
    empty_cache(batch, slots) -> cache
    encodable(known[B]) -> int[B], how many of the known tokens may be encoded for good.
    layout(ids, prompt, fill=None, whole=None) -> Laid, a document as training sees it; with whole=False without
        the clean tokens that only the prediction of the next token needs.
    shardings: path rules, see `mercury_jax.sharding`.
    mesh: the one over which its passes are spread by hand (`sharding.over`), or None.
    """

    config: ModelConfig
    init: Callable[[Key], Params]
    apply: Callable[..., Array]
    forward: Callable[..., tuple[Array, Cache]]
    head: Callable[[Params, Array], Array]
    condition: Callable[[Params, Array], Carry]
    empty_cache: Callable[[int, int], Cache]
    encodable: Callable[[Array], Array]
    layout: Callable[..., Laid]
    shardings: tuple[tuple[str, tuple[str | tuple[str, ...] | None, ...]], ...]
    part: Callable[..., Array] | None = None
    mix: Callable[..., Array] | None = None
    mesh: Any = None


@dataclass(frozen=True)
class LM:
    """A model one can talk to: functions, parameters, tokenizer and the noise it was trained with."""

    model: Model
    params: Params = field(repr=False)
    tokenizer: AnyTokenizer
    corruption: Corruption
    name: str = "unnamed"
    card: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # How it asks to be decoded, by `decode.defaults`; empty: as its noise suggests.
    decoding: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> int:
        """Number of scalars in the parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))
