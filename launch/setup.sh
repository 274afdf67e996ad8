#!/bin/bash
# launch/setup.sh cuda12|tpu     see launch/README.md
# Makes .venv of this clone with Python 3.12, whatever Python the machine has: `uv` fetches one where there is none.
# Every package is installed by its hash, the same ones as in the image of launch/gke/Dockerfile.
#   VENV   another folder than .venv
set -euo pipefail
accelerator=${1:-}
if [ "$accelerator" != cuda12 ] && [ "$accelerator" != tpu ]; then
  echo "usage: launch/setup.sh cuda12|tpu" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$HOME/.local/bin:$PATH # where pip installs the commands of a user
if ! command -v uv >/dev/null; then python3 -m pip install --quiet --user 'uv>=0.9'; fi

venv=${VENV:-.venv}
uv venv --quiet --allow-existing --python 3.12 "$venv"
install=(uv pip install --quiet --python "$venv/bin/python")
"${install[@]}" --require-hashes -r constraints/hashed.txt -r "constraints/hashed-$accelerator.txt"
"${install[@]}" --no-deps --no-build-isolation --editable .
