"""A server for one program on this host: `neso serve` with the OpenAI API alone, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from neso.cli.chat_client import ChatServer
from neso.frontends.openai_options import API_KEY_VARIABLE

_OPTIONS = (
    "--allow-http=false",
    "--allow-grpc=false",
    "--allow-metrics=false",
    "--log-info=false",
    "--openai-address=127.0.0.1",
    "--openai-port=0",
)
_PORT = re.compile(r"\s+openai\s+(\d+)\s")


class ServerFailed(Exception):
    """The server has ended before it was ready. It has written the reason to standard error."""


@contextlib.contextmanager
def private_server(model: str, options: Sequence[str] = ()) -> Iterator[ChatServer]:
    """Serve a model until the end of the context. `options`: of `neso serve`. Raises `ServerFailed`.

    Other users of the host cannot use the server: it requires a random API key.
    """
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "neso.cli", "serve", model, *_OPTIONS, *options]
    # In the environment: other users can read the command line. Its own session: Ctrl-C in the terminal cancels an
    # answer, not the server.
    process = subprocess.Popen(
        command,
        env={**os.environ, API_KEY_VARIABLE: key},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # By default, these signals would end this process without its server.
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield ChatServer(f"http://127.0.0.1:{_wait_for_port(process)}", key)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _wait_for_port(process: subprocess.Popen[str]) -> int:
    """Return the port from the summary that the server prints when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := _PORT.match(line):
            return int(match[1])
    raise ServerFailed(f"the server has ended with status {process.wait()}")
