"""Laws of images in conversations, through `mj.sample` and `mj.stream`."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import mercury_jax as mj
from mercury_jax.decode import image_prompts, inputs
from mercury_jax.decode.image_prefill import encode_images
from mercury_jax.decode.request import Request, encode_request, start
from mercury_jax.types import ImageTokens, Pass
from tests.image_models import conversation, image_lm, picture


def encoded(lm, messages):
    [prompt], _ = inputs.encode_prompts(lm, messages, images=True)
    return prompt


def tower(lm):
    assert lm.model.vision is not None
    return lm.model.vision.config


def file_of(pixels, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def canvas_logits(lm, messages):
    """Logits of a canvas behind a conversation: the prompt in one pass, then the canvas."""
    prompt = encoded(lm, messages)
    known, slots = len(prompt.ids), len(prompt.ids) + 8
    found = image_prompts.soft_tokens(lm, [prompt.images], slots)
    embeddings = np.zeros((1, known, lm.model.config.width), np.float32)
    soft = np.asarray(found.end[0, :known]) > 0
    embeddings[0, soft] = np.asarray(found.embeddings)[0, : soft.sum()]
    images = ImageTokens(jnp.asarray(embeddings), found.start[:, :known], found.end[:, :known])
    at = lambda x: jnp.full((1,), x, jnp.int32)
    yes, cache = jnp.ones((1,), bool), lm.model.empty_cache(1, slots)
    ids = jnp.asarray([prompt.ids], jnp.int32)
    _, cache = lm.model.forward(lm.params, Pass(ids, cache, at(0), at(known), at(known), yes, images=images))
    canvas = jnp.arange(8, dtype=jnp.int32)[None] + 20
    hidden, _ = lm.model.forward(lm.params, Pass(canvas, cache, at(known), at(8), at(slots), ~yes))
    return np.asarray(lm.model.head(lm.params, hidden))


def test_the_prompt_has_the_soft_tokens_of_each_image_between_its_marks():
    lm = image_lm()
    c = tower(lm)
    prompt = encoded(lm, conversation(picture(1), picture(2, 40, 10)))
    assert len(prompt.images) == 2 and prompt.images[0].tokens != prompt.images[1].tokens
    for image in prompt.images:
        assert prompt.ids[image.at - 1] == c.begin and prompt.ids[image.at + image.tokens] == c.end
        assert set(prompt.ids[image.at : image.at + image.tokens]) == {c.placeholder}
    assert prompt.ids.count(c.placeholder) == sum(image.tokens for image in prompt.images)


def test_the_text_of_a_message_cannot_write_a_placeholder():
    lm = image_lm()
    prompt = encoded(lm, conversation(picture(1), text="<|image|> <|image>"))
    assert prompt.ids.count(tower(lm).placeholder) == prompt.images[0].tokens


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_the_same_as_path_bytes_pil_image_and_array(kind, tmp_path):
    lm, data = image_lm(), file_of(picture(1), kind)
    path = tmp_path / "picture"
    path.write_bytes(data)
    pil = Image.open(io.BytesIO(data))
    pixels = np.asarray(pil.convert("RGB"))
    forms = [path, str(path), data, pil, pixels, jnp.asarray(pixels)]
    found = {encoded(lm, conversation(form)).images[0].digest for form in forms}
    assert len(found) == 1


def test_another_image_changes_the_logits_behind_it():
    lm = image_lm()
    one, same, other = (canvas_logits(lm, conversation(picture(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3


def test_detail_is_the_budget_of_soft_tokens():
    lm = image_lm()
    count = lambda detail: encoded(lm, conversation(picture(1, 300, 300), detail=detail)).images[0].tokens
    assert count(None) == count("auto") <= 12 < count("low") <= 70 < count("high") <= 1120


CALL = dict(max_tokens=16, seed=3, temperature=0.7)


def test_answers_depend_on_the_image_and_on_nothing_else_of_the_call():
    """Alone, beside other rows, several at once, step by step, as a stream: the same answer to the same image."""
    lm = image_lm()
    asked = [conversation(picture(seed)) for seed in (1, 2)]
    alone = [mj.sample(lm, one, **CALL).texts[0] for one in asked]
    assert alone[0] != alone[1]
    text = [{"role": "user", "content": "the quick fox"}]
    together = mj.sample(lm, [asked[0], text, asked[1]], max_tokens=16, seed=[3, 3, 3], temperature=0.7)
    assert [together.texts[0], together.texts[2]] == alone
    assert together.texts[1] == mj.sample(lm, text, **CALL).texts[0]
    several = mj.sample(lm, asked[0], n=3, **CALL)
    assert several.texts[0] == alone[0] and len(set(several.texts)) > 1
    *_, last = mj.stream(lm, asked[0], **CALL)
    assert last.text == alone[0]
    part = mj.sample(lm, asked[0], passes=2, **CALL)
    assert mj.sample(lm, None, state=part.state).texts == alone[:1]


def test_a_conversation_goes_on_after_its_images():
    lm = image_lm()
    first = mj.sample(lm, conversation(picture(1)), keep=True, **CALL)
    later = conversation(picture(2), text="brown")
    followed = mj.sample(lm, later, state=first.state, keep=True, **CALL)
    again = mj.sample(lm, later, state=first.state, **CALL)
    other = mj.sample(lm, conversation(picture(3), text="brown"), state=first.state, **CALL)
    assert followed.texts == again.texts != other.texts
    assert followed.state is not None
    ids, _, images = followed.state.prompts[0]
    assert len(images) == 2 and all(ids[x.at - 1] == tower(lm).begin for x in images)


@pytest.mark.parametrize("width", [80, 128, 400])
def test_the_cache_does_not_depend_on_the_passes_of_the_prefill(width):
    """A pass never ends inside an image: narrow passes give the keys of one pass over the whole prompt."""
    lm = image_lm(tokens=70)
    messages = conversation(picture(1, 200, 90), picture(2, 64, 300), picture(3))
    request = encode_request(lm, Request(prompt=messages, reads_images=True))
    state = start(lm, request).state
    config = start(lm, request).config
    bare = state._replace(
        cache=config.model.empty_cache(1, state.tokens.shape[1]), cache_length=jnp.zeros(1, int)
    )
    found = image_prompts.soft_tokens(lm, [request.prompts[0].images], state.tokens.shape[1])
    limit = jnp.asarray(state.tokens.shape[1])
    narrow = jax.jit(encode_images, static_argnums=(0, 3))(config, lm.params, bare, width, limit, found)
    known = len(request.prompts[0].ids)
    assert int(narrow.cache_length[0]) == int(state.cache_length[0]) == known
    for a, b in zip(jax.tree.leaves(narrow.cache), jax.tree.leaves(state.cache)):
        np.testing.assert_allclose(a[:, :known], b[:, :known], atol=2e-5)


def test_an_image_longer_than_a_plain_prefill_pass_and_than_the_window():
    lm = image_lm(tokens=700)
    messages = conversation(picture(1, 300, 300))
    assert encoded(lm, messages).images[0].tokens > 512
    first, same = (mj.sample(lm, messages, **CALL).texts for _ in range(2))
    assert first == same != mj.sample(lm, conversation(picture(2, 300, 300)), **CALL).texts


def refused(lm, messages, call=mj.sample, **more):
    with pytest.raises(ValueError) as error:
        call(lm, messages, **more)
    return str(error.value)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    lm, one = image_lm(), picture(1)
    part = "messages[0].content"
    assert "no vision tower" in refused(image_lm(vision=False), conversation(one))
    assert "DiffusionGemma" in refused(mj.load(), conversation(one))
    assert refused(lm, conversation(tmp_path / "none.png")).startswith(f"{part}[0].image is ")
    assert refused(lm, conversation(b"text")).startswith(f"{part}[0].image is ")
    assert refused(lm, conversation(one.astype(np.float32))).startswith(f"{part}[0].image is ")
    assert refused(lm, conversation(one, detail="most")).startswith("detail is 'most'")
    assert "text, or image" in refused(
        lm, [{"role": "user", "content": [{"type": "video"}, *conversation(one)[0]["content"]]}]
    )
    wrong = [{**conversation(one)[0], "role": "assistant"}, *conversation()]
    assert "messages of the user" in refused(lm, wrong)
    assert refused(lm, conversation(one), guidance=0.5).startswith("guidance is 0.5")
    assert "only mj.sample and mj.stream" in refused(
        lm, conversation(one), lambda lm, m: mj.score(lm, m, "fox")
    )
    assert "context" in refused(lm, conversation(*[picture(1, 900, 900)] * 2, detail="high"))
