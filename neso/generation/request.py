"""Generation request and its parts: LoRA adapter, draft tokens, cache retention, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from neso.generation.errors import InvalidParameter
from neso.generation.sampling_params import SamplingParams
from neso.generation.spans import SpanSink

TASK_PREFIX = "lora_task_id "
"""Name prefix of adapters identified by a number (TensorRT-LLM's `lora_task_id`)."""

FloatType = Literal["float32", "float16", "bfloat16"]


class LoraTensors(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a LoRA adapter in TensorRT-LLM's format.

    - `config`: a row (module id, layer, rank) for each adapted matrix
    - `weights`: `width` values of `dtype` per row, as bytes: A [rank, inputs], then B [outputs, rank] with the scale
      already applied, then padding
    """

    dtype: FloatType
    width: int
    weights: bytes
    config: list[tuple[int, int, int]]


class LoraRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter (arXiv 2106.09685), identified by name, with an optional source to load it from.

    - `path`: a directory in peft's format. An adapter loaded from another path is reloaded.
    - `tensors`: used only if the name is not cached; a name must always refer to the same weights.
    """

    name: str
    path: str | None = None
    tensors: LoraTensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Draft tokens from the client, computed together with the end of the prompt. The model keeps accepted tokens.

    - input_ids: the draft tokens
    - logits: float32[len(input_ids), vocab_size], the logits that the tokens were sampled from with the sampling
      parameters of the request; None for tokens that were not sampled
    - acceptance_threshold: accept a token if its probability under the model is at least this many times its draft
      probability (1 without logits), in (0, 1]. None is exact: the output distribution (without logits, also the
      tokens) is the same as without a draft.
    """

    input_ids: list[int]
    logits: npt.NDArray[np.float32] | None = None
    acceptance_threshold: float | None = None


DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
MAX_RANGES = 256


class RetainedRange(msgspec.Struct, frozen=True, array_like=True):
    """Priority of the prompt tokens [start, end). None: end of the prompt (`end`), no time limit (`duration_ms`)."""

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None


class CacheRetention(msgspec.Struct, frozen=True, array_like=True):
    """Eviction priorities of the KV-cache blocks of a request, with TensorRT-LLM's rules.

    Blocks with a lower priority (0 to 100) are evicted first, blocks with equal priority in LRU order. `ranges` apply
    to the prompt, `decode_priority` and `decode_duration_ms` to generated tokens. After its duration, a block has the
    default priority. Raises `InvalidParameter` with the names of TensorRT-LLM's tensors.
    """

    ranges: list[RetainedRange] = []
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        if len(self.ranges) > MAX_RANGES:
            raise InvalidParameter("retention_token_range_starts", f"are more than {MAX_RANGES}")
        for retained in self.ranges:
            if retained.start < 0 or (retained.end is not None and retained.end <= retained.start):
                raise InvalidParameter(
                    "retention_token_range_ends",
                    f"the range [{retained.start}, {retained.end}) has no tokens",
                )
            _check_bounds("retention_token_range_priorities", retained.priority, MAX_PRIORITY)
            _check_bounds("retention_token_range_durations_ms", retained.duration_ms)
        _check_bounds("retention_decode_priority", self.decode_priority, MAX_PRIORITY)
        _check_bounds("retention_decode_duration_ms", self.decode_duration_ms)

    def at(self, position: int, num_prompt_tokens: int) -> tuple[int, int | None] | None:
        """Return (priority, duration in ms) of a block that starts at token `position`; None: unchanged."""
        if position >= num_prompt_tokens:
            return self.decode_priority, self.decode_duration_ms
        for retained in self.ranges:
            if retained.start <= position and (retained.end is None or position < retained.end):
                return retained.priority, retained.duration_ms
        return None


def _check_bounds(field: str, value: int | None, high: int | None = None) -> None:
    if value is not None and (value < 0 or (high is not None and value > high)):
        raise InvalidParameter(
            field, f"must be at least 0{f' and at most {high}' if high else ''}, got {value}"
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and the parameters of its generation.

    - prompt: text, or token ids that are used unchanged
    - request_id: unique among the requests in flight; the engine replaces an empty id
    - priority: requests with lower values are scheduled first
    - add_special_tokens: False for text that already contains them, such as the output of a chat template
    - cache_salt: cached prefixes are shared only between requests with the same salt
    - queue_timeout_ms: maximum time in the queue, after which the request fails
    - prompt_embeds: float[P, hidden_size], the whole prompt; `prompt` is then empty
    - prompt_embedding_table: float[V, hidden_size] of virtual tokens (P-tuning, arXiv 2103.10385): token id
      vocab_size + i is row i. A text prompt is prefixed with the whole table. `prompt_vocab_size` is checked to be V.
    - images: in the order of the prompt's image tokens; each is the bytes of a file, its base64 or data: URL, a Pillow
      image, or uint8[height, width, 3]
    - detokenize: False for output without text
    - stream: False allows the model to return the whole text in one message
    - queue_delay: the request waits in the queue as if it had arrived so many seconds later, if others wait too
    - tracer: records what workers have executed of the request; None if it is not traced
    """

    prompt: str | list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    priority: int = 0
    add_special_tokens: bool = True
    cache_salt: str = ""
    lora: LoraRequest | None = None
    queue_timeout_ms: float | None = None
    prompt_embeds: npt.NDArray[np.floating] | None = None
    prompt_embedding_table: npt.NDArray[np.floating] | None = None
    prompt_vocab_size: int | None = None
    images: tuple[Any, ...] = ()
    draft: DraftTokens | None = None
    detokenize: bool = True
    stream: bool = True
    retention: CacheRetention | None = None
    queue_delay: float = 0.0
    tracer: SpanSink | None = None

    @property
    def size(self) -> int:
        """Approximate memory of the prompt in bytes."""
        size = text_size(self.prompt) if isinstance(self.prompt, str) else 36 * len(self.prompt)
        for array in (self.prompt_embeds, self.prompt_embedding_table):
            size += 0 if array is None else array.nbytes
        for image in self.images:
            size += len(image) if isinstance(image, str | bytes) else getattr(image, "nbytes", 0)
        return size


def text_size(text: str) -> int:
    """Return the memory of a text in bytes, an upper bound: Python stores up to four for each character."""
    return len(text) if text.isascii() else 4 * len(text)


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], tuple[Any, ...]]:
    """Separate the images from chat messages.

    Returns the messages, with each image replaced by a part {"type": "image"}, and the images in order. Image parts
    are {"type": "image_url", "image_url": {"url": …}} (OpenAI) and {"type": "image", "image": …} (Hugging Face).
    Raises `InvalidParameter("messages", …)` for an image part without an image.
    """
    images: list[Any] = []
    return [_extract_images(message, images) for message in messages], tuple(images)


def _extract_images(message: Any, images: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return message
    parts = []
    for part in content:
        if _is_image(part):
            images.append(_image_of(part))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image", "input_image")


def _image_of(part: Mapping[str, Any]) -> Any:
    image = part.get("image") if part["type"] == "image" else part.get("image_url")
    if isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        raise InvalidParameter("messages", f"a content part of type {part['type']!r} has no image")
    return image
