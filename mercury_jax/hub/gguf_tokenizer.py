"""Converts the tokenizer of a GGUF file to the tokenizer files that `HFTokenizer` reads.

A GGUF file stores vocabulary, token types, merges or scores, special ids and chat templates as metadata. It names the
rule that splits a text before BPE instead of storing it: `tokenizer.ggml.pre`, for which `_PRE` holds the rules of the
original tokenizers. llama.cpp defines the keys (src/llama-vocab.cpp, conversion/base.py, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import brief
from mercury_jax.hub.tokenizer_files import MAX_BYTES

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_MAX_PIECE = 256  # characters of a token of a SentencePiece model; the longest known has about 30
_SPECIAL = {  # name in tokenizer_config.json -> key of the id; eot and eom end an answer too
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "mask_token": "mask_token_id",
    "eot_token": "eot_token_id", "eom_token": "eom_token_id",
}  # fmt: skip
# tokenizer.ggml.model -> ids that llama.cpp assumes where the file gives none. gpt2 is a byte-level BPE, llama
# SentencePiece's BPE with scores, gemma4 a BPE with merges in SentencePiece's spelling (DiffusionGemma).
_MODELS = {"gpt2": {}, "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0}, "gemma4": {}}


class _Pre(NamedTuple):
    """What a `tokenizer.ggml.pre` stands for; a string in `splits` is a regular expression that matches words."""

    splits: tuple[str | dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS, _SPACES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS, _LINES = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CL100K = _WORDS + r"\p{N}{1,3}" + _LINES
_QWEN2 = _WORDS + r"\p{N}" + _LINES
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED_CODER = _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    f"{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_TEKKEN = _O200K.replace(f"{_CONTRACTIONS}?", "").replace("{1,3}", "")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_SCRIPTS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00"
    "-\ufb06\ufb13-\ufb17Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED_SCRIPTS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", _CJK, _DIGITS, _BYTES,
)  # fmt: skip
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES, _BYTES,
)  # fmt: skip
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"}, _GPT2, {**_DIGITS, "individual_digits": False},
    "[0-9][0-9][0-9]",
)  # fmt: skip
_DEFAULT = (  # what llama.cpp does where the converter knew no rule; no published tokenizer is known to have it
    r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+", "[0-9][0-9][0-9]", _BYTES,
)  # fmt: skip
# Names in one row have the same rule. Dream is qwen2; LLaDA has the tokenizer of the first Ling models (bailingmoe),
# LLaDA-MoE and LLaDA2 that of Ling 2. exaone and dbrx are as in llama.cpp, because the originals are not public.
_RULES = (
    ("default", _Pre(_DEFAULT)),
    ("gpt-2", _Pre((_GPT2,))),
    ("olmo", _Pre((_GPT2,), nfc=True)),
    ("smollm starcoder refact codeshell exaone", _Pre((_DIGITS, _GPT2))),
    ("command-r", _Pre((_DIGITS, _GPT2), nfc=True)),
    ("llama-bpe llama3 llama-v3", _Pre((_CL100K, _BYTES), ignore_merges=True, adds_bos=True)),
    ("dbrx", _Pre((_CL100K, _BYTES))),
    ("qwen2 deepseek-r1-qwen", _Pre((_QWEN2, _BYTES), nfc=True)),
    ("megrez hunyuan", _Pre((_QWEN2, _BYTES))),
    ("qwen35", _Pre((_QWEN35, _BYTES), nfc=True)),
    ("bailingmoe bailingmoe2 llada-moe", _Pre((_LING, _BYTES))),
    ("seed-coder", _Pre((_SEED_CODER, _BYTES))),
    ("deepseek-llm", _Pre(_DEEPSEEK_LLM)),
    ("deepseek-coder", _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS, _BYTES))),
    ("deepseek-v3 hunyuan-dense", _Pre(_DEEPSEEK_V3)),
    ("gpt-4o", _Pre((_O200K, _BYTES))),
    ("tekken", _Pre((_TEKKEN, _BYTES), ignore_merges=True, adds_bos=True)),
    ("falcon", _Pre(_FALCON)),
)
_PRE = {name: rule for names, rule in _RULES for name in names.split()}


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json.

    Args:
        metadata: All key-value pairs of the file; arrays are lists.
        where: The file's name, for errors.

    Returns:
        Contents by file name, as `HFTokenizer.of` takes them. Flags of added tokens that GGUF does not store, such as
        `rstrip`, are False.

    Raises:
        CheckpointError: If a key is missing, has a value that is not allowed, or contradicts another key.
    """
    keys = _Keys(metadata, where)
    choice = lambda key, known: keys.one(key, lambda v: isinstance(v, str) and v in known, ", ".join(known))
    model = choice("model", _MODELS)
    pre = _PRE[choice("pre", _PRE)] if model == "gpt2" else _Pre((), adds_bos=True)
    texts, types, ids = _vocabulary(keys)
    special = dict[str, str]()
    for name, key in _SPECIAL.items():
        fits = lambda i: i is None or (type(i) is int and 0 <= i < len(texts))
        i = keys.one(key, fits, f"an id in 0..{len(texts) - 1}", _MODELS[model].get(name))
        if i is not None:
            special[name] = texts[i]
    if model == "gpt2":
        parts = _byte_level(pre)
    else:
        parts = _sentencepiece(keys.flag("add_space_prefix", model == "llama"), special.get("unk_token"))
    merges = _score_merges(keys, texts, types) if model == "llama" else _file_merges(keys, ids)
    around = {}
    for name, default in (("bos_token", pre.adds_bos), ("eos_token", False)):
        if keys.flag(f"add_{name}", default):
            if name not in special:
                raise keys.refuse(f"ggml.{_SPECIAL[name]}", None, f"an id, because add_{name} is true")
            around[name] = special[name]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data = {
        "version": "1.0", "truncation": None, "padding": None, **parts,
        "added_tokens": [
            {"id": i, "content": text, "special": types[i] != _USER_DEFINED, **flags}
            for i, text in enumerate(texts) if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": _post_processor(around, ids),
        "model": {"type": "BPE", "dropout": None, **parts["model"], "vocab": ids, "merges": merges},
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special,
        "chat_template": _templates(keys),
    }  # fmt: skip
    files = {}
    for name, content in (("tokenizer.json", data), ("tokenizer_config.json", config)):
        try:
            files[name] = json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{where}: {name}: a text is not Unicode: {error.reason}") from None
        if len(files[name]) > MAX_BYTES[name]:
            raise CheckpointError(f"{where}: {name} has {len(files[name])} bytes; allowed: {MAX_BYTES[name]}")
    return files


class _Keys(NamedTuple):
    """The key-value pairs of a GGUF file. What is read is checked."""

    values: Mapping[str, Any]
    where: str

    def refuse(self, key: str, value: object, allowed: str) -> CheckpointError:
        """Makes the error for the key tokenizer.KEY. A value of None: the key is missing."""
        found = "missing" if value is None else brief(value)
        return CheckpointError(f"{self.where}: tokenizer.{key} is {found}; allowed: {allowed}")

    def one(self, key: str, fits: Callable[[Any], bool], allowed: str, default: Any = None) -> Any:
        """Reads tokenizer.ggml.KEY."""
        value = self.values.get(f"tokenizer.ggml.{key}", default)
        if not fits(value):
            raise self.refuse(f"ggml.{key}", value, allowed)
        return value

    def many(self, key: str, fits: Callable[[Any], bool], allowed: str, size: int | None = None) -> list[Any]:
        """Reads a list of `size` entries of which each fits."""
        values = self.one(key, lambda value: isinstance(value, list), "a list")
        if size not in (None, len(values)):
            found = f"{self.where}: tokenizer.ggml.{key} has {len(values)} entries"
            raise CheckpointError(f"{found}; allowed: {size}, one for each token")
        for i, value in enumerate(values):
            if not fits(value):
                raise self.refuse(f"ggml.{key}[{i}]", value, allowed)
        return values

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false."""
        return self.one(key, lambda value: isinstance(value, bool), "true or false", default)


def _vocabulary(keys: _Keys) -> tuple[list[str], list[int], dict[str, int]]:
    """Reads the tokens: texts [V], types [V], and ids by text."""
    texts = keys.many("tokens", lambda text: isinstance(text, str), "a text")
    if not texts:
        raise keys.refuse("ggml.tokens", texts, "a list with at least one token")
    types = [_NORMAL] * len(texts)
    if "tokenizer.ggml.token_type" in keys.values:
        fits = lambda kind: type(kind) is int and _NORMAL <= kind <= _BYTE
        types = keys.many("token_type", fits, f"{_NORMAL}..{_BYTE}", len(texts))
    # llama.cpp spells empty tokens like this too. They are not matched in a text.
    types = [kind if text else _UNUSED for kind, text in zip(types, texts, strict=True)]
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids: dict[str, int] = {}
    for i, text in enumerate(texts):
        if ids.setdefault(text, i) != i:  # llama.cpp refuses them too: a text would have two ids
            raise keys.refuse(f"ggml.tokens[{i}]", text, f"a text that is not also token {ids[text]}")
    return texts, types, ids


def _file_merges(keys: _Keys, ids: Mapping[str, int]) -> list[list[str]]:
    """Reads the merges: "LEFT RIGHT", the best first."""

    def fits(merge: object) -> bool:
        pair = merge.split(" ") if isinstance(merge, str) else []
        return len(pair) == 2 and all(text in ids for text in (*pair, "".join(pair)))

    allowed = "two tokens with a space between them that are one token together"
    return [merge.split(" ") for merge in keys.many("merges", fits, allowed)]


def _score_merges(keys: _Keys, texts: list[str], types: list[int]) -> list[list[str]]:
    """Makes the merges that are equivalent to SentencePiece's scores.

    SentencePiece always merges the two neighbours whose result has the best score. The list of merges therefore has
    every split of every token into two tokens, ordered by the score of the token. Tokens with the same score are
    ordered by id: a file that was converted from merges has one score for all tokens, and ids in the order of merges.
    Tokens of other types than normal take no part.
    """
    fits = lambda score: type(score) in (float, int) and math.isfinite(score)
    scores = keys.many("scores", fits, "a finite number", len(texts))
    normal = [i for i, kind in enumerate(types) if kind == _NORMAL]
    pieces, merges, size = {texts[i] for i in normal}, list[list[str]](), 0
    for i in sorted(normal, key=lambda i: -scores[i]):
        text = texts[i]
        if len(text) > _MAX_PIECE:
            raise keys.refuse(f"ggml.tokens[{i}]", text, f"at most {_MAX_PIECE} characters")
        cuts = [n for n in range(1, len(text)) if text[:n] in pieces and text[n:] in pieces]
        merges += ([text[:n], text[n:]] for n in cuts)
        size += len(cuts) * len(text)
        if size > MAX_BYTES["tokenizer.json"]:  # because a small vocabulary can have very many splits
            found = f"{keys.where}: tokenizer.ggml.tokens has splits of {size} characters"
            raise CheckpointError(f"{found}; allowed: {MAX_BYTES['tokenizer.json']}")
    return merges


def _byte_level(pre: _Pre) -> dict[str, Any]:
    """Makes the parts of tokenizer.json for a byte-level BPE."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [{**split, "pattern": {"Regex": step}} if isinstance(step, str) else step for step in pre.splits]
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _GPT2,
        "model": {"unk_token": None, "ignore_merges": pre.ignore_merges},
    }


def _sentencepiece(adds_space: bool, unknown: str | None) -> dict[str, Any]:
    """Makes the parts of tokenizer.json for a BPE in SentencePiece's spelling.

    As in llama.cpp, a space is put in front of a text and behind each added token in it.
    """
    space = "\u2581"
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": space}]
    decoders = [{"type": "Replace", "pattern": {"String": space}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if adds_space:
        normalizers.insert(0, {"type": "Prepend", "prepend": space})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _post_processor(around: Mapping[str, str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Makes the post-processor that puts special tokens in front of and behind a text."""
    if not around:
        return None
    token = {name: [{"SpecialToken": {"id": text, "type_id": 0}}] for name, text in around.items()}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    single = [*token.get("bos_token", ()), first, *token.get("eos_token", ())]
    special = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in around.values()}
    frames = {"single": single, "pair": [*single, second], "special_tokens": special}
    return {"type": "TemplateProcessing", **frames}


def _templates(keys: _Keys) -> list[dict[str, str]]:
    """Reads the chat templates, in the form of tokenizer_config.json."""
    found = []
    for key, value in keys.values.items():
        head, _, name = key.partition("chat_template")
        if head == "tokenizer." and name[:1] in ("", "."):
            if not isinstance(value, str):
                raise keys.refuse(key.removeprefix(head), value, "a text")
            found.append({"name": name[1:] or "default", "template": value})
    return found
