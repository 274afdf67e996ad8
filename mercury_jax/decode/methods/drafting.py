"""Lossless drafting across models: a diffusion model drafts a block, an autoregressive model verifies it in one pass.

Each step is one round of drafting and verification. The drafter has a `State` of its own, with its own config, sampler
and KV cache: it is the slot of this method in the verifier's state. `draft_block` copies the verified text into it and
repeats the drafter's own step until every row has a block. The verifier then runs one causal pass over the last
committed token and the draft, as in `self_speculation`, and accepts the longest prefix of the draft that it agrees
with.

Two methods define this agreement at a temperature above 0; for argmax they are the same:

same_seed   The verifier samples each token with the uniform of its position, and accepts draft tokens that are equal to
            its samples. The text is, token for token, the one that the verifier alone samples with this seed. The
            drafter uses the same uniforms, so that two similar distributions mostly give the same token.
rejection   A draft token x is accepted with probability min(1, p(x) / q(x)); otherwise a token is sampled from
            max(p - q, 0), normalised (speculative sampling, arXiv 2211.17192 and 2302.01318). The text has the
            verifier's distribution, but differs from the verifier's own text with this seed. For each token, no exact
            method has a higher probability of acceptance.

For `rejection`, q must be the distribution from which a draft token was sampled, given everything that the drafter
knew. The probabilities at which a rule accepted its tokens are not q: the rule selects samples by confidence, and later
samples depend on tokens to their right. Therefore the last step of a block samples all positions that are still open
independently of each other, and q is their distribution in that step. Tokens accepted in earlier steps count as
deterministic drafts, with q = 1. Both cases are exact with any rule. With one step per block, or under uniform noise,
every token is of the first kind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode.denoise import open_canvases
from mercury_jax.decode.inputs import MAX_TOKENS, check_lm, check_params, check_temperature, check_whole
from mercury_jax.decode.methods.acceptance import DRAFT_KEY, Proposals, accept_or_redraw, count_drafts
from mercury_jax.decode.methods.causal import idle_frame, verify, verifying_pass
from mercury_jax.decode.passes import prefill
from mercury_jax.decode.sampler import Memory, Param, Rule, SamplerLike, check_sampler
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    first_state,
    prefill_width,
    update_rows,
)
from mercury_jax.sharding import varying, varying_axes
from mercury_jax.types import LM, DraftMethod, Key, Model, Params, Proposal, View, accumulation_dtype


@dataclass(frozen=True)
class Draft:
    """How a diffusion model drafts for an autoregressive one: the argument `draft=` of `mj.sample`.

    Attributes:
        lm: The drafter, a diffusion model with the tokenizer and the vocabulary of the verifier.
        tokens: Maximum tokens of a draft; at most the block length of the drafter's training.
        steps: Denoising steps per draft.
        sampler: Rule and processors of the drafter. None: `confidence` for absorbing noise or `entropy_bound` for
            uniform noise, with the processors of the verifier.
        temperature: Sampling temperature of the drafter, one number or one per prompt. None: that of the verifier.
        method: "same_seed": the text is the one that the verifier alone samples with this seed. "rejection": the text
            has the verifier's distribution, and more draft tokens are accepted.

    Example:
        >>> out = mj.sample(verifier, prompts, draft=mj.Draft(drafter, tokens=16, steps=2))
        >>> out.forwards, out.draft.forwards, out.draft.acceptance
    """

    lm: LM = field(repr=False)
    tokens: int = 16
    steps: int = 1
    sampler: SamplerLike | None = None
    temperature: Param | None = None
    method: DraftMethod = "same_seed"

    def __post_init__(self) -> None:
        if not isinstance(self.lm, LM):
            raise refuse("draft.lm", self.lm, "a model as mj.load() returns it")
        check_whole("draft.tokens", self.tokens, 1, MAX_TOKENS)
        check_whole("draft.steps", self.steps, 1, MAX_TOKENS)
        if self.method not in get_args(DraftMethod):
            raise refuse("draft.method", self.method, ", ".join(get_args(DraftMethod)))
        if self.temperature is not None:
            check_temperature(self.temperature)
        config = self.lm.model.config
        if config.autoregressive or (config.pattern == "block_causal" and config.block == 1):
            raise refuse("draft.lm", self.lm.name, "a diffusion model: this one decides one token a pass")
        if config.pattern != "bidirectional" and self.tokens > config.block:
            raise refuse("draft.tokens", self.tokens, f"1..{config.block}: the block of {self.lm.name}")
        if self.sampler is not None:
            sampler = check_sampler(self.sampler)
            if sampler.speculate is not None or sampler.rule.variable_length:
                allowed = "a rule that accepts tokens in place, such as rules.confidence()"
                raise refuse("draft.sampler", sampler.rule.name, allowed)


@dataclass(frozen=True)
class DraftOutput:
    """The cost of the drafts and how many of their tokens were accepted, one entry per row."""

    forwards: np.ndarray  # int [B], passes of the drafter, both denoising and encoding of verified tokens
    proposed: np.ndarray  # int [B], draft tokens that the verifier has processed
    accepted: np.ndarray  # int [B], draft tokens that the verifier has accepted

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens of all rows divided by the proposed ones."""
        return float(self.accepted.sum() / max(int(self.proposed.sum()), 1))

    def __add__(self, other: DraftOutput) -> DraftOutput:
        """Adds the counts of two calls, row by row."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return DraftOutput(*(a + b for a, b in pairs))


class DraftParams(NamedTuple):
    """The parameters of both models; passed wherever the decoder expects the parameters of the verifier."""

    verifier: Params
    drafter: Params


# --- before decoding


def with_drafter(lm: LM, draft: Draft | LM) -> tuple[LM, Draft]:
    """Checks that one model can draft for another, and joins both into one `LM`.

    Returns:
        The verifier with `DraftParams` as its parameters, and the drafter.
    """
    draft = Draft(draft) if isinstance(draft, LM) else draft
    if not isinstance(draft, Draft):
        allowed = "a diffusion model, mj.Draft(lm, tokens=, steps=), or a block drafter"
        raise refuse("draft", draft, allowed)
    check_lm(draft.lm)
    _check_same_tokens(lm, draft.lm)
    leaves, tree = jax.tree.flatten(draft.lm.params)
    _check_drafter_params(draft.lm.model, tree, tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves))
    params = DraftParams(lm.params, draft.lm.params)
    return dataclasses.replace(lm, model=_verifier_model(lm.model), params=params), draft


def _check_same_tokens(lm: LM, drafter: LM) -> None:
    """Raises ValueError unless the ids of two models stand for the same tokens.

    Tokens are compared by their text. A tokenizer may have no text for special tokens: of these only the ids that begin
    a text are compared. The ids that end an answer may differ, since only those of the verifier end one.
    """
    vocab, other = lm.model.config.vocab, drafter.model.config.vocab
    if vocab != other:
        raise refuse("draft.lm", f"{drafter.name} with {other} ids", f"a model of {vocab} ids, as {lm.name}")
    a, b = lm.tokenizer, drafter.tokenizer
    if a is b or a.fingerprint == b.fingerprint:
        return
    allowed = f"a model with the tokenizer of {lm.name}"
    if tuple(a.begin) != tuple(b.begin):
        raise refuse("draft.lm", f"{drafter.name}, whose texts begin with {tuple(b.begin)}", allowed)
    for i, (x, y) in enumerate(zip(a.pieces, b.pieces, strict=False)):
        if x and y and x != y:  # empty where a tokenizer hides a special token
            raise refuse("draft.lm", f"{drafter.name}, whose id {i} is {y!r} and not {x!r}", allowed)


@functools.lru_cache(maxsize=64)
def _check_drafter_params(model: Model, tree: Any, leaves: tuple[tuple[Any, Any], ...]) -> None:
    """Raises ValueError unless the drafter can be traced with its parameters; checked once per set of shapes."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]
    check_params(model, tree.unflatten(shapes), "draft.lm.params")


@functools.cache
def _verifier_model(model: Model) -> Model:
    """Makes a model whose functions take `DraftParams` and use the verifier's part.

    Cached: equal models give the same object, so that they share compiled programs.
    """

    def of_verifier(function: Any) -> Any:
        def call(params: Any, *args: Any, **more: Any) -> Any:
            own = params.verifier if isinstance(params, DraftParams) else params
            return function(own, *args, **more)

        return None if function is None else call

    names = ("apply", "forward", "head", "condition", "head_chunk", "embed_mixture")
    return model._replace(**{name: of_verifier(getattr(model, name)) for name in names})


# --- the method


class DraftSettings(NamedTuple):
    """The static side of drafting: the drafter's config, and how its drafts are accepted."""

    config: DecodeConfig
    acceptance: DraftMethod


class Drafter(NamedTuple):
    """The slot of drafting in the verifier's `State.method`: the drafter's state, and counts of its drafts."""

    state: State
    forwards: Int[Array, "B"]  # passes of the drafter, including those that encode verified tokens
    proposed: Int[Array, "B"]  # draft tokens that were verified
    accepted: Int[Array, "B"]  # draft tokens that the verifier accepted


def drafting(config: DecodeConfig, acceptance: DraftMethod) -> Method:
    """Makes the method of a verifier whose drafts another model makes.

    Args:
        config: Config of the drafter.
    """
    return Method(
        "drafting", drafted_step, first_drafter, DraftSettings(config, acceptance),
        # The verifying pass feeds the last committed token, then the draft, whose tokens it draws by position.
        held_back=1, min_steps=1, position_draws=True, prefill=prefill_drafter, report=report,
    )  # fmt: skip


def first_drafter(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Drafter:
    """Makes the drafter's state before the first pass, with the rows of the verifier.

    It has the slots of the rows and of the drafter's own canvas after them.
    """
    own, acceptance = config.method.settings
    slots = rows.tokens.shape[1] + own.slots_after
    if own.model.config.pattern == "bidirectional":
        slots = own.slots_after
    fit = lambda x: jnp.pad(x[:, :slots], [(0, 0), (0, max(0, slots - x.shape[1]))])
    tokens, given, draft = fit(rows.tokens), fit(rows.given), jnp.zeros((len(rows.tokens), slots), bool)
    zeros = jnp.zeros((len(rows.tokens),), jnp.int32)
    rows = rows._replace(tokens=tokens, given=given, draft=draft, answer_budget=zeros)
    state = first_state(own, sampling.method, rows)
    # Rejection sampling needs draws that are independent of the verifier's.
    if acceptance == "rejection":
        state = state._replace(key=jax.vmap(lambda key: jax.random.fold_in(key, DRAFT_KEY))(state.key))
    return Drafter(state, zeros, zeros, zeros)


def prefill_drafter(config: DecodeConfig, params: DraftParams, state: State) -> State:
    """Encodes long prompts in the drafter's KV cache."""
    own, drafter = config.method.settings.config, state.method
    width = prefill_width(own, drafter.state.tokens.shape[1])
    if width is None:
        return state
    encoded = prefill(own, params.drafter, drafter.state, width)
    return state._replace(method=drafter._replace(state=encoded))


def report(state: State) -> dict[str, Array]:
    """Returns the counts that `Output.draft` shows, and the pass in which the drafter's logits were NaN."""
    drafter = state.method
    counts = {name: getattr(drafter, name) for name in ("forwards", "proposed", "accepted")}
    return counts | {"nan_step": drafter.state.records.nan_step}


def drafted_step(config: DecodeConfig, params: DraftParams, state: State) -> tuple[State, Frame]:
    """Lets the other model draft, and runs one pass in which rows encode or verify."""
    opened = open_canvases(config, state)
    unverified = (state.step < 0) & (opened.step >= 0)  # a draft is verified in the pass after it
    state = draft_block(config, params, opened, unverified & ~opened.done)
    feed, verifying, hidden, state = verifying_pass(config, params, state, unverified)
    logits = config.model.head(params, hidden)
    rejection = config.method.settings.acceptance == "rejection"
    accept, drawn = (accept_or_redraw, proposals(config, state)) if rejection else (None, ())
    moved, frame = verify(config, state, logits, verifying, state, idle_frame(state), accept, drawn)
    drafter, (proposed, accepted) = state.method, count_drafts(state, frame, verifying)
    drafter = drafter._replace(proposed=drafter.proposed + proposed, accepted=drafter.accepted + accepted)
    return feed.advance(moved._replace(method=drafter)), frame


def draft_block(config: DecodeConfig, params: DraftParams, state: State, rows: Bool[Array, "B"]) -> State:
    """Drafts a block for some rows."""
    drafter, own, most = state.method, config.method.settings.config, config.width - 1
    start = _take_text(drafter.state, state, rows, most)

    def drafting(carry: tuple[Array, State]) -> tuple[Array, State]:
        passes, old = carry
        new, _ = own.method.step(own, params.drafter, old)
        # A row is finished when it has committed a block after at least one denoising pass. Committed tokens alone are
        # not enough: the pass that encodes the previous block may decide a token too, which is part of the draft.
        finished = (new.committed > state.committed) & (new.nfe > start.nfe) & (new.step < 0)
        new = new._replace(done=new.done | finished)
        return varying((passes + ~old.done, new), axes)

    axes = varying_axes((params, state))
    first = varying((drafter.forwards, start), axes)
    forwards, found = jax.lax.while_loop(lambda carry: ~jnp.all(carry[1].done), drafting, first)

    # canvas [B, W]: the last committed token, then the draft of up to W - 1 tokens.
    at = state.committed[:, None] + jnp.arange(most)
    tokens = jnp.take_along_axis(found.tokens, jnp.minimum(at, found.tokens.shape[1] - 1), axis=1)
    canvas = jnp.concatenate([state.canvas[:, :1], tokens], axis=1)
    size = jnp.clip(found.committed - state.committed, 0, most)  # 0 if the drafter's logits were NaN
    used = jnp.minimum(state.used, 1 + size).astype(jnp.int32)
    drafted = drafter._replace(state=found, forwards=forwards)
    return update_rows(state, rows, dict(canvas=canvas, answer=canvas, used=used))._replace(method=drafted)


def _take_text(drafter: State, state: State, rows: Bool[Array, "B"], most: int) -> State:
    """Copies the verified text into the drafter's state and closes its canvases.

    Rows that do not draft in this round are marked as done. The drafter's cache is cut at the verified text, since it
    may also hold keys of draft tokens that were rejected.
    """
    slots = drafter.tokens.shape[1]
    verified = state.tokens[:, :slots]
    verified = jnp.pad(verified, [(0, 0), (0, slots - verified.shape[1])])
    known = jnp.arange(slots) < state.committed[:, None]
    end = jnp.minimum(state.limits.end, state.committed + most).astype(jnp.int32)
    fresh: dict[str, Any] = dict(
        tokens=jnp.where(known, verified, drafter.tokens), committed=state.committed,
        limits=drafter.limits._replace(end=end, max_end=end), step=jnp.full_like(drafter.step, -1),
        cache_length=jnp.minimum(drafter.cache_length, state.committed),
    )  # fmt: skip
    return update_rows(drafter, rows, fresh)._replace(done=~rows)


# --- the rule of a drafter


class Drawn(NamedTuple):
    """The distribution from which a drafter sampled the tokens of its last step, for one row."""

    logits: Float[Array, "L V"]  # logits of the drafter's window, after all processors
    fresh: Bool[Array, "L"]  # positions sampled from these logits, independently of each other
    position: Int[Array, ""]  # of the first one, from the beginning of the answer


class _DrawLast(NamedTuple):
    """The function of `draft_rule`; compares by value, so that equal rules share one compilation."""

    function: Callable[..., Any]
    records: bool

    @property
    def functions(self) -> tuple[Callable[..., Any]]:
        """What `build_config.check_functions` looks at."""
        return (self.function,)

    def __call__(self, key: Key, view: View, memory: Memory, **params: Any) -> tuple[Proposal, Memory]:
        own, old = memory if self.records else (memory, None)
        proposal, own = self.function(key, view, own, **params)
        fresh = (view.step + 1 >= view.steps) & view.masked
        put = lambda old: jnp.where(fresh, view.stats.sample, old).astype(jnp.int32)
        proposal = proposal._replace(canvas=put(proposal.canvas), answer=put(proposal.answer))
        if old is None:
            return proposal, own
        new = Drawn(view.draw_logits, fresh, view.position)
        pick = lambda new, old: jnp.where(jnp.any(fresh), new, old).astype(old.dtype)
        return proposal, (own, jax.tree.map(pick, new, old))


class _FirstDrawn(NamedTuple):
    """The `init` of a `draft_rule` that records its draws."""

    init: Callable[[jax.Array, int], Memory]
    dtype: str

    def __call__(self, canvas: jax.Array, vocab: int) -> Memory:
        blank = jnp.zeros((len(canvas), vocab), self.dtype)
        return self.init(canvas, vocab), Drawn(blank, jnp.zeros(canvas.shape, bool), jnp.int32(0))


def draft_rule(rule: Rule, method: DraftMethod, dtype: Any) -> Rule:
    """Makes the rule of a drafter: its last step samples every open position, since a draft has no mask left.

    For rejection sampling its memory holds the distribution of these samples, as a `Drawn`.
    """
    if method == "same_seed":
        return dataclasses.replace(rule, function=_DrawLast(rule.function, False))
    return dataclasses.replace(
        rule,
        function=_DrawLast(rule.function, True),
        init=_FirstDrawn(rule.init, jnp.dtype(accumulation_dtype(jnp.dtype(dtype))).name),
        needs_logits=True,
    )


# --- rejection sampling


def proposals(config: DecodeConfig, state: State) -> Proposals:
    """Aligns the drafter's distributions with the positions that a verifying pass predicts."""
    drafter = state.method.state
    drawn: Drawn = drafter.memory[0][1]
    start = drawn.position + drafter.prompt
    index = state.committed[:, None] + jnp.arange(config.width) - start[:, None]
    inside = (index >= 0) & (index < drawn.fresh.shape[1])
    index = jnp.clip(index, 0, drawn.fresh.shape[1] - 1)
    logits = jnp.take_along_axis(drawn.logits, index[..., None], axis=1)
    temperature = jnp.asarray(drafter.sampling.sampler.temperature, jnp.float32)
    fresh = inside & jnp.take_along_axis(drawn.fresh, index, axis=1) & (temperature > 0)[:, None]
    return Proposals(logits, fresh, temperature)
