"""The numbers of a job as knobs of one compiled sampler: no request compiles anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode import defaults, processors, rules
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, Static, StoppingCriterion
from mercury_jax.decode.state import SamplingParams
from mercury_jax.decode.thinking import visible_ids
from mercury_jax.serve.engine.types import Job
from mercury_jax.types import LM

MASKED = (
    "threshold", "factor", "confidence", "entropy_bound", "scheduled", "local_leap", "topk_margin", "random",
    "editing",
)  # fmt: skip
UNIFORM = ("entropy_bound", "threshold", "confidence")
BIASES = 512  # ids that a job may bias
PLAIN, SHAPED, CUT = range(
    3
)  # levels: nothing; penalties, biases, grammars, log-probabilities; also top-p and such


class Menu(NamedTuple):
    """The rules that one compiled program offers, and what goes with each."""

    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    stops: tuple[StoppingCriterion, ...]
    own: Sampler  # the model's own, completed: its shapers always apply
    revises: tuple[bool, ...]  # a settled token may still change
    visible: np.ndarray  # uint32 [1, words], the ids that show text

    def find(self, name: str | None) -> int:
        """The number of a rule, None being the model's own; ValueError for one that is not offered."""
        if name is None:
            return 0
        if name not in self.names:
            raise refuse("rule", name, ", ".join(self.names))
        return self.names.index(name)


def menu(lm: LM, wanted: tuple[str, ...] | None = None) -> Menu:
    """The rules for a model: its own first, then the wanted of those that fit its noise.

    ValueError for one that is wanted and not among them.
    """
    own = complete_sampler(
        defaults.default_sampler(lm), lm.corruption, autoregressive=lm.model.config.autoregressive
    )
    names = () if own.speculate is not None else (UNIFORM if lm.corruption.mask is None else MASKED)
    for name in wanted or ():
        if name not in (own.rule.name, *names):
            raise refuse("rules", name, ", ".join(dict.fromkeys((own.rule.name, *names))))
    names = [n for n in names if wanted is None or n in wanted]
    made = [_bare(complete_sampler(rules.ALL[n](), lm.corruption)) for n in names if n != own.rule.name]
    every = [_bare(own), *made]
    return Menu(
        names=tuple(s.rule.name for s in every),
        rules=tuple(s.rule for s in every),
        stops=tuple(s.stopping for s in every if s.stopping is not None),
        own=own,
        visible=visible_ids(lm.tokenizer, lm.model.config.vocab),
        revises=tuple(lm.corruption.mask is None or s.rule.stopping is not None for s in every),
    )


def _bare(sampler: Sampler) -> Sampler:
    return sampler._replace(speculate=None)


def sampler(menu: Menu, job: Job, level: int, vocab: int) -> Sampler:
    """The sampler of a job; all of one level have the same structure, and so the same program."""
    which = menu.find(job.rule)
    strict = _strict(menu.rules[which], job.p)
    parts = [strict if i == which else part for i, part in enumerate(menu.rules)]
    more, allow = (), ()
    if level >= SHAPED:
        more = (processors.repetition(float(job.repetition)), processors.presence(float(job.presence)),
                processors.frequency(float(job.frequency)),
                _bias(job.bias, vocab))  # fmt: skip
        bits = menu.visible if job.visible else np.full((1, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
        allow = (processors.allow_bits(bits, 0),)
    if level >= CUT:
        more += (
            processors.top_k(job.top_k or vocab),
            processors.top_p(job.top_p),
            processors.min_p(job.min_p),
        )
    rule = rules.one_of(parts, which)
    warmth: Any = menu.own.temperature if which == 0 else menu.rules[which].temperature
    warmth = float(warmth if job.temperature is None else job.temperature)
    stop = rules.one_of(menu.stops, which)
    return Sampler(rule, (*menu.own.processors, *more), stop, temperature=warmth, allow=allow)


def level_of(job: Job) -> int:
    """The least level at which a job's sampler does all that it asks for."""
    if job.top_p < 1 or job.top_k or job.min_p > 0:
        return CUT
    shaped = job.repetition != 1 or job.presence or job.frequency or job.bias
    ruled = job.grammar is not None or job.visible
    return SHAPED if shaped or ruled or job.logprobs is not None else PLAIN


def _strict(part: Rule, p: float | None) -> Rule:
    """The rule with its first knob, which is its strictness, set to p."""
    if p is None or not part.params:
        return part
    name = next(iter(part.params))
    return dataclasses.replace(part, params=part.params | {name: float(p)})


def _bias(table: Mapping[int, float], vocab: int) -> LogitsProcessor:
    """A bias of the same shape whatever the table holds, made without the device."""
    if len(table) > BIASES:
        raise refuse("bias", f"{len(table)} ids", f"at most {BIASES}")
    for id, value in table.items():
        if not 0 <= id < vocab:
            raise refuse("bias", id, f"ids in 0..{vocab - 1}")
        if not math.isfinite(value):
            raise refuse(f"bias[{id}]", value, "a finite number")
    pad = lambda x, fill, kind: np.array([*x, *[fill] * (BIASES - len(table))], kind)
    arrays: Any = (pad(table, -1, np.int32), pad(table.values(), 0.0, np.float32))
    held = {"ids": Static(arrays[0]), "values": Static(arrays[1])}
    return dataclasses.replace(processors.bias({0: 0.0}), params=held)


def row(menu: Menu, job: Job, level: int, lm: LM, block: int) -> SamplingParams:
    """The knobs of one row as numpy arrays without a batch axis. block: tokens of one."""
    marks = lm.tokenizer.thinking
    made = sampler(menu, job, level, lm.model.config.vocab)
    numbers = jax.tree.map(_typed, made, is_leaf=lambda x: isinstance(x, Static))
    close = -1 if marks is None or not job.thinking else marks.close
    # The host takes at least one token of each pass of a gated row: so many steps are enough.
    steps = job.steps if job.grammar is None else block
    ints: Any = [np.int32(x) for x in (steps, lm.model.config.eos, close)]
    return SamplingParams(numbers, *ints, constrained=np.bool_(job.grammar is not None))


def _typed(x: Any) -> np.ndarray:
    """A knob as the device holds it. A table becomes one row's own, so that each row may have another."""
    x = np.asarray(x.value if isinstance(x, Static) else x)
    if x.dtype.kind == "f":
        return x.astype(np.float32)
    return x.astype(np.uint32 if x.dtype == np.uint32 else np.int32)


def constrain(all: SamplingParams, at: int, words: np.ndarray, start: int) -> None:
    """Write the ids that may stand at position `start` of one row's answer, in place."""
    part = all.sampler.allow[0]
    part.params["bits"][at], part.params["start"][at] = words, start


def with_constraints(sent: SamplingParams, held: SamplingParams) -> SamplingParams:
    """SamplingParams on the device with the constraints that the host holds now."""
    part = sent.sampler.allow[0]
    fresh = jax.device_put({name: held.sampler.allow[0].params[name] for name in part.params})
    sampler = sent.sampler._replace(allow=(dataclasses.replace(part, params=fresh),))
    return sent._replace(sampler=sampler)


def stack(rows: int, one: SamplingParams) -> SamplingParams:
    """SamplingParams [rows, ...] on the host, every row as `one`."""
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], rows, axis=0), one)


def put(all: SamplingParams, at: int, one: SamplingParams) -> None:
    """Write one row's knobs, in place."""
    jax.tree.map(lambda rows, x: rows.__setitem__(at, x), all, one)
