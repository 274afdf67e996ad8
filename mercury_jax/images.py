"""Images as a vision tower reads them: decoding of files, resizing, patches and their positions.

`read` decodes an image of a user. `prepare` resizes it so that its patches fit into a budget, with its aspect ratio
kept, as the image processor of Gemma 4 does in transformers (`Gemma4ImageProcessorPil`). `models.vision` computes the
soft tokens of the patches. Files come from untrusted sources: `decode_file` checks format and declared size before it
decodes a pixel. Decoding needs Pillow, which is imported when the first image is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from mercury_jax import install
from mercury_jax.config import PositiveFloat, PositiveInt, check_fields, refuse, refuse_if

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

Detail = Literal["auto", "low", "high"]
# Soft tokens of an image at most, by `detail`; with "auto" as many as the checkpoint's processor has.
SOFT_TOKENS: dict[str, int] = {"low": 70, "high": 1120}
FORMATS = {
    "PNG": b"\x89PNG\r\n\x1a\n",
    "JPEG": b"\xff\xd8\xff",
    "GIF": b"GIF8",
    "WEBP": b"RIFF",
}  # and first bytes
MAX_BYTES = 10 << 20  # of a file
MAX_PIXELS = 25_000_000  # of a decoded image; with transparency, 16 bytes each while it is blended
MAX_SIDE = 16_384
KINDS = "a path, the bytes of a PNG, JPEG, WebP or GIF file, a PIL image, or an array [H, W, 3] of uint8"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of a vision tower, and how an image becomes patches and placeholders.

    Attributes:
        width: Size of the hidden states.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads; a divisor of `heads`.
        head_dim: Size of a head; a multiple of 4, since RoPE rotates pairs of each half by x and by y.
        ffn: Hidden units of the feed-forward.
        patch: Side of a patch in pixels.
        pool: Side of the square of patches that is averaged to one soft token.
        positions: Number of learned embeddings of x, and of y.
        rope_theta: Base of the RoPE frequencies.
        norm_eps: Epsilon of the norms.
        activation: Activation of the gates.
        standardise: Whether soft tokens are shifted and scaled by stored vectors before the projection.
        tokens: Soft tokens of an image at most.
        placeholder: Id of a soft token's position in a prompt.
        begin: Id before the soft tokens of an image.
        end: Id after the soft tokens of an image.
        bidirectional: Whether the soft tokens of an image attend to each other in both directions.
    """

    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn: PositiveInt
    patch: PositiveInt = 16
    pool: PositiveInt = 3
    positions: PositiveInt = 10_240
    rope_theta: PositiveFloat = 100.0
    norm_eps: PositiveFloat = 1e-6
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    standardise: bool = False
    tokens: PositiveInt = 280
    placeholder: int = 258_880
    begin: int = 255_999
    end: int = 258_882
    bidirectional: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "vision.")
        refuse_if(
            self,
            (self.heads % self.kv_heads, "kv_heads", f"a divisor of heads = {self.heads}"),
            (self.head_dim % 4, "head_dim", "a multiple of 4, for RoPE in two dimensions"),
            prefix="vision.",
        )

    def budget(self, detail: str) -> int:
        """Returns the largest number of soft tokens of an image."""
        return SOFT_TOKENS.get(detail, self.tokens)


@dataclass(frozen=True, eq=False)
class Image:
    """An image, resized for a vision tower.

    Attributes:
        pixels: uint8 [H, W, 3], both sides multiples of patch * pool.
        patch: Side of a patch.
        pool: Side of the square of patches of a soft token.
        budget: Largest number of soft tokens of its `detail`.
        at: Position of its first soft token in the prompt.
    """

    pixels: np.ndarray
    patch: int
    pool: int
    budget: int
    at: int = 0

    @property
    def tokens(self) -> int:
        """Number of its soft tokens."""
        height, width = self.pixels.shape[:2]
        return height * width // (self.patch * self.pool) ** 2

    @property
    def end(self) -> int:
        """Position after its last soft token in the prompt."""
        return self.at + self.tokens

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the resized pixels, in hex: images with equal digests have equal soft tokens."""
        about = repr((self.pixels.shape, self.patch, self.pool, self.budget)).encode()
        return hashlib.sha256(about + np.ascontiguousarray(self.pixels).tobytes()).hexdigest()

    def patches(self) -> Patches:
        """Cuts the image into patches, row by row, padded to the budget."""
        size, most = self.patch, self.budget * self.pool**2
        rows, columns = (side // size for side in self.pixels.shape[:2])
        # [H, W, 3] -> [rows, size, columns, size, 3] -> [rows * columns, size * size * 3]
        cut = self.pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
        values = np.zeros((most, size * size * 3), np.float32)
        values[: rows * columns] = (cut.reshape(rows * columns, -1) * (1 / 255)).astype(np.float32)
        y, x = np.divmod(np.arange(rows * columns), columns)
        positions = np.full((most, 2), -1, np.int32)
        positions[: rows * columns] = np.stack([x, y], axis=-1)
        return Patches(values, positions)


class Patches(NamedTuple):
    """The input of a vision tower for one image of Q patches, padding included.

    Attributes:
        values: float32 [Q, 3 * patch * patch] in 0..1, by row, column and channel of the pixel.
        positions: int32 [Q, 2], (x, y) of the patch; (-1, -1) for padding, which comes last.
    """

    values: np.ndarray
    positions: np.ndarray


# --- sizes


def target_size(height: int, width: int, config: VisionConfig, budget: int) -> tuple[int, int]:
    """Computes the size to which an image is resized.

    The largest size of this aspect ratio that has at most `budget` soft tokens, each side rounded down to whole soft
    tokens. A very long image is one soft token wide and as long as the budget allows.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        config: Sizes of a patch and of a soft token.
        budget: Largest number of soft tokens.

    Returns:
        (height, width) in pixels.
    """
    side = config.patch * config.pool  # pixels of a soft token
    factor = math.sqrt(budget * config.pool**2 * config.patch**2 / (height * width))
    rows, columns = int(factor * height / side), int(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    return rows * side, columns * side


def prepare(image: PILImage, config: VisionConfig, detail: str = "auto") -> Image:
    """Resizes an image for a vision tower (bicubic, with antialiasing).

    Args:
        image: An RGB image, of `read`.
        config: Config of the tower.
        detail: "auto", "low" or "high": the budget of soft tokens.

    Returns:
        The image.

    Raises:
        ValueError: `detail` is another word, or the image is too long for the position embeddings of the tower.
    """
    from PIL import Image as pil

    if detail not in get_args(Detail):
        raise refuse("detail", detail, ", ".join(get_args(Detail)))
    budget = config.budget(detail)
    height, width = target_size(image.height, image.width, config, budget)
    if max(height, width) > config.positions * config.patch:
        allowed = f"sides of at most {config.positions} patches: the vision tower has no further positions"
        raise refuse("image", f"{max(height, width) // config.patch} patches long after resizing", allowed)
    if (width, height) != image.size:
        image = image.resize((width, height), pil.Resampling.BICUBIC)
    return Image(np.asarray(image), config.patch, config.pool, budget)


# --- reading


def read(value: Any, name: str, refuse: Callable[[str, Any, str], Exception] = refuse) -> PILImage:
    """Reads an image of a user.

    Args:
        value: A path, the bytes of a file, a PIL image, or an array [H, W, 3] of uint8 (numpy or JAX).
        name: Name of the argument in errors.
        refuse: Makes the error of (name, value, what is allowed).

    Returns:
        An RGB image.

    Raises:
        ValueError: By `refuse`: it is something else, the file is damaged, or it is larger than is allowed.
    """
    install.check(name, "PIL", "images")
    from PIL import Image as pil

    if isinstance(value, str | Path):
        path = Path(value)
        if not path.is_file():
            raise refuse(name, str(value), "the path of a file that exists")
        if path.stat().st_size > MAX_BYTES:
            raise refuse(name, f"a file of {path.stat().st_size} bytes", f"at most {MAX_BYTES} bytes")
        return decode_file(path.read_bytes(), name, refuse)
    if isinstance(value, bytes | bytearray | memoryview):
        return decode_file(bytes(value), name, refuse)
    if isinstance(value, pil.Image):
        _check_size(value, name, refuse)
        return _rgb(value)
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if len(shape) == 3 and shape[2] == 3 and dtype == np.uint8 and min(shape) > 0:
        return pil.fromarray(np.asarray(value))
    found = type(value).__name__ if dtype is None else f"{dtype}{list(shape)}"
    raise refuse(name, found, KINDS)


def decode_file(data: bytes, name: str, refuse: Callable[[str, Any, str], Exception] = refuse) -> PILImage:
    """Decodes the bytes of a PNG, JPEG, WebP or GIF file; of an animation only the first frame.

    Args:
        data: The file.
        name: Name of the argument in errors.
        refuse: Makes the error of (name, value, what is allowed).

    Returns:
        An RGB image; transparent pixels are blended with white, and the orientation of EXIF is applied.

    Raises:
        ValueError: By `refuse`: the format is another one, the file is damaged, or it declares too many pixels.
    """
    install.check(name, "PIL", "images")
    from PIL import Image as pil

    if len(data) > MAX_BYTES:
        raise refuse(name, f"a file of {len(data)} bytes", f"at most {MAX_BYTES} bytes")
    kind = next((kind for kind, magic in FORMATS.items() if data.startswith(magic)), None)
    if kind is None or (kind == "WEBP" and data[8:12] != b"WEBP"):
        raise refuse(name, f"a file that begins with {data[:8]!r}", "a PNG, JPEG, WebP or GIF file")
    try:
        # Opening reads the header only. Pillow raises many kinds of errors for damaged files.
        with pil.open(io.BytesIO(data), formats=[kind]) as image:
            _check_size(image, name, refuse)
            image.load()
            _orient(image)
            return _rgb(image)
    except (OSError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError,
            EOFError, RuntimeError, MemoryError, pil.DecompressionBombError) as error:  # fmt: skip
        if isinstance(error, ValueError) and str(error).startswith(name):
            raise
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise refuse(name, f"a {kind} file that cannot be decoded ({reason})", "a complete file") from None


def _check_size(image: PILImage, name: str, refuse: Callable[[str, Any, str], Exception]) -> None:
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_SIDE:
        allowed = f"at most {MAX_PIXELS} pixels, and {MAX_SIDE} a side"
        raise refuse(name, f"an image of {width} x {height} pixels", allowed)


def _orient(image: PILImage) -> None:
    """Applies the orientation of the EXIF data in place; damaged ones are no reason to refuse the picture."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _rgb(image: PILImage) -> PILImage:
    """Converts to RGB; transparent pixels are blended with white."""
    from PIL import Image as pil

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")
