"""What a checkpoint family is: the keys of its config.json, the names of its tensors, and how both become ours.

A family is one file in `families/`, and one entry in the list `families.FAMILIES`.

Reading config.json fails closed: a key that nobody reads may change the arithmetic (YaRN's `mscale` moves logits by
more than 1). So every family has a table of keys (`ConfigKeys`), and whatever is in config.json and not in the table
is refused by name. Values must have the types that transformers 5 asks for; the string "false" would otherwise be true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from mercury_jax.config import ComputeType, ModelConfig, NoiseConfig, refuse

Json = Mapping[str, Any]
Types = tuple[type, ...]

INT: Types = (int,)
NUMBER: Types = (int, float)
BOOL: Types = (bool,)
TEXT: Types = (str,)
LIST: Types = (list,)
NULL: Types = (type(None),)
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}
_NONE: Mapping[str, Any] = MappingProxyType({})


class ConfigKeys(NamedTuple):
    """The keys that may occur in one object of a config.json.

    Attributes:
        used: Keys that our config is made from, and the types of their values; null only where listed.
        only: Keys that would change the arithmetic, and the values under which it is the one that we build.
        unused: Keys that change no logit, whatever their value, and why.
        nested: Keys whose value is an object or null: the table of that object, as a function of it.
    """

    used: Mapping[str, Types] = _NONE
    only: Mapping[str, tuple[Any, ...]] = _NONE
    unused: Mapping[str, str] = _NONE
    nested: Mapping[str, Callable[[Json], ConfigKeys]] = _NONE

    def plus(self, other: ConfigKeys) -> ConfigKeys:
        """Returns both tables as one; where they disagree about a key, `other` counts."""
        mine = [{k: v for k, v in table.items() if k not in other.names} for table in self]
        return ConfigKeys(*({**a, **b} for a, b in zip(mine, other)))

    @property
    def names(self) -> set[str]:
        """All keys of the table."""
        return {name for table in self for name in table}


def check_keys(keys: ConfigKeys, config: Json, file: str, path: str = "") -> None:
    """Refuses the first key of a config.json that the table does not allow.

    Args:
        keys: The table of the family.
        config: The object that was read.
        file: Its name, for the message.
        path: Keys that lead to the object, each followed by a dot.

    Raises:
        ValueError: Names the file, the key with its path, the value, and what is supported.
    """
    for key, value in config.items():
        where, shown = f"{file}: {path}{key}", value if len(repr(value)) <= 80 else str(value)[:80] + "..."
        if key in keys.nested:
            if value is not None and not isinstance(value, Mapping):
                raise refuse(where, shown, "an object, or null")
            if value is not None:
                check_keys(keys.nested[key](value), value, file, f"{path}{key}.")
        elif key in keys.used:
            types = keys.used[key]
            if (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
                words = [
                    _TYPE_NAMES[t] for t in types if t in _TYPE_NAMES and not (t is int and float in types)
                ]
                null = ", or null" if type(None) in types else ""
                raise refuse(where, shown, f"a value: {' or '.join(words)}{null}")
        elif key in keys.only:
            same = lambda one, value=value: value == one and isinstance(value, bool) == isinstance(one, bool)
            if not any(map(same, keys.only[key])):
                raise refuse(where, shown, ", ".join(map(repr, keys.only[key])))
        elif key not in keys.unused:
            known = ", ".join(sorted({*keys.used, *keys.only, *keys.nested}))
            allowed = f"a key that this release knows to read ({known}) or to have no effect"
            raise refuse(where, shown, f"{allowed}; delete the key if no logit depends on it")


def need(config: Json, *keys: str) -> Any:
    """Returns the value of the first of `keys` that config.json has.

    Raises:
        ValueError: It has none of them.
    """
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise refuse(f"config.json: {keys[0]}", None, "a value: this family cannot be built without it")


def special_ids(config: Json) -> dict[str, Any]:
    """Returns mask, pad, eos and further ends; without padding, `eos` pads."""
    ends = listed_ids(config.get("eos_token_id")) or [0]
    pad = config.get("pad_token_id")
    pad = ends[0] if pad is None or pad < 0 else pad
    return dict(mask=config.get("mask_token_id"), pad=pad, eos=ends[0], ends=tuple(ends[1:]))


def listed_ids(value: Any) -> list[int]:
    """Returns `eos_token_id` as a list: it is one id, several, or none.

    Raises:
        ValueError: It is something else.
    """
    found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(x, int) for x in found):
        raise refuse("config.json: eos_token_id", value, "an id, or a list of ids")
    return found


def dtype_of(config: Json) -> Any:
    """Returns the dtype that the checkpoint names, under either name of the key.

    Raises:
        ValueError: We cannot compute in this dtype.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in get_args(ComputeType):
        raise refuse("config.json: dtype", name, ", ".join(get_args(ComputeType)))
    return name


class TensorSource(NamedTuple):
    """Where one of our parameters is in the files of a family.

    Attributes:
        name: The tensor's name; with "{e}" where each expert has a tensor of its own. Several names are concatenated
            along our last axis (gate and up).
        inputs: 0 for the same order of axes. k > 0 for the weight [out, in] of a torch Linear, whose inputs are our
            first k axes (behind that of the experts).
        experts: Ours is stacked from this many experts; without "{e}" in the name the file's tensor is stacked, too.
        fold: The file has this many of our last axes as one (biases of heads).
        rows: (a, b, c) where ours are rows [a, b) of a tensor of c rows (fused queries, keys and values).
    """

    name: str | tuple[str, ...]
    inputs: int = 0
    experts: int = 0
    fold: int = 0
    rows: tuple[int, int, int] | None = None

    @property
    def parts(self) -> int:
        """How many tensors, or stacks of experts, are concatenated."""
        return 1 if isinstance(self.name, str) else len(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that this parameter is made from; experts vary fastest."""
        parts = (self.name,) if isinstance(self.name, str) else self.name
        each = range(self.experts) if any("{e}" in p for p in parts) else range(1)
        return tuple(p.replace("{e}", str(e)) for p in parts for e in each)

    @property
    def per_expert(self) -> bool:
        """Whether each expert has tensors of its own."""
        return len(self.names) > self.parts

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the file's tensors by name, for a parameter of `shape`."""
        lead, rest = (shape[:1], shape[1:]) if self.experts else ((), shape)
        if self.inputs:
            inputs, outputs = rest[: self.inputs], rest[self.inputs :]
            theirs = (math.prod(outputs) // self.parts, math.prod(inputs))
        else:
            theirs = (*rest[: -self.fold], math.prod(rest[-self.fold :])) if self.fold else rest
        if self.rows is not None:
            theirs = (self.rows[2], *theirs[1:])
        stacked = lead and not self.per_expert
        return dict.fromkeys(self.names, (*lead, *theirs) if stacked else theirs)


class Family(NamedTuple):
    """One family of checkpoints.

    Attributes:
        name: As users see it.
        architectures: Entries of config.json's list that it takes, if `fits` says yes to the rest.
        checkpoints: Ids on the Hugging Face hub.
        keys: What may occur in their config.json; a function of it where its classes differ.
        config: Their config.json -> our config; ValueError for what we do not build. `read` also checks keys.
        names: Our config -> where each parameter is, by its path ("block_0/attention/q/w").
        noise: How it was trained; None for an autoregressive model.
        block: Block sizes of its published models, for tables.
        about: One line, for tables.
        ignored: Regular expressions of tensors that are not read.
        fits: Whether the rest of a config.json belongs to this family.
        export: Our config -> their config.json; None where we cannot write the family.
        licence: Of its published models.
        decoding: (config.json, generation_config.json) -> how the reference decodes, as `LM.decoding` has it.
    """

    name: str
    architectures: tuple[str, ...]
    checkpoints: tuple[str, ...]
    keys: ConfigKeys | Callable[[Json], ConfigKeys]
    config: Callable[[Json], ModelConfig]
    names: Callable[[ModelConfig], dict[str, TensorSource]]
    noise: NoiseConfig | Callable[[Json], NoiseConfig] | None
    about: str = ""
    block: str = "any"
    ignored: tuple[str, ...] | Callable[[ModelConfig], tuple[str, ...]] = ()
    fits: Callable[[Json], bool] = lambda config: True
    export: Callable[[ModelConfig], dict[str, Any]] | None = None
    licence: str = "see the checkpoint"
    decoding: Callable[[Json, Json], Mapping[str, Any]] | None = None

    def read(self, config: Json, file: str = "config.json") -> ModelConfig:
        """Converts a config.json to our config.

        Args:
            config: The object in config.json.
            file: Its path, for messages.

        Returns:
            Our config.

        Raises:
            ValueError: A key is unknown to the family, or a value is not supported.
        """
        keys = self.keys(config) if callable(self.keys) else self.keys
        check_keys(keys, config, f"{file} ({self.name})")
        return self.config(config)

    def uses(self, tensor: str, config: ModelConfig) -> bool:
        """Says whether a tensor should be read.

        Args:
            tensor: Its name in the file.
            config: Our config.

        Returns:
            False if the family ignores it.
        """
        patterns = self.ignored(config) if callable(self.ignored) else self.ignored
        return not any(re.search(pattern, tensor) for pattern in patterns)


# Keys that transformers writes into the config.json of any model, and keys that others are known to add.
COMMON = ConfigKeys(
    used={
        "architectures": LIST, "eos_token_id": INT + LIST + NULL, "pad_token_id": INT + NULL,
        "mask_token_id": INT + NULL, "dtype": TEXT + NULL, "torch_dtype": TEXT + NULL,
    },
    only={
        "is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({}, None),
        "quantization_config": (None,),
    },
    unused={
        **dict.fromkeys((
            "model_type", "transformers_version", "auto_map", "_name_or_path", "name_or_path", "_commit_hash",
            "tokenizer_class", "trust_remote_code", "unsloth_fixed", "unsloth_version",
        ), "says who wrote the file, or where the code of the reference is"),
        **dict.fromkeys((
            "bos_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id", "prefix",
        ), "the ids are in the tokenizer, and no logit depends on them"),
        **dict.fromkeys((
            "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16",
            "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation",
            "_attn_implementation_internal", "_experts_implementation_internal", "chunk_size_feed_forward",
            "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size", "tf_legacy_loss", "flash_attention",
            "use_flash_attn", "_flash_attn_2_enabled",
        ), "how the reference computes or returns the same numbers"),
        **dict.fromkeys((
            "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        ), "of a classifier, or of another head that is not read"),
        **dict.fromkeys((
            "initializer_range", "attention_dropout", "hidden_dropout", "embedding_dropout", "residual_dropout",
            "output_dropout", "dropout", "router_aux_loss_coef", "output_router_logits", "gradient_checkpointing",
        ), "training only"),
        **dict.fromkeys((
            "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping", "num_beams",
            "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
            "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
            "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens",
            "num_assistant_tokens_schedule", "target_lookbehind", "generation_config",
        ), "a default of generation; sampling parameters are arguments here"),
    },
)  # fmt: skip
