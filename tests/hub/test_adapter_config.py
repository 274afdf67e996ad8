"""Keys of adapter_config.json: those that change the arithmetic are refused by name, also keys of later releases."""

import json

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.checkpoint import tensors
from tests.hub.goldens_of import GOLDENS

# What `LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained()` of peft 0.21.2 writes.
PEFT = dict(
    alora_invocation_tokens=None, alpha_pattern={}, arrow_config=None, auto_mapping=None,
    base_model_name_or_path="base", bias="none", corda_config=None, ensure_weight_tying=False, eva_config=None,
    exclude_modules=None, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, kasa_config=None,
    layer_replication=None, layers_pattern=None, layers_to_transform=None, loftq_config={}, lora_alpha=4,
    lora_bias=False, lora_dropout=0.0, lora_ga_config=None, megatron_config=None, megatron_core="megatron.core",
    modules_to_save=None, monteclora_config=None, peft_type="LORA", peft_version="0.21.2", qalora_group_size=16, r=2,
    rank_pattern={}, revision=None, target_modules=["q_proj"], target_parameters=None, task_type=None,
    trainable_token_indices=None, use_bdlora=None, use_dora=False, use_qalora=False, use_rslora=False,
    velora_config=None,
)  # fmt: skip
# Values of keys that change the arithmetic, and of keys that do not.
REFUSED = dict(
    alora_invocation_tokens=[5, 6], arrow_config={"top_k": 3}, bias="all", ensure_weight_tying=True,
    fan_in_fan_out=True, init_lora_weights="pissa", kasa_config={"beta": 1.0}, layer_replication=[[0, 2]],
    lora_bias=True, megatron_config={"a": 1}, modules_to_save=["lm_head"], monteclora_config={"num_groups": 2},
    peft_type="IA3", trainable_token_indices=[3], use_bdlora={"nblocks": 2}, use_dora=True, use_qalora=True,
    use_rslora=True, new_in_2027=0.5, also_new="on", zero=0,
)  # fmt: skip
IDLE = dict(
    auto_mapping={"parent_library": "x"}, corda_config={"verbose": True}, eva_config={"rho": 2.0},
    exclude_modules=["k_proj"], init_lora_weights="gaussian", layers_pattern="layers", layers_to_transform=[0],
    loftq_config={"loftq_bits": 4}, lora_dropout=0.1, lora_ga_config={"a": 1}, megatron_core="other", new_list=[],
    new_switch=False, qalora_group_size=8, revision="main", task_type="CAUSAL_LM", velora_config={"scale": 1.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Writes an adapter of the first layer's queries with these keys, and loads it onto the base."""
    folder = tmp_path_factory.mktemp("adapter")
    config = json.loads((GOLDENS / "qwen3" / "config.json").read_text())
    rows, rng = config["num_attention_heads"] * config["head_dim"], np.random.default_rng(3)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    arrays = {
        name.format("A"): rng.normal(size=(2, config["hidden_size"])).astype(np.float32),
        name.format("B"): rng.normal(size=(rows, 2)).astype(np.float32),
    }
    parts = [tensors.LazyTensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()]
    tensors.write(folder / "adapter_model.safetensors", parts)

    def load(**changes):
        (folder / "adapter_config.json").write_text(json.dumps({**PEFT, **changes}))
        return np.asarray(
            mj.load(GOLDENS / "qwen3", dtype="float32", adapter=folder).params["block_0"]["attention"]["q"][
                "w"
            ]
        )

    return load


def test_every_key_of_peft_is_here():
    assert set(PEFT) <= {*REFUSED, *IDLE} | {
        "alpha_pattern", "base_model_name_or_path", "inference_mode", "lora_alpha", "peft_version", "r",
        "rank_pattern", "target_modules", "target_parameters",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_may_change_the_arithmetic_is_refused_by_name(adapter, key):
    with pytest.raises(ValueError, match=rf"adapter_config.json: {key} is "):
        adapter(**{key: REFUSED[key]})


def test_other_keys_have_no_effect(adapter):
    np.testing.assert_array_equal(adapter(**IDLE), adapter())
    assert np.abs(adapter(lora_alpha=8) - adapter()).max() > 0.1
