"""Records that the packages exchange, the protocols of a model, and the legend of shapes.

`Model` is the interface between `models` (which builds it), `decode` and `training` (which call it). `Pass` and
`PackedPass` are the arguments of its two kinds of forward pass, `View` and `Proposal` those of a decoding rule, `Batch`
and `Loss` those of a training objective.

Shape legend of the package's signatures; `ops` names further letters where it uses them:

    B  rows of a batch       T  positions of one forward pass     S  slots of a KV cache
    W  positions of a canvas L  positions of a rule's window      V  vocabulary
    H  query heads           G  key/value heads                   K  width of one head
    D  model width           F  feed-forward width                N  layers
    E  experts               k  experts chosen for a token        R  key ranges of a query (2)
    P  prompts, pieces or chunks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.config import DrafterConfig, ModelConfig
    from mercury_jax.images import VisionConfig
    from mercury_jax.noise import Corruption
    from mercury_jax.tokenizer import AnyTokenizer

Count = TypeVar("Count", int, np.ndarray)  # an int for one piece, an array [P] for several
Tokens = Int[Array, "*shape"]
Key = PRNGKeyArray
Params = Any  # a nested dict of arrays
Cache = Any  # a pytree whose every leaf has the batch axis first
DraftMethod = Literal["same_seed", "rejection"]  # how drafts are accepted, see `mj.Draft`
SelfCond = Any  # self-conditioning: what `Model.condition` returns for the next pass, or ()
Hidden = Any  # hidden states as `Model.head` reads them, leaves [B, T, ...]


def accumulation_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype for norms, exponentials and sums: fp32, or fp64 if `dtype` is fp64."""
    return jnp.promote_types(dtype, jnp.float32)


def shown(value: Any) -> str:
    """Writes a field of a record in few characters, for `__repr__`.

    Args:
        value: A value, or a pytree of arrays, tracers or placeholders.

    Returns:
        A small concrete array as numbers, another one as its dtype and shape; a tree as its number of arrays.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        known = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
        donated = isinstance(value, jax.Array) and known and value.is_deleted()
        if known and not donated and value.size <= 4:
            return str(value)
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    leaves = jax.tree.leaves(value)
    if any(leaf is value for leaf in leaves) or not any(hasattr(leaf, "shape") for leaf in leaves):
        return repr(value)
    return f"<{len(leaves)} arrays>"


def shortened(text: str, most: int = 200) -> str:
    """Quotes a text for a `__repr__`.

    Args:
        text: The text.
        most: Largest number of characters; of a longer text the first and the last ones are kept.

    Returns:
        The quoted text.
    """
    return repr(text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}")


def fields_shown(record: Any, names: Sequence[str]) -> str:
    """Writes a record for its `__repr__`: the name of its class, and some of its fields by `shown`.

    Args:
        record: A NamedTuple or dataclass.
        names: Fields to write.

    Returns:
        Such as "Frame(start=[3], answer=int32[1,32])".
    """
    return f"{type(record).__name__}({', '.join(f'{name}={shown(getattr(record, name))}' for name in names)})"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class LoraWeight:
    """A matrix base + scale * a b that is never formed (LoRA, arXiv 2106.09685): x base + scale * (x a) b.

    In a tree of parameters it replaces the base matrix. `training.lora` creates and trains it, `models.ops` and
    `models.moe` multiply by it, `hub.adapters` saves and loads its factors.

    Attributes:
        base: [batch..., inputs..., outputs...]; the batch axes are the experts, if any.
        a: [batch..., inputs..., rank].
        b: [batch..., rank, outputs...].
        scale: Factor of the product of `a` and `b`: alpha / rank.
    """

    base: Any
    a: Array
    b: Array
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.base.shape


class Batch(NamedTuple):
    """Packed training rows, laid out for the model's attention pattern (`Model.layout`).

    A row is a sequence of documents. Each document is its clean tokens (encoded, never noised) followed by its
    canvases (noised).
    """

    tokens: Int[Array, "B T"]  # clean ids everywhere; `corrupt` noises the editable ones
    positions: Int[Array, "B T"]  # absolute position in the document, for RoPE
    ranges: Int[Array, "B T R 2"]  # key ranges [start, end) inside the row; empty at padding
    editable: Bool[Array, "B T"]  # may be noised, and counts in the loss
    canvas: Int[Array, "B T"]  # index of the canvas within the row, -1 outside of canvases


class LaidOutDocument(NamedTuple):
    """One document laid out for an attention pattern, in numpy; packed rows are concatenations of these."""

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    ranges: np.ndarray  # int32 [T, 2, 2], relative to the document's first slot
    editable: np.ndarray  # bool [T]
    canvas: np.ndarray  # int32 [T], -1 outside of canvases


class Loss(NamedTuple):
    """The result of an objective. The loss of a batch is sum(per_example) / sum(weight).

    Sums instead of means, so that gradient accumulation and data parallelism do not change the loss.
    """

    per_example: Float[Array, "B"]  # nats, summed over the row's scored tokens
    weight: Float[Array, "B"]  # what the sum is divided by: scored tokens, or documents
    metrics: Mapping[str, tuple[Array, Array]]  # name -> (numerator, denominator), both scalars


class TokenStats(NamedTuple):
    """The numbers that rules need instead of logits, for each position of one row's canvas.

    Computed from all logits at once by `decode.token_stats`, or over chunks of a large vocabulary by
    `decode.chunked_vocab`. All values are computed after the logits processors. Processors that only truncate the
    distribution (`LogitsProcessor.draws_only`: top-k, top-p, min-p) are an exception: `sample` is drawn from the
    truncated distribution, and all probabilities are those of the whole distribution.

    Attributes:
        argmax: The most probable token of each position.
        sample: A draw at the sampler's temperature; the argmax at temperature 0.
        p_argmax: Probability of `argmax`.
        p_sample: Probability of `sample`.
        p_canvas: Probability of the token that the canvas holds now.
        entropy: Entropy of the distribution in nats.
        margin: Probability of the first token less that of the second.
        p_eos: Probability of the end of text; 0 if no id ends the answer.
    """

    argmax: Int[Array, "L"]
    sample: Int[Array, "L"]
    p_argmax: Float[Array, "L"]
    p_sample: Float[Array, "L"]
    p_canvas: Float[Array, "L"]
    entropy: Float[Array, "L"]
    margin: Float[Array, "L"]
    p_eos: Float[Array, "L"]


class View(NamedTuple):
    """The arguments of rules, logits processors and stopping criteria: one row, no batch axis.

    L is the length of the active window: the part of the canvas that the current pass may change.

    Attributes:
        canvas: State of the diffusion process: tokens, and masks or noise.
        answer: Tokens that would have been emitted if generation had ended after the previous step.
        stats: Statistics of the prediction of each position; None while logits processors run.
        leave_one_out: The same, predicted by masks that do not see the token at their own position; only
            for rules with `leave_one_out`.
        logits: Logits after the processors, but those with `draws_only`; only for parts that set
            `needs_logits`.
        editable: Whether the rule may change a position: one of the active block, or of the `Plan.revise` blocks before
            it, that the user has not given.
        masked: Whether a position is editable and still the mask id; under uniform noise all editable positions.
        used: Positions of the window in use, the first ones.
        growth: Positions by which the window may still grow.
        noise: Fresh tokens from the prior at time s; the mask id if the noise has one.
        t: Time of this canvas, 1 = noise.
        s: Time after this step, s < t.
        alpha_t: Share of the signal at t, alpha(t).
        alpha_s: alpha(s).
        step: Denoising steps taken on this block.
        steps: Denoising steps that the block may take.
        eos: The id that ends the answer, -1 for none.
        position: Position of the window's first token, counted from the end of the prompt.
        output_counts: How often each id occurs in the answer before the window.
        prompt_counts: How often each id occurs in the prompt.
        first_id: Id of the first logits column, if a processor gets one chunk of V.
        hidden: Hidden states [L, D], or the output of an extra head; for rules with `needs_hidden`.
        draw_logits: Logits after all processors, from which tokens are drawn. `logits` itself if no processor
            has `draws_only`.
    """

    canvas: Int[Array, "L"]
    answer: Int[Array, "L"]
    stats: TokenStats
    leave_one_out: TokenStats
    logits: Float[Array, "L V"]
    editable: Bool[Array, "L"]
    masked: Bool[Array, "L"]
    used: Int[Array, ""]
    growth: Int[Array, ""]
    noise: Int[Array, "L"]
    t: Float[Array, ""]
    s: Float[Array, ""]
    alpha_t: Float[Array, ""]
    alpha_s: Float[Array, ""]
    step: Int[Array, ""]
    steps: Int[Array, ""]
    eos: Int[Array, ""]
    position: Int[Array, ""]
    output_counts: Int[Array, "V"]
    prompt_counts: Int[Array, "V"]
    first_id: int | Int[Array, ""] = 0
    hidden: Any = None
    draw_logits: Float[Array, "L V"] = None  # type: ignore[assignment]


class Proposal(NamedTuple):
    """The result of a rule: the next canvas, and the answer if generation ended now.

    A rule that inserts or deletes positions also sets `used`, the new number of positions, and `source`, the old index
    of each new position; the decoder uses `source` to move the tokens given by the user, and all flags. Other rules
    keep the view's `used` and `source` = 0..L-1, as `accept` and `propose` do.

    Attributes:
        canvas: State of the diffusion process after this step.
        answer: Tokens that would be emitted if generation ended after this step.
        used: Positions of the window in use, the first ones.
        source: Old index of each position; -1: the position is new.
    """

    canvas: Int[Array, "L"]
    answer: Int[Array, "L"]
    used: Int[Array, ""]
    source: Int[Array, "L"]


class Device(NamedTuple):
    """The accelerator that a program is compiled for, if it differs from the accelerator of this machine.

    Attributes:
        kind: "sm_90a" (Hopper), "sm_100a" (Blackwell), "tpu", or another GPU. The kernels for this kind
            are used.
        interpret: Parameters of the interpreter that runs the kernels on a CPU (Mosaic GPU's `InterpretGPUParams`,
            or True for a TPU); None compiles them.
    """

    kind: str
    interpret: Any = None


class LeaveOneOut(NamedTuple):
    """Additional masks of a pass, each of which predicts one position without seeing the token there.

    Each additional mask has the RoPE position of the token that it predicts. It attends to all keys of the pass except
    the key of that token, and to its own key. The tokens of the pass attend to none of these masks. The keys of the
    masks are written to the slots from `Pass.end` on, where no later pass reads them.

    Attributes:
        mask: Id of the mask.
        columns: Indices into `Pass.tokens` of the positions that are predicted [B, L]; -1 for none. Rows that encode
            have none.
        joint: Whether these masks also attend to each other, like the block of shadow masks of WINO (arXiv 2507.18578).
    """

    mask: int | Int[Array, ""]
    columns: Int[Array, "B L"]
    joint: bool | Bool[Array, ""] = False


class Pass(NamedTuple):
    """One forward pass over a KV cache: the arguments of `Model.forward`, a pytree.

    The tokens of row b have the absolute positions start[b] .. start[b] + used[b] - 1, which are also their cache
    slots; the rest of the T tokens are padding, which is neither read nor written. Keys at and after end[b] are hidden.

    Attributes:
        tokens: Ids [B, T].
        cache: From `Model.empty_cache`, with the keys and values that earlier passes wrote.
        start: Position of each row's first token [B].
        used: Number of tokens that each row uses, of its T [B]; 0 leaves the row and its cache unchanged.
        end: End of the keys that each row attends to [B].
        encoding: Which rows [B] or tokens [B, T] are committed text, with the model's causal pattern; the other tokens
            are a canvas, and attend to all of [0, end). In a row that holds both, the canvas comes last.
        self_cond: For models with self-conditioning, the result of `Model.condition` on the logits of the previous
            pass, leaves [B, T, ...]; () for none.
        time: For models with `config.timed`, the time of the noise of each row [B] or token [B, T] in 0..1, 0 for clean
            text; otherwise None.
        leave_one_out: Additional masks; their L hidden states follow the T hidden states of the tokens. None: no such
            masks.
        positions: Absolute positions of the tokens [B, T], rising in each row; only the first `used` are read. None:
            start .. start + T - 1.
        slots: Cache slots to which the keys are written [B, T]. They differ from the positions in a bidirectional row
            from which positions are left out; all slots in [0, end) are attended to. None: the positions.
        length: Largest number of positions that the row may get, prompt and answer [B], on which RoPE of the kinds
            dynamic and longrope depends. None: `end`.
        images: For models with `Model.vision`, the soft tokens among the tokens; None: there are none.
    """

    tokens: Int[Array, "B T"]
    cache: Cache
    start: Int[Array, "B"]
    used: Int[Array, "B"]
    end: Int[Array, "B"]
    encoding: Bool[Array, "B"] | Bool[Array, "B T"]
    self_cond: SelfCond = ()
    time: Float[Array, "B"] | Float[Array, "B T"] | None = None
    leave_one_out: LeaveOneOut | None = None
    positions: Int[Array, "B T"] | None = None
    slots: Int[Array, "B T"] | None = None
    length: Int[Array, "B"] | None = None
    images: ImageTokens | None = None


class ImageTokens(NamedTuple):
    """The soft tokens of images in a pass. A pass that has a soft token of an image has all those after it, too.

    Attributes:
        embeddings: What replaces the embedding of a token [B, T, D]; only read where `end` > 0.
        start: Position of the first soft token of the same image [B, T].
        end: Position after its last one [B, T]; 0: the token is not a soft token.
    """

    embeddings: Float[Array, "B T D"]
    start: Int[Array, "B T"]
    end: Int[Array, "B T"]


class PackedPass(NamedTuple):
    """One forward pass over packed rows without a cache: the arguments of `Model.apply`, a pytree.

    Attributes:
        tokens: Ids [B, T], laid out by `Model.layout`.
        positions: Position of each token in its document [B, T], for RoPE.
        ranges: Key ranges [start, end) inside the row [B, T, R, 2].
        self_cond: As in `Pass`.
        time: For models with `config.timed`, the time of the noise of each row [B] or position [B, T]; otherwise None.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    ranges: Int[Array, "B T R 2"]
    self_cond: SelfCond = ()
    time: Float[Array, "B"] | Float[Array, "B T"] | None = None


class Routing(NamedTuple):
    """The output of the router of one mixture-of-experts layer in a packed pass.

    Attributes:
        scores: Softmax or sigmoid of the router's logits.
        experts: Ids of the `Experts.active` experts chosen for each token.
    """

    scores: Float[Array, "B T E"]
    experts: Int[Array, "B T k"]


@runtime_checkable
class Forward(Protocol):
    """`Model.forward`: one pass over a KV cache."""

    def __call__(
        self, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> tuple[Hidden, Cache]:
        """Computes hidden states, and writes the keys and values of this pass to the cache.

        Args:
            params: Parameters of the model.
            given: Tokens, cache and positions.
            mesh: Mesh over which heads, hidden units and experts are divided explicitly (`sharding.with_mesh`); None:
                XLA's partitioner divides them.
            device: Device to compile kernels for; None: the device of this machine.

        Returns:
            Opaque hidden states for `Model.head`, leaves [B, T, ...] (T + L with `leave_one_out`), and the
            cache.
        """
        ...


@runtime_checkable
class Apply(Protocol):
    """`Model.apply`: one pass without a cache, for training and scoring. Differentiable."""

    def __call__(
        self,
        params: Params,
        given: PackedPass,
        *,
        mesh: Mesh | None = None,
        device: Device | None = None,
        routing: bool = False,
    ) -> Hidden:
        """Computes hidden states of packed rows.

        Args:
            params: Parameters of the model.
            given: Tokens, positions and key ranges.
            mesh: Mesh over whose axes `data` and `fsdp` the rows stay sharded (`sharding.with_training_mesh`); None:
                XLA's partitioner decides.
            device: Device to compile kernels for; None: the device of this machine.
            routing: Also return the routers' outputs, for objectives that balance experts. Models without experts need
                not have this argument.

        Returns:
            Opaque hidden states for `Model.head`, leaves [B, T, ...]. With `routing`: (hidden states, one `Routing`
            per layer with experts).
        """
        ...


@runtime_checkable
class HeadChunk(Protocol):
    """`Model.head_chunk`: logits of the ids first .. first + size - 1 only, or of those in an array `first` [size]."""

    def __call__(self, params: Params, hidden: Hidden, first: int | Int[Array, "*n"], size: int) -> Array:
        """Computes logits [B, T, size], equal to these columns of `Model.head`; `first` may be traced."""
        ...


@runtime_checkable
class EmbedMixture(Protocol):
    """`Model.embed_mixture`: the part of the self-conditioning from one chunk of ids, to be summed over chunks."""

    def __call__(self, params: Params, weights: Array, first: int | Int[Array, ""]) -> Array:
        """Computes the weighted sum [B, L, D] of the embeddings of ids first .. first + v - 1, weights [B, L, v].

        condition(params, x) equals embed_mixture(params, softmax(x), 0).
        """
        ...


@runtime_checkable
class Layout(Protocol):
    """`Model.layout`: lays out one document for training and scoring."""

    def __call__(
        self, ids: np.ndarray, prompt: int, fill: int | None = None, all_clean: bool | None = None
    ) -> LaidOutDocument:
        """See `models.masks.layout`: ids [n], of which the first `prompt` are never noised."""
        ...


class RowPieces(NamedTuple):
    """Pieces of running text that fill training rows, in the order of rows and positions; all int64 [P].

    Attributes:
        row: Row of each piece; every row has at least one.
        start: Index of the piece's first token in the array of tokens.
        length: Number of tokens of the piece.
        prompt: Number of tokens at its start that are never noised.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    prompt: np.ndarray


@dataclass(frozen=True, slots=True)
class PieceSizes(Generic[Count]):
    """Number of row positions that each piece takes, with its last canvas completed; arrays [P], or ints for one piece.

    Attributes:
        first: Position in the document at which the first canvas starts.
        canvases: Number of canvases of `block` tokens; in a bidirectional model, its one canvas counted in blocks.
        clean: Number of clean positions before the canvases.
        slots: Number of all positions.
    """

    first: Count
    canvases: Count
    clean: Count
    slots: Count


@runtime_checkable
class Spans(Protocol):
    """Narrows the editable positions of each of C canvases, as training for infilling does."""

    def __call__(self, piece: np.ndarray, editable: np.ndarray) -> np.ndarray:
        """Maps the piece [C] and the editable range [from, to) [C, 2] of each canvas to narrower ranges [C, 2]."""
        ...


@runtime_checkable
class RowLayout(Layout, Protocol):
    """A `Layout` that also lays out many rows at once, for data sources that fill whole rows (`models.row_layout`)."""

    @property
    def block(self) -> int:
        """Tokens of a canvas."""
        ...

    def first_canvas(self, prompts: Count) -> Count:
        """Finds the position at which the first canvas starts, from prompt lengths [P] or the length of one prompt."""
        ...

    def sizes(self, lengths: Count, prompts: Count) -> PieceSizes[Count]:
        """Counts the positions of pieces whose last canvas is completed.

        Args:
            lengths: Number of tokens of each piece [P], or of one piece.
            prompts: Number of tokens at its start that are never noised [P].

        Returns:
            The sizes.
        """
        ...

    def fitting(self, room: int, prompt: int) -> int:
        """Counts the tokens of the longest piece whose whole canvases fit into `room` positions.

        Args:
            room: Number of free positions.
            prompt: Number of tokens at the piece's start that are never noised.

        Returns:
            Number of tokens; 0 if not even one canvas fits.
        """
        ...

    def rows(
        self,
        tokens: np.ndarray,
        pieces: RowPieces,
        shape: tuple[int, int],
        *,
        fill: int,
        pad: int,
        spans: Spans | None = None,
    ) -> Batch:
        """Lays out rows of pieces.

        Args:
            tokens: Tokens of all pieces, int32 [N].
            pieces: The pieces; those of a row fit into its T positions, and each row has at least one.
            shape: (B rows, T positions).
            fill: Id that completes the last canvas of a text.
            pad: Id that fills the rest of a row.
            spans: Narrows what is editable in each canvas; None keeps all of it.

        Returns:
            numpy arrays [B, T], equal to the result of laying out the pieces one by one and packing them.
        """
        ...


class Features(NamedTuple):
    """Hidden states that also hold the outputs of some blocks, of a model from `Model.features`.

    Attributes:
        last: The hidden states that the head reads.
        blocks: Outputs of the chosen blocks, concatenated; () where nothing but the head reads the record.
    """

    last: Float[Array, "B T D"]
    blocks: Float[Array, "B T nD"] | tuple[()]


class DrafterPasses(NamedTuple):
    """The passes of a block drafter that was joined to a model (`models.drafter.join`); both take joined parameters.

    Attributes:
        config: Sizes of the drafter.
        propose: propose(params, pass) -> (hidden states, cache). A pass over the drafter's part of the cache, whose
            tokens are a block; a negative token is a mask. Each position predicts its own token.
        apply: apply(params, blocks, positions, pass) -> hidden states [B, T, ...]. A pass without a cache over many
            blocks, for training. It reads `Features.blocks` of the target at `positions`; the keys of the blocks come
            after those of the target in the key ranges.
        head: head(params, hidden states of the drafter) -> logits of the drafted ids [B, T, v], `config.ids` or all.
        target: The model alone.
        acceptance: How drafts are accepted at a temperature above 0; see `mj.Draft.method`.
    """

    config: DrafterConfig
    propose: Callable[[Params, Pass], tuple[Hidden, Cache]]
    apply: Callable[[Params, Array, Array, PackedPass], Hidden]
    head: Callable[[Params, Hidden], Array]
    target: Model
    acceptance: DraftMethod = "same_seed"

    @property
    def block(self) -> int:
        """Positions of a block: the last committed token, and the draft."""
        return self.config.block


class LookupDrafter(NamedTuple):
    """Drafts by what followed the last tokens earlier in the text (`decode.methods.prompt_lookup`).

    Attributes:
        block: Positions of a block: the last committed token, and the draft.
        ngram: Most tokens of a match.
    """

    block: int = 8
    ngram: int = 3


class SoftMasking(NamedTuple):
    """Settings of soft masking; see `mercury_jax.soft_masking`, which checks them."""

    scale: float
    steepness: float
    centre: float
    top_k: int


class Vision(NamedTuple):
    """The vision tower of a model, as pure functions. Its parameters are the subtree "vision" of the model's.

    Attributes:
        config: Sizes, and how images become patches and placeholders.
        init: init(key) -> the subtree.
        encode: encode(params of the model, patches [B, T, C], positions [B, T, 2]) -> soft tokens [B, P, D], of which
            each image has as many as `images.Image.tokens`, the first ones.
    """

    config: VisionConfig
    init: Callable[[Key], Params]
    encode: Callable[[Params, Array, Array], Array]


class Model(NamedTuple):
    """A denoiser as a record of pure functions. `decode` and `training` use a model only through this record.

    Attributes:
        config: Sizes and attention pattern.
        init: init(key) -> params.
        apply: A pass without a cache, for training and scoring.
        forward: A pass over a KV cache.
        head: head(params, hidden) -> logits [B, T, V], at least fp32, aligned with the canvas.
        condition: condition(params, logits [B, L, V]) -> self_cond of the next pass, or () for models without
            self-conditioning. params=None gives zeros of the right shape.
        empty_cache: empty_cache(batch, slots) -> cache.
        encodable: encodable(committed [B]) -> number of committed tokens whose keys no later token changes [B], so that
            they are written to the cache once.
        layout: Lays out one document for training.
        shardings: Path rules of the parameters, see `mercury_jax.sharding`.
        head_chunk: Computes the logits of a chunk of the vocabulary; None: the model can only compute all of them.
        embed_mixture: Computes the part of self_cond from a chunk of ids; None: the model has no self-conditioning.
        soft_masked: soft_masked(settings) -> the model that feeds masks as mixtures of embeddings
            (`mercury_jax.soft_masking`); None: the architecture does not support it, or soft masking is already on.
        rings: rings(model, longest_pass) -> the model with a smaller cache in layers with a sliding window
            (`models.cache.with_rings`); None: it is not supported.
        mesh: Mesh that `sharding.with_mesh` or `sharding.with_training_mesh` set for the passes, or None.
        hides_padding: Whether tokens past `Pass.used` are hidden, so that rows of different lengths can share a pass.
        reuses_keys: Whether a pass over part of a canvas reads the other keys from the cache (`Plan.refresh`).
        leave_one_out: Whether `Pass.leave_one_out` is supported.
        features: features(blocks) -> the model whose hidden states are `Features` of these blocks; None: its hidden
            states between blocks cannot be read.
        drafter: How drafts are made that the model verifies: the passes of a block drafter that was joined to it
            (`models.drafter.join`), or a `LookupDrafter`. None: there are no drafts.
        vision: Computes the soft tokens of images; None: the model reads text only.
    """

    config: ModelConfig
    init: Callable[[Key], Params]
    apply: Apply
    forward: Forward
    head: Callable[[Params, Hidden], Array]
    condition: Callable[[Params | None, Array], SelfCond]
    empty_cache: Callable[[int, int], Cache]
    encodable: Callable[[Array], Array]
    layout: Layout
    shardings: tuple[tuple[str, tuple[str | tuple[str, ...] | None, ...]], ...]
    head_chunk: HeadChunk | None = None
    embed_mixture: EmbedMixture | None = None
    soft_masked: Callable[[SoftMasking], Model] | None = None
    rings: Callable[[Model, int], Model] | None = None
    mesh: Mesh | None = None
    hides_padding: bool = True
    reuses_keys: bool = True
    leave_one_out: bool = True
    features: Callable[..., Model] | None = None
    drafter: DrafterPasses | LookupDrafter | None = None
    vision: Vision | None = None

    def __repr__(self) -> str:
        c = self.config
        sizes = f"{c.layers} layers of width {c.width}, vocabulary {c.vocab}"
        return f"Model({_architecture(c)}, {sizes}, {_decoded(c)})"


@dataclass(frozen=True)
class LM:
    """A loaded language model: functions, parameters, tokenizer, and the noise of its training.

    Attributes:
        model: The pure functions.
        params: Parameters of the functions.
        tokenizer: Encodes text to ids and decodes ids to text.
        corruption: The forward process that the model was trained to reverse.
        name: Name of the checkpoint.
        card: Metadata of the checkpoint.
        decoding: The sampling settings that the checkpoint's authors use.
    """

    model: Model
    params: Params = field(repr=False)
    tokenizer: AnyTokenizer
    corruption: Corruption
    name: str = "unnamed"
    card: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Rule, plan and temperature of the checkpoint, read by `decode.defaults`; empty: chosen by the kind of noise.
    decoding: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> int:
        """Number of scalars in the parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        # The leaves may be tracers or shapes; or placeholders of a transformation, which have no size.
        leaves = jax.tree.leaves(self.params)
        counted = (
            [f"{_rounded(self.parameters)} parameters"] if all(hasattr(x, "size") for x in leaves) else []
        )
        counted = counted if leaves else ["without parameters"]
        c = self.model.config
        noise = [] if c.autoregressive else [f"{self.corruption.kind} noise"]
        return f"LM({self.name}: {', '.join([*counted, _architecture(c), *noise, _decoded(c)])})"


@dataclass(frozen=True)
class BlockDrafter:
    """A loaded block drafter: the argument `draft=` of `mj.sample` for the model that it was trained for.

    Attributes:
        config: Sizes of the drafter.
        target: What it was trained for: vocab, width and layers of the model, and the fingerprint of its tokenizer.
        params: Parameters of the drafter.
        join: join(model) -> the model with the drafter, whose parameters are {"target": ..., "drafter": ...}.
        name: Name of the checkpoint.
        method: How drafts are accepted at a temperature above 0; see `mj.Draft.method`.
    """

    config: DrafterConfig
    target: Mapping[str, Any]
    params: Params = field(repr=False)
    join: Callable[[Model], Model] = field(repr=False)
    name: str = "unnamed"
    method: DraftMethod = "same_seed"

    def __post_init__(self) -> None:
        if self.method not in get_args(DraftMethod):
            raise refuse("draft.method", self.method, ", ".join(get_args(DraftMethod)))


def _rounded(count: int) -> str:
    """A count in thousands, millions or billions: 1.8M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _architecture(config: ModelConfig) -> str:
    """The architecture of a config by the name of its class, which says it: transformer, gemma, dit."""
    name = type(config).__name__.removesuffix("Config").lower()
    return "transformer" if name == "model" else name


def _decoded(config: ModelConfig) -> str:
    """How many tokens of a model are decoded together, and how many it sees."""
    blocks = "autoregressive" if config.autoregressive else f"blocks of {config.block}"
    return f"{blocks}, context {config.context}"


class _Fixed(NamedTuple):
    """The static part of an `LM` as a pytree: all fields except the parameters.

    Fields are compared by value, except the tokenizer, whose comparison by value would be slow.
    """

    lm: LM

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Fixed):
            return NotImplemented
        a, b = self.lm, other.lm
        same = a.model == b.model and a.corruption == b.corruption and a.name == b.name
        return same and a.tokenizer is b.tokenizer and a.card == b.card and a.decoding == b.decoding

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.lm.model, self.lm.corruption, self.lm.name))


# An LM is a pytree whose leaves are its parameters, so that `jit`, `grad` and `tree.map` accept one.
jax.tree_util.register_pytree_with_keys(
    LM,
    lambda lm: (((jax.tree_util.GetAttrKey("params"), lm.params),), _Fixed(replace(lm, params=None))),
    lambda fixed, children: replace(fixed.lm, params=next(iter(children))),
)
