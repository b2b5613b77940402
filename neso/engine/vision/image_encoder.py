"""Computes the embeddings of images in prompts, and caches them."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.addons.image_positions import ImageGrid, position_offsets
from neso.engine.addons.input_embeddings import EmbeddingRows
from neso.engine.core.request import PromptImage

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]

CACHE_BYTES = 256 << 20
"""Size of the embedding cache in bytes. In a chat, the same image is sent with every message."""


class VisionTower(Protocol):
    """A vision tower with its projector."""

    def encode(self, pixels: UInt8Array) -> Float32Array:
        """Return the embeddings float32[E, hidden_size] of an image uint8[tiles, height, width, 3]."""


class ImageEncoder:
    """Runs a vision tower, one image at a time.

    `grid_edge`: edge in pixels of the square of a token, for a language model with rotary positions on three axes;
    None: all tokens have the positions in their sequence.
    """

    def __init__(self, tower: VisionTower, grid_edge: int | None = None) -> None:
        self._tower, self._grid_edge = tower, grid_edge
        self._seen: OrderedDict[bytes, Float32Array] = OrderedDict()
        self._seen_bytes = 0
        self.num_encoded = 0

    def embedding_rows(self, images: list[PromptImage]) -> EmbeddingRows:
        """Return the embeddings of a prompt's images, computed when a step first needs one.

        Their digests are those of the pixels, so cached prefixes do not need the tower.
        """
        digests = [_digest(image) for image in images]
        positions = [np.frombuffer(image.positions, np.int32) for image in images]
        keys = [
            blake2b(digest + index.to_bytes(4, "little"), digest_size=16).digest()
            for digest, rows in zip(digests, positions, strict=True)
            for index in range(len(rows))
        ]

        def compute() -> Float32Array:
            return np.concatenate(
                [self._rows(image, digest) for image, digest in zip(images, digests, strict=True)]
            )

        return EmbeddingRows(np.concatenate(positions), compute, keys, self._offsets(images, positions))

    def _offsets(self, images: list[PromptImage], positions: list[Int32Array]) -> Int32Array | None:
        edge = self._grid_edge
        if edge is None:
            return None
        return position_offsets(
            [
                ImageGrid(int(rows[0]), image.shape[1] // edge, image.shape[2] // edge)
                for image, rows in zip(images, positions, strict=True)
            ]
        )

    def encode(self, pixels: UInt8Array) -> Float32Array:
        """Compute the embeddings of an image, see `VisionTower`."""
        self.num_encoded += 1
        return self._tower.encode(pixels)

    def forget(self) -> None:
        """Empty the cache."""
        self._seen.clear()
        self._seen_bytes = 0

    def _rows(self, image: PromptImage, digest: bytes) -> Float32Array:
        rows = self._seen.get(digest)
        if rows is None:
            rows = self.encode(np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3))
            self._seen[digest] = rows
            self._seen_bytes += rows.nbytes
            while self._seen_bytes > CACHE_BYTES and len(self._seen) > 1:
                self._seen_bytes -= self._seen.popitem(last=False)[1].nbytes
        self._seen.move_to_end(digest)
        return rows


def _digest(image: PromptImage) -> bytes:
    """Identify an image: equal bytes can be images of different shapes."""
    shape = np.array(image.shape, np.int32).tobytes()
    return blake2b(shape + image.pixels, digest_size=16).digest()
