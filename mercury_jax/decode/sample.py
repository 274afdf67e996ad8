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
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode import constrained
from mercury_jax.decode.decode_config import DecodeConfig, prefill_width
from mercury_jax.decode.decoder import encodable_tokens
from mercury_jax.decode.defaults import EffortLike, choose_sampler
from mercury_jax.decode.drafting import Draft, DraftOutput, with_drafter
from mercury_jax.decode.grammar import Spec
from mercury_jax.decode.inputs import (
    MAX_TOKENS,
    Prompt,
    Prompts,
    Seeds,
    WholeNumbers,
    check_lm,
    check_whole,
    explain_wrong_params,
)
from mercury_jax.decode.request import (
    Request,
    configure,
    continue_request,
    encode_request,
    fork_of,
    resume_request,
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
from mercury_jax.decode.stop_texts import end_stopped_rows, watched_rows
from mercury_jax.decode.thinking import closed_thinking, decode_answer
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
    """Answers, and what they cost.

    Lists have one entry per answer, in the order prompt 0's `n` answers, prompt 1's `n` answers, and so on: answer k
    belongs to prompt k // n.
    """

    texts: list[str]  # the answers; of conversations without their thinking
    tokens: list[np.ndarray] = field(repr=False)  # emitted ids, without the end of text
    forwards: np.ndarray  # int [B], denoising and verifying passes of each row, one after the other (NFE)
    finish: list[str]  # "stop": the model or a stop text ended the answer; "length": max_tokens did; "paused"
    seconds: float  # of decoding, compilation included
    thinking: list[str | None] = field(repr=False)
    passes: int = 0  # of the device loop: those of the slowest row, encoding included
    # Tokens encoded, [B]; a prompt with several answers counts for the first of them.
    encoded: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))
    history: list[Frame] = field(repr=False, default_factory=list)  # one Frame per pass, on request
    logprobs: list[LogProbs] | None = field(repr=False, default=None)  # on request
    state: Session | None = field(repr=False, default=None)  # on request
    # int [B], canvases that these passes computed for each row: more than `forwards` with `Plan(lookahead=)`, whose
    # passes compute drafts too.
    evaluated: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))
    n: int = 1  # answers to each prompt
    draft: DraftOutput | None = field(
        repr=False, default=None
    )  # of the drafter, with `draft=`; `forwards` are of `lm`

    @property
    def text(self) -> str:
        """The first answer to the first prompt."""
        return self.texts[0]

    @property
    def groups(self) -> list[list[str]]:
        """The texts by prompt: one list of `n` answers for each."""
        return [self.texts[i : i + self.n] for i in range(0, len(self.texts), self.n)]

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
    n: int = 1,
    max_tokens: WholeNumbers = 64,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] | None = None,
    effort: EffortLike | Sequence[EffortLike] | None = None,
    stop: str | Sequence[str] | Sequence[Sequence[str] | None] | None = None,
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
    draft: Draft | LM | None = None,
) -> Output:
    """Decodes answers to each prompt.

    What may be a list below has one entry per prompt, and the n answers to a prompt share its entry. So do the
    parameters of a rule: `rules.threshold([0.5, 0.9])`.

    Args:
        lm: The model, from `mj.load()`.
        prompt: A text, a conversation (a list of {"role", "content"}, a content being a text or a list of text parts
            {"type": "text", "text": ...}), ids (a list, or an array of numpy or JAX), or a list of these; a 2-D array
            is a list of ids.
        n: Answers to each prompt, which is encoded once.
        max_tokens: Most tokens of an answer, its thinking not counted; one number or a list.
        seed: Answer j of prompt i draws from seed + i n + j; with a list, from seed[i] + j. In place of a number s it
            may be a key of `jax.random.key`, where `fold_in(key, k)` stands for s + k.
        sampler: A rule such as `rules.threshold(0.9)`, or a `Sampler`. None: the model's own.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens, one number or a list (None: the rule's own; 0: argmax).
        effort: "instant", "low", "medium", "high" or an `Effort`, or a list of these. Conversations then think first,
            within its budget.
        stop: Texts at which an answer ends: it is cut before the first of them (the one that ends first), and its
            tokens end with the one that completes the text. A list of texts for all prompts, or a list of such lists
            (or None). Thinking is not searched. Not with schema.
        logit_bias: {id: bias}, or a list with one such table (or None) per prompt.
        guidance: Weight of classifier-free guidance, one number or one per prompt; 0 changes nothing.
        negative: What the other branch of the guidance reads in place of the prompt: one, or one per prompt. None:
            nothing, so that it sees the answer alone. "masked": a mask in place of each token of the prompt, which
            is the guidance of LLaDA (`cfg_scale` of its generate.py).
        logprobs: Keep log-probabilities, with this many alternatives at each token.
        state: Continue from an earlier call's `Output.state`: `prompt` is what comes next, one for each answer of
            that call, or None to finish a call that `passes` stopped. A guided call is continued with the keys of
            both branches and its weight, or with another `guidance`: then both read what comes next.
        keep: Fill `Output.state`.
        passes: Stop after this many passes.
        history: Keep a `Frame` of every pass.
        mesh: Shard the rows over its `data` axis.
        schema: What every answer obeys (its thinking is free): a JSON Schema, a spec of `mj.grammar`, or a list of
            these with one, or None, per prompt. Needs the extra `serve`. Not with state, passes, guidance or mesh.
        draft: A diffusion model of the same tokenizer, or an `mj.Draft` of one: it drafts blocks, and `lm` verifies
            each in one pass. The answers are those of `lm` alone. For an `lm` that predicts the next token; not with
            plan, schema, guidance, state, keep or passes.

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
    for name, value in (("keep", keep), ("history", history)):
        if not isinstance(value, bool | np.bool_):
            raise refuse(name, value, "True or False")
    if passes is not None:
        passes = check_whole("passes", passes, 1, MAX_TOKENS, "a whole number from 1 on, or None")
    if prompt is None and state is None:
        allowed = "a prompt; or None with state=, which passes= and keep=True put into Output.state"
        raise refuse("prompt", None, allowed)
    request = Request(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan, temperature=temperature,
        effort=effort, logit_bias=logit_bias, guidance=guidance, negative=negative, logprobs=logprobs, state=state,
        mesh=mesh, schema=schema, n=n, stop=stop, draft=draft,
    ).checked()  # fmt: skip
    if draft is not None:
        lm, request = with_drafter(lm, request, keep=keep, passes=passes)
    grammars = None if schema is None else constrained.rows_of_request(lm, request, passes)
    if state is not None and prompt is None:
        request, session = resume_request(lm, request)
    else:
        request = encode_request(lm, request)
        if grammars is not None:
            request = constrained.with_grammar_mask(lm, request)
        elif (
            not (keep or history or passes or state or mesh or effort or stop)
            and guidance is negative is None
        ):
            answers, made, cached = _decode_at_once(lm, request)
            out = collect(lm, answers, request.prompts, began, cached=cached)
            return dataclasses.replace(out, passes=made, n=n)
        session = start(lm, request)
    cached = _cached(request, session.config)
    if grammars is not None:
        session, frames, made = constrained.run(lm, session, grammars, history)
    else:
        session, frames, made = _run(lm, session, passes, history)
    answers = read_answers(session.state)
    out = collect(lm, answers, session.prompts, began, frames, cached, session.stopped)
    if effort is not None and passes is None and grammars is None:
        out, session, more = _continue_empty_answers(lm, request, session, out)
        made += more
    keep = keep or state is not None or passes is not None
    return dataclasses.replace(
        out, passes=made, state=session if keep else None, n=n if prompt is not None else session.n
    )


def _cached(request: Request, config: DecodeConfig) -> np.ndarray:
    """Tokens [B] that were in the KV cache when a call began; all but the first answer to a prompt find it there."""
    cached = np.zeros(len(request.prompts), int)
    if request.state is not None:
        before = np.asarray(request.state.state.cache_length)[: request.state.rows]
        cached = np.repeat(before, len(cached) // len(before))
    if request.forked and request.rows is not None and config.model.config.pattern != "bidirectional":
        ready = np.asarray(encodable_tokens(config, jnp.asarray(request.rows.committed)))
        cached = np.where(np.arange(len(cached)) % request.n > 0, ready, cached)
    return cached


def _decode_at_once(lm: LM, request: Request) -> tuple[Answers, int, np.ndarray]:
    """Decodes a request that keeps nothing: one program, one transfer back. Also what was cached, as of `_cached`."""
    config, sampling, rows = configure(lm, request)
    fork = fork_of(request, len(rows.committed))
    with explain_wrong_params(lm):
        width = prefill_width(config, rows.tokens.shape[1], always=fork is not None)
        answers, made = jax.device_get(decode_program(config, width, lm.params, sampling, rows, fork))
    return answers, int(made), _cached(request, config)


def _run(lm: LM, session: Session, passes: int | None, history: bool) -> tuple[Session, list[Frame], int]:
    """Runs a session to its end, or for some passes; returns its frames if asked for, and the passes made."""
    watch = watched_rows(session)
    if not history and passes is None and watch is None:
        session, _, made = advance(lm, session, None)
        return session, [], int(np.max(jax.device_get(made)))
    frames: list[Frame] = []
    total, checked = 0, np.zeros(session.state.done.shape[0], int)
    while not session.done and (passes is None or total < passes):
        # Whole chunks and then single passes: two programs serve every number. Stop texts alone need no frames.
        size = HISTORY_PASSES if passes is None or passes - total >= HISTORY_PASSES else 1
        session, chunk, made = advance(lm, session, size if history or passes is not None else None, watch)
        host, count = jax.device_get(chunk), int(np.max(jax.device_get(made)))
        total += count
        if watch is not None:
            session, checked = end_stopped_rows(lm, session, checked)
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
    stopped: Mapping[int, str] = MappingProxyType({}),
) -> Output:
    """Makes the output of a call.

    Args:
        lm: Decodes the answers.
        found: Of all rows; those after the prompts' only fill a bucket.
        prompts: Of the call.
        began: `time.perf_counter()` at the start of the call.
        frames: To keep in the output.
        cached: Tokens [B] that were in the KV cache when the call began.
        stopped: The answers of the rows that a stop text has ended; their last token may hold more.

    Returns:
        The answers.

    Raises:
        ValueError: Names row and pass where the logits of a model were NaN.
    """
    host: Any = jax.device_get(found)
    count = len(prompts)
    check_nan_steps(host.nan_step[:count])
    tokens, first, end, done = host.tokens, host.prompt, host.end, host.done
    ends = np.where(done, end, np.maximum(host.committed, first))
    answers = [tokens[i, first[i] : ends[i]] for i in range(count)]
    seconds = time.perf_counter() - began
    decoded = []
    for i, (ids, prompt) in enumerate(zip(answers, prompts, strict=True)):
        thinking, text = decode_answer(lm, ids, prompt.chat)
        decoded.append((thinking, stopped.get(i, text)))
    stops = {lm.model.config.eos, *lm.model.config.ends}
    finish = []
    for i in range(count):  # the end of text is just after an answer that the model ended
        ended = i in stopped or not stops.isdisjoint(tokens[i, ends[i] : ends[i] + 1].tolist())
        finish.append(("stop" if ended else "length") if done[i] else "paused")
    logprobs = None
    if isinstance(host.logprobs, LogprobBuffer):
        kept: Any = host.logprobs
        logprobs = [LogProbs(*(x[i, first[i] : ends[i]] for x in kept)) for i in range(count)]
    draft = None
    if host.drafter != ():
        *counts, nan_step = (x[:count] for x in host.drafter)
        check_nan_steps(nan_step, "draft.lm: logits")
        draft = DraftOutput(*counts)
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
        draft=draft,
    )


def _continue_empty_answers(
    lm: LM, request: Request, session: Session, out: Output
) -> tuple[Output, Session, int]:
    """Continues conversations whose answer shows no text, after their thinking; also returns the further passes."""
    prompts, replies = request.prompts, [tuple(map(int, ids)) for ids in out.tokens]
    empty = [i for i, prompt in enumerate(prompts) if prompt.chat and not out.texts[i].strip()]
    which = [i for i in empty if i not in session.stopped]
    if not which:
        return out, session, 0
    for i in which:
        replies[i] = closed_thinking(lm.tokenizer, prompts[i].ids, replies[i])
    began = time.perf_counter() - out.seconds
    session = start(lm, continue_request(lm, request, replies, which))
    session, frames, made = _run(lm, session, None, bool(out.history))
    frames, answers = [*out.history, *frames], read_answers(session.state)
    more = collect(lm, answers, session.prompts, began, frames, stopped=session.stopped)
    texts, thinking, finish = list(out.texts), list(out.thinking), list(out.finish)
    tokens, logprobs = list(out.tokens), None if out.logprobs is None else list(out.logprobs)
    for i in which:
        tokens[i] = np.array([*replies[i], *more.tokens[i]], np.int32)
        thinking[i], text = decode_answer(lm, tokens[i], True)
        texts[i] = session.stopped.get(i, text)
        finish[i] = more.finish[i]
        if logprobs is not None and more.logprobs is not None:
            logprobs[i] = _join_logprobs(logprobs[i], len(replies[i]), more.logprobs[i])
    return dataclasses.replace(
        more, texts=texts, thinking=thinking, finish=finish, tokens=tokens, logprobs=logprobs,
        forwards=out.forwards + more.forwards, evaluated=out.evaluated + more.evaluated,
        encoded=out.encoded + more.encoded,
        draft=None if out.draft is None or more.draft is None else out.draft + more.draft,
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
