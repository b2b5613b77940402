"""Overhead of TensorRT-LLM's layout: tokens per second through its models, compared to the engine alone.

The engine runs in its own process (`AsyncEngine`, no frontend), then as `tensorrt_llm` (tokens), `ensemble` and
`tensorrt_llm_bls` (text) behind `neso serve`, streaming and not, with a client per request over HTTP's generate
extension, with the same checkpoint, prompts and settings. Prints medians of the rounds and of the ratios. `share` is
the CPU time of the server process divided by that of the engine process. It shows the cost of the layout on cores
shared with the engine, and is stable on a busy machine.

usage: python bench/trtllm_layout.py [CHECKPOINT] [--concurrency 16] [--rounds 3] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import uvloop
from checkpoint import write_checkpoint
from neso_server import NesoServer, served
from serve_overhead import TOKENS, bare, prompts
from smoke import parse_arguments
from timed_requests import run

from neso import load_tokenizer
from neso.layouts.repository_files import write_files
from neso.layouts.trtllm import trtllm_files
from neso.layouts.trtllm_options import TrtllmOptions
from neso.models import SHIPPED_MODELS

MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")


@dataclass
class Case:
    """One model, streaming or not, with a result per round."""

    model: str
    streams: bool
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def body(self, prompt: str, ids: list[int]) -> bytes:
        """Request body; generation ends only at the length limit."""
        if self.model == "tensorrt_llm":
            given: dict[str, Any] = {
                "input_ids": ids,
                "input_lengths": len(ids),
                "request_output_len": TOKENS,
            }
            given["streaming"] = self.streams
        else:
            given = {"text_input": prompt, "max_tokens": TOKENS, "stream": self.streams}
        return orjson.dumps(given | {"end_id": -1})

    def __str__(self) -> str:
        rate, ratio = statistics.median(self.rates), statistics.median(self.ratios)
        how = "stream" if self.streams else "whole"
        cpu, share = statistics.median(self.cpu_us), statistics.median(self.shares)
        return f"{self.model:>17} {how:>7} {rate:>9.1f} {ratio:>7.3f} {cpu:>12.0f} {share:>7.3f}"


def cpu_seconds(server: NesoServer) -> tuple[float, float]:
    """CPU time of the server process and of its engine process."""
    process = psutil.Process(server.process.pid)
    (engine,) = process.children()
    own, others = process.cpu_times(), engine.cpu_times()
    return float(own.user + own.system), float(others.user + others.system)


class _ResponseReader(asyncio.Protocol):
    """Reads a response until the connection is closed."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(b"".join(self.received))


async def post(port: int, path: str, body: bytes) -> bytes:
    """Send a request and read the raw response. An HTTP client would use as much CPU time as a model of the layout."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    transport, response = await asyncio.get_running_loop().create_connection(
        _ResponseReader, "127.0.0.1", port
    )
    transport.write(head.encode() + body)
    return await response.ended


async def measure(
    server: NesoServer, case: Case, texts: list[str], ids: dict[str, list[int]], concurrency: int
) -> float:
    """Tokens per second; also records the CPU time."""
    operation = "generate_stream" if case.streams else "generate"
    path = f"/v2/models/{case.model}/{operation}"

    async def one(text: str) -> list[float]:
        response = await post(server.ports["http"], path, case.body(text, ids[text]))
        if not response.startswith(b"HTTP/1.1 200") or b'"error"' in response:
            raise RuntimeError(f"{case.model}: {response[:500]!r}")
        return []

    await run(concurrency, texts[:concurrency], one, TOKENS)
    before = cpu_seconds(server)
    measured = await run(concurrency, texts, one, TOKENS)
    own, engine = (now - then for now, then in zip(cpu_seconds(server), before, strict=True))
    case.cpu_us.append(1e6 * own / (len(texts) * TOKENS))
    case.shares.append(own / engine)
    return measured.tokens_per_second


def compare(
    checkpoint: str, repository: Path, cases: list[Case], concurrency: int, rounds: int
) -> list[float]:
    """Measure the cases; returns the rates of the engine alone."""
    texts = prompts(2 * concurrency)
    tokenizer = load_tokenizer(checkpoint)
    ids = {text: tokenizer.encode(text) for text in texts}
    rates = []
    for _ in range(rounds):
        alone = uvloop.run(bare(checkpoint, concurrency, texts)).tokens_per_second
        rates.append(alone)
        with served(f"--model-repository={repository}") as server:
            for case in cases:
                case.rates.append(uvloop.run(measure(server, case, texts, ids, concurrency)))
                case.ratios.append(case.rates[-1] / alone)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parse_arguments(
        parser, checkpoint=str(SHIPPED_MODELS["neso-pilot"]), concurrency=2, rounds=1, models=["ensemble"]
    )
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/m"
            write_checkpoint(Path(checkpoint), "m")
        repository = Path(scratch) / "repository"
        options = TrtllmOptions(model=checkpoint, tokenizer=checkpoint)
        write_files(repository, trtllm_files(options))
        cases = [Case(model, streams) for model in arguments.models for streams in (True, False)]
        rates = compare(checkpoint, repository, cases, arguments.concurrency, arguments.rounds)
    print(f"{'':>17} {'':>7} {'tok/s':>9} {'ratio':>7} {'CPU us/token':>12} {'share':>7}")
    print(f"{'bare engine':>17} {'':>7} {statistics.median(rates):>9.1f}")
    for case in cases:
        print(case)


if __name__ == "__main__":
    main()
