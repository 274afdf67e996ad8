"""sample(): prompts in, answers out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import ask, constrained, launch, silent
from mercury_jax.decode.arguments import check_lm, checked_plan
from mercury_jax.decode.gate import Gate
from mercury_jax.decode.output import LogProbs, Output, Session, collect, decoded
from mercury_jax.decode.prompts import Prompt, check_room, normalise
from mercury_jax.decode.state import Frame
from mercury_jax.types import LM

__all__ = ["LogProbs", "Output", "Session", "sample"]

HISTORY = 16  # passes of one dispatch while frames are kept


def sample(
    lm: LM,
    prompt: Any,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: Any = None,
    effort: Any = None,
    logit_bias: Any = None,
    guidance: Any = None,
    negative: Any = None,
    logprobs: int | None = None,
    state: Session | None = None,
    keep: bool = False,
    passes: int | None = None,
    history: bool = False,
    mesh: Mesh | None = None,
    schema: Any = None,
) -> Output:
    """Decode an answer to each prompt.

    prompt: a text, a conversation (list of {"role", "content"}, a content being a text or a list of text parts
        {"type": "text", "text": ...}), ids, or a list of these.
    max_tokens: most tokens of an answer, its thinking not counted. seed: row i draws from seed + i.
    sampler: a rule such as `rules.threshold(0.9)` (the default) or a `Sampler`.
    plan: block, steps and reuse of keys. temperature: of the drawn tokens (None: the rule's own; 0: argmax).
    effort: "instant", "low", "medium", "high" or an `Effort`; conversations then think first, within its
        room. logit_bias: {id: bias}, or a list of these, one a prompt.
    guidance: weight of classifier-free guidance, or one a prompt; 0 changes nothing. negative: what stands in
        the prompt's place on the other side (default: nothing), one or one a prompt.
    logprobs: keep log-probabilities, with so many alternatives at each token.
    state: go on from an earlier call's `Output.state`: `prompt` is what is said next, or None to finish a
        call that `passes` stopped. keep: fill `Output.state`. passes: stop after so many.
    history: keep a Frame of every pass. mesh: spread the rows over its `data` axis.
    schema: what every answer obeys (its thinking is free): a JSON Schema, a spec of `mj.grammar`, or a list of
        these with one, or None, for each prompt. Needs the extra `serve`. Not with state, passes, guidance, mesh.
    Raises ValueError naming the argument that does not fit before any compute, or row and pass where a
    model's logits turn out to be NaN.
    """
    began = time.perf_counter()
    keep = keep or state is not None or passes is not None
    check_lm(lm)
    if passes is not None and (
        isinstance(passes, bool) or not isinstance(passes, int | np.integer) or passes < 1
    ):
        raise refuse("passes", passes, "a whole number from 1 on, or None")
    asked = ask.checked(ask.Ask(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=checked_plan(plan),
        temperature=temperature, effort=effort, logit_bias=logit_bias, guidance=guidance, negative=negative,
        logprobs=logprobs, state=state, mesh=mesh, schema=schema,
    ))  # fmt: skip
    gates = None if schema is None else _gates(lm, asked, passes)
    job, prompts = ask.prepare(lm, asked)
    before = np.zeros(job.state.length.shape[0], int) if state is None else ask.encoded_before(job, state)
    if gates is None:
        job, frames, used = _run(lm, job, passes, history)
    else:
        job, frames, used = constrained.run(lm, constrained.gated(job, gates), gates, history)
    out = collect(lm, job, prompts, began, frames, before)
    if effort is not None and passes is None and gates is None:
        out, job, more = _answered(lm, asked, job, prompts, out)
        used += more
    return dataclasses.replace(out, passes=used, state=Session(job, prompts) if keep else None)


def _answered(
    lm: LM, asked: ask.Ask, job: launch.Job, prompts: Sequence[Prompt], out: Output
) -> tuple[Output, launch.Job, int]:
    """(answers, job, further passes): conversations that ended in silence are answered behind what they said."""
    rows = [i for i, prompt in enumerate(prompts) if prompt.chat and not out.texts[i].strip()]
    if not rows:
        return out, job, 0
    said = [tuple(map(int, ids)) for ids in out.tokens]
    for i in rows:
        said[i] = silent.read(lm.tokenizer, prompts[i].ids, said[i])
    history = bool(out.history)
    began = time.perf_counter() - out.seconds
    job, frames, used = _run(lm, ask.answering(lm, asked, prompts, said, rows), None, history)
    more = collect(lm, job, prompts, began, [*out.history, *frames], np.zeros(len(prompts), int))
    texts, thinking, finish = list(out.texts), list(out.thinking), list(out.finish)
    tokens, nats = list(out.tokens), None if out.logprobs is None else list(out.logprobs)
    for i in rows:
        tokens[i] = np.array([*said[i], *more.tokens[i]], np.int32)
        thinking[i], texts[i] = decoded(lm, tokens[i], True)
        finish[i] = more.finish[i]
        if nats is not None and more.logprobs is not None:
            nats[i] = _joined(nats[i], len(said[i]), more.logprobs[i])
    return dataclasses.replace(
        more, texts=texts, thinking=thinking, finish=finish, tokens=tokens, logprobs=nats,
        forwards=out.forwards + more.forwards, encoded=out.encoded + more.encoded,
    ), job, used  # fmt: skip


def _joined(before: LogProbs, size: int, behind: LogProbs) -> LogProbs:
    """Log-probabilities of `size` tokens, the last of which may be a close that no model wrote (0), and of others."""

    def both(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old = old[:size]
        close = np.zeros((size - len(old), *old.shape[1:]), old.dtype)
        return np.concatenate([old, close, new])

    pairs = ((before.tokens, behind.tokens), (before.top_ids, behind.top_ids), (before.top, behind.top))
    return LogProbs(*(both(old, new) for old, new in pairs))


def _gates(lm: LM, asked: ask.Ask, passes: int | None) -> list[Gate | None]:
    """The grammars of a call, with what they cannot go along with refused before any compute."""
    others = {"state": asked.state, "passes": passes, "guidance": asked.guidance, "mesh": asked.mesh}
    for name, value in others.items():
        if value is not None:
            raise refuse(name, value, "None with schema=")
    constrained.check(asked.sampler, asked.plan)
    prompts, _ = normalise(lm, asked.prompt)
    return constrained.gates(lm, asked.schema, len(prompts), check_room(lm, prompts, asked.max_tokens))


def _run(lm: LM, job: launch.Job, passes: int | None, history: bool) -> tuple[launch.Job, list[Frame], int]:
    if not history and passes is None:
        job, _, used = launch.advance(lm, job, None)
        return job, [], int(np.max(jax.device_get(used)))
    frames: list[Frame] = []
    made = 0
    while not np.all(jax.device_get(job.state.done)) and (passes is None or made < passes):
        # Whole chunks and then single passes: two programs serve every number.
        size = HISTORY if passes is None or passes - made >= HISTORY else 1
        job, chunk, used = launch.advance(lm, job, size)
        host, used = jax.device_get((chunk, np.max(jax.device_get(used))))
        made += int(used)
        for i in range(int(used) if history else 0):
            frames.append(jax.tree.map(lambda x, i=i, n=job.rows: x[i, :n], host))
    return job, frames, made
