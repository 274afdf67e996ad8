# shellcheck shell=bash
# Sourced by the scripts beside it, in the folder of the clone.
#   VENV   the environment, without a container                   default: .venv
#   IMAGE  an image for Pyxis: REGISTRY#PROJECT/NAME:TAG, or a .sqsh file
#   SIF    an image for Apptainer: a .sif file
#   BINDS  more folders that the container sees: /data,/scratch
# MERCURY_CACHE holds compiled programs and the results of the kernel check, HF_HOME holds weights and tokens of the
# hub. Both must lie on a file system that all nodes share.
# `on_node` is what `srun` needs for a task that has a node, `inside` is what a command begins with.
export MERCURY_CACHE=${MERCURY_CACHE:-$PWD/runs/cache} HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
mkdir -p "$MERCURY_CACHE" "$HF_HOME"

# Since Slurm 22.05 a step does not have the --cpus-per-task of its job, and a task would run on one CPU.
cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:?this script runs under sbatch}}
on_node=(--cpus-per-task="$cpus")
inside=()

folders=$PWD,$MERCURY_CACHE,$HF_HOME${BINDS:+,$BINDS}
if [ -n "${IMAGE:-}" ]; then
  mounts=$(sed -E 's/([^,]+)/\1:\1/g' <<<"$folders")
  # --container-env: the image sets these variables too, and its values would win.
  on_node+=(
    --container-image="$IMAGE" --no-container-entrypoint --container-mounts="$mounts" --container-workdir="$PWD"
    "--container-env=MERCURY_CACHE,HF_HOME"
  )
elif [ -n "${SIF:-}" ]; then
  inside=(
    apptainer exec --nv --bind "$folders" --pwd "$PWD"
    --env "MERCURY_CACHE=$MERCURY_CACHE,HF_HOME=$HF_HOME" "$SIF"
  )
else
  # shellcheck disable=SC1091 # made by launch/setup.sh
  source "${VENV:-.venv}/bin/activate"
fi

# The first job on a kind of GPU checks the kernels, on one node.
srun --nodes=1 --ntasks=1 "${on_node[@]}" "${inside[@]}" launch/check-kernels.sh
