"""Settings of the site that `make docs` builds with Sphinx."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import mercury_jax

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

# The address of the repository: links to files outside of docs/, and the "Open in Colab" badges.
REPOSITORY, BRANCH = "github.com/mercury-jax/mercury_jax", "main"

project, author = "mercury_jax", "The mercury_jax authors"
project_copyright = "2026, The mercury_jax authors"
version = release = mercury_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "README.md"]  # README.md is the index on GitHub
suppress_warnings = ["config.cache"]

# Pages are Markdown as GitHub shows it; their blocks are run by tests/test_readme.py.
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"

# API pages from docstrings.
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # the docstrings say types and shapes; signatures with jaxtyping are hard to read
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False, "show-inheritance": False}
napoleon_use_rtype, napoleon_use_ivar = False, True
napoleon_custom_sections = [("Departs from the reference", "notes_style")]

# `make links`. Our own address is not there yet; the last is the reader's machine.
linkcheck_ignore = [
    rf"https://{REPOSITORY}",
    r"https://colab\.research\.google\.com/github/",
    r"http://127\.0\.0\.1",
]
linkcheck_timeout, linkcheck_anchors = 20, False

html_theme = "sphinx_book_theme"
html_title = "mercury_jax"
html_static_path = ["style.css", "search.js"]
html_css_files, html_js_files = ["style.css"], [("search.js", {"defer": "defer"})]
html_favicon = str(ROOT / "mercury_jax/serve/playground/static/icon.svg")
html_search_scorer = str(ROOT / "docs/scorer.js")
html_theme_options = {
    "repository_url": f"https://{REPOSITORY}",
    "repository_branch": BRANCH,
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # one search box, that of the side
}

# What newcomers search for, by page and heading, where the words of the page alone do not put it first.
SEARCHED = {
    "26b-on-eight-gpus": {"26B on eight GPUs": "serve a large model; eight GPUs"},
    "command-line": {"Exit codes and environment": "environment variables"},
    "comparison": {"Comparison": "compare with vLLM; alternatives; SGLang"},
    "decoder": {"Transforms": "shard_map; vmap; jit"},
    "fine-tuning": {"Fine-tune an open model": "LoRA; finetune; fine-tune LLaDA; adapter"},
    "getting-started": {"Install": "pip; Python version; requirements; laptop; CPU; mac; macOS; Colab"},
    "hardware": {"Which machine runs it": "memory of a GPU; which GPU; out of memory"},
    "models": {
        "Gated checkpoints": "HF_TOKEN; gated model; offline",
        "Loading": "load LLaDA; load Dream; load DiffusionGemma; Hugging Face; download weights",
        "Quantisation": "quantise; 4-bit; 8-bit",
        "Several devices": "multi GPU; multi-GPU; several GPUs; tensor parallel",
    },
    "performance": {"Performance": "tokens per second; speed; how fast; benchmark; throughput"},
    "published-figures": {"Published figures": "GSM8K results; leaderboard"},
    "sampling": {
        "Decoding rules": "remasking; temperature; threshold",
        "Effort": "effort; reasoning effort",
        "Infilling": "fill in the middle; autocomplete",
        "JSON schemas and grammars": "JSON; JSON output; structured output",
        "Prompts": "stop words; batch; system prompt; chat template",
    },
    "scaling": {"Several devices and hosts": "several hosts; distributed training; multi-host; Slurm"},
    "search-and-rl": {"Best of n": "reward"},
    "serving": {
        "An agent with tools": "tools agent; tool calls; function calling",
        "Deployment": "Docker; Kubernetes; deploy",
        "Endpoints": "OpenAI",
    },
    "training": {
        "Interrupted runs": "checkpoint save; save a checkpoint",
        "Rewards and distillation": "RLHF; reinforcement learning",
        "Training": "train from scratch; pretraining",
        "Training on your own text": "own text; own data",
    },
    "your-model": {"A Flax module": "custom model; own architecture"},
    "your-rule": {"Your own decoding rule": "write a decoding rule; custom sampler; own sampler"},
}

_CODE, _SECTION = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(\w?)"), re.compile(r"[A-Z][\w ]+:$")
_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")
_NOTEBOOK = re.compile(r"\]\(\.\./colab/(\w+\.ipynb)\)")


def _prepare(app: Any, page: str, source: list[str]) -> None:
    """Turns links to notebooks into links to their pages, and links to other files outside of docs/, which GitHub
    follows in the clone, into addresses; adds index entries."""
    del app
    source[0] = _NOTEBOOK.sub(r"](notebooks/\1)", source[0])
    source[0] = _OUTSIDE.sub(rf"](https://{REPOSITORY}/blob/{BRANCH}/\1)", source[0])
    # "!" makes an entry the main one of its phrase, which the search ranks first.
    for heading, phrases in SEARCHED.get(page, {}).items():
        entries = "".join(f"\n```{{index}} ! single: {phrase}\n```\n" for phrase in phrases.split("; "))
        found = list(re.finditer(rf"^#+ {heading}\n", source[0], re.MULTILINE))
        if len(found) != 1:
            raise ValueError(f"SEARCHED of docs/conf.py: {page}.md has no single heading {heading!r}")
        end = found[0].end()
        source[0] = source[0][:end] + entries + source[0][end:]


def _as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns the Markdown of our docstrings, `code` and indented blocks, into what Sphinx reads."""
    del app, what, name, obj, options
    found: list[str] = []
    text, block = True, False  # before the first section, where an indented block is an example
    for i, line in enumerate(lines):
        text = text and not _SECTION.match(line)
        indented = line.startswith("    ")
        if text and indented and not block and i and not lines[i - 1].strip():
            found += ["::", ""]
            block = True
        block = block and (indented or not line.strip())
        found.append(
            line if block else _CODE.sub(lambda m: f"``{m[1]}``" + (f"\\ {m[2]}" if m[2] else ""), line)
        )
    lines[:] = found


def _copy_notebooks(app: Any) -> None:
    """Makes pages of the notebooks in colab/, which hold their outputs."""
    import notebooks

    notebooks.pages(Path(app.srcdir) / "notebooks")


def setup(app: Any) -> None:
    """Registers what this site adds to Sphinx."""
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon, at 500
