"""Search with a user's reward at inference: best-of-n, and sequential Monte Carlo (SMC) over denoising steps.

Both decode n answers of each prompt side by side. Best-of-n rewards the finished answers. SMC rewards what
the answers would be at that moment after every few passes, and replaces particles of low weight by copies of
better ones, so that the remaining passes are spent on those (Feynman-Kac steering, arXiv 2501.06848). The
passes run on the device; only the guesses come to the host, where the reward sees them as texts. The
decoder's `estimate` and `fork` are the same steps for loops of one's own under `jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Above, AtLeast, Between, Plan, refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.answer_text import decode_answer
from mercury_jax.decode.decoder import estimate_answers
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.inputs import Reward, Seeds, WholeNumbers, call_reward, repeat_prompts
from mercury_jax.decode.registration import check_number
from mercury_jax.decode.request import Request, encode_request, start
from mercury_jax.decode.sample import sample
from mercury_jax.decode.sampler import LogitsProcessor, Memory, Sampler, SamplerLike, call_part, check_sampler
from mercury_jax.decode.session import Session, check_nan
from mercury_jax.decode.state import DecodeConfig, State
from mercury_jax.decode.token_stats import NEVER, draw, draw_log_prob, token_stats
from mercury_jax.decode.view import window_of
from mercury_jax.types import LM, Key, Params, Proposal, View


@dataclass(frozen=True)
class SearchOutput:
    """The best answer to each of P prompts, and the n answers that it was chosen from.

    Attributes:
        texts: Answers of the highest reward, one per prompt.
        rewards: float [P], rewards of `texts`.
        answers: All n answers to each prompt.
        answer_rewards: float [P, n], rewards of `answers`.
        weights: float [P, n], weights of the answers as samples of the target; sum to 1.
        forwards: int [P], denoising passes of a prompt's n rows together (NFE).
        passes: Passes of the device loop, encoding included.
        ess: float [R, P], effective sample size at each of the R evaluations.
        resampled: bool [R, P], whether the answers were resampled at each evaluation.
    """

    texts: list[str]
    rewards: np.ndarray
    answers: list[list[str]] = field(repr=False)
    answer_rewards: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    forwards: np.ndarray
    passes: int
    ess: np.ndarray = field(repr=False)
    resampled: np.ndarray = field(repr=False)

    @property
    def text(self) -> str:
        """The best answer to the first prompt."""
        return self.texts[0]

    @property
    def resamplings(self) -> np.ndarray:
        """How often the particles of each prompt were resampled [P]."""
        return self.resampled.sum(axis=0)


def best_of_n(
    lm: LM,
    prompt: inputs.Prompts,
    *,
    reward: Reward,
    n: int = 8,
    max_tokens: WholeNumbers = 64,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: float | Sequence[float] = 1.0,
) -> SearchOutput:
    """Decodes n answers to each prompt and returns the one of the highest reward.

    Args:
        lm: The model.
        prompt: As of `sample`.
        reward: reward(prompts, texts) -> one number per text; runs on the host. prompts[i] is the prompt, as
            given, that texts[i] answers.
        n: Answers of each prompt.
        max_tokens: Most tokens of an answer, one number or one per prompt.
        seed: As of `sample`: answer j of prompt i draws from seed + i n + j.
        sampler: A rule, or a `Sampler`. None: the model's own.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens, one number or one per prompt.

    Returns:
        The best answers; equal rewards go to the first one. All weights are 1 / n.

    Raises:
        ValueError: Names the argument that does not fit, or what the reward returned.

    Example:
        >>> shortest = lambda prompts, texts: [-len(text) for text in texts]
        >>> mj.best_of_n(lm, "import ", reward=shortest, n=4).text
    """
    _check_reward(reward)
    rows = repeat_prompts(lm, prompt, n)
    out = sample(
        lm, prompt, n=n, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan, temperature=temperature
    )
    rewards, groups = call_reward(reward, rows, out.texts), len(rows) // n
    none = np.zeros((0, groups))
    return _search_output(
        out.texts, rewards.reshape(groups, n), np.full((groups, n), 1.0 / n),
        forwards=out.forwards.reshape(groups, n).sum(axis=1), passes=out.passes, ess=none, resampled=none > 0,
    )  # fmt: skip


def _check_reward(reward: Any) -> None:
    """Raises ValueError for what cannot be called."""
    if not callable(reward):
        raise refuse("reward", reward, "a function of (prompts, texts) that returns one number per text")


def _search_output(
    texts: Sequence[str],
    rewards: Float[np.ndarray, "P n"],
    weights: Float[np.ndarray, "P n"],
    **measured: Any,
) -> SearchOutput:
    """The output with the best answer of each prompt."""
    groups, n = rewards.shape
    answers = [list(texts[i * n : (i + 1) * n]) for i in range(groups)]
    best = rewards.argmax(axis=1)
    return SearchOutput(
        texts=[of_prompt[i] for of_prompt, i in zip(answers, best, strict=True)],
        rewards=rewards[np.arange(groups), best],
        answers=answers,
        answer_rewards=rewards,
        weights=weights,
        **measured,
    )


# --- sequential Monte Carlo


def smc(
    lm: LM,
    prompt: inputs.Prompts,
    *,
    reward: Reward,
    n: int = 8,
    scale: float = 10.0,
    temper: float = 0.0,
    every: int = 1,
    ess: float = 0.5,
    undecided: str | None = None,
    twist: LogitsProcessor | None = None,
    max_tokens: WholeNumbers = 64,
    seed: int = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: float | Sequence[float] = 1.0,
) -> SearchOutput:
    """Steers n particles of each prompt towards a reward by sequential Monte Carlo; returns the best answer.

    The target is p(x) exp(scale * reward(x)), p being what the sampler decodes. After every `every` passes
    each particle's answer is estimated by what it would emit now (`Decoder.estimate`: decided tokens, and the
    rule's guess of the others), and its weight is multiplied by exp(c r - c' r'), with its reward r now and
    r' before and c = scale * (decided share of the answer) ** temper. These are the difference potentials of
    Feynman-Kac steering (arXiv 2501.06848); along a path they multiply to exp(scale * reward(x)),
    so that the weighted answers are samples of the target whatever the estimates were worth. Where the
    effective sample size 1 / sum(w ** 2) of a prompt's particles falls below the share `ess` of n, they are
    resampled systematically, and the copies draw from fresh keys.

    With `twist` the particles draw from twisted logits (a twisted proposal: TDS, arXiv 2306.17775; for
    discrete diffusion arXiv 2505.22524), and the weights are multiplied by p / q of each accepted token,
    which keeps the target as long as the twist leaves every token possible. That holds exactly where the
    positions that a rule accepts do not depend on the drawn tokens (`ancestral`, `random`, `first_hitting`);
    otherwise the target's order of acceptance is that of the twisted rule.

    Args:
        lm: The model.
        prompt: As of `sample`.
        reward: reward(prompts, texts) -> one number per text; runs on the host, also on unfinished answers.
            prompts[i] is the prompt, as given, that texts[i] answers.
        n: Particles of each prompt.
        scale: Weight of the reward in the target, 0 or more; 0 is plain sampling.
        temper: How late the reward counts, 0 or more: 0 at once, 1 in proportion to the tokens that are
            decided.
        every: Passes between two evaluations.
        ess: Share of n in 0..1; 0 never resamples (importance weights alone), 1 after every evaluation.
        undecided: What the reward sees of unfinished answers: None, the rule's guess of every token; or a
            text that stands for each undecided token, such as "_", so that the reward judges what is decided
            and cannot change.
        twist: A logits processor that runs after those of the sampler, such as `processors.bias`; for masked
            noise.
        max_tokens: Most tokens of an answer, one number or one per prompt.
        seed: A whole number; particle j of prompt i draws from seed + i n + j until it is resampled.
        sampler: A rule, or a `Sampler`. None: the model's own.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens, one number or one per prompt.

    Returns:
        The best answers; all particles with their weights; passes, effective sample sizes and resamplings.

    Raises:
        ValueError: Names the argument that does not fit, or what the reward returned.

    Departs from the reference: it resamples after every evaluation, multinomially, and evaluates several
    drawn guesses of an answer; here the guess is one.

    Example:
        >>> out = mj.smc(lm, puzzle, reward=share, sampler=mj.rules.ancestral(), plan=mj.Plan(steps=8))
        >>> out.text, out.rewards, out.resamplings
    """
    _check_reward(reward)
    every = inputs.check_whole("every", every, 1, inputs.MAX_TOKENS)
    for name, value, allowed in (
        ("scale", scale, AtLeast(0)), ("temper", temper, AtLeast(0)), ("ess", ess, Between(0, 1)),
    ):  # fmt: skip
        if np.ndim(value):
            raise refuse(name, value, "one number for all prompts")
        check_number(name, value, allowed)
    rows = repeat_prompts(lm, prompt, n)
    seed = inputs.check_whole("seed", seed, 0, 2**31 - 1)
    request = Request(
        prompt=prompt,
        n=n,
        max_tokens=max_tokens,
        seed=seed,
        sampler=sampler,
        plan=Plan() if plan is None else plan,
        temperature=temperature,
    ).checked()
    request = encode_request(lm, request)
    chosen = check_sampler(request.sampler)
    if chosen.speculate is not None or lm.model.config.autoregressive:
        raise refuse("sampler.speculate", chosen.speculate, "None: drafts are not verified in every pass")
    if not isinstance(undecided, str | None):
        raise refuse("undecided", undecided, "a text such as '_', or None")
    if undecided is not None and lm.corruption.mask is None:
        raise refuse("undecided", undecided, "None: under uniform noise no token is decided before the end")
    if twist is not None and request.plan.lookahead:
        raise refuse(
            "plan.lookahead", request.plan.lookahead, "0 with twist: it takes several steps in a pass"
        )
    if twist is not None:
        request = request._replace(sampler=twisted_sampler(lm, chosen, twist, request.temperature))
    steering = _Steering(n, scale, temper, every, ess, seed, undecided, twist is not None)
    return _steer(lm, start(lm, request), rows, reward, steering)


class _Steering(NamedTuple):
    """The checked arguments of `smc` under their names."""

    n: int
    scale: float
    temper: float
    every: int
    ess: float
    seed: int
    undecided: str | None
    is_twisted: bool


def _steer(lm: LM, session: Session, prompts: Sequence[Any], reward: Reward, how: _Steering) -> SearchOutput:
    """Runs the particles of a session to their end, with an evaluation after every few passes."""
    n, groups = how.n, len(prompts) // how.n
    rng, key = np.random.default_rng((how.seed, 17)), jax.random.fold_in(jax.random.key(how.seed), 17)
    shape = (groups, n)
    log_weights, level_before = np.zeros(shape), np.zeros(shape)
    forwards, passes, sizes, resamplings = np.zeros(groups, int), 0, [], []
    rewards, texts, done = np.zeros(shape), [], False
    kind = (how.every, how.is_twisted, how.undecided is None)
    while not done:
        state, report = advance_particles(session.config, lm.params, session.state, *kind)
        session = replace(session, state=state)
        seen: ParticleReport = jax.tree.map(
            lambda x: x[: len(prompts)] if x.ndim else x, jax.device_get(report)
        )
        done, passes = bool(seen.done.all()), passes + int(seen.passes)
        forwards += seen.forwards.reshape(shape).sum(axis=1)
        # 1. The reward of what each particle would emit now, and the change of its log-weight.
        texts = [
            _text_of(lm, ids[:length], prompt.chat, how.undecided)
            for ids, length, prompt in zip(seen.ids, seen.lengths, session.prompts, strict=True)
        ]
        rewards = call_reward(reward, prompts, texts).reshape(shape)
        level = np.asarray(how.scale * seen.decided.reshape(shape) ** how.temper * rewards)
        log_weights += level - level_before + seen.log_ratio.reshape(shape)
        weights = _normalised(log_weights)
        sizes.append(1.0 / np.sum(weights**2, axis=1))
        # 2. Prompts whose weights are concentrated on few particles are resampled; finished ones keep theirs.
        due = (sizes[-1] < how.ess * n) & ~seen.done.reshape(shape).all(axis=1)
        resamplings.append(due)
        ancestors = np.tile(np.arange(n), (groups, 1))
        for i in np.flatnonzero(due):
            ancestors[i] = systematic_resample(weights[i], rng.random())
        level_before = np.take_along_axis(level, ancestors, axis=1)
        if due.any():
            log_weights[due] = 0.0
            source = np.arange(session.state.done.shape[0])
            source[: len(prompts)] = (ancestors + n * np.arange(groups)[:, None]).ravel()
            which = np.zeros(len(source), bool)
            which[: len(prompts)] = np.repeat(due, n)
            fresh = jax.random.fold_in(key, len(sizes))
            session = replace(session, state=copy_particles(session.state, source, which, fresh))
    check_nan(session)
    return _search_output(
        texts, rewards, _normalised(log_weights), forwards=forwards, passes=passes, ess=np.stack(sizes),
        resampled=np.stack(resamplings),
    )  # fmt: skip


def _text_of(lm: LM, ids: Int[np.ndarray, "n"], chat: bool, undecided: str | None) -> str:
    """The text of an answer; `undecided` stands for each mask."""
    if undecided is None or not np.any(ids == lm.corruption.mask):
        return decode_answer(lm, ids, chat)[1]
    runs = np.split(ids, np.flatnonzero(np.diff(ids == lm.corruption.mask)) + 1)  # of masks, and of tokens
    return "".join(
        undecided * len(run) if run[0] == lm.corruption.mask else lm.tokenizer.decode(run.tolist())
        for run in runs
    )


def _normalised(log_weights: Float[np.ndarray, "P n"]) -> Float[np.ndarray, "P n"]:
    """Weights that sum to 1 in each row."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def systematic_resample(weights: Float[np.ndarray, "n"], uniform: float) -> Int[np.ndarray, "n"]:
    """Draws n ancestors by systematic resampling: particle i has floor(n w_i) or ceil(n w_i) of them."""
    n = len(weights)
    points = (uniform + np.arange(n)) / n
    return np.minimum(np.searchsorted(np.cumsum(weights), points, side="right"), n - 1)


class ParticleReport(NamedTuple):
    """What the host reads after some passes; rows are particles."""

    ids: Int[Array, "B S"]  # what each particle would emit now
    lengths: Int[Array, "B"]
    decided: Float[Array, "B"]  # share of its answer that is decided
    log_ratio: Float[Array, "B"]  # log p / q of the tokens accepted in these passes; 0 without a twist
    forwards: Int[Array, "B"]  # denoising passes among them
    done: Bool[Array, "B"]
    passes: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=2)
def advance_particles(
    config: DecodeConfig, params: Params, state: State, passes: int, is_twisted: bool, guess: bool
) -> tuple[State, ParticleReport]:
    """Makes some denoising passes, fewer where every row finishes before, and reports what each row would
    emit.

    Args:
        is_twisted: Whether the rule is one of `twisted_sampler`, whose memory holds the log p / q of its last
            step.
    """
    before, zeros = state.nfe, jnp.zeros(state.done.shape, jnp.float32)

    def body(carry: tuple[Array, Array, State, Array]) -> tuple[Array, Array, State, Array]:
        made, denoised, old, total = carry
        new, _ = config.method.step(config, params, old)
        moved = new.nfe > old.nfe
        if is_twisted:
            total = total + jnp.where(moved, new.memory[0][1], 0.0)
        return made + 1, denoised + jnp.any(moved), new, total

    # Passes that only encode a prompt change no answer: they are not counted.
    unfinished = lambda carry: (carry[1] < passes) & ~jnp.all(carry[2].done)
    zero = jnp.zeros((), jnp.int32)
    made, _, state, log_ratio = jax.lax.while_loop(unfinished, body, (zero, zero, state, zeros))
    ids, lengths = estimate_answers(config, state, guess)
    decided = jax.vmap(functools.partial(decided_share, config))(state.without_cache())
    return state, ParticleReport(ids, lengths, decided, log_ratio, state.nfe - before, state.done, made)


def decided_share(config: DecodeConfig, row: State) -> Float[Array, ""]:
    """Returns the share of one row's answer that is decided: 0 before the first pass, 1 at the end.

    Returns:
        Decided tokens over all; under uniform noise a block counts by its steps, since none of its tokens
        stays.
    """
    at = row.cache_length + jnp.arange(config.width)
    inside = (at >= row.committed) & (at < window_of(config, row).end) & (row.step >= 0)
    if config.corruption.mask is None:
        progress = row.step / jnp.maximum(row.sampling.steps, 1)
        inside_decided = inside.sum() * jnp.clip(progress, 0.0, 1.0)
    else:
        inside_decided = jnp.sum(inside & (row.canvas != config.corruption.mask))
    share = (row.committed - row.prompt + inside_decided) / jnp.maximum(row.limits.end - row.prompt, 1)
    return jnp.where(row.done, 1.0, jnp.clip(share, 0.0, 1.0)).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def copy_particles(state: State, source: Int[Array, "B"], which: Bool[Array, "B"], key: Key) -> State:
    """Replaces rows by copies of others; the copies draw from fresh keys, the other rows keep theirs."""
    copies = jax.tree.map(lambda x: x[source], state)
    return copies._replace(key=jnp.where(which, jax.random.split(key, len(which)), copies.key))


# --- twisted proposals


class _TwistedRule(NamedTuple):
    """A rule that draws from twisted logits; a tuple, so that equal choices share one compilation."""

    rule: Any
    twist: Any

    @property
    def functions(self) -> tuple[Any, ...]:
        """Whose tracing is checked before anything is compiled."""
        return self.rule, self.twist

    def __call__(
        self, key: Key, view: View, memory: Memory, *, temperature: Any, rule: Any, twist: Any
    ) -> tuple[Proposal, Memory]:
        """Draws tokens from the twisted logits, calls the rule, and keeps log p / q of the tokens that it
        accepted."""
        draw_key, rule_key = jax.random.split(key)
        # Processors see a view without statistics.
        blank = view._replace(stats=None, leave_one_out=None)  # type: ignore[arg-type]

        # What may not be emitted stays impossible whatever the twist does.
        def twisted(logits: Float[Array, "L V"]) -> Float[Array, "L V"]:
            return jnp.where(
                logits > NEVER, call_part("the twist", self.twist, logits, blank, **twist), NEVER
            )

        logits, q = twisted(view.logits), twisted(view.draw_logits)
        sample = draw(q, jax.random.uniform(draw_key, view.canvas.shape), temperature)
        stats = token_stats(logits, view.canvas, sample, view.eos)
        seen = view._replace(logits=logits, draw_logits=q, stats=stats, leave_one_out=stats)
        proposal, own = call_part("the twisted rule", self.rule, rule_key, seen, memory[0], **rule)
        ratio = draw_log_prob(view.draw_logits, sample, temperature) - draw_log_prob(q, sample, temperature)
        accepted = view.masked & (proposal.canvas == sample)
        return proposal, (own, jnp.sum(jnp.where(accepted, ratio, 0.0)).astype(jnp.float32))


class _TwistedInit(NamedTuple):
    init: Any

    def __call__(self, canvas: Array, vocab: int) -> Memory:
        return self.init(canvas, vocab), jnp.zeros((), jnp.float32)


def twisted_sampler(lm: LM, sampler: Sampler, twist: LogitsProcessor, temperature: Any) -> Sampler:
    """Makes the sampler that draws from twisted logits and keeps log p / q of the accepted tokens in its
    memory.
    """
    if not isinstance(twist, LogitsProcessor):
        raise refuse(
            "twist", getattr(twist, "name", twist), "a logits processor such as processors.bias({7: 2.0})"
        )
    if lm.corruption.mask is None:
        raise refuse("twist", twist.name, "None: a model of uniform noise redraws tokens that were accepted")
    complete = complete_sampler(sampler, lm.corruption, lm.model.config.autoregressive)
    temperature = complete.temperature if temperature is None else temperature
    check_number("temperature with twist", temperature, Above(0))
    rule = complete.rule
    if rule.variable_length or rule.leave_one_out:
        raise refuse("sampler.rule", rule.name, "with twist: a rule that accepts masks in place")
    made = replace(
        rule,
        function=_TwistedRule(rule.function, twist.function),
        params={"temperature": temperature, "rule": rule.params, "twist": twist.params},
        name=f"twisted {rule.name}",
        init=_TwistedInit(rule.init),
        needs_logits=True,
    )
    return complete._replace(rule=made, temperature=temperature)
