"""`neso serve` with ranks of the torch runner, started by torchrun or by the server itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from eventually import wait_until
from free_port import free_port
from require_mpi import requires_mpi

from neso.engine.client.llm import LLM
from neso.generation import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = ["A server answers", "In 1989 Voyager 2"]
LENGTH = 12


def serve(model: Path, port: int, *arguments: str) -> list[str]:
    others = [f"--{name}-port=0" for name in ("grpc", "metrics", "openai")]
    ranks = ["--runner=torch", "--tensor-parallel-size=2", *arguments]
    return [sys.executable, "-m", "neso.cli", "serve", str(model), f"--http-port={port}", *others, *ranks]


def torchrun(model: Path, port: int) -> list[str]:
    """Rank 0 serves; the other rank follows it."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *place, "--no-python"]
    return [*run, *serve(model, port)]


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Start a server and wait until it is ready; end it and its ranks afterwards."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5))
            except OSError:
                return False

        wait_until(ready, seconds=100)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def generate(port: int, model: str, prompt: str) -> str:
    body = {"text_input": prompt, "parameters": {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/{model}/generate", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["text_output"]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("server", marks=requires_mpi)])
def test_same_text_as_one_rank(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, launcher: str
) -> None:
    model, port = checkpoint_factory("llama"), free_port()
    llm = LLM(model, runner="torch", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    expected = [result.outputs[0].text for result in llm.generate(PROMPTS, params, progress=False)]
    command = torchrun(model, port) if launcher == "torchrun" else serve(model, port)
    with running(command, port, tmp_path / "log"):
        assert [generate(port, model.name, prompt) for prompt in PROMPTS] == expected
