"""Tokenizer files of checkpoints: reads them, builds the tokenizer, and writes them for our own tokenizer.

    tokenizer.json                      the tokenizer, as the `tokenizers` library writes it; or, without it,
    vocab.json, merges.txt              a byte-level BPE, if its class is in `BYTE_LEVEL`
    tokenizer_config.json               flags of added tokens, special tokens by name, chat templates
    added_tokens.json, special_tokens_map.json      the same in older checkpoints
    chat_template.jinja, additional_chat_templates/*.jinja, chat_template.json      chat templates

The files may come from an untrusted source: their size is limited, they are checked, and no code in them is run.

`respell` builds a tokenizer that is safe against control tokens in user text. The `tokenizers` library matches added
tokens anywhere in a text, so a message with the characters `<|im_start|>` would forge the token of that name. In
`ControlTokens`, a copy of the checkpoint's tokenizer, every control token is spelled with a mark in front, a Unicode
noncharacter. User text never matches this spelling; control tokens that the chat template itself wrote are respelled
before encoding. Normalisation, pre-tokenisation, merges and the spaces that added tokens absorb stay as in the
checkpoint's tokenizer, because the whole text is still encoded in one call.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.hub.folder import find
from mercury_jax.tokenizer import SPECIAL, Tokenizer

MAX_BYTES = {
    "tokenizer.json": 128_000_000,  # the largest known, of 262,144 tokens, has 34 million
    "vocab.json": 64_000_000,
    "merges.txt": 64_000_000,
    "tokenizer_config.json": 16_000_000,
    "added_tokens.json": 16_000_000,
    "special_tokens_map.json": 4_000_000,
    "chat_template.jinja": 1_000_000,
    "chat_template.json": 1_000_000,
}
MORE_TEMPLATES = "additional_chat_templates"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte that no other token holds, in SentencePiece's vocabularies

# tokenizer_class -> (regular expression that splits the text before BPE, normalizer). They are not in vocab.json and
# merges.txt; transformers has them as constants of the class that tokenizer_config.json names.
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


class AddedToken(NamedTuple):
    """An added token, which is matched as a whole before pre-tokenisation; fields as in tokenizer.json."""

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class TokenizerData(NamedTuple):
    """The combined contents of a checkpoint's tokenizer files.

    Attributes:
        json: tokenizer.json without its added tokens.
        added: Added tokens by id.
        named: Texts of special tokens by name, such as "bos_token".
        templates: Sources of the chat templates by name.
        notes: Messages for the user about what was ignored.
        adds_bos: `add_bos_token` of tokenizer_config.json; as in transformers 5, without effect beside tokenizer.json.
    """

    json: dict[str, Any]
    added: dict[int, AddedToken]
    named: dict[str, str]
    templates: dict[str, str]
    notes: tuple[str, ...]
    adds_bos: bool


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Reads the tokenizer files of a folder."""
    folder = Path(folder)
    names = list(MAX_BYTES)
    if (folder / MORE_TEMPLATES).is_dir():
        more = sorted(p.name for p in (folder / MORE_TEMPLATES).iterdir())[:64]
        names += [f"{MORE_TEMPLATES}/{n}" for n in more if re.fullmatch(r"[A-Za-z0-9_-]{1,64}\.jinja", n)]
    found = {}
    for name in names:
        path, limit = find(folder, name), MAX_BYTES.get(name, MAX_BYTES["chat_template.jinja"])
        if path is not None:
            with path.open("rb") as file:
                found[name] = file.read(limit + 1)
            if len(found[name]) > limit:
                raise CheckpointError(f"{folder / name} has more than {limit} bytes; allowed: {limit}")
    if "tokenizer.json" not in found and not {"vocab.json", "merges.txt"} <= set(found):
        has = "; tokenizer.model is there: let transformers write tokenizer.json from it (save_pretrained)"
        more = has if (folder / "tokenizer.model").exists() else ""
        allowed = f"tokenizer.json, or vocab.json and merges.txt{more}"
        raise CheckpointError(f"{folder} has no tokenizer; allowed: {allowed}")
    return found


def tokenizer_data(files: Mapping[str, bytes], used: Iterable[int] = ()) -> TokenizerData:
    """Combines the tokenizer files of a checkpoint.

    Args:
        used: Special ids of the model (mask, eos, pad). They become special tokens if they are added tokens, or if
            their text looks like `<...>` or `[...]`.
    """
    config = _json(files, "tokenizer_config.json")
    data = _json(files, "tokenizer.json") or _byte_level_json(files, config)
    try:
        added, model = _added_tokens(files, data, config), dict(data["model"])
        # Check the parts that `respell` changes, vocabulary and merges; the library checks the rest.
        vocab, merges = model["vocab"], model.get("merges") or []
        by_text = isinstance(vocab, dict) and all(type(i) is int for i in vocab.values())
        scored = isinstance(vocab, list) and all(len(e) == 2 and isinstance(e[0], str) for e in vocab)
        if not (by_text or scored):
            raise ValueError("model.vocab has neither ids nor scores by text")
        if not all(isinstance(m, str) or all(isinstance(part, str) for part in m) for m in merges):
            raise ValueError("model.merges has no pairs of texts")
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"tokenizer.json is not what the tokenizers library writes: {words}") from None
    tables = (_json(files, "special_tokens_map.json"), config)
    named = {name: text for table in tables for name in NAMED if (text := _text_of(table.get(name)))}
    others = [
        _text_of(token)
        for key in ("additional_special_tokens", "extra_special_tokens")
        for token in _entries(config.get(key))
    ]
    vocab = vocab if isinstance(vocab, dict) else {}
    # Tokens with a name (eos_token, ...) are special, even if the files list them as ordinary vocabulary.
    special = {*named.values(), *others}
    added = {i: t._replace(special=True) if t.text in special else t for i, t in added.items()}
    for text in sorted(special - {token.text for token in added.values()}):
        if isinstance(vocab.get(text), int):
            added[vocab[text]] = AddedToken(text, special=True)
    texts = {i: text for text, i in vocab.items()}
    for i in used:
        if i in added:
            added[i] = added[i]._replace(special=True)
        elif re.fullmatch(r"<.+>|\[.+\]", str(texts.get(i, ""))):
            added[i] = AddedToken(texts[i], special=True)
    if "ByteFallback" in json.dumps(data.get("decoder")):  # a byte is text, also where it is an added token
        added = {i: t._replace(special=False) if _BYTE.fullmatch(t.text) else t for i, t in added.items()}
    code = str(config.get("auto_map") or "")[:200]
    notes = (f"tokenizer_config.json: auto_map names code to run ({code}); it is ignored",) if code else ()
    adds_bos = "tokenizer.json" not in files and config.get("add_bos_token") is True
    return TokenizerData(
        {**data, "model": model, "added_tokens": []}, dict(sorted(added.items())), named, _templates(files, config),
        notes, adds_bos,
    )  # fmt: skip


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


def _added_tokens(
    files: Mapping[str, bytes], data: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """Collects added tokens by id. tokenizer_config.json overrides the other files, as in transformers."""

    def token(entry: Mapping[str, Any]) -> AddedToken:
        return AddedToken(entry["content"], **{k: bool(entry.get(k)) for k in AddedToken._fields[1:]})

    found = {int(e["id"]): token(e) for e in data.get("added_tokens") or ()}
    for text, i in _json(files, "added_tokens.json").items():
        found.setdefault(int(i), AddedToken(text))
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        found[int(i)] = token(entry)
    if any(not e.text or not isinstance(e.text, str) or i < 0 for i, e in found.items()):
        raise ValueError("an added token without a text")
    return found


def _text_of(token: Any) -> str:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else ""


def _entries(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Collects chat templates by name. A .jinja file overrides the JSON files."""
    found: dict[str, str] = {}
    for table in (_json(files, "chat_template.json"), config):
        given = table.get("chat_template")
        for entry in [{"name": "default", "template": given}] if isinstance(given, str) else _entries(given):
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                found[str(entry.get("name"))] = entry["template"]
    for name, data in files.items():
        if name.endswith(".jinja"):
            key = "default" if name == "chat_template.jinja" else Path(name).stem
            found[key] = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return found


def _byte_level_json(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the contents of tokenizer.json for a byte-level BPE in vocab.json and merges.txt."""
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in BYTE_LEVEL:
        raise CheckpointError(
            f"tokenizer_config.json: tokenizer_class is {str(kind)[:80]!r}, and there is no tokenizer.json; "
            f"allowed without one: {', '.join(BYTE_LEVEL)}"
        )
    pattern, normalizer = BYTE_LEVEL[kind]
    prefix = bool(config.get("add_prefix_space"))
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    words: dict[str, Any] = {**level, "use_regex": pattern is None}
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
        "pre_tokenizer": words, "post_processor": None, "decoder": {**level, "use_regex": True}, "model": model,
    }  # fmt: skip


# --- the tokenizer with respelled control tokens

# An added token that is not marked as special may be ordinary text (runs of spaces, HTML in Gemma) or a control token
# (`<think>`, `<tool_call>` and the FIM tokens in Qwen). It counts as a control token if it has the form of one, if the
# chat template contains it, or if this package uses it.
_TOKEN_FORM = re.compile(r"<[|｜].*[|｜]?>|<.*[|｜]>|\[[A-Z_/]+\]", re.DOTALL)
_MARKUP = re.compile(r"[<\[{|｜]")


class ControlTokens(NamedTuple):
    """A checkpoint's tokenizer with respelled control tokens.

    Attributes:
        core: The `tokenizers.Tokenizer`.
        mark: The character that precedes every control token in the new spelling.
        control: Ids of the control tokens by their original text.
        pattern: Matches the original text of any control token; None if there are none.
        late: Normalised spellings of control tokens that are matched after normalisation.
    """

    core: Any
    mark: str
    control: dict[str, int]
    pattern: re.Pattern[str] | None
    late: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Encodes user text, without control tokens whatever it contains."""
        return [i for part in self._cut(text) for i in self._ids(part)]

    def encode_rendered(self, text: str, mask: bytes) -> list[int]:
        """Encodes a rendered chat template, with the control tokens that the template itself wrote."""
        # Respell control tokens only within runs of characters that the template wrote; leave all others as they are.
        parts, end = [""], 0
        for run in re.finditer(b"\1+", mask):
            for token in self.pattern.finditer(text, run.start(), run.end()) if self.pattern else ():
                before, *rest = self._cut(text[end : token.start()])
                parts[-1] += before
                parts += rest
                parts[-1] += self.mark + token.group()
                end = token.end()
        before, *rest = self._cut(text[end:])
        return [i for part in [*parts[:-1], parts[-1] + before, *rest] for i in self._ids(part)]

    def foreign(self, text: str, mask: bytes) -> set[str]:
        """Finds control tokens in a rendered template that the template did not write completely."""
        found = self.pattern.finditer(text) if self.pattern else ()
        return {m.group() for m in found if 0 in mask[m.start() : m.end()]}

    def decode(self, ids: list[int]) -> str:
        """Decodes ids, with control tokens in their original spelling."""
        known = {i: text for text, i in self.control.items()}
        whole = lambda ids: self.core.decode(ids, skip_special_tokens=False)
        if known.keys().isdisjoint(ids):
            return whole(ids)
        if self.mark not in whole([i for i in ids if i not in known]):
            return whole(ids).replace(self.mark, "")
        # An ordinary token contains the mark, so removing all marks would change the text: decode run by run.
        runs = itertools.groupby(ids, lambda i: known.get(i, ""))
        return "".join(text * len(list(run)) if text else whole(list(run)) for text, run in runs)

    def _cut(self, text: str) -> list[str]:
        """Cuts a text behind each mark that spells a control token with what follows it."""
        if self.mark not in text or self.pattern is None:
            return [text]
        # A normaliser can remove what stands between a mark and a control token.
        if self.late and any(spelled in self.core.normalizer.normalize_str(text) for spelled in self.late):
            return re.split(f"(?<={self.mark})", text)
        return re.split(f"(?<={self.mark})(?={self.pattern.pattern})", text)

    def _ids(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids if text else []


def respell(data: TokenizerData, used: Iterable[str]) -> ControlTokens:
    """Builds the tokenizer of a checkpoint with respelled control tokens."""
    written, used = "\0".join(data.templates.values()), set(used)
    control = {
        i: token
        for i, token in data.added.items()
        if not _BYTE.fullmatch(token.text)
        and (
            token.special
            or token.text in used
            or _TOKEN_FORM.fullmatch(token.text)
            or (token.text in written and len(token.text) > 2 and _MARKUP.search(token.text))
        )
    }
    # The mark: a noncharacter of Unicode (U+FDD0 to U+FDEF) that no entry of the vocabulary contains.
    texts = [*map(str, data.json["model"].get("vocab") or ()), *(token.text for token in data.added.values())]
    taken = {character for text in texts if "\ufdcf" < max(text, default="") for character in text}
    mark = next((c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in taken), None)
    if mark is None:
        raise CheckpointError(
            "tokenizer.json: its tokens have all noncharacters from U+FDD0; allowed: to leave one out"
        )
    try:
        from tokenizers import Tokenizer as Core
    except ModuleNotFoundError as error:
        raise refuse("tokenizer", "tokenizers is not installed", install.command("hub")) from error
    # Tokens that are matched after normalisation stay so, unless nothing remains of them (a run of spaces and Strip; an
    # empty token breaks the library), or a control token would not be found within a text.
    late = {i for i, token in data.added.items() if token.normalized}
    try:
        build = lambda: Core.from_str(
            json.dumps(_respelled_json(data, control, mark, late), ensure_ascii=False)
        )
        core = build()
        if late and core.normalizer is not None:
            late = {i for i in late if core.normalizer.normalize_str(data.added[i].text)}
            core = build()
            late -= {i for i in late & set(control) if i not in core.encode(f"a{mark}{control[i].text}a").ids}
            core = build()
        core.encode("a 1", add_special_tokens=True)
    except BaseException as error:  # the library panics on some damaged files, and a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error).split())[:300]
        raise CheckpointError(f"tokenizer.json: the tokenizers library cannot build it: {words}") from None
    for i, token in data.added.items():
        text = mark + token.text if i in control else token.text
        if core.token_to_id(text) != i:
            raise CheckpointError(
                f"tokenizer.json: added token {token.text!r} has id {i}; allowed: one that fits its vocabulary, "
                f"{core.token_to_id(text)}"
            )
    ids = {token.text: i for i, token in control.items()}
    longest_first = sorted(ids, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None
    found = set[str]()
    if core.normalizer is not None:
        found = {core.normalizer.normalize_str(mark + control[i].text) for i in late & set(control)}
    return ControlTokens(core, mark, ids, pattern, tuple(sorted(found)))


def _respelled_json(
    data: TokenizerData, control: Mapping[int, AddedToken], mark: str, late: Collection[int]
) -> dict[str, Any]:
    """Makes the contents of tokenizer.json with respelled control tokens; `late`: matched after normalisation."""
    model = dict(data.json["model"])
    texts = {token.text for token in control.values()}
    spelled = {i: mark + t.text if i in control else t.text for i, t in data.added.items()}
    if isinstance(model.get("vocab"), dict):
        vocab = {text: i for text, i in model["vocab"].items() if not (text in texts and i in control)}
        if len(vocab) < len(model["vocab"]) and isinstance(model.get("merges"), list):
            # Without these merges, BPE cannot build a control token from user text.
            pairs = [(m, m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
            model["merges"] = [m for m, p in pairs if texts.isdisjoint(p) and "".join(p) not in texts]
        # The library takes the ids of added tokens from the vocabulary, and would give others the next free id.
        model["vocab"] = vocab | {text: i for i, text in spelled.items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[spelled.get(i, piece), score] for i, (piece, score) in enumerate(model["vocab"])]
    if isinstance(model.get("unk_token"), str) and model["unk_token"] in texts:
        model["unk_token"] = mark + model["unk_token"]
    if model.get("merges") is None:
        model.pop("merges", None)
    added = [
        # A respelled token must match wherever the template wrote it, so `single_word` is off.
        {"id": i, "content": spelled[i], "single_word": t.single_word and i not in control, "lstrip": t.lstrip,
         "rstrip": t.rstrip, "normalized": i in late, "special": t.special}
        for i, t in data.added.items()
    ]  # fmt: skip
    return {**data.json, "model": model, "added_tokens": added, "truncation": None, "padding": None}


# --- the bytes of each token

_SPACE = "\u2581"  # SentencePiece's character for a space
# GPT-2's byte-level alphabet: printable bytes stand for themselves, the others are U+0100 and up, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


def token_bytes(decoder: Any, ids: Mapping[str, int], added: Mapping[int, str]) -> tuple[bytes, ...]:
    """Returns the bytes that each token stands for.

    Args:
        decoder: The decoder of tokenizer.json: ByteLevel, WordPiece, BPEDecoder, or SentencePiece's sequence.

    Returns:
        [V] bytes by id; empty for ids that no token has.
    """
    kinds, queue = dict[Any, Any](), [decoder or {}]
    for part in queue:  # a sequence holds further decoders
        kinds[part.get("type")] = part
        queue += part.get("decoders") or ()

    def spelled(text: str) -> bytes:
        if "ByteLevel" in kinds:
            known = all(c in _BYTE_OF for c in text)  # a text with other characters is not encoded
            return bytes(_BYTE_OF[c] for c in text) if known else text.encode()
        if "WordPiece" in kinds:
            prefix = str(kinds["WordPiece"].get("prefix", "##"))
            return (text.removeprefix(prefix) if text.startswith(prefix) else f" {text}").encode()
        if "BPEDecoder" in kinds:
            suffix = str(kinds["BPEDecoder"].get("suffix", "</w>"))
            return (text.removesuffix(suffix) + " " if text.endswith(suffix) else text).encode()
        byte = _BYTE.fullmatch(text) if "ByteFallback" in kinds else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()

    found = [b""] * (1 + max(ids.values(), default=-1))
    for text, i in ids.items():
        whole = i in added and not ("ByteFallback" in kinds and _BYTE.fullmatch(text))
        found[i] = added[i].encode() if whole else spelled(text)
    return tuple(found)


# --- our own tokenizer for other libraries

# `Tokenizer.render` as a jinja2 template, without its checks of the messages.
CHAT_TEMPLATE = """{%- set listed = '' -%}
{%- if tools -%}
    {%- set listed = '<|tool|>' + (tools | map(attribute='function') | list | tojson) -%}
    {%- if messages[0]['role'] != 'system' -%}{{- '<|system|>' + listed + '<|end_turn|>' -}}{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['role'] == 'tool' and message['tool_call_id'] -%}
        {{- '<|tool_result|>' + message['content'] + '<|end_tool_result|>' -}}
    {%- else -%}
        {{- message['content'] or '' -}}
    {%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set made = {'name': call['function']['name'], 'arguments': call['function']['arguments']} -%}
        {{- '<|tool_call|>' + (made | tojson) + '<|end_tool_call|>' -}}
    {%- endfor -%}
    {%- if loop.first and message['role'] == 'system' -%}{{- listed -}}{%- endif -%}
    {{- '<|end_turn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}
{%- endif -%}
"""


def own_files(tok: Tokenizer) -> dict[str, bytes]:
    """Writes our own tokenizer as the files that transformers, vLLM and SGLang read.

    Returns:
        Contents by name: tokenizer.json, tokenizer_config.json, chat_template.jinja and our own tokenizer.model. Both
        tokenizers encode any text to the same ids.
    """
    names = {f"{name}_token": f"<|{name}|>" for name in ("pad", "eos", "mask", "unk")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    write = lambda data: (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode()
    made = {"tokenizer.json": write(_own_json(tok)), "tokenizer_config.json": write(about)}
    return {**made, "chat_template.jinja": CHAT_TEMPLATE.encode(), **tok.files}


def _own_json(tok: Tokenizer) -> dict[str, Any]:
    """Makes the contents of tokenizer.json.

    SentencePiece always merges the two neighbours whose result has the best score. An equivalent list of BPE merges has
    every split of every piece into two pieces, ordered by the score of the piece. Spaces are kept instead of being
    replaced by U+2581, so that no normaliser is needed and a literal U+2581 is preserved.
    """
    model, texts = tok._model, dict[int, str]()
    for i in range(tok.vocab_size):
        if i < len(SPECIAL):
            texts[i] = f"<|{SPECIAL._fields[i]}|>"
        else:
            texts[i] = model.id_to_piece(i) if model.is_byte(i) else tok.pieces[i].decode()
    # Added tokens, which are matched as a whole before any merge: special tokens and runs of whitespace.
    whole = [
        i for i, t in texts.items()
        if i < len(SPECIAL) or (not model.is_byte(i) and t != " " and t.isspace())
    ]  # fmt: skip
    pieces = {t for i, t in texts.items() if i >= len(SPECIAL) and not model.is_byte(i) and i not in whole}
    score = {t: model.get_score(i) for i, t in texts.items()}
    merges = sorted(
        (-score[piece], cut, [piece[:cut], piece[cut:]])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "added_tokens": [{"id": i, "content": texts[i], "special": i < len(SPECIAL), **flags} for i in whole],
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": False,
            "vocab": {t: i for i, t in texts.items()}, "merges": [pair for _, _, pair in merges],
        },
    }  # fmt: skip
