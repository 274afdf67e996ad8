"""Special ids that config.json leaves out: the mask stands in the tokenizer, further ends beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mercury_jax.hub import files


def complete(folder: Path, config: dict[str, Any]) -> None:
    """Fill `mask_token_id` from the tokenizer, and `eos_token_id` from generation_config.json, where these say more."""
    if config.get("mask_token_id") is None:
        found = mask_of(folder)
        if found is not None:
            config["mask_token_id"] = found
    config["eos_token_id"] = ends_of(folder, config.get("eos_token_id"))


def mask_of(folder: Path) -> int | None:
    """The id of the tokenizer's `mask_token`."""
    about = _json(folder, "tokenizer_config.json")
    token = about.get("mask_token") or _json(folder, "special_tokens_map.json").get("mask_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    added = about.get("added_tokens_decoder")
    for key, entry in (added if isinstance(added, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return int(key)
    listed = _json(folder, "added_tokens.json").get(text)
    if isinstance(listed, int):
        return listed
    for entry in _json(folder, "tokenizer.json").get("added_tokens") or []:
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return entry["id"]
    return None


def ends_of(folder: Path, first: Any) -> Any:
    """config.json's end of text, then the further ones of generation_config.json."""
    more = _json(folder, "generation_config.json").get("eos_token_id")
    listed = lambda x: [] if x is None else list(x) if isinstance(x, list) else [x]
    found = list(dict.fromkeys([*listed(first), *listed(more)]))
    return found[0] if len(found) == 1 else found or None


def _json(folder: Path, name: str) -> dict[str, Any]:
    return files.read_json(folder, name) if files.find(folder, name) else {}
