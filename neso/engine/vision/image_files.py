"""Reads the image files of requests."""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from neso.generation import InvalidParameter

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 26
"""Default limit of the pixels of a file and of the resized image; checked before memory is allocated."""


def open_image(image: Any, max_pixels: int = MAX_PIXELS) -> Image:
    """Open an element of `GenerationRequest.images` as an RGB image. Raises `InvalidParameter("images", …)`."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidParameter("images", "need Pillow: `pip install neso-server[vision]`") from None
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise InvalidParameter(
                "images", f"an array must be uint8[height, width, 3], not {image.dtype}{list(image.shape)}"
            )
        return Image.fromarray(image)
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, str):
        image = decode_base64(image)
    if not isinstance(image, bytes):
        raise InvalidParameter("images", f"an image cannot be a {type(image).__name__}")
    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        width, height = opened.size
        if width * height > max_pixels:
            raise InvalidParameter("images", f"an image of {width} x {height} pixels is too large")
        return opened.convert("RGB")
    except UnidentifiedImageError:
        raise InvalidParameter(
            "images", f"an image cannot be read: expected one of {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter("images", f"an image cannot be read: {error}") from None


def decode_base64(text: str) -> bytes:
    """Decode base64, with or without line breaks and the prefix of a data: URL.

    Raises `InvalidParameter("images", …)`.
    """
    scheme, is_url, _ = text[:16].partition("://")
    if is_url:
        raise InvalidParameter("images", f"{scheme}: URLs are not fetched, send the image as a data: URL")
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidParameter("images", "a data: URL must hold base64")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter("images", "an image is not valid base64") from None
