"""Output tokens per second of the engine by concurrency, with in-flight and with static batching.

Prompts have one length, outputs have very different lengths. Static batching runs requests in groups that start
together and end with the longest request; in-flight batching refills each slot as soon as it is free. Both use the same
engine.

usage: python bench/engine_throughput.py [CHECKPOINT] [--concurrency 1 4 16 64]
"""

from __future__ import annotations

import argparse
import random
import time

from smoke import parse_arguments

from neso.engine.client.llm import LLM
from neso.generation import SamplingParams
from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]


def workload(count: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """`count` prompts of 32 tokens, outputs of 8 to 128 tokens."""
    rng = random.Random(0)
    return [
        (
            [rng.randrange(10, vocabulary) for _ in range(32)],
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.choice([8, 16, 32, 64, 128])),
        )
        for _ in range(count)
    ]


def tokens_per_second(llm: LLM, requests: list[tuple[list[int], SamplingParams]], group: int) -> float:
    """Run `requests` in groups, one after another."""
    started, tokens = time.perf_counter(), 0
    for first in range(0, len(requests), group):
        prompts, sampling = zip(*requests[first : first + group], strict=True)
        for result in llm.generate(list(prompts), list(sampling), progress=False):
            tokens += len(result.outputs[0].token_ids)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default=PILOT)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = parse_arguments(parser, concurrency=[4])
    print(f"{'concurrency':>11} {'in-flight tok/s':>16} {'static tok/s':>13} {'ratio':>6}")
    for concurrency in arguments.concurrency:
        llm = LLM(
            arguments.checkpoint, max_num_seqs=concurrency, enable_prefix_caching=False, max_model_len=256
        )
        requests = workload(max(32, 4 * concurrency), llm.info.vocab_size)
        tokens_per_second(llm, requests[:concurrency], concurrency)
        inflight = tokens_per_second(llm, requests, len(requests))
        static = tokens_per_second(llm, requests, concurrency)
        print(f"{concurrency:>11} {inflight:>16.1f} {static:>13.1f} {inflight / static:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
