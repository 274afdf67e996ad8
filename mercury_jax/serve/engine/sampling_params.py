"""The sampling parameters of requests, as traced arrays of one compiled sampler.

All decoding rules of an engine are one program (`rules.one_of` selects by index), and every logits processor is part
of it. `rule_set` makes these samplers once, with parameters that change nothing; a request only replaces numbers in
them, so no request compiles anything. To spare the usual request the work, there are three levels:

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
from mercury_jax.decode.registration import check_number
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, Static
from mercury_jax.decode.state import SamplingParams
from mercury_jax.decode.thinking import visible_ids
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM

# Rules that requests may choose from unless the engine's configuration says otherwise, by the model's noise.
DEFAULT_RULES = {
    "absorbing": (
        "threshold", "factor", "confidence", "entropy_bound", "scheduled", "local_leap", "topk_margin", "random",
        "editing",
    ),
    "uniform": ("entropy_bound", "threshold", "confidence"),
}  # fmt: skip
MAX_BIASES = 512  # ids that a request may bias
PLAIN, PROCESSORS, TRUNCATION = range(3)


class RuleSet(NamedTuple):
    """The decoding rules of an engine, and its samplers.

    Attributes:
        names: Their names, the model's own rule first.
        rules: The rules, in that order.
        own: The model's own sampler, complete; its logits processors apply to every request.
        revises: Whether the rule may still change an accepted token.
        visible: uint32 [1, words], a bit mask of the ids that show text.
        vocab: Number of ids.
        neutral: For each level the sampler of a request that sets nothing.
    """

    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    own: Sampler
    revises: tuple[bool, ...]
    visible: np.ndarray
    vocab: int
    neutral: tuple[Sampler, ...]

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
    """The rules that a model can be served with, and the samplers made of them.

    Any rule may be the model's own. Beside it stand registered rules that can share its program: for the model's noise,
    of fixed length, and without a second view of each position. All of them run in each step of every request, so the
    default is `DEFAULT_RULES` and the rules that a user has registered, unless one reads logits.

    Args:
        lm: The model.
        wanted: Names of rules beside the model's own. None: the default.

    Returns:
        The rules, the model's own first.

    Raises:
        ValueError: For a wanted rule that the model cannot decode with.
    """
    own = complete_sampler(
        defaults.default_sampler(lm), lm.corruption, autoregressive=lm.model.config.autoregressive
    )
    noise = "uniform" if lm.corruption.mask is None else "absorbing"
    alone = own.speculate is not None or own.rule.variable_length
    made = {name: make() for name, make in all_rules.ALL.items() if name != own.rule.name and not alone}
    others = {
        name: rule
        for name, rule in made.items()
        if isinstance(rule, Rule)
        and noise in rule.noise
        and not (rule.variable_length or rule.leave_one_out or rule.needs_hidden)
    }
    for name in wanted or ():
        if name not in (own.rule.name, *others):
            raise refuse("rules", name, ", ".join((own.rule.name, *others)))
    if wanted is None:
        users = {
            name for name, rule in others.items() if not rule.function.__module__.startswith("mercury_jax.")
        }
        wanted = tuple(
            n for n in users.union(DEFAULT_RULES[noise]) if n in others and not others[n].needs_logits
        )
    chosen = [rule for name, rule in others.items() if name in wanted]
    samplers = [own, *(complete_sampler(rule, lm.corruption) for rule in chosen)]
    rules, vocab = tuple(s.rule for s in samplers), lm.model.config.vocab
    stopping = all_rules.one_of([s.stopping for s in samplers if s.stopping is not None])
    plain = Sampler(all_rules.one_of(rules), own.processors, stopping, temperature=0.0)
    penalties = (processors.repetition(1.0), processors.presence(0.0), processors.frequency(0.0))
    bias = dataclasses.replace(processors.bias({0: 0.0}), params=_bias_params({}, vocab))
    every_id = processors.allow_bits(np.full((1, -(-vocab // 32)), 0xFFFFFFFF, np.uint32), 0)
    adjusted = plain._replace(processors=(*own.processors, *penalties, bias), allow=(every_id,))
    truncation = (processors.top_k(vocab), processors.top_p(1.0), processors.min_p(0.0))
    return RuleSet(
        names=tuple(rule.name for rule in rules),
        rules=rules,
        own=own,
        revises=tuple(lm.corruption.mask is None or rule.stopping is not None for rule in rules),
        visible=visible_ids(lm.tokenizer, vocab),
        vocab=vocab,
        neutral=(plain, adjusted, adjusted._replace(processors=(*adjusted.processors, *truncation))),
    )


def sampler_level(request: EngineRequest) -> int:
    """The lowest level whose sampler can do what a request asks for."""
    r = request
    if r.top_p < 1 or r.top_k or r.min_p > 0:
        return TRUNCATION
    penalised = r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty or r.logit_bias
    constrained = r.grammar is not None or r.visible
    return PROCESSORS if penalised or constrained or r.logprobs is not None else PLAIN


def build_sampler(rules: RuleSet, request: EngineRequest, level: int) -> Sampler:
    """The sampler of a request: the neutral one of its level with other numbers.

    Args:
        rules: Rules of the engine.
        request: The request.
        level: PLAIN, PROCESSORS or TRUNCATION; what the level lacks is ignored.

    Returns:
        The sampler of one row; its numbers are Python numbers and numpy arrays.

    Raises:
        ValueError: For a rule that is not offered, or a number out of range.
    """
    r, neutral, chosen = request, rules.neutral[level], rules.index(request.rule)
    rule, own = rules.rules[chosen], len(rules.own.processors)
    params = neutral.rule.params | {"which": chosen}
    if r.p is not None and rule.params:
        strictness = next(iter(rule.params))  # the first parameter of every rule
        params[str(chosen)] = rule.params | {strictness: _in_range(all_rules.ALL, rule.name, strictness, r.p)}
    values = {
        "repetition": r.repetition_penalty, "presence": r.presence_penalty, "frequency": r.frequency_penalty,
        "top_k": r.top_k or rules.vocab, "top_p": r.top_p, "min_p": r.min_p,
    }  # fmt: skip
    parts = _own_processors(rules, request, chosen == 0)
    for part in neutral.processors[own:]:
        if part.name == "bias":
            numbers = _bias_params(r.logit_bias, rules.vocab)
        else:
            name = next(iter(part.params))
            numbers = part.params | {name: _in_range(processors.ALL, part.name, name, values[part.name])}
        parts.append(dataclasses.replace(part, params=numbers))
    visible: dict[str, Any] = {"bits": Static(rules.visible), "start": 0}  # type: ignore[arg-type]
    default: Any = rules.own.temperature if chosen == 0 else rule.temperature
    wanted = r.temperature
    if wanted and chosen == 0 and any(part.name == "temperature" for part in parts):
        wanted = 1.0  # that processor has the temperature of the request already
    assert neutral.stopping is not None
    return neutral._replace(
        rule=dataclasses.replace(neutral.rule, params=params),
        processors=tuple(parts),
        stopping=dataclasses.replace(neutral.stopping, params=neutral.stopping.params | {"which": chosen}),
        temperature=float(default if wanted is None else wanted),
        allow=tuple(dataclasses.replace(part, params=visible) for part in neutral.allow)
        if r.visible
        else neutral.allow,
    )


# Parameters under which a processor of a model's own settings changes nothing.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
}


def _own_processors(rules: RuleSet, request: EngineRequest, own_rule: bool) -> list[LogitsProcessor]:
    """The processors of the model's own settings, for one request.

    They belong to the model's own rule: beside another one they change nothing. What the request itself asks for
    replaces the model's number.
    """
    r = request
    asked = {
        "temperature": r.temperature is not None,
        "top_p": r.top_p < 1,
        "top_k": r.top_k,
        "min_p": r.min_p > 0,
    }
    found = []
    for part in rules.own.processors:
        neutral = {**NEUTRAL, "top_k": rules.vocab}.get(part.name)
        if neutral is None or (own_rule and not asked.get(part.name)):
            found.append(part)
            continue
        value = (r.temperature or neutral) if own_rule and part.name == "temperature" else neutral
        found.append(dataclasses.replace(part, params=part.params | {next(iter(part.params)): value}))
    return found


def _in_range(registry: Mapping[str, Any], part: str, name: str, value: float) -> float:
    """A parameter of a registered rule or processor, in the type of its range."""
    return check_number(f"{part}({name}=)", float(value), getattr(registry.get(part), "ranges", {}).get(name))


def _bias_params(biases: Mapping[int, float], vocab: int) -> dict[str, Any]:
    """Parameters of the processor `bias`; arrays of MAX_BIASES entries for every table, the unused ones with id -1.

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
    return {"ids": Static(ids), "values": Static(values)}  # type: ignore[arg-type]


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

    sampler = build_sampler(rules, request, level)
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
