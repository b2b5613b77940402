"""What a model directory says of images, for the side that takes requests."""

from __future__ import annotations

from pathlib import Path

from neso.engine.errors import EngineError
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.vision.image_processor import ImageProcessor
from neso.engine.vision.image_prompt import ImagePrompt, VisionInfo


def open_image_prompt(directory: Path | str, vision: VisionInfo | None) -> ImagePrompt | None:
    """None for a model that takes text only. Raises `EngineError`."""
    if vision is None:
        return None
    try:
        return ImagePrompt(ImageProcessor.from_directory(Path(directory), vision.image_size), vision)
    except UnsupportedModel as error:
        raise EngineError(str(error)) from None
