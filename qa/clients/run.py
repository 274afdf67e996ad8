"""`python -m qa.clients.run ENVIRONMENTS`: clients that were written for others, against one server of ours.

ENVIRONMENTS is the folder that `make clients` fills: `openai3/`, `openai2/`, `agents/` and `node/`. One process serves
nano for all of them; at the end it is drained, and that it ends with 0 is checked too. Names behind the folder
(openai3, openai2, agents, node) run these alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from qa.clients.served import COMMAND, serving

HERE = Path(__file__).resolve().parent
# Three environments: litellm and instructor ask for version 2 of openai's client and pydantic-ai for 3, and
# openai-agents for an older websockets than openai3 has.
PYTHON = {
    "openai3": ("openai", "openai_limits", "inceptionai", "decisions", "langchain", "pydantic_ai"),
    "openai2": ("openai", "openai_limits", "litellm", "instructor"),
    "agents": ("openai_responses", "openai_agents", "anthropic"),
}
# Two slots and room for two more: few enough that a burst of requests is refused.
FLAGS = ("--slots", "2", "--queue", "2")


def main() -> int:
    folder, *names = sys.argv[1:]
    root = Path(folder).resolve()
    failed: list[str] = []
    with serving(*FLAGS) as server:
        server.wait("/ready")
        settings = {**os.environ, "MERCURY_URL": server.url, "MERCURY": shlex.join(COMMAND)}
        for name in names or [*PYTHON, "node"]:
            print(f"\n--- {name}", flush=True)
            words = _node(root) if name == "node" else _pytest(root, name)
            if subprocess.run(words, env=settings, cwd=HERE.parents[1], check=False).returncode:
                failed.append(name)
        if server.end() != 0:
            failed.append("the server's end")
    print(f"\nclients: {', '.join(failed) + ' failed' if failed else 'all passed'}")
    return int(bool(failed))


def _pytest(root: Path, name: str) -> list[str]:
    python = str(root / name / "bin" / "python")
    files = [str(HERE / f"test_{client}.py") for client in PYTHON[name]]
    # The suite's own conftest chooses JAX's platform and has no business here.
    return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={HERE}", *files]


def _node(root: Path) -> list[str]:
    """Modules are found beside the files that import them, so these are copied to where the modules are."""
    files = sorted((HERE / "node").glob("*.mjs"))
    for file in files:
        shutil.copy(file, root / "node")
    tests = [str(root / "node" / file.name) for file in files if file.name.endswith(".test.mjs")]
    # One file after the other: a burst of one must not meet the stream of another.
    return ["node", "--test", "--test-concurrency=1", "--test-reporter=spec", *tests]


if __name__ == "__main__":
    sys.exit(main())
