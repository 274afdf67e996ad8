"""The sampling parameters of requests, as traced arrays of one compiled sampler.

All decoding rules of an engine are one program (`rules.one_of` selects by index), and every logits processor is part
of it with neutral parameters. A request only changes numbers, so no request compiles anything. To spare the usual
request the work, there are three levels of that sampler:

    PLAIN       rules only
    PROCESSORS  also penalties, biases, grammar masks and log-probabilities
    TRUNCATION  also top-k, top-p and min-p, which sort the vocabulary
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode import defaults, processors, rules as all_rules
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, Static, StoppingCriterion
from mercury_jax.decode.state import SamplingParams
from mercury_jax.decode.thinking import visible_ids
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM

MASKED = (
    "threshold", "factor", "confidence", "entropy_bound", "scheduled", "local_leap", "topk_margin", "random",
    "editing",
)  # fmt: skip
UNIFORM = ("entropy_bound", "threshold", "confidence")
MAX_BIASES = 512  # ids that a request may bias
PLAIN, PROCESSORS, TRUNCATION = range(3)


class RuleSet(NamedTuple):
    """The decoding rules of an engine.

    Attributes:
        names: Their names, the model's own rule first.
        rules: The rules, in that order.
        stops: Their stopping criteria, in that order.
        own: The model's own sampler, complete; its logits processors apply to every request.
        revises: Whether the rule may still change an accepted token.
        visible: uint32 [1, words], a bit mask of the ids that show text.
    """

    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    stops: tuple[StoppingCriterion, ...]
    own: Sampler
    revises: tuple[bool, ...]
    visible: np.ndarray

    def index(self, name: str | None) -> int:
        """The index of a rule; None is the model's own.

        Raises:
            ValueError: For a rule that is not offered.
        """
        if name is None:
            return 0
        if name not in self.names:
            raise refuse("rule", name, ", ".join(self.names))
        return self.names.index(name)


def rule_set(lm: LM, wanted: tuple[str, ...] | None = None) -> RuleSet:
    """The rules that a model can be served with.

    Args:
        lm: The model.
        wanted: Names of rules beside the model's own. None: all of MASKED or UNIFORM, by the model's noise.

    Returns:
        The rules, the model's own first.

    Raises:
        ValueError: For a wanted rule that the model cannot decode with.
    """
    own = complete_sampler(
        defaults.default_sampler(lm), lm.corruption, autoregressive=lm.model.config.autoregressive
    )
    names = () if own.speculate is not None else (UNIFORM if lm.corruption.mask is None else MASKED)
    for name in wanted or ():
        if name not in (own.rule.name, *names):
            raise refuse("rules", name, ", ".join(dict.fromkeys((own.rule.name, *names))))
    others = [n for n in names if n != own.rule.name and (wanted is None or n in wanted)]
    samplers = [own, *(complete_sampler(all_rules.ALL[n](), lm.corruption) for n in others)]
    return RuleSet(
        names=tuple(s.rule.name for s in samplers),
        rules=tuple(s.rule for s in samplers),
        stops=tuple(s.stopping for s in samplers if s.stopping is not None),
        own=own,
        revises=tuple(lm.corruption.mask is None or s.rule.stopping is not None for s in samplers),
        visible=visible_ids(lm.tokenizer, lm.model.config.vocab),
    )


def sampler_level(request: EngineRequest) -> int:
    """The lowest level whose sampler can do what a request asks for."""
    r = request
    if r.top_p < 1 or r.top_k or r.min_p > 0:
        return TRUNCATION
    penalised = r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty or r.logit_bias
    constrained = r.grammar is not None or r.visible
    return PROCESSORS if penalised or constrained or r.logprobs is not None else PLAIN


def build_sampler(rules: RuleSet, request: EngineRequest, level: int, vocab: int) -> Sampler:
    """The sampler of a request. All samplers of a level have the same structure, and so the same program.

    Args:
        rules: Rules of the engine.
        request: The request.
        level: PLAIN, PROCESSORS or TRUNCATION; what the level lacks is ignored.
        vocab: Ids of the model.

    Returns:
        The sampler of one row; its numbers are Python floats and numpy arrays.

    Raises:
        ValueError: For a rule that is not offered, or a bias out of range.
    """
    r, chosen = request, rules.index(request.rule)
    parts = list(rules.rules)
    if r.p is not None and parts[chosen].params:
        strictness = next(iter(parts[chosen].params))  # the first parameter of every rule
        params = parts[chosen].params | {strictness: float(r.p)}
        parts[chosen] = dataclasses.replace(parts[chosen], params=params)
    more: tuple[LogitsProcessor, ...] = ()
    allow: tuple[LogitsProcessor, ...] = ()
    if level >= PROCESSORS:
        more = (
            processors.repetition(float(r.repetition_penalty)),
            processors.presence(float(r.presence_penalty)),
            processors.frequency(float(r.frequency_penalty)),
            bias_processor(r.logit_bias, vocab),
        )
        allowed = rules.visible if r.visible else np.full((1, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
        allow = (processors.allow_bits(allowed, 0),)
    if level >= TRUNCATION:
        more += (processors.top_k(r.top_k or vocab), processors.top_p(r.top_p), processors.min_p(r.min_p))
    default: Any = rules.own.temperature if chosen == 0 else rules.rules[chosen].temperature
    return Sampler(
        all_rules.one_of(parts, chosen),
        (*rules.own.processors, *more),
        all_rules.one_of(rules.stops, chosen),
        temperature=float(default if r.temperature is None else r.temperature),
        allow=allow,
    )


def bias_processor(biases: Mapping[int, float], vocab: int) -> LogitsProcessor:
    """A logits processor that adds biases; its arrays have the same shape for every table.

    Args:
        biases: Added logit by token id.
        vocab: Ids of the model.

    Returns:
        The processor, with unused entries of id -1.

    Raises:
        ValueError: For more than MAX_BIASES ids, an id outside of the vocabulary, or a value that is not finite.
    """
    if len(biases) > MAX_BIASES:
        raise refuse("logit_bias", f"{len(biases)} ids", f"at most {MAX_BIASES}")
    for id, value in biases.items():
        if not 0 <= id < vocab:
            raise refuse("logit_bias", id, f"ids in 0..{vocab - 1}")
        if not math.isfinite(value):
            raise refuse(f"logit_bias[{id}]", value, "a finite number")
    ids, values = np.full(MAX_BIASES, -1, np.int32), np.zeros(MAX_BIASES, np.float32)
    ids[: len(biases)], values[: len(biases)] = list(biases), list(biases.values())
    arrays: Any = {"ids": Static(ids), "values": Static(values)}  # type: ignore[arg-type]
    return dataclasses.replace(processors.bias({0: 0.0}), params=arrays)


def row_params(rules: RuleSet, request: EngineRequest, level: int, lm: LM, block: int) -> SamplingParams:
    """The sampling parameters of one row, as numpy arrays without a batch axis.

    Args:
        rules: Rules of the engine.
        request: The request.
        level: Of the sampler.
        lm: The model.
        block: Positions of a block.

    Returns:
        The parameters, to be copied into a row by `set_row`.
    """

    def typed(x: Any) -> np.ndarray:
        # A table of ids (`Static`) becomes the row's own, so that each row may have another one.
        x = np.asarray(x.value if isinstance(x, Static) else x)
        if x.dtype.kind == "f":
            return x.astype(np.float32)
        return x if x.dtype == np.uint32 else x.astype(np.int32)

    sampler = build_sampler(rules, request, level, lm.model.config.vocab)
    numbers = jax.tree.map(typed, sampler, is_leaf=lambda x: isinstance(x, Static))
    marks = lm.tokenizer.thinking
    close = marks.close if marks is not None and request.thinking else -1
    # Of a constrained row the host accepts at least one token per pass, so a pass per position is enough.
    constrained = request.grammar is not None
    ints: Any = [np.int32(x) for x in (block if constrained else request.steps, lm.model.config.eos, close)]
    return SamplingParams(numbers, *ints, constrained=np.bool_(constrained))


def stack_rows(rows: int, one: SamplingParams) -> SamplingParams:
    """Parameters [rows, ...] on the host, every row as `one`.

    Args:
        rows: Number of rows.
        one: Of `row_params`.

    Returns:
        Writable numpy arrays.
    """
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], rows, axis=0), one)


def set_row(params: SamplingParams, row: int, one: SamplingParams) -> None:
    """Writes one row's parameters into arrays of `stack_rows`, in place.

    Args:
        params: Of `stack_rows`.
        row: Index of the row.
        one: Of `row_params`, of the same level.
    """
    jax.tree.map(lambda rows, x: rows.__setitem__(row, x), params, one)


def set_allowed(params: SamplingParams, row: int, words: np.ndarray, start: int) -> None:
    """Writes the grammar mask of one row, in place.

    Args:
        params: Parameters of all rows on the host, of level PROCESSORS or above.
        row: Index of the row.
        words: uint32 [words], a bit mask of the ids that the grammar allows.
        start: Position behind the prompt to which the mask applies.
    """
    part = params.sampler.allow[0]
    part.params["bits"][row], part.params["start"][row] = words, start


def with_allowed(on_device: SamplingParams, on_host: SamplingParams) -> SamplingParams:
    """Parameters on the device with the grammar masks that the host holds now; nothing else is transferred.

    Args:
        on_device: Parameters as they were sent last.
        on_host: Parameters of the same level with newer masks.

    Returns:
        The parameters on the device with the newer masks.
    """
    part = on_device.sampler.allow[0]
    masks = jax.device_put({name: on_host.sampler.allow[0].params[name] for name in part.params})
    sampler = on_device.sampler._replace(allow=(dataclasses.replace(part, params=masks),))
    return on_device._replace(sampler=sampler)
