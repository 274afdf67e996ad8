"""Images in conversations: the parts of messages, their placeholders in a prompt, and their soft tokens in rows.

`split_conversation` reads the image parts of messages. The chat template writes one placeholder for each image, and
`place` expands it to as many as the image has soft tokens. `soft_tokens` runs the vision tower; `image_prefill` brings
the result into the KV cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mercury_jax import chat
from mercury_jax.config import refuse
from mercury_jax.decode.state import bucket
from mercury_jax.images import Image, prepare, read
from mercury_jax.types import LM, ImageTokens, Vision

NO_TOWER = "text: this model has no vision tower, which a checkpoint of DiffusionGemma has"
PARTS = 'text, or image: {"type": "image", "image": a path, bytes or an array}'
PART_KEYS = ("type", "image", "detail")  # of an image part


def has_images(content: Any) -> bool:
    """Says whether the content of a message has image parts."""
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    )


def split_conversation(
    lm: LM, messages: Sequence[Any], allowed: bool = True
) -> tuple[list[Any], list[Image]]:
    """Reads the image parts of a conversation, and joins contents that have text parts only.

    Args:
        messages: The messages; an image part is {"type": "image", "image": ..., "detail": "auto"}, see `images.read`.
        allowed: Whether the call reads images.

    Returns:
        The messages as a chat template reads them, and the images in their order.
    """
    plain: list[Any] = []
    found: list[Image] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        name = f"messages[{i}].content"
        if not isinstance(content, list | tuple):
            plain.append(message)
            continue
        if not has_images(content):
            kinds = PARTS if allowed and lm.model.vision is not None else chat.TEXT_ONLY
            plain.append({**message, "content": chat.join_parts(content, name, kinds=kinds)})
            continue
        if lm.model.vision is None:
            raise refuse(f"{name}: type", "image", NO_TOWER)
        if not allowed:
            raise refuse(f"{name}: type", "image", "text: only mj.sample and mj.stream read images")
        if message.get("role") != "user":
            raise refuse(f"{name}: type", "image", "text: only messages of the user may have images")
        parts = [_read_part(lm.model.vision, part, f"{name}[{j}]") for j, part in enumerate(content)]
        found += [part for part in parts if isinstance(part, Image)]
        shown = [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part} for part in parts
        ]
        plain.append({**message, "content": shown})
    return plain, found


def _read_part(tower: Vision, part: Any, name: str) -> str | Image:
    """Reads one part of a content: a text, or an image."""
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return chat.text_part(part, name, PARTS)
    if unknown := next((key for key in part if key not in PART_KEYS), None):
        raise refuse(f"key of {name}", unknown, ", ".join(PART_KEYS))
    return prepare(read(part.get("image"), f"{name}.image"), tower.config, part.get("detail", "auto"))


def place(lm: LM, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], tuple[Image, ...]]:
    """Expands the placeholder of each image in a rendered conversation.

    Returns:
        The ids, with the soft tokens of each image between two marks, and the images with their positions.
    """
    tower = lm.model.vision
    if tower is None or not images:
        return list(ids), ()
    c, found = tower.config, list(ids).count(tower.config.placeholder)
    if found != len(images):
        allowed = "a chat template that writes one placeholder for each image"
        raise refuse("messages", f"{len(images)} images with {found} placeholders", allowed)
    out: list[int] = []
    placed: list[Image] = []
    for i in ids:
        if i != c.placeholder:
            out.append(i)
            continue
        image = images[len(placed)]
        placed.append(dataclasses.replace(image, at=len(out) + 1))
        out += [c.begin, *[c.placeholder] * image.tokens, c.end]
    return out, tuple(placed)


def moved(images: Sequence[Image], by: int) -> tuple[Image, ...]:
    """Moves the positions of images, for a prompt that follows other tokens."""
    return tuple(dataclasses.replace(image, at=image.at + by) for image in images)


# --- soft tokens


@functools.partial(jax.jit, static_argnums=0)
def encode_program(tower: Vision, params: Any, patches: Any, positions: Any) -> Any:
    """Runs the vision tower on one image."""
    return tower.encode(params, patches[None], positions[None])[0]


def longest_image(rows: Sequence[Sequence[Image]]) -> int:
    """Returns the tokens of a prefill pass that holds any image of some rows whole, rounded up; 0 without images."""
    budgets = [image.budget for images in rows for image in images]
    return bucket(max(budgets)) if budgets else 0


def soft_tokens(lm: LM, rows: Sequence[Sequence[Image]], slots: int) -> ImageTokens:
    """Computes the soft tokens of the images of some rows. An image that occurs several times is encoded once.

    Args:
        rows: Images of each row, by position.
        slots: S, the slots of a row.

    Returns:
        Embeddings [B, P, D] of the soft tokens of each row, one image after the other, and [B, S] the first and the
        last position of the image at each slot; see `image_prefill`.
    """
    tower = lm.model.vision
    assert tower is not None
    found: dict[str, np.ndarray] = {}
    for image in (image for images in rows for image in images):
        if image.digest not in found:
            encoded = encode_program(tower, lm.params, *image.patches())
            found[image.digest] = np.asarray(encoded)[: image.tokens]
    first = next(iter(found.values()))
    most = bucket(max(sum(image.budget for image in images) for images in rows))
    embeddings = np.zeros((len(rows), most, first.shape[1]), first.dtype)
    start, end = np.zeros((2, len(rows), slots), np.int32)
    for row, images in enumerate(rows):
        filled = 0
        for image in sorted(images, key=lambda image: image.at):
            behind = image.at + image.tokens
            embeddings[row, filled : filled + image.tokens] = found[image.digest]
            start[row, image.at : behind], end[row, image.at : behind] = image.at, behind
            filled += image.tokens
    return ImageTokens(*map(jax.numpy.asarray, (embeddings, start, end)))
