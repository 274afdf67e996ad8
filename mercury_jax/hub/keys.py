"""The keys of config.json: those that are read, those that have no effect, and the refusal of all others.

A key that nobody reads may change the arithmetic (YaRN's `mscale` moves logits by more than 1). Every family therefore
has a table (`Keys`), and `check` refuses by name whatever is in config.json and not in the table. Values must have the
types that transformers 5 asks for; the string "false" would otherwise count as true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mercury_jax.config import refuse

Json = Mapping[str, Any]
Types = tuple[type, ...]

INT: Types = (int,)
NUMBER: Types = (int, float)
BOOL: Types = (bool,)
TEXT: Types = (str,)
LIST: Types = (list,)
NULL: Types = (type(None),)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}
_NONE: Mapping[str, Any] = MappingProxyType({})


class Keys(NamedTuple):
    """What may stand in one object of a config.json.

    used: keys that our config is made from, and the types of their values; null only where it is listed.
    only: keys that would change the arithmetic, and the values for which it is the one that we build.
    unused: keys that change no logit, whatever their value, and why.
    nested: keys whose value is an object (or null): the table of that object, from its value.
    """

    used: Mapping[str, Types] = _NONE
    only: Mapping[str, tuple[Any, ...]] = _NONE
    unused: Mapping[str, str] = _NONE
    nested: Mapping[str, Callable[[Json], Keys]] = _NONE

    def plus(self, other: Keys) -> Keys:
        """Both tables; where they disagree about a key, `other` is right."""
        mine = [{k: v for k, v in table.items() if k not in other.names} for table in self]
        return Keys(*({**a, **b} for a, b in zip(mine, other)))

    @property
    def names(self) -> set[str]:
        """All keys of the table."""
        return {name for table in self for name in table}


def check(keys: Keys, config: Json, file: str, path: str = "") -> None:
    """Refuse the first key of config.json that the table does not allow.

    Args:
        keys: The table of the family.
        config: The object that was read.
        file: Its name, for the message.
        path: Keys that lead to the object, each followed by a dot.

    Raises:
        ValueError: names the file, the key with its path, the value, and what is supported.
    """
    for key, value in config.items():
        where = f"{file}: {path}{key}"
        if key in keys.nested:
            if value is not None and not isinstance(value, Mapping):
                raise refuse(where, _short(value), "an object, or null")
            if value is not None:
                check(keys.nested[key](value), value, file, f"{path}{key}.")
        elif key in keys.used:
            _check_type(where, value, keys.used[key])
        elif key in keys.only:
            if not any(_same(value, one) for one in keys.only[key]):
                raise refuse(where, _short(value), ", ".join(map(repr, keys.only[key])))
        elif key not in keys.unused:
            known = ", ".join(sorted({*keys.used, *keys.only, *keys.nested}))
            allowed = f"a key that this release knows to read ({known}) or to have no effect"
            raise refuse(where, _short(value), f"{allowed}; delete the key if no logit depends on it")


def _check_type(where: str, value: Any, types: Types) -> None:
    if (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
        words = [_WORDS[t] for t in types if t in _WORDS and not (t is int and float in types)]
        null = ", or null" if type(None) in types else ""
        raise refuse(where, _short(value), f"a value: {' or '.join(words)}{null}")


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _short(value: Any) -> Any:
    """Values as they are where they fit into a message."""
    return value if len(repr(value)) <= 80 else str(value)[:80] + "..."


def _table(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


# What transformers writes by itself into any model's config.json, and what others are known to add.
COMMON = Keys(
    used={
        "architectures": LIST,
        "eos_token_id": INT + LIST + NULL,
        "pad_token_id": INT + NULL,
        "mask_token_id": INT + NULL,
        "dtype": TEXT + NULL,
        "torch_dtype": TEXT + NULL,
    },
    only={
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
    },
    unused={
        **_table(
            "says who wrote the file, or where the code of the reference is",
            "model_type", "transformers_version", "auto_map", "_name_or_path", "name_or_path", "_commit_hash",
            "tokenizer_class", "trust_remote_code", "unsloth_fixed", "unsloth_version",
        ),
        **_table(
            "the ids stand in the tokenizer, and no logit depends on them",
            "bos_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id", "prefix",
        ),
        **_table(
            "how the reference computes or returns the same numbers",
            "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16",
            "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation",
            "_attn_implementation_internal", "_experts_implementation_internal", "chunk_size_feed_forward",
            "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size", "tf_legacy_loss", "flash_attention",
            "use_flash_attn", "_flash_attn_2_enabled",
        ),
        **_table(
            "of a classifier, and of other heads that are not read",
            "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        ),
        **_table(
            "training only",
            "initializer_range", "attention_dropout", "hidden_dropout", "embedding_dropout", "residual_dropout",
            "output_dropout", "dropout", "router_aux_loss_coef", "output_router_logits", "gradient_checkpointing",
        ),
        **_table(
            "a default of generation: sampling settings are arguments here",
            "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping", "num_beams",
            "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
            "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
            "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens",
            "num_assistant_tokens_schedule", "target_lookbehind", "generation_config",
        ),
    },
)  # fmt: skip
