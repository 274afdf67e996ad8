"""Published quantised checkpoints: what is loaded, kept in memory, and refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import hub, sharding
from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.hub.quant_config import Quantisation, Scheme
from mercury_jax.hub.quantised import dequantised, stored_matrix, unpack_matrix
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.training.recipe import load_recipe
from tests.hub import quant_writer as writer
from tests.hub.goldens_of import GOLDENS, read_all
from tests.marks import slow_except

GOLDEN = GOLDENS / "quantised.safetensors"
CASES = sorted({name.split("/")[0] for name in tensors.header(GOLDEN)})
SDAR = dict(
    architectures=["SDARForCausalLM"], model_type="sdar", vocab_size=64, hidden_size=64, intermediate_size=96,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
    mask_token_id=63, eos_token_id=62, pad_token_id=62, block_size=4, rms_norm_eps=1e-6, rope_theta=10000,
    tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip
DREAM = SDAR | dict(architectures=["DreamModel"], model_type="Dream")
DREAM = {key: x for key, x in DREAM.items() if key not in ("block_size", "head_dim")}
SDAR_MOE = SDAR | dict(
    architectures=["SDARMoeForCausalLM"], num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
LLADA2 = json.loads((GOLDENS / "llada2" / "config.json").read_text())
LLADA2 |= dict(num_hidden_layers=2, mask_token_id=78, dtype="float32")
GEMMA = json.loads((GOLDENS / "diffusion_gemma" / "config.json").read_text())
del GEMMA["vision_config"]
GEMMA["text_config"] |= dict(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"], per_layer_config={"1": {"head_dim": 16}},
)  # fmt: skip


def compressed(layout, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return dict(
        quant_method="compressed-tensors", format=layout, quantization_status="compressed", ignore=["lm_head"],
        config_groups={"group_0": group}, global_compression_ratio=None, kv_cache_scheme=None,
    )  # fmt: skip


def integers(bits, symmetric, size=16, **more):
    return compressed(
        "pack-quantized", num_bits=bits, type="int", strategy="group" if size else "channel", group_size=size,
        symmetric=symmetric, **more,
    )  # fmt: skip


def of_gptq(bits, first=True, **more):
    kind = "gptq" if first else "gptq_v2"
    return dict(quant_method="gptq", bits=bits, group_size=16, checkpoint_format=kind, **more)


FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head", "*self_attn*"])
BLOCKS = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[40, 48])
AWQ = dict(quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm")
FORMATS = {  # quantization_config, writer, dtype that is kept, bytes per number of it beside the scales
    "fp8 per channel": (FP8, writer.fp8(), "float8_e4m3fn"),
    "fp8 per tensor": (FP8, writer.fp8("tensor"), "float8_e4m3fn"),
    "fp8 in blocks": (BLOCKS, writer.fp8_blocks(40, 48), "float8_e4m3fn"),
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), writer.int8(), "int8"),
    "int8 with zero points": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), writer.int8(False),
        "int8",
    ),
    "packed int8": (integers(8, False), writer.packed(8, 16, False), "int8"),
    "packed int4": (integers(4, True), writer.packed(4, 16), "int4"),
    "packed int4 per channel": (integers(4, True, None), writer.packed(4, None), "int4"),
    "packed int4 with zero points": (integers(4, False), writer.packed(4, 16, False), "int4"),
    "packed int4 in another order": (
        integers(4, False, actorder="group"), writer.packed(4, 16, False, order=True), "int4"
    ),
    "NVFP4": (NVFP4, writer.nvfp4(), "float4_e2m1fn"),
    "modelopt": (MODELOPT, writer.nvfp4(modelopt=True), "float4_e2m1fn"),
    "GPTQ": (of_gptq(4), writer.gptq(), "int4"),
    "GPTQ in another order": (
        of_gptq(4, desc_act=True, sym=False), writer.gptq(symmetric=False, act_order=True), "int4"
    ),
    "GPTQ of 8 bits, second format": (of_gptq(8, False), writer.gptq(8, symmetric=False, first=False), "int8"),
    "AWQ": (AWQ, writer.awq(), "int4"),
}  # fmt: skip
QUICK = ("fp8 in blocks", "NVFP4", "GPTQ in another order", "AWQ")


def linear(write):
    """Writers of a checkpoint in which every matrix of attention and feed-forward is quantised."""
    return lambda module: (
        write if re.search(r"_proj$|experts\.|query_key_value$|attention\.dense$", module) else None
    )


def matrices(lm):
    leaves = jax.tree.leaves(lm.params, is_leaf=lambda x: isinstance(x, QuantisedWeight))
    return [x for x in leaves if isinstance(x, QuantisedWeight)]


def logits(folder, **how):
    lm = mj.load(folder, **how)
    ids = np.arange(2, 18).reshape(2, 8)
    return lm, np.asarray(mj.logits(lm, ids, prompt=[[1, 2, 3], [4, 5, 6]]))


def assert_equal(folders, atol=2e-5):
    (lm, ours), (_, want) = (logits(folder) for folder in folders)
    np.testing.assert_allclose(ours, want, atol=atol * np.abs(want).max())
    return lm


@pytest.mark.parametrize("case", CASES)
def test_unpacked_matrices_equal_those_of_compressed_tensors(case):
    of_case = lambda found: {f"m.{n.split('/')[1]}": x for n, x in found.items() if n.startswith(f"{case}/")}
    arrays = of_case(read_all(GOLDEN))
    scheme = Scheme(block=(32, 48) if case == "fp8_blocks" else None)
    about = Quantisation("compressed-tensors", "", (scheme,))
    twin = arrays.pop("m.twin")
    stored = stored_matrix(about, of_case(tensors.header(GOLDEN)), "m.weight", twin.shape)
    found = dequantised(unpack_matrix(stored, arrays.__getitem__))
    # In NVFP4 they divide the scale of a group by that of the matrix before they multiply; elsewhere, bit for bit.
    np.testing.assert_allclose(found, twin, rtol=2e-7 if case == "nvfp4" else 0)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", slow_except(FORMATS, *QUICK))
def test_a_published_format_has_the_logits_of_the_matrices_it_stands_for(name, tmp_path):
    about, write, kind = FORMATS[name]
    lm = assert_equal(writer.write_pair(tmp_path, SDAR, about, linear(write)))
    found = matrices(lm)
    assert len(found) == 7 and {x.values.dtype.name for x in found} == {kind}


SYMMETRIC = {  # quantization_config, writer, name and value of a zero point that contradicts it
    "GPTQ": (of_gptq(4, sym=True), writer.gptq(), {"qzeros": 0x33333333}),
    "GPTQ, second format": (of_gptq(4, False, sym=True), writer.gptq(first=False), {"qzeros": 0x77777777}),
    "GPTQ of 8 bits": (of_gptq(8, sym=True), writer.gptq(8), {"qzeros": 0x01010101}),
    "packed int4": (integers(4, True), writer.packed(4, 16), {"weight_zero_point": 0x33333333}),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), writer.int8(),
        {"weight_zero_point": 5},
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_zero_point_of_a_symmetric_matrix_is_the_middle_whatever_the_file_stores(name, tmp_path):
    about, write, stray = SYMMETRIC[name]

    def contradicting(w):
        found, twin = write(w)
        if "weight_packed" in found:  # int32 [out / 8, groups]
            found["weight_zero_point"] = np.zeros((len(w) // 8, found["weight_scale"].shape[1]), np.int32)
        elif "weight" in found:
            found["weight_zero_point"] = np.zeros_like(found["weight_scale"], np.int8)
        for key, value in stray.items():
            found[key] = np.full_like(found[key], value)
        return found, twin

    folders = [
        writer.write_pair(tmp_path / str(i), SDAR, about, linear(w))
        for i, w in enumerate((write, contradicting))
    ]
    plain, other = (mj.load(quantised) for quantised, _ in folders)
    assert len(matrices(plain)) == 7
    for one, two in zip(matrices(plain), matrices(other), strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(two)
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_gptq_of_several_symmetries_is_refused_by_module(tmp_path):
    about = of_gptq(4, sym=True, dynamic={"+:.*down.*": {"bits": 8}, "+:.*up.*": {"sym": False}})
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(writer.gptq()))
    with pytest.raises(ValueError, match=r"dynamic\.\+:\.\*up\.\*\.sym is False"):
        mj.load(folder)


FUSED = {  # config.json, format
    "biases": (DREAM, "GPTQ"),
    "experts": (SDAR_MOE, "packed int4 in another order"),
    "stacked experts, split": (GEMMA, "modelopt"),
    "stacked experts, fp8": (GEMMA, "fp8 per tensor"),
    "fused queries, keys and values": (LLADA2, "fp8 per tensor"),
    "fused queries, keys and values in blocks": (LLADA2, "fp8 in blocks"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", slow_except(FUSED, "stacked experts, split", "fused queries, keys and values")
)
def test_experts_and_fused_matrices_keep_their_scales(name, tmp_path):
    config, kind = FUSED[name]
    about, write, _ = FORMATS[kind]
    assert_equal(writer.write_pair(tmp_path, config, about, linear(write)), 1e-4)


def mixed(folder):
    """FP8 attention, NVFP4 gate and up, and a plain down projection, as config groups and `ignore` say."""
    of = lambda group, targets: group["config_groups"]["group_0"] | {"targets": targets}
    about = FP8 | {"format": "mixed-precision", "ignore": ["lm_head", "re:.*down_proj"], "config_groups": {
        "group_0": of(FP8, ["re:.*self_attn.*"]), "group_1": of(NVFP4, ["Linear"]) | {"format": "nvfp4-pack-quantized"},
    }}  # fmt: skip
    choose = lambda m: (
        None if "_proj" not in m or "down" in m else writer.fp8() if "attn" in m else writer.nvfp4()
    )
    return writer.write_pair(folder, SDAR, about, choose)


def test_config_groups_and_ignored_modules(tmp_path, capsys):
    folders = mixed(tmp_path)
    lm = assert_equal(folders)
    assert sorted(x.values.dtype.name for x in matrices(lm)) == ["float4_e2m1fn"] * 2 + ["float8_e4m3fn"] * 4
    about = hub.info(folders[0])
    assert about["quantised"]["matrices"] == {"float8_e4m3fn": 4, "float4_e2m1fn in groups of 16 inputs": 2}
    assert any("activations" in note and "float32" in note for note in about["notes"])
    # On an accelerator a number takes 1 or 0.5 bytes, beside its scales; elsewhere the dtype of the file.
    small, plain = (hub.info(folder)["bytes_per_device"][1]["params"] for folder in folders)
    fp8, fp4 = 64 * 128 + 2 * 64 * 64 + 128 * 64, 2 * 64 * 96
    scales = 4 * (128 + 64 + 64 + 64) + 4 * 2 * 96 + fp4 // 16
    assert plain - small == 4 * (fp8 + fp4) - (fp8 + fp4 // 2 + scales)
    assert main_info(folders[0], capsys).count("compressed-tensors, mixed-precision") == 2


def main_info(folder, capsys):
    from mercury_jax.cli import main

    assert main(["info", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", slow_except(["packed int4 with zero points", "GPTQ in another order"]))
def test_parameters_over_a_mesh(name, tmp_path):
    about, write, _ = FORMATS[name]
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write))
    on = sharding.mesh(data=1, tensor=2, devices=jax.devices()[:2])
    (_, want), (lm, ours) = logits(folder), logits(folder, mesh=on)
    np.testing.assert_allclose(ours, want, atol=2e-5 * np.abs(want).max())
    o = lm.params["block_0"]["attention"]["o"]["w"]
    assert o.values.addressable_shards[0].data.shape == (64, 2, 32)  # half of the heads, as unquantised
    with pytest.raises(ValueError, match="mesh of weights in int4.*one device"):
        Engine(lm)


def test_bfloat16_and_float16_arithmetic(tmp_path):
    """Also of values up to 448 in fp16, whose sums would not fit."""
    about, write, _ = FORMATS["fp8 per channel"]
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write))
    _, want = logits(folder)
    for dtype, most in (("bfloat16", 0.1), ("float16", 0.02)):
        _, found = logits(folder, dtype=dtype)
        assert np.abs(found - want).max() < most * np.abs(want).max()


GATE, DOWN = "model.layers.0.mlp.gate_proj.", "model.layers.0.mlp.down_proj."


def without(name):
    return lambda found: found.pop(name)


def with_(name, change):
    return lambda found: found.update({name: change(found[name])})


SPOILT = {  # format, what is changed, words of the message
    "missing scale": ("fp8 per channel", without(f"{GATE}weight_scale"), [f"{GATE}weight_scale", "is missing"]),
    "scale of another shape": (
        "packed int4", with_(f"{GATE}weight_scale", lambda x: x[:, :-1]), ["shape", f"{GATE}weight_scale", "(96, 3)"]
    ),
    "another group size": (
        "packed int4", with_(f"{GATE}weight_scale", lambda x: x[:, ::2]), ["group size", "32", "16, by config.json"]
    ),
    "missing zero points": (
        "packed int4 with zero points", without(f"{DOWN}weight_zero_point"), [f"{DOWN}weight_zero_point", "missing"]
    ),
    "words of another shape": (
        "packed int4", with_(f"{DOWN}weight_packed", lambda x: x[:, 1:]), ["shape", "weight_packed", "(64, 12)"]
    ),
    "another shape inside": (
        "packed int4", with_(f"{GATE}weight_shape", lambda x: x + 1), ["weight_shape", "[97, 65]"]
    ),
    "other bits": (
        "packed int4", with_(f"{GATE}weight_packed", lambda x: np.tile(x, 2)), ["bits", "8", "4, by config.json"]
    ),
    "dtype": ("fp8 per channel", with_(f"{GATE}weight", lambda x: x.view(np.bool_)), ["dtype", "bool", "int8"]),
    "a divisor of 0": ("NVFP4", with_(f"{GATE}weight_global_scale", lambda x: x * 0), ["global_scale", "other than 0"]),
    "a scale that is infinite": (
        "fp8 per channel", with_(f"{GATE}weight_scale", lambda x: x + np.float32(np.inf).astype(x.dtype)), ["finite"]
    ),
    "missing divisor": ("NVFP4", without(f"{GATE}weight_global_scale"), ["weight_global_scale", "is missing"]),
    "groups that do not exist": ("GPTQ in another order", with_(f"{GATE}g_idx", lambda x: x + 9), ["g_idx", "0..3"]),
    "zero points of another shape": ("AWQ", with_(f"{GATE}qzeros", lambda x: x[1:]), ["qzeros", "(3, 12)", "(4, 12)"]),
    "one of two fused": (
        "fp8 per channel",
        lambda found: found.update({f"{GATE}weight": np.zeros((96, 64), np.float32), f"{GATE}scale": np.zeros(1)}),
        [f"{GATE}scale", "no place"],
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_tensors_are_refused_by_name(name, tmp_path):
    kind, change, words = SPOILT[name]
    about, write, _ = FORMATS[kind]
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write), change)
    with pytest.raises(CheckpointError) as error:
        mj.load(folder)
    assert all(word in str(error.value) for word in words), error.value


REFUSED = [  # quantization_config, words of the message
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["quant_method", "bitsandbytes", "compressed-tensors"]),
    ({"quant_method": "gptq", "bits": 3}, ["bits", "3", "4, 8"]),
    ({"quant_method": "gptq", "bits": 2}, ["bits", "2"]),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, ["is_marlin_format"]),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version", "gemv", "gemm"]),
    ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "e5m2"]),
    ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size", "two positive"]),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ["quant_algo", "W4A8_AWQ"]),
    (FP8 | {"format": "marlin-24"}, ["format", "marlin-24", "float-quantized"]),
    (FP8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config.format", "sparse-24-bitmask"]),
    (FP8 | {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config"]),
    (FP8 | {"ignore": ["re:("]}, ["ignore", "regular expression"]),
    (compressed("pack-quantized", num_bits=3, type="int"), ["num_bits", "3"]),
    ("fp8", ["quantization_config", "an object"]),
    (FP8, ["quantization_config", "no matrix"]),
]  # fmt: skip


@pytest.mark.parametrize("about, words", REFUSED)
def test_what_is_not_supported_is_refused_before_any_tensor_is_read(about, words, tmp_path):
    folder, _ = writer.write_pair(tmp_path, SDAR, about, lambda module: None)
    with pytest.raises(ValueError) as error:
        open_checkpoint(folder)
    assert all(word in str(error.value) for word in words), error.value


def test_a_module_that_config_json_ignores_must_not_be_quantised(tmp_path):
    about, write, _ = FORMATS["fp8 per channel"]
    about = about | {"ignore": ["re:.*gate_proj"]}
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write))
    with pytest.raises(CheckpointError, match="gate_proj is quantised, and config.json ignores it"):
        mj.load(folder)


def test_quantised_parameters_are_neither_written_nor_quantised_again(tmp_path):
    about, write, _ = FORMATS["NVFP4"]
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write))
    lm = mj.load(folder)
    with pytest.raises(ValueError, match="float4_e2m1fn.*unquantised checkpoint"):
        hub.save_hf(tmp_path / "out", lm)
    with pytest.raises(ValueError, match="source.*unquantised"):
        hub.convert(folder, tmp_path / "out")
    config = dataclasses.replace(load_recipe("first"), model=lm.model.config, init=str(folder), steps=1)
    with pytest.raises(
        ValueError, match="init is .*; allowed: an unquantised checkpoint; of this one, adapters"
    ):
        mj.train(dataclasses.replace(config, out=str(tmp_path / "run")))
    with pytest.raises(ValueError, match="quantise is 'int8': the checkpoint is quantised already"):
        mj.load(folder, quantise="int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [0, 1])
def test_biases_of_zeros_that_a_tool_adds_are_not_read(value, tmp_path):
    about, write, _ = FORMATS["GPTQ"]
    bias = {f"{GATE}bias": np.full(96, value, np.float16)}
    folder, _ = writer.write_pair(tmp_path, SDAR, about, linear(write), lambda found: found.update(bias))
    if not value:
        assert len(matrices(mj.load(folder))) == 7
        return
    with pytest.raises(CheckpointError, match=f"{GATE}bias.*no place"):
        mj.load(folder)


def test_a_quantised_head_is_widened_and_said_so(tmp_path):
    about, write, _ = FORMATS["fp8 per channel"]
    about = about | {"ignore": []}
    choose = lambda module: write if module == "lm_head" or "_proj" in module else None
    folders = writer.write_pair(tmp_path, SDAR, about, choose)
    lm = assert_equal(folders)
    assert lm.params["head"].dtype == jnp.float32
    assert any("dequantised" in note and "lm_head" in note for note in lm.card["notes"])
