"""Synthetic images, as data URLs. Needs Pillow (`pip install neso-server[perf]`)."""

from __future__ import annotations

import base64
import io
import mimetypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neso.perf.errors import PerfError
from neso.perf.inputs.lengths import Lengths

FORMATS = ("png", "jpeg")
MAX_PIXELS = 100_000_000
"""Largest synthetic image, which takes 300 MB of memory while it is made."""
_BLOCK = 16
"""Side of the squares of one colour, in pixels. Uniform images would compress to nothing."""


@dataclass(frozen=True)
class ImageMaker:
    """Makes images of random coloured squares. `format` is png, jpeg or random."""

    width: Lengths
    height: Lengths
    format: str = "png"

    def __post_init__(self) -> None:
        if self.format not in (*FORMATS, "random"):
            raise PerfError(f"--image-format {self.format}: expected png, jpeg or random")

    def data_url(self, rng: np.random.Generator) -> str:
        """Return a new image as a data URL."""
        try:
            from PIL import Image
        except ImportError:
            raise PerfError("synthetic images need Pillow: pip install 'neso-server[perf]'") from None
        width, height = self.width.sample(rng), self.height.sample(rng)
        if width * height > MAX_PIXELS:
            raise PerfError(
                f"--image-width-mean, --image-height-mean: an image of {width} x {height} pixels; "
                f"at most {MAX_PIXELS:,} pixels are allowed"
            )
        squares = rng.integers(0, 256, size=(-(-height // _BLOCK), -(-width // _BLOCK), 3), dtype=np.uint8)
        pixels = squares.repeat(_BLOCK, axis=0).repeat(_BLOCK, axis=1)[:height, :width]
        chosen = FORMATS[int(rng.integers(len(FORMATS)))] if self.format == "random" else self.format
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, chosen)
        return _data_url(f"image/{chosen}", buffer.getvalue())


def image_url(reference: str, directory: Path) -> str:
    """Return the URL of an image of a file: URLs unchanged, a path (relative to `directory`) as a data URL."""
    if reference.startswith(("http://", "https://", "data:")):
        return reference
    path = directory / reference
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PerfError(f"image {path}: {error.strerror}") from None
    return _data_url(mimetypes.guess_type(path.name)[0] or "image/png", content)


def _data_url(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
