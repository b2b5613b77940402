"""The format of an engine's KV-cache blocks, which two engines compare before a transfer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from neso.engine.core.sequence import CacheToken

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WEIGHTS = (".safetensors", ".gguf")
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")


class KvFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Content and memory layout of the blocks.

    - model: digest of the checkpoint and of the options that change keys and values
    - layout: name of the order of values within a block
    - dtype: float32, bfloat16 or float16
    - block_size: tokens
    - num_parts, part_bytes: see `CacheShape`
    - num_layers, kv_heads, head_dim: shape of the keys and values of a token; 0 if blocks cannot be converted
    """

    model: str
    layout: str
    dtype: str
    block_size: int
    num_parts: int
    part_bytes: int
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def block_bytes(self) -> int:
        return self.num_parts * self.part_bytes

    def difference(self, other: KvFormat) -> str:
        """Return the first property of the blocks that differs and both values; empty if none does."""
        for name in self.__struct_fields__[1:]:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine} here and {theirs} there"
        return ""


def prefix_digest(identity: tuple[str, ...], tokens: list[CacheToken] | list[int]) -> bytes:
    """Return a digest of everything that the blocks of these tokens depend on, beside the model.

    identity: of the request and of its adapter.
    """
    return hashlib.sha256(msgspec.msgpack.encode((identity, tokens))).digest()


def model_digest(model: Path, *options: object) -> str:
    """Return a digest of a checkpoint directory or file, and of options.

    Of large files, the size and parts of the content are read: the beginning, the end, and parts in between.
    """
    total = hashlib.sha256(repr(options).encode())
    files = [model] if model.is_file() else sorted(model.iterdir())
    for file in files:
        if file != model and file.name not in _CONFIGS and file.suffix not in _WEIGHTS:
            continue
        size = file.stat().st_size
        total.update(f"{file.name if file != model else ''} {size}".encode())
        with file.open("rb") as stream:
            for part in range(_SAMPLES + 1):
                stream.seek(max(0, size - _SAMPLE_BYTES) * part // _SAMPLES)
                total.update(stream.read(_SAMPLE_BYTES))
    return total.hexdigest()
