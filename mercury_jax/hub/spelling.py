"""A spelling of special tokens that a template can write, and no text can.

The `tokenizers` library finds added tokens wherever their text stands, whoever wrote it. So in our copy of a
tokenizer every token of control is spelt with a mark in front, a character that Unicode keeps out of
texts: `<|im_start|>` in a message is eleven ordinary characters, and the template's own is respelt
before it is encoded. Between them all is as the checkpoint's own tokenizer does it (normalisation, words,
merges, the space that an added token swallows), with one call for the whole text.
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
from mercury_jax.hub.sandbox.traced import mask_of
from mercury_jax.hub.vocabulary import Added, Vocabulary

# Added tokens that are no special ones by name may be ordinary text (runs of spaces, HTML in Gemma) or
# control (`<think>`, `<tool_call>` and the FIM tokens in Qwen). Control is what the chat template writes,
# what has the form of a token, and what we use ourselves.
_FORM = re.compile(r"<[|｜].*[|｜]?>|<.*[|｜]>|\[[A-Z_/]+\]", re.DOTALL)
_MARKUP = re.compile(r"[<\[{|｜]")


class Spelt(NamedTuple):
    """core: the library's tokenizer, respelt. mark: stands before every token of `control`, which has ids by text."""

    core: Any
    mark: str
    control: dict[str, int]
    pattern: re.Pattern[str] | None

    def encode(self, text: str) -> list[int]:
        """Ids of a text; none of them is of control, whatever it says."""
        first, *rest = text.split(self.mark)
        ids = self._ids(first)
        for part in rest:  # the mark itself, in a text
            ids += self._ids(self.mark) + self._ids(part)
        return ids

    def encode_traced(self, text: str) -> list[int]:
        """Ids of a template's text, with the tokens of control that the template wrote itself."""
        mask = mask_of(text)
        at, ids = 0, list[int]()
        for part in str.split(text, self.mark):
            ids += self._ids(self.mark) if at else []
            ids += self._ids(self._respelt(part, mask[at : at + len(part)]))
            at += len(part) + 1
        return ids

    def foreign(self, text: str) -> Iterable[str]:
        """Tokens of control in a template's text that the template did not write as a whole."""
        mask = mask_of(text)
        found = self.pattern.finditer(text) if self.pattern else ()
        return {m.group() for m in found if 0 in mask[m.start() : m.end()]}

    def decode(self, ids: list[int]) -> str:
        """Text of known ids, those of control in their own spelling."""
        known = {i: text for text, i in self.control.items()}
        whole = lambda ids: self.core.decode(ids, skip_special_tokens=False)
        if known.keys().isdisjoint(ids):
            return whole(ids)
        if self.mark not in whole([i for i in ids if i not in known]):
            return whole(ids).replace(self.mark, "")
        runs = itertools.groupby(ids, lambda i: known.get(i, ""))  # a text held the mark: piece by piece
        return "".join(text * len(list(run)) if text else whole(list(run)) for text, run in runs)

    def _respelt(self, text: str, mask: bytes) -> str:
        """The template's own tokens of control with their mark."""
        if self.pattern is None:
            return text
        parts, at = [], 0
        for run in re.finditer(b"\1+", mask):
            ours = str.__getitem__(text, slice(*run.span()))
            parts += [text[at : run.start()], self.pattern.sub(lambda m: self.mark + m.group(), ours)]
            at = run.end()
        return "".join([*map(str, parts), text[at:]])

    def _ids(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids if text else []


def respell(vocabulary: Vocabulary, used: Iterable[str]) -> Spelt:
    """The tokenizer of these files. used: texts of tokens that are of control by our own use.

    ValueError where the `tokenizers` library is missing, CheckpointError where it cannot build it.
    """
    control = {i: t for i, t in vocabulary.added.items() if _controls(t, vocabulary.templates, set(used))}
    mark = _mark(vocabulary)
    data = _data(vocabulary, control, mark)
    core = _build(json.dumps(data, ensure_ascii=False))
    for i, token in vocabulary.added.items():
        text = mark + token.text if i in control else token.text
        if core.token_to_id(text) != i:
            raise CheckpointError(
                f"tokenizer.json: added token {token.text!r} has id {i}; allowed: one that fits its vocabulary, "
                f"{core.token_to_id(text)}"
            )
    texts = {token.text: i for i, token in control.items()}
    longest_first = sorted(texts, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if texts else None
    return Spelt(core, mark, texts, pattern)


def _controls(token: Added, templates: Mapping[str, str], used: set[str]) -> bool:
    if token.special or token.text in used or _FORM.fullmatch(token.text):
        return True
    written = any(token.text in source for source in templates.values())
    return written and len(token.text) > 2 and _MARKUP.search(token.text) is not None


def _mark(vocabulary: Vocabulary) -> str:
    """A noncharacter of Unicode that no entry of the vocabulary holds."""
    vocab = vocabulary.data["model"].get("vocab") or ()
    texts = [str(entry) for entry in vocab] + [token.text for token in vocabulary.added.values()]
    taken = {character for text in texts if "\ufdcf" < max(text, default="") for character in text}
    return next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in taken)


def _data(vocabulary: Vocabulary, control: Mapping[int, Added], mark: str) -> dict[str, Any]:
    """tokenizer.json in our spelling."""
    model = dict(vocabulary.data["model"])
    texts = {token.text for token in control.values()}
    spelt = {i: mark + t.text if i in control else t.text for i, t in vocabulary.added.items()}
    if isinstance(model.get("vocab"), dict):
        vocab = {text: i for text, i in model["vocab"].items() if not (text in texts and i in control)}
        if len(vocab) < len(model["vocab"]):
            model["merges"] = _without(model.get("merges"), texts)
        # In the vocabulary, a token has the id that is written there; behind it, the next one free.
        model["vocab"] = vocab | {text: i for i, text in spelt.items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[spelt.get(i, piece), score] for i, (piece, score) in enumerate(model["vocab"])]
    if isinstance(model.get("unk_token"), str) and model["unk_token"] in texts:
        model["unk_token"] = mark + model["unk_token"]
    if model.get("merges") is None:
        model.pop("merges", None)
    added = [
        # A token of control is found wherever the template wrote it, in whatever surroundings.
        {"id": i, "content": spelt[i], "single_word": t.single_word and i not in control, "lstrip": t.lstrip,
         "rstrip": t.rstrip, "normalized": t.normalized and i not in control, "special": t.special}
        for i, t in vocabulary.added.items()
    ]  # fmt: skip
    return {**vocabulary.data, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _without(merges: Any, texts: set[str]) -> Any:
    """Merges that neither make nor use a token of control: it is none of the text's words."""
    if not isinstance(merges, list):
        return merges
    pairs = [(m, m.split(" ") if isinstance(m, str) else m) for m in merges]
    return [m for m, pair in pairs if texts.isdisjoint(pair) and "".join(pair) not in texts]


def _build(text: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise refuse("tokenizer", "tokenizers is not installed", install.command("hub")) from error
    try:
        core = Tokenizer.from_str(text)
        core.encode("a 1", add_special_tokens=True)
    except BaseException as error:  # the library panics on some damage, and a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(f"tokenizer.json: the tokenizers library cannot build it: {said}") from None
    return core
