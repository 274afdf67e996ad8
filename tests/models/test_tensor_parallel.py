"""Tensor-parallel passes compute what one device computes, with two all-reduces per layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.bench import hlo
from mercury_jax.config import Experts, ModelConfig
from mercury_jax.decode.chunked_vocab import ChunkedVocab
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, rows_of, start
from mercury_jax.decode.sampler import Sampler
from mercury_jax.decode.session import advance
from mercury_jax.hub import params as hub_params
from mercury_jax.models import tensor_parallel
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.sharding import cache_shardings, matrix_axes, mesh, model_parallel_mesh, with_mesh
from mercury_jax.types import LM, Pass
from tests.marks import slow_except

T, SLOTS = 8, 32
PLAIN = ModelConfig(
    vocab=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, block=T, context=64
)
SHARED = dataclasses.replace(PLAIN, experts=Experts(count=4, active=2, width=8, shared=12))
GROUPS = dataclasses.replace(
    PLAIN,
    experts=Experts(
        count=8, active=2, width=8, score="sigmoid", correction=True, groups=2, active_groups=1, dense=(0,)
    ),
)
GEMMA = GemmaConfig(
    vocab=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, block=T, global_layers=(1,), window=5,
    global_head_dim=12, global_kv_heads=1, keys_as_values=True, self_conditioning=True, encoder_scalars=True,
    experts=Experts(count=8, active=2, width=8), per_layer_width=3, per_layer_vocab=64, context=64,
)  # fmt: skip
ODD = dataclasses.replace(
    GEMMA, layers=1, global_layers=(), heads=6, kv_heads=3, global_kv_heads=6, vocab=63, per_layer_width=0, ffn=25,
    experts=Experts(count=6, active=2, width=8),
)  # fmt: skip
CASES = {
    "rows": (GROUPS, dict(data=2, tensor=2), None),
    "shared": (SHARED, dict(tensor=2, expert=2), "int8"),
    "gemma": (GEMMA, dict(tensor=2, expert=2), "int8"),
    "odd": (ODD, dict(tensor=2, expert=2), None),  # what does not divide lies whole
    "groups": (SHARED, dict(tensor=2, expert=2), "groups"),
    "ordered": (GEMMA, dict(tensor=2, expert=2), "ordered"),
}


def drawn(like):
    """Random numbers of a model's parameters, by path; large enough for what depends on what to show."""
    rng = np.random.default_rng(0)
    scale = lambda x: 0.3 if x.ndim == 1 else x.shape[-2] ** -0.5
    return {
        path: np.float32((x.ndim == 1) + scale(x) * rng.normal(size=x.shape))
        for path, x in sorted(like.items())
    }


def in_groups_of(values, ordered, path):
    return in_groups(path, values[path], ordered)


def given(config, model):
    """Of two rows the first encodes, the second denoises: all that a pass takes, but the parameters."""
    rng = np.random.default_rng(1)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    cache = jax.tree.map(draw, jax.eval_shape(lambda: model.empty_cache(2, SLOTS)))
    tokens = jnp.asarray(rng.integers(0, config.vocab, (2, T)), jnp.int32)
    ints = [jnp.asarray(x, jnp.int32) for x in ([3, 11], [T, 6], [3 + T, 17])]
    like = jax.eval_shape(lambda: model.condition(None, jnp.zeros((2, T, 1))))
    return Pass(tokens, cache, *ints, jnp.asarray([True, False]), jax.tree.map(draw, like))


def in_groups(path, w, ordered):
    """A matrix of 4 bits with zero points, in an odd number of groups where its inputs allow that."""
    axes = matrix_axes(path)
    if axes is None:
        return w
    inputs, batch = axes
    last = np.moveaxis(w, range(batch, batch + inputs), range(-inputs, 0))
    lead, width = last.shape[:-inputs], np.prod(last.shape[-inputs:])
    groups = 3 if width % 3 == 0 else 2
    rng = np.random.default_rng(width)
    group = np.sort(rng.integers(0, groups, (*lead[:batch], width)), axis=-1) if ordered else None
    small = lambda *shape: rng.integers(-8, 8, shape).astype(jnp.int4)
    return QuantisedWeight(
        small(*last.shape), np.full(lead, 0.02, np.float32), 1 + rng.random((*lead, groups), np.float32),
        small(*lead, groups), None if group is None else group.astype(np.int32),
    )  # fmt: skip


def passed(config, sizes, quantise):
    """(hidden and cache on one device, the same over a mesh, collectives of that pass, bytes of the largest)."""
    model, on = models.build(config), mesh(**{"data": 1} | sizes)
    values = drawn(hub_params.shapes_of(model))
    read = values.get
    if quantise in ("groups", "ordered"):
        read, quantise = functools.partial(in_groups_of, values, quantise == "ordered"), None
    one, many = (hub_params.load_params(model, read, quantise=quantise, mesh=place) for place in (None, on))
    assert model_parallel_mesh(many) == on and model_parallel_mesh(one) is None
    task = given(config, model)
    want = jax.jit(model.forward)(one, task)
    args = (many, task._replace(cache=jax.device_put(task.cache, cache_shardings(task.cache, on))))
    run = jax.jit(with_mesh(model, on).forward)
    found = hlo.collectives(hlo.parse(run.lower(*args).compile().as_text()))
    return want, run(*args), found


@pytest.mark.parametrize("name", slow_except(CASES, "shared"))
def test_a_pass_over_a_mesh_equals_one_device_with_two_all_reduces_per_layer(name):
    config, sizes, quantise = CASES[name]
    want, ours, found = passed(config, sizes, quantise)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, want)
    sums, gathered = found.pop("all-reduce"), found.pop("all-gather", {"count": 0, "bytes": 0})
    assert 2 * config.layers <= sums["count"] <= 2 * config.layers + 1  # and once for the embeddings
    # What each layer adds to each token is brought together once; nothing else is, least of all a matrix.
    assert gathered["count"] <= (config is GEMMA) and found == {}


@pytest.mark.parametrize(
    ("heads", "groups", "ways"), [(4, 2, 4), (8, 2, 4), (4, 1, 2), (6, 3, 2), (12, 4, 3)]
)
def test_each_query_head_reads_its_key_head(heads, groups, ways):
    """Also where a device's heads begin or end within a group."""
    keys, mine, group = jnp.arange(groups).reshape(1, 1, -1, 1), heads // ways, heads // groups
    for index in range(ways):
        own = tensor_parallel._select_key_heads(keys, mine, group, jnp.asarray(index))[0, 0, :, 0]
        found = own[np.arange(mine) // (mine // len(own))]
        np.testing.assert_array_equal(found, (index * mine + np.arange(mine)) // group)


def answered(lm, piece, on=None):
    """The texts of three rows that draw their tokens, and what they would hand to the next pass."""
    prompts = [Prompt([2, 3, 4 + i], False) for i in range(3)]
    sampler = Sampler(mj.rules.entropy_bound(), temperature=1.0)
    rows = rows_of(prompts, 12, 0)
    session = start(lm, Request(sampler=sampler, plan=mj.Plan(steps=4), mesh=on, rows=rows))
    assert session.mesh is None
    session = dataclasses.replace(session, config=session.config._replace(predict=ChunkedVocab(piece)))
    state = advance(lm, session, None)[0].state
    return np.asarray(state.tokens), np.asarray(state.self_cond)


@pytest.mark.slow
@pytest.mark.parametrize("quantise", [None, "int8"])
def test_an_answer_over_a_mesh_equals_that_of_one_device(quantise):
    """Where parameters lie apart all devices share every pass, each reading its own half of the vocabulary."""
    config = dataclasses.replace(GEMMA, layers=1, global_layers=(), per_layer_width=0, vocab=80, pad=0, eos=1)
    model, on = models.build(config), mesh(data=2, tensor=2)
    values = drawn(hub_params.shapes_of(model))
    one, many = (
        LM(
            model,
            hub_params.load_params(model, values.get, quantise=quantise, mesh=place),
            None,
            noise.uniform(80),
        )
        for place in (None, on)
    )
    (want, soft), (ours, told) = answered(one, 20), answered(many, 20, on)
    np.testing.assert_array_equal(ours, want)
    np.testing.assert_allclose(told, soft, atol=1e-4)
    assert np.unique(want[:3, 3:15]).size > 8 and np.abs(soft).max() > 0.1
