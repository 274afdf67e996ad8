"""Counts what a reader of the package meets: files, lines, functions, documentation, names.

    python benchmarks/structure.py            # the counts, and what is over its limit
    python benchmarks/structure.py --list     # also the names behind each count

Reads the source as text (`ast`, `tokenize`) without importing the package. `tests/test_structure.py` holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent / "mercury_jax"
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Files and folders all of whose names users import, beside the names that `mercury_jax/__init__.py` exports.
REACHED = (
    "config.py", "decode/methods/cache_refresh.py", "decode/presets.py", "decode/processors.py",
    "decode/registration.py", "decode/rules/", "decode/stopping.py", "noise.py", "rl/", "tasks/",
    "training/objectives/", "types.py",
)  # fmt: skip


class Source(NamedTuple):
    """One parsed file of the package."""

    path: str  # relative to the package
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Number of lines, blank ones included."""
        return self.text.count("\n")


def sources(root: Path = ROOT) -> list[Source]:
    """Parses every Python file below a folder.

    Args:
        root: The package's folder.

    Returns:
        The files, sorted by path.
    """
    found = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
    texts = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf8")) for path in found]
    return [Source(name, text, ast.parse(text)) for name, text in texts]


def code_lines(source: Source) -> int:
    """Counts lines that hold code: no blank lines, no comments, no docstrings."""
    blank = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in blank:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def comment_lines(source: Source) -> int:
    """Counts lines that hold nothing but a comment."""
    return sum(line.lstrip().startswith("#") for line in source.text.splitlines())


def functions(source: Source) -> Iterator[Function]:
    """Yields every function and method of a file, nested ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def public(source: Source) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yields the public functions, classes and methods of a file with their dotted names."""
    if any(part.startswith("_") and part != "__init__.py" for part in source.path.split("/")):
        return
    for node in source.tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def missing_sections(name: str, node: Function | ast.ClassDef) -> list[str]:
    """Finds what the docstring of a public name lacks.

    Args:
        name: Its dotted name.
        node: Its definition.

    Returns:
        Of "docstring", "Args", "Returns" and "Raises" those that are wanted and missing. A function wants `Args` for
        two or more arguments, `Returns` (or `Yields`) where its annotation names a value, and `Raises` where its own
        body raises. One argument may be explained by the summary line. A property wants its summary line alone.
    """
    text = ast.get_docstring(node)
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    if "overload" in decorators:  # the function behind its overloads holds the docstring
        return []
    if text is None:
        return ["docstring"]
    if isinstance(node, ast.ClassDef) or "property" in decorators:
        return []
    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    given = [a for a in given if a not in ("self", "cls")]
    raises = any(isinstance(inner, ast.Raise) and inner.exc is not None for inner in ast.walk(node))
    returns = node.returns is not None and ast.unparse(node.returns) not in ("None", "Never", "NoReturn")
    wanted = {"Args:": len(given) > 1, "Returns:": returns and len(given) > 1, "Raises:": raises}
    has = {"Returns:": "Returns:" in text or "Yields:" in text}
    return [name[:-1] for name, want in wanted.items() if want and not has.get(name, name in text)]


def exported(found: list[Source]) -> set[tuple[str, str]]:
    """Reads which (file, name) `mercury_jax/__init__.py` exports, from its table of modules and names."""
    table = next(
        ast.literal_eval(node.value)
        for source in found
        if source.path == "__init__.py"
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC"
    )
    return {(f"{module.replace('.', '/')}.py", name) for module, names in table.items() for name in names}


def counts(found: list[Source]) -> dict[str, float]:
    """Counts a package.

    Args:
        found: Its files, from `sources`.

    Returns:
        Each count by name; shares are between 0 and 1.
    """
    lines = [source.lines for source in found if source.lines > 0]
    defined = sum(len(list(functions(source))) for source in found)
    code = sum(map(code_lines, found))
    comments = sum(map(comment_lines, found))
    return {
        "files": len(found),
        "lines": sum(lines),
        "code_lines": code,
        "median_lines": statistics.median(lines),
        "longest": max(lines),
        "functions": defined,
        "functions_per_1000_code_lines": round(1000 * defined / code, 1),
        "comment_share": round(comments / (code + comments), 4),
        "public": sum(len(list(public(source))) for source in found),
        "undocumented": len(undocumented(found)),
        "class_names_twice": len(twice(classes(found))),
        "file_names_twice": len(twice(files(found))),
    }


def undocumented(found: list[Source]) -> list[str]:
    """Lists what lacks documentation, as `path: name: what`.

    Names that users import have whole docstrings, and so have Protocols; all others have a docstring.
    """
    names = exported(found)
    lacking = []
    for source in found:
        whole = source.path.startswith(REACHED)
        protocols = {
            node.name
            for node in source.tree.body
            if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        }
        for name, node in public(source):
            top = name.split(".")[0]
            reached = whole or top in protocols or (source.path, top) in names
            if lacks := [one for one in missing_sections(name, node) if reached or one == "docstring"]:
                lacking.append(f"{source.path}: {name}: {', '.join(lacks)}")
    return lacking


def classes(found: list[Source]) -> dict[str, list[str]]:
    """Maps each class name to the files that define it."""
    by: dict[str, list[str]] = collections.defaultdict(list)
    for source in found:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                by[node.name].append(source.path)
    return by


def files(found: list[Source]) -> dict[str, list[str]]:
    """Maps each file name, `__init__.py` apart, to the paths that have it."""
    by: dict[str, list[str]] = collections.defaultdict(list)
    for source in found:
        if not source.path.endswith("__init__.py"):
            by[source.path.rpartition("/")[2]].append(source.path)
    return by


def twice(by: dict[str, list[str]]) -> dict[str, list[str]]:
    """Keeps the names that stand for more than one thing."""
    return {name: paths for name, paths in sorted(by.items()) if len(paths) > 1}


def main() -> None:
    """Prints the counts, one a line or as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the package's folder (default: mercury_jax)")
    parser.add_argument("--list", action="store_true", help="print the names behind the counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = sources(args.root)
    totals = counts(found)
    if args.json:
        print(json.dumps(totals))
        return
    for name, value in totals.items():
        print(f"{name:28s} {value:g}")
    if args.list:
        print("\nlonger than 600 lines or shorter than 80:")
        for source in found:
            if source.lines > 600 or 0 < source.lines < 80:
                print(f"  {source.lines:5d} {source.path}")
        for title, by in (("class names twice", classes(found)), ("file names twice", files(found))):
            print(f"\n{title}:")
            for name, paths in twice(by).items():
                print(f"  {name}: {', '.join(paths)}")
        print("\nundocumented:", *undocumented(found), sep="\n  ")


if __name__ == "__main__":
    main()
