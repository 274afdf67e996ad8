"""Rollouts for reinforcement learning: sampled answers, and estimates of their log-probabilities.

`rollout` decodes answers, and records for each token the pass that accepted it and the log-probability of its draw.
`token_log_probs` estimates the log-probability of each token of given answers, differentiable in the parameters. A
masked diffusion model has no tractable exact value, so published methods average over masked copies of the answer.
`answer_batch` lays the answers out on the host, in the layout of the model and in bucketed shapes, so that the jitted
loss compiles for few lengths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Between, Plan, refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.inputs import Reward, Seeds, WholeNumbers, call_reward, repeat_prompts
from mercury_jax.decode.registration import check_number
from mercury_jax.decode.request import Request, encode_request, start
from mercury_jax.decode.sample import collect
from mercury_jax.decode.sampler import Param, SamplerLike
from mercury_jax.decode.session import advance, read_answers
from mercury_jax.decode.state import ArrayLike, bucket, check_equal_lengths
from mercury_jax.decode.token_stats import forbid
from mercury_jax.types import LM, Key, PackedPass, Params, fields_shown


@dataclass(frozen=True)
class Rollout:
    """Answers sampled from the model, with the data that a policy gradient needs. A pytree.

    Row i answers prompt i // n. If the model ended an answer, its last token is the end-of-text token: the policy drew
    that token as well.

    Attributes:
        prompts: int [B, P], ids of the prompts, left-aligned.
        prompt_lengths: int [B], tokens of each prompt.
        tokens: int [B, S], ids of the answers; S is the largest max_tokens.
        lengths: int [B], tokens of each answer.
        ended: bool [B], whether the model ended the answer; False: `max_tokens` did.
        commit_step: int [B, S], index of the row's denoising pass that accepted the token. It also covers the
            tokens that fill the last canvas beyond the length, and is -1 where there was no canvas.
        log_probs: float [B, S], log-probability of each token when it was accepted, see `rollout`; 0 beyond
            the length.
        forwards: int [B], denoising and verifying passes (NFE).
        rewards: float [B], reward of each answer.
        texts: Texts, as in `sample`; dropped by JAX transforms.
    """

    prompts: np.ndarray
    prompt_lengths: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    commit_step: np.ndarray
    log_probs: np.ndarray
    forwards: np.ndarray
    rewards: np.ndarray | None = None
    texts: list[str] = field(repr=False, default_factory=list)

    def __repr__(self) -> str:
        return fields_shown(self, _ARRAYS)

    def batch(self, lm: LM) -> AnswerBatch:
        """Lays the answers out for `token_log_probs`, each filled up to max_tokens as in decoding.

        Args:
            lm: The model.

        Returns:
            The batch, with the order in which the tokens were accepted.
        """
        cut = lambda rows, lengths: [row[:n] for row, n in zip(rows, lengths, strict=True)]
        prompts, answers = cut(self.prompts, self.prompt_lengths), cut(self.tokens, self.lengths)
        size, steps = self.tokens.shape[1], list(self.commit_step)
        return answer_batch(lm, prompts, answers, size=size, commit_step=steps)


_ARRAYS = (
    "prompts", "prompt_lengths", "tokens", "lengths", "ended", "commit_step", "log_probs", "forwards", "rewards",
)  # fmt: skip
jax.tree_util.register_dataclass(Rollout, data_fields=_ARRAYS, meta_fields=(), drop_fields=("texts",))


def rollout(
    lm: LM,
    prompt: inputs.Prompts,
    *,
    n: int = 1,
    reward: Reward | None = None,
    max_tokens: WholeNumbers = 64,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] = 1.0,
) -> Rollout:
    """Samples n answers to each prompt, and records how each token was accepted.

    `log_probs` are those of the behaviour policy: log softmax(logits / temperature) of the accepted token, with the
    logits of the pass that accepted it, after all logits processors and without the ids that are never emitted.

    - A token that was renoised and accepted again (remasking, editing, uniform noise) has the log-probability of its
      last acceptance.
    - If a block uses up its steps, its remaining positions take the argmax of the last pass, and have the
      log-probability of that argmax.
    - The choice of positions by the rule is not included. With a rule that chooses positions by confidence, the sum
      over an answer is therefore not log p(answer).

    Args:
        lm: The model.
        prompt: One prompt or several, as in `sample`.
        n: Number of answers to each prompt; they are adjacent rows.
        reward: reward(prompts, texts) -> one number per text, on the host; fills `rewards`.
        max_tokens: Maximum number of tokens of an answer, one number or one per prompt.
        seed: As in `sample`: answer j of prompt i draws from seed + i n + j.
        sampler: A rule, or a `Sampler`. None: the default of the model.
        plan: Block, number of steps, and reuse of the KV cache.
        temperature: Temperature of drawn tokens, one number or one per prompt; 0 takes the argmax, whose
            log-probability is then 0.

    Returns:
        The rollout, with n rows per prompt.

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> r = mj.rollout(lm, ["2+2=", "3+3="], n=8, reward=lambda prompts, texts: [len(t) for t in texts])
        >>> r.tokens.shape, r.rewards.reshape(2, 8).mean(axis=1)
    """
    rows = repeat_prompts(lm, prompt, n)
    if reward is not None and not callable(reward):
        raise refuse("reward", reward, "a function of (prompts, texts), or None")
    began = time.perf_counter()
    request = Request(
        prompt=prompt, n=n, max_tokens=max_tokens, seed=seed, sampler=sampler, temperature=temperature,
        plan=Plan() if plan is None else plan,
        trajectory=True,
    ).checked()  # fmt: skip
    request = encode_request(lm, request)
    session, _, _ = advance(lm, start(lm, request), None)
    out = collect(lm, read_answers(session.config, session.state), session.prompts, began)
    state, count = session.state, session.rows
    kept = (state.tokens, state.prompt, state.limits.end, state.trajectory.step, state.trajectory.log_prob)  # type: ignore
    tokens, begin, end, step, log_prob = (np.asarray(x)[:count] for x in jax.device_get(kept))
    ended = np.array([finish == "stop" for finish in out.finish])
    # Positions of each answer in the rows [B, S]. `end` excludes the end-of-text token, which directly follows.
    most = np.asarray(request.max_tokens)
    lengths, at = end - begin + ended, np.arange(most.max())
    places = np.minimum(begin[:, None] + at, tokens.shape[1] - 1)
    inside = at < lengths[:, None]
    read = lambda x, fill: np.where(inside, np.take_along_axis(x, places, axis=1), fill)
    prompts, sizes = _left_aligned([p.ids for p in session.prompts], lm.model.config.pad)
    return Rollout(
        prompts=prompts,
        prompt_lengths=sizes,
        tokens=read(tokens, lm.model.config.pad),
        lengths=lengths.astype(np.int32),
        ended=ended,
        commit_step=np.where(at < most[:, None], np.take_along_axis(step, places, axis=1), -1),
        log_probs=read(log_prob, 0.0).astype(log_prob.dtype),
        forwards=out.forwards,
        rewards=None if reward is None else call_reward(reward, rows, out.texts),
        texts=out.texts,
    )


def _left_aligned(
    rows: Sequence[Sequence[int] | np.ndarray], pad: int, size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Packs rows of different lengths into an array [B, size], and returns it with their lengths [B]."""
    lengths = np.array([len(row) for row in rows], np.int32)
    out = np.full((len(rows), int(lengths.max()) if size is None else size), pad, np.int32)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out, lengths


# --- log-probabilities of given answers


class AnswerBatch(NamedTuple):
    """Answers to prompts, laid out for the attention pattern of the model; made by `answer_batch`.

    N is the length of the longest text, S of the longest answer. Block-wise models attend to clean tokens before a
    noised canvas: a row has T slots, which hold the clean tokens followed by the noised canvases.

    Attributes:
        ids: Ids of prompt and answer.
        prompt_lengths: Tokens of each prompt.
        lengths: Number of tokens of the answer that have a log-probability.
        index: Index into `ids` of the token that each slot holds; N for none.
        positions: Position of the token of each slot in its text.
        ranges: Key ranges that each slot attends to.
        canvas: Index of the slot's canvas; -1 outside of canvases.
        slots: Slot at which answer token j is noised; T for none.
        order: Rank within its canvas of the pass that accepted it; -1: not known.
    """

    ids: Int[ArrayLike, "B N"]
    prompt_lengths: Int[ArrayLike, "B"]
    lengths: Int[ArrayLike, "B"]
    index: Int[ArrayLike, "B T"]
    positions: Int[ArrayLike, "B T"]
    ranges: Int[ArrayLike, "B T R 2"]
    canvas: Int[ArrayLike, "B T"]
    slots: Int[ArrayLike, "B S"]
    order: Int[ArrayLike, "B S"]


def answer_batch(
    lm: LM,
    prompts: inputs.Prompts,
    answers: inputs.Prompts,
    *,
    size: int | None = None,
    commit_step: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> AnswerBatch:
    """Lays answers out for `token_log_probs`. Runs on the host, once for a batch.

    Args:
        lm: A masked diffusion model; its `Model.layout` decides which tokens attend to which.
        prompts: One prompt per answer, or one for all of them, as in `sample`.
        answers: Texts or ids. Append the end-of-text id if ending the answer should have a log-probability.
        size: Number of positions S of each answer. As in decoding with max_tokens=size, shorter answers are filled up
            with end-of-text tokens, which are noised with the answer but have no log-probability. None: answers are not
            filled up, and S is the length of the longest one.
        commit_step: The pass that accepted each token of each answer (`Rollout.commit_step`), for
            estimator="trajectory". With `size` it may also cover the positions that are filled up.

    Returns:
        The batch; T is rounded up to a bucket, so that few shapes are compiled.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    inputs.check_lm(lm)
    config = lm.model.config
    if lm.corruption.mask is None or config.autoregressive:
        kind = "autoregressive" if config.autoregressive else "trained with uniform noise"
        raise refuse("lm", f"a model {kind}", "a model of masked diffusion: answers are masked")
    after, _ = inputs.encode_prompts(lm, answers, begin=False, name="answers")
    before = inputs.prompt_rows(lm, prompts, len(after), name="prompts", row="answer")
    longest = max(len(a.ids) for a in after)
    width = longest if size is None else inputs.check_whole("size", size, longest, config.context)
    if config.eos < 0 and any(len(a.ids) < width for a in after) and size is not None:
        raise refuse("size", size, "None: no id ends an answer of this model, so that none fills it up")
    fill = 0 if size is None else width
    texts = [[*b, *a.ids, *[config.eos] * (fill - len(a.ids))] for b, a in zip(before, after, strict=True)]
    for i, text in enumerate(texts):
        if len(text) > config.context:
            allowed = f"at most {config.context}, the context"
            raise refuse(f"prompt and answer {i}", f"{len(text)} tokens", allowed)
    # Lay out the numbers 0, 1, 2, ... instead of ids: each slot then holds the index of its token.
    laid = [
        lm.model.layout(np.arange(len(text), dtype=np.int32), len(b), all_clean=False)
        for text, b in zip(texts, before, strict=True)
    ]
    total = max(len(one.tokens) for one in laid)
    if lm.model.hides_padding:
        total = bucket(total)
    else:
        check_equal_lengths("prompts with their answers", [len(text) for text in texts])
    ids, _ = _left_aligned(texts, config.pad, bucket(max(map(len, texts))))
    pad = lambda x, value: np.pad(x, [(0, total - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=value)
    slots = [np.flatnonzero(one.editable)[:width] for one in laid]
    order = np.full((len(laid), width), -1, np.int32)
    if commit_step is not None:
        allowed = "a list for each answer, with one number for each of its tokens, or of its `size` positions"
        if not isinstance(commit_step, Sequence) or not all(
            isinstance(x, Sequence | np.ndarray) for x in commit_step
        ):
            raise refuse("commit_step", commit_step, allowed)
        pairs = list(zip(after, commit_step, strict=False))
        if len(commit_step) != len(after) or any(len(x) not in (len(a.ids), width) for a, x in pairs):
            raise refuse("commit_step", f"lists of {[len(x) for x in commit_step]}", allowed)
        for row, steps, one, at in zip(order, commit_step, laid, slots, strict=True):
            known = np.flatnonzero(np.asarray(steps)[: len(at)] >= 0)
            row[known] = _ranks(np.asarray(steps)[known], one.canvas[at[known]])
    arrays: dict[str, Any] = dict(
        ids=ids,
        prompt_lengths=np.array([len(b) for b in before], np.int32),
        lengths=np.array([len(a.ids) for a in after], np.int32),
        index=np.stack([pad(one.tokens, ids.shape[1]) for one in laid]),
        positions=np.stack([pad(one.positions, 0) for one in laid]),
        ranges=np.stack([pad(one.ranges, 0) for one in laid]),
        canvas=np.stack([pad(one.canvas, -1) for one in laid]),
        slots=_left_aligned(slots, total, width)[0],
        order=order,
    )
    return AnswerBatch(**arrays)


def pad_answers(batch: AnswerBatch, row: int) -> AnswerBatch:
    """Pads a batch to a fixed shape, so that a training step compiles once for answers of any lengths."""
    longest, total = np.asarray(batch.ids).shape[1], np.asarray(batch.index).shape[1]
    used = int((np.asarray(batch.index) < longest).sum(1).max())
    if used > row:
        raise refuse("row", row, f"{used} positions or more, for a prompt with its answer")

    def resized(x: ArrayLike, fill: int) -> np.ndarray:
        x = np.asarray(x)[:, :row]
        return np.pad(x, [(0, 0), (0, row - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=fill)

    moved = lambda x, old: np.where(np.asarray(x) == old, row, x)  # N and T mean "none"
    return batch._replace(
        ids=resized(batch.ids, 0),
        index=resized(moved(batch.index, longest), row),
        positions=resized(batch.positions, 0),
        ranges=resized(batch.ranges, 0),
        canvas=resized(batch.canvas, -1),
        slots=moved(batch.slots, total),
    )


def _ranks(steps: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Ranks the passes within each canvas: 0 for its first pass that accepted a token."""
    ranks = np.zeros(len(steps), np.int32)
    for c in np.unique(canvas):
        ranks[canvas == c] = np.unique(steps[canvas == c], return_inverse=True)[1]
    return ranks


def masked_answer_logits(
    lm: LM,
    params: Params,
    batch: AnswerBatch,
    masked: Bool[Array, "B S"],
    hidden: Bool[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B S V"], Int[Array, "B S"]]:
    """Runs one forward pass over answers in which some tokens are masked.

    Returns:
        The logits at the answer tokens [B, S, V], with the ids that are never emitted forbidden, and the tokens there
        [B, S]. Both include the end-of-text tokens that fill up the answers.
    """
    assert lm.corruption.mask is not None
    count, total = batch.index.shape
    spread = jnp.zeros((count, total), bool)
    noised = jax.vmap(lambda row, at, which: row.at[at].set(which, mode="drop"))(spread, batch.slots, masked)
    # `of_slots` reads values [B, N] of the texts at the slots [B, T]: a prompt token that stands both in a canvas and
    # among the clean tokens is hidden in both slots.
    of_slots = lambda x, fill: jnp.take_along_axis(
        jnp.pad(x, [(0, 0), (0, 1)], constant_values=fill), batch.index, 1
    )
    if hidden is not None:
        noised |= of_slots(hidden, False)
    tokens = jnp.where(noised, lm.corruption.mask, of_slots(batch.ids, lm.model.config.pad))
    time = None
    if lm.model.config.timed:  # time of a canvas: the share of masks among its answer tokens
        answer = jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(spread, batch.slots)
        same = (batch.canvas[:, :, None] == batch.canvas[:, None]) & answer[:, None]  # [B, T, T]
        share = jnp.sum(same & noised[:, None], -1) / jnp.maximum(jnp.sum(same, -1), 1)
        time = jnp.where(batch.canvas >= 0, share, 0.0)
    given = PackedPass(tokens, jnp.asarray(batch.positions), jnp.asarray(batch.ranges), time=time)
    at = jnp.minimum(batch.slots, total - 1)
    gather = lambda x: jax.vmap(lambda row, i: row[i])(x, at)
    logits = lm.model.head(params, jax.tree.map(gather, lm.model.apply(params, given)))  # [B, S, V]
    logits = jax.vmap(lambda x: forbid(x, lm.corruption.forbidden))(logits)
    places = batch.prompt_lengths[:, None] + jnp.arange(at.shape[1])
    target = jnp.take_along_axis(jnp.asarray(batch.ids), jnp.minimum(places, batch.ids.shape[1] - 1), axis=1)
    return logits, target


def _log_probs_under(
    lm: LM, params: Params, batch: AnswerBatch, masked: Bool[Array, "B S"], hidden: Bool[Array, "B N"] | None
) -> Float[Array, "B S"]:
    """Computes log p of each answer token in one pass, see `masked_answer_logits`; 0 beyond the answer."""
    logits, target = masked_answer_logits(lm, params, batch, masked, hidden)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    inside = jnp.arange(target.shape[1]) < batch.lengths[:, None]
    return jnp.where(inside, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)


def _several_passes(
    lm: LM, params: Params, batch: AnswerBatch, masks: Bool[Array, "K B S"]
) -> Float[Array, "K B S"]:
    """Computes `_log_probs_under` for K masks, with a visible prompt, in one pass over K * B rows."""
    many = jax.tree.map(lambda x: jnp.tile(x, (len(masks), *[1] * (x.ndim - 1))), batch)
    found = _log_probs_under(lm, params, many, masks.reshape(-1, masks.shape[-1]), None)
    return found.reshape(masks.shape)


def _diffu_grpo(
    lm: LM, params: Params, batch: AnswerBatch, key: Key, mask_prompt: float
) -> Float[Array, "B S"]:
    """Computes log p of each token in one pass, with the answer fully masked.

    Each prompt token is masked with probability `mask_prompt`.
    """
    in_prompt = jnp.arange(batch.ids.shape[1]) < batch.prompt_lengths[:, None]
    hidden = in_prompt & (jax.random.uniform(key, batch.ids.shape) < mask_prompt)
    return _log_probs_under(lm, params, batch, jnp.ones(batch.slots.shape, bool), hidden)


def _coupled_grpo(
    lm: LM, params: Params, batch: AnswerBatch, key: Key, low: float, high: float
) -> Float[Array, "B S"]:
    """Averages log p under the full mask, and log p / share under a random mask or its complement.

    Each token is masked in exactly one of the two complementary masks, whose share of masks is `ratio` or 1 - `ratio`.
    """
    ratio_key, mask_key = jax.random.split(key)
    ratio = jax.random.uniform(ratio_key, (), minval=low, maxval=high)
    first = jax.random.uniform(mask_key, batch.slots.shape) < ratio
    all_masked, under_first, under_rest = _several_passes(
        lm, params, batch, jnp.stack([jnp.ones_like(first), first, ~first])
    )
    return (all_masked + jnp.where(first, under_first / ratio, under_rest / (1.0 - ratio))) / 2


def _elbo(
    lm: LM, params: Params, batch: AnswerBatch, key: Key, sample: int, samples: int
) -> Float[Array, "B S"]:
    """Computes m / k times log p of the k masked tokens of each canvas of m tokens.

    k is uniform in 1..m and stratified over the samples.
    """
    canvas = jnp.take_along_axis(
        jnp.pad(batch.canvas, [(0, 0), (0, 1)], constant_values=-1), batch.slots, axis=1
    )
    same = (canvas[:, :, None] == canvas[:, None]) & (canvas >= 0)[:, None]  # [B, S, S] tokens of one canvas
    most = jnp.maximum(same.sum(-1), 1)
    u = jax.random.uniform(
        key, (canvas.shape[0], canvas.shape[1] + 1)
    )  # one per canvas, the same in every sample
    u = (jnp.take_along_axis(u, jnp.maximum(canvas, 0), axis=1) + sample / samples) % 1.0
    score = jax.random.uniform(jax.random.fold_in(key, sample + 1), canvas.shape)
    before = jnp.sum(same & (score[:, None] < score[:, :, None]), axis=-1)  # rank of each token in its canvas
    # Mask the k tokens of the lowest rank in each canvas. [B, S]
    k = jnp.minimum(1 + jnp.floor(most * u), most)
    masked = before < k
    found = _log_probs_under(lm, params, batch, masked, None)
    return jnp.where(masked, found * most / k, 0.0)


def _along_trajectory(lm: LM, params: Params, batch: AnswerBatch, passes: int) -> Float[Array, "B S"]:
    """Computes log p of each token in the pass that accepted it, with the tokens that later passes accepted masked."""
    last = jnp.maximum(jnp.max(batch.order, axis=1, keepdims=True) + 1, 1)
    # With more ranks than passes, neighbouring ranks share a pass. Tokens without a known pass stay masked.
    rank = jnp.where(last > passes, batch.order * passes // last, batch.order)
    rank = jnp.where(batch.order < 0, passes, rank)

    def one(k: Array) -> Array:
        found = _log_probs_under(lm, params, batch, rank >= k, None)
        return jnp.where(rank == k, found, 0.0)

    return jax.lax.map(one, jnp.arange(passes)).sum(axis=0)


# The options of each estimator, with their defaults.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "diffu_grpo": {"samples": 1, "mask_prompt": 0.15},
    "coupled_grpo": {"samples": 1, "ratios": (0.2, 0.8)},
    "elbo": {"samples": 1},
    "trajectory": {"passes": None},
}


def token_log_probs(
    lm: LM,
    params: Params,
    batch: AnswerBatch,
    key: Key | None = None,
    *,
    estimator: str = "diffu_grpo",
    samples: int | None = None,
    mask_prompt: float | None = None,
    ratios: tuple[float, float] | None = None,
    passes: int | None = None,
) -> Float[Array, "B S"]:
    """Estimates the log-probability of each token of given answers. Pure, jittable, differentiable in `params`.

    Pass the same key for policies that are compared (new, old, reference), so that they see the same masks.

    - `diffu_grpo`: one pass with the answer fully masked and each prompt token masked with probability `mask_prompt`
      (d1, arXiv 2504.12216; `_get_per_token_logps` of its trainer). With `mask_prompt=0` it is exact for answers of one
      token.
    - `coupled_grpo`: three passes, with the answer fully masked, under a random mask M, and under its complement. With
      the ratio t of M uniform in `ratios`, a token that M masks gets (log p_full + log p_M / t) / 2, any other token
      (log p_full + log p_not_M / (1 - t)) / 2 (DiffuCoder, arXiv 2506.20639; `selective_log_softmax` in ml-diffucoder).
      The expectation is not log p: for an answer of one token it is 1.5 log p.
    - `elbo`: the bound of `score` per token, m / k times log p of the k masked tokens of a canvas of m tokens, with k
      uniform (LLaDA, arXiv 2502.09992, eq. 6). The expectation of the sum over an answer is a lower bound on log p.
    - `trajectory`: one pass for each decoding pass, with the tokens masked that decoding accepted later (TraceRL, arXiv
      2509.06949). If `passes` is at least the number of decoding passes of a canvas, the result equals the `log_probs`
      of the rollout, given temperature 1, no processors, no remasking, and only end-of-text tokens in the canvas after
      the end of the answer. With fewer passes, neighbouring decoding passes are merged.

    Args:
        lm: The model; `params` replaces its own parameters.
        params: Parameters of the model.
        batch: Result of `answer_batch` or `Rollout.batch`.
        key: Draws the masks; None for `trajectory`, which draws none.
        estimator: "diffu_grpo", "coupled_grpo", "elbo" or "trajectory".
        samples: Number of estimates to average, each with masks of its own; in `elbo` they are stratified in k.
            None: 1. Not for `trajectory`.
        mask_prompt: For `diffu_grpo`: probability that a prompt token is masked. None: 0.15, as in d1.
        ratios: For `coupled_grpo`: range of t. None: (0.2, 0.8), as in ml-diffucoder.
        passes: For `trajectory`: number of passes. None: the largest number of decoding passes of a canvas, which needs
            a batch that is not traced.

    Returns:
        Log-probabilities in nats [B, S], 0 beyond the end of an answer.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the references: the ids that are never emitted, such as the mask, are excluded from the softmax, as in
    decoding. The references support only bidirectional models, in which the answer is one canvas. In models that decode
    block by block, each block is a canvas that attends to the clean blocks before it, and masks are drawn per canvas.

    Example:
        >>> batch = mj.rollout(lm, prompts, n=8).batch(lm)
        >>> loss = lambda params: -(advantages[:, None] * mj.rl.token_log_probs(lm, params, batch, key)).sum()
        >>> jax.grad(loss)(lm.params)
    """
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise refuse("estimator", estimator, ", ".join(ESTIMATORS))
    options = dict(ESTIMATORS[estimator])
    for name, value in {
        "samples": samples,
        "mask_prompt": mask_prompt,
        "ratios": ratios,
        "passes": passes,
    }.items():
        if value is not None and name not in options:
            raise refuse(name, value, f"None: {estimator} takes {', '.join(options)}")
        options |= {name: value} if value is not None else {}
    if not isinstance(batch, AnswerBatch):
        raise refuse("batch", type(batch).__name__, "an AnswerBatch of answer_batch or Rollout.batch")
    if estimator == "trajectory":
        made = _trajectory_passes(batch, options["passes"])
        return _along_trajectory(lm, params, jax.tree.map(jnp.asarray, batch), made)
    if key is None or not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise refuse("key", key, f"a key of jax.random.key, which draws the masks of {estimator}")
    batch, count = (
        jax.tree.map(jnp.asarray, batch),
        inputs.check_whole("samples", options["samples"], 1, 2**20),
    )
    if estimator == "elbo":
        found = [_elbo(lm, params, batch, key, i, count) for i in range(count)]
    elif estimator == "diffu_grpo":
        share = check_number("mask_prompt", options["mask_prompt"], Between(0, 1))
        found = [_diffu_grpo(lm, params, batch, jax.random.fold_in(key, i), share) for i in range(count)]
    else:
        pair = options["ratios"]
        numbers = (
            isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(x, int | float) for x in pair)
        )
        if not numbers or not 0 < pair[0] <= pair[1] < 1:
            raise refuse("ratios", pair, "(low, high) with 0 < low <= high < 1")
        low, high = pair
        found = [
            _coupled_grpo(lm, params, batch, jax.random.fold_in(key, i), low, high) for i in range(count)
        ]
    return jnp.mean(jnp.stack(found), axis=0)


def _trajectory_passes(batch: AnswerBatch, passes: int | None) -> int:
    """Returns the checked number of passes of the estimator `trajectory`."""
    if passes is not None:
        return inputs.check_whole("passes", passes, 1, inputs.MAX_TOKENS)
    if isinstance(batch.order, Tracer):
        raise refuse("passes", None, "a whole number from 1 on, where the batch is traced")
    most = int(np.max(np.asarray(batch.order))) + 1
    if most < 1:
        raise refuse("batch", "one without commit_step", "answer_batch(..., commit_step=), or Rollout.batch")
    return most
