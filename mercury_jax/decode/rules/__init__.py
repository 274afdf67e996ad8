"""Decoding rules: each one pure function of one row's `View` and its own memory.

masked, dream, parallel   which masks become tokens
history                   the same, remembering earlier steps
remask, editing           what is settled may be doubted, replaced
lengths                   tokens may be inserted and deleted
uniform                   noise without a mask
speculation               drafts that the causal pass checks
one_of                    several rules, chosen by a number
"""

from mercury_jax.decode.rules.dream import dream_entropy, dream_origin, maskgit_plus, topk_margin
from mercury_jax.decode.rules.editing import blind_editing, editing, self_correct
from mercury_jax.decode.rules.history import credit, klass, prophet, slow_fast
from mercury_jax.decode.rules.lengths import daedal, expand, levenshtein
from mercury_jax.decode.rules.masked import ancestral, confidence, first_hitting, random, threshold
from mercury_jax.decode.rules.one_of import one_of
from mercury_jax.decode.rules.parallel import factor, hierarchical, local_leap, scheduled
from mercury_jax.decode.rules.remask import remdm_cap, remdm_confidence, remdm_loop, remdm_rescale, wino
from mercury_jax.decode.rules.speculation import autoregressive, self_speculation
from mercury_jax.decode.rules.uniform import diffusion_gemma, entropy_bound, predictor_corrector

ALL = {
    r.__name__: r
    for r in (
        confidence, threshold, random, ancestral, first_hitting,
        dream_origin, maskgit_plus, dream_entropy, topk_margin,
        factor, scheduled, local_leap, hierarchical,
        credit, klass, slow_fast, prophet,
        remdm_cap, remdm_rescale, remdm_confidence, remdm_loop, wino,
        editing, blind_editing, self_correct,
        expand, levenshtein, daedal,
        entropy_bound, diffusion_gemma, predictor_corrector,
        autoregressive, self_speculation,
    )
}  # fmt: skip

__all__ = [
    "ALL", "ancestral", "autoregressive", "blind_editing", "confidence", "credit", "daedal", "diffusion_gemma",
    "dream_entropy", "dream_origin", "editing", "entropy_bound", "expand", "factor", "first_hitting", "hierarchical",
    "klass", "levenshtein", "local_leap", "maskgit_plus", "one_of", "predictor_corrector", "prophet", "random",
    "remdm_cap", "remdm_confidence", "remdm_loop", "remdm_rescale", "scheduled", "self_correct", "self_speculation",
    "slow_fast", "threshold", "topk_margin", "wino",
]  # fmt: skip
