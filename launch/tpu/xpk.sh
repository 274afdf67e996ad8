#!/bin/bash
# launch/tpu/xpk.sh configs/RECIPE.py [overrides]     see launch/README.md
# Trains on TPU slices of a GKE cluster that `xpk cluster create` made.
#   CLUSTER   the cluster                                required
#   ZONE      its zone                                   required
#   PROJECT   its project                                required
#   TYPE      such as v5litepod-16, v5p-32 or v6e-64     required
#   IMAGE     an image of this repository for TPUs       required
#   STORAGE   the xpk storage that is mounted at /runs   required
#   SLICES    slices of that type                        default: 1
#   NAME      name of the workload                       default: mercury
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: CLUSTER=... ZONE=... PROJECT=... TYPE=... IMAGE=... STORAGE=... launch/tpu/xpk.sh RECIPE [overrides]" >&2
  exit 2
fi

# JAX finds the other hosts by itself. A host that is lost restarts the workload, which continues from its last
# checkpoint; bad input (2) and a loss that is NaN (3) do not.
exec xpk workload create \
  --workload="${NAME:-mercury}" \
  --cluster="${CLUSTER:?the cluster}" \
  --zone="${ZONE:?its zone}" \
  --project="${PROJECT:?its project}" \
  --tpu-type="${TYPE:?such as v5p-32}" \
  --num-slices="${SLICES:-1}" \
  --docker-image="${IMAGE:?an image of this repository for TPUs}" \
  --storage="${STORAGE:?an xpk storage that is mounted at /runs}" \
  --max-restarts=10 \
  --restart-on-exit-codes=1,5 \
  --termination-grace-period-seconds=300 \
  --env=MERCURY_CACHE=/runs/cache \
  --env=HF_HOME=/runs/huggingface \
  --command="mercury train $(printf '%q ' "$@") --distributed --resume"
