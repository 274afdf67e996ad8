"""Attacks that come with code: pickles, templates, what a checkpoint names, packages. The list is in test_attacks."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def dotted(node):
    """`a.b.c` of a name and its attributes; the last attribute alone where something else stands before it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# No offence can be spelt without one of these: the other files need no parsing.
WORDS = re.compile(
    r"pickle|dill|shelve|marshal|joblib|jinja2|\b(eval|exec)\b|torch|trust_remote|dynamic_module|Environment"
)


def offences(source, path="x.py"):
    """What no file of the package may do: unpickle, evaluate, trust a checkpoint's code, make a bare template."""
    tree, found = ast.parse(source), []
    own = path.startswith("hub/sandbox/") or path == "hub/template.py"
    for name in imported(tree):
        top = name.split(".")[0]
        if top in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"):
            found.append(f"13: imports {name}")
        if top == "jinja2" and not own:
            found.append(f"12: imports {name}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, words = dotted(call.func), {word.arg: word.value for word in call.keywords}
        if name in ("eval", "exec") or name.endswith(("torch.load", ".read_pickle")):
            found.append(f"13: calls {name}")
        if "allow_pickle" in words and getattr(words["allow_pickle"], "value", True) is not False:
            found.append("13: allows pickles")
        if "trust_remote_code" in words or name.endswith("get_class_from_dynamic_module"):
            found.append(f"14: {name} trusts a checkpoint's code")
        if name.split(".")[-1] in ("Environment", "SandboxedEnvironment", "NativeEnvironment") and not own:
            found.append(f"12: makes a template environment by {name}")
    return found


def test_12_13_14_no_file_unpickles_evaluates_or_makes_a_template():
    package = ROOT / "mercury_jax"
    found = {
        path: offences(path.read_text(), path.relative_to(package).as_posix())
        for path in package.rglob("*.py")
    }
    assert len(found) > 100 and {path: bad for path, bad in found.items() if bad} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(text)",
     "AutoModel.from_pretrained(x, trust_remote_code=flag)", "from jinja2 import Template", "x = jinja2.Environment()"],
)  # fmt: skip
def test_12_13_14_the_search_finds_them(source):
    assert offences(source) != [] and WORDS.search(source)


def test_26_every_package_is_pinned_and_none_of_the_poisoned_ones_is():
    poisoned = {"litellm": {"1.82.7", "1.82.8"}}
    for name in ("constraints.txt", "constraints-newest.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        pins = [line.split("==") for line in lines if line]
        assert len(pins) > 20 and all(len(pin) == 2 for pin in pins)
        assert not [pin for pin in pins if pin[1] in poisoned.get(pin[0].lower(), ())]
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(f"!={version}" in declared for version in poisoned["litellm"]) or "litellm" not in declared
