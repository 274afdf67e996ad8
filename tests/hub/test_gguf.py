"""GGUF files: every architecture and type, against the checkpoint of Hugging Face's layout with the same numbers."""

import json
import os
import struct

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import mercury_jax as mj
from mercury_jax import hub, models, noise
from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.cli import main
from mercury_jax.config import ModelConfig
from mercury_jax.hub import quantised
from mercury_jax.hub.gguf import SMOLLM2_COMMAND
from mercury_jax.hub.load import load_opened, open_checkpoint
from mercury_jax.hub.params import shapes_of, to_ours
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.types import LM
from tests.hub.gguf_writer import SCALES, write_gguf
from tests.hub.goldens_of import GOLDENS, golden, logits_of_model
from tests.hub.test_adapter_config import PEFT
from tests.hub.test_gguf_tokenizer import byte_level

NAMES = ("dream", "llada", "llada_moe", "llama3", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe")
KEPT = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4"}
TYPES = ("F16", "BF16", *KEPT, "Q4_1", "Q5_1", *SCALES)
FP32 = np.dtype(np.float32)
TOKENS = np.arange(40).reshape(2, 20) % 64


@pytest.mark.parametrize("name", NAMES)
def test_architectures_give_the_logits_of_the_checkpoint(name, tmp_path):
    path, own = tmp_path / "m.gguf", golden(name)
    write_gguf(GOLDENS / name, path)
    mask = int(own.said["mask_id"][0]) if "mask_id" in own.said else None
    found, tokens = open_checkpoint(path, mask=mask), own.said["tokens"]
    ours = logits_of_model(found.model, load_opened(found, dtype=FP32).params, tokens)
    np.testing.assert_allclose(ours, logits_of_model(own.opened.model, own.params, tokens), atol=2e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose rows fill blocks of 256 numbers."""
    config = ModelConfig(
        vocab=1024, width=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, context=64, eos=1, pad=1, mask=None,
        pattern="block_causal", block=1, predicts_next=True, zero_centred=False, scale_embed=False, tied=False,
    )  # fmt: skip
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    lm = LM(model, params, IdTokenizer.of(config), noise.uniform(config.vocab))
    return hub.save_hf(tmp_path_factory.mktemp("wide") / "hf", lm, family="Qwen3")


def is_quantised(x):
    return isinstance(x, QuantisedWeight)


def exact_params(opened, held):
    """The parameters with the numbers that a file holds, in fp32."""
    names = opened.family.names(opened.config)
    found = {
        path: to_ours(names[path], x.shape, held.__getitem__) for path, x in shapes_of(opened.model).items()
    }
    return unflatten_dict(found, sep="/")


@pytest.mark.parametrize("kind", TYPES)
def test_types_give_the_numbers_that_they_stand_for(kind, wide, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "WIDEN_CHUNK", 10_000)  # several chunks a matrix
    held = write_gguf(wide, tmp_path / "m.gguf", kind)
    opened = open_checkpoint(tmp_path / "m.gguf")
    lm = load_opened(opened, dtype=FP32)
    matrices = [x for x in jax.tree.leaves(lm.params, is_leaf=is_quantised) if is_quantised(x)]
    assert len(matrices) == (7 if kind in KEPT else 0)
    assert all(str(x.values.dtype) == KEPT[kind] for x in matrices)
    want = logits_of_model(lm.model, exact_params(opened, held), TOKENS)
    np.testing.assert_allclose(logits_of_model(lm.model, lm.params, TOKENS), want, atol=1e-4)


def test_parts_of_a_parameter_in_different_types_are_widened(tmp_path):
    """Gate and up of an expert are one parameter here."""
    folder = hub.tiny_random("LLaDA-MoE", tmp_path / "hf")
    kind = lambda name: "Q8_0" if "gate_proj" in name else "Q4_0" if ".experts." in name else "F32"
    held = write_gguf(folder, tmp_path / "m.gguf", kind)
    opened = open_checkpoint(tmp_path / "m.gguf")
    lm = load_opened(opened, dtype=FP32)
    moe, want = lm.params["block_0"]["moe"], exact_params(opened, held)["block_0"]["moe"]
    assert is_quantised(moe["down"]) and np.array_equal(moe["gate_up"], want["gate_up"])


def test_files_of_one_floating_type_are_computed_in_it(wide, tmp_path):
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("Q4_1", "float32")):
        write_gguf(wide, tmp_path / f"{kind}.gguf", kind)
        lm = mj.load(tmp_path / f"{kind}.gguf")
        assert lm.model.config.dtype == dtype
        assert lm.params["embed"].dtype == ("float32" if kind == "Q4_1" else dtype)


def adapter(folder, a, b):
    """A LoRA adapter of the first layer's queries, as PEFT writes it."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    arrays = {name.format("A"): a, name.format("B"): np.ascontiguousarray(b)}
    parts = [tensors.LazyTensor(n, x.shape, x.dtype, lambda x=x: x) for n, x in arrays.items()]
    tensors.write(folder / "adapter_model.safetensors", parts)
    (folder / "adapter_config.json").write_text(json.dumps(PEFT | {"r": len(a), "lora_alpha": len(a)}))
    return folder


def test_kept_matrices_are_widened_for_another_format_an_adapter_and_other_layouts(wide, tmp_path, capsys):
    held = write_gguf(wide, tmp_path / "m.gguf", "Q8_0")
    want = exact_params(open_checkpoint(tmp_path / "m.gguf"), held)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=size).astype(np.float32) for size in ((2, 256), (256, 2)))
    merged = mj.load(tmp_path / "m.gguf", adapter=adapter(tmp_path, a, b)).params
    added = merged["block_0"]["attention"]["q"]["w"] - want["block_0"]["attention"]["q"]["w"]
    np.testing.assert_allclose(np.asarray(added).reshape(256, 256), (b @ a).T, atol=1e-4)
    again = mj.load(tmp_path / "m.gguf", quantise="int8").params["block_0"]["mlp"]["up"]["w"]
    assert again.group_scale is None and again.values.dtype == np.int8
    for to in ("ours", "hf"):
        assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / to), "--to", to]) == 0
        found = mj.load(tmp_path / to).params
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True))
    capsys.readouterr()
    assert main(["info", str(tmp_path / "m.gguf"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["family"] == "Qwen3" and about["quantised"]["matrices"] == {"int8 in groups of 32 inputs": 7}


def test_a_folder_with_one_model_and_a_split_model_are_found(wide, tmp_path):
    folder = tmp_path / "split"
    folder.mkdir()
    for part in range(3):
        write_gguf(wide, folder / f"m-{part + 1:05d}-of-00003.gguf", part=part, parts=3)
    for found in (mj.load(folder), mj.load(folder / "m-00001-of-00003.gguf")):
        same = zip(*map(jax.tree.leaves, (found.params, mj.load(wide).params)), strict=True)
        assert all(np.array_equal(a, b) for a, b in same)
    with pytest.raises(CheckpointError, match="split.count is 3; allowed: .* its first file"):
        mj.load(folder / "m-00003-of-00003.gguf")
    (folder / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf is missing"):
        mj.load(folder)
    write_gguf(wide, folder / "other.gguf")
    with pytest.raises(CheckpointError, match="2 GGUF models; pass one of them: m-00001"):
        mj.load(folder)


def set_key(name, value, add="add_uint32"):
    def change(writer):
        for data in writer.kv_data:
            data.pop(name, None)
        getattr(writer, add)(name, value)

    return change


REFUSED = [  # a change of the metadata, and words of the error
    (set_key("general.architecture", "mamba", "add_string"), ["general.architecture is 'mamba'", "llama, qwen2"]),
    (set_key("general.type", "adapter", "add_string"), ["general.type is 'adapter'", "model"]),
    (set_key("general.alignment", 24), ["general.alignment is 24", "a power of 2"]),
    (set_key("qwen3.block_count", 2_000_000_000), ["qwen3.block_count is 2000000000", "1, by the tensors"]),
    (set_key("qwen3.embedding_length", 128), ["qwen3.embedding_length is 128", "256, by the tensors"]),
    (set_key("qwen3.attention.head_count", [4], "add_array"), ["attention.head_count is [4]", "equal in all layers"]),
    (set_key("qwen3.attention.head_count", 0), ["attention.head_count is 0"]),
    (set_key("qwen3.attention.value_length", 32), ["attention.value_length is 32", "64, the size of a head"]),
    (set_key("qwen3.rope.dimension_count", 32), ["rope.dimension_count is 32"]),
    (set_key("qwen3.attention.causal", False, "add_bool"), ["attention.causal is False", "True for Qwen3ForCausalLM"]),
    (set_key("qwen3.expert_count", 4), ["expert_count is 4", "0 for Qwen3ForCausalLM"]),
    (set_key("qwen3.rope.scaling.type", "longrope", "add_string"), ["rope.scaling.type is 'longrope'", "yarn"]),
    (set_key("qwen3.attention.scale", 0.5, "add_float32"), ["qwen3.attention.scale=0.5 is unknown", "ignore_config="]),
    (set_key("tokenizer.ggml.model", "rwkv", "add_string"), ["tokenizer.ggml.model", "rwkv"]),
]  # fmt: skip


@pytest.mark.parametrize("change, words", REFUSED, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_what_no_family_has_is_refused_by_name(change, words, wide, tmp_path):
    write_gguf(wide, tmp_path / "m.gguf", change=change)
    with pytest.raises(ValueError) as error:
        mj.load(tmp_path / "m.gguf")
    assert all(word in str(error.value) for word in words), error.value


def test_a_key_without_effect_can_be_vouched_for(wide, tmp_path):
    write_gguf(wide, tmp_path / "m.gguf", change=set_key("qwen3.attention.scale", 0.5, "add_float32"))
    found = mj.load(tmp_path / "m.gguf", ignore_config=["qwen3.attention.scale"])
    assert any("qwen3.attention.scale" in note for note in found.card["notes"])


def header(*, version=3, tensors=0, entries=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


KEY = struct.pack("<Q", 1) + b"a"
DAMAGED = [  # bytes of a file, and words of the error
    (b"", ["its header is truncated"]),
    (b"GGML" + bytes(40), ["first bytes is b'GGML'"]),
    (header(version=1), ["version is 1", "2, 3"]),
    (header(version=3 << 24), ["version is 'big-endian'"]),
    (header(entries=2**60), ["its header is truncated"]),
    (header(tensors=2**60), ["its header is truncated"]),
    (header(entries=1, rest=struct.pack("<Q", 2**62)), ["length of a text"]),
    (header(entries=1, rest=KEY + struct.pack("<I", 77)), ["type of a value is 77"]),
    (header(entries=1, rest=KEY + struct.pack("<IIQ", 9, 9, 3)), ["type of a value is 9"]),
    (header(entries=1, rest=KEY + struct.pack("<IIQ", 9, 0, 2**60)), ["length of an array", "4000000 items"]),
    (header(entries=1, rest=KEY + struct.pack("<IIQ", 9, 8, 4_000_000)), ["its header is truncated"]),
    (header(entries=2, rest=2 * (KEY + struct.pack("<IB", 0, 1))), ["key", "'a'", "each key once"]),
    (header(tensors=1, rest=KEY + struct.pack("<I", 2**31)), ["axes is 2147483648", "1 to 4"]),
    (header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 8, 99, 0)), ["type is 99", "8 (Q8_0)"]),
    (header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 8, 26, 0)), ["type is 26", "8 (Q8_0)"]),  # I32
    (header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 8, 8, 0)), ["inputs is 8", "a multiple of 32"]),
    (header(tensors=1, rest=KEY + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)), ["shape and offset"]),
    (header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 8, 0, 0)), ["tensor 'a' ends after the file"]),
]  # fmt: skip


@pytest.mark.parametrize("data, words", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_headers_are_named(data, words, tmp_path):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        mj.load(tmp_path / "m.gguf")
    assert all(word in str(error.value) for word in words), error.value


def with_tokenizer(writer):
    """Adds a byte-level tokenizer."""
    for key, value in byte_level("smollm").items():
        if key.endswith("_id"):
            set_key(key, value)(writer)
        else:
            writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)


def test_mutated_files_are_refused_or_load(wide, tmp_path):
    """Random bytes change, are cut out or stand twice, most of them in the header."""
    write_gguf(wide, tmp_path / "whole.gguf", "Q4_1", change=with_tokenizer)
    assert mj.load(tmp_path / "whole.gguf").tokenizer.encode("a 12")
    whole, path, rng = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "m.gguf", np.random.default_rng(0)
    loaded, count = 0, int(os.environ.get("MERCURY_FUZZ", 40))
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(0, rng.choice([1_500, 20_000, len(data)])))
            match rng.integers(4):
                case 0:
                    data[at] = rng.integers(256)
                case 1:
                    del data[at : at + int(rng.integers(1, 64))]
                case 2:
                    data[at:at] = data[at : at + int(rng.integers(1, 64))]
                case 3:
                    data[at : at + 8] = rng.bytes(8)
        path.write_bytes(data[: int(rng.integers(0, len(data)))] if rng.random() < 0.1 else data)
        try:
            mj.load(path)
            loaded += 1
        except ValueError:
            pass
    assert 0 < loaded < count


def test_smollm2_without_its_package_names_the_command(monkeypatch, tmp_path, wide):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("MERCURY_SMOLLM2", raising=False)
    with pytest.raises(CheckpointError, match=SMOLLM2_COMMAND):
        mj.load("smollm2")
    write_gguf(wide, tmp_path / "m.gguf", "Q8_0")
    monkeypatch.setenv("MERCURY_SMOLLM2", str(tmp_path / "m.gguf"))
    assert mj.load("smollm2").name == "smollm2"
