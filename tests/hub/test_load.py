"""What is refused before a parameter is read, with its message; quantised and split parameters."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import hub, sharding
from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.cli import main
from mercury_jax.hub import family, params
from mercury_jax.hub.family import families
from mercury_jax.hub.load import load_opened, open_checkpoint
from mercury_jax.models.weight_quant import QuantisedWeight
from tests.hub.goldens_of import GOLDENS, NAMES, golden, logits_of
from tests.marks import slow_except


@pytest.fixture
def folder(tmp_path):
    """A copy of a small Qwen3 that a test may spoil."""
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "m")
    return tmp_path / "m"


def rewrite(folder, change):
    """Change the tensors {name: array} of a folder."""
    path = folder / "model.safetensors"
    found = {name: tensors.read(path, entry) for name, entry in tensors.header(path).items()}
    change(found)
    tensors.write(path, [tensors.LazyTensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in found.items()])


def reconfigure(folder, **changes):
    about = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(about))


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    "change, words",
    [(lambda t: t.pop(NORM), [NORM, "is missing"]),
     (lambda t: t.update({"model.extra.weight": np.zeros(3, np.float32)}), ["model.extra.weight", "no place"]),
     (lambda t: t.update({NORM: t[NORM][:-1]}), ["shape of", NORM, "by config.json"]),
     (lambda t: t.update({NORM: t[NORM].astype(np.int32)}), ["dtype of", NORM, "int32", "BF16"])],
)  # fmt: skip
def test_missing_surplus_and_misshapen_tensors_are_refused_by_name(folder, change, words):
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "changes, words",
    [({"architectures": None}, ["architectures", "[]", "DreamModel", "LlamaForCausalLM"]),
     ({"num_hidden_layers": None}, ["num_hidden_layers", "a value"]), ({"num_attention_heads": 5}, ["kv_heads"]),
     ({"num_hidden_layers": 9, "layer_types": None}, ["model.layers.", "is missing", "more"])],
)  # fmt: skip
def test_unsupported_configs_are_refused(folder, changes, words):
    reconfigure(folder, **changes)
    with pytest.raises(ValueError) as error:
        open_checkpoint(folder)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_refuses_an_unknown_key_unless_the_user_vouches_for_it(name, tmp_path):
    config = json.loads((GOLDENS / name / "config.json").read_text())
    nested = [
        k for k in ("text_config", "rope_parameters", "rope_scaling", "per_layer_config") if config.get(k)
    ]
    for path in [(), *((key,) for key in nested)]:
        changed = json.loads(json.dumps(config))
        inner = functools.reduce(dict.__getitem__, path, changed)
        inner["some_scale"] = 0.25
        (tmp_path / "config.json").write_text(json.dumps(changed))
        key = ".".join((*path, "some_scale"))
        with pytest.raises(ValueError, match=rf"config.json .*: {key}=0.25 is unknown") as error:
            hub.config_of(tmp_path / "config.json", mask=5)
        assert f"--ignore-config {key}" in str(error.value) and len(str(error.value)) < 300
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = hub.config_of(tmp_path / "config.json", mask=5)
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert hub.config_of(tmp_path / "config.json", mask=5, ignore_config=[key, key]) == plain
    # Settings of sampling stand at the top; the same name within the arithmetic is another setting.
    for inner in (config.get("rope_parameters"), config.get("rope_scaling")):
        if inner:
            inner["temperature"] = 2.0
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(ValueError, match="temperature=2.0 is unknown"):
                hub.config_of(tmp_path / "config.json", mask=5)
            del inner["temperature"]
    # Keys that a base class of any release writes, and whatever begins with an underscore.
    written = json.loads((GOLDENS.parent / "config_keys.json").read_text())["base"]
    (tmp_path / "config.json").write_text(json.dumps({**written, **config, "_mine": {"a": [1]}}))
    assert hub.config_of(tmp_path / "config.json", mask=5) == plain


WRITTEN = json.loads((GOLDENS.parent / "config_keys.json").read_text())["classes"]
ODD = {int: 3, float: 0.375, bool: None, str: "odd", list: [0], dict: {"odd": 1}}  # None: the other one


@pytest.mark.parametrize("name", WRITTEN)
def test_each_key_that_transformers_writes_is_read_refused_or_without_effect(name, tmp_path):
    """With its default it is accepted; with another value it changes the config, is refused by name, or is noted."""

    def read(path, value):
        changed = json.loads(json.dumps(WRITTEN[name]))
        functools.reduce(dict.__getitem__, path[:-1], changed)[path[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return hub.config_of(tmp_path / "config.json")

    plain = read(["architectures"], [name])
    mine = family.family_of(WRITTEN[name])[0]
    keys = mine.keys(WRITTEN[name]) if callable(mine.keys) else mine.keys
    unused = {key for key, kind in keys.items() if kind is family.UNUSED}
    inner = WRITTEN[name].get("text_config", {})
    without_effect = {*unused, *NO_MATTER, *mine.ignored_keys(WRITTEN[name], "config.json")}
    for path in [*([key] for key in WRITTEN[name]), *(["text_config", key] for key in inner)]:
        value = functools.reduce(dict.__getitem__, path, WRITTEN[name])
        odd = (not value) if isinstance(value, bool) else ODD.get(type(value), 3)
        try:
            matters = read(path, odd) != plain
        except (ValueError, TypeError):
            matters = True
        assert matters or {".".join(path), path[-1]} & without_effect, path


# Keys that have an effect only beside another one: a window, experts, layers that share keys.
NO_MATTER = {
    "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_experts", "top_k_experts",
    "moe_intermediate_size", "use_double_wide_mlp",
}  # fmt: skip


def test_what_a_user_vouches_for_must_be_there_and_not_be_read(folder):
    reconfigure(folder, _model_name_or_path="mine", logit_scale=0.5, use_mrope_2=True)
    with pytest.raises(ValueError, match=r"logit_scale=0.5 is unknown"):
        mj.load(folder)
    lm = mj.load(folder, ignore_config=["logit_scale", "use_mrope_2"])
    notes = " ".join(lm.card["notes"])
    assert all(key in notes for key in ("logit_scale", "use_mrope_2", "_model_name_or_path"))
    for keys, words in (
        (["logitscale"], "a key of"),
        (["hidden_size"], "does not read"),
        ("hidden_act", "a list"),
    ):
        with pytest.raises(ValueError, match=words):
            mj.load(folder, ignore_config=keys)


def test_a_longer_context_than_the_checkpoints_is_refused(folder):
    with pytest.raises(ValueError, match="context is 999999; allowed: at most"):
        mj.load(folder, context=999_999)
    assert mj.load(folder, context=32).model.config.context == 32


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_row_has_the_rope_frequencies_of_its_own_length(folder, kind):
    """Up to the context that the scaling allows; those of a short row are the ones of the original context."""
    original, longest = 24, 48
    scaling, half = dict(rope_type=kind, factor=2.0), mj.hub.config_of(folder).head_dim // 2
    if kind == "longrope":
        scaling |= dict(
            original_max_position_embeddings=original, short_factor=[1.0] * half,
            long_factor=np.linspace(1.0, 8.0, half).tolist(), attention_factor=1.0,
        )  # fmt: skip
    written = original if kind == "dynamic" else longest
    reconfigure(folder, rope_parameters=None, rope_scaling=scaling, max_position_embeddings=written)
    lm, within = mj.load(folder), mj.load(folder, context=original)
    assert lm.model.config.context == longest and within.model.config.context == original
    with pytest.raises(ValueError, match="allowed: 1..8: the model's context is 48 tokens"):
        mj.sample(lm, np.full(40, 5), max_tokens=9)
    # In a causal model only the frequencies of the same token differ between a short row and a long one.
    ids = np.random.default_rng(0).integers(3, 50, (1, 40))
    logits = lambda lm, n: np.asarray(mj.logits(lm, ids[:, :n]))[:, :20]
    np.testing.assert_allclose(logits(lm, 24), logits(within, 24), atol=1e-4)
    assert np.abs(logits(lm, 24) - logits(lm, 40)).max() > 1e-2
    # Decoding: a row that crosses the original length has the frequencies of its full length from the start.
    prompts = [ids[0, :6].tolist(), ids[0, :18].tolist()]
    found = mj.sample(lm, prompts, max_tokens=[8, 22], temperature=0.0)
    for prompt, answer in zip(prompts, found.tokens, strict=True):
        assert len(answer) == {6: 8, 18: 22}[len(prompt)]
        scored = np.asarray(mj.logits(lm, np.asarray([[prompt[-1], *answer]]), prompt=prompt[:-1]))[0]
        assert scored[:-1].argmax(-1).tolist() == list(answer)
    assert list(mj.sample(within, prompts[0], max_tokens=8, temperature=0.0).tokens[0]) == list(
        found.tokens[0]
    )
    # A session that grows beyond it encodes its text again.
    begun = mj.sample(lm, prompts[0], max_tokens=8, temperature=0.0)
    text = [*prompts[0], *map(int, begun.tokens[0])]
    further = mj.sample(lm, [7, 8, 9], state=begun.state, max_tokens=20, temperature=0.0)
    whole = mj.sample(lm, [*text, 7, 8, 9], max_tokens=20, temperature=0.0)
    assert list(further.tokens[0]) == list(whole.tokens[0])


def test_the_commands_take_ignore_config(folder, tmp_path, capsys):
    reconfigure(folder, logit_scale=0.5)
    keys = ["--ignore-config", "logit_scale"]
    commands = (
        ["info", str(folder), "--json"],
        ["convert", str(folder), str(tmp_path / "out")],
        ["eval", "exact", "--model", str(folder), "--file", str(tmp_path / "none.jsonl")],
        ["serve", "--model", str(folder), "--port", "0", "--bench-nothing"],
    )
    assert main(commands[0]) == 2 and "--ignore-config logit_scale" in capsys.readouterr().err
    assert main([*commands[0], *keys]) == 0 and "logit_scale" in capsys.readouterr().out
    assert main([*commands[1], *keys]) == 0 and (tmp_path / "out").is_dir()
    for command in commands[2:]:  # refused for another reason: the option itself is known
        assert main([*command, *keys]) == 2
        assert "'--ignore-config'" not in capsys.readouterr().err
    rewrite(
        folder, lambda tensors: tensors.pop("model.norm.weight")
    )  # missed once the config.json is accepted
    for command in (
        ["demo", "--model", str(folder)],
        ["bench", "decode", str(folder), "--tasks", "add3", "--limit", "2"],
    ):
        assert main(command) == 2 and "--ignore-config logit_scale" in capsys.readouterr().err
        assert main([*command, *keys]) == 2 and "model.norm.weight" in capsys.readouterr().err


def test_a_config_that_fits_two_families_is_noted(tmp_path, capsys):
    about = GOLDENS / "open_dcoder"
    assert main(["info", str(about), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["family"] == "Qwen2.5" and any("pass mask=" in x and "Open-dCoder" in x for x in row["notes"])
    assert main(["info", str(about), "--mask", "94", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["family"] == "Open-dCoder" and not any("pass mask=" in x for x in row["notes"])
    assert not any("fits" in x for x in hub.info(GOLDENS / "qwen2")["notes"])


def test_the_mask_may_be_given_and_is_required_where_it_is_unknown():
    with pytest.raises(ValueError, match="pass mask="):
        open_checkpoint(GOLDENS / "a2d_qwen3")
    assert open_checkpoint(GOLDENS / "a2d_qwen3", mask=7).config.mask == 7


def test_the_mask_is_read_from_the_tokenizer(tmp_path):
    shutil.copytree(GOLDENS / "a2d_qwen3", tmp_path / "m")
    about = {"mask_token": "<|mask|>", "added_tokens_decoder": {"9": {"content": "<|mask|>"}}}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(about))
    assert open_checkpoint(tmp_path / "m").config.mask == 9


def test_further_ends_are_read_from_the_generation_config(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = open_checkpoint(folder).config
    assert {config.eos, *config.ends} >= {5, 6}


def test_llada_moe_is_recognised_by_its_architecture():
    for name, wanted in (("llada", "LLaDA"), ("llada_moe", "LLaDA-MoE")):
        opened = open_checkpoint(GOLDENS / name, mask=5)
        assert opened.family is not None and opened.family.name == wanted
    assert len({f.name for f in families()}) == len(families())


def test_a_family_registered_by_a_user_is_read_and_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(family, "_REGISTERED", [*families()])
    dream = next(f for f in families() if f.name == "Dream")
    hub.register(dream._replace(name="Mine", architectures=("MyModel",)))
    shutil.copytree(GOLDENS / "dream", tmp_path / "mine")
    about = json.loads((tmp_path / "mine" / "config.json").read_text()) | {"architectures": ["MyModel"]}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(about))
    assert hub.info(tmp_path / "mine")["family"] == "Mine"
    assert open_checkpoint(tmp_path / "mine").config == open_checkpoint(GOLDENS / "dream").config
    with pytest.raises(ValueError, match="name of a family is 'Mine'"):
        hub.register(dream._replace(name="Mine"))


def test_a_model_that_does_not_fit_into_memory_is_refused_with_the_numbers(monkeypatch):
    model = golden("qwen3").opened.model
    need = params.param_bytes(model, None, jnp.float32)
    assert need == 4 * params.count_parameters(model)[0]
    monkeypatch.setattr(params, "free_memory", lambda devices: need)
    params.check_memory(model, None, jnp.float32, None, "x")
    monkeypatch.setattr(params, "free_memory", lambda devices: need - 1)
    with pytest.raises(ValueError, match=r"memory for x is .* GB on each of 1 device.*allowed: up to"):
        params.check_memory(model, None, jnp.float32, None, "x")
    params.check_memory(model, None, jnp.float32, "int8", "x")  # as int8 it fits


@pytest.mark.parametrize(
    "name, kind, most",
    slow_except([("qwen3", "int8", 0.03), ("llada2", "int8", 0.03), ("gemma4_moe", "int8", 0.04),
                 ("qwen3", "fp8", 0.1), ("gemma4_moe", "fp8", 0.1)],
                ("qwen3", "int8", 0.03), ("qwen3", "fp8", 0.1))
)  # fmt: skip
def test_8_bit_weights_change_logits_little(name, kind, most):
    g = golden(name)
    small = load_opened(g.opened, dtype=jnp.float32, quantise=kind).params
    kept = [
        x
        for x in jax.tree.leaves(small, is_leaf=lambda x: isinstance(x, QuantisedWeight))
        if isinstance(x, QuantisedWeight)
    ]
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert kept and size(small) < 0.6 * size(g.params)
    assert small["embed"].scale.shape == small["embed"].values.shape[:1]  # one scale per id
    assert size(small) == params.param_bytes(g.opened.model, None, jnp.float32, kind)
    exact, rough = logits_of(g, g.said["tokens"]), logits_of(g._replace(params=small), g.said["tokens"])
    # The median: rounding may send a token to another expert, and that one's logits are others then.
    assert 0 < np.median(np.abs(exact - rough)) < most * exact.std()
    assert np.corrcoef(exact.ravel(), rough.ravel())[0, 1] > 1 - most / 3


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["sdar_moe", "gemma4_dense"])
def test_parameters_split_over_four_devices_give_the_same_logits(name):
    if len(jax.devices()) < 4:
        pytest.fail("conftest.py makes four devices")
    g = golden(name)
    on = sharding.mesh(data=1, tensor=2, expert=2, devices=jax.devices()[:4])
    split = load_opened(g.opened, dtype=jnp.float32, mesh=on).params
    whole = sum(x.nbytes for x in jax.tree.leaves(split))
    first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(split))
    assert first == params.param_bytes(g.opened.model, on, jnp.float32) < 0.75 * whole
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(split), jax.device_get(g.params))
    np.testing.assert_allclose(
        logits_of(g._replace(params=split), g.said["tokens"]), logits_of(g, g.said["tokens"]), atol=1e-4
    )
