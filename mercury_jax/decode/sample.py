"""sample(): prompts in, answers out.

The path of a call: `Request` holds its arguments; `request.encode_request` encodes the prompts; `request.start` makes a
`Session`; `decoder.advance` runs it on the device; `collect` reads the answers off its state.

`abstract_session`, `lower_run` and `lower_prefill` lower the programs of a call from shapes alone, to compile them
ahead of time or to inspect them. Nothing is computed; `lm.params` may be `jax.ShapeDtypeStruct`s with shardings.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode import constrained
from mercury_jax.decode.decode_config import prefill_width
from mercury_jax.decode.defaults import Effort, choose_sampler
from mercury_jax.decode.grammar import Spec
from mercury_jax.decode.inputs import MAX_TOKENS, Prompt, Prompts, check_lm, check_whole, explain_wrong_params
from mercury_jax.decode.request import (
    Request,
    check_session,
    configure,
    continue_request,
    encode_request,
    resolve_sampler,
    row_mesh,
    rows_of,
    start,
)
from mercury_jax.decode.sampler import Param, SamplerLike
from mercury_jax.decode.session import (
    Answers,
    Session,
    advance,
    check_nan_steps,
    decode_program,
    prefill_program,
    read_answers,
    run_program,
    run_sharded_program,
)
from mercury_jax.decode.state import Frame, first_state
from mercury_jax.decode.thinking import closed_thinking
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.types import LM

HISTORY_PASSES = 16  # passes per dispatch while frames are kept


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of one answer's tokens, in nats, by the model before any logits processor.

    Each is that of the pass that wrote the token, given what the canvas held then.
    """

    tokens: np.ndarray  # float [n]
    top_ids: np.ndarray  # int [n, k], most probable first
    top: np.ndarray  # float [n, k]


@dataclass(frozen=True)
class Output:
    """Answers, and what they cost. Lists have one entry per prompt."""

    texts: list[str]  # the answers; of conversations without their thinking
    tokens: list[np.ndarray] = field(repr=False)  # emitted ids, without the end of text
    forwards: np.ndarray  # int [B], denoising and verifying passes of each row, one after the other (NFE)
    finish: list[str]  # "stop": the model ended its answer; "length": max_tokens did; "paused"
    seconds: float  # of decoding, compilation included
    thinking: list[str | None] = field(repr=False)
    passes: int = 0  # of the device loop: those of the slowest row, encoding included
    encoded: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))  # tokens encoded, [B]
    history: list[Frame] = field(repr=False, default_factory=list)  # one Frame per pass, on request
    logprobs: list[LogProbs] | None = field(repr=False, default=None)  # on request
    state: Session | None = field(repr=False, default=None)  # on request
    # int [B], canvases that these passes computed for each row: more than `forwards` with `Plan(lookahead=)`, whose
    # passes compute drafts too.
    evaluated: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))

    @property
    def text(self) -> str:
        """The answer to the first prompt."""
        return self.texts[0]

    @property
    def lengths(self) -> list[int]:
        """Emitted tokens of each answer."""
        return [len(t) for t in self.tokens]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forward passes, summed over the rows."""
        return float(sum(self.lengths) / max(int(self.forwards.sum()), 1))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows over the seconds of the call."""
        return sum(self.lengths) / max(self.seconds, 1e-9)


def sample(
    lm: LM,
    prompt: Prompts | None,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] | None = None,
    effort: str | Effort | None = None,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    guidance: Param | Sequence[float] | None = None,
    negative: Prompts | None = None,
    logprobs: int | None = None,
    state: Session | None = None,
    keep: bool = False,
    passes: int | None = None,
    history: bool = False,
    mesh: Mesh | None = None,
    schema: Mapping[str, Any] | bool | Spec | Sequence[Mapping[str, Any] | bool | Spec | None] | None = None,
) -> Output:
    """Decodes an answer to each prompt.

    Args:
        lm: The model, from `mj.load()`.
        prompt: A text, a conversation (a list of {"role", "content"}, a content being a text or a list of text parts
            {"type": "text", "text": ...}), ids, or a list of these.
        max_tokens: Most tokens of an answer, its thinking not counted.
        seed: Row i draws from seed + i.
        sampler: A rule such as `rules.threshold(0.9)`, or a `Sampler`. None: the model's own.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens, one number or one per prompt (None: the rule's own; 0: argmax).
        effort: "instant", "low", "medium", "high" or an `Effort`. Conversations then think first, within its budget.
        logit_bias: {id: bias}, or a list with one such table (or None) per prompt.
        guidance: Weight of classifier-free guidance, one number or one per prompt; 0 changes nothing.
        negative: What the other branch of the guidance reads in place of the prompt: one, or one per prompt. None:
            the answer alone.
        logprobs: Keep log-probabilities, with this many alternatives at each token.
        state: Continue from an earlier call's `Output.state`: `prompt` is what comes next, or None to finish a call
            that `passes` stopped.
        keep: Fill `Output.state`.
        passes: Stop after this many passes.
        history: Keep a `Frame` of every pass.
        mesh: Shard the rows over its `data` axis.
        schema: What every answer obeys (its thinking is free): a JSON Schema, a spec of `mj.grammar`, or a list of
            these with one, or None, per prompt. Needs the extra `serve`. Not with state, passes, guidance or mesh.

    Returns:
        The answers.

    Raises:
        ValueError: Names the argument that does not fit, before any compute; or row and pass where the logits of a
            model are NaN.

    Example:
        >>> out = mj.sample(lm, "def fibonacci(n):", max_tokens=64)
        >>> out.text, out.forwards
    """
    began = time.perf_counter()
    check_lm(lm)
    if passes is not None:
        passes = check_whole("passes", passes, 1, MAX_TOKENS, "a whole number from 1 on, or None")
    request = Request(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan, temperature=temperature,
        effort=effort, logit_bias=logit_bias, guidance=guidance, negative=negative, logprobs=logprobs, state=state,
        mesh=mesh, schema=schema,
    ).checked()  # fmt: skip
    grammars = None if schema is None else constrained.rows_of_request(lm, request, passes)
    if state is not None and prompt is None:
        check_session(lm, state)
        # Running a session uses its state up: the caller's stays readable.
        session = dataclasses.replace(state, state=jax.tree.map(jnp.copy, state.state))
        request = resolve_sampler(lm, request._replace(prompts=session.prompts))
    else:
        request = encode_request(lm, request)
        if grammars is not None:
            request = constrained.with_grammar_mask(lm, request)
        elif not (keep or history or passes or state or mesh or effort) and guidance is negative is None:
            answers, made = _decode_at_once(lm, request)
            return dataclasses.replace(collect(lm, answers, request.prompts, began), passes=made)
        session = start(lm, request)
    cached = np.zeros(session.rows, int)
    if state is not None:
        cached = np.asarray(state.state.cache_length)[: session.rows]
    if grammars is not None:
        session, frames, made = constrained.run(lm, session, grammars, history)
    else:
        session, frames, made = _run(lm, session, passes, history)
    out = collect(lm, read_answers(session.state), session.prompts, began, frames, cached)
    if effort is not None and passes is None and grammars is None:
        out, session, more = _continue_empty_answers(lm, request, session, out)
        made += more
    keep = keep or state is not None or passes is not None
    return dataclasses.replace(out, passes=made, state=session if keep else None)


def _decode_at_once(lm: LM, request: Request) -> tuple[Answers, int]:
    """Decodes a request that keeps nothing: one program, one transfer back."""
    config, sampling, rows = configure(lm, request)
    with explain_wrong_params(lm):
        width = prefill_width(config, rows.tokens.shape[1])
        answers, made = jax.device_get(decode_program(config, width, lm.params, sampling, rows))
    return answers, int(made)


def _run(lm: LM, session: Session, passes: int | None, history: bool) -> tuple[Session, list[Frame], int]:
    """Runs a session to its end, or for some passes; returns its frames if asked for, and the passes made."""
    if not history and passes is None:
        session, _, made = advance(lm, session, None)
        return session, [], int(np.max(jax.device_get(made)))
    frames: list[Frame] = []
    total = 0
    while not session.done and (passes is None or total < passes):
        # Whole chunks and then single passes: two programs serve every number.
        size = HISTORY_PASSES if passes is None or passes - total >= HISTORY_PASSES else 1
        session, chunk, made = advance(lm, session, size)
        host, count = jax.device_get(chunk), int(np.max(jax.device_get(made)))
        total += count
        for i in range(count if history else 0):
            frames.append(jax.tree.map(lambda x, i=i, n=session.rows: x[i, :n], host))
    return session, frames, total


def collect(
    lm: LM,
    found: Answers,
    prompts: Sequence[Prompt],
    began: float,
    frames: list[Frame] | None = None,
    cached: np.ndarray | int = 0,
) -> Output:
    """Makes the output of a call.

    Args:
        lm: Decodes the answers.
        found: Of all rows; those after the prompts' only fill a bucket.
        prompts: Of the call.
        began: `time.perf_counter()` at the start of the call.
        frames: To keep in the output.
        cached: Tokens [B] that were in the KV cache when the call began.

    Returns:
        The answers.

    Raises:
        ValueError: Names row and pass where the logits of a model were NaN.
    """
    host: Any = jax.device_get(found)
    count = len(prompts)
    check_nan_steps(host.nan_step[:count])
    tokens, prompt, end, done = host.tokens, host.prompt, host.end, host.done
    ends = np.where(done, end, np.maximum(host.committed, prompt))
    answers = [tokens[i, prompt[i] : ends[i]] for i in range(count)]
    seconds = time.perf_counter() - began
    decoded = [decode_answer(lm, ids, p.chat) for ids, p in zip(answers, prompts, strict=True)]
    stops = {lm.model.config.eos, *lm.model.config.ends}
    finish = []
    for i in range(count):  # the end of text is just after an answer that the model ended
        ended = not stops.isdisjoint(tokens[i, ends[i] : ends[i] + 1].tolist())
        finish.append(("stop" if ended else "length") if done[i] else "paused")
    logprobs = None
    if isinstance(host.logprobs, LogprobBuffer):
        kept: Any = host.logprobs
        logprobs = [LogProbs(*(x[i, prompt[i] : ends[i]] for x in kept)) for i in range(count)]
    return Output(
        texts=[answer for _, answer in decoded],
        tokens=answers,
        forwards=host.nfe[:count],
        evaluated=host.evaluated[:count],
        finish=finish,
        seconds=seconds,
        thinking=[thinking for thinking, _ in decoded],
        encoded=host.cache_length[:count] - cached,
        history=frames or [],
        logprobs=logprobs,
    )


def decode_answer(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """Decodes emitted ids to (thinking or None, answer); an answer to a raw text has no thinking.

    Args:
        lm: Its tokenizer decodes.
        ids: Of one answer.
        chat: Whether the prompt was a conversation.

    Returns:
        The thinking or None, and the answer.
    """
    if chat:
        return lm.tokenizer.split_answer(ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())


def _continue_empty_answers(
    lm: LM, request: Request, session: Session, out: Output
) -> tuple[Output, Session, int]:
    """Continues conversations whose answer shows no text, after their thinking; also returns the further passes."""
    prompts, replies = request.prompts, [tuple(map(int, ids)) for ids in out.tokens]
    which = [i for i, prompt in enumerate(prompts) if prompt.chat and not out.texts[i].strip()]
    if not which:
        return out, session, 0
    for i in which:
        replies[i] = closed_thinking(lm.tokenizer, prompts[i].ids, replies[i])
    began = time.perf_counter() - out.seconds
    session = start(lm, continue_request(lm, request, replies, which))
    session, frames, made = _run(lm, session, None, bool(out.history))
    more = collect(lm, read_answers(session.state), session.prompts, began, [*out.history, *frames])
    texts, thinking, finish = list(out.texts), list(out.thinking), list(out.finish)
    tokens, logprobs = list(out.tokens), None if out.logprobs is None else list(out.logprobs)
    for i in which:
        tokens[i] = np.array([*replies[i], *more.tokens[i]], np.int32)
        thinking[i], texts[i] = decode_answer(lm, tokens[i], True)
        finish[i] = more.finish[i]
        if logprobs is not None and more.logprobs is not None:
            logprobs[i] = _join_logprobs(logprobs[i], len(replies[i]), more.logprobs[i])
    return dataclasses.replace(
        more, texts=texts, thinking=thinking, finish=finish, tokens=tokens, logprobs=logprobs,
        forwards=out.forwards + more.forwards, evaluated=out.evaluated + more.evaluated,
        encoded=out.encoded + more.encoded,
    ), session, made  # fmt: skip


def _join_logprobs(before: LogProbs, size: int, behind: LogProbs) -> LogProbs:
    """Joins those of `size` tokens, the last of which may be a closing token that no model wrote (0), and of others."""

    def join(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old = old[:size]
        closing = np.zeros((size - len(old), *old.shape[1:]), old.dtype)
        return np.concatenate([old, closing, new])

    pairs = ((before.tokens, behind.tokens), (before.top_ids, behind.top_ids), (before.top, behind.top))
    return LogProbs(*(join(old, new) for old, new in pairs))


# --- programs from shapes alone


def abstract_session(
    lm: LM, rows: int, context: int, answer: int | None = None, mesh: Mesh | None = None
) -> tuple[Session, int | None]:
    """Makes the session of a call as shapes.

    Args:
        lm: The model, decoded by its own sampler and plan.
        rows: Prompts of the call.
        context: Tokens of a row, prompt and answer together.
        answer: Tokens of the answer among them; None: one block.
        mesh: As of `sample`.

    Returns:
        A session whose state consists of shapes, and the tokens of one pass over its long prompts (None where the
        decoder's own steps encode them).

    Raises:
        ValueError: The sizes do not fit the model's context.
    """
    config = lm.model.config
    answer = min(config.block, context - 1) if answer is None else answer
    at_least(1, rows=rows, answer=answer)
    if not answer < context <= config.context:
        raise refuse("context", context, f"{answer + 1}..{config.context}: the model's context")
    prompts = [Prompt([config.pad] * (context - answer), False)] * rows
    sampler, plan = choose_sampler(lm, None, Plan(), None)
    request = Request(sampler=sampler, plan=plan, mesh=mesh, rows=rows_of(prompts, answer, 0))
    decode_config, sampling, padded = configure(lm, request)
    state = jax.eval_shape(lambda: first_state(decode_config, sampling, padded))
    on = sharding.model_parallel_mesh(lm.params)
    if on is not None:  # a shape alone does not say where its array lies
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shardings = sharding.cache_shardings(state.cache, on)
        state = state._replace(cache=jax.tree.map(place, state.cache, shardings))
    session = Session(decode_config, state, rows, row_mesh(lm, mesh))
    width = prefill_width(decode_config, padded.tokens.shape[1])
    return session, None if int(np.max(padded.committed)) <= decode_config.own_prefill else width


def lower_run(lm: LM, session: Session, passes: int | None = None) -> jax.stages.Lowered:
    """Lowers the loop of passes for the devices that the parameters' shardings name.

    Args:
        lm: Its parameters may be shapes.
        session: From `abstract_session`, or a real one.
        passes: Most passes; None: until every row is done.

    Returns:
        The lowered program.
    """
    varying = lm.params, session.state, passes
    if session.mesh is None:
        return run_program.lower(session.config, *varying)
    return run_sharded_program.lower(session.config, session.mesh, *varying)


def lower_prefill(lm: LM, session: Session, width: int) -> jax.stages.Lowered:
    """Lowers the loop over a long prompt, for the same devices.

    Args:
        lm: Its parameters may be shapes.
        session: From `abstract_session`, or a real one.
        width: Tokens per pass.

    Returns:
        The lowered program.
    """
    return prefill_program.lower(session.config, lm.params, session.state, width)
