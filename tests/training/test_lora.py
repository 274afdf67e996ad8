"""Laws of adapters and frozen leaves: what is multiplied, differentiated, sharded, saved, resumed and refused."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import mercury_jax as mj
from mercury_jax import hub, models, sharding
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.models import moe
from mercury_jax.models.ops import dot
from mercury_jax.models.weight_quant import FORMATS, QuantisedWeight, dequantise, quantise
from mercury_jax.ops.experts.grouped_matmul import offsets_of
from mercury_jax.training import lora, optim, step as steps
from mercury_jax.training.lora import LoraConfig
from mercury_jax.training.recipe import MeshConfig
from mercury_jax.types import LoraWeight
from tests.image_models import image_lm
from tests.marks import slow_except
from tests.tiny import tiny
from tests.training import tiny_training
from tests.training.jobs import begin, codes
from tests.training.tiny_checkpoints import chats, checkpoint, losses, recipe

KEY = jax.random.key(0)


def flat(tree) -> dict[str, Any]:
    """Leaves by path."""
    return traverse_util.flatten_dict(tree, sep="/")


def test_a_vision_tower_is_frozen_and_gets_no_adapter():
    """Rows have no images: of the tower, weight decay alone would change anything."""
    lm = image_lm()
    part = lora.partition(LoraConfig(), "", lm.model)
    assert part is not None
    trained, frozen = part.split(lm.params)
    assert set(frozen) == {"vision"} and trained is not None and "vision" not in trained
    both = lora.partition(LoraConfig(), "router|norm", lm.model)
    assert both is not None and set(flat(both.split(lm.params)[1])) > set(flat(frozen))
    assert not [
        path for path in lora.target_shapes(LoraConfig(rank=2), "", lm.model) if path.startswith("vision")
    ]


EXPERTS = ModelConfig(
    vocab=64, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, pattern="bidirectional",
    experts=Experts(count=3, active=2, width=12, shared=8, dense=(0,)),
)  # fmt: skip


def weight(shape, inputs, batch=0, rank=3):
    """A matrix with a low-rank addition, and the same matrix with the addition in it."""
    base, a, b = (jax.random.normal(k, s) for k, s in zip(
        jax.random.split(KEY, 3),
        (shape, (*shape[: batch + inputs], rank), (*shape[:batch], rank, *shape[batch + inputs :])),
        strict=True,
    ))  # fmt: skip
    change = lambda a, b: jnp.tensordot(a, b, 1)
    change = jax.vmap(change) if batch else change
    return LoraWeight(base, a, b, 0.5), base + 0.5 * change(a, b)


@pytest.mark.parametrize("shape, inputs", [((4, 6), 1), ((4, 2, 5), 1), ((2, 5, 4), 2)])
def test_a_product_is_that_of_the_merged_matrix(shape, inputs):
    w, merged = weight(shape, inputs)
    x = jax.random.normal(KEY, (3, 7, *shape[:inputs]))
    np.testing.assert_allclose(dot(x, w, inputs), dot(x, merged, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("run", [moe.tiled, moe.ragged])
def test_experts_and_their_gradients_are_those_of_the_merged_stacks(run):
    up, down = weight((3, 4, 10), 1, 1)[0], weight((3, 5, 4), 1, 1)[0]
    rows, sizes = jax.random.normal(KEY, (41, 4)), jnp.array([17, 0, 24])  # of tiles of 16 rows
    expert = jnp.repeat(jnp.arange(3), sizes, total_repeat_length=41)

    def loss(x, factors, merged):
        found = [dataclasses.replace(w, a=f[0], b=f[1]) for w, f in zip((up, down), factors, strict=True)]
        if not merged:
            return jnp.sin(run(jax.nn.silu, x, offsets_of(sizes), *found, total=50)).sum()
        w, v = (x.base + x.scale * jnp.einsum("eir,ero->eio", x.a, x.b) for x in found)
        hidden = moe.gated(jax.nn.silu, jnp.einsum("mi,mio->mo", x, w[expert]))
        return jnp.sin(jnp.einsum("mi,mio->mo", hidden, v[expert])).sum()

    factors = [(w.a, w.b) for w in (up, down)]
    ours, merged = (jax.value_and_grad(loss, (0, 1))(rows, factors, flag) for flag in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, merged)


# --- a quantised base


def random_quantised(dtype, groups, zeros, permuted):
    """A matrix [6, 5, inputs 16] in a format, with three groups of inputs at most."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-7, 8, (6, 5, 16))).astype(dtype)
    scale = jnp.asarray(rng.uniform(0.1, 1, (6, 5)), jnp.float32)
    each = jnp.asarray(rng.uniform(0.5, 2, (6, 5, groups)), jnp.bfloat16) if groups else None
    zero = jnp.asarray(rng.integers(-3, 4, (6, 5, groups))).astype(dtype) if zeros else None
    group = jnp.asarray(rng.integers(0, groups, 16), jnp.int32) if permuted else None
    return QuantisedWeight(values, scale, each, zero, group)


@pytest.mark.parametrize(
    "dtype, groups, zeros, permuted",
    [("int8", 0, False, False), ("float8_e4m3fn", 0, False, False), ("int4", 4, True, False), ("int4", 4, True, True)],
)  # fmt: skip
def test_a_gradient_through_a_quantised_matrix_is_exact_and_keeps_no_converted_copy(
    dtype, groups, zeros, permuted
):
    w = random_quantised(dtype, groups, zeros, permuted)
    x = jax.random.normal(KEY, (3, 16))
    y, pull = jax.vjp(lambda x: dot(x, w, 1), x)
    wanted, pull_exact = jax.vjp(lambda x: dot(x, dequantise(w), 1), x)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(y)[0], pull_exact(y)[0], rtol=1e-5, atol=1e-4)
    kept = [x for x in jax.tree.leaves(pull) if x.size >= w.values.size]
    assert {x.dtype for x in kept} <= {w.values.dtype}
    assert len(lora.digest({"w": w})) == 32 and lora.digest({"w": w}) != lora.digest(
        {"w": w._replace(values=w.values.at[0, 0, 0].add(1))}
    )


@pytest.mark.parametrize("family", slow_except(["LLaDA", "DiffusionGemma"], "LLaDA"))
def test_adapters_on_a_quantised_base_learn_as_on_the_exact_one(tmp_path, family):
    base, lines = checkpoint(tmp_path / "base", family), chats(tmp_path / "chats.jsonl")
    exact = recipe(family, base, lines, tmp_path / "exact", 4, steps=20, save_every=20)
    mj.train(exact)
    rounded = dataclasses.replace(
        exact,
        lora=LoraConfig(rank=4, quantise="int8"),
        out=str(tmp_path / "rounded"),
        steps=10,
        save_every=10,
    )
    mj.train(rounded)
    rounded = dataclasses.replace(rounded, steps=20, resume=True)
    result = mj.train(rounded)
    np.testing.assert_allclose(losses(tmp_path / "rounded"), losses(tmp_path / "exact"), rtol=0.02)
    stored = jax.tree.leaves(result.params, is_leaf=lambda x: isinstance(x, QuantisedWeight))
    assert sum(isinstance(x, QuantisedWeight) for x in stored) > 7
    adapters = [mj.load(base, adapter=tmp_path / name / "adapter") for name in ("exact", "rounded")]
    assert jax.tree.structure(adapters[0].params) == jax.tree.structure(adapters[1].params)
    with pytest.raises(
        ValueError, match="lora.quantise is ''; allowed: 'int8', as in the checkpoint to resume"
    ):
        mj.train(dataclasses.replace(rounded, lora=LoraConfig(rank=4)))


def test_a_quantised_base_is_trained_with_adapters_only(tmp_path):
    with pytest.raises(ValueError, match="lora.quantise is 'int8'; allowed: \"\" without adapters"):
        LoraConfig(quantise="int8")
    with pytest.raises(ValueError, match="lora.quantise is '4bit'; allowed"):
        LoraConfig(rank=4, quantise="4bit")  # type: ignore[arg-type]


def test_experts_that_are_quantised_and_have_no_adapter_pass_gradients_on():
    exact = (weight((3, 4, 10), 1, 1)[0].base, weight((3, 5, 4), 1, 1)[0].base)
    up, down = (jax.tree.map(jnp.asarray, quantise(np.asarray(w), FORMATS["int8"], 1, 1)) for w in exact)
    rows, offsets = jax.random.normal(KEY, (41, 4)), offsets_of(jnp.array([17, 0, 24]))
    loss = lambda x, *stacks: jnp.sin(moe.tiled(jax.nn.silu, x, offsets, *stacks, total=50)).sum()
    found = jax.value_and_grad(loss)(rows, up, down)
    wanted = jax.value_and_grad(loss)(rows, dequantise(up, 1), dequantise(down, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, wanted)


@pytest.mark.long
def test_a_fresh_adapter_changes_nothing_and_sits_at_every_matrix_of_attention_and_feed_forward():
    model = models.build(EXPERTS)
    params = jax.jit(model.init)(KEY)
    part = lora.partition(LoraConfig(rank=2), "", model)
    assert part is not None
    start, frozen = part.split(params)
    assert start is None
    combined = flat(part.combine(part.init(KEY), frozen))
    adapted = {path for path, x in combined.items() if isinstance(x, LoraWeight)}
    attention = {f"block_{i}/attention/{p}/w" for i in range(2) for p in "qkvo"}
    dense = {f"block_0/mlp/{p}/w" for p in ("gate", "up", "down")}
    shared = {f"block_1/moe/shared/{p}/w" for p in ("gate", "up", "down")}
    assert adapted == attention | dense | shared | {"block_1/moe/gate_up", "block_1/moe/down"}
    for path in adapted:
        w = combined[path]
        assert not np.any(w.b) and np.std(w.a) > 0 and w.base is flat(params)[path]
    few = lora.target_shapes(LoraConfig(rank=2, targets="attention/(q|v)"), "block_0", model)
    assert set(few) == {"block_1/attention/q/w", "block_1/attention/v/w"}


def trained(config, model, frozen_spec, sizes, rate=1e-2):
    """(setup, state, frozen) after two updates on a mesh."""
    on, part = sharding.mesh(**sizes), lora.partition(config, frozen_spec, model)
    rules = lora.adapted_shardings(config, frozen_spec, model) if config.rank else model.shardings
    tx = optim.optimizer(optim.OptimConfig(lr=rate, warmup=0), 10, model.config.width)
    setup = steps.TrainSetup(
        model._replace(shardings=rules), tiny_training.quiet, tiny_training.CORRUPTION, tx, lambda s: rate,
        ema=0.9, partition=part,
    )  # fmt: skip
    assert part is not None
    start, frozen = part.split(model.init(KEY))
    frozen = jax.device_put(frozen, sharding.shardings(frozen, model.shardings, on))
    state, update = steps.init_state(KEY, setup, on, start), steps.sharded_update(setup, on)
    for i in range(2):
        state, report = update(state, sharding.shard_batch(tiny_training.batch(i), on), frozen)
    return setup, state, frozen, report


@pytest.mark.long
@pytest.mark.parametrize(
    "config, freeze", [(LoraConfig(rank=2, targets="hidden"), ""), (LoraConfig(), "embed|norm")]
)
def test_an_update_changes_what_is_trained_alone_on_one_device_and_on_four(config, freeze):
    model = tiny_training.model()
    params = model.init(KEY)
    setup, state, frozen, _ = trained(config, model, freeze, {"data": 1, "devices": jax.devices()[:1]})
    paths = set(flat(state.params))
    assert paths == ({"hidden/w/a", "hidden/w/b"} if config.rank else {"hidden/w", "head"})
    assert set(flat(state.ema)) == paths
    # Moments, averages and gradients exist for what is trained and for nothing else.
    shapes = {x.shape for x in jax.tree.leaves(state.opt)} - {()}
    assert shapes == {x.shape for x in jax.tree.leaves(state.params)}
    for path, x in flat(frozen).items():
        np.testing.assert_array_equal(x, flat(params)[path])
    assert setup.partition is not None
    start = (
        setup.partition.init(jax.random.split(KEY)[0]) if config.rank else setup.partition.split(params)[0]
    )
    assert all(
        np.any(a != b) for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(start), strict=True)
    )
    four = trained(config, model, freeze, {"data": 1, "fsdp": 2, "tensor": 2})[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, four.params)
    if config.rank:  # the factors lie as the matrix does, which is sharded over (fsdp, tensor)
        specs = {p: x.sharding.spec for p, x in flat(four.params).items()}
        assert next(iter(specs["hidden/w/a"])) == "fsdp" and [*specs["hidden/w/b"]][1] == "tensor"


def test_no_gradient_of_a_frozen_matrix_is_computed():
    model = tiny_training.model(width=40)

    def products(config, freeze):
        """Shapes of all products of matrices in an update."""
        setup, state, frozen, _ = trained(config, model, freeze, {"data": 1, "devices": jax.devices()[:1]})
        jaxpr = jax.make_jaxpr(steps.make_update(setup))(state, tiny_training.batch(), frozen)
        return [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]

    assert (40, 40) in products(LoraConfig(), "embed")
    assert (40, 40) not in products(LoraConfig(), "hidden")
    adapted = products(LoraConfig(rank=2, targets="hidden"), "")
    assert (40, 40) not in adapted and {(40, 2), (2, 40)} & set(adapted)


def test_a_digest_finds_one_changed_element_and_no_change_of_the_mesh():
    params = {"a": {"w": jnp.arange(48.0).reshape(6, 8)}, "b": jnp.ones(5, jnp.bfloat16)}
    own = lora.digest(params)
    swapped = {**params, "a": {"w": params["a"]["w"].at[0, 0].set(1.0).at[0, 1].set(0.0)}}
    assert lora.digest(swapped) != own
    assert lora.digest({**params, "b": params["b"].at[4].set(1.01)}) != own
    on = sharding.mesh(data=1, fsdp=2, tensor=2)
    where = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec("fsdp", "tensor"))
    assert lora.digest({**params, "a": {"w": jax.device_put(params["a"]["w"], where)}}) == own


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(lora=LoraConfig(rank=2)), "init is ''; allowed: a checkpoint"),
        (dict(freeze="embed"), "init is ''; allowed: a checkpoint"),
    ],
)
def test_a_part_cannot_be_trained_without_a_checkpoint(tmp_path, fields, words):
    with pytest.raises(ValueError, match=words):
        mj.train(tiny_training.config(tmp_path, **fields))


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: tiny_training.config("x", lora=LoraConfig(alpha=4.0)),
            "lora.alpha is 4.0; allowed: its default: without lora.rank there are no adapters",
        ),
        (
            lambda: tiny_training.config("x", lora=LoraConfig(targets="attention")),
            "lora.targets is 'attention'; allowed: its default: without lora.rank there are no adapters",
        ),
        (lambda: LoraConfig(targets="("), r"lora.targets is '\('; allowed: a regular expression"),
        (lambda: tiny_training.config("x", freeze="("), r"freeze is '\('; allowed: a regular expression"),
        (
            lambda: tiny_training.config("x", lora=LoraConfig(rank=1), optim=optim.OptimConfig(optimizer="muon")),
            "optim.optimizer is 'muon'; allowed: adamw .--optim.optimizer adamw. with lora.rank",
        ),
        (
            lambda: lora.partition(LoraConfig(rank=1, targets="nothing"), "", models.build(EXPERTS)),
            "lora.targets is 'nothing'; allowed: an expression that finds a matrix: block_0/attention/",
        ),
        (
            lambda: lora.partition(LoraConfig(), "nothing", models.build(EXPERTS)),
            "freeze is 'nothing'; allowed: an expression that finds some of the paths and not all",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- adapters as files


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with adapters, from a random LLaDA."""
    folder = tmp_path_factory.mktemp("lora")
    base = checkpoint(folder / "base", "LLaDA")
    config = recipe("LLaDA", base, chats(folder / "chats.jsonl"), folder / "run", 4, steps=3, save_every=3)
    return config, mj.train(config)


def test_a_run_leaves_an_adapter_that_is_merged_at_load(run):
    config, result = run
    assert not (result.out / "model").exists()
    lm, base = mj.load(config.init, adapter=result.out / "adapter"), mj.load(config.init)
    prompts = ["red fox 1", "blue fox"]
    canvas = np.full((2, 8), base.model.config.mask)
    unmerged = dataclasses.replace(lm, params=result.params)
    want, got, plain = (mj.logits(x, canvas, prompt=prompts) for x in (unmerged, lm, base))
    assert np.abs(want - got).max() < 1e-4 < np.abs(plain - got).max()
    with pytest.raises(ValueError, match="params is 'base and adapter'; allowed: merged parameters"):
        hub.save(result.out / "no", unmerged, NoiseConfig())
    quantised = mj.load(config.init, adapter=result.out / "adapter", quantise="int8")
    assert np.abs(mj.logits(quantised, canvas, prompt=prompts) - got).max() < np.abs(plain - got).max()


@pytest.mark.slow
def test_a_run_with_adapters_resumes_bit_for_bit_and_refuses_another_base(run, tmp_path):
    config, _ = run
    whole = mj.train(dataclasses.replace(config, steps=4, save_every=4, out=str(tmp_path / "whole")))
    part = dataclasses.replace(config, steps=2, save_every=2, out=str(tmp_path / "part"))
    mj.train(part)
    rest = dataclasses.replace(part, steps=4, resume=True)
    for fields, words in (
        (
            dict(lora=LoraConfig(rank=4, alpha=8.0)),
            "lora.alpha is 8.0; allowed: None, as in the checkpoint to resume",
        ),
        (dict(freeze="norm"), "freeze is 'norm'; allowed: '', as in the checkpoint to resume"),
    ):
        with pytest.raises(ValueError, match=words):
            mj.train(dataclasses.replace(rest, **fields))
    other = mj.load(config.init)
    other.params["block_0"]["mlp"]["up"]["w"] *= 1.5
    changed = hub.save_hf(tmp_path / "changed", other, family="LLaDA")
    with pytest.raises(
        ValueError, match="init is .*; allowed: the model that the run to resume started from"
    ):
        mj.train(dataclasses.replace(rest, init=str(changed)))
    jax.tree.map(np.testing.assert_array_equal, mj.train(rest).params, whole.params)


def test_a_damaged_or_foreign_adapter_is_refused(run, tmp_path):
    config, result = run
    folder = result.out / "adapter"
    with pytest.raises(CheckpointError, match="the folder is an adapter; load its base with adapter="):
        mj.load(folder)
    with pytest.raises(CheckpointError, match=r"adapter_config.json is missing: the folder holds no adapter"):
        mj.load(config.init, adapter=config.init)
    with pytest.raises(
        ValueError, match="adapter is .*; allowed: an adapter of nano|adapter of .*; this one belongs"
    ):
        mj.load(adapter=folder)
    about = json.loads((folder / "adapter_config.json").read_text())
    for changes, words in (
        ({"use_dora": True}, "use_dora is True; allowed: null, false or empty"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: 'LORA'"),
        ({"r": 0}, "r is 0; allowed: a number above 0"),
    ):
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | changes))
        with pytest.raises(ValueError, match=words):
            mj.load(config.init, adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="adapter_model.safetensors is damaged"):
        mj.load(config.init, adapter=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", slow_except(["LLaDA2.0, 2.1", "LLaDA-MoE", None], "LLaDA2.0, 2.1"))
def test_files_hold_the_product_of_every_kind_of_matrix(tmp_path, family):
    """Fused queries, keys and values, an expert a tensor, gate beside up, and models that no family can hold."""
    e = dict(count=3, active=2, width=12, dense=(0,))
    kinds = {
        "LLaDA2.0, 2.1": dict(
            pattern="block_causal", experts=Experts(**e, score="sigmoid", correction=True, shared=12), qk_norm=True
        ),
        "LLaDA-MoE": dict(pattern="bidirectional", experts=Experts(**e, renormalise=False), qk_norm=True),
        None: dict(pattern="causal_encoder", experts=Experts(**e), zero_centred=True, scale_embed=True),
    }  # fmt: skip
    c = ModelConfig(**(
        dict(vocab=320, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, zero_centred=False, context=64,
             scale_embed=False, tied=False) | kinds[family]
    ))  # fmt: skip
    model = models.build(c)
    lm = tiny("bidirectional")
    lm = dataclasses.replace(
        lm, model=model, params=jax.jit(model.init)(KEY), card={"family": family} if family else {}
    )
    base = hub.save(tmp_path / "base", lm, NoiseConfig())
    part = lora.partition(LoraConfig(rank=2, alpha=3.0), "", model)
    assert part is not None
    leaves, tree = jax.tree.flatten(part.init(KEY))
    drawn = [jax.random.normal(jax.random.fold_in(KEY, i), x.shape) for i, x in enumerate(leaves)]
    factors = tree.unflatten(drawn)
    params = part.combine(factors, lm.params)
    folder = hub.save_adapter(
        tmp_path / "adapter", dataclasses.replace(lm, params=params), NoiseConfig(), str(base)
    )
    merged = flat(mj.load(base, adapter=folder).params)
    for path, w in flat(params).items():
        want = w
        if isinstance(w, LoraWeight):
            change = lambda a, b: jnp.tensordot(a, b, 1)
            batch = w.a.ndim + w.b.ndim - 2 - w.base.ndim
            want = w.base + w.scale * (jax.vmap(change) if batch else change)(w.a, w.b)
            assert np.abs(want - w.base).max() > 0.1
        np.testing.assert_allclose(merged[path], want, atol=1e-4, err_msg=path)
    names = {None: "block_1.moe", "LLaDA-MoE": "experts.2.up_proj", "LLaDA2.0, 2.1": "query_key_value"}
    about = json.loads((folder / "adapter_config.json").read_text())
    assert any(
        names[family] in name for key in ("target_modules", "target_parameters") for name in about[key]
    )


@pytest.mark.slow
def test_adapters_train_on_a_mesh_and_show_samples(tmp_path):
    base = checkpoint(tmp_path / "base", "DiffusionGemma")
    config = recipe("DiffusionGemma", base, chats(tmp_path / "chats.jsonl"), tmp_path / "one", 4)
    shown = dict(sample_every=40, sample_prompts=("red fox 1",), sample_chat=True, mesh=MeshConfig(data=4))
    meshes = {"rows": {}, "four": dict(mesh=MeshConfig(data=1, fsdp=2, tensor=2))}
    found = {}
    for name, fields in meshes.items():
        found[name] = mj.train(
            dataclasses.replace(config, **{**shown, **fields}, out=str(tmp_path / name), batch=8)
        )
        assert "red fox" in (tmp_path / name / "samples.txt").read_text()
    first, last = losses(tmp_path / "four")
    assert last < 0.7 * first and abs(losses(tmp_path / "rows")[1] - last) < 0.05


SEVERAL = """
from pathlib import Path
from tests.training.tiny_checkpoints import recipe

def config():
    root = Path("ROOT")
    shown = dict(sample_every=3, sample_prompts=("red fox 1",), sample_chat=True)
    return recipe("LLaDA", root / "base", root / "chats.jsonl", root / "run", 4, steps=3, save_every=3, **shown)
"""


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one(tmp_path):
    checkpoint(tmp_path / "base", "LLaDA")
    chats(tmp_path / "chats.jsonl")
    (tmp_path / "recipe.py").write_text(SEVERAL.replace("ROOT", str(tmp_path)))
    workers = [*begin(tmp_path, 1, "one"), *begin(tmp_path, 2, "two", "--mesh.fsdp", "2", "--mesh.data", "1")]
    assert codes(workers) == [0, 0, 0]
    one, two = (mj.load(tmp_path / "base", adapter=tmp_path / out / "adapter") for out in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one.params, two.params)
    assert "red fox" in (tmp_path / "two" / "samples.txt").read_text()
    # Another number of processes, the same base.
    assert codes(begin(tmp_path, 1, "two", "--steps", "4", "--resume")) == [0]
