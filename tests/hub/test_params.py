"""Memory that a model needs is computed from shapes, and loading needs little beyond the parameters."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from mercury_jax import hub
from mercury_jax.hub import params
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.sharding import AXES, partition_spec

CONFIG_26B = Path(__file__).with_name("diffusiongemma_26b.json")


@functools.cache
def model_26b():
    """Its shapes take seconds to find, once for each model object."""
    return open_checkpoint(CONFIG_26B).model


# Without memory_stats a CPU tells its peak only for the whole process: hence a process of its own.
LOAD = """
import json, resource, sys
import jax
jax.block_until_ready(jax.numpy.ones(8) * 2)
from mercury_jax.hub.load import load_opened, open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
opened = open_checkpoint(sys.argv[1])
before = peak()
params = load_opened(opened).params
size = sum(x.nbytes for x in jax.tree.leaves(params))
print(json.dumps({"extra": peak() - before - size, "size": size}))
"""
SIZES = dict(
    architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8,
    intermediate_size=8192, tie_word_embeddings=False, eos_token_id=1,
)  # fmt: skip


def hollow(folder: Path, config: dict) -> int:
    """A checkpoint of zeros that takes no room on the disk; returns the bytes of its largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(folder / "config.json")
    assert opened.family is not None
    names, shapes = opened.family.names(opened.config), params.shapes_of(opened.model)
    header, at = {}, 0
    for path, source in names.items():
        for name, shape in source.shapes(shapes[path].shape).items():
            size = 4
            for n in shape:
                size *= n
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + at)
    return max(e["data_offsets"][1] - e["data_offsets"][0] for e in header.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_loading_needs_little_memory_beyond_the_parameters(tmp_path):
    largest = hollow(tmp_path / "m", SIZES)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["size"] > 400e6
    assert said["extra"] < 2 * largest + 100e6


@pytest.mark.long
def test_the_26b_model_is_built_abstractly_as_published():
    """25.2B parameters of which a token meets 3.8B; on 8 devices each holds an eighth, but for a few norms."""
    model = model_26b()
    assert round(params.count_parameters(model)[0] / 1e9, 1) in (25.2, 25.3)
    assert abs(params.count_parameters(model)[0] / 1e9 - 25.2) < 0.06
    assert round(params.count_parameters(model)[1] / 1e9, 1) == 3.8
    plan = params.memory_plan(model, "bfloat16")
    for n, need in plan.items():
        assert plan[1].params / n <= need.params <= 1.02 * plan[1].params / n
    assert plan[1].params == 2 * params.count_parameters(model)[0]


@pytest.mark.parametrize("axis", ["tensor", "expert", "fsdp"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_sharding_rule_of_the_26b_model_fits_its_array(devices, axis):
    model = model_26b()
    mesh = AbstractMesh(tuple(devices if name == axis else 1 for name in AXES), AXES)
    for path, like in params.shapes_of(model).items():
        found = partition_spec(path, like.shape, model.shardings, mesh)
        for size, name in zip(like.shape, found):
            assert name is None or size % mesh.shape[name] == 0


@pytest.mark.long
def test_info_describes_a_config_without_tensors():
    found = hub.info(CONFIG_26B)
    assert found["family"] == "DiffusionGemma" and found["block"] == 256 and found["mask"] is None
    assert (
        found["alignment"] == "same_position"
        and found["context"] == 262144
        and found["licence"] == "Apache-2.0"
    )
    assert found["bytes_per_device"][8]["params"] < 6.5e9
