"""Special tokens that a chat template can write and user text cannot.

A chat template writes `<|im_start|>` and means the token; a message that contains the same characters means the
characters. Two things keep them apart:

- `TracedText` is a `str` that knows which of its characters the template wrote. Rendering a template produces one.
- `ControlTokens` is a copy of the checkpoint's tokenizer in which every control token is spelled with a mark in front,
  a noncharacter of Unicode. The `tokenizers` library matches added tokens anywhere in a text; under the new spelling
  user text never matches, and the template's own tokens are respelled before encoding. Everything else is as in the
  checkpoint's own tokenizer (normalisation, pre-tokenisation, merges, spaces that an added token absorbs), because
  the whole text is encoded in one call.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.hub.tokenizer_files import AddedToken, TokenizerData

# A conversion such as %s or %5d, or an escaped percent sign.
_PERCENT = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")


class TracedText(str):
    """A `str` with a mask of which characters the template wrote.

    The string operations that templates use keep the mask; all others return a plain `str`, none of whose characters
    count as the template's. So a special token may be lost, but never forged.

    Attributes:
        mask: Bytes of the same length, 1 where the template wrote the character.
    """

    mask: bytes

    def __new__(cls, text: str, mask: bytes) -> TracedText:
        made = super().__new__(cls, text)
        made.mask = mask
        return made

    def __str__(self) -> TracedText:  # so that `str(x)` keeps the mask
        return self

    def __add__(self, other: str) -> Any:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Any:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: Any) -> TracedText:
        mask = self.mask[key]
        return TracedText(super().__getitem__(key), mask if isinstance(mask, bytes) else bytes([mask]))

    def __mod__(self, values: Any) -> Any:
        """Formatting; the text around the conversions keeps its mask."""
        queue = list(values) if isinstance(values, tuple) else [values]
        parts: list[str] = []
        at = 0
        for found in _PERCENT.finditer(self):
            parts.append(self[at : found.start()])
            at = found.end()
            if found.group() == "%%":
                parts.append(own("%"))
                continue
            if not queue:
                raise TypeError("not enough arguments for format string")
            value = queue.pop(0)
            whole = found.group() == "%s" and isinstance(value, str)
            parts.append(value if whole else str(found.group()) % (value,))
        if queue:
            raise TypeError("not all arguments converted during string formatting")
        return joined([*parts, self[at:]])

    def strip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        return self[: len(super().rstrip(chars))]

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Any]:
        """As of `str`; splitting at whitespace returns plain texts.

        Args:
            sep: The separator. Default: whitespace.
            maxsplit: Most splits. Default: all.

        Returns:
            The parts.
        """
        if not sep:
            return super().split(sep, maxsplit)
        parts, at = [], 0
        for part in super().split(sep, maxsplit):
            parts.append(self[at : at + len(part)])
            at += len(part) + len(sep)
        return parts

    def replace(self, old: str, new: str, count: int = -1, /) -> Any:
        """As of `str`.

        Args:
            old: What is replaced; if empty, the result is plain.
            new: Its replacement.
            count: Most replacements. Default: all.

        Returns:
            The text.
        """
        return joined(self.split(old, count), new) if old else super().replace(old, new, count)

    def join(self, parts: Iterable[str], /) -> Any:
        """As of `str`."""
        return joined(parts, self)


def _keeping_the_mask(name: str) -> Any:
    def method(self: TracedText) -> str:
        text = getattr(str, name)(self)
        return TracedText(text, self.mask) if len(text) == len(self) else text

    return method


for _name in ("lower", "upper", "title", "capitalize"):
    setattr(TracedText, _name, _keeping_the_mask(_name))


def own(text: str) -> TracedText:
    """Returns a text as one that the template wrote."""
    return TracedText(text, b"\1" * len(text))


def mask_of(text: str) -> bytes:
    """Returns, for each character of a `str`, 1 if the template wrote it and 0 otherwise."""
    return text.mask if isinstance(text, TracedText) else bytes(len(text))


def joined(parts: Iterable[str], between: str = "") -> str:
    """Joins texts.

    Args:
        parts: The texts.
        between: What is written between two of them.

    Returns:
        `between.join(parts)`, traced if a part or `between` is.
    """
    parts = list(parts)
    text = str.join(between, parts)
    if not any(isinstance(part, TracedText) for part in (*parts, between)):
        return text
    return TracedText(text, mask_of(between).join(map(mask_of, parts)))


# --- the tokenizer under another spelling of its control tokens

# An added token that the files do not call special may be ordinary text (runs of spaces, HTML in Gemma) or control
# (`<think>`, `<tool_call>` and the FIM tokens in Qwen). Control is what the chat template writes, what has the form of
# a token, and what we use ourselves.
_TOKEN_FORM = re.compile(r"<[|｜].*[|｜]?>|<.*[|｜]>|\[[A-Z_/]+\]", re.DOTALL)
_MARKUP = re.compile(r"[<\[{|｜]")


class ControlTokens(NamedTuple):
    """A checkpoint's tokenizer whose control tokens have another spelling.

    Attributes:
        core: The `tokenizers.Tokenizer`.
        mark: The character in front of every control token.
        control: Ids of the control tokens by their original text.
        pattern: Matches the original text of any control token; None if there are none.
    """

    core: Any
    mark: str
    control: dict[str, int]
    pattern: re.Pattern[str] | None

    def encode(self, text: str) -> list[int]:
        """Encodes user text; no id is that of a control token, whatever the text contains."""
        first, *rest = text.split(self.mark)
        ids = self._ids(first)
        for part in rest:  # the mark itself occurs in the text
            ids += self._ids(self.mark) + self._ids(part)
        return ids

    def encode_traced(self, text: str) -> list[int]:
        """Encodes a rendered template, with the control tokens that the template itself wrote."""
        mask = mask_of(text)
        at, ids = 0, list[int]()
        for part in str.split(text, self.mark):
            ids += self._ids(self.mark) if at else []
            ids += self._ids(self._respelled(part, mask[at : at + len(part)]))
            at += len(part) + 1
        return ids

    def foreign(self, text: str) -> Iterable[str]:
        """Returns control tokens in a rendered template of which the template did not write every character."""
        mask = mask_of(text)
        found = self.pattern.finditer(text) if self.pattern else ()
        return {m.group() for m in found if 0 in mask[m.start() : m.end()]}

    def decode(self, ids: list[int]) -> str:
        """Decodes known ids; control tokens in their original spelling."""
        known = {i: text for text, i in self.control.items()}
        whole = lambda ids: self.core.decode(ids, skip_special_tokens=False)
        if known.keys().isdisjoint(ids):
            return whole(ids)
        if self.mark not in whole([i for i in ids if i not in known]):
            return whole(ids).replace(self.mark, "")
        # A text contains the mark itself: decode run by run.
        runs = itertools.groupby(ids, lambda i: known.get(i, ""))
        return "".join(text * len(list(run)) if text else whole(list(run)) for text, run in runs)

    def _respelled(self, text: str, mask: bytes) -> str:
        if self.pattern is None:
            return text
        parts, at = [], 0
        for run in re.finditer(b"\1+", mask):
            template = str.__getitem__(text, slice(*run.span()))
            parts += [text[at : run.start()], self.pattern.sub(lambda m: self.mark + m.group(), template)]
            at = run.end()
        return "".join([*map(str, parts), text[at:]])

    def _ids(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids if text else []


def respell(data: TokenizerData, used: Iterable[str]) -> ControlTokens:
    """Builds the tokenizer of a checkpoint under the new spelling.

    Args:
        data: What the checkpoint's files say.
        used: Texts of tokens that are control tokens because we use them.

    Returns:
        The tokenizer.

    Raises:
        ValueError: The `tokenizers` library is not installed.
        CheckpointError: It cannot build the tokenizer, or an added token has an id that its vocabulary does not fit.
    """
    written, used = "\0".join(data.templates.values()), set(used)
    control = {
        i: token
        for i, token in data.added.items()
        if token.special
        or token.text in used
        or _TOKEN_FORM.fullmatch(token.text)
        or (token.text in written and len(token.text) > 2 and _MARKUP.search(token.text))
    }
    mark = _unused_character(data)
    core = _build(json.dumps(_respelled_json(data, control, mark), ensure_ascii=False))
    for i, token in data.added.items():
        text = mark + token.text if i in control else token.text
        if core.token_to_id(text) != i:
            raise CheckpointError(
                f"tokenizer.json: added token {token.text!r} has id {i}; allowed: one that fits its vocabulary, "
                f"{core.token_to_id(text)}"
            )
    texts = {token.text: i for i, token in control.items()}
    longest_first = sorted(texts, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if texts else None
    return ControlTokens(core, mark, texts, pattern)


def _unused_character(data: TokenizerData) -> str:
    """A noncharacter of Unicode (U+FDD0 to U+FDEF) that no entry of the vocabulary contains."""
    vocab = data.json["model"].get("vocab") or ()
    texts = [str(entry) for entry in vocab] + [token.text for token in data.added.values()]
    taken = {character for text in texts if "\ufdcf" < max(text, default="") for character in text}
    return next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in taken)


def _respelled_json(data: TokenizerData, control: Mapping[int, AddedToken], mark: str) -> dict[str, Any]:
    """The contents of tokenizer.json under the new spelling."""
    model = dict(data.json["model"])
    texts = {token.text for token in control.values()}
    spelled = {i: mark + t.text if i in control else t.text for i, t in data.added.items()}
    if isinstance(model.get("vocab"), dict):
        vocab = {text: i for text, i in model["vocab"].items() if not (text in texts and i in control)}
        if len(vocab) < len(model["vocab"]) and isinstance(model.get("merges"), list):
            # Merges that make or use a control token would spell it from user text.
            pairs = [(m, m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
            model["merges"] = [m for m, p in pairs if texts.isdisjoint(p) and "".join(p) not in texts]
        # A token in the vocabulary has the id that is written there; one behind it the next free id.
        model["vocab"] = vocab | {text: i for i, text in spelled.items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[spelled.get(i, piece), score] for i, (piece, score) in enumerate(model["vocab"])]
    if isinstance(model.get("unk_token"), str) and model["unk_token"] in texts:
        model["unk_token"] = mark + model["unk_token"]
    if model.get("merges") is None:
        model.pop("merges", None)
    added = [
        # A control token matches wherever the template wrote it, in whatever surroundings.
        {"id": i, "content": spelled[i], "single_word": t.single_word and i not in control, "lstrip": t.lstrip,
         "rstrip": t.rstrip, "normalized": t.normalized and i not in control, "special": t.special}
        for i, t in data.added.items()
    ]  # fmt: skip
    return {**data.json, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _build(text: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise refuse("tokenizer", "tokenizers is not installed", install.command("hub")) from error
    try:
        core = Tokenizer.from_str(text)
        core.encode("a 1", add_special_tokens=True)
    except BaseException as error:  # on some damage the library panics, and a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error).split())[:300]
        raise CheckpointError(f"tokenizer.json: the tokenizers library cannot build it: {words}") from None
    return core
