"""Combinations: of rules chosen per row, of a rule with drafts, and with a planner (P2) or a quality head (PRISM).

A head, given as `Rule.needs_hidden`, is a function (params, hidden states) -> array; the rule reads its result as
`view.hidden`. The parameters of the head are part of the model's parameters, so that they are sharded and saved with
them:

    lm = dataclasses.replace(lm, params=lm.params | {"quality_head": head})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import AtLeast, Between, refuse
from mercury_jax.decode import stopping
from mercury_jax.decode.registration import NonNegative, check_number, rule, sampler_preset
from mercury_jax.decode.rules.masked import confidence, fixed_share, top
from mercury_jax.decode.rules.remask import remask
from mercury_jax.decode.sampler import Memory, Param, Rule, Sampler, StoppingCriterion, accept
from mercury_jax.types import Key, Params, Proposal, View, accumulation_dtype

Part = TypeVar("Part", Rule, StoppingCriterion)


class _Switch(NamedTuple):
    """Calls `functions[which]`, the function of `one_of`.

    A NamedTuple compares by value: two equal combinations are the same static argument and share one compilation. The
    memory is a tuple with the memory of each part; a call changes only the memory of the part that runs.
    """

    functions: tuple[Callable[..., Any], ...]

    def __call__(self, *args: Any, which: Any, **params: Any) -> tuple[Any, Memory]:
        *others, memory = args

        def branch(i: int) -> Callable[[Memory], tuple[Any, Memory]]:
            def run(memory: Memory) -> tuple[Any, Memory]:
                result, own = self.functions[i](*others, memory[i], **params[str(i)])
                return result, (*memory[:i], own, *memory[i + 1 :])

            return run

        return jax.lax.switch(which, [branch(i) for i in range(len(self.functions))], memory)


class _Inits(NamedTuple):
    """Initializes the memory of every part of `one_of`; compares by value, as `_Switch` does."""

    inits: tuple[Callable[..., Memory], ...]

    def __call__(self, canvas: jax.Array, vocab: int) -> Memory:
        return tuple(init(canvas, vocab) for init in self.inits)


def one_of(parts: Sequence[Part], which: Param = 0) -> Part:
    """Combines several rules, or several stopping criteria; a number per row chooses which one applies.

    The decoder maps the result over the rows with `vmap`, which turns the switch into a select: all parts are computed
    for every row. Use it for parts that cost little compared to a forward pass.

    Args:
        parts: Only rules, or only stopping criteria. A rule of variable length cannot be combined with other rules.
        which: Index into `parts`; one number, or one per row. Traced.

    Returns:
        A rule or stopping criterion. A rule has the default temperature and stopping criterion of the first part.

    Raises:
        ValueError: `parts` is empty or cannot be combined, or `which` is not an index of it.

    Example:
        >>> mixed = mj.rules.one_of([mj.rules.threshold(0.9), mj.rules.factor(1.0)], which=[0, 1])
    """
    if isinstance(parts, Rule | StoppingCriterion) or not parts:
        raise refuse("one_of parts", parts, "a list of at least one rule, or stopping criterion")
    kind = type(parts[0])
    for i, part in enumerate(parts):
        if kind not in (Rule, StoppingCriterion) or not isinstance(part, kind):
            allowed = "rules alone, or stopping criteria alone"
            raise refuse(f"one_of parts[{i}]", getattr(part, "name", part), allowed)
    which = check_number("one_of(which=)", which, Between(0, len(parts) - 1, integer=True))
    shared: dict[str, Any] = dict(
        function=_Switch(tuple(p.function for p in parts)),
        init=_Inits(tuple(p.init for p in parts)),
        params={"which": which} | {str(i): p.params for i, p in enumerate(parts)},
        name="one_of",
        needs_logits=any(p.needs_logits for p in parts),
    )
    if kind is StoppingCriterion:
        return StoppingCriterion(**shared)
    rules: Sequence[Any] = parts
    variable = [p.name for p in rules if p.variable_length]
    if len(rules) > 1 and variable:
        raise refuse("one_of parts", variable, "rules that keep the number of tokens")
    # The combination supports the kinds of noise that all of its rules support.
    noise = tuple(kind for kind in rules[0].noise if all(kind in p.noise for p in rules))
    if not noise:
        raise refuse("one_of parts", [p.name for p in rules], "rules for the same kind of noise")
    # The decoder computes one `view.hidden` and one kind of leave-one-out masks per pass, so the rules must agree.
    heads = [p.needs_hidden for p in rules if p.needs_hidden]
    if any(head != heads[0] for head in heads):
        raise refuse("one_of parts", [p.name for p in rules], "rules that read the same of the hidden states")
    masks = {p.leave_one_out for p in rules} - {False}
    if len(masks) > 1:
        allowed = "rules whose leave-one-out masks see each other, or rules whose masks do not"
        raise refuse("one_of parts", [p.name for p in rules], allowed)
    return Rule(
        **shared,
        temperature=rules[0].temperature,
        stopping=rules[0].stopping,
        noise=noise,
        leave_one_out=masks.pop() if masks else False,
        needs_hidden=heads[0] if heads else False,
        variable_length=bool(variable),
        needs=tuple(dict.fromkeys(need for p in rules for need in p.needs)),
    )


class _LeftmostFirst(NamedTuple):
    """The function of a `leftmost_first` rule; compares by value, so that equal rules share one compilation."""

    function: Callable[..., Any]

    def __call__(self, key: Key, view: View, memory: Memory, **params: Any) -> tuple[Proposal, Memory]:
        proposal, after = self.function(key, view, memory, **params)
        leftmost = accept(view, view.masked & (jnp.cumsum(view.masked) == 1))
        pick = lambda first, later: jnp.where(view.step == 0, first, later)
        return jax.tree.map(pick, leftmost, proposal), jax.tree.map(pick, memory, after)


def leftmost_first(rule: Rule) -> Rule:
    """Makes a rule that accepts only the leftmost mask in the first step of a block, and then applies `rule`.

    Fast-dLLM decodes Dream in this way when it uses a cache (NVlabs/Fast-dLLM, `generation_utils_block.py`): the first
    pass of a block covers the whole sequence and writes the cache.

    Args:
        rule: The rule for all later steps, for masked noise. Its memory does not change in the first step.

    Returns:
        The rule.

    Raises:
        ValueError: `rule` is not a rule, or has variable length.
    """
    if not isinstance(rule, Rule) or rule.variable_length:
        raise refuse("leftmost_first(rule=)", getattr(rule, "name", rule), "a rule that keeps the length")
    return dataclasses.replace(
        rule, function=_LeftmostFirst(rule.function), name=f"leftmost_first_{rule.name}", noise=("absorbing",)
    )


@sampler_preset()
def autoregressive(temperature: NonNegative = 0.0) -> Sampler:
    """Returns a sampler for plain autoregressive decoding: one token per pass, from the causal pass's prediction.

    Args:
        temperature: 0 takes the argmax.

    Returns:
        The sampler, for models whose encoding pass predicts the next token.
    """
    temperature = check_number(
        "autoregressive(temperature=)", temperature, autoregressive.ranges["temperature"]
    )
    # `speculate` is the number of drafted tokens: without a draft, every token comes from the causal pass.
    return Sampler(confidence(), temperature=temperature, speculate=0)


@sampler_preset("LinearSpec; TiDAR, arXiv 2511.08923")
def self_speculation(
    draft: Annotated[int, AtLeast(1, integer=True)] = 31,
    temperature: NonNegative = 0.0,
    rule: Rule | None = None,
) -> Sampler:
    """Returns a sampler that drafts by diffusion and verifies by one causal pass of the same weights.

    The tokens are exactly those of `autoregressive` with the same seed, at any temperature.

    Args:
        draft: Maximum number of tokens of a draft; one number for all rows, because it sets the width of the canvas.
        temperature: 0 takes the argmax.
        rule: Decoding rule of the drafts. None: `confidence`, which drafts the canvas in one pass unless `Plan(steps=)`
            gives a draft more passes.

    Returns:
        The sampler, for models whose encoding pass predicts the next token.

    Raises:
        ValueError: `draft` or `temperature` is out of range.
    """
    ranges = self_speculation.ranges
    draft = check_number("self_speculation(draft=)", draft, ranges["draft"])
    if not isinstance(draft, int):
        raise refuse("self_speculation(draft=)", draft, "one number for all rows")
    temperature = check_number("self_speculation(temperature=)", temperature, ranges["temperature"])
    return Sampler(rule or confidence(), temperature=temperature, speculate=draft)


@rule(
    noise="absorbing",
    stopping=stopping.never,
    needs_logits=False,
    source="P2, arXiv 2502.03540, `p2_sampling` of its path_planning package",
)
def p2(key: Key, view: View, memory: Memory, eta: NonNegative = 1.0) -> tuple[Proposal, Memory]:
    """Keeps the tokens that the model itself is surest of, and remasks the others: P2 with self-planning.

    The score of a position is log p of the token drawn there in this pass, multiplied by `eta` if the position is
    already decided. In step i of N (from 1), the floor((1 - i / N) L) of the block's L positions with the lowest scores
    become masks or stay masks, and all other masks become tokens. Positions that score equal to the lowest kept one are
    kept too.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        eta: Factor on the scores of decided tokens. Above 1 they are remasked more easily, at 0 never.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: above temperature 0 it scores a token by the logits plus the noise that drew it; here
    the score is the log-probability without that noise. A second model as planner (its BERT planner) is not supported.
    """
    # Log-probabilities are negative: eta > 1 lowers the scores of decided tokens, eta = 0 makes them 0, the highest.
    score = jnp.log(jnp.maximum(view.stats.p_sample, 1e-30)) * jnp.where(view.masked, 1.0, eta)
    score = jnp.where(view.editable, score, jnp.inf)
    length = view.editable.sum()
    count = length - -(-length * (view.step + 1) // view.steps)  # floor((1 - i / N) L)
    # The score of rank `count` is the lowest one that is kept; positions strictly below it become masks.
    cutoff = jnp.sort(score)[jnp.clip(count, 0, score.shape[0] - 1)]
    lowest = view.editable & (score < cutoff)
    return remask(view, accept(view, view.masked & ~lowest), ~view.masked & lowest), memory


def quality_head(params: Params, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
    """Computes PRISM's quality of each token: the logit of the probability that it is right.

    The head has the architecture of PRISM for LLaDA (`RemaskingHead` in its llada.py): LayerNorm, a linear layer
    D -> D, GELU, and a linear layer D -> 1.

    Args:
        params: Parameters of the model; `params["quality_head"]` holds {"norm": {"scale" [D], "bias" [D]},
            "first": {"w" [D, D], "b" [D]}, "second": {"w" [D, 1], "b" [1]}}.
        hidden: Hidden states after the final norm of the model [B, L, D].

    Returns:
        The logits [B, L], at least fp32.

    Raises:
        ValueError: `params` has no "quality_head".
    """
    if "quality_head" not in params:
        allowed = (
            'params with a "quality_head", which the rule prism reads; see mj.rules.combined.quality_head'
        )
        raise refuse("lm.params", sorted(params), allowed)
    head, dtype = params["quality_head"], accumulation_dtype(hidden.dtype)
    x = hidden.astype(dtype)  # LayerNorm first, then the two linear layers
    x = x - x.mean(-1, keepdims=True)
    x = (
        x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * head["norm"]["scale"]
        + head["norm"]["bias"]
    )
    x = jax.nn.gelu(x @ head["first"]["w"] + head["first"]["b"], approximate=False)
    return (x @ head["second"]["w"] + head["second"]["b"])[..., 0].astype(dtype)


@rule(
    noise="absorbing",
    needs_hidden=quality_head,
    needs_logits=False,
    source="PRISM, arXiv 2510.01384, `llada_inference` in PRISM_llada/sampling.py",
)
def prism(
    key: Key, view: View, memory: Memory, remasks: Annotated[Param, AtLeast(0, integer=True)] = 0
) -> tuple[Proposal, Memory]:
    """Decodes as `confidence`, and remasks the decided tokens of the lowest quality, `remasks` times in a block.

    `quality_head`, which is trained to predict whether a token is right, computes the quality. The remaskings are
    divided evenly among the steps; a remainder goes to the steps in the middle of the block, one each. A step that
    remasks k tokens accepts k masks more than the schedule says, so that the number of masks follows the schedule. The
    tokens that it remasks are not among those that it accepts.

    Args:
        key: Unused.
        view: Reads `hidden` (the quality [L]), `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        remasks: Number of remaskings in the whole block; 0 for none.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: positions that the last step remasks stay masks in the reference's answer; here the
    answer keeps their tokens.
    """
    # Every step remasks `every` tokens, and the `rest` steps nearest to the middle one more.
    every, rest = jnp.divmod(jnp.asarray(remasks).astype(jnp.int32), view.steps)
    count = every + (rank_from_middle(view.step, view.steps) < rest)
    filled = top(view.stats.p_sample, view.masked, fixed_share(view) + count)
    worst = top(-view.hidden, view.editable & ~view.masked, count)
    return remask(view, accept(view, filled), worst), memory


def rank_from_middle(step: Int[Array, ""], steps: Int[Array, ""]) -> Int[Array, ""]:
    """Ranks a step by its distance from the middle of all steps, 0 for the nearest.

    Args:
        step: Index of the step, in 0..steps - 1.
        steps: Number of steps of the block.

    Returns:
        The rank, in 0..steps - 1. Of two steps at the same distance, the earlier one ranks first.
    """
    # Distance in half steps: 0, 2, 2, 4, 4, ... for an odd number of steps, 1, 1, 3, 3, ... for an even one. Both steps
    # of a distance d > 0 rank d - 1, and the later one gets 1 more.
    distance = jnp.abs(2 * step - (steps - 1))
    return jnp.maximum(distance - 1, 0) + (2 * step > steps - 1)
