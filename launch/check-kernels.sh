#!/bin/bash
# launch/check-kernels.sh     see launch/README.md
# Checks the kernels of this accelerator once, before a job trains or serves: a kernel that was not checked on this kind
# of device, with this JAX and these sources, is not used. The results are kernels.json in MERCURY_CACHE, or the file
# that MERCURY_KERNEL_CHECKS names. Where they are complete, or no kernel is written for the device, it ends at once.
#   BUDGET   seconds that the check may take   default: 1800
# The exit code is always 0: without the check a job is slower, and not wrong.
set -uo pipefail

needed() {
  mercury info --json | python3 -c '
import json, sys
kernels = json.load(sys.stdin)["kernels"]
checked = bool(kernels["on"] or kernels["off"])
stopped = any("not completed" in why for why in kernels["off"].values())  # an earlier check was interrupted
sys.exit(kernels["chip"] is None or kernels["file"] is None or (checked and not stopped))'
}

if needed; then
  echo "check-kernels: checking for up to ${BUDGET:-1800} s" >&2
  mercury bench gpu check --budget "${BUDGET:-1800}" >&2 ||
    echo "check-kernels: kernels that did not pass are not used" >&2
else
  echo "check-kernels: nothing to check here" >&2
fi
exit 0
