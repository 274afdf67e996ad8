"""Arguments of published sampling scripts, by their own names, as arguments of `mj.sample`.

    out = mj.sample(llada, prompts, **mj.presets.llada(steps=128, gen_length=128, block_length=32))

Each function takes the arguments of the script that it names, with the script's defaults, and returns a dict of
`max_tokens`, `sampler` and `plan`, with guidance `guidance` and `negative` too. tests/conformance compares each one
with its script, token for token; docs/conformance.md lists what was compared.

Where `mj.sample` departs from all of these scripts: an answer ends at the end of text, and what follows is not decoded
(the scripts fill the whole length); the mask, and padding that is no end of text, are never drawn and have no share in
a confidence; a block whose tokens are all decided ends before its steps are used up.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from mercury_jax.config import AtLeast, Between, Plan, Refresh, refuse
from mercury_jax.decode import processors, rules, stopping
from mercury_jax.decode.inputs import MAX_TOKENS, check_whole
from mercury_jax.decode.registration import check_number, no_such_part
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, Static

LLADA_EOS = 126081  # `<|endoftext|>`, which LLaDA's script names by its id
LLADA_EOT = 126348  # `<|eot_id|>`, the end of a turn


def llada(
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
) -> dict[str, Any]:
    """Converts the arguments of LLaDA's `generate` (ML-GSAI/LLaDA, generate.py; arXiv 2502.09992).

    Args:
        steps: Denoising steps of the whole answer.
        gen_length: Tokens of the answer.
        block_length: Tokens of a block; divides `gen_length`.
        temperature: At which tokens are drawn; confidence is read without it. 0: argmax.
        cfg_scale: Weight of the guidance, whose other branch reads masks in place of the prompt. 0: none.
        remasking: "low_confidence" or "random".
        logits_eos_inf: Never draw LLaDA's end of text, the id 126081.
        confidence_eos_eot_inf: Accept LLaDA's ends of text and of turn, 126081 and 126348, after all other tokens. Only
            at temperature 0 with "low_confidence": above it the script takes them out of different logits.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> mj.sample(lm, prompts, **mj.presets.llada(steps=128, gen_length=128, block_length=32))
    """
    for name, value in (
        ("logits_eos_inf", logits_eos_inf),
        ("confidence_eos_eot_inf", confidence_eos_eot_inf),
    ):
        if not isinstance(value, bool):
            raise refuse(name, value, "True or False")
    _one_of("remasking", remasking, ("low_confidence", "random"))
    drawn = check_number("temperature", temperature, AtLeast(0))
    rule = rules.confidence() if remasking == "low_confidence" else rules.random()
    if confidence_eos_eot_inf:
        if drawn > 0 or remasking == "random":
            allowed = "False above temperature 0 and with random remasking"
            raise refuse("confidence_eos_eot_inf", confidence_eos_eot_inf, allowed)
        rule = rules.confidence_without([LLADA_EOS, LLADA_EOT])
    chain = (processors.ban([LLADA_EOS]),) if logits_eos_inf else ()
    found: dict[str, Any] = {
        "max_tokens": gen_length,
        "sampler": Sampler(rule, chain, temperature=drawn),
        "plan": _blocks("gen_length", gen_length, block_length, steps),
    }
    if check_number("cfg_scale", cfg_scale, AtLeast(0)):
        found |= {"guidance": cfg_scale, "negative": "masked"}
    return found


def dream(
    max_new_tokens: int = 20,
    steps: int = 512,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    alg: str = "origin",
    alg_temp: float | None = None,
    eps: float = 1e-3,
) -> dict[str, Any]:
    """Converts the arguments of Dream's `diffusion_generate` (its generation_utils.py; arXiv 2508.15487).

    Args:
        max_new_tokens: Tokens of the answer, which is one block.
        steps: Denoising steps.
        temperature: Divides the logits, before top-p and top-k and before the confidence is read. 0: argmax.
        top_p: Probability of the ids that are kept; None for all.
        top_k: Number of the ids that are kept; None for all.
        alg: "origin", "maskgit_plus", "topk_margin" or "entropy".
        alg_temp: Temperature at which positions are drawn by their score; None or 0 takes the highest. Unused by
            "origin".
        eps: Time of the last step.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: with several prompts it computes a step's number of tokens from the mean number of
    masks over the rows, which is the same number as long as every row has as many; here from the row's own.
    """
    _one_of("alg", alg, ("origin", "maskgit_plus", "topk_margin", "entropy"))
    if alg == "origin":
        rule = rules.dream_origin(eps=eps)
    else:
        make = rules.dream_entropy if alg == "entropy" else getattr(rules, alg)
        rule = make(alg_temp=alg_temp or 0.0, eps=eps)
    size = check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
    return {
        "max_tokens": size,
        "sampler": _tempered(rule, temperature, top_p, top_k),
        "plan": Plan(block=size, steps=check_whole("steps", steps, 1, MAX_TOKENS)),
    }


def open_dcoder(
    max_new_tokens: int = 128,
    steps: int = 512,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    alg: str = "entropy",
    alg_temp: float | None = 0.0,
    eps: float = 1e-3,
) -> dict[str, Any]:
    """Converts the arguments of Open-dCoder's `diffusion_generate` (pengzhangzhi/Open-dLLM, generation_utils.py).

    Args:
        max_new_tokens: Tokens of the answer, which is one block. (The script has no default; its evaluation has 128.)
        steps: Denoising steps.
        temperature: As of `dream`.
        top_p: As of `dream`.
        top_k: As of `dream`.
        alg: "p2", or one of `dream`. With "p2" a decided token may become a mask again.
        alg_temp: As of `dream`; unused by "p2".
        eps: As of `dream`; unused by "p2".

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    if alg != "p2":
        _one_of("alg", alg, ("p2", "origin", "maskgit_plus", "topk_margin", "entropy"))
        return dream(max_new_tokens, steps, temperature, top_p, top_k, alg, alg_temp, eps)
    size = check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
    return {
        "max_tokens": size,
        "sampler": _tempered(rules.p2(), temperature, top_p, top_k),
        "plan": Plan(block=size, steps=check_whole("steps", steps, 1, MAX_TOKENS)),
    }


def fast_dllm(
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    threshold: float | None = None,
    factor: float | None = None,
    use_cache: bool = False,
    dual_cache: bool = False,
) -> dict[str, Any]:
    """Converts the arguments of Fast-dLLM's `generate*` for LLaDA (NVlabs/Fast-dLLM, llada/generate.py and
    eval_llada.py; arXiv 2505.22618).

    Args:
        steps: Denoising steps of the whole answer, where neither `threshold` nor `factor` is given.
        gen_length: Tokens of the answer.
        block_length: Tokens of a block; divides `gen_length`.
        temperature: At which tokens are drawn; confidence is read without it. 0: argmax.
        remasking: "low_confidence"; "random" only without `threshold` and `factor`.
        threshold: Accept every mask of at least this confidence, in place of a fixed number.
        factor: Accept the n most confident masks for the largest n that it allows; replaces `threshold`.
        use_cache: Reuse keys: the prefix cache.
        dual_cache: With `use_cache`, the dual cache.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: with a cache it makes one more pass for a block that its first pass has filled.
    """
    found = llada(steps, gen_length, block_length, temperature, 0.0, remasking)
    parallel = threshold is not None or factor is not None
    if parallel and remasking != "low_confidence":
        raise refuse("remasking", remasking, "low_confidence with threshold or factor")
    plan = found["plan"]
    if parallel:
        rule = rules.threshold(threshold or 0.0) if factor is None else rules.factor(factor)
        found["sampler"] = found["sampler"]._replace(rule=rule)
        plan = Plan(block=plan.block)  # as many steps as it needs
    return found | {"plan": _cached(plan, use_cache, dual_cache)}


def fast_dllm_dream(
    max_new_tokens: int = 20,
    steps: int = 512,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    alg: str = "origin",
    alg_temp: float | None = None,
    eps: float = 1e-3,
    threshold: float = 0.9,
    block_length: int = 32,
    use_cache: bool = False,
    dual_cache: bool = False,
) -> dict[str, Any]:
    """Converts the arguments of Fast-dLLM's `diffusion_generate` for Dream (NVlabs/Fast-dLLM, dream/model and eval.py).

    Without a cache the answer is one block, and `alg="confidence_threshold"` accepts at most `max_new_tokens / steps`
    tokens a step, what earlier steps left over included. With a cache it is decoded in blocks, and the first pass of a
    block accepts its first token alone.

    Args:
        max_new_tokens: Tokens of the answer.
        steps: Denoising steps of the whole answer.
        temperature: Divides the logits, before top-p and top-k and before the confidence is read. 0: argmax.
        top_p: Probability of the ids that are kept; None for all.
        top_k: Number of the ids that are kept; None for all.
        alg: "confidence_threshold" or, without a cache, those of `dream`; with one also "entropy".
        alg_temp: As of `dream`.
        eps: As of `dream`.
        threshold: Of `alg="confidence_threshold"`.
        block_length: Tokens of a block, with a cache; divides `max_new_tokens`.
        use_cache: Reuse keys: the prefix cache.
        dual_cache: With `use_cache`, the dual cache.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit. With a cache the script decodes by entropy whatever other
            `alg` it is given; these are refused.
    """
    by_threshold = alg == "confidence_threshold"
    if not use_cache and not by_threshold:
        found = dream(max_new_tokens, steps, temperature, top_p, top_k, alg, alg_temp, eps)
        return found | {"plan": _cached(found["plan"], use_cache, dual_cache)}
    size = check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
    if not use_cache:
        steps = check_whole("steps", steps, 1, size)
        if size % steps:
            raise refuse("steps", steps, f"a divisor of max_new_tokens, {size}")
        rule, plan = rules.budgeted_threshold(threshold, size // steps), Plan(block=size)
    else:
        _one_of("alg", alg, ("confidence_threshold", "entropy"))
        plan = _blocks("max_new_tokens", size, block_length, steps)
        plan = Plan(block=plan.block) if by_threshold else plan
        entropy = rules.dream_entropy(alg_temp=alg_temp or 0.0, eps=eps)
        rule = rules.leftmost_first(rules.threshold(threshold) if by_threshold else entropy)
    sampler = _tempered(rule, temperature, top_p, top_k)
    return {"max_tokens": size, "sampler": sampler, "plan": _cached(plan, use_cache, dual_cache)}


def sdar(
    gen_length: int = 128,
    block_length: int = 4,
    denoising_steps: int = 4,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    remasking_strategy: str = "low_confidence_dynamic",
    confidence_threshold: float = 0.85,
    eb_threshold: float = 0.35,
) -> dict[str, Any]:
    """Converts the arguments of SDAR's `block_diffusion_generate` (JetAstra/SDAR, generate.py; arXiv 2510.06303).

    Args:
        gen_length: Tokens of the answer; like the script, whole blocks are decoded, which may be a few more.
        block_length: Tokens of a block, those of the model.
        denoising_steps: Steps of a block, which the schedule divides by.
        temperature: Divides the logits, before top-k and top-p and before the confidence is read. 0: the argmax with
            the model's own confidence, as SDAR's evaluation decodes greedily (the script cannot divide by 0).
        top_k: Number of the ids that are kept; 0 for all.
        top_p: Probability of the ids that are kept.
        remasking_strategy: "low_confidence_dynamic", "low_confidence_static", "sequential" or "entropy_bounded".
        confidence_threshold: Of the dynamic strategy.
        eb_threshold: Of "entropy_bounded", in nats.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: "entropy_bounded" fails there (it writes to a variable that is not set, and takes the
    drawn token's probability alone for the entropy); here it is `rules.entropy_bound`.
    """
    names = ("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded")
    _one_of("remasking_strategy", remasking_strategy, names)
    block = check_whole("block_length", block_length, 1, MAX_TOKENS)
    steps = check_whole("denoising_steps", denoising_steps, 1, block)
    if remasking_strategy == "sequential":
        rule = rules.sequential(length=block)
    elif remasking_strategy == "entropy_bounded":
        rule = rules.entropy_bound(check_number("eb_threshold", eb_threshold, AtLeast(0)))
    else:
        dynamic = remasking_strategy == "low_confidence_dynamic"
        limit = check_number("confidence_threshold", confidence_threshold, Between(0, 1))
        rule = rules.scheduled(limit if dynamic else 1.0, length=block)
    return {
        "max_tokens": check_whole("gen_length", gen_length, 1, MAX_TOKENS),
        "sampler": _drawn(rule, temperature, top_k, top_p),
        "plan": Plan(block=block, steps=steps, whole_blocks=True),
    }


def llada2(
    max_new_tokens: int = 128,
    block_size: int = 32,
    steps_per_block: int = 32,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    threshold: float = 0.95,
    minimal_topk: int = 1,
) -> dict[str, Any]:
    """Converts the arguments of LLaDA2.0's sampler (ZHZisZZ/dllm, dllm/pipelines/llada2/sampler.py; arXiv 2512.15745).

    Args:
        max_new_tokens: Tokens of the answer; like the sampler, whole blocks are decoded, which may be a few more.
        block_size: Tokens of a block, those of the model.
        steps_per_block: Steps that the schedule divides a block by; at most `max_new_tokens // minimal_topk`.
        temperature: Divides the logits, before top-k and top-p and before the confidence is read. 0: argmax, and
            neither top-k nor top-p.
        top_p: Probability of the ids that are kept; None for all.
        top_k: Number of the ids that are kept; None for all.
        threshold: Confidence above which a token is accepted.
        minimal_topk: See `steps_per_block`.

    Returns:
        Arguments of `mj.sample`. Its `eos_early_stop` has no counterpart: an answer always ends at the end of text.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    size = check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
    block = check_whole("block_size", block_size, 1, MAX_TOKENS)
    steps = check_whole("steps_per_block", steps_per_block, 1, MAX_TOKENS)
    steps = max(1, min(steps, size // check_whole("minimal_topk", minimal_topk, 1, size)))
    rule = rules.scheduled(check_number("threshold", threshold, Between(0, 1)), length=block)
    return {
        "max_tokens": size,
        "sampler": _drawn(rule, temperature, top_k, top_p),
        "plan": Plan(block=block, steps=steps, whole_blocks=True),
    }


def llada21(
    max_new_tokens: int = 128,
    block_size: int = 32,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    threshold: float = 0.95,
    editing_threshold: float = 0.9,
    max_post_steps: int = 16,
    num_to_transfer: int = 1,
) -> dict[str, Any]:
    """Converts the arguments of LLaDA2.1's sampler (ZHZisZZ/dllm, dllm/pipelines/llada21/sampler.py; arXiv 2602.08676).

    Args:
        max_new_tokens: Tokens of the answer; like the sampler, whole blocks are decoded, which may be a few more.
        block_size: Tokens of a block, those of the model.
        temperature: As of `llada2`.
        top_p: As of `llada2`.
        top_k: As of `llada2`.
        threshold: Confidence above which a mask is filled.
        editing_threshold: Confidence above which a decided token is replaced.
        max_post_steps: Most passes over a block without masks.
        num_to_transfer: Masks that are filled where fewer are above the threshold.

    Returns:
        Arguments of `mj.sample`. As of `llada2` there is no `eos_early_stop`.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    block = check_whole("block_size", block_size, 1, MAX_TOKENS)
    edits = check_whole("max_post_steps", max_post_steps, 0, MAX_TOKENS)
    rule = rules.editing(
        check_number("threshold", threshold, Between(0, 1)),
        check_number("editing_threshold", editing_threshold, Between(0, 1)),
        check_whole("num_to_transfer", num_to_transfer, 1, block),
    )
    sampler = _drawn(rule, temperature, top_k, top_p)
    return {
        "max_tokens": check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS),
        "sampler": sampler._replace(stopping=stopping.fixed_point(patience=1, limit=edits)),
        "plan": Plan(block=block, steps=block + edits, whole_blocks=True),
    }


def fast_dllm_v2(
    max_new_tokens: int = 512,
    small_block_size: int = 8,
    threshold: float = 1.0,
    top_p: float = 0.95,
    temperature: float = 0.0,
    use_block_cache: bool = False,
) -> dict[str, Any]:
    """Converts the arguments of Fast-dLLM v2's `generate` (the checkpoint's modeling.py; arXiv 2509.26328).

    The pass that encodes a block also decides the first token of the next, at any temperature by its argmax.

    Args:
        max_new_tokens: Tokens of the answer. (The script has no default; its model card passes 512.)
        small_block_size: Tokens of a small block, a divisor of the model's `bd_size`.
        threshold: Confidence above which a token is accepted; the best one always is.
        top_p: Probability of the ids that are kept, above temperature 0.
        temperature: Divides the logits, before top-p and before the confidence is read. 0: argmax.
        use_block_cache: Only False.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: it decodes `max_new_tokens // bd_size` blocks, counted from the one that the prompt ends
    in, and one token more. It does not encode a prompt of one block exactly, which the model then never sees.
    """
    if use_block_cache is not False:
        raise refuse("use_block_cache", use_block_cache, "False: a pass covers the whole block")
    rule = rules.scheduled(check_number("threshold", threshold, Between(0, 1)))
    return {
        "max_tokens": check_whole("max_new_tokens", max_new_tokens, 1, MAX_TOKENS),
        "sampler": _drawn(rule, temperature, None, top_p),
        "plan": Plan(block=check_whole("small_block_size", small_block_size, 1, MAX_TOKENS)),
    }


def mdlm(length: int = 1024, steps: int = 128, predictor: str = "ddpm_cache") -> dict[str, Any]:
    """Converts the settings of MDLM's `_sample` (kuleshov-group/mdlm, diffusion.py, configs/config.yaml).

    Args:
        length: `model.length`: tokens of the answer, which is one block. (The script draws whole texts, without a
            prompt, and goes on after an end of text.)
        steps: `sampling.steps`.
        predictor: `sampling.predictor`: "ddpm_cache", which is for models that do not take the time, or "ddpm".

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: its times end at 1e-5, and a further pass gives what is still masked its argmax
    (`noise_removal`); here the last step fills every mask.
    """
    _one_of("predictor", predictor, ("ddpm_cache", "ddpm"))
    size = check_whole("length", length, 1, MAX_TOKENS)
    rule = rules.ancestral_cache() if predictor == "ddpm_cache" else rules.ancestral()
    plan = Plan(block=size, steps=check_whole("steps", steps, 1, MAX_TOKENS))
    return {"max_tokens": size, "sampler": rule, "plan": plan}


def bd3lm(
    length: int = 1024, nucleus_p: float = 1.0, first_hitting: bool = True, T: int = 5000
) -> dict[str, Any]:
    """Converts the settings of BD3-LM's `_semi_ar_sampler` (kuleshov-group/bd3lms, diffusion.py, configs/config.yaml).

    Args:
        length: `model.length`: tokens of the answer; blocks are the model's. (The script draws whole texts, which begin
            with the first token, and goes on after an end of text.)
        nucleus_p: `sampling.nucleus_p`: the most probable ids are kept while their total is at most this; the published
            figures use 0.9.
        first_hitting: `sampling.first_hitting`: one mask a pass. False: the reverse process in `T` steps a block.
        T: `algo.T`: steps of a block.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: it draws again where the last 256 tokens repeat themselves (entropy below 4), and
    without first hitting divides 0 by 0 in the last of its `T` times.
    """
    if not isinstance(first_hitting, bool):
        raise refuse("first_hitting", first_hitting, "True or False")
    p = check_number("nucleus_p", nucleus_p, Between(0, 1))
    rule = rules.first_hitting() if first_hitting else rules.ancestral_cache()
    steps = check_whole("T", T, 1, MAX_TOKENS)
    return {
        "max_tokens": check_whole("length", length, 1, MAX_TOKENS),
        "sampler": _with_chain(rule, [processors.top_p(p, crossing=0)] if p < 1 else []),
        "plan": Plan() if first_hitting else Plan(steps=steps),
    }


def duo(
    length: int = 1024,
    steps: int = 1000,
    predictor: str = "ancestral",
    noise_removal: str = "ancestral",
    p_nucleus: float = 1.0,
    time_profile: str = "linear",
    high_mode: str = "pure-posterior",
    middle_mode: str = "pure-posterior",
    low_mode: str = "pure-posterior",
    high_frac: float = 0.2,
    middle_frac: float = 0.6,
) -> dict[str, Any]:
    """Converts the settings of DUO's `generate_samples` (s-sahoo/duo, trainer_base.py, configs/config.yaml).

    It makes `steps` + 1 passes: the last one removes the noise that is left at time 1e-5.

    Args:
        length: `model.length`: tokens of the answer, which is one block. (The script draws whole texts, without a
            prompt, and goes on after an end of text.)
        steps: `sampling.steps`.
        predictor: `sampling.predictor`: "ancestral" or "psi" (arXiv 2602.21185).
        noise_removal: `sampling.noise_removal`: "ancestral" draws in the last pass, "greedy" takes the argmax.
        p_nucleus: `sampling.p_nucleus`: probability of the ids that are kept.
        time_profile: `sampling.psi.time_profile`: "linear", or "linear-constant-linear-T" with the time T at which the
            middle part waits ("linear-constant-linear-ALPHA-inv" names it by alpha).
        high_mode: `sampling.psi.high_mode`, the weight of the posterior in the first part of the steps:
            "pure-posterior", "pure-pc", "constant-W", "max-capped-E", "max-rescale-E" or "constant-remdm-E".
        middle_mode: The same of the middle part.
        low_mode: The same of the last part.
        high_frac: Share of the steps that the first part has.
        middle_frac: Share of the steps that the middle part has.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: alpha is 1 - t, where it has 1 - 0.999 t (the model itself is told the latter).
    """
    _one_of("predictor", predictor, ("ancestral", "psi"))
    _one_of("noise_removal", noise_removal, ("ancestral", "greedy"))
    size, count = check_whole("length", length, 1, MAX_TOKENS), check_whole("steps", steps, 1, MAX_TOKENS)
    p = check_number("p_nucleus", p_nucleus, Between(0, 1))
    high = check_number("high_frac", high_frac, Between(0, 1))
    middle = check_number("middle_frac", middle_frac, Between(0, 1))
    if high + middle > 1:
        raise refuse("middle_frac", middle_frac, f"at most {1 - high:g}, what high_frac leaves")
    first, second = round(high * (count + 1)), round(middle * (count + 1))
    times, kappas = np.linspace(1.0, DUO_EPS, count + 1), np.ones(count + 1)
    if predictor == "psi":
        times = _duo_times(time_profile, count + 1, first, second)
        cuts = (0, first, first + second, count + 1)
        for name, mode, at, end in zip(
            ("high_mode", "middle_mode", "low_mode"),
            (high_mode, middle_mode, low_mode),
            cuts,
            cuts[1:],
            strict=False,
        ):
            kappas[at:end] = _duo_weights(name, mode, times[at:end])
    kappas[-1] = 1.0  # the last pass is ancestral
    weights: Any = Static(jnp.asarray(kappas, jnp.float32))
    rule = rules.predictor_corrector(kappa=weights, own=1, greedy=int(noise_removal == "greedy"))
    return {
        "max_tokens": size,
        "sampler": _with_chain(rule, [processors.top_p(p)] if p < 1 else []),
        "plan": Plan(block=size, times=(*times.tolist(), 0.0)),
    }


DUO_EPS = 1e-5  # the time at which DUO's sampler removes what noise is left


def _duo_times(profile: str, count: int, first: int, second: int) -> np.ndarray:
    """DUO's times [count] by the name of a profile: falling evenly, or waiting in between."""
    if profile == "linear":
        return np.linspace(1.0, DUO_EPS, count)
    allowed = "linear, linear-constant-linear-T, or linear-constant-linear-ALPHA-inv"
    words = profile.split("-") if isinstance(profile, str) else []
    try:
        level = float(words[3])
    except (IndexError, ValueError):
        raise refuse("time_profile", profile, allowed) from None
    if words[:3] != ["linear", "constant", "linear"] or words[4:] not in ([], ["inv"]) or not 0 <= level <= 1:
        raise refuse("time_profile", profile, allowed)
    wait = 1.0 - level if words[4:] else level
    falling = np.linspace(1.0, wait, first), np.linspace(wait, DUO_EPS, count - first - second)
    return np.concatenate([falling[0], np.full(second, wait), falling[1]])


def _duo_weights(name: str, mode: str, times: np.ndarray) -> np.ndarray:
    """The weight of the posterior at each of a part's times: constant, or of ReMDM's remasking probabilities."""
    if mode == "pure-posterior" or not len(times):
        return np.ones(len(times))
    if mode == "pure-pc":
        return np.zeros(len(times))
    kinds = ("constant-remdm", "constant", "max-capped", "max-rescale")
    kind, _, number = mode.rpartition("-") if isinstance(mode, str) else ("", "", "")
    try:
        eta = float(number)
    except ValueError:
        eta = -1.0
    if kind not in kinds or not 0 <= eta <= 1:
        raise refuse(name, mode, "pure-posterior, pure-pc, or one of " + ", ".join(f"{k}-ETA" for k in kinds))
    if kind == "constant":
        return np.full(len(times), eta)
    alpha = 1.0 - times
    alpha_t, alpha_s = alpha[:-1], alpha[1:]
    most = np.minimum(eta, (1.0 - alpha_s) / np.maximum(alpha_t, 1e-12))
    if kind == "max-rescale":
        sigma = np.where(alpha_t > 0, most, 1.0) * eta
    else:
        sigma = most if kind == "max-capped" else np.full(len(alpha_t), eta)
    return np.append(np.clip(1.0 - sigma / np.maximum(1.0 - alpha_s, 1e-12), 0.0, 1.0), 1.0)


def gidd(max_seq_len: int = 512, num_denoising_steps: int = 128, min_p: float = 0.0) -> dict[str, Any]:
    """Converts the settings of GIDD's `GiddSampler` (dvruette/gidd, gidd/sampling.py and configs/generate.yaml).

    Args:
        max_seq_len: Tokens of the answer, which is one block. (The script draws whole texts, without a prompt, and goes
            on after an end of text.)
        num_denoising_steps: Passes. Like the script, the first one is at time 1 - 1 / N, and the last changes nothing.
        min_p: Tokens of a smaller probability are not drawn.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Departs from the reference: its last time is `t_eps`, at which a mask is left with about that probability.
    """
    size, count = check_whole("max_seq_len", max_seq_len, 1, MAX_TOKENS), num_denoising_steps
    count = check_whole("num_denoising_steps", count, 2, MAX_TOKENS)
    times = (*(i / count for i in range(count - 1, -1, -1)), 0.0)
    rule = rules.hybrid_ancestral(check_number("min_p", min_p, Between(0, 1)))
    return {"max_tokens": size, "sampler": rule, "plan": Plan(block=size, times=times)}


def gidd_self_correction(
    num_inference_steps: int = 128,
    temperature: float = 0.1,
    t0: float = 0.01,
    early_stopping_patience: int = 32,
    tokens_per_step: int = 1,
) -> dict[str, Any]:
    """Converts the arguments of GIDD's self-correction (dvruette/gidd, gidd/pipeline.py and eval/self_correction.py).

    Args:
        num_inference_steps: Most passes.
        temperature: At which tokens are drawn.
        t0: Time that the model is told.
        early_stopping_patience: Passes without a rise of the agreement with the argmax after which it ends.
        tokens_per_step: Tokens that are replaced in a pass.

    Returns:
        Arguments of `mj.edit`, whose text is the sample to correct.

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> mj.edit(lm, out.tokens, **mj.presets.gidd_self_correction())

    Departs from the reference: where the patience ends, it drops the change of the last pass.
    """
    t = check_number("t0", t0, Between(GIDD_EPS, 1 - GIDD_EPS))
    count = check_whole("num_inference_steps", num_inference_steps, 1, MAX_TOKENS)
    rule = rules.self_correct(
        t=check_number("temperature", temperature, AtLeast(0)),
        count=check_whole("tokens_per_step", tokens_per_step, 1, MAX_TOKENS),
    )
    patience = check_whole("early_stopping_patience", early_stopping_patience, 0, MAX_TOKENS)
    # The model maps times to levels t_eps + (1 - 2 t_eps) time; the script gives it t0 as it is.
    time = (t - GIDD_EPS) / (1 - 2 * GIDD_EPS)
    return {
        "sampler": Sampler(rule, stopping=stopping.stalled(patience=patience)),
        "plan": Plan(times=(time,) * (count + 1)),
    }


GIDD_EPS = 1e-4  # `t_eps` of the published models


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuses a name that the script does not know."""
    if value not in allowed:
        raise refuse(name, value, ", ".join(allowed))


def _blocks(name: str, length: int, block: int, steps: int) -> Plan:
    """Blocks of equal length with equal steps, as the scripts assert."""
    length = check_whole(name, length, 1, MAX_TOKENS)
    block = check_whole("block_length", block, 1, length)
    if length % block:
        raise refuse("block_length", block, f"a divisor of {name}, {length}")
    count = length // block
    steps = check_whole("steps", steps, 1, MAX_TOKENS)
    if steps % count:
        raise refuse("steps", steps, f"a multiple of the number of blocks, {count}")
    return Plan(block=block, steps=steps // count)


def _tempered(rule: Rule, temperature: float, top_p: float | None, top_k: int | None) -> Sampler:
    """A sampler that reads the confidence after temperature, top-p and top-k, in this order."""
    chain: list[LogitsProcessor] = []
    t = check_number("temperature", temperature, AtLeast(0))
    if t > 0:
        chain.append(processors.temperature(t))
    if top_p is not None and check_number("top_p", top_p, Between(0, 1)) < 1:
        chain.append(processors.top_p(top_p))
    if top_k is not None:
        chain.append(processors.top_k(top_k))
    return _with_chain(rule, chain, 1.0 if t > 0 else 0.0)


def _drawn(rule: Rule, temperature: float, top_k: int | None, top_p: float | None) -> Sampler:
    """A sampler as of SDAR and LLaDA2: temperature, top-k, top-p, then the confidence; at 0 the argmax alone."""
    t = check_number("temperature", temperature, AtLeast(0))
    p = 1.0 if top_p is None else check_number("top_p", top_p, Between(0, 1))
    k = 0 if top_k is None else check_whole("top_k", top_k, 0, MAX_TOKENS)
    if t == 0:
        return Sampler(rule, temperature=0.0)
    chain = [processors.temperature(t)] if t != 1 else []
    chain += [processors.top_k(k)] if k else []
    chain += [processors.top_p(p)] if 0 < p < 1 else []
    return _with_chain(rule, chain)


def _with_chain(rule: Rule, chain: list[LogitsProcessor], temperature: float = 1.0) -> Sampler:
    """A sampler whose confidence is taken after all processors, as the scripts take it."""
    return Sampler(rule, tuple(map(processors.before_confidence, chain)), temperature=temperature)


def _cached(plan: Plan, use_cache: bool, dual_cache: bool) -> Plan:
    """The plan with Fast-dLLM's cache."""
    for name, value in (("use_cache", use_cache), ("dual_cache", dual_cache)):
        if not isinstance(value, bool):
            raise refuse(name, value, "True or False")
    if dual_cache and not use_cache:
        raise refuse("dual_cache", dual_cache, "False without use_cache=True")
    refresh = None if not use_cache else Refresh.dual() if dual_cache else Refresh.prefix()
    return Plan(block=plan.block, steps=plan.steps, refresh=refresh)


def __getattr__(name: str) -> Any:
    raise no_such_part("preset", name, __dir__())


def __dir__() -> list[str]:
    here = lambda made: callable(made) and getattr(made, "__module__", None) == __name__
    return sorted(name for name, made in globals().items() if here(made) and name[0] != "_")
