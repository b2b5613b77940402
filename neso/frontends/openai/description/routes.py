"""What each route takes and gives."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.description import answers
from neso.frontends.openai.description.operation import TEXT, Operation, Parameter
from neso.frontends.openai.models_api import (
    LoadAdapterRequest,
    LoadModelRequest,
    UnloadAdapterRequest,
    UnloadModelRequest,
)
from neso.frontends.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from neso.frontends.openai.responses import ResponseRequest
from neso.frontends.openai.schemas import ChatCompletionRequest, CompletionRequest
from neso.frontends.openai.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

_MODEL = "neso-pilot"
_TEXT: dict[str, Any] = {"type": "string"}
_GENERATION, _POOLING, _RESPONSES = "Generation", "Embeddings and scores", "Responses"
_MODELS, _TOKENS, _HEALTH = "Models", "Tokens", "Health"

_MODEL_PATH = Parameter("model", "path", _TEXT, "The model's name, or an adapter's.")
_RESPONSE_PATH = Parameter("response_id", "path", _TEXT)


def _health(summary: str) -> Operation:
    return Operation(_HEALTH, summary, "", errors=(503,), open_group="health")


_READY, _LIVE = _health("Whether the server can serve"), _health("Whether the server runs")
_SCORE = Operation(
    _POOLING,
    "Score pairs of texts",
    answers.Scores,
    ScoreRequest,
    {
        "one against several": {
            "model": "a-reranker",
            "text_1": "What is a GPU?",
            "text_2": ["A chip.", "A fish."],
        }
    },
)
_RERANK = Operation(
    _POOLING,
    "Order documents by a query",
    answers.Reranked,
    RerankRequest,
    {
        "three": {
            "model": "a-reranker",
            "query": "What is a GPU?",
            "documents": ["A chip.", "A fish.", "A bird."],
        }
    },
)
_TOKENIZE = Operation(
    _TOKENS,
    "The tokens of a text or a chat",
    TokenizeResponse,
    TokenizeRequest,
    {"text": {"model": _MODEL, "prompt": "Hello"}},
)
_DETOKENIZE = Operation(
    _TOKENS,
    "The text of tokens",
    DetokenizeResponse,
    DetokenizeRequest,
    {"tokens": {"model": _MODEL, "tokens": [300, 301]}},
)

ROUTES: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {
        "post": Operation(
            _GENERATION,
            "Answer a chat",
            answers.ChatCompletion,
            ChatCompletionRequest,
            {
                "question": {
                    "model": _MODEL,
                    "messages": [{"role": "user", "content": "What is TTFT?"}],
                    "max_completion_tokens": 16,
                }
            },
            events=answers.ChatCompletionChunk,
        )
    },
    "/v1/completions": {
        "post": Operation(
            _GENERATION,
            "Complete prompts",
            answers.Completion,
            CompletionRequest,
            {"prompt": {"model": _MODEL, "prompt": "What is TTFT?", "max_tokens": 16}},
            events=answers.CompletionChunk,
        )
    },
    "/v1/responses": {
        "post": Operation(
            _RESPONSES,
            "Make a response",
            answers.ResponseObject,
            ResponseRequest,
            {"text": {"model": _MODEL, "input": "What is TTFT?", "max_output_tokens": 16}},
            events=answers.ResponseEvent,
        )
    },
    "/v1/responses/input_tokens": {
        "post": Operation(
            _RESPONSES,
            "Count the tokens of a request",
            answers.InputTokens,
            ResponseRequest,
            {"text": {"model": _MODEL, "input": "What is TTFT?"}},
        )
    },
    "/v1/responses/{response_id}": {
        "get": Operation(
            _RESPONSES,
            "A response that is kept",
            answers.ResponseObject,
            parameters=(
                _RESPONSE_PATH,
                Parameter(
                    "stream", "query", {"type": "boolean"}, "The events of one made in the background."
                ),
                Parameter(
                    "starting_after", "query", {"type": "integer"}, "Only the events behind this number."
                ),
            ),
            events=answers.ResponseEvent,
            errors=(400, 404, 500),
        ),
        "delete": Operation(
            _RESPONSES,
            "Forget a response",
            answers.DeletedResponse,
            parameters=(_RESPONSE_PATH,),
            errors=(404, 500),
        ),
    },
    "/v1/responses/{response_id}/cancel": {
        "post": Operation(
            _RESPONSES,
            "End a response that is made in the background",
            answers.ResponseObject,
            parameters=(_RESPONSE_PATH,),
            errors=(400, 404, 500),
        )
    },
    "/v1/responses/{response_id}/input_items": {
        "get": Operation(
            _RESPONSES,
            "What a response was made of",
            answers.ItemList,
            parameters=(
                _RESPONSE_PATH,
                Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
                Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}),
                Parameter("after", "query", _TEXT, "The id of an item."),
            ),
            errors=(400, 404, 500),
        )
    },
    "/v1/embeddings": {
        "post": Operation(
            _POOLING,
            "Embed texts",
            answers.Embeddings,
            EmbeddingRequest,
            {"texts": {"model": "an-embedder", "input": ["One text.", "Another."]}},
        )
    },
    "/v1/score": {"post": _SCORE},
    "/score": {"post": _SCORE},
    "/v1/rerank": {"post": _RERANK},
    "/v2/rerank": {"post": _RERANK},
    "/rerank": {"post": _RERANK},
    "/tokenize": {"post": _TOKENIZE},
    "/v1/tokenize": {"post": _TOKENIZE},
    "/detokenize": {"post": _DETOKENIZE},
    "/v1/detokenize": {"post": _DETOKENIZE},
    "/v1/models": {
        "get": Operation(_MODELS, "The models that take text", answers.ModelList, errors=(500,)),
    },
    "/v1/models/{model}": {
        "get": Operation(
            _MODELS, "One model", answers.ModelCard, parameters=(_MODEL_PATH,), errors=(400, 404, 500, 503)
        ),
    },
    "/v1/models/{model}/load": {
        "post": Operation(
            _MODELS,
            "Load a model, in control mode explicit",
            answers.ModelLoaded,
            LoadModelRequest,
            parameters=(_MODEL_PATH,),
            errors=(400, 404, 409, 413, 415, 500, 503),
            body_required=False,
        ),
    },
    "/v1/models/{model}/unload": {
        "post": Operation(
            _MODELS,
            "Unload a model, in control mode explicit",
            answers.ModelChanged,
            UnloadModelRequest,
            parameters=(_MODEL_PATH,),
            errors=(400, 404, 413, 415, 500, 503),
            body_required=False,
        ),
    },
    "/v1/load_lora_adapter": {
        "post": Operation(
            _MODELS,
            "Load an adapter",
            TEXT,
            LoadAdapterRequest,
            errors=(400, 403, 404, 409, 413, 415, 500, 503),
        ),
    },
    "/v1/unload_lora_adapter": {
        "post": Operation(
            _MODELS,
            "Unload an adapter",
            TEXT,
            UnloadAdapterRequest,
            errors=(400, 403, 404, 413, 415, 500, 503),
        ),
    },
    "/health": {"get": _READY},
    "/health/ready": {"get": _READY},
    "/health/live": {"get": _LIVE},
    "/ping": {"get": _READY, "post": _READY},
    "/version": {"get": Operation(_HEALTH, "The server's version", answers.Version, errors=(500,))},
    "/metrics": {"get": Operation(_HEALTH, "Prometheus metrics", TEXT, errors=(500,), open_group="metrics")},
}
