"""`hub.tiny_random`: a checkpoint in a family's published format that every command takes."""

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.hub.export import BUILDS
from tests.image_models import picture
from tests.marks import slow_except


@pytest.mark.long
@pytest.mark.parametrize("family", slow_except(BUILDS, "LLaDA"))
def test_a_checkpoint_is_of_its_family_and_answers_a_chat(family, tmp_path):
    folder = mj.hub.tiny_random(family, tmp_path / "model")
    assert mj.hub.info(folder)["family"] == family
    lm = mj.load(folder)
    out = mj.sample(lm, [{"role": "user", "content": "389+784="}], max_tokens=4)
    assert out.lengths[0] <= 4 and out.forwards[0] >= 1
    assert lm.tokenizer.encode("389+784=") == mj.load().tokenizer.encode("389+784=")


@pytest.mark.long
@pytest.mark.parametrize("to", [None, "ours", "hf"])
def test_diffusion_gemma_reads_images_also_after_a_conversion(to, tmp_path):
    folder = mj.hub.tiny_random("DiffusionGemma", tmp_path / "model")
    converted = folder if to is None else mj.hub.convert(folder, tmp_path / to, to=to)
    lm, text = mj.load(converted), {"type": "text", "text": "389+784="}
    ask = lambda seed: [{"role": "user", "content": [{"type": "image", "image": picture(seed)}, text]}]
    one, other = (mj.sample(lm, ask(seed), max_tokens=16, seed=1).texts for seed in (1, 2))
    assert one != other and one == mj.sample(mj.load(folder), ask(1), max_tokens=16, seed=1).texts


@pytest.mark.long
def test_the_seed_decides_the_weights(tmp_path):
    first, again, other = (
        mj.load(mj.hub.tiny_random("LLaDA", tmp_path / str(i), seed=seed)).params
        for i, seed in enumerate((0, 0, 1))
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"], other["embed"])


@pytest.mark.long
def test_a_scaled_head_makes_predictions_certain_enough_for_a_threshold(tmp_path):
    passes = [
        mj.sample(
            mj.load(mj.hub.tiny_random("LLaDA", tmp_path / str(scale), head_scale=scale)),
            [{"role": "user", "content": "389+784="}],
            max_tokens=32,
            sampler=mj.rules.threshold(0.5),
        ).forwards[0]
        for scale in (1.0, 8.0)
    ]
    assert passes[0] == 32 and passes[1] < 24
    with pytest.raises(ValueError, match=r"head_scale is 8\.0; allowed: 1\.0 for DiffusionGemma"):
        mj.hub.tiny_random("DiffusionGemma", tmp_path / "gemma", head_scale=8.0)


def test_unknown_families_and_folders_in_use_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="family is 'BERT'; allowed: LLaDA; "):
        mj.hub.tiny_random("BERT", tmp_path / "model")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=str(tmp_path)):
        mj.hub.tiny_random("llada", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
