"""The choice of experts, interpreted on a CPU: the k most probable ones, as the plain computation chooses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels.device import target
from mercury_jax.kernels.interpreter import interpreted
from mercury_jax.kernels.routing import kernel_route, refuses_route, route


@pytest.mark.long
@pytest.mark.parametrize("experts, active", [(128, 8), (256, 3)])
def test_the_kernel_chooses_the_most_probable_experts(experts, active):
    rng = np.random.default_rng(experts)
    logits = np.round(rng.normal(size=(2, 3, experts)) * 4, 1).astype(np.float32)  # rounded: many are equal
    logits[0, 1] = 0.0  # all are equal: the first k
    logits[1, 2] = 80.0 * logits[1, 2]  # one has nearly all of the probability
    factors = jnp.asarray(rng.uniform(0.5, 2.0, experts), jnp.bfloat16 if active == 3 else jnp.float32)
    ids, weights = jax.jit(lambda: kernel_route(jnp.asarray(logits), factors, active, 0.5, interpreted()))()
    want_ids, want = route(jnp.asarray(logits), factors, active, 0.5)
    np.testing.assert_allclose(weights, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ids[0], want_ids[0])
    np.testing.assert_array_equal(ids[0, 1], np.arange(active))


def test_a_token_with_nan_chooses_no_expert():
    logits = jnp.zeros((2, 128)).at[0, 5].set(jnp.nan)
    ids, weights = jax.jit(lambda: kernel_route(logits, jnp.ones(128), 2, device=interpreted()))()
    assert (np.asarray(ids[0]) == 128).all() and np.isnan(weights[0]).all()
    np.testing.assert_array_equal(ids[1], [0, 1])
    np.testing.assert_allclose(weights[1], 0.5)


def test_the_kernel_names_what_it_refuses():
    logits, hopper = jax.ShapeDtypeStruct((4, 128), jnp.float32), target("sm_90a")
    assert refuses_route(logits, 8, hopper) is None
    assert "sm_90a" in str(refuses_route(logits, 8))
    assert "60 experts" in str(refuses_route(jax.ShapeDtypeStruct((4, 60), jnp.float32), 8, hopper))
    assert "bfloat16" in str(refuses_route(jax.ShapeDtypeStruct((4, 128), jnp.bfloat16), 8, hopper))
