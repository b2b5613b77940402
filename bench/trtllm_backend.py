"""Overhead of the backend `tensorrtllm`: token ids over gRPC streams and generate_stream, compared to the engine.

The engine runs without a frontend, then as the model `tensorrt_llm` of `neso serve`, with the same checkpoint, prompts
and settings; the load generator is `neso perf`. Prints medians of several rounds, in turns.

usage: python bench/trtllm_backend.py [CHECKPOINT] [--concurrency 16] [--rounds 3] [--tokens 64]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from checkpoint import write_checkpoint
from load import Workload, run_requests
from neso_server import served
from serve_overhead import rate_and_itl
from smoke import parse_arguments

from neso.perf.api import EndpointOptions, Measurement, PerfRequest

CONFIG = """
backend: "tensorrtllm"
max_batch_size: 64
model_transaction_policy { decoupled: true }
parameters { key: "gpt_model_path" value { string_value: "CHECKPOINT" } }
"""


def measure(options: EndpointOptions, load: Workload) -> Measurement:
    """Run the load after a warm-up. An engine ignores end tokens by `ignore_eos`, the model by its `end_id`."""
    extra = {"ignore_eos": True} if options.is_engine else {"end_id": -1}
    requests = [PerfRequest(token_ids=ids, max_tokens=load.osl, extra=extra) for ids in load.prompts()]
    return run_requests(options, requests, load.concurrency, warm_up=load.concurrency)


def write_repository(repository: Path, checkpoint: str) -> None:
    """Write a repository with the model `tensorrt_llm`."""
    (repository / "tensorrt_llm" / "1").mkdir(parents=True)
    config = CONFIG.replace("CHECKPOINT", str(Path(checkpoint).resolve()))
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(config)


def one_round(checkpoint: str, repository: Path, load: Workload) -> dict[str, tuple[float, float]]:
    """Tokens per second and inter-token latency in milliseconds of the engine, and over gRPC and HTTP."""
    engine = EndpointOptions(
        models=(checkpoint,),
        endpoint_type="engine",
        engine_config=("batch_scheduler_policy=guaranteed_no_evict",),
        streaming=True,
    )
    measured = {"engine": measure(engine, load)}
    kinds = {"grpc": "kserve_grpc", "http": "token_ids_endpoint:TokenIdsEndpoint"}
    with served(f"--model-repository={repository}") as server:
        for name, kind in kinds.items():
            url = f"127.0.0.1:{server.ports[name]}"
            options = EndpointOptions(
                models=("tensorrt_llm",), urls=(url,), endpoint_type=kind, streaming=True
            )
            measured[name] = measure(options, load)
    return {name: rate_and_itl(run) for name, run in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_arguments(parser, concurrency=2, rounds=1, tokens=8)
    concurrency = arguments.concurrency
    load = Workload(32, arguments.tokens, concurrency, 3 * concurrency)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/checkpoint"
            write_checkpoint(Path(checkpoint), "s" if arguments.smoke else "m")
        repository = Path(scratch) / "models"
        write_repository(repository, checkpoint)
        rounds = [one_round(checkpoint, repository, load) for _ in range(arguments.rounds)]
    print(f"{'':>7} {'tok/s':>9} {'ITL ms':>8} {'rate ratio':>14} {'ITL ratio':>8}")
    for name in rounds[0]:
        rate, itl = (statistics.median(found[name][i] for found in rounds) for i in (0, 1))
        share, longer = (statistics.median(r[name][i] / r["engine"][i] for r in rounds) for i in (0, 1))
        print(f"{name:>7} {rate:>9.1f} {itl:>8.2f} {share:>14.3f} {longer:>8.3f}")


if __name__ == "__main__":
    main()
