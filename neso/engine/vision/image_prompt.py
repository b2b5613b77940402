"""Image placeholders in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neso.engine.core.request import PLACEHOLDER, PromptImage
from neso.engine.errors import EngineError
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.text.tokenizer import EngineTokenizer
from neso.engine.vision.image_processor import (
    ImageLimits,
    ImageProcessor,
    TowerInput,
    VisionInfo,
    read_processor,
)
from neso.generation import GenerationRequest, InvalidParameter, check_prompt_length


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Expands the image tokens of prompts for one model."""

    processor: ImageProcessor
    info: VisionInfo

    def check_length(self, token_ids: list[int], max_length: int) -> None:
        """Raise `InvalidParameter` if a prompt is too long even with the smallest images."""
        expanded = token_ids.count(self.info.image_token_id) * (self.info.tokens_per_tile - 1)
        check_prompt_length(len(token_ids) + expanded, max_length)

    def place(
        self, request: GenerationRequest, token_ids: list[int], max_length: int, tokenizer: EngineTokenizer
    ) -> tuple[list[int], list[PromptImage]]:
        """Return the prompt with one placeholder per image embedding, and the images. Raises `InvalidParameter`.

        Stops at the first image that makes the prompt longer than `max_length`.
        """
        image_token = self.info.image_token_id
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
            image = self.processor.process(request.images[len(images)])
            positions: list[int] = []
            for part in self._expansion(image, tokenizer):
                if part != image_token:
                    expanded.append(part)
                    continue
                positions += range(len(expanded), len(expanded) + self.info.tokens_per_tile)
                expanded += [PLACEHOLDER] * self.info.tokens_per_tile
            check_prompt_length(len(expanded), max_length)
            images.append(
                PromptImage(
                    np.array(positions, np.int32).tobytes(), image.pixels.tobytes(), image.pixels.shape[:3]
                )
            )
        return expanded, images

    def _expansion(self, image: TowerInput, tokenizer: EngineTokenizer) -> list[int]:
        """Return the tokens of an image in a prompt, with one image token for the embeddings of each tile."""
        if self.info.layout == "square":
            return [self.info.image_token_id]
        if self.info.layout == "grid":
            return [self.info.image_token_id] * (image.rows * image.columns)
        return tokenizer.encode(_tiles_text(image.rows, image.columns), add_special_tokens=False)


def _tiles_text(rows: int, columns: int) -> str:
    """Return the text that represents an image in prompts of Idefics 3 and SmolVLM."""
    around, image = "<fake_token_around_image>", "<image>"
    tiles = "".join(
        "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return (tiles + "\n" if rows else "") + f"{around}<global-img>{image}{around}"


def open_image_prompt(
    directory: Path | str, vision: VisionInfo | None, limits: tuple[int, int]
) -> ImagePrompt | None:
    """Open the image processor of a model; None for text-only models. Raises `EngineError`.

    `limits`: see `ImageLimits`.
    """
    if vision is None:
        return None
    try:
        return ImagePrompt(read_processor(Path(directory), vision, ImageLimits(*limits)), vision)
    except UnsupportedModel as error:
        raise EngineError(str(error)) from None
