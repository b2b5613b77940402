"""Client of `neso chat`: the models of an OpenAI API, and streamed chat completions. Uses only the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

CONNECT_TIMEOUT = 10.0
"""Seconds for a list of models."""
STREAM_TIMEOUT = 600.0
"""Seconds between two chunks: a long prompt is prefilled before the first one."""


class ChatError(Exception):
    """The server cannot be reached, or has responded with an error."""


class ServerUnreachable(ChatError):
    """There is no connection to the server."""


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; the server streams it in pieces."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the call as part of an assistant message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Reply:
    """What was received of an answer. `num_tokens`: as counted by the server; None if it has not said."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None

    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return message

    def add(self, chunk: dict[str, Any]) -> tuple[str, str]:
        """Add a chunk. Returns its text and its reasoning."""
        usage = chunk.get("usage")
        if usage:
            self.num_prompt_tokens, self.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            text = delta.get("content") or ""
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.content += text
            self.reasoning += reasoning
            return text, reasoning
        return "", ""

    def _add_call(self, part: dict[str, Any]) -> None:
        index = part.get("index", len(self.tool_calls))
        while len(self.tool_calls) <= index:
            self.tool_calls.append(ToolCall())
        call, function = self.tool_calls[index], part.get("function") or {}
        call.id = part.get("id") or call.id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


class ChatServer:
    """An OpenAI API at `url`, with or without the final `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Return the names of the models. Raises `ChatError`."""
        with self._open("/models", None, CONNECT_TIMEOUT) as response:
            try:
                return [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError):
                raise ChatError(f"{self.base} is not an OpenAI API") from None

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a chat completion. Closing the iterator cancels the request. Raises `ChatError`."""
        with closing(self._open("/chat/completions", body, STREAM_TIMEOUT)) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if data == line.strip() or not data:
                        continue
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ChatError(_message(chunk) or data.decode(errors="replace"))
                    yield chunk
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ChatError(f"the connection to {self.base} was lost: {error}") from None

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base + path, data, self._headers)
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
            return response
        except urllib.error.HTTPError as error:
            raise ChatError(_error_text(error)) from None
        except urllib.error.URLError as error:
            raise ServerUnreachable(f"{self.base} cannot be reached: {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(f"{self.base}: {error}") from None


def _error_text(error: urllib.error.HTTPError) -> str:
    try:
        message = _message(json.load(error))
    except (ValueError, OSError):
        message = ""
    return f"{error.code} {message or error.reason}"


def _message(body: Any) -> str:
    """Return the message of an error in OpenAI's form; "" if it has another form."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
