"""An OpenAI-compatible server without a model, fast enough to measure load generators.

    python bench/stub_server.py PORT [--tokens 16] [--first-ms 0] [--interval-ms 0] [--processes 1] [--seconds 0]

Chat and completions respond with `--tokens` words, streamed as one event per word if the request asks for it, and with
usage if its `stream_options` do; the prompt tokens of the usage are the words of the body. With both delays 0 a
response is one write. Otherwise word i (from 0) is written `first-ms + i * interval-ms` after the arrival of the
request, and the end of the response together with the last word. A response that is not streamed is written at the time
of its last word. A word is never early, and a late one does not delay those after it. `GET /delays` returns the mean
delays that the stub really kept since the last such call. Processes share the port.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time

import httptools
import orjson
import uvloop
from smoke import parse_arguments

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"


class StubServer(asyncio.Protocol):
    """One connection. Responses are bytes made once per kind of request."""

    def __init__(self, tokens: int, first_ms: float, interval_ms: float) -> None:
        self._tokens = tokens
        self._first, self._interval = first_ms / 1000, interval_ms / 1000
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        write = self._transport.write
        if not self._body:
            delays = self._url.endswith(b"/delays")
            write(_unary(_take_delays() if delays else b'{"object":"list","data":[{"id":"stub"}]}'))
            return
        kind = "chat" if b"chat" in self._url else "completions"
        if b"embeddings" in self._url:
            write(_unary(_EMBEDDING))
            return
        prompt_tokens = len(self._body.split())
        request = orjson.loads(self._body)
        if not request.get("stream"):
            body = _unary(_complete(kind, self._tokens, prompt_tokens))
            self._respond([b""] * (self._tokens - 1) + [body])
            return
        head = _HEAD % (b"text/event-stream", _CHUNKED)
        events = _events(kind, self._tokens)
        end = _chunk(b"data: [DONE]\n\n")
        if (request.get("stream_options") or {}).get("include_usage"):
            end = _chunk(b"data: " + _usage(kind, self._tokens, prompt_tokens) + b"\n\n") + end
        words = events.copy()
        words[0] = head + words[0]
        words[-1] += end + b"0\r\n\r\n"
        self._respond(words)

    def _respond(self, words: list[bytes]) -> None:
        if self._first or self._interval:
            self._task = asyncio.ensure_future(self._paced(words))
        else:
            self._transport.write(b"".join(words))

    async def _paced(self, words: list[bytes]) -> None:
        start = time.monotonic()
        written = [start]
        for number, word in enumerate(words):
            due = start + self._first + number * self._interval
            # The loop's timer has a resolution of 1 ms and may be early.
            while (left := due - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)
            written.append(time.monotonic())
            self._transport.write(word)
        _DELAYS.append((written[1] - start, written[-1] - start))


_DELAYS: list[tuple[float, float]] = []
"""Seconds from the arrival of each request to its first and last word."""


def _take_delays() -> bytes:
    taken = _DELAYS.copy()
    _DELAYS.clear()
    first, last = (1e3 * statistics.fmean(values) for values in zip(*taken, strict=True)) if taken else (0, 0)
    return orjson.dumps({"requests": len(taken), "first_ms": first, "last_ms": last})


_EMBEDDING = b'{"data":[{"object":"embedding","index":0,"embedding":[0.5]}],"usage":{"prompt_tokens":8}}'


def _unary(body: bytes) -> bytes:
    return _HEAD % (b"application/json", b"Content-Length: %d\r\n" % len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _fields(kind: str) -> dict[str, object]:
    return {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk" if kind == "chat" else "text_completion",
        "created": 1700000000,
        "model": "stub",
    }


_CACHE: dict[tuple[str, int], list[bytes]] = {}


def _events(kind: str, tokens: int) -> list[bytes]:
    if (kind, tokens) not in _CACHE:
        part = {"delta": {"content": " word"}} if kind == "chat" else {"text": " word"}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": None}
        event = b"data: " + orjson.dumps({**_fields(kind), "choices": [choice]}) + b"\n\n"
        _CACHE[kind, tokens] = [_chunk(event)] * tokens
    return _CACHE[kind, tokens]


def _counts(tokens: int, prompt_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def _usage(kind: str, tokens: int, prompt_tokens: int) -> bytes:
    return orjson.dumps({**_fields(kind), "choices": [], "usage": _counts(tokens, prompt_tokens)})


def _complete(kind: str, tokens: int, prompt_tokens: int) -> bytes:
    text = " word" * tokens
    part = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    choice = {"index": 0, **part, "finish_reason": "length"}
    return orjson.dumps({**_fields(kind), "choices": [choice], "usage": _counts(tokens, prompt_tokens)})


def serve(
    port: int, tokens: int = 16, first_ms: float = 0.0, interval_ms: float = 0.0, seconds: float = 0.0
) -> None:
    """Serve for `seconds`, or with 0 until the process is killed."""

    async def run() -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        loop = asyncio.get_running_loop()
        await loop.create_server(
            lambda: StubServer(tokens, first_ms, interval_ms), sock=listener, backlog=4096
        )
        await (asyncio.sleep(seconds) if seconds else asyncio.Event().wait())

    uvloop.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int, nargs="?", default=0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--first-ms", type=float, default=0.0, help="delay of the first word")
    parser.add_argument("--interval-ms", type=float, default=0.0, help="time between two words")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parse_arguments(parser, seconds=0.1)
    place = (arguments.port, arguments.tokens, arguments.first_ms, arguments.interval_ms, arguments.seconds)
    for _ in range(arguments.processes - 1):
        multiprocessing.get_context("spawn").Process(target=serve, args=place, daemon=True).start()
    serve(*place)


if __name__ == "__main__":
    main()
