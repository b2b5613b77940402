"""Overhead of TensorRT-LLM's layout: tokens per second through its models, compared to the engine alone.

The engine runs without a frontend, then as `tensorrt_llm` (tokens), `ensemble` and `tensorrt_llm_bls` (text) behind
`neso serve`, streaming and not, over HTTP's generate extension, with the same checkpoint, prompts and settings; the
load generator is `neso perf`. Prints medians of the rounds and of the ratios. `share` is the CPU time of the server
process divided by that of the engine process. It shows the cost of the layout on cores shared with the engine, and is
stable on a busy machine.

usage: python bench/trtllm_layout.py [CHECKPOINT] [--concurrency 16] [--rounds 3] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from checkpoint import write_checkpoint
from load import run_requests
from neso_server import NesoServer, served
from serve_overhead import TOKENS, bare, prompts, rate_and_itl
from smoke import parse_arguments

from neso import load_tokenizer
from neso.layouts.repository_files import write_files
from neso.layouts.trtllm import trtllm_files
from neso.layouts.trtllm_options import TrtllmOptions
from neso.models import SHIPPED_MODELS
from neso.perf.api import EndpointOptions, PerfRequest

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

    def endpoint(self, server: NesoServer) -> EndpointOptions:
        return EndpointOptions(
            models=(self.model,),
            urls=(f"127.0.0.1:{server.ports['http']}",),
            endpoint_type=(
                "token_ids_endpoint:TokenIdsEndpoint" if self.model == "tensorrt_llm" else "generate"
            ),
            streaming=self.streams,
        )

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


def measure(server: NesoServer, case: Case, requests: Sequence[PerfRequest], concurrency: int) -> float:
    """Tokens per second; also records the CPU time."""
    options = case.endpoint(server)
    run_requests(options, requests[:concurrency], concurrency)
    before = cpu_seconds(server)
    measured = run_requests(options, requests, concurrency)
    own, engine = (now - then for now, then in zip(cpu_seconds(server), before, strict=True))
    case.cpu_us.append(1e6 * own / (len(requests) * TOKENS))
    case.shares.append(own / engine)
    return measured.summaries["request_throughput"].avg * TOKENS


def compare(
    checkpoint: str, repository: Path, cases: list[Case], concurrency: int, rounds: int
) -> list[float]:
    """Measure the cases; returns the rates of the engine alone."""
    requests = prompts(2 * concurrency)
    tokenizer = load_tokenizer(checkpoint)
    with_ids = [
        # The end token is none of the model's: generation ends only at the length limit.
        replace(request, token_ids=tokenizer.encode(request.text), extra={"end_id": -1})
        for request in requests
    ]
    rates = []
    for _ in range(rounds):
        alone, _ = rate_and_itl(bare(checkpoint, concurrency, requests))
        rates.append(alone)
        with served(f"--model-repository={repository}") as server:
            for case in cases:
                case.rates.append(measure(server, case, with_ids, concurrency))
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
