"""Cost of API keys and rate limits per request of the OpenAI API.

Requests name an unknown model and are sent in-process, without a network. So only request handling is measured, and the
ratios are upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from smoke import parse_arguments

from neso.frontends.openai import OpenAIOptions, create_app
from neso.frontends.openai.access import AccessOptions, ApiKeys, Quota
from neso.server.core import Core
from neso.server.options import ServerOptions

BODY = b'{"model": "none", "prompt": "hello", "max_tokens": 16}'
PLENTY = Quota(requests=10**9, tokens=10**9)


async def compare(requests: int, rounds: int) -> None:
    """Print the seconds of a request with each kind of access control."""
    core = Core(ServerOptions())
    await core.start()
    variants = {
        "nothing": AccessOptions(),
        "one key": AccessOptions(keys=ApiKeys(["sk-0"])),
        "1000 keys": AccessOptions(keys=ApiKeys([f"sk-{i}" for i in range(1000)])),
        "one key, both rates": AccessOptions(keys=ApiKeys(["sk-0"]), quota=PLENTY),
    }
    apps = {name: create_app(core, OpenAIOptions(access=access)) for name, access in variants.items()}
    best = dict.fromkeys(apps, float("inf"))
    for _ in range(rounds):  # in turns, so that other load on the machine affects all cases
        for name, app in apps.items():
            best[name] = min(best[name], await seconds(app, requests))
    for name, value in best.items():
        print(f"{name:22} {value * 1e6:7.0f} µs per request  {value / best['nothing']:5.2f} x nothing")
    await core.stop()


async def seconds(app: Callable[..., Awaitable[None]], requests: int) -> float:
    """Mean seconds of a request."""
    started = time.perf_counter()
    for _ in range(requests):
        await app(scope(), receiver(), send)
    return (time.perf_counter() - started) / requests


def scope() -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer sk-0")]
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "http_version": "1.1",
        "scheme": "http",
        "asgi": {"version": "3.0"},
    }


def receiver() -> Callable[[], Awaitable[dict[str, Any]]]:
    messages = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


async def send(message: dict[str, Any]) -> None:
    assert message.get("status", 404) == 404


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, requests=10, rounds=1)
    asyncio.run(compare(arguments.requests, arguments.rounds))


if __name__ == "__main__":
    main()
