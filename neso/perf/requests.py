"""Requests as input sources yield them, before an endpoint encodes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor in shared memory: name of the registered region, place in bytes, KServe datatype and shape.

    The shape of an output is (): the response has it.
    """

    region: str
    offset: int
    byte_size: int
    datatype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class PerfRequest:
    """One request, independent of the endpoint. An endpoint uses the fields that it understands.

    Content, one of:
    - text: prompt; the chat endpoint sends it as a user message, with `images` and `system` if given
    - messages: complete chat messages, sent unchanged
    - token_ids: tokenized prompt, for endpoints that accept token ids; `text` can be given beside it for the others
    - texts: texts of one embeddings request
    - query, passages: of one ranking request
    - tensors: arrays, or tensors in shared memory, by input name, of KServe models
    - payload: complete JSON body, sent unchanged except for the model and `stream`

    `system`: text of a system message before the user message.
    `images`: URLs or data URLs, in order.
    `model`, `adapter`: "" means that the client selects a model of its list (`--model-selection-strategy`).
    `input_tokens`: number of prompt tokens by the tokenizer of the source, if known.
    `max_tokens`, `min_tokens`: limits of the output in tokens; None leaves them to the server.
    `shared_outputs`: where a KServe model writes its outputs, by name.
    `extra`: fields that are merged into the JSON body, or parameters of a KServe request.

    Sessions: requests with the same non-empty `session` follow each other in the order of `turn`. Each is sent when
    the response of the one before it has arrived and `delay_ms` have passed. A turn has only the new user message in
    `text`; the chat endpoint adds the earlier turns and their responses. When a turn is sent, its `session` is
    NAME#NUMBER, which no other session of the load has, and `ends_session` says whether no further turn is sent.

    `timestamp_ms`: intended start, for a fixed schedule; for a session that of its first turn counts.
    """

    text: str = ""
    system: str = ""
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    texts: list[str] | None = None
    query: str = ""
    passages: list[str] | None = None
    images: list[str] | None = None
    tensors: dict[str, np.ndarray | SharedTensor] | None = None
    shared_outputs: dict[str, SharedTensor] = field(default_factory=dict)
    payload: dict[str, Any] | None = None
    model: str = ""
    adapter: str = ""
    input_tokens: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    turn: int = 0
    ends_session: bool = False
    delay_ms: float = 0.0
    timestamp_ms: float | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors that are not in shared memory, by input name."""
        tensors = (self.tensors or {}).items()
        return {name: tensor for name, tensor in tensors if not isinstance(tensor, SharedTensor)}


class InputSource(Protocol):
    """A finite, repeatable sequence of requests.

    The client reads it once before the load starts, and repeats the requests in order when the load needs more.
    Requests of a session are consecutive, in the order of their turns.
    """

    def requests(self) -> Iterable[PerfRequest]:
        """Yield the requests. Raises `PerfError` for invalid files or options."""


def sessions_of(requests: Iterable[PerfRequest]) -> list[list[PerfRequest]]:
    """Group requests into sessions. A request without a session becomes a session of one turn."""
    sessions: list[list[PerfRequest]] = []
    for request in requests:
        if request.session and sessions and sessions[-1][0].session == request.session:
            sessions[-1].append(request)
        else:
            sessions.append([request])
    return sessions
