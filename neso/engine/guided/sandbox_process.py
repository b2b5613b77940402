"""Sandbox process for grammars: resource limits, messages over pipes, and its main loop."""

from __future__ import annotations

import random
import resource
import signal
import struct
import sys
import threading
import time
from typing import IO

import msgspec
from llguidance import LLMatcher, LLTokenizer

from neso.engine.guided.grammar_matcher import make_matcher
from neso.engine.guided.token_table import TokenTable

SANDBOX_STACK = 8 << 20
"""Stack size in bytes; smaller than that of a compiler thread, so a grammar that passes is safe in the engine."""
SANDBOX_MEMORY = 4 << 30
"""Address-space limit in bytes."""
SANDBOX_TOKENS = 24
"""Number of random tokens consumed to test a grammar."""
MASK_SECONDS = 1.0
"""Time limit for one mask in seconds; a mask usually takes microseconds."""
_LENGTH = struct.Struct("<I")


def write_frame(target: IO[bytes], data: bytes) -> None:
    """Write a message: four bytes of length, then the data. Raises `OSError` if the pipe is closed."""
    target.write(_LENGTH.pack(len(data)) + data)
    target.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Read the next message; None at the end of the stream, even within a message."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = source.read(length)
    return data if len(data) == length else None


def main(seconds: int) -> None:
    """Serve until standard input ends. A grammar that takes more than `seconds` ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (SANDBOX_MEMORY, SANDBOX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(SANDBOX_STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer, seconds))
    thread.start()
    thread.join()


def _serve(source: IO[bytes], target: IO[bytes], seconds: int) -> None:
    table = msgspec.msgpack.decode(read_frame(source) or b"", type=TokenTable)
    tokenizer = table.ll_tokenizer()
    write_frame(target, b"")
    while (grammar := read_frame(source)) is not None:
        signal.alarm(seconds)
        error = _try(tokenizer, grammar.decode())
        signal.alarm(0)
        write_frame(target, error.encode())


def _try(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compile a grammar and consume some tokens; returns the error or ""."""
    matcher, error = make_matcher(tokenizer, grammar)
    return error or _walk(matcher)


def _walk(matcher: LLMatcher) -> str:
    """Consume random tokens; slow masks usually show after a few."""
    generator = random.Random(0)
    for _ in range(SANDBOX_TOKENS):
        started = time.perf_counter()
        mask = matcher.compute_bitmask()
        if time.perf_counter() - started > MASK_SECONDS:
            return "is too complex: a mask over the vocabulary takes more than a second"
        token = _pick(mask, generator)
        if token is None or not matcher.consume_token(token) or matcher.is_stopped():
            break
    return ""


def _pick(mask: bytes, generator: random.Random) -> int | None:
    """Return a random token allowed by a mask."""
    start = generator.randrange(len(mask))
    for i in range(len(mask)):
        byte = mask[(start + i) % len(mask)]
        if byte:
            bits = [bit for bit in range(8) if byte >> bit & 1]
            return (start + i) % len(mask) * 8 + generator.choice(bits)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
