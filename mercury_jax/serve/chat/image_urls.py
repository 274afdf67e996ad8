"""Images of a chat request: parts of type `image_url`, whose address is a data URL with a picture.

The bytes come from a client, so everything is bounded before it costs anything: the number of images, the bytes of each
and of all together, and the declared number of pixels, which `images.decode_file` checks before it decodes one. No
address is ever fetched. Pictures are decoded one after the other, and only the resized pixels are kept.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax import images
from mercury_jax.serve.errors import invalid_request, invalid_value
from mercury_jax.types import LM, Vision

MAX_TOTAL = 15 << 20  # bytes of all images of a request
MAX_IMAGES = 32
MAX_PIXELS = 100_000_000  # of all images of a request, as decoded; some seconds of work
MAX_REQUEST = MAX_TOTAL // 3 * 4 + (1 << 20)  # bytes of a body with that many, in Base64
PREFIX = re.compile(r"data:(image/[a-z]+);base64,")
MEDIA_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
FORM = (
    "a data URL, data:image/TYPE;base64,DATA, with the type png, jpeg, webp or gif; addresses are not fetched"
)
Messages = list[dict[str, Any]]


def read_images(lm: LM, messages: Sequence[Mapping[str, Any]]) -> tuple[Messages, list[images.Image]]:
    """Reads the images of a conversation.

    Args:
        lm: The model, which has a vision tower.
        messages: Messages of `messages.plain_messages`.

    Returns:
        The messages as a chat template reads them, without the pictures; and the images in their order.

    Raises:
        ApiError: An address is no data URL, or a picture is damaged or too large.
    """
    tower, found, total, decoded = lm.model.vision, [], 0, 0
    plain: Messages = []
    for i, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, list) or tower is None:
            plain.append(dict(message))
            continue
        parts: list[dict[str, Any]] = []
        for j, part in enumerate(content):
            if part["type"] == "text":
                parts.append(part)
                continue
            name = f"messages[{i}].content[{j}].image_url.url"
            if len(found) == MAX_IMAGES:
                raise invalid_value("messages", f"a list of over {MAX_IMAGES} images", f"{MAX_IMAGES}")
            kind, data = _decode_url(part["url"], name)
            total += len(data)
            if total > MAX_TOTAL:
                raise invalid_value("messages", f"images of over {MAX_TOTAL} bytes", f"{MAX_TOTAL}")
            if not data.startswith(images.FORMATS[kind]):
                raise invalid_value(name, part["url"][:60], f"a picture in the format that it names, {kind}")
            image, pixels = _decode_image(tower, data, name, part["detail"])
            decoded += pixels
            if decoded > MAX_PIXELS:
                raise invalid_value("messages", f"images of over {MAX_PIXELS} pixels", f"{MAX_PIXELS}")
            found.append(image)
            parts.append({"type": "image"})
        plain.append({**message, "content": parts})
    return plain, found


def _decode_image(tower: Vision, data: bytes, name: str, detail: str) -> tuple[images.Image, int]:
    """Decodes and resizes a picture; returns the number of its pixels, too."""
    image = images.decode_file(data, name, invalid_value)
    try:
        return images.prepare(image, tower.config, detail), image.width * image.height
    except ValueError as error:
        raise invalid_request(name, str(error)) from None


def _decode_url(url: str, name: str) -> tuple[str, bytes]:
    """Decodes a data URL: the format that it names, and its bytes."""
    match = PREFIX.match(url[:64])
    if match is None or match[1] not in MEDIA_TYPES:
        raise invalid_value(name, url[:60], FORM)
    if (len(url) - match.end()) // 4 * 3 > images.MAX_BYTES + 2:
        raise invalid_value(name, url[:60], f"at most {images.MAX_BYTES} bytes")
    try:
        return MEDIA_TYPES[match[1]], base64.b64decode(url[match.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid_value(name, url[:60], "data in Base64") from None


def content_length(content: Any) -> int:
    """Returns the characters of a message's texts."""
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if part["type"] == "text")
    return len(content or "")
