"""What the wheel and the source distribution hold, and what messages say about missing extras."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A build writes into the folder that it builds, so it builds a copy; what git ignores and tests/ is not needed for it.
PARTS = ("mercury_jax", "configs", "constraints", "launch", "colab")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("build")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, folder)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    [wheel], [source] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, source


def files(*parts: str) -> set[str]:
    found = [path for part in parts for path in (ROOT / part).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_wheel_holds_the_recipes_the_model_and_every_module(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert {f"mercury_jax/{name}" for name in files("configs")} <= names
    assert files("mercury_jax") <= names


def test_the_source_distribution_holds_what_the_commands_of_the_readme_name(built):
    with tarfile.open(built[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert files(*PARTS) <= names
    assert {"Makefile", "README.md", "setup.py"} <= names


def test_the_unpacked_wheel_writes_a_recipe_where_no_clone_is_at_hand(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if name.endswith(".py")])
    command = [sys.executable, "-m", "mercury_jax", "init", "mine.py"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, "mine.py\n"), said.stderr
    assert 'name="mine"' in (tmp_path / "mine.py").read_text()


def pinned(file: str) -> dict[str, str]:
    """The versions in a file of `constraints/`."""
    lines = (line.partition("==") for line in (ROOT / "constraints" / file).read_text().splitlines())
    return {
        name.lower().replace("_", "-"): version.partition(" ")[0] for name, _, version in lines if version
    }


SERVE = """
import sys
sys.modules["uvicorn"] = None
from mercury_jax.cli import main
sys.exit(main(["serve"]))
"""
FOLDER = {"url": "file:///FOLDER", "dir_info": {}}
GIT = {"url": "https://git.example/a/mercury_jax.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}
TAG = GIT | {"vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "0" * 40}}
WHEEL = {"url": "https://files.example/mercury_jax-0.1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.long
@pytest.mark.parametrize(
    "direct, command",
    [("clone", f"pip install -e '{ROOT}[serve]'"), (FOLDER, "pip install 'FOLDER[serve]'"),
     (GIT, "pip install 'mercury-jax[serve] @ git+https://git.example/a/mercury_jax.git'"),
     (TAG, "pip install 'mercury-jax[serve] @ git+https://git.example/a/mercury_jax.git@v1'"),
     (WHEEL, f"pip install 'mercury-jax[serve] @ {WHEEL['url']}'"),
     (None, "pip install '.[serve]' in the folder that holds mercury_jax's pyproject.toml")],
    ids=["clone", "folder", "git", "git tag", "wheel", "unknown"],
)  # fmt: skip
def test_a_message_about_a_missing_extra_names_how_this_installation_was_made(direct, command, tmp_path):
    folder, site = tmp_path / "a folder", tmp_path / "site"
    (site / "mercury_jax-0.1.0.dist-info").mkdir(parents=True)
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    if direct == "clone":
        site = ROOT
    else:
        (site / "mercury_jax").symlink_to(ROOT / "mercury_jax")
        (site / "mercury_jax-0.1.0.dist-info" / "METADATA").write_text("Name: mercury-jax\nVersion: 0.1.0\n")
        if direct is not None:
            told = json.dumps(direct).replace("file:///FOLDER", folder.as_uri())
            (site / "mercury_jax-0.1.0.dist-info" / "direct_url.json").write_text(told)
    env = os.environ | {"PYTHONPATH": str(site)}
    said = subprocess.run(
        [sys.executable, "-c", SERVE], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 2 and command.replace("FOLDER", str(folder)) in said.stderr


@pytest.mark.long
def test_loading_and_sampling_import_no_module_that_windows_lacks(tmp_path):
    program = """
import sys
for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None  # an import of it fails, as on Windows
import mercury_jax as mj
print(mj.sample(mj.load(), "import ", max_tokens=4).lengths)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[4]\n"), done.stderr


@pytest.mark.long
def test_a_folder_of_the_same_name_does_not_hide_the_installation(tmp_path):
    """Who cloned the repository starts Python beside the clone as often as in it."""
    (tmp_path / "mercury_jax").mkdir()
    program = "import mercury_jax as mj; print(mj.load().name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nano\n"), done.stderr


def test_a_dependency_may_be_one_minor_version_newer_than_the_newest_that_is_tested():
    newest = pinned("newest.txt")
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        found = re.fullmatch(r"([\w-]+)>=[\d.]+,<(\d+)\.(\d+)", requirement)
        assert found, requirement
        major, minor = map(int, newest[found[1]].split(".")[:2])
        assert (int(found[2]), int(found[3])) == (major, minor + 2), requirement


def test_every_pinned_version_of_an_installation_has_hashes():
    versions = pinned("default.txt")
    text = (ROOT / "constraints/hashed.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==([^ ]+)(.*(?:\n    .*)+)", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^\w", text, re.MULTILINE)) > 60
    for name, version, rest in entries:
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", rest)) >= 1, name
        # Those that only another platform or Python needs are not in the environment that default.txt describes.
        if name in versions or ";" not in rest:
            assert versions[name] == version, f"{name}: run `make hashes`"
    assert "://" not in text  # from whichever index the user has


@pytest.mark.parametrize("kind", ["cuda12", "tpu"])
def test_packages_of_an_accelerator_have_hashes_and_go_with_the_others(kind):
    text, versions = (ROOT / f"constraints/hashed-{kind}.txt").read_text(), pinned("default.txt")
    entries = re.findall(
        r"^([\w.-]+)==([^ ]+).*(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\\\)?)+", text, re.MULTILINE
    )
    assert len(entries) == len(re.findall(r"^\w", text, re.MULTILINE)) > 1 and "://" not in text
    for name, version in entries:
        assert name not in pinned("hashed.txt"), name
        if name in versions or name.startswith("jax-"):
            assert version == versions["jax" if name.startswith("jax-") else name], (
                f"{name}: run `make hashes`"
            )
