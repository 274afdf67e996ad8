"""Decoding rules: each is a pure function of the `View` of one row and of the rule's own memory.

masked            rules that accept masks (LLaDA, Fast-dLLM, dParallel, MDLM, SDAR, LocalLeap, dInfer, Dream)
position          rules that use the position of a mask (PC-Sampler, AdaBlock, WavefrontDiffusion, DUS)
history           rules that remember earlier steps (dInfer, KLASS, SlowFast, Prophet)
remask            remasking and self-correction (ReMDM, WINO, LLaDA2.1, GIDD)
variable_length   rules that insert and delete positions (DreamOn, LLaDA2.2, DAEDAL)
uniform           uniform noise (EB-Sampler, DiffusionGemma, DUO)
combined          several rules chosen per row; rules with drafts; planner and quality heads (P2, PRISM)

The decorators of `registration.py` register every rule in `ALL`. `mj.rules.<name>` reads `ALL`, so it also finds rules
that users define. A rule of one's own returns `accept` or `propose`, and declares the ranges of its parameters by
`Param`, `Above`, `AtLeast` and `Between`.
"""

from typing import TYPE_CHECKING, Any

from mercury_jax.config import Above, AtLeast, Between
from mercury_jax.decode.registration import RULES, no_such_part, rule
from mercury_jax.decode.rules import combined, history, masked, position, remask, uniform, variable_length
from mercury_jax.decode.rules.combined import leftmost_first, one_of
from mercury_jax.decode.rules.masked import confidence_without
from mercury_jax.decode.sampler import Param, accept, propose

if TYPE_CHECKING:  # the names that `__getattr__` finds, for type checkers and editors
    from mercury_jax.decode.rules.combined import autoregressive, p2, prism, self_speculation
    from mercury_jax.decode.rules.history import credit, klass, prophet, slow_fast
    from mercury_jax.decode.rules.masked import (
        ancestral,
        ancestral_cache,
        budgeted_threshold,
        confidence,
        dream_entropy,
        dream_origin,
        entropy_threshold,
        factor,
        first_hitting,
        frechet,
        hierarchical,
        local_leap,
        maskgit_plus,
        random,
        scheduled,
        sequential,
        threshold,
        topk_margin,
    )  # fmt: skip
    from mercury_jax.decode.rules.position import adablock, dilated, pc_sampler, wavefront
    from mercury_jax.decode.rules.remask import (
        blind_editing,
        editing,
        hybrid_ancestral,
        remdm_cap,
        remdm_confidence,
        remdm_loop,
        remdm_rescale,
        self_correct,
        wino,
    )  # fmt: skip
    from mercury_jax.decode.rules.uniform import diffusion_gemma, entropy_bound, predictor_corrector
    from mercury_jax.decode.rules.variable_length import daedal, expand, levenshtein

ALL = RULES
# What is no rule here: combinations of rules, and what a rule of one's own needs.
HELPERS = (
    "ALL", "Above", "AtLeast", "Between", "Param", "accept", "confidence_without", "leftmost_first", "one_of",
    "propose",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in RULES:
        return RULES[name]
    raise no_such_part("rule", name, __dir__())


def __dir__() -> list[str]:
    return sorted([*HELPERS, *RULES])
