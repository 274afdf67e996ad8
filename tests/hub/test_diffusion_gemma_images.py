"""Images through DiffusionGemma against transformers: soft tokens, and the logits behind them."""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import images
from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.types import ImageTokens, Pass
from tests.hub.drawn_images import CASES, draw_image
from tests.hub.goldens_of import GOLDENS, golden

CHECKPOINTS = [f"images/{i}" for i in (1, 2, 3)]


def limit(own):
    return max(1e-4, 3 * float(own.max()))


def runs(mask):
    """(row, start, end) of each run of soft tokens, those of the first row first."""
    edges = np.diff(np.pad(mask, [(0, 0), (1, 1)]), axis=1)
    return list(zip(np.nonzero(edges == 1)[0], np.nonzero(edges == 1)[1], np.nonzero(edges == -1)[1]))


def soft_tokens(g):
    """Our soft tokens of all images, without those of padding [N, D], and where they belong in the prompts."""
    encoded = g.opened.model.vision.encode(g.params, g.said["patches"], g.said["positions"])
    found = [np.asarray(x)[: end - start] for x, (_, start, end) in zip(encoded, runs(g.said["image"]))]
    return np.concatenate(found)


def image_tokens(mask, soft):
    """The soft tokens as an argument of a pass over whole rows."""
    embeddings = np.zeros((*mask.shape, soft.shape[-1]), np.float32)
    embeddings[mask > 0] = soft
    bounds = np.zeros((2, *mask.shape), np.int32)
    for row, start, end in runs(mask):
        bounds[:, row, start:end] = np.array([[start], [end]])
    return ImageTokens(jnp.asarray(embeddings), *map(jnp.asarray, bounds))


@functools.partial(jax.jit, static_argnums=0)
def passes(model, params, tokens, found, canvas):
    (rows, known), length = tokens.shape, canvas.shape[1]
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    yes, cache = jnp.ones((rows,), bool), model.empty_cache(rows, known + length)
    given = Pass(tokens, cache, full(0), full(known), full(known), yes, images=found)
    hidden, cache = model.forward(params, given)
    behind, _ = model.forward(
        params, Pass(canvas, cache, full(known), full(length), full(known + length), ~yes)
    )
    return model.head(params, hidden), model.head(params, behind)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_soft_tokens_equal_transformers(name):
    g = golden(name)
    got, want = soft_tokens(g), g.said["soft"]
    assert got.shape == want.shape and want.std() > 0.3
    assert np.abs(got - want).max() <= limit(g.said["fp64_diff_soft"])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_behind_images_equal_transformers(name):
    g = golden(name)
    found = image_tokens(g.said["image"], soft_tokens(g))
    run = lambda found: passes(g.opened.model, g.params, g.said["tokens"], found, g.said["canvas"])
    encoded, denoised = run(found)
    assert np.abs(encoded - g.said["encoder_logits"]).max() <= limit(g.said["fp64_diff_encoder"])
    assert np.abs(denoised - g.said["logits"]).max() <= limit(g.said["fp64_diff_logits"])
    assert np.abs(run(found._replace(embeddings=-found.embeddings))[1] - denoised).max() > 0.1


def test_the_drawn_checkpoints_have_both_kinds_of_attention_and_of_pooling():
    found = (open_checkpoint(GOLDENS / name).model.vision for name in CHECKPOINTS)
    towers = [vision.config for vision in found if vision is not None]
    assert {tower.bidirectional for tower in towers} == {True, False}
    assert {tower.standardise for tower in towers} == {True, False} and {tower.pool for tower in towers} == {
        2,
        3,
    }


@pytest.mark.parametrize("number", range(len(CASES)))
def test_patches_and_positions_equal_those_of_transformers(number):
    case, want = CASES[number], json.loads((GOLDENS / "images" / "processed.json").read_text())[str(number)]
    tower = images.VisionConfig(width=8, layers=1, heads=1, kv_heads=1, head_dim=4, ffn=8, tokens=case.tokens)
    image = images.prepare(images.read(draw_image(case), "image"), tower)
    digest = lambda x: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    found = image.patches()
    assert image.tokens == want["tokens"]
    assert digest(found.positions) == want["positions"] and digest(found.values) == want["patches"]


def test_a_checkpoint_without_the_tensors_of_its_tower_reads_text(tmp_path):
    """Part of them is an error that names what is missing."""
    folder = GOLDENS / "images/1"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    entries = tensors.header(folder / "model.safetensors")

    def write(keep):
        kept = {name: entry for name, entry in entries.items() if keep(name)}
        lazy = [
            tensors.LazyTensor(n, e.shape, e.dtype, lambda e=e: tensors.read(folder / "model.safetensors", e))
            for n, e in kept.items()
        ]
        tensors.write(tmp_path / "model.safetensors", lazy)

    write(lambda name: "vision" not in name)
    opened = open_checkpoint(tmp_path)
    assert opened.model.vision is None
    assert any("no vision tower" in note for note in opened.card["notes"])
    write(lambda name: "embed_vision" not in name)
    with pytest.raises(CheckpointError, match=r"embed_vision\.embedding_projection\.weight' is missing"):
        open_checkpoint(tmp_path)
