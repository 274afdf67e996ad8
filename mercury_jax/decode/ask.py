"""From the arguments of sample() to a job: prompts, thinking, bias, guidance, and what came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import constrained, defaults, effort as efforts, launch, shape, silent
from mercury_jax.decode.arguments import checked_mesh
from mercury_jax.decode.output import Session
from mercury_jax.decode.parts import Part, Sampler, checked_sampler
from mercury_jax.decode.program import checked_temperature
from mercury_jax.decode.prompts import Prompt, check_room, check_seed, normalise
from mercury_jax.types import LM


class Ask(NamedTuple):
    """The arguments of `sample`, as they came."""

    prompt: Any
    max_tokens: Any = 64
    seed: Any = 0
    sampler: Any = None
    plan: Plan = Plan()
    temperature: Any = None
    effort: Any = None
    logit_bias: Any = None
    guidance: Any = None
    negative: Any = None
    logprobs: Any = None
    state: Session | None = None
    mesh: Mesh | None = None
    schema: Any = None


def checked(asked: Ask) -> Ask:
    """The arguments with a mesh and a temperature as the decoder takes them; refuses those of a wrong type by name."""
    if asked.state is not None and not isinstance(asked.state, Session):
        raise refuse("state", asked.state, "the state of an earlier Output, or None")
    temperature = None if asked.temperature is None else checked_temperature(asked.temperature)
    return asked._replace(temperature=temperature, mesh=checked_mesh(asked.mesh))


def prepare(lm: LM, asked: Ask) -> tuple[launch.Job, list[Prompt]]:
    """(a job ready to run, its prompts). Raises ValueError, before any compute, for what does not fit."""
    if asked.state is not None and asked.prompt is None:
        return _resumed(lm, asked.state)
    effort = efforts.find(asked.effort)
    prompts = _prompts(lm, asked, effort)
    most = check_room(lm, prompts, asked.max_tokens)
    thinking = 0 if effort is None else effort.thinking
    room = _thinking(lm, prompts, most, thinking)
    marks = lm.tokenizer.thinking if thinking else None
    if marks is not None:  # where the context leaves no room to think, the answer comes at once
        cut = -len(marks.opening)
        prompts = [p._replace(ids=p.ids[:cut]) if p.chat and not n else p for p, n in zip(prompts, room)]
    wanted = request(prompts, most, check_seed(asked.seed), room)
    sampler, plan = _sampler(lm, asked, effort)
    if asked.schema is not None:
        sampler = constrained.opened(sampler, len(prompts), lm.model.config.vocab)
    job = launch.prepare(
        lm, wanted, sampler, plan, temperature=asked.temperature,
        close=None if marks is None else marks.close, logprobs=check_logprobs(asked.logprobs),
        guidance=_guidance(lm, asked, len(prompts)), before=None if asked.state is None else asked.state.job.state,
        mesh=asked.mesh,
    )  # fmt: skip
    return job, prompts


def _sampler(lm: LM, asked: Ask, effort: efforts.Effort | None) -> tuple[Any, Plan]:
    sampler, plan = asked.sampler, asked.plan
    if effort is not None and lm.corruption.mask is not None:
        sampler, plan = sampler or effort.rule(), effort.plan(plan, lm.model.config.block)
    if sampler is None:
        sampler, plan = defaults.sampler(lm), defaults.plan(lm, plan, 1.0 if effort is None else effort.steps)
    return _biased(sampler, asked.logit_bias), plan


def answering(
    lm: LM, asked: Ask, prompts: Sequence[Prompt], said: Sequence[tuple[int, ...]], rows: Sequence[int]
) -> launch.Job:
    """The job that lets silent rows answer; the others are done in it from the start.

    Args:
        lm: The model.
        asked: The arguments of the call.
        prompts: Of all rows.
        said: What stands behind each prompt; of a silent row with its thinking closed.
        rows: The silent ones. The first token of their answers shows text.
    """
    begun, room = [], []
    for i, (prompt, ids) in enumerate(zip(prompts, said, strict=True)):
        whole = silent.Room((*prompt.ids, *ids), 0)
        if i in rows:
            whole = silent.room(lm.tokenizer, prompt.ids, ids, asked.max_tokens, lm.model.config.context)
        begun.append(Prompt(list(whole.prompt), True))
        room.append(whole.max_tokens)
    sampler, plan = _sampler(lm, asked, efforts.find(asked.effort))
    sampler = Sampler(sampler) if isinstance(sampler, Part) else sampler
    bits = shape.allow_bits(silent.visible(lm.tokenizer, lm.model.config.vocab))
    return launch.prepare(
        lm, request(begun, np.asarray(room), check_seed(asked.seed)), sampler._replace(allow=(*sampler.allow, bits)),
        plan, temperature=asked.temperature, logprobs=check_logprobs(asked.logprobs),
        guidance=_guidance(lm, asked, len(prompts)), mesh=asked.mesh,
    )  # fmt: skip


def request(
    prompts: Sequence[Prompt], max_tokens: int | np.ndarray, seed: int, thinking: Sequence[int] | None = None
) -> launch.Request:
    """Prompts as left-aligned rows; row i is seeded with seed + i. thinking: its room in each row."""
    lengths = np.array([len(p.ids) for p in prompts])
    room = np.zeros(len(prompts), int) if thinking is None else np.asarray(thinking)
    total = lengths + np.where(room > 0, room, max_tokens)
    reserve = np.where(room > 0, max_tokens, 0)
    longest = total + np.where(room > 0, 1 + reserve, 0)
    text = np.zeros((len(prompts), int(longest.max())), np.int32)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    given = np.arange(text.shape[1]) < lengths[:, None]
    seeds = (seed + np.arange(len(prompts))) % 2**31
    return launch.Request(text, given, lengths, total, seeds, reserve if room.any() else None)


def encoded_before(job: launch.Job, state: Session) -> np.ndarray:
    """How many tokens of each row had their keys already in the session it goes on from."""
    return np.asarray(state.job.state.length)


def _prompts(lm: LM, asked: Ask, effort: efforts.Effort | None) -> list[Prompt]:
    think = effort is not None and effort.thinking > 0
    before = asked.state
    behind = () if before is None else before.prompts
    prompts, _ = normalise(lm, asked.prompt, thinking=think, behind=behind)
    if before is None:
        return prompts
    if before.job.program.model.config != lm.model.config:
        raise refuse("state", "a session of another model", f"one of {lm.name}")
    if not before.done:
        raise refuse("prompt", asked.prompt, "None, to finish the answer that stands in state first")
    if len(prompts) != before.job.rows:
        raise refuse("prompt", f"{len(prompts)} prompts", f"{before.job.rows}, one for each row of state")
    both = zip(before.tokens, prompts, strict=True)
    return [Prompt([*map(int, said), *new.ids], new.chat) for said, new in both]


def _resumed(lm: LM, state: Session) -> tuple[launch.Job, list[Prompt]]:
    if state.job.program.model.config != lm.model.config:
        raise refuse("state", "a session of another model", f"one of {lm.name}")
    return launch.copied(state.job), list(state.prompts)


def _thinking(lm: LM, prompts: Sequence[Prompt], max_tokens: int, most: int) -> list[int]:
    """Room for thinking in each row: of conversations only, and never more than the context leaves."""
    left = [lm.model.config.context - len(p.ids) - max_tokens - 1 for p in prompts]
    return [max(0, min(most, room)) if p.chat else 0 for p, room in zip(prompts, left, strict=True)]


def _biased(sampler: Any, table: Any) -> Any:
    if not table:
        return sampler
    sampler = checked_sampler(sampler)
    return sampler._replace(shape=(*sampler.shape, shape.bias(table)))


def check_logprobs(count: Any) -> int | None:
    """How many alternatives to keep at each token, or None."""
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= 100:
        raise refuse("logprobs", count, "0..100 alternatives, or None")
    return int(count)


def _weights(guidance: Any, rows: int) -> np.ndarray:
    """Guidance weights as float32 [rows]."""
    weights = np.asarray(guidance)
    if (
        weights.dtype.kind not in "iuf"
        or weights.shape not in ((), (rows,))
        or not np.isfinite(weights).all()
    ):
        raise refuse("guidance", guidance, f"a finite number, or one for each of the {rows} prompts")
    return np.broadcast_to(weights.astype(np.float32), (rows,))


def _guidance(lm: LM, asked: Ask, rows: int) -> launch.Guidance | None:
    if asked.guidance is None:
        if asked.negative is not None:
            raise refuse("negative", asked.negative, "None without guidance=")
        return None
    if asked.state is not None:
        raise refuse("guidance", asked.guidance, "None with state=: a session keeps one side's keys")
    weights = _weights(asked.guidance, rows)
    if asked.negative is None:
        return launch.Guidance(weights, [[]] * rows)
    others, single = normalise(lm, asked.negative)
    if not single and len(others) != rows:
        raise refuse("negative", f"{len(others)} prompts", f"one, or {rows}: one for each prompt")
    ids = [list(p.ids) for p in others]
    for i, other in enumerate(ids):
        if len(other) + asked.max_tokens > lm.model.config.context:
            room = lm.model.config.context - asked.max_tokens
            raise refuse(f"negative[{i}]", f"{len(other)} tokens", f"at most {room}: context less max_tokens")
    return launch.Guidance(weights, ids * rows if single else ids)
