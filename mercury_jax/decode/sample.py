"""sample(): prompts in, answers out.

The path of a call: a `Request` holds the arguments; `request.encode_request` tokenizes the prompts; `request.start`
makes a `Session`; `session.advance` runs it on the device; `collect` reads the answers from its state.

`bench/abstract_params.py` lowers the programs of a call without running them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mercury_jax import decode
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import constrained
from mercury_jax.decode.answer_text import closed_thinking, decode_answer, end_stopped_rows, watched_rows
from mercury_jax.decode.grammar.spec import Spec
from mercury_jax.decode.inputs import (
    MAX_TOKENS,
    EffortLike,
    Prompt,
    Prompts,
    Seeds,
    WholeNumbers,
    check_lm,
    check_whole,
    explain_wrong_params,
)
from mercury_jax.decode.methods.acceptance import check_verifier
from mercury_jax.decode.methods.block_drafter import with_block_drafter
from mercury_jax.decode.methods.drafting import Draft, DraftOutput, with_drafter
from mercury_jax.decode.methods.prediction import check_predictor
from mercury_jax.decode.request import (
    Request,
    configure,
    continue_request,
    encode_request,
    fork_of,
    keeps_slots,
    resume_request,
    start,
)
from mercury_jax.decode.sampler import Param, SamplerLike
from mercury_jax.decode.session import (
    Answers,
    Session,
    advance,
    check_nan_steps,
    decode_program,
    read_answers,
)
from mercury_jax.decode.state import DecodeConfig, Frame, prefill_width
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM, BlockDrafter, Key, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# passes per dispatch while frames are kept: a static size, since it shapes the frame buffer
HISTORY_PASSES = 16


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
    draft: Draft | LM | BlockDrafter | str | Path | None = None,
    bad_words: str | Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    draft_text: str | Sequence[str | None] | None = None,
) -> Output:
    """Decodes answers to each prompt.

    Where an argument may be a list, the list has one entry per prompt, and all n answers to a prompt use that entry.
    The parameters of a rule may be lists too: `rules.threshold([0.5, 0.9])`.

    Args:
        lm: The model, from `mj.load()`.
        prompt: One prompt or a list of prompts. A prompt is a text; a conversation, which is a list of
            {"role", "content"} whose content is a text or a list of parts {"type": "text", "text": ...}; or token ids
            as a list, a numpy array or a JAX array. A 2-D array is a list of id prompts. A model with a vision tower
            also reads parts {"type": "image", "image": ..., "detail": "auto"} in messages of the user: a path, the
            bytes of a PNG, JPEG, WebP or GIF file, a PIL image, or an array [H, W, 3] of uint8. The detail is "low",
            "high", or "auto" for what the checkpoint's processor does.
        n: Answers per prompt. The prompt is encoded once and its KV cache is shared.
        max_tokens: Maximum number of tokens of an answer, not counting its thinking; one number or a list.
        seed: Answer j of prompt i uses the seed `seed + i * n + j`; with a list, `seed[i] + j`. A key of
            `jax.random.key` is allowed instead of a number; k is then added by `fold_in(key, k)`.
        sampler: A rule such as `rules.threshold(0.9)`, or a `Sampler`. None: the checkpoint's default, or else the
            default for its noise.
        plan: Block length, denoising steps, and reuse of cached keys and values.
        temperature: Sampling temperature of tokens, one number or a list. 0: argmax. None: the default of the rule.
        effort: "instant", "low", "medium", "high" or an `Effort`, or a list of these. In conversations the model then
            thinks before it answers, within the budget of the effort.
        stop: Stop texts: one, a list for all prompts, or a list of such lists (or None). The text of an answer is cut
            before the stop text that is completed first; its tokens include the one that completes the stop text.
            Thinking is not searched. Not with `schema`.
        logit_bias: {token id: bias}, or a list with one such table (or None) per prompt.
        guidance: Weight of classifier-free guidance, one number or one per prompt; 0 changes nothing.
        negative: The prompt of the unconditional branch of the guidance, one or one per prompt. None: no prompt, so
            this branch sees only the answer. "masked": a mask instead of each prompt token, which is the guidance of
            LLaDA (`cfg_scale` in its generate.py).
        logprobs: Number of alternatives per token for which log-probabilities are returned, in addition to the
            emitted token's. None: `Output.logprobs` is None.
        state: `Output.state` of an earlier call, to continue from its KV cache. `prompt` is then the text that
            follows, one for each answer of that call; or None to finish a call that `passes` stopped. A guided call
            continues with the caches of both branches and its weight, unless `guidance` sets another one; both
            branches then read `prompt`.
        keep: Whether to return the final state in `Output.state`.
        passes: Stop after this many passes and return the state. None: run until all answers are done.
        history: Whether to return a `Frame` of every pass in `Output.history`.
        mesh: Mesh over whose `data` axis the rows are sharded.
        schema: Constraint on every answer, but not on its thinking: a JSON Schema, a spec of `mj.grammar`, or a list
            with one of these (or None) per prompt. Where a grammar enforces a part of a schema only (`uniqueItems`),
            answers are validated at the end, and decoded again from the value at fault, up to 16 times. Needs the extra
            `serve`. Not with state, passes, guidance or mesh.
        draft: A diffusion model with the same tokenizer, or an `mj.Draft` of one; or what `mj.load_drafter` reads: a
            block drafter that was trained for `lm`, "smollm2-drafter", "lookup". It drafts blocks, and `lm`, a model
            that predicts the next token, verifies each block in one pass. The answers are those of `lm` alone, in the
            sense of `mj.Draft.method`. Not with plan, schema, guidance, state, keep or passes.
        bad_words: Texts that no answer holds, in whatever tokens: one, a list for all prompts, or a list of such lists
            (or None). A text that the prompt begins is not completed either. Thinking may hold them. It is a grammar
            of the answer (`mj.grammar.Without`): the answer is not blank, and what `schema` says of other arguments
            holds. Not with schema.
        draft_text: The text that the answer is expected to be, such as a file of which one line changes: one, or a list
            with one (or None) per prompt. A model that predicts the next token verifies up to 511 of its tokens in one
            pass, and the answers are those of `lm` alone with the same seed, decoded left to right. Other models start
            their canvases from the prediction, and a rule that replaces tokens keeps those that the model does not
            contradict; there the answers may differ. After an insertion or a deletion the rest of the prediction is
            used from its new place on. Not with draft, state, guidance, schema, bad_words, keep or passes.

    Returns:
        The answers and their cost.

    Raises:
        ValueError: Names the argument that does not fit, before any compute; or names row and pass if the logits of a
            model are NaN; or names the row without a valid answer after all attempts.

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
    if draft is None and draft_text is not None:
        sampler = check_predictor(lm, sampler, plan, dict(
            state=state, guidance=guidance, negative=negative, schema=schema, bad_words=bad_words, keep=keep,
            passes=passes,
        ))  # fmt: skip
    if draft is not None:  # its own settings plan the drafts
        plan = None if plan == Plan() else plan
        others = dict(
            draft_text=draft_text, plan=plan, state=state, guidance=guidance, negative=negative, schema=schema,
            bad_words=bad_words, keep=keep, passes=passes,
        )  # fmt: skip
        sampler = check_verifier(lm, sampler, others)
        if isinstance(draft, BlockDrafter | str | Path):
            lm, draft = with_block_drafter(lm, draft), None
        else:
            lm, draft = with_drafter(lm, draft)
    request = Request(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, temperature=temperature,
        plan=Plan() if plan is None else plan,
        effort=effort, logit_bias=logit_bias, guidance=guidance, negative=negative, logprobs=logprobs, state=state,
        mesh=mesh, schema=schema, bad_words=bad_words, n=n, stop=stop, draft=draft, passes=passes,
        draft_text=draft_text, reads_images=True,
    ).checked()  # fmt: skip
    if state is not None and prompt is None:
        request, session = resume_request(lm, request)
    else:
        request = encode_request(lm, request)
        # The fast path: when no state, frame or text is needed before the end, prefill and all passes are one program.
        pictured = any(prompt.images for prompt in request.prompts)
        watched = (keep, history, passes, state, mesh, effort, stop, request.grammars, pictured)
        if not any(watched) and guidance is negative is None:
            answers, made, cached = _decode_at_once(lm, request)
            out = collect(lm, answers, request.prompts, began, cached=cached)
            return dataclasses.replace(out, passes=made, n=n)
        session = start(lm, request)
    cached = _cached(request, session.config, session.state.tokens.shape[1])
    spent = np.zeros(session.rows, int)
    if request.grammars is not None:
        session, frames, made, spent = _run_constrained(lm, request, session, history)
    else:
        session, frames, made = _run(lm, session, passes, history)
    answers = read_answers(session.config, session.state)
    out = collect(lm, answers, session.prompts, began, frames, cached, session.stopped)
    if effort is not None and passes is None and request.grammars is None:
        out, session, more = _continue_empty_answers(lm, request, session, out)
        made += more
    keep = keep or state is not None or passes is not None
    return dataclasses.replace(
        out, passes=made, state=session if keep else None, n=n if prompt is not None else session.n,
        forwards=out.forwards + spent, evaluated=out.evaluated + spent,
    )  # fmt: skip


def _cached(request: Request, config: DecodeConfig, slots: int) -> np.ndarray:
    """Counts the tokens [B] that were in the KV cache before a call encoded anything, to be subtracted at its end."""
    cached = np.zeros(len(request.prompts), int)
    # A continued call starts from the cache of the earlier one; each of its rows may have n answers now.
    if request.state is not None and keeps_slots(config, slots, request.state.state):
        before = np.asarray(request.state.state.cache_length)[: request.state.rows]
        cached = np.repeat(before, len(cached) // len(before))
    # The prompt is encoded in the row of its first answer, and the other n - 1 rows copy its cache. A bidirectional
    # model has no cache to copy.
    if request.forked and request.rows is not None and config.model.config.pattern != "bidirectional":
        ready = np.asarray(config.encodable(jnp.asarray(request.rows.committed)))
        cached = np.where(np.arange(len(cached)) % request.n > 0, ready, cached)
    return cached


def _decode_at_once(lm: LM, request: Request) -> tuple[Answers, int, np.ndarray]:
    """Decodes a request that needs no state afterwards: one compiled program, one transfer to the host.

    Returns:
        The answers, the number of passes, and the cached tokens [B] (see `_cached`).
    """
    config, sampling, rows = configure(lm, request)
    fork = fork_of(request, len(rows.committed))
    with explain_wrong_params(lm):
        width = prefill_width(config, rows.tokens.shape[1], always=fork is not None)
        answers, made = jax.device_get(decode_program(config, width, lm.params, sampling, rows, fork))
    return answers, int(made), _cached(request, config, rows.tokens.shape[1])


def _run(lm: LM, session: Session, passes: int | None, history: bool) -> tuple[Session, list[Frame], int]:
    """Runs a session until all rows are done, or for at most `passes` passes.

    Returns:
        The session, its frames (empty without `history`), and the number of passes made.
    """
    watch = watched_rows(session)
    if not history and passes is None and watch is None:
        session, _, made = advance(lm, session, None)
        return session, [], int(np.max(jax.device_get(made)))
    frames: list[Frame] = []
    total, checked = 0, np.zeros(session.state.done.shape[0], int)
    while not session.done and (passes is None or total < passes):
        # The number of frames is static. Chunks of HISTORY_PASSES and then single passes serve every `passes` with two
        # compiled programs. Stop texts alone need no frames: the loop returns when a watched row commits a block.
        size = HISTORY_PASSES if passes is None or passes - total >= HISTORY_PASSES else 1
        session, chunk, made = advance(lm, session, size if history or passes is not None else None, watch)
        host, count = jax.device_get(chunk), int(np.max(jax.device_get(made)))
        total += count
        if watch is not None:
            session, checked = end_stopped_rows(lm, session, checked)
        for i in range(count if history else 0):
            frames.append(jax.tree.map(lambda x, i=i, n=session.rows: x[i, :n], host))
    return session, frames, total


def _run_constrained(
    lm: LM, request: Request, session: Session, history: bool
) -> tuple[Session, list[Frame], int, np.ndarray]:
    """Runs a call with grammars. An answer that fails the check of what its grammar leaves open is decoded again.

    The other rows run again too, in the same program; their answers are there from the start.

    Returns:
        As `_run`, and the passes [B] of earlier attempts.
    """
    assert request.grammars is not None and request.rows is not None
    rows, spent, total, attempt = list(request.grammars), np.zeros(session.rows, int), 0, 0
    while True:
        session, frames, made = constrained.run(lm, session, rows, history)
        total, attempt = total + made, attempt + 1
        again = [None if row is None else row.again(attempt) for row in rows]
        invalid = np.array([row is not None for row in again])
        if not invalid.any():
            return session, frames, total, spent
        if attempt > constrained.RETRIES:
            i = int(np.argmax(invalid))
            name = next(row for row in again if row is not None).walker.grammar.name
            raise ValueError(
                f"{name}: the answer of row {i} is not valid after {attempt} attempts. A grammar enforces a part "
                "of the schema; a simpler schema, another seed or more max_tokens may help"
            )
        spent += np.asarray(session.state.nfe)[: session.rows]
        rows = [new or (row and row.repeated()) for new, row in zip(again, rows, strict=True)]
        seeds = _retry_seeds(request.rows.seeds, invalid, attempt)
        session = start(lm, request._replace(rows=request.rows._replace(seeds=seeds)))
        session = _warmer(session, invalid)


def _retry_seeds(seeds: np.ndarray | Key, rows: np.ndarray, attempt: int) -> np.ndarray | Key:
    """The seeds of another attempt, or keys: other ones in some of the rows."""
    if isinstance(seeds, np.ndarray):
        return np.where(rows, constrained.retry_seed(seeds, attempt), seeds)
    folded = jax.vmap(lambda key: jax.random.fold_in(key, attempt))(seeds)
    return jnp.where(jnp.asarray(rows), folded, seeds)


def _warmer(session: Session, rows: np.ndarray) -> Session:
    """A session whose temperature in some rows is high enough for other answers."""
    sampling = session.state.sampling
    temperature = np.array(sampling.sampler.temperature)
    temperature[: len(rows)][rows] = np.maximum(temperature[: len(rows)][rows], constrained.RETRY_TEMPERATURE)
    sampling = sampling._replace(sampler=sampling.sampler._replace(temperature=temperature))
    return dataclasses.replace(session, state=session.state._replace(sampling=sampling))


def _continue_empty_answers(
    lm: LM, request: Request, session: Session, out: Output
) -> tuple[Output, Session, int]:
    """Continues conversations whose answer has no text, such as those that never closed their thinking section.

    The thinking section is closed, and decoding continues with the answer.
    """
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
    frames, answers = [*out.history, *frames], read_answers(session.config, session.state)
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
        more, first=out.first, texts=texts, thinking=thinking, finish=finish, tokens=tokens, logprobs=logprobs,
        forwards=out.forwards + more.forwards, evaluated=out.evaluated + more.evaluated,
        encoded=out.encoded + more.encoded,
        draft=None if out.draft is None or more.draft is None else out.draft + more.draft,
    ), session, made  # fmt: skip


# --- the result


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the n tokens of one answer, in nats, computed before any logits processor.

    The log-probability of a token comes from the pass that accepted it, conditioned on the canvas of that pass.

    Attributes:
        tokens: float [n], log-probabilities of the emitted tokens.
        top_ids: int [n, k], the k most probable ids at each position, most probable first.
        top: float [n, k], log-probabilities of `top_ids`.
    """

    tokens: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class Output:
    """The answers of a call and their cost.

    Lists and arrays have one entry per answer, B in all: first the `n` answers to prompt 0, then the `n` answers to
    prompt 1, and so on. Answer k belongs to prompt k // n.

    Attributes:
        texts: The answers; for conversations, without the thinking.
        tokens: Emitted ids, without the end-of-text token.
        forwards: int [B], denoising and verifying passes of each row (NFE); prefill is not counted.
        finish: What ended each answer: "stop", the model or a stop text; "length", max_tokens; "paused", passes=.
        seconds: Wall time of the call, compilation included.
        thinking: The thinking of each answer; None: without thinking.
        passes: Iterations of the decoding loop: the passes of the slowest row, those that only encode
            included.
        encoded: int [B], tokens written to the KV cache. The prompt is encoded once, and counts for the first
            of its n answers.
        history: One frame per pass, if `history=True` was asked for.
        logprobs: Log-probabilities, if `logprobs=` was asked for.
        state: The session to continue, with `keep=True`, `state=` or `passes=`.
        evaluated: int [B], canvases computed for each row. Equal to `forwards` except with
            `Plan(lookahead=)`, where a pass also computes drafts of later canvases.
        n: Number of answers to each prompt.
        draft: Counts of the drafter, with `draft=`; `forwards` counts the passes of `lm` only.
        first: int [B], absolute position of each answer's first token, to show the history.
        tokenizer: The model's tokenizer, to show the history.
    """

    texts: list[str]
    tokens: list[np.ndarray] = field(repr=False)
    forwards: np.ndarray
    finish: list[str]
    seconds: float
    thinking: list[str | None] = field(repr=False)
    passes: int = 0
    encoded: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))
    history: list[Frame] = field(repr=False, default_factory=list)
    logprobs: list[LogProbs] | None = field(repr=False, default=None)
    state: Session | None = field(repr=False, default=None)
    evaluated: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))
    n: int = 1
    draft: DraftOutput | None = field(repr=False, default=None)
    first: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))
    tokenizer: AnyTokenizer | None = field(repr=False, default=None)

    def __repr__(self) -> str:
        answers = "" if len(self.texts) == 1 else f"{len(self.texts)} answers, the first "
        cost = (
            f"tokens={sum(self.lengths)}, forwards={int(np.sum(self.forwards))}, seconds={self.seconds:.2f}"
        )
        finish = ", ".join(sorted(set(self.finish)))
        return (
            f"Output({answers}text={shortened(self.texts[0])}, {cost}, finish={finish})"
            if self.texts
            else "Output()"
        )

    @property
    def text(self) -> str:
        """The first answer to the first prompt."""
        return self.texts[0]

    @property
    def groups(self) -> list[list[str]]:
        """The texts grouped by prompt: one list of `n` answers per prompt."""
        return [self.texts[i : i + self.n] for i in range(0, len(self.texts), self.n)]

    @property
    def lengths(self) -> list[int]:
        """Number of emitted tokens of each answer."""
        return [len(t) for t in self.tokens]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens of all rows divided by the forward passes of all rows."""
        return float(sum(self.lengths) / max(int(self.forwards.sum()), 1))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows divided by the seconds of the call."""
        return sum(self.lengths) / max(self.seconds, 1e-9)

    def plot(self, row: int = 0) -> Figure:
        """Draws the confidence of each position in each denoising step; dots show where tokens were accepted.

        Args:
            row: Index of the answer.

        Returns:
            A figure of matplotlib, which notebooks show.

        Raises:
            ValueError: The call kept no history, there is no such answer, or matplotlib is missing.

        Example:
            >>> mj.sample(lm, prompt, history=True).plot()
        """
        return decode.pictures().plot(self, row)

    def save(self, path: str | Path, row: int = 0, prompt: str = "", dark: bool = False) -> Path:
        """Writes an answer after every denoising step to a file to share: a page with a slider, or an animation.

        Args:
            path: The file; ".html" is a page that needs no network and no other file, ".gif" an animated picture.
            row: Index of the answer.
            prompt: A text to show above the answer in a page.
            dark: Whether the background of an animation is dark. A page is light or dark as the reader's system.

        Returns:
            `path`.

        Raises:
            ValueError: Another suffix, a call without `history=True`, no such answer, a file that cannot be written,
                or matplotlib, which draws the animation, is missing.

        Example:
            >>> out = mj.sample(lm, prompt, history=True)
            >>> out.save("steps.html")
        """
        return decode.pictures().save(self, path, row, prompt, dark)

    def _repr_html_(self) -> str:
        return decode.pictures().output(self)


def collect(
    lm: LM,
    found: Answers,
    prompts: Sequence[Prompt],
    began: float,
    frames: list[Frame] | None = None,
    cached: np.ndarray | int = 0,
    stopped: Mapping[int, str] = MappingProxyType({}),
) -> Output:
    """Makes the output of a call from the state of its rows.

    Args:
        stopped: {row: text} of the rows that a stop text ended. The text is cut, since the last token of such a row
            may contain characters after the stop text.
    """
    host: Any = jax.device_get(found)
    count = len(prompts)
    check_nan_steps(host.nan_step[:count])
    tokens, first, end, done = host.tokens, host.prompt, host.end, host.done
    # An unfinished row (`passes=`) shows the blocks that it has committed.
    ends = np.where(done, end, np.maximum(host.committed, first))
    answers = [tokens[i, first[i] : ends[i]] for i in range(count)]
    seconds = time.perf_counter() - began
    decoded = []
    for i, (ids, prompt) in enumerate(zip(answers, prompts, strict=True)):
        thinking, text = decode_answer(lm, ids, prompt.chat)
        decoded.append((thinking, stopped.get(i, text)))
    stops = {lm.model.config.eos, *lm.model.config.ends}
    finish = []
    for i in range(count):  # if the model ended the answer, its end-of-text token is the one after the answer
        ended = i in stopped or not stops.isdisjoint(tokens[i, ends[i] : ends[i] + 1].tolist())
        finish.append(("stop" if ended else "length") if done[i] else "paused")
    logprobs = None
    if isinstance(host.logprobs, LogprobBuffer):
        kept: Any = host.logprobs
        logprobs = [LogProbs(*(x[i, first[i] : ends[i]] for x in kept)) for i in range(count)]
    counts, draft = {name: x[:count] for name, x in host.method.items()}, None
    if "proposed" in counts:
        check_nan_steps(counts["nan_step"], "draft.lm: logits")
        draft = DraftOutput(counts["forwards"], counts["proposed"], counts["accepted"])
    return Output(
        texts=[answer for _, answer in decoded],
        tokens=answers,
        forwards=host.nfe[:count],
        evaluated=counts.get("evaluated", host.nfe[:count]),
        finish=finish,
        seconds=seconds,
        thinking=[thinking for thinking, _ in decoded],
        encoded=host.cache_length[:count] - cached,
        history=frames or [],
        logprobs=logprobs,
        draft=draft,
        first=first[:count],
        tokenizer=lm.tokenizer,
    )


def _join_logprobs(before: LogProbs, size: int, behind: LogProbs) -> LogProbs:
    """Concatenates the log-probabilities of the first `size` tokens of an answer and of its continuation.

    If `size` exceeds the tokens of `before`, the extra ones are the inserted tokens that close the thinking. The model
    did not sample them, so their log-probability is given as 0.
    """

    def join(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old = old[:size]
        closing = np.zeros((size - len(old), *old.shape[1:]), old.dtype)
        return np.concatenate([old, closing, new])

    pairs = ((before.tokens, behind.tokens), (before.top_ids, behind.top_ids), (before.top, behind.top))
    return LogProbs(*(join(old, new) for old, new in pairs))
