"""The sampling parameters of requests, as traced arrays of one compiled sampler.

All decoding rules of an engine are compiled into one program (`rules.one_of` selects one by index), together with every
logits processor. `rule_set` makes this sampler once, with neutral parameters, under which each processor leaves the
logits unchanged. A request only replaces numbers in it, so no request triggers a compilation. There are three levels,
so that a request without processors does not pay for them:

    PLAIN       rules only
    PROCESSORS  also penalties, biases, grammar masks and log-probabilities
    TRUNCATION  also top-k, top-p and min-p, which search the vocabulary for a threshold
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
from mercury_jax.decode.answer_text import visible_ids
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.registration import check_number
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, Static
from mercury_jax.decode.state import SamplingParams
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM

# Default of `EngineConfig.rules`, by the noise of the model.
DEFAULT_RULES = {
    "absorbing": (
        "threshold", "factor", "confidence", "entropy_bound", "scheduled", "local_leap", "topk_margin", "random",
        "editing",
    ),
    "uniform": ("entropy_bound", "threshold", "confidence"),
}  # fmt: skip
MAX_BIASES = 512  # maximum number of token ids in the logit_bias of a request
PLAIN, PROCESSORS, TRUNCATION = range(3)


class RuleSet(NamedTuple):
    """The decoding rules of an engine, and its samplers.

    Attributes:
        names: Names of the rules, the model's own rule first.
        rules: The rules, in the order of `names`.
        own: The model's own sampler, complete. Its logits processors are part of every level.
        revises: For each rule, whether it may still change an accepted token.
        visible: uint32 [1, words], bit mask of the ids that show text.
        vocab: Size of the vocabulary.
        neutral: For each level, the sampler of a request that sets no parameter.
    """

    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    own: Sampler
    revises: tuple[bool, ...]
    visible: np.ndarray
    vocab: int
    neutral: tuple[Sampler, ...]

    def index(self, name: str | None) -> int:
        """Returns the index of a rule."""
        if name is None:
            return 0
        if name not in self.names:
            raise refuse("rule", name, ", ".join(self.names))
        return self.names.index(name)


def rule_set(lm: LM, wanted: tuple[str, ...] | None = None) -> RuleSet:
    """Selects the decoding rules that an engine offers, and makes the samplers of the three levels.

    Any rule can be the model's own rule. Other registered rules are offered if they can share its program: they must
    support the model's noise, keep the length fixed, and read neither leave-one-out masks nor hidden states. All
    offered rules are computed in each step, so the default is `DEFAULT_RULES` and the rules that the user has
    registered, except rules that read all logits.
    """
    own = complete_sampler(
        defaults.default_sampler(lm), lm.corruption, autoregressive=lm.model.config.autoregressive
    )
    noise = "uniform" if lm.corruption.mask is None else "absorbing"
    # Self-speculation and rules of variable length change the program itself: they allow no other rule beside them.
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
    # 1. All rules, and all stopping criteria, as one rule and one criterion that select by index.
    chosen = [rule for name, rule in others.items() if name in wanted]
    samplers = [own, *(complete_sampler(rule, lm.corruption) for rule in chosen)]
    rules, vocab = tuple(s.rule for s in samplers), lm.model.config.vocab
    stopping = all_rules.one_of([s.stopping for s in samplers if s.stopping is not None])
    plain = Sampler(all_rules.one_of(rules), own.processors, stopping, temperature=0.0)
    # 2. PROCESSORS: add each processor with parameters under which it has no effect.
    penalties = (processors.repetition(1.0), processors.presence(0.0), processors.frequency(0.0))
    bias = dataclasses.replace(processors.bias({0: 0.0}), params=_bias_params({}, vocab))
    every_id = processors.allow_bits(np.full((1, -(-vocab // 32)), 0xFFFFFFFF, np.uint32), 0)
    adjusted = plain._replace(processors=(*own.processors, *penalties, bias), allow=(every_id,))
    # 3. TRUNCATION: likewise top-k, top-p and min-p.
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
    """Returns the lowest level whose sampler supports all parameters of a request."""
    r = request
    if r.top_p < 1 or r.top_k or r.min_p > 0:
        return TRUNCATION
    penalised = r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty or r.logit_bias
    constrained = r.grammar is not None or r.visible
    return PROCESSORS if penalised or constrained or r.logprobs is not None else PLAIN


def build_sampler(rules: RuleSet, request: EngineRequest, level: int) -> Sampler:
    """Makes the sampler of a request: the neutral sampler of a level, with the numbers of the request.

    Args:
        level: PLAIN, PROCESSORS or TRUNCATION. Parameters that this level does not support are ignored, so the level
            must be at least `sampler_level(request)` for decoding.
    """
    r, neutral, chosen = request, rules.neutral[level], rules.index(request.rule)
    rule, own = rules.rules[chosen], len(rules.own.processors)
    params = neutral.rule.params | {"which": chosen}
    # By convention the first parameter of a rule is its strictness.
    strictness = {} if r.p is None else dict.fromkeys(list(rule.params)[:1], r.p)
    for name, value in {**strictness, **r.rule_params}.items():
        if name not in rule.params:
            raise refuse(f"parameter of {rule.name}", name, ", ".join(rule.params))
        number = _in_range(all_rules.ALL, rule.name, name, value)
        params[str(chosen)] = params.get(str(chosen), rule.params) | {name: number}
    values = {
        "repetition": r.repetition_penalty, "presence": r.presence_penalty, "frequency": r.frequency_penalty,
        "top_k": r.top_k or rules.vocab, "top_p": r.top_p, "min_p": r.min_p,
    }  # fmt: skip
    # The processors of every neutral sampler are the model's own, then those of the request's parameters.
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
        wanted = 1.0  # the model's own temperature processor already applies the temperature of the request
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


# Parameters under which a processor has no effect; for `top_k` the size of the vocabulary.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
}


def _own_processors(rules: RuleSet, request: EngineRequest, own_rule: bool) -> list[LogitsProcessor]:
    """Makes the logits processors of the model's own settings for one request.

    These settings were published for the model's own rule, so with another rule they are neutral. A parameter of the
    request replaces the model's parameter.
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
        # Processors without neutral parameters stay as they are. With the model's own rule, so do those whose parameter
        # the request does not set. All others become neutral: a later processor applies the request's parameter, except
        # for the temperature, which is set here.
        neutral = {**NEUTRAL, "top_k": rules.vocab}.get(part.name)
        if neutral is None or (own_rule and not asked.get(part.name)):
            found.append(part)
            continue
        value = (r.temperature or neutral) if own_rule and part.name == "temperature" else neutral
        found.append(dataclasses.replace(part, params=part.params | {next(iter(part.params)): value}))
    return found


def _in_range(registry: Mapping[str, Any], part: str, name: str, value: float) -> float:
    """Checks a parameter of a registered rule or processor; returns it in the type of its range."""
    return check_number(f"{part}({name}=)", float(value), getattr(registry.get(part), "ranges", {}).get(name))


def _bias_params(biases: Mapping[int, float], vocab: int) -> dict[str, Any]:
    """Makes the parameters of the processor `bias`.

    The arrays always have MAX_BIASES entries, so that every request has the same shapes; unused entries have id -1.
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
    """Makes the sampling parameters of one row, as numpy arrays without a batch axis."""

    def typed(x: Any) -> np.ndarray:
        # `Static` tables are normally shared by all rows. Here they become arrays with a row axis, so that each row may
        # have its own table of ids.
        x = np.asarray(x.value if isinstance(x, Static) else x)
        if x.dtype.kind == "f":
            return x.astype(np.float32)
        return x if x.dtype == np.uint32 else x.astype(np.int32)

    sampler = build_sampler(rules, request, level)
    numbers = jax.tree.map(typed, sampler, is_leaf=lambda x: isinstance(x, Static))
    marks = lm.tokenizer.thinking
    close = marks.close if marks is not None and request.thinking else -1
    # For constrained rows the host commits at least one token per pass, so one pass per position is enough.
    constrained = request.grammar is not None
    ints: Any = [np.int32(x) for x in (block if constrained else request.steps, lm.model.config.eos, close)]
    return SamplingParams(numbers, *ints, constrained=np.bool_(constrained))


def stack_rows(rows: int, one: SamplingParams) -> SamplingParams:
    """Repeats the parameters of one row for all rows."""
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], rows, axis=0), one)


def set_row(params: SamplingParams, row: int, one: SamplingParams) -> None:
    """Writes the parameters of one row into the arrays of all rows, in place."""
    jax.tree.map(lambda rows, x: rows.__setitem__(row, x), params, one)
