"""Text-generation types shared by frontends, backends and engines."""

from neso.generation.errors import InvalidParameter, PromptTooLong, check_prompt_length
from neso.generation.guided_decoding import GuidedDecoding
from neso.generation.language_model import (
    UNLIMITED_LENGTH,
    LanguageModel,
    SupportsImages,
    SupportsLora,
    TokenizerLike,
    count_tokens,
    cut_text,
    encode_prompt,
    encode_text,
)
from neso.generation.output import Completion, FinishReason, GenerationOutput, TokenLogprobs, Usage
from neso.generation.pooling import PooledOutput, PoolingInfo, PoolingModel, PoolingParams, PoolingRequest
from neso.generation.request import DraftTokens, GenerationRequest, LoraRequest, LoraTensors
from neso.generation.sampling_params import SamplingDefaults, SamplingParams
from neso.generation.spans import Span, SpanSink

__all__ = [
    "UNLIMITED_LENGTH",
    "Completion",
    "DraftTokens",
    "FinishReason",
    "GenerationOutput",
    "GenerationRequest",
    "GuidedDecoding",
    "InvalidParameter",
    "LanguageModel",
    "LoraRequest",
    "LoraTensors",
    "PooledOutput",
    "PoolingInfo",
    "PoolingModel",
    "PoolingParams",
    "PoolingRequest",
    "PromptTooLong",
    "SamplingDefaults",
    "SamplingParams",
    "Span",
    "SpanSink",
    "SupportsImages",
    "SupportsLora",
    "TokenLogprobs",
    "TokenizerLike",
    "Usage",
    "check_prompt_length",
    "count_tokens",
    "cut_text",
    "encode_prompt",
    "encode_text",
]
