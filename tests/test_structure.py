"""Limits on what a reader of the package meets: files, functions, documentation, names.

`python -m benchmarks.structure --list` prints the names behind each count.
"""

import pytest

from benchmarks import structure

SOURCES = structure.sources()
COUNTS = structure.counts(SOURCES)

# The limits stand just above today's counts, so that the package does not grow by itself, and fall as it shrinks.
AT_MOST = {"files": 294, "code_lines": 47_968, "functions": 3_649}

# A file name may stand for several files only where the folder says which: a command and what it calls, an
# architecture and its checkpoint family, an operation and its device code, and the like.
SAME_NAME = {
    "app.py": {"cli", "serve", "serve/playground"},
    "cases.py": {"ops/attention", "ops/experts", "ops/norms"},
    "chat.py": {"", "cli"},
    "decide.py": {"cli", "decode"},
    "dit.py": {"hub/families", "models"},
    "export.py": {"checkpoint", "hub"},
    "gemma.py": {"hub/families", "models"},
    "hopper.py": {"ops/attention", "ops/experts", "ops/norms"},
    "infill.py": {"cli", "decode"},
    "inputs.py": {"decode", "ops/attention"},
    "masked.py": {"decode/rules", "training/objectives"},
    "op.py": {"ops/attention", "ops/experts", "ops/norms"},
    "report.py": {"cli", "training"},
    "request.py": {"decode", "serve/engine"},
    "runner.py": {"bench/gpu", "evaluate"},
    "sample.py": {"cli", "decode"},
    "search.py": {"decode", "decode/grammar"},
    "tokenizer.py": {"", "hub"},
    "uniform.py": {"decode/rules", "training/objectives"},
}


@pytest.mark.parametrize("count", AT_MOST)
def test_a_count_stays_within_its_limit(count):
    assert COUNTS[count] <= AT_MOST[count]


def test_half_of_the_files_have_150_lines_or_more():
    assert COUNTS["median_lines"] >= 150


def test_every_name_that_users_import_is_documented():
    assert structure.undocumented(SOURCES) == []


def test_no_class_name_stands_for_two_classes():
    assert structure.twice(structure.classes(SOURCES)) == {}


def test_a_file_name_stands_for_several_files_only_where_the_folder_says_which():
    found = {
        name: {path.rpartition("/")[0] for path in paths}
        for name, paths in structure.twice(structure.files(SOURCES)).items()
    }
    assert found == SAME_NAME
