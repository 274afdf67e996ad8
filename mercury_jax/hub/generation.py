"""Published sampling settings of checkpoint families, and their overrides in generation_config.json.

`Family.decoding` holds the settings that the authors of a family publish. They become `LM.decoding`, from which
`decode.defaults` makes a sampler and a plan. The keys, all optional:

    rule         name of a registered rule, such as "confidence"; "autoregressive" for next-token models
    params       parameters of the rule
    temperature  sampling temperature; 0 takes the argmax
    processors   {name: parameters} of logits processors, in the order in which they are applied
    cooling, steady   parameters of the logits processor and of the stopping criterion with these names
    block        block size in tokens; "answer": the whole answer is one block
    steps        denoising steps per block; absent: one per token
    ban          ids that are never generated
    begin_ban    ids that are not generated as the first token
    min_tokens   tokens before which no answer ends
    bias         [[id, value], ...]: numbers that are added to logits
    source       where the settings are published

The temperature can be applied in two ways. `processors: {"temperature": {"t": 0.2}}` with `temperature: 1.0` divides
the logits before a rule computes its confidence, as in Dream, SDAR and transformers' `generate`. `temperature: 0.2`
alone changes only how tokens are sampled, as in LLaDA. `mj.sample(temperature=)` replaces the one that the family uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.config import refuse

WHOLE_ANSWER = "answer"
FILE = "generation_config.json"
# `top_k` of transformers when a model samples and its generation_config.json does not set it.
DEFAULT_TOP_K = 50
# Next-token models: transformers' `generate` takes the argmax unless generation_config.json says `do_sample: true`.
GREEDY: Mapping[str, Any] = {
    "rule": "autoregressive",
    "temperature": 0.0,
    "source": "transformers `generate`: do_sample false",
}


class _Key(NamedTuple):
    """A key of generation_config.json: the processor parameter that it sets."""

    processor: str
    parameter: str
    off: tuple[float, ...] = ()  # values that disable the processor


# In the order in which transformers applies them.
PROCESSOR_KEYS: Mapping[str, _Key] = {
    "repetition_penalty": _Key("repetition", "p", (1.0,)),
    "temperature": _Key("temperature", "t"),
    "top_k": _Key("top_k", "k", (0,)),
    "top_p": _Key("top_p", "p", (1.0,)),
    "min_p": _Key("min_p", "p", (0.0,)),
}
# Keys whose value is ids or a length -> the setting that they become.
TABLES: Mapping[str, str] = {
    "suppress_tokens": "ban", "bad_words_ids": "ban", "begin_suppress_tokens": "begin_ban",
    "min_new_tokens": "min_tokens", "sequence_bias": "bias",
}  # fmt: skip
# Keys that do not change which text a model generates: lengths, which the caller gives, ids of the tokenizer, beams
# beside `num_beams`, what is returned, and how the same text is computed.
_WITHOUT_EFFECT = """
    max_length max_new_tokens eos_token_id pad_token_id bos_token_id decoder_start_token_id forced_bos_token_id
    mask_token_id num_beam_groups diversity_penalty early_stopping length_penalty renormalize_logits
    remove_invalid_values num_return_sequences output_attentions output_hidden_states output_scores output_logits
    output_history return_dict_in_generate use_cache cache_implementation cache_config max_cache_len use_mtp
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config low_memory
    prefill_chunk_size generation_config
    transformers_version trust_remote_code
"""
# Keys that change the text and are not applied; the first line has effect only where tokens are drawn. `not_applied`
# names unknown keys too.
_SAMPLING = "top_h typical_p epsilon_cutoff eta_cutoff"
_NOT_APPLIED = """
    min_length max_time stop_strings num_beams no_repeat_ngram_size forced_eos_token_id token_healing guidance_scale
    exponential_decay_length_penalty watermarking_config penalty_alpha dola_layers constraints force_words_ids
    encoder_repetition_penalty encoder_no_repeat_ngram_size
"""
# Keys that families read in functions of their own.
_OF_FAMILIES = """
    alg alg_temp eps sampler_config t_min t_max stability_threshold confidence_threshold max_denoising_steps
"""
# Every key of transformers' GenerationConfig: older releases wrote them into config.json as well.
_READ = frozenset({"do_sample", "steps", *PROCESSOR_KEYS, *_WITHOUT_EFFECT.split(), *_OF_FAMILIES.split()})
_UNREAD = f"{_WITHOUT_EFFECT} {_SAMPLING} {_NOT_APPLIED}"
KEYS = frozenset({"do_sample", *PROCESSOR_KEYS, *TABLES, *_UNREAD.split()})
# `alg` in Dream's generation_config.json -> our rule.
DREAM_RULES = {
    "origin": "dream_origin",
    "maskgit_plus": "maskgit_plus",
    "entropy": "dream_entropy",
    "topk_margin": "topk_margin",
}


def with_generation_config(decoding: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides a family's published settings by those of a checkpoint's generation_config.json.

    The keys do_sample, temperature, top_k, top_p, min_p, repetition_penalty, steps and those of `TABLES` are read as in
    transformers 5:
    with `do_sample: false` the argmax is taken, and temperature, top_k, top_p and min_p are ignored. A next-token model
    samples only with `do_sample: true`. A diffusion model also samples if a temperature is given without `do_sample`,
    because the `generate` of its reference implementation does not know that key.

    Args:
        generation: The contents of the file; {} without one.
    """
    said = _checked(generation)
    tables = _tables(said, generation.get("eos_token_id"))
    if not said.keys() - TABLES.keys():
        return {**decoding, **tables}
    chain = {name: dict(params) for name, params in decoding.get("processors", {}).items()}
    autoregressive = decoding.get("rule") == "autoregressive"
    sample = said.get("do_sample", None if not autoregressive else False)
    found = {**decoding, **tables}
    if "steps" in said:
        found["steps"] = said["steps"]
    if "repetition_penalty" in said:
        _put(chain, "repetition_penalty", said["repetition_penalty"])
    if sample is False:
        chain = {name: params for name, params in chain.items() if name in ("repetition", "cooling")}
        found["temperature"] = 0.0
    else:
        if autoregressive:
            said = {"temperature": 1.0, "top_k": DEFAULT_TOP_K, **said}
        if sample is True and "temperature" not in said and not found.get("temperature"):
            said["temperature"] = 1.0
        t = said.pop("temperature", None)
        if t is not None and (autoregressive or "temperature" in chain):
            _put(chain, "temperature", t or 1.0)
            found["temperature"] = 1.0 if t else 0.0
        elif t is not None:
            found["temperature"] = t
        for key in ("top_k", "top_p", "min_p"):
            if key in said:
                _put(chain, key, said[key])
    order = [key.processor for key in PROCESSOR_KEYS.values()]
    # The family's own processors keep their order and come before the added ones; repetition always comes first.
    # A family without processors gets the order of transformers.
    names = sorted(chain, key=lambda name: (name != "repetition", name not in decoding.get("processors", {})))
    if not decoding.get("processors"):
        names.sort(key=order.index)
    found.pop("processors", None)
    if names:
        found["processors"] = {name: chain[name] for name in names}
    found["source"] = f"{decoding['source']}; {FILE}" if decoding.get("source") else FILE
    return found


# --- what the values may be


def _number(value: Any, least: float = 0.0, most: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _whole(value: Any, least: int = 0) -> bool:
    return _number(value, least, 2**31 - 1) and value == int(value)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)


# key -> (whether a value is allowed, what is)
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda x: isinstance(x, bool), "true or false"),
    "steps": (lambda x: _whole(x, 1), "a whole number, 1 or more"),
    "repetition_penalty": (lambda x: _number(x, 1e-9), "a number above 0"),
    "temperature": (_number, "a number, 0 or more"),
    "top_k": (_whole, "a whole number, 0 or more"),
    "top_p": (lambda x: _number(x, 0, 1), "a number in [0, 1]"),
    "min_p": (lambda x: _number(x, 0, 1), "a number in [0, 1]"),
    "min_new_tokens": (_whole, "a whole number, 0 or more"),
    "suppress_tokens": (_ids, "a list of ids"),
    "begin_suppress_tokens": (_ids, "a list of ids"),
    "bad_words_ids": (lambda x: isinstance(x, list) and all(map(_ids, x)), "a list of lists of ids"),
    "sequence_bias": (
        lambda x: isinstance(x, list) and all(
            isinstance(pair, list) and len(pair) == 2 and _ids(pair[0]) and _number(pair[1], -math.inf) for pair in x
        ),
        "a list of pairs: a list of ids, and a number",
    ),
}  # fmt: skip


def _checked(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the keys that are read and not null; refuses values of a wrong type or out of range."""
    found = {key: generation[key] for key in _CHECKS if generation.get(key) is not None}
    for key, value in found.items():
        fits, allowed = _CHECKS[key]
        if not fits(value):
            raise refuse(f"{FILE}: {key}", value, allowed)
    return found


def _tables(said: Mapping[str, Any], ends: Any) -> dict[str, Any]:
    """Converts the keys of `TABLES`. Sequences of several ids are left out, and `not_applied` names their key.

    Args:
        ends: `eos_token_id`. As in transformers, a bad word that is the end of the text is left out.
    """
    ends = ends if isinstance(ends, list) else [ends]
    convert: dict[str, Callable[[Any], Any]] = {
        "bad_words_ids": lambda words: [x[0] for x in words if len(x) == 1 and x[0] not in ends],
        "sequence_bias": lambda pairs: [[ids[0], float(x)] for ids, x in pairs if len(ids) == 1],
    }
    found: dict[str, Any] = {}
    for key, setting in TABLES.items():
        if value := convert.get(key, lambda x: x)(said.get(key) or []):
            found[setting] = [*found.get(setting, []), *value] if isinstance(value, list) else value
    return found


def not_applied(generation: Mapping[str, Any], decoding: Mapping[str, Any]) -> list[str]:
    """Names the keys of generation_config.json that would change the text in transformers and are not applied.

    Args:
        decoding: The settings that were made of it.
    """
    names = []
    for key, value in generation.items():
        single = ("num_beams", "guidance_scale", "typical_p", "encoder_repetition_penalty")
        if not value or (key in single and value == 1) or key.startswith("_"):
            continue
        if key in TABLES:
            lost = TABLES[key] not in decoding
            if not lost and key in ("bad_words_ids", "sequence_bias"):
                lost = any(len(x if key == "bad_words_ids" else x[0]) != 1 for x in value)
        else:
            idle = key in _SAMPLING.split() and generation.get("do_sample") is not True
            lost = key not in _READ and not idle
        names += [f"{key}={value!r}"] if lost else []
    return names


def _put(chain: dict[str, dict[str, Any]], name: str, value: float) -> None:
    """Sets a processor of the chain, or removes it if the value disables it."""
    key = PROCESSOR_KEYS[name]
    if value in key.off:
        chain.pop(key.processor, None)
    else:
        chain[key.processor] = {key.parameter: value}


def dream_decoding(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Combines the settings of Dream's README with `alg`, `alg_temp` and `eps` of generation_config.json."""
    alg = generation.get("alg") or "entropy"
    if alg not in DREAM_RULES:
        raise refuse(f"{FILE}: alg", alg, ", ".join(DREAM_RULES))
    params: dict[str, float] = {}
    if alg != "origin":
        params["alg_temp"] = generation.get("alg_temp") or 0.0
    if generation.get("eps") is not None:
        params["eps"] = generation["eps"]
    for name, value in params.items():
        if not _number(value):
            raise refuse(f"{FILE}: {name}", value, "a number, 0 or more")
    published = {
        "rule": DREAM_RULES[alg],
        "params": params,
        "processors": {"temperature": {"t": 0.2}, "top_p": {"p": 0.95}},
        "temperature": 1.0,
        "block": WHOLE_ANSWER,
        "source": "DreamLM/Dream README.md: alg entropy, steps = max_new_tokens",
    }
    return with_generation_config(published, generation)


def describe(decoding: Mapping[str, Any]) -> str:
    """Describes settings in one line, without their source.

    Args:
        decoding: Settings, such as `LM.decoding`.

    Returns:
        For example "dream_entropy(alg_temp=0), temperature(t=0.2), top_p(p=0.95), draws at temperature 1, the whole
        answer as one block"; "" for {}.
    """
    if not decoding:
        return ""
    call = lambda name, params: f"{name}({', '.join(f'{k}={v:g}' for k, v in params.items())})"
    chain = dict(decoding.get("processors", {}))
    parts = [call(decoding.get("rule", "the default rule"), decoding.get("params", {}))]
    parts += [call(name, decoding[name]) for name in ("cooling", "steady") if decoding.get(name)]
    parts += [call(name, params) for name, params in chain.items()]
    t = decoding.get("temperature")
    if t is not None:
        parts.append("argmax" if t == 0 else f"draws at temperature {t:g}")
    if (block := decoding.get("block")) is not None:
        parts.append("the whole answer as one block" if block == WHOLE_ANSWER else f"blocks of {block}")
    if (steps := decoding.get("steps")) is not None:
        parts.append(f"{steps} steps")
    for name, words in (("ban", "never generated"), ("begin_ban", "not generated first"), ("bias", "biased")):
        if ids := decoding.get(name):
            parts.append(f"{len(ids)} ids {words}")
    if (least := decoding.get("min_tokens")) is not None:
        parts.append(f"at least {least} tokens")
    return ", ".join(parts)
