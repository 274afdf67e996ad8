"""What a checkpoint's files say of its tokens: tokenizer.json and what stands around it.

    tokenizer.json                      the tokenizer, as the `tokenizers` library writes it; or, without it,
    vocab.json, merges.txt              a byte-level BPE, of the classes in `BYTE_LEVEL`
    tokenizer_config.json               flags of added tokens, special tokens by name, chat templates
    added_tokens.json, special_tokens_map.json      the same in older checkpoints
    chat_template.jinja, additional_chat_templates/*.jinja, chat_template.json      chat templates

All of them come from a stranger: they are read to a bounded size and checked, and no code of theirs is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax.checkpoint import CheckpointError
from mercury_jax.hub.files import find

MOST_BYTES = {
    "tokenizer.json": 128_000_000,  # the largest known, of 262,144 tokens, has 34 million
    "vocab.json": 64_000_000,
    "merges.txt": 64_000_000,
    "tokenizer_config.json": 16_000_000,
    "added_tokens.json": 16_000_000,
    "special_tokens_map.json": 4_000_000,
    "chat_template.jinja": 1_000_000,
    "chat_template.json": 1_000_000,
}
TEMPLATES = "additional_chat_templates"
_TEMPLATE = re.compile(r"[A-Za-z0-9_-]{1,64}\.jinja")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# How vocab.json is cut into words; transformers has it in the class that tokenizer_config.json names.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "GPT2Tokenizer": (None, None),
    "GPT2TokenizerFast": (None, None),
    "Qwen2Tokenizer": (_QWEN, {"type": "NFC"}),
    "Qwen2TokenizerFast": (_QWEN, {"type": "NFC"}),
    "DreamTokenizer": (_QWEN, {"type": "NFC"}),  # Qwen2's under another name
}


class Added(NamedTuple):
    """A token that is matched in the text as a whole, before any other rule."""

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class Vocabulary(NamedTuple):
    """data: tokenizer.json, its added tokens left out. added: these by id, all files together.
    named: texts of special tokens ("bos_token"). templates: sources by name. notes: what was ignored.
    adds_bos: what tokenizer_config.json says, None where it says nothing.
    """

    data: dict[str, Any]
    added: dict[int, Added]
    named: dict[str, str]
    templates: dict[str, str]
    notes: tuple[str, ...]
    adds_bos: bool | None


def read(folder: str | Path) -> dict[str, bytes]:
    """The files of a folder that concern text, as bytes by name. CheckpointError naming the one that is too large."""
    folder = Path(folder)
    names = list(MOST_BYTES)
    if (folder / TEMPLATES).is_dir():
        names += [f"{TEMPLATES}/{p.name}" for p in sorted((folder / TEMPLATES).iterdir())[:64]
                  if _TEMPLATE.fullmatch(p.name)]  # fmt: skip
    found = {}
    for name in names:
        path, most = find(folder, name), MOST_BYTES.get(name, MOST_BYTES["chat_template.jinja"])
        if path is not None:
            with path.open("rb") as file:
                found[name] = file.read(most + 1)
            if len(found[name]) > most:
                raise CheckpointError(f"{folder / name} has more than {most} bytes; allowed: {most}")
    if "tokenizer.json" not in found and not {"vocab.json", "merges.txt"} <= set(found):
        has = "; tokenizer.model is there: let transformers write tokenizer.json from it (save_pretrained)"
        more = has if (folder / "tokenizer.model").exists() else ""
        raise CheckpointError(
            f"{folder} has no tokenizer; allowed: tokenizer.json, or vocab.json and merges.txt{more}"
        )
    return found


def vocabulary(files: Mapping[str, bytes]) -> Vocabulary:
    """Put the files together. CheckpointError naming the file that is damaged."""
    config = _json(files, "tokenizer_config.json")
    data = _json(files, "tokenizer.json") or _byte_level(files, config)
    added = _checked("tokenizer.json", lambda: _added(files, data, config))
    model = _checked("tokenizer.json", lambda: _model(data["model"]))
    named = _named(_json(files, "special_tokens_map.json")) | _named(config)
    others = [_text(t) for key in _LISTS for t in _entries(config.get(key))]
    _mark_special(added, {*named.values(), *others}, model.get("vocab"))
    notes = () if not config.get("auto_map") else (
        f"tokenizer_config.json: auto_map names code to run ({str(config['auto_map'])[:200]}); it is ignored",
    )  # fmt: skip
    adds = config.get("add_bos_token")
    return Vocabulary(
        {**data, "model": model, "added_tokens": []}, added, named, _templates(files, config), notes,
        adds if isinstance(adds, bool) else None,
    )  # fmt: skip


_LISTS = ("additional_special_tokens", "extra_special_tokens")


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{name} holds a {type(data).__name__}; allowed: a JSON object")
    return data


def _checked(name: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"{name} is not what the tokenizers library writes: {kind}: {error}") from None


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model, whose vocabulary and merges have the forms that we respell; the library checks the rest."""
    vocab, merges = model["vocab"], model.get("merges") or []
    by_text = isinstance(vocab, dict) and all(type(i) is int for i in vocab.values())
    scored = isinstance(vocab, list) and all(len(e) == 2 and isinstance(e[0], str) for e in vocab)
    if not (by_text or scored):
        raise ValueError("model.vocab has neither ids nor scores by text")
    if not all(isinstance(m, str) or all(isinstance(part, str) for part in m) for m in merges):
        raise ValueError("model.merges has no pairs of texts")
    return dict(model)


def _added(
    files: Mapping[str, bytes], data: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[int, Added]:
    """Added tokens by id; tokenizer_config.json has the last word, as in transformers."""
    found = {int(e["id"]): _flags(e) for e in data.get("added_tokens") or ()}
    for text, i in _json(files, "added_tokens.json").items():
        found.setdefault(int(i), Added(text))
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        found[int(i)] = _flags(entry)
    if any(not e.text or not isinstance(e.text, str) or i < 0 for i, e in found.items()):
        raise ValueError("an added token without a text")
    return dict(sorted(found.items()))


def _flags(entry: Mapping[str, Any]) -> Added:
    return Added(entry["content"], **{k: bool(entry.get(k)) for k in Added._fields[1:]})


def _text(token: Any) -> str:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else ""


def _entries(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []


def _named(about: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name in NAMED if (text := _text(about.get(name)))}


def _mark_special(added: dict[int, Added], texts: set[str], vocab: Any) -> None:
    """What has a name is special, even where it is an ordinary entry of the vocabulary."""
    for i, token in added.items():
        if token.text in texts:
            added[i] = token._replace(special=True)
    known = {token.text for token in added.values()}
    for text in sorted(texts - known):
        if isinstance(vocab, dict) and isinstance(vocab.get(text), int):
            added[vocab[text]] = Added(text, special=True)


def with_ids(words: Vocabulary, ids: Iterable[int]) -> Vocabulary:
    """The same, with the ids that a model uses as special ones, where their text has the form of a token."""
    added, vocab = dict(words.added), words.data["model"].get("vocab")
    texts = {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {}
    for i in ids:
        if i in added:
            added[i] = added[i]._replace(special=True)
        elif re.fullmatch(r"<.+>|\[.+\]", str(texts.get(i, ""))):
            added[i] = Added(texts[i], special=True)
    return words._replace(added=dict(sorted(added.items())))


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file goes before what the configs hold."""
    found: dict[str, str] = {}
    for about in (_json(files, "chat_template.json"), config):
        given = about.get("chat_template")
        for entry in [{"name": "default", "template": given}] if isinstance(given, str) else _entries(given):
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                found[str(entry.get("name"))] = entry["template"]
    for name, data in files.items():
        if name.endswith(".jinja"):
            key = "default" if name == "chat_template.jinja" else Path(name).stem
            found[key] = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return found


def _byte_level(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE that comes as vocab.json and merges.txt."""
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in BYTE_LEVEL:
        raise CheckpointError(
            f"tokenizer_config.json: tokenizer_class is {str(kind)[:80]!r}, and there is no tokenizer.json; "
            f"allowed without one: {', '.join(BYTE_LEVEL)}"
        )
    pattern, normalizer = BYTE_LEVEL[kind]
    cut = {
        "type": "ByteLevel",
        "add_prefix_space": bool(config.get("add_prefix_space")),
        "trim_offsets": True,
    }
    words: dict[str, Any] = {**cut, "use_regex": pattern is None}
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        words = {"type": "Sequence", "pretokenizers": [split, words]}
    head, *lines = files["merges.txt"].decode("utf-8", "replace").split("\n")
    merges = [line for line in ([] if head.startswith("#version") else [head]) + lines if line]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": _json(files, "vocab.json"), "merges": merges,
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": words, "post_processor": None, "decoder": {**cut, "use_regex": True}, "model": model,
    }  # fmt: skip
