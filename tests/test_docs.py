"""The site: every public name has an entry, and every page is reached from the index."""

import re
import subprocess
import sys
from pathlib import Path

import mercury_jax as mj

DOCS = Path(__file__).parents[1] / "docs"


def listed(page):
    """The entries of the tables of contents and the summaries of a page."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```\{(?:toctree|eval-rst)\}\n(.*?)^```", text, re.S | re.M)
    lines = "".join(blocks) if page.suffix == ".md" else text
    return [line.strip().removeprefix(".. py:data:: ") for line in lines.splitlines()]


def test_every_public_name_has_an_entry():
    names = [name for page in DOCS.glob("api/*.md") for name in listed(page)]
    assert sorted(set(mj.__all__) - set(names)) == []
    pages = {page.stem for page in DOCS.glob("api/*.md")}
    assert {name for name in names if name.isidentifier()} - set(mj.__all__) <= pages


def test_pages_name_the_repository_by_its_one_address():
    [address] = re.findall(r'^REPOSITORY, BRANCH = "(.+?)",', (DOCS / "conf.py").read_text("utf-8"), re.M)
    owner = address.rpartition("/")[0]
    found = set()
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("*.rst")):
        found |= set(re.findall(rf"{re.escape(owner)}/[\w-]+", page.read_text("utf-8")))
    assert found == {address}


def test_every_page_is_in_the_table_of_contents():
    pages = {page.stem for page in DOCS.glob("*.md")} - {"README"}
    assert pages <= set(listed(DOCS / "index.rst"))
    assert {page.stem for page in DOCS.glob("api/*.md")} - {"index"} <= set(listed(DOCS / "api/index.md"))


def test_tables_of_performance_have_the_figures_of_their_rows():
    command = [sys.executable, str(DOCS / "performance_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
