"""Images in /v1/chat/completions: the answers of `mj.sample`, the prefix cache, and what is refused."""

import base64
import io
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

import mercury_jax as mj
from mercury_jax import images
from mercury_jax.serve.chat import image_urls
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig
from tests.image_models import conversation, image_lm, picture
from tests.serve.api_client import CHAT, PAYLOAD, ScriptedApp, client_of


def file_of(pixels, kind="PNG", **more):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **more)
    return out.getvalue()


def data_url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(*parts, text="the quick fox", **fields):
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {
        "model": "tiny image model",
        "messages": [message],
        "max_tokens": 16,
        "seed": 3,
        "temperature": 0.7,
        **fields,
    }


@pytest.fixture(scope="module")
def engine():
    engine = Engine(image_lm(), EngineConfig(slots=2, context=512, programs="one", prefix_bytes=1 << 22))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def client(engine):
    return client_of(engine)


def answer(client, payload):
    response = client.post(CHAT, json=payload)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(body):
    return body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_an_answer_about_an_image_equals_that_of_sample(client, kind):
    data = file_of(picture(1), kind.upper())
    body = answer(client, ask(part(data_url(data, kind))))
    out = mj.sample(image_lm(), conversation(data), max_tokens=16, seed=3, temperature=0.7)
    assert text_of(body) == out.text
    assert body["usage"]["prompt_tokens"] == out.first[0]


def test_another_image_or_detail_gives_another_answer_and_prompt(client):
    one, other = (part(data_url(file_of(picture(seed)))) for seed in (1, 2))
    wide = part(data_url(file_of(picture(1, 300, 300))), detail="low")
    answers = [answer(client, ask(*parts)) for parts in ((one,), (other,), (one, other), (wide,))]
    assert len({text_of(body) for body in answers}) == 4
    tokens = [body["usage"]["prompt_tokens"] for body in answers]
    assert tokens[0] == tokens[1] < tokens[2] < tokens[3]


def test_the_prefix_cache_tells_images_apart(client):
    """The same placeholders with another image are another prefix; the same image is found again."""
    text = "the quick brown fox " * 30
    shown = [part(data_url(file_of(picture(seed))), detail="low") for seed in (5, 6)]
    cached = lambda body: body["usage"]["prompt_tokens_details"]["cached_tokens"]
    first = answer(client, ask(shown[0], text=text))
    again = answer(client, ask(shown[0], text=text))
    other = answer(client, ask(shown[1], text=text))
    assert cached(first) == 0 < cached(again) and cached(other) == 0
    assert text_of(first) == text_of(again) != text_of(other)
    alone = mj.sample(image_lm(), conversation(file_of(picture(6)), text=text, detail="low"), max_tokens=16, seed=3,
                      temperature=0.7)  # fmt: skip
    assert text_of(other) == alone.text


def test_a_cached_prefix_that_ends_inside_an_image_changes_no_answer(client):
    """The second image begins in one chunk of the cache and ends in the next."""
    shown = [part(data_url(file_of(picture(seed, 200, 200))), detail="low") for seed in (7, 8)]
    first = answer(client, ask(*shown, text="a"))
    later = answer(client, ask(*shown, text="another question"))
    alone = mj.sample(
        image_lm(), conversation(*(picture(seed, 200, 200) for seed in (7, 8)), text="another question", detail="low"),
        max_tokens=16, seed=3, temperature=0.7,
    )  # fmt: skip
    assert text_of(later) == alone.text and text_of(first)


def test_images_join_a_running_batch_without_changing_it(client):
    from concurrent.futures import ThreadPoolExecutor

    asked = [ask(part(data_url(file_of(picture(seed, 40, 60))))) for seed in range(4)]
    asked.append(ask(text="brown fox", seed=9))
    alone = [text_of(answer(client, payload)) for payload in asked]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda payload: text_of(answer(client, payload)), asked))
    assert together == alone


def test_a_model_without_a_tower_refuses_images_with_what_would_be_needed(scripted_app):
    error = scripted_app.refuses(
        {**PAYLOAD, "messages": [{"role": "user", "content": [part(data_url(b""))]}]}
    )
    assert error["param"] == "messages[0].content[0].type"
    assert "no vision tower" in error["message"] and "DiffusionGemma" in error["message"]


# --- hostile images


def chunk(kind, data):
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png(width, height, rows=b"", extra=b"", kind=b"\x08\x02"):
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + kind + b"\0\0\0"
    return (
        images.FORMATS["PNG"]
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def gif(width, height, frames=1):
    """A picture of one colour, its frame repeated; the size is what the header declares."""
    data = file_of(np.zeros((64, 64, 3), np.uint8), "GIF")
    first = data.index(b"\x2c\0\0\0\0")
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    return data[:6] + size + data[10:first] + data[first:-1] * frames + b";"


def webp(width, height, lie=0):
    """A header that declares a canvas, with the length of the file wrong by `lie`."""
    vp8x = (
        b"VP8X"
        + (10).to_bytes(4, "little")
        + b"\0\0\0\0"
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + (4 + len(vp8x) + lie).to_bytes(4, "little") + b"WEBP" + vp8x


def jpeg(width, height):
    """A real file whose frame header declares another size."""
    data = bytearray(file_of(picture(1), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


GOOD = {kind: file_of(picture(1, 64, 64), kind.upper()) for kind in ("png", "jpeg", "webp", "gif")}
BIG = file_of(picture(1, 575, 575))  # 0.99 MB
HOSTILE = {
    "remote": [part("https://example.com/a.png")],
    "http": [part("http://169.254.169.254/latest")],
    "file": [part("file:///etc/passwd")],
    "path": [part("/etc/passwd")],
    "ftp": [part("ftp://a/b.png")],
    "javascript": [part("javascript:alert(1)")],
    "no base64": [part("data:image/png,abc")],
    "text type": [part("data:text/html;base64,AAAA")],
    "svg": [part("data:image/svg+xml;base64,PHN2Zy8+")],
    "bmp": [part(data_url(file_of(picture(1), "BMP"), "bmp"))],
    "tiff as png": [part(data_url(file_of(picture(1), "TIFF")))],
    "empty": [part("data:image/png;base64,")],
    "wrong alphabet": [part("data:image/png;base64,!!!!")],
    "spaces": [part("data:image/png;base64," + "iVBO Rw0K" * 4)],
    "not ASCII": [part("data:image/png;base64,éé")],
    "padding": [part(data_url(GOOD["png"])[:-3])],
    "another format": [part(data_url(GOOD["jpeg"], "png"))],
    "wrong magic": [part(data_url(b"\x89PNX" + GOOD["png"][4:]))],
    "truncated png": [part(data_url(GOOD["png"][:200]))],
    "truncated jpeg": [part(data_url(GOOD["jpeg"][:200], "jpeg"))],
    "truncated webp": [part(data_url(GOOD["webp"][:60], "webp"))],
    "truncated gif": [part(data_url(gif(64, 64)[:30], "gif"))],
    "header only": [part(data_url(images.FORMATS["PNG"]))],
    "png bomb": [part(data_url(png(50_000, 50_000, bytes(1 << 20))))],
    "png of valid pixels": [part(data_url(png(12_000, 12_000, bytes(12_000 * 1501), kind=b"\x01\0")))],
    "png 2**31": [part(data_url(png(2**31 - 1, 2**31 - 1)))],
    "png of no width": [part(data_url(png(0, 10)))],
    "png long": [part(data_url(png(1_000_000, 1)))],
    "png without pixels": [part(data_url(png(64, 64, b"\0" * 10)))],
    "jpeg bomb": [part(data_url(jpeg(65_500, 65_500), "jpeg"))],
    "gif bomb": [part(data_url(gif(65_535, 65_535, 3), "gif"))],
    "webp bomb": [part(data_url(webp(1 << 24, 1 << 24), "webp"))],
    "webp lies": [part(data_url(webp(64, 64, lie=1 << 20), "webp"))],
    "riff of a wave": [part(data_url(b"RIFF\x24\0\0\0WAVEfmt ", "webp"))],
    "iccp bomb": [part(data_url(png(64, 64, extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(64 << 20), 9)))))],
    "text bomb": [part(data_url(png(64, 64, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20), 9)))))],
    "one too large": [part(data_url(GOOD["png"] + bytes(images.MAX_BYTES)))],
    "16 over the total": [part(data_url(BIG))] * 16,
    "too many": [part(data_url(GOOD["png"]))] * (image_urls.MAX_IMAGES + 1),
    "too many pixels": [part(data_url(png(5000, 5000, bytes(75_005_000))))] * 5,
    "detail": [part(data_url(GOOD["png"]), detail="best")],
    "no url": [{"type": "image_url", "image_url": {}}],
    "url as text": [{"type": "image_url", "image_url": data_url(GOOD["png"])}],
    "video": [{"type": "video_url", "video_url": {"url": data_url(GOOD["gif"], "gif")}}],
    "audio": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripted_images():
    return ScriptedApp(image_lm())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_in_bounded_memory(scripted_images, name, no_network):
    payload = ask(*HOSTILE[name])
    sent = sum(len(str(one)) for one in HOSTILE[name])
    tracemalloc.start()
    try:
        error = scripted_images.refuses(payload, within=10.0)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert error["param"].startswith("messages") and error["message"]
    assert peak < 12 * sent + (16 << 20)  # the request and its copies; no pixels of what it declares


BOMBS = ["png bomb", "png of valid pixels", "png 2**31", "png long", "jpeg bomb", "gif bomb", "webp bomb"]


@pytest.mark.parametrize("name", BOMBS)
def test_no_pixel_of_a_bomb_is_decoded(scripted_images, name, monkeypatch):
    """Pillow's memory is not that of Python: what declares too many pixels is never loaded."""

    def load(image):
        raise AssertionError(f"{image.size} is decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile.load", load)
    scripted_images.refuses(ask(*HOSTILE[name]))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gif", gif(64, 64, 20_000)),
        ("jpeg", GOOD["jpeg"][:2] + b"\xff\xe1\x10\x02Exif\0\0" + b"\xff" * 4088 + GOOD["jpeg"][2:]),
        ("png", file_of(picture(1), "PNG", icc_profile=b"\xff" * 3000)),
    ],
    ids=["a GIF of 20,000 frames", "damaged EXIF data", "a damaged ICC profile"],
)
def test_what_is_around_the_pixels_is_not_read(client, name, data):
    """The first frame of an animation, and pictures with damaged metadata, are answered."""
    assert text_of(answer(client, ask(part(data_url(data, name)))))


def test_the_orientation_of_exif_is_applied_and_transparency_is_white():
    exif = Image.Exif()
    exif[0x112] = 6
    turned = images.decode_file(file_of(picture(1), "PNG", exif=exif), "image")
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(picture(1), 3))
    clear = np.dstack([picture(1), np.zeros((20, 30), np.uint8)])
    assert (np.asarray(images.decode_file(file_of(clear), "image")) == 255).all()


def test_the_limits_of_bodies_follow_the_models(nano, scripted_images):
    """A model that reads images takes bodies with 15 MiB of them; others stay at 4 MiB; an option wins."""
    long = {**PAYLOAD, "messages": [{"role": "user", "content": "a" * (5 << 20)}]}
    assert ScriptedApp(nano).post(long).status_code == 413
    assert scripted_images.post({**long, "model": "tiny image model"}).status_code == 400  # too many tokens
    assert ScriptedApp(image_lm(), max_body=1000).post(ask(part(data_url(GOOD["png"])))).status_code == 413
