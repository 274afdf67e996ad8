"""Meshes and path rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from mercury_jax import sharding

RULES = ((r"embed$", ("tensor", "fsdp")), (r"w$", ("fsdp", None)))


def test_a_mesh_has_four_auto_axes_and_fills_the_one_that_is_left():
    on = sharding.mesh(tensor=2)
    assert dict(on.shape) == {"data": 2, "fsdp": 1, "tensor": 2, "expert": 1}
    assert set(on.axis_types) == {AxisType.Auto}
    one = sharding.mesh(devices=jax.devices()[:1])
    assert set(one.shape.values()) == {1}


@pytest.mark.parametrize(
    "sizes, words",
    [({"data": 3}, "the product of the sizes, and is 4"), ({"data": 1}, "the product of the sizes, and is 4"),
     ({"fsdp": -1}, "mesh.fsdp is -1"), ({"tensor": 0}, "tensor is 0")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        sharding.mesh(**sizes)


def test_the_first_matching_rule_applies_and_other_arrays_are_replicated():
    on = sharding.mesh(data=1, fsdp=2, tensor=2)
    tree = {"embed": jnp.zeros((8, 4)), "mlp": {"w": jnp.zeros((4, 3))}, "scale": jnp.zeros(4)}
    found = sharding.shardings(jax.eval_shape(lambda: tree), RULES, on)
    specs = [found["embed"].spec, found["mlp"]["w"].spec, found["scale"].spec]
    assert specs == [P("tensor", "fsdp"), P("fsdp", None), P()]


def test_moments_are_sharded_as_their_parameters_and_counters_are_replicated():
    on = sharding.mesh(data=1, fsdp=4)
    state = ({"count": jnp.int32(0), "mu": {"mlp": {"w": jnp.zeros((4, 3))}}},)
    found = sharding.shardings(state, ((r".", ("fsdp", None)),), on)
    assert found[0]["mu"]["mlp"]["w"].spec == P("fsdp", None) and found[0]["count"].spec == P()


def test_a_dimension_that_an_axis_does_not_divide_is_not_split():
    on = sharding.mesh(data=1, fsdp=2, tensor=2)
    assert sharding.partition_spec("embed", (7, 4), RULES, on) == P(None, "fsdp")


def test_a_rule_of_another_rank_or_axis_is_refused():
    on = sharding.mesh()
    with pytest.raises(ValueError, match=r"sharding rule 'w\$'.*a/w has shape \(2, 2, 2\)"):
        sharding.partition_spec("a/w", (2, 2, 2), RULES, on)
    with pytest.raises(ValueError, match="'model'; allowed: data, fsdp"):
        sharding.partition_spec("w", (2,), ((r"w", ("model",)),), on)


def test_rows_are_sharded_over_data_and_fsdp():
    on = sharding.mesh(data=2, fsdp=2)
    batch = sharding.shard_batch({"tokens": np.arange(8).reshape(4, 2)}, on)
    assert sharding.row_shards(on) == 4 and sharding.process_share(on) == (0, 1)
    assert [s.data.shape for s in batch["tokens"].addressable_shards] == [(1, 2)] * 4
    assert (np.asarray(batch["tokens"]) == np.arange(8).reshape(4, 2)).all()
