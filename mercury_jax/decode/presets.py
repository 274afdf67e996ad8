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

from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import processors, rules
from mercury_jax.decode.inputs import MAX_TOKENS, check_whole
from mercury_jax.decode.registration import AtLeast, Between, check_number
from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler

LLADA_EOS = 126081  # `<|endoftext|>`, which LLaDA's script names by its id


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
        confidence_eos_eot_inf: Only False.

    Returns:
        Arguments of `mj.sample`.

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> mj.sample(lm, prompts, **mj.presets.llada(steps=128, gen_length=128, block_length=32))
    """
    if confidence_eos_eot_inf is not False:
        raise refuse("confidence_eos_eot_inf", confidence_eos_eot_inf, "False")
    if not isinstance(logits_eos_inf, bool):
        raise refuse("logits_eos_inf", logits_eos_inf, "True or False")
    _one_of("remasking", remasking, ("low_confidence", "random"))
    rule = rules.confidence() if remasking == "low_confidence" else rules.random()
    chain = (processors.ban([LLADA_EOS]),) if logits_eos_inf else ()
    drawn = check_number("temperature", temperature, AtLeast(0))
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
    return Sampler(rule, tuple(chain), temperature=1.0 if t > 0 else 0.0)


def _cached(plan: Plan, use_cache: bool, dual_cache: bool) -> Plan:
    """The plan with Fast-dLLM's cache."""
    for name, value in (("use_cache", use_cache), ("dual_cache", dual_cache)):
        if not isinstance(value, bool):
            raise refuse(name, value, "True or False")
    if dual_cache and not use_cache:
        raise refuse("dual_cache", dual_cache, "False without use_cache=True")
    refresh = None if not use_cache else Refresh.dual() if dual_cache else Refresh.prefix()
    return Plan(block=plan.block, steps=plan.steps, refresh=refresh)
