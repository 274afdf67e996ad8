#!/bin/bash
# launch/tpu/queued-resources.sh configs/RECIPE.py [overrides]     see launch/README.md
# Asks for a TPU pod slice, waits until it is there, installs this clone on every host, and trains on all of them.
#   NAME         name of the slice                      default: mercury
#   ZONE         such as us-east5-a                     required
#   TYPE         such as v5litepod-16, v5p-32 or v6e-64 required
#   RUNTIME      version of the TPU software            default: the one of the type
#   NFS          HOST:/SHARE of a Filestore, for /runs  required
#   HF_TOKEN     token for gated models of the hub
#   SPOT=1       a slice that may be taken away
#   KEEP=1       do not delete the slice at the end
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: ZONE=... TYPE=... NFS=... launch/tpu/queued-resources.sh configs/RECIPE.py [overrides]" >&2
  exit 2
fi
name=${NAME:-mercury}
zone=${ZONE:?such as us-east5-a} type=${TYPE:?such as v5p-32} nfs=${NFS:?HOST:/SHARE of a Filestore}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

case $type in
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;; # v5e
  *) runtime=tpu-ubuntu2204-base ;;
esac
flags=(--zone="$zone" --node-id="$name" --accelerator-type="$type" --runtime-version="${RUNTIME:-$runtime}")
if [ "${SPOT:-}" = 1 ]; then flags+=(--spot); fi
gcloud compute tpus queued-resources create "$name" "${flags[@]}"
if [ "${KEEP:-}" != 1 ]; then
  trap 'gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet' EXIT
fi

while true; do
  state=$(gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format="value(state.state)")
  case $state in
    ACTIVE) break ;;
    FAILED | SUSPENDING | SUSPENDED | DELETING) echo "$name is $state" >&2; exit 1 ;;
  esac
  echo "$name is $state; waiting" >&2
  sleep "${POLL:-30}"
done

on_all_hosts() { # command
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

send() { # file, its name on the hosts
  gcloud compute tpus tpu-vm scp "$1" "$name":"$2" --zone="$zone" --worker=all
  rm -f "$1"
}

archive=$(mktemp)
git archive --format=tar.gz --output="$archive" HEAD
send "$archive" mercury.tar.gz
if [ -n "${HF_TOKEN:-}" ]; then # as a file: other users of a host see the words of a command
  token=$(mktemp)
  printf %s "$HF_TOKEN" >"$token"
  send "$token" hf-token
fi
on_all_hosts "sudo mkdir -p /runs && { mountpoint -q /runs || sudo mount -t nfs -o vers=3 '$nfs' /runs; }"
on_all_hosts "mkdir -p mercury && tar -xzf mercury.tar.gz -C mercury && mercury/launch/setup.sh tpu"

# JAX finds the other hosts of the slice by itself. `printf %q` carries the words through the remote shell as they are.
on_all_hosts "cd mercury && MERCURY_CACHE=/runs/cache HF_HOME=/runs/huggingface HF_TOKEN_PATH=~/hf-token \\
  .venv/bin/mercury train $(printf '%q ' "$@") --distributed --resume"
