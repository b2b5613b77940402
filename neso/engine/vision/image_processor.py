"""Converts image files to pixels for a vision tower, like the CLIP processor of Hugging Face."""

from __future__ import annotations

import base64
import binascii
import io
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.vision.image_encoder import Normalization
from neso.generation import InvalidParameter

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 26
"""Default limit of the pixels of a file and of the resized image; checked before memory is allocated."""
_DECODING = threading.Lock()
"""Held while an image is decoded and resized: a small file can take 8 bytes for each of `max_pixels` pixels."""

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Resizes an image and crops its center.

    - resize_to: (shorter edge,) or (height, width); None: no resizing
    - crop: edge length in pixels of the cropped square
    """

    resize_to: tuple[int, ...] | None
    crop: int
    resample: int
    normalization: Normalization
    max_pixels: int = MAX_PIXELS

    @classmethod
    def from_directory(cls, directory: Path, image_size: int, max_pixels: int = MAX_PIXELS) -> ImageProcessor:
        """Read preprocessor_config.json, with CLIP's defaults. Raises `UnsupportedModel`."""
        path = next((p for p in _config_files(directory) if p.is_file()), None)
        config = {} if path is None else _read(path)
        kind = str(config.get("image_processor_type", "CLIPImageProcessor"))
        if not kind.startswith("CLIPImageProcessor"):
            raise UnsupportedModel(f"{path}: image processors of type {kind!r} are not supported")
        size, crop = config.get("size", image_size), config.get("crop_size", image_size)
        crop_size = _edges(crop)
        if config.get("do_center_crop", True) and set(crop_size) != {image_size}:
            raise UnsupportedModel(f"{path}: images of {crop_size} do not fit a vision tower of {image_size}")
        scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
        mean, deviation = config.get("image_mean", _CLIP_MEAN), config.get("image_std", _CLIP_DEVIATION)
        if not config.get("do_normalize", True):
            mean, deviation = (0.0,) * 3, (1.0,) * 3
        return cls(
            resize_to=_edges(size) if config.get("do_resize", True) else None,
            crop=image_size,
            resample=int(config.get("resample", _BICUBIC)),
            normalization=Normalization(scale, tuple(mean), tuple(deviation)),
            max_pixels=max_pixels,
        )

    def pixels(self, image: Any) -> npt.NDArray[np.uint8]:
        """Return uint8[crop, crop, 3] for an image file's bytes, base64 or data: URL, a Pillow image or uint8[H, W, 3].

        Raises `InvalidParameter("images", …)`.
        """
        with _DECODING:
            return self._pixels(image)

    def _pixels(self, image: Any) -> npt.NDArray[np.uint8]:
        opened = open_image(image, self.max_pixels)
        if self.resize_to is not None:
            width, height = _resized(*opened.size, self.resize_to)
            if width * height > self.max_pixels:
                raise InvalidParameter(
                    "images",
                    f"an image of {opened.width} x {opened.height} pixels is too long: the model's size makes it "
                    f"{width} x {height}",
                )
            opened = opened.resize((width, height), resample=self.resample)
        return _cut_middle(np.asarray(opened, np.uint8), self.crop)


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


def _resized(width: int, height: int, to: tuple[int, ...]) -> tuple[int, int]:
    """Return the width and height of the resized image. A single edge in `to` is the shorter one."""
    if len(to) == 2:
        return to[1], to[0]
    short, long = min(width, height), max(width, height)
    new_short, new_long = to[0], int(to[0] * long / short)
    return (new_short, new_long) if width <= height else (new_long, new_short)


def _cut_middle(pixels: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Crop the center square; pad a smaller image with black."""
    height, width = pixels.shape[:2]
    if height < size or width < size:
        padded = np.zeros((max(size, height), max(size, width), 3), np.uint8)
        top, left = -(-(len(padded) - height) // 2), -(-(padded.shape[1] - width) // 2)
        padded[top : top + height, left : left + width] = pixels
        top, left = top + (height - size) // 2, left + (width - size) // 2
        pixels = padded
    else:
        top, left = (height - size) // 2, (width - size) // 2
    top, left = max(0, top), max(0, left)
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def _config_files(directory: Path) -> tuple[Path, ...]:
    return directory / "preprocessor_config.json", directory / "processor_config.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    section = config.get("image_processor", config) if isinstance(config, dict) else None
    if not isinstance(section, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    return section


def _edges(size: Any) -> tuple[int, ...]:
    """Return (shorter edge,) or (height, width) from the size in a processor configuration."""
    if isinstance(size, int):
        return (size,)
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        return (size["shortest_edge"],)
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["height"], size["width"]
    raise UnsupportedModel(f"an image size of {size!r} is not supported")
