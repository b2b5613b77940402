"""Image placeholders in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from neso.engine.core.request import PLACEHOLDER, PromptImage
from neso.engine.errors import EngineError
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.vision.image_processor import ImageProcessor
from neso.generation import GenerationRequest, InvalidParameter


class VisionInfo(msgspec.Struct, frozen=True):
    """`image_token_id` represents an image in a prompt; an image takes `tokens_per_image` tokens of the context.

    `image_size`: edge length in pixels of the tower's square input.
    """

    image_token_id: int
    tokens_per_image: int
    image_size: int


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Expands the image tokens of prompts for one model."""

    processor: ImageProcessor
    info: VisionInfo

    def expanded_length(self, token_ids: list[int]) -> int:
        """Return the number of tokens of the prompt with all image placeholders expanded."""
        return len(token_ids) + token_ids.count(self.info.image_token_id) * (self.info.tokens_per_image - 1)

    def place(self, request: GenerationRequest, token_ids: list[int]) -> tuple[list[int], list[PromptImage]]:
        """Return the prompt with one placeholder per image embedding, and the images. Raises `InvalidParameter`."""
        count, image_token = self.info.tokens_per_image, self.info.image_token_id
        found = token_ids.count(image_token)
        if found != len(request.images):
            raise InvalidParameter(
                "images", f"there are {len(request.images)}, but the prompt has {found} image tokens"
            )
        expanded: list[int] = []
        images: list[PromptImage] = []
        for token in token_ids:
            if token != image_token:
                expanded.append(token)
                continue
            positions = np.arange(len(expanded), len(expanded) + count, dtype=np.int32)
            pixels = self.processor.pixels(request.images[len(images)])
            images.append(PromptImage(positions.tobytes(), pixels.tobytes()))
            expanded += [PLACEHOLDER] * count
        return expanded, images


def open_image_prompt(
    directory: Path | str, vision: VisionInfo | None, max_pixels: int
) -> ImagePrompt | None:
    """Open the image processor of a model; None for text-only models. Raises `EngineError`."""
    if vision is None:
        return None
    try:
        processor = ImageProcessor.from_directory(Path(directory), vision.image_size, max_pixels)
        return ImagePrompt(processor, vision)
    except UnsupportedModel as error:
        raise EngineError(str(error)) from None
