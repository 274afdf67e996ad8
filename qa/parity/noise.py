"""The noise that `mj.sample` draws, for the reference to use in the place of its own.

A canvas is keyed by the row's seed, the block's start and the step (decode/state.py, `step_key`), so every
number can be drawn beforehand. jax draws other bits for 64-bit types, hence one set for each precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import noise
from mercury_jax.decode.state import step_key


def drawn(
    bits: int, *, vocab: int, length: int, prompt: int, seeds: list[int], canvases: int, steps: int
) -> dict[str, np.ndarray]:
    """first [C, B, L] ids, uniforms [C, N, B, L], fresh [C, N, B, L] ids; as decode/machine.py and row.py draw.

    bits: 32, or 64 for what is drawn under `jax.enable_x64`.
    """
    with jax.enable_x64(bits == 64):
        prior = noise.uniform(vocab).prior
        level = jnp.ones((length,), jnp.float32)  # the uniform prior asks for its shape only

        def block(seed: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
            key = jax.random.key(seed)
            first = prior(step_key(key, start, jnp.asarray(-1)), level)

            def one(step: jax.Array) -> tuple[jax.Array, jax.Array]:
                draw, refill, _ = jax.random.split(step_key(key, start, step), 3)
                return jax.random.uniform(draw, (length,)), prior(refill, level)

            return first, *jax.vmap(one)(jnp.arange(steps, dtype=jnp.int32))

        rows = jax.vmap(block, in_axes=(0, None))
        starts = prompt + length * jnp.arange(canvases, dtype=jnp.int32)
        first, uniforms, fresh = jax.jit(jax.vmap(rows, in_axes=(None, 0)))(
            jnp.asarray(seeds, jnp.int32), starts
        )
        swap = lambda x: np.asarray(jnp.swapaxes(x, 1, 2))  # the steps before the rows
        return dict(first=np.asarray(first), uniforms=swap(uniforms), fresh=swap(fresh))
