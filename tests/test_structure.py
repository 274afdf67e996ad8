"""Limits on what a reader of the package meets: files, functions, documentation, names.

`python -m benchmarks.structure --list` prints the names behind each count.
"""

import ast

import pytest

import mercury_jax
from benchmarks import structure
from mercury_jax.decode.state import State
from mercury_jax.types import View

SOURCES = structure.sources()
COUNTS = structure.counts(SOURCES)

# The limits stand just above today's counts, so that the package does not grow by itself, and fall as it shrinks.
AT_MOST = {"files": 248, "functions_per_1000_lines": 42.5, "code_lines": 42_210}

# A file name may stand for several files only where the folder says which: a command and what it calls, an
# architecture and its checkpoint family, a kernel and its form for one chip, and the like.
SAME_NAME = {
    "app.py": {"cli", "serve", "serve/playground"},
    "attention.py": {"kernels", "kernels/hopper"},
    "chat.py": {"", "cli"},
    "dit.py": {"hub/families", "models"},
    "export.py": {"checkpoint", "hub"},
    "gemma.py": {"hub/families", "models"},
    "grouped_matmul.py": {"kernels", "kernels/hopper"},
    "infill.py": {"cli", "decode"},
    "masked.py": {"decode/rules", "train/objectives"},
    "qk_norm_rope.py": {"kernels", "kernels/hopper"},
    "quantised_rows.py": {"kernels", "kernels/hopper"},
    "report.py": {"cli", "train"},
    "request.py": {"decode", "serve/engine"},
    "runner.py": {"bench/gpu", "evaluate"},
    "sample.py": {"cli", "decode"},
    "search.py": {"decode", "decode/grammar"},
    "tokenizer.py": {"", "hub"},
    "uniform.py": {"decode/rules", "train/objectives"},
}

# Names of earlier versions that meant nothing outside of this package: folder -> modules.
OLD_MODULES = {
    "decode": "guide pieces across parts row sight ask launch passes nats read gate amend verify outline holes lengths "
    "fim",
    "serve/engine": "moments shapes knobs ticket waiting fill prefix",
    "serve/chat": "fold talk thought finder words tags apply merge",
    "serve": "again guard kinds values fields tables schemas examples numbers work running",
    "hub": "reading writing spelling unread describe assemble bytes_of template conversation",
    "models": "turbo shift parallel unembed",
    "kernels": "walk turned rounded wide chip feed",
    "bench": "ahead known weightless ceilings rows settings",
}
OLD_CLASSES = {"Reading", "Part", "Knobs", "Sight", "Ask", "Job", "Whole"}
OLD_PUBLIC = {"shape", "shaper", "stop", "settle"}
OLD_STATE = {
    *("text", "known", "length", "total", "most", "reserve", "held", "n", "carry", "tentative", "forwards"),
    *("bad", "nats"),
}
OLD_VIEW = {"said", "told", "blind", "room", "at"}


@pytest.mark.parametrize("count", AT_MOST)
def test_a_count_stays_within_its_limit(count):
    assert COUNTS[count] <= AT_MOST[count]


def test_half_of_the_files_have_150_lines_or_more():
    assert COUNTS["median_lines"] >= 150


def test_every_public_name_is_documented():
    assert structure.undocumented(SOURCES) == []


def test_no_class_name_stands_for_two_classes():
    assert structure.twice(structure.classes(SOURCES)) == {}


def test_a_file_name_stands_for_several_files_only_where_the_folder_says_which():
    found = {
        name: {path.rpartition("/")[0] for path in paths}
        for name, paths in structure.twice(structure.files(SOURCES)).items()
    }
    assert {
        name: folders for name, folders in found.items() if not folders <= SAME_NAME.get(name, set())
    } == {}


def test_no_module_has_an_old_name():
    modules = {source.path.removesuffix(".py").removesuffix("/__init__") for source in SOURCES}
    old = {f"{folder}/{name}" for folder, names in OLD_MODULES.items() for name in names.split()}
    assert modules & old == set()


def test_no_class_or_function_has_an_old_name():
    found = {
        f"{source.path}:{node.lineno} {node.name}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.ClassDef) and node.name in OLD_CLASSES)
        or (
            source.path.startswith("decode/")
            and isinstance(node, ast.FunctionDef)
            and node.name in OLD_PUBLIC
        )
    }
    assert found == set() and OLD_PUBLIC.isdisjoint(dir(mercury_jax))


def test_no_field_of_the_state_or_the_view_has_an_old_name():
    assert OLD_STATE.isdisjoint(State._fields) and OLD_VIEW.isdisjoint(View._fields)
