"""OpenAI's Responses API, over the same prompts, sampling and readers as chats."""

from neso.frontends.openai.responses.api import ResponsesApi
from neso.frontends.openai.responses.schemas import ResponseRequest

__all__ = ["ResponseRequest", "ResponsesApi"]
