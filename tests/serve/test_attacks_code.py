"""Attacks prevented by what the code never does: unpickle, trust a URL, install a malicious package.

The list is in test_attacks.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dotted(node):
    """Returns `a.b.c` for a chain of attributes; only the attributes where it does not begin with a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


UNPICKLE = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


def _named(call):
    """Returns the package named by the first argument of a call."""
    first = call.args[0] if call.args else None
    return str(first.value).split(".")[0] if isinstance(first, ast.Constant) else ""


def offences(source, path="x.py"):
    """Finds what no file may do: unpickle, evaluate, trust a checkpoint's code, build a template environment."""
    tree, found = ast.parse(source), []
    own = path == "hub/chat_template.py"
    for name in imported(tree):
        top = name.split(".")[0]
        if top in UNPICKLE or name in ("torch.load", "torch.serialization", "pandas.read_pickle"):
            found.append(f"13: imports {name}")
        if top == "jinja2" and not own:
            found.append(f"12: imports {name}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, words = dotted(call.func), {word.arg: word.value for word in call.keywords}
        if name in ("eval", "exec") or name.endswith(("torch.load", ".read_pickle")):
            found.append(f"13: calls {name}")
        if name.endswith(("__import__", "import_module")) and _named(call) in UNPICKLE:
            found.append(f"13: calls {name} of {_named(call)}")
        if "allow_pickle" in words and getattr(words["allow_pickle"], "value", True) is not False:
            found.append("13: allows pickles")
        if "trust_remote_code" in words or name.endswith("get_class_from_dynamic_module"):
            found.append(f"14: {name} trusts a checkpoint's code")
        if name.split(".")[-1] in ("Environment", "SandboxedEnvironment", "NativeEnvironment") and not own:
            found.append(f"12: makes a template environment by {name}")
    return found


@pytest.mark.long
def test_12_13_14_no_file_unpickles_evaluates_or_builds_a_template():
    package = ROOT / "mercury_jax"
    found = {
        path: offences(path.read_text(), path.relative_to(package).as_posix())
        for path in package.rglob("*.py")
    }
    assert len(found) > 100 and {path: bad for path, bad in found.items() if bad} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(text)",
     "AutoModel.from_pretrained(x, trust_remote_code=flag)", "from jinja2 import Template", "x = jinja2.Environment()",
     "from torch import load", "__import__('dill')", "importlib.import_module('pickle')", "exec(text)"],
)  # fmt: skip
def test_12_13_14_the_search_finds_offences(source):
    assert offences(source) != []


def addresses(source):
    """Finds uses of a request's URL, which Starlette builds from Host and path."""
    names = ("url", "base_url", "url_for", "host", "hostname", "netloc")
    tree = ast.parse(source)
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    return [f"{node.lineno}: {dotted(node)}" for node in asked]


def test_01_02_no_decision_depends_on_the_url():
    """CVE-2026-48710 and CVE-2026-54282: with a crafted Host or path, the URL was not the one that was routed."""
    files = list((ROOT / "mercury_jax" / "serve").rglob("*.py"))
    assert len(files) > 30
    assert {path: found for path in files if (found := addresses(path.read_text()))} == {}
    for bad in ("Request(scope).url.path", "request.base_url", "request.url.hostname", "str(request.url)"):
        assert addresses(bad)


# Malicious versions, and the first versions without known vulnerabilities.
POISONED = {"litellm": {"1.82.7", "1.82.8"}}
LEAST = {"starlette": (1, 0, 1), "jinja2": (3, 1, 6)}
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.+-]*)(?: ; [^;]+?)?(?: +--hash=sha256:[0-9a-f]{64})*")


def wrong_pins(text):
    """Returns the lines of a list of packages that pin no single version, a malicious one, or a vulnerable one."""
    bad = []
    text = re.sub(r" *\\\n *", " ", text)  # a requirement with its hashes takes several lines
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        found = PIN.fullmatch(line)
        name, version = (found[1].lower(), found[2]) if found else ("", "")
        old = name in LEAST and tuple(map(int, version.split("."))) < LEAST[name]
        if not found or version in POISONED.get(name, ()) or old:
            bad.append(line)
    return bad


def test_01_26_packages_are_pinned_to_safe_versions():
    lists = [*ROOT.glob("constraints/*.txt"), *(ROOT / "qa").rglob("requirements*.txt")]
    assert {path.name for path in lists} >= {"default.txt", "newest.txt"}
    for path in lists:
        assert len(path.read_text().splitlines()) > 5 and wrong_pins(path.read_text()) == [], path.name
    for bad in (
        "litellm==1.82.7",
        "LiteLLM==1.82.8",
        "litellm",
        "a>=1",
        "a==1.*",
        "starlette==1.0.0",
        "-r x.txt",
        "starlette==1.0.0 --hash=sha256:" + 64 * "0",
        "a>=1 ; sys_platform == 'win32'",
    ):
        assert wrong_pins(bad) == [bad]


def test_01_26_declared_dependencies_exclude_vulnerable_versions():
    """Holds also for installations without the constraint files."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *declared["dependencies"],
        *(x for extra in declared["optional-dependencies"].values() for x in extra),
    ]
    assert len(wanted) > 30
    for name, least in LEAST.items():
        asked = [text for text in wanted if re.match(rf"{name}\b", text, re.IGNORECASE)]
        floors = [re.fullmatch(rf"{name}>=([0-9.]+)", text, re.IGNORECASE) for text in asked]
        assert floors and all(found and tuple(map(int, found[1].split("."))) >= least for found in floors)
    asked = [text for text in wanted if text.startswith("litellm")]
    assert all(f"!={version}" in text for text in asked for version in POISONED["litellm"])
