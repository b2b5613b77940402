"""What every language model of the server takes and gives: the types shared by front ends, backends and engines."""

from neso.generation.draft_tokens import DraftTokens
from neso.generation.encoding import encode_text
from neso.generation.guided_decoding import GuidedDecoding
from neso.generation.invalid_parameter import InvalidParameter, PromptTooLong, check_prompt_length
from neso.generation.language_model import AdaptableModel, LanguageModel, TextTools
from neso.generation.lora import LoraRequest, LoraTensors
from neso.generation.output import CompletionDelta, FinishReason, GenerationOutput, TokenLogprobs, Usage
from neso.generation.pooling import PooledOutput, PoolingInfo, PoolingModel, PoolingParams, PoolingRequest
from neso.generation.request import GenerationRequest
from neso.generation.sampling_defaults import SamplingDefaults
from neso.generation.sampling_params import SamplingParams

__all__ = [
    "AdaptableModel",
    "CompletionDelta",
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
    "TextTools",
    "TokenLogprobs",
    "Usage",
    "check_prompt_length",
    "encode_text",
]
