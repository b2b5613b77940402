"""`POST /tokenize` and `POST /detokenize`, as in vLLM's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from neso.frontends.openai.chat.prompt import ToolUse, render_chat
from neso.frontends.openai.chat.schemas import ChatCompletionRequest, ChatMessage, Tool
from neso.frontends.openai.errors import ApiError, invalid, prompt_too_long, to_api_error, validation_error
from neso.frontends.openai.model_resolver import ModelResolver
from neso.frontends.openai.routing import RequestContext, operation
from neso.frontends.openai.schemas import FailFastList, TokenIds
from neso.generation import UNLIMITED_LENGTH, InvalidParameter, PromptTooLong, TokenizerLike, encode_text

if TYPE_CHECKING:
    from neso.server.model import Model


class TokenizeRequest(BaseModel):
    """The body of `POST /tokenize`: a `prompt`, or `messages` with the fields of a chat template."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = Field(None, description="Optional if the server has one model.")
    prompt: str | None = None
    messages: FailFastList[ChatMessage] | None = Field(None, min_length=1)
    tools: FailFastList[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="Also return the text of each token.")


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = Field(None, description="Optional if the server has one model.")
    tokens: TokenIds


class TokenizeResponse(TypedDict):
    """The tokens of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    """The text of tokens."""

    prompt: str


class TokenizationApi:
    """Encodes and decodes text with a model's tokenizer."""

    def __init__(self, resolver: ModelResolver) -> None:
        self._resolver = resolver

    @operation(
        "POST",
        "/tokenize",
        "/v1/tokenize",
        tag="Tokens",
        request=TokenizeRequest,
        response=TokenizeResponse,
        examples={"text": {"model": "neso-pilot", "prompt": "Hello"}},
    )
    async def tokenize(self, request: TokenizeRequest, context: RequestContext) -> TokenizeResponse:
        """Tokenize a text or a chat."""
        model, tokenizer = await self._find(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "Either 'prompt' or 'messages' must be given.")
        special, max_model_len = request.add_special_tokens, self._resolver.max_model_len(model)
        try:
            if request.prompt is not None:
                prompt, special = request.prompt, special is not False
            else:
                prompt = await _render_chat(request, request.model or model.name, tokenizer)
                special = bool(special)
            tokens = await encode_text(
                tokenizer, prompt, add_special_tokens=special, max_model_len=max_model_len or UNLIMITED_LENGTH
            )
            texts = None
            if request.return_token_strs:
                texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        except PromptTooLong as error:
            raise prompt_too_long("messages" if request.prompt is None else "prompt", error) from None
        except InvalidParameter as error:
            raise to_api_error(error) from None
        return {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }

    @operation(
        "POST",
        "/detokenize",
        "/v1/detokenize",
        tag="Tokens",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        examples={"tokens": {"model": "neso-pilot", "tokens": [300, 301]}},
    )
    async def detokenize(self, request: DetokenizeRequest, context: RequestContext) -> DetokenizeResponse:
        """Convert tokens to text."""
        _, tokenizer = await self._find(request.model)
        try:
            return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
        except InvalidParameter as error:
            raise to_api_error(error) from None

    async def _find(self, name: str | None) -> tuple[Model, TokenizerLike]:
        """Return the model, by default the only model, and its tokenizer. Raises `ApiError` and `ServerError`."""
        if name is None:
            known = [model.name for model in self._resolver.text_models()]
            if len(known) != 1:
                raise invalid("model", f"'model' must name one of: {', '.join(known) or '(none)'}.")
            name = known[0]
        if self._resolver.adapter(name) is None:
            model = self._resolver.find_text_model(name)
            if model.language_model is None and model.pooling_model is not None:
                return model, model.pooling_model.text
        resolved = await self._resolver.find(name)
        return resolved.model, resolved.tokenizer


async def _render_chat(request: TokenizeRequest, name: str, tokenizer: TokenizerLike) -> str:
    fields = request.model_dump(
        include={
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        },
        exclude_unset=True,
    )
    try:
        chat = ChatCompletionRequest.model_validate({"model": name, **fields})
    except ValidationError as error:
        raise validation_error(error) from None
    prompt, images = await render_chat(chat, ToolUse.of_chat(chat), tokenizer)
    if images:
        raise ApiError(400, "Chats with images cannot be tokenized.", param="messages")
    return prompt
