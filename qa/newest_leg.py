"""The second leg of CI: on the newest JAX, lower kernels, interpret tcgen05, train ten steps, resume, and sample.

Run as a script, without pytest, so that this leg needs the core dependencies only.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mercury_jax as mj
from mercury_jax.bench import compile as bench_compile
from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.ops import attend, device as kernel_device
from mercury_jax.ops.attention import blackwell
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig

CARDS = {kernel_device.HOPPER: "NVIDIA H100 80GB HBM3", kernel_device.BLACKWELL: "NVIDIA B200"}


def recipe(out: str) -> mj.TrainConfig:
    return mj.TrainConfig(
        name="newest",
        model=mj.ModelConfig(vocab=400, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64, block=16),
        objective=masked_elbo(),
        data=data.mixture((data.stdlib(), 0.8), (data.generated("sudoku4"), 0.1), (data.generated("add3"), 0.1)),
        optim=OptimConfig(lr=1e-2, warmup=2),
        steps=10, batch=4, row=96, eval_every=10, eval_batches=1, save_every=5, out=out,
        sample_every=10, sample_prompts=("1+2=",), sample_chat=True,
    )  # fmt: skip


def tcgen05() -> float:
    """The Blackwell kernel's error, tensor memory and its products interpreted, which older interpreters cannot do.

    Of the size of its largest output; RuntimeError where two of its threads race.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, h, 64)) for n, h in ((40, 4), (400, 1), (400, 1)))
    ranges = np.zeros((1, 40, 2, 2), np.int32)
    ranges[:, :, 0], ranges[0, :, 1, 0], ranges[0, :, 1, 1] = (3, 250), 300, 301 + np.arange(40)
    ranges[:, -1] = 0
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    want = attend(*exact, jnp.asarray(ranges), scale=0.125, backend="reference")
    blackwell.PROCESSORS = 1  # several tiles of keys a program, two of rows
    assert hasattr(blackwell.gpu_callbacks, "tcgen05_mma"), "this interpreter has no tcgen05"
    device = interpreted(kernel_device.BLACKWELL, detect_races=True)
    k, v = (x.at[:, 270:300].set(jnp.nan).at[:, 340:].set(jnp.nan) for x in (k, v))  # which nobody sees
    got = jax.jit(lambda *xs: attend(*xs, scale=0.125, backend="blackwell", device=device))(q, k, v, ranges)
    assert not np.asarray(got[:, -1], np.float32).any(), "a row without keys is not 0"
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def lowered(name: str, every: int = 9) -> int:
    """How many forms of kernels this JAX lowers for a chip, of every ninth; no GPU and no compiler is needed."""
    count = 0
    chip = jax.sharding.AbstractDevice(
        device_kind=CARDS[name], num_cores=None, platform="gpu"
    )  # Triton asks for it
    mesh = jax.sharding.AbstractMesh((1,), ("one",), (jax.sharding.AxisType.Explicit,), abstract_device=chip)
    for form in bench_compile.forms(name)[::every]:
        with jax.sharding.use_abstract_mesh(mesh):
            try:
                traced = jax.jit(form.check.kernel).trace(*form.check.like)
            except ValueError:  # there is no such form, as `refuses` says
                continue
            traced.lower(lowering_platforms=("cuda",))
        count += 1
    return count


def main() -> int:
    for name in (kernel_device.HOPPER, kernel_device.BLACKWELL):
        assert lowered(name) >= 8, name
    error = tcgen05()
    assert error < 1e-2, error
    with tempfile.TemporaryDirectory() as folder:
        config = recipe(folder)
        result = mj.train(config)
        assert result.step == 10 and np.isfinite(result.metrics["loss"]), result
        again = mj.train(dataclasses.replace(config, steps=12, resume=True))
        assert again.step == 12, again
        lm = mj.load(Path(folder) / "model")
        out = mj.sample(
            lm, [[{"role": "user", "content": "1+2="}], [{"role": "user", "content": "30+4="}]], max_tokens=20
        )
        assert len(out.texts) == 2 and (out.forwards > 0).all(), out
    nano = mj.load()
    out = mj.sample(nano, [{"role": "user", "content": "0200\n4302\n3401\n0004"}], max_tokens=32)
    assert out.lengths[0] > 0, out
    print(f"jax {jax.__version__} on Python {sys.version.split()[0]}: trained, resumed, sampled {out.text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
