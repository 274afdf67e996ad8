"""Checkpoints by their name on the Hugging Face hub, kept in its own cache."""

from __future__ import annotations

from pathlib import Path

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import refuse

# What a model needs and nothing that could run: no pickle, no code.
PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
    "README.md",
    "additional_chat_templates/*",
]


def folder(source: str) -> Path:
    """The folder of "org/name" or "org/name@revision", fetched where it is not in the cache yet.

    Raises ValueError where the extra is missing, CheckpointError where the hub cannot be reached or has no such model.
    """
    name, _, revision = source.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise refuse(
            "source",
            source,
            f"a folder, or an id with the extra that fetches it: {install.command('hub')}",
        ) from None
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=PATTERNS)
    except Exception as error:  # whatever its HTTP client raises: all of it means that there is no folder
        said = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"source is {source!r}, and it could not be fetched ({type(error).__name__}: {said}); allowed: a folder "
            "of a saved model, or an id that the hub has, with a network"
        ) from None
    return Path(found)
