"""A worker of `mercury bench gpu` whose kernels fail as they may on a chip, each head size in another way.

Run as a script by tests/bench/test_bench_gpu.py; what to break is in MERCURY_BREAK, as {head size: how}.
"""

import json
import os
import sys
import time

import jax.numpy as jnp

from mercury_jax.bench.gpu import runner
from mercury_jax.ops.attention import xla


def run(call):
    """Attention in plain jnp with one fault."""
    fault = json.loads(os.environ["MERCURY_BREAK"]).get(str(call.q.shape[-1]))
    if fault == "crash":
        os.abort()
    if fault == "hang":
        time.sleep(600)
    if fault == "error":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    # As after an earlier case that damaged the process.
    if fault == "once" and not os.path.exists(os.environ["MERCURY_ONCE"]):
        open(os.environ["MERCURY_ONCE"], "w").close()
        raise RuntimeError("only here")
    out, nats = xla.run_reference(call._replace(k=jnp.nan_to_num(call.k), v=jnp.nan_to_num(call.v)))
    if fault == "nan":
        out = out.at[0, 0].set(jnp.nan)
    if fault == "wrong":
        out = out.at[0, 1, 0].multiply(1.1)
    return out, nats


if __name__ == "__main__":
    from mercury_jax.ops.attention import hopper

    hopper.run = run
    sys.exit(runner.main())
