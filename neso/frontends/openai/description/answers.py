"""What the routes answer. These classes describe it; the answers themselves are written without them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Described(BaseModel):
    """An object that may have further fields."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")


class ErrorObject(Described):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field at fault.")
    code: str | None


class Error(Described):
    """OpenAI's error."""

    error: ErrorObject


class TokenDetails(Described):
    """Of which are from the prefix cache."""

    cached_tokens: int


class Usage(Described):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails | None


class TopLogprob(Described):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that came, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Described):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]


class CompletionLogprobs(Described):
    """Log probabilities of a text's tokens; lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length"]


class CompletionChoice(Described):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(description="Extension: the stop string or token that ended it.")
    token_ids: list[int] = Field([], description="Extension: with `return_token_ids`.")
    prompt_token_ids: list[int] = Field([], description="Extension: with `return_token_ids`.")
    prompt_logprobs: list[dict[str, Any] | None] = Field([], description="Extension: with `prompt_logprobs`.")


class Answered(Described):
    """What answers and their chunks have in common."""

    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str | None


class CompletionChunk(Answered):
    """One event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Completion(Answered):
    """The answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(Described):
    """A function and its arguments."""

    name: str
    arguments: str = Field(description="JSON text.")


class ToolCall(Described):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Described):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = Field(None, description="Extension: what it thought before.")
    tool_calls: list[ToolCall] = []


class ChatChoice(Described):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="Extension: the stop string or token that ended it.")


class ChatCompletion(Answered):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Described):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = Field(None, description="Extension.")
    tool_calls: list[dict[str, Any]] = []


class ChatChunkChoice(Described):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Answered):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class EmbeddingObject(Described):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or float32 in base64.")


class PoolingUsage(Described):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Described):
    """The answer of `POST /v1/embeddings`."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: PoolingUsage


class ScoreObject(Described):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(Described):
    """The answer of `POST /v1/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolingUsage


class RerankResult(Described):
    """One document's place."""

    index: int = Field(description="Of the document in the request.")
    relevance_score: float
    document: dict[str, Any] | None = None


class Reranked(Described):
    """The answer of `POST /v1/rerank`: the documents, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class ModelCard(Described):
    """A model, or an adapter of one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(None, description="Extension: most tokens of prompt and answer.")
    root: str | None = None
    parent: str | None = Field(None, description="Extension: the model of an adapter.")


class ModelList(Described):
    """The models that take text."""

    object: Literal["list"]
    data: list[ModelCard]


class ModelChanged(Described):
    """A model was unloaded."""

    status: Literal["success"]
    model: str


class ModelLoaded(ModelChanged):
    """A model was loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class OutputItem(Described):
    """A message, a function call, or thoughts."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(Described):
    """Tokens that were read and written."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: TokenDetails
    output_tokens_details: dict[str, int]


class IncompleteDetails(Described):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Described):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(Described):
    """A response, finished or being made."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    max_output_tokens: int | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    metadata: dict[str, str]


class ResponseEvent(Described):
    """One event of a response's stream, with what its type has."""

    type: str
    sequence_number: int


class DeletedResponse(Described):
    """What is left of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Described):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Described):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Version(Described):
    """The server's version."""

    version: str
