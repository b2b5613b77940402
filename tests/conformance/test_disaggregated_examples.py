"""The examples with prefill and decode workers, run unchanged."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import wait_until
from free_port import free_port

import neso

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
BEGINNING = "Servers have queues, and workers pull from them. " * 20
LAUNCHER = """
import asyncio, signal, sys
from app import app, workers
from neso.frontends.openai_options import OpenAIOptions
from neso.frontends.frontend_options import ConnectionOptions
from neso.frontends.transport.http1.asgi import AsgiApp, AsgiServer

async def main():
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    options = OpenAIOptions(host="127.0.0.1", port=int(sys.argv[1])).server()
    server = AsgiServer(AsgiApp(app), options, ConnectionOptions().limits())
    async with workers(app):
        await server.start()
        await ended.wait()
        await server.stop(1.0)

asyncio.run(main())
"""


class Example:
    """The application in a process of its own."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-c", LAUNCHER, str(port)]
        self.process = subprocess.Popen(command, cwd=EXAMPLES / "disaggregated_api")

    def ready(self) -> bool:
        assert self.process.poll() is None
        try:
            return len(self.status()["workers"]) == 3
        except OSError:
            return False

    def status(self) -> Any:
        with urllib.request.urlopen(f"{self.url}/workers", timeout=60) as response:
            return json.load(response)

    def open(self, **story: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/stories", json.dumps(story).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    example = Example()
    try:
        wait_until(example.ready)
        yield example
    finally:
        example.process.send_signal(signal.SIGTERM)
        try:
            example.process.wait(30)
        except subprocess.TimeoutExpired:
            example.process.kill()
            raise


@pytest.fixture(scope="module")
def expected() -> str:
    """Text of an engine in this process."""
    params = neso.SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    (result,) = neso.LLM("neso-pilot").generate([BEGINNING], params, progress=False)
    return result.outputs[0].text


def test_application_streams_the_text_of_the_workers(example: Example, expected: str):
    with example.open(beginning=BEGINNING, max_tokens=300) as response:
        first = response.read(1)
        assert (first + response.read()).decode() == expected


def test_text_continues_when_a_worker_is_killed(example: Example, expected: str):
    before = example.status()["repeated"]
    with example.open(beginning=BEGINNING, max_tokens=300) as response:
        text = response.read(1)
        for child in psutil.Process(example.process.pid).children():
            if any('"name":"decode-' in argument for argument in child.cmdline()):
                child.kill()
        text += response.read()
    assert text.decode() == expected
    assert example.status()["repeated"] > before
    wait_until(lambda: len(example.status()["workers"]) == 3)


def test_client_that_disconnects_cancels_its_request(example: Example):
    response = example.open(beginning="Tell a story", max_tokens=3000)
    response.read(1)
    assert example.status()["running"] == 1
    response.close()
    wait_until(lambda: example.status()["running"] == 0)


def test_invalid_request_has_a_status(example: Example):
    with pytest.raises(urllib.error.HTTPError) as raised:
        example.open(beginning="a", max_tokens=-1)
    assert raised.value.code == 400


def test_script_of_the_example():
    ports = free_port()
    environment = {**os.environ, "NESO": f"{shlex.quote(sys.executable)} -m neso.cli"}
    result = subprocess.run(
        [EXAMPLES / "disaggregated" / "run.sh", str(ports)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal" in result.stdout
    assert "prompts computed by another worker" in result.stdout
