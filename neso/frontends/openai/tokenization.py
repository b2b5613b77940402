"""`POST /tokenize` and `POST /detokenize`, as vLLM's server has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neso.frontends.openai.chat.prompt import ToolUse, chat_prompt
from neso.frontends.openai.errors import ApiError, invalid, to_api_error, validation_error
from neso.frontends.openai.model_resolver import Targets
from neso.frontends.openai.schemas import ChatCompletionRequest, ChatMessage, Integer, TokenId, Tool
from neso.generation import InvalidParameter, TokenizerLike, encode_text

if TYPE_CHECKING:
    from neso.server.model import Model


class TokenizeRequest(BaseModel):
    """The body of `POST /tokenize`: a `prompt`, or `messages` and what else a chat template is given."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = Field(None, description="May be left out where there is one only.")
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(
        None, description="True unless given for a prompt, false for a chat."
    )
    add_generation_prompt: bool | None = Field(None, description="True unless given.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="The text of each token, too.")


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = Field(None, description="May be left out where there is one only.")
    tokens: list[TokenId]


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: Integer | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str


class TokensApi:
    """Text to tokens and back, by the tokenizer of any model that takes text."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Raises `ApiError` and `ServerError`."""
        model, text = await self._find(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "Either 'prompt' or 'messages' must be given.")
        special = request.add_special_tokens
        try:
            if request.prompt is not None:
                prompt, special = request.prompt, special is not False
            else:
                prompt, special = _chat_text(request, request.model or model.name, text), bool(special)
            tokens = await encode_text(text, prompt, add_special_tokens=special)
            shown = None
            if request.return_token_strs:
                shown = [text.decode([token], skip_special_tokens=False) for token in tokens]
        except InvalidParameter as error:
            raise to_api_error(error) from None
        return {
            "count": len(tokens),
            "max_model_len": self._targets.told_limit(model),
            "tokens": tokens,
            "token_strs": shown,
        }

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Raises `ApiError` and `ServerError`."""
        _, text = await self._find(request.model)
        try:
            return {"prompt": text.decode(request.tokens, skip_special_tokens=False)}
        except InvalidParameter as error:
            raise to_api_error(error) from None

    async def _find(self, name: str | None) -> tuple[Model, TokenizerLike]:
        """The model and its tokenizer."""
        if name is None:
            known = [model.name for model in self._targets.text_models()]
            if len(known) != 1:
                raise invalid(
                    "model", f"'model' must say which one is meant of {', '.join(known) or 'none'}."
                )
            name = known[0]
        if self._targets.adapter(name) is None:
            model = self._targets.find_text_model(name)
            if model.language_model is None and model.pooling_model is not None:
                return model, model.pooling_model.text
        target = await self._targets.find(name)
        return target.model, target.text


def _chat_text(request: TokenizeRequest, name: str, text: TokenizerLike) -> str:
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
    prompt, images = chat_prompt(chat, ToolUse.of_chat(chat), text)
    if images:
        raise ApiError(400, "Images have no tokens that could be told.", param="messages")
    return prompt
