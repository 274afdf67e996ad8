"""The reference attention against the definition, written with dense masks in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels import attend, backends


def dense(q, k, v, see):
    """softmax over the seen keys, one query at a time."""
    q, k, v = map(np.asarray, (q, k, v))
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        keys = np.flatnonzero(see[b, t])
        if len(keys):
            s = k[b, keys, h // group] @ q[b, t, h] / np.sqrt(q.shape[-1])
            w = np.exp(s - s.max())
            out[b, t, h] = (w / w.sum()) @ v[b, keys, h // group]
    return out


def case(seed=0, b=2, t=5, s=9, h=4, g=2, width=8):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(b, n, m, width)).astype(np.float32) for n, m in ((t, h), (s, g), (s, g)))
    cut = rng.integers(0, s + 1, (b, t, 3))
    cut.sort(axis=-1)
    # Two ranges that do not overlap, often empty; the last row of each batch sees nothing at all.
    ranges = np.stack([np.stack([cut[..., 0] * 0, cut[..., 0]], -1), cut[..., 1:]], axis=2)
    ranges[:, -1] = 0
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(ranges, jnp.int32)


def seen(ranges, s):
    at = np.arange(s)
    return ((at >= ranges[..., 0, None]) & (at < ranges[..., 1, None])).any(axis=2)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("seed", range(3))
def test_each_backend_is_the_definition(backend, seed):
    q, k, v, ranges = case(seed)
    out = attend(q, k, v, ranges, backend=backend)
    np.testing.assert_allclose(out, dense(q, k, v, seen(np.asarray(ranges), 9)), atol=2e-6)
    assert not np.asarray(out)[:, -1].any()


def test_gradients_are_finite_where_nothing_is_seen():
    q, k, v, ranges = case()
    grads = jax.grad(lambda *x: attend(*x, ranges).sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_an_unknown_backend_is_refused():
    q, k, v, ranges = case()
    with pytest.raises(ValueError, match="backend"):
        attend(q, k, v, ranges, backend="abacus")
