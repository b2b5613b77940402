"""Converts images to the pixels of a vision tower, like the image processors of Hugging Face."""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.specs.vision_spec import ImageLayout
from neso.engine.vision.image_files import MAX_PIXELS, open_image
from neso.generation import InvalidParameter

if TYPE_CHECKING:
    from PIL.Image import Image

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

MAX_IMAGE_TOKENS = 4096
"""Default limit of the tokens of an image."""
_MAX_EDGE = 4096
"""Longest edge of a resized image in the processor of Idefics 3."""
_MAX_ASPECT = 200
"""Longest edge over shortest edge of an image in the processor of Qwen2-VL."""
_DECODING = threading.Lock()
"""Held while an image is decoded and resized: a small file can take 8 bytes for each of `max_pixels` pixels."""

_LANCZOS, _BICUBIC = 1, 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


class VisionInfo(msgspec.Struct, frozen=True):
    """What clients need to know about the vision tower of a model.

    `image_token_id` represents an image in a prompt. `image_size`: edge length in pixels of the tower's square input,
    which takes `tokens_per_tile` tokens of the context; of the square that takes one, if the layout is "grid".
    """

    image_token_id: int
    layout: ImageLayout
    image_size: int
    tokens_per_tile: int


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits per image: pixels of its file and of the resized image, and tokens in the prompt."""

    max_pixels: int = MAX_PIXELS
    max_tokens: int = MAX_IMAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Normalization:
    """(pixel * scale - mean) / deviation, per channel."""

    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def apply(self, pixels: UInt8Array) -> Float32Array:
        """Convert uint8[..., 3] to float32[..., 3]."""
        mean, deviation = (np.array(values, np.float32) for values in (self.mean, self.deviation))
        scaled = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        normalized: Float32Array = np.divide(scaled - mean, deviation, dtype=np.float32)
        return normalized


@dataclass(frozen=True, slots=True)
class TowerInput:
    """An image as input of a vision tower: uint8[tiles, height, width, 3].

    `rows`, `columns`: the first tiles form this grid, and the last tile is the whole image; 0 if there is one tile.
    With the layout "grid", the only tile is a grid of this many tokens.
    """

    pixels: UInt8Array
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True)
class ImageProcessor(ABC):
    """Resizes images and cuts them for the tower of a model. `resample`: the filter, by Pillow's number."""

    resample: int
    normalization: Normalization
    limits: ImageLimits

    def process(self, image: Any) -> TowerInput:
        """Convert an image: bytes of a file, base64 or data: URL, a Pillow image, or uint8[height, width, 3].

        Raises `InvalidParameter("images", …)`.
        """
        with _DECODING:
            return self._cut(open_image(image, self.limits.max_pixels))

    @abstractmethod
    def _cut(self, image: Image) -> TowerInput:
        """Convert an RGB image."""

    def _resize(self, image: Image, width: int, height: int) -> Image:
        if width * height > self.limits.max_pixels:
            raise InvalidParameter(
                "images",
                f"an image of {image.width} x {image.height} pixels is too long: the model's size makes it "
                f"{width} x {height}",
            )
        return image.resize((width, height), resample=self.resample)


@dataclass(frozen=True, slots=True)
class SquareProcessor(ImageProcessor):
    """Resizes an image and crops its center (CLIP, SigLIP).

    - resize_to: (shorter edge,) or (height, width); None: no resizing
    - crop: edge length in pixels of the cropped square
    """

    resize_to: tuple[int, ...] | None
    crop: int

    def _cut(self, image: Image) -> TowerInput:
        if self.resize_to is not None:
            image = self._resize(image, *_resized(*image.size, self.resize_to))
        return TowerInput(_cut_middle(np.asarray(image, np.uint8), self.crop)[None])


@dataclass(frozen=True, slots=True)
class TileProcessor(ImageProcessor):
    """Cuts an image into rows of square tiles, followed by the whole image as one tile (Idefics 3).

    - edge: of a tile, in pixels
    - longest_edge: length in pixels that the longer edge of an image is resized to before it is cut
    - splits: otherwise an image is only one tile
    """

    edge: int
    longest_edge: int
    splits: bool

    def _cut(self, image: Image) -> TowerInput:
        edge = self.edge
        resized = self._resize(image, *_fit_longest_edge(*image.size, self.longest_edge))
        if not self.splits:
            return TowerInput(np.asarray(self._resize(resized, edge, edge), np.uint8)[None])
        width, height = _whole_tiles(*resized.size, edge)
        resized = self._resize(resized, width, height)
        tiles = np.asarray(resized, np.uint8).reshape(height // edge, edge, width // edge, edge, 3)
        cut = tiles.transpose(0, 2, 1, 3, 4).reshape(-1, edge, edge, 3)
        if len(cut) == 1:
            return TowerInput(cut)
        whole = np.asarray(self._resize(resized, edge, edge), np.uint8)
        return TowerInput(np.concatenate([cut, whole[None]]), height // edge, width // edge)


@dataclass(frozen=True, slots=True)
class GridProcessor(ImageProcessor):
    """Resizes an image to whole squares of `edge` pixels, and keeps its aspect ratio as far as that goes (Qwen2-VL).

    `min_area`, `max_area`: limits in pixels of the resized image.
    """

    edge: int
    min_area: int
    max_area: int

    def _cut(self, image: Image) -> TowerInput:
        try:
            width, height = _fit_area(*image.size, self.edge, self.min_area, self.max_area)
        except ValueError as error:
            raise InvalidParameter("images", str(error)) from None
        rows, columns = height // self.edge, width // self.edge
        if rows * columns > self.limits.max_tokens:
            raise InvalidParameter(
                "images",
                f"an image of {image.width} x {image.height} pixels takes {rows * columns} tokens, max_image_tokens is "
                f"{self.limits.max_tokens}",
            )
        return TowerInput(np.asarray(self._resize(image, width, height), np.uint8)[None], rows, columns)


def read_processor(directory: Path, vision: VisionInfo, limits: ImageLimits) -> ImageProcessor:
    """Read preprocessor_config.json. Raises `UnsupportedModel`."""
    if vision.tokens_per_tile > limits.max_tokens:
        raise UnsupportedModel(
            f"an image takes at least {vision.tokens_per_tile} tokens, max_image_tokens is {limits.max_tokens}"
        )
    path = next((p for p in _config_files(directory) if p.is_file()), directory / "preprocessor_config.json")
    config = _read(path) if path.is_file() else {}
    kind = str(config.get("image_processor_type", _DEFAULT_KINDS[vision.layout]))
    for name, read in _READERS[vision.layout].items():
        if kind.startswith(name):
            try:
                return read(config, vision, limits)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{path}: {error}") from None
    raise UnsupportedModel(f"{path}: image processors of type {kind!r} are not supported")


def _read_clip(config: dict[str, Any], vision: VisionInfo, limits: ImageLimits) -> ImageProcessor:
    crop_size = _edges(config.get("crop_size", vision.image_size))
    if config.get("do_center_crop", True) and set(crop_size) != {vision.image_size}:
        raise UnsupportedModel(f"images of {crop_size} do not fit a vision tower of {vision.image_size}")
    size = config.get("size", vision.image_size)
    return SquareProcessor(
        resample=int(config.get("resample", _BICUBIC)),
        normalization=_normalization(config, _CLIP_MEAN, _CLIP_DEVIATION),
        limits=limits,
        resize_to=_edges(size) if config.get("do_resize", True) else None,
        crop=vision.image_size,
    )


def _read_siglip(config: dict[str, Any], vision: VisionInfo, limits: ImageLimits) -> ImageProcessor:
    size = _edges(config.get("size", {"height": vision.image_size, "width": vision.image_size}))
    if size != (vision.image_size, vision.image_size) or not config.get("do_resize", True):
        raise UnsupportedModel(f"images of size {size} do not fit a vision tower of {vision.image_size}")
    return SquareProcessor(
        resample=int(config.get("resample", _BICUBIC)),
        normalization=_normalization(config, _HALF, _HALF),
        limits=limits,
        resize_to=size,
        crop=vision.image_size,
    )


def _read_idefics3(config: dict[str, Any], vision: VisionInfo, limits: ImageLimits) -> ImageProcessor:
    edge = _longest_edge(config, "max_image_size", vision.image_size)
    if edge != vision.image_size:
        raise UnsupportedModel(f"tiles of {edge} pixels do not fit a vision tower of {vision.image_size}")
    if not config.get("do_resize", True):
        raise UnsupportedModel("do_resize false is not supported")
    longest_edge = _longest_edge(config, "size", 4 * vision.image_size)
    splits = bool(config.get("do_image_splitting", True))
    if splits:
        # The tiles of a square image and the whole image must fit the limit.
        most_tiles = limits.max_tokens // vision.tokens_per_tile
        per_side = max(1, math.isqrt(max(0, most_tiles - 1)))
        longest_edge = min(longest_edge, per_side * edge)
    return TileProcessor(
        resample=int(config.get("resample", _LANCZOS)),
        normalization=_normalization(config, _HALF, _HALF),
        limits=limits,
        edge=edge,
        longest_edge=longest_edge,
        splits=splits,
    )


def _read_qwen2_vl(config: dict[str, Any], vision: VisionInfo, limits: ImageLimits) -> ImageProcessor:
    edge = vision.image_size
    merged = _whole(config, "patch_size", 14) * _whole(config, "merge_size", 2)
    if merged != edge:
        raise UnsupportedModel(f"squares of {merged} pixels do not fit a vision tower of {edge}")
    if not config.get("do_resize", True):
        raise UnsupportedModel("do_resize false is not supported")
    size = config.get("size") or {}
    if not isinstance(size, dict):
        raise UnsupportedModel(f"an image size of {size!r} is not supported")
    min_area = _whole(config, "min_pixels", _whole(size, "shortest_edge", 56 * 56))
    max_area = _whole(config, "max_pixels", _whole(size, "longest_edge", 28 * 28 * 1280))
    max_area = min(max_area, limits.max_tokens * edge**2)
    return GridProcessor(
        resample=int(config.get("resample", _BICUBIC)),
        normalization=_normalization(config, _CLIP_MEAN, _CLIP_DEVIATION),
        limits=limits,
        edge=edge,
        min_area=min(min_area, max_area),
        max_area=max_area,
    )


_Reader = Callable[[dict[str, Any], VisionInfo, ImageLimits], ImageProcessor]
_READERS: dict[ImageLayout, dict[str, _Reader]] = {
    "square": {"CLIPImageProcessor": _read_clip, "SiglipImageProcessor": _read_siglip},
    "tiles": {"Idefics3ImageProcessor": _read_idefics3, "SmolVLMImageProcessor": _read_idefics3},
    "grid": {"Qwen2VLImageProcessor": _read_qwen2_vl, "Qwen2_5_VLImageProcessor": _read_qwen2_vl},
}
_DEFAULT_KINDS: dict[ImageLayout, str] = {
    "square": "CLIPImageProcessor",
    "tiles": "Idefics3ImageProcessor",
    "grid": "Qwen2VLImageProcessor",
}


def _resized(width: int, height: int, to: tuple[int, ...]) -> tuple[int, int]:
    """Return the width and height of the resized image. A single edge in `to` is the shorter one."""
    if len(to) == 2:
        return to[1], to[0]
    short, long = min(width, height), max(width, height)
    new_short, new_long = to[0], int(to[0] * long / short)
    return (new_short, new_long) if width <= height else (new_long, new_short)


def _fit_longest_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the width and height of an image whose longer edge is `longest`, at most `_MAX_EDGE`."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        return _MAX_EDGE, max(int(_MAX_EDGE / ratio), 1)
    if height > width and height > _MAX_EDGE:
        return max(int(_MAX_EDGE * ratio), 1), _MAX_EDGE
    return width, height


def _fit_area(width: int, height: int, edge: int, min_area: int, max_area: int) -> tuple[int, int]:
    """Return the width and height in multiples of `edge` whose product is within the limits, as close to the image's.

    Raises `ValueError` for an image that is more than `_MAX_ASPECT` times as long as wide.
    """
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: an edge may be at most {_MAX_ASPECT} times the other"
        )
    fitting = round(width / edge) * edge, round(height / edge) * edge
    if fitting[0] * fitting[1] > max_area:
        shrink = math.sqrt(width * height / max_area)
        return (
            max(edge, math.floor(width / shrink / edge) * edge),
            max(edge, math.floor(height / shrink / edge) * edge),
        )
    if fitting[0] * fitting[1] < min_area:
        grow = math.sqrt(min_area / (width * height))
        return math.ceil(width * grow / edge) * edge, math.ceil(height * grow / edge) * edge
    return fitting


def _whole_tiles(width: int, height: int, edge: int) -> tuple[int, int]:
    """Round the longer edge up to a multiple of `edge`, and the other one, scaled by the same factor, too."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = int(width / ratio)
        return width, math.ceil(height / edge) * edge
    height = math.ceil(height / edge) * edge
    width = int(height * ratio)
    return math.ceil(width / edge) * edge, height


def _cut_middle(pixels: UInt8Array, size: int) -> UInt8Array:
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


def _normalization(
    config: dict[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...]
) -> Normalization:
    """Read the normalization; `mean` and `deviation` are used if the config has none."""
    scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
    if not config.get("do_normalize", True):
        return Normalization(scale, (0.0,) * 3, (1.0,) * 3)
    given = config.get("image_mean", mean), config.get("image_std", deviation)
    return Normalization(scale, tuple(given[0]), tuple(given[1]))


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


def _longest_edge(config: dict[str, Any], field: str, default: int) -> int:
    size = config.get(field, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, dict) else None
    if not isinstance(edge, int) or edge < 1:
        raise UnsupportedModel(f"{field} {size!r} is not supported: it must have a longest_edge")
    return edge


def _whole(config: dict[str, Any], field: str, default: int) -> int:
    """Read a number above 0."""
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"{field} {value!r} is not supported: it must be a whole number above 0")
    return value


def _edges(size: Any) -> tuple[int, ...]:
    """Return (shorter edge,) or (height, width) from the size in a processor configuration."""
    if isinstance(size, int):
        return (size,)
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        return (size["shortest_edge"],)
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["height"], size["width"]
    raise UnsupportedModel(f"an image size of {size!r} is not supported")
