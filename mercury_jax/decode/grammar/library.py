"""The package that does the parsing, loaded at first use."""

from __future__ import annotations

import importlib
from typing import Any

from mercury_jax.decode.grammar.spec import GrammarError


def library() -> Any:
    """llguidance. GrammarError with what to install where it is missing."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise GrammarError(
            "schema needs the package llguidance: install mercury-jax with its extra `serve`"
        ) from None
