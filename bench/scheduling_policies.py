"""Scheduling policies compared: tokens per second, time to first token, recomputed tokens.

Each policy runs the same requests on the same engine, with a KV cache that is large enough and with smaller ones. The
number of steps is the same on every machine; times differ. Policies take turns, and times are medians over the turns.
The ratio is relative to `max_utilization` with the same cache, in tokens per second.

usage: python bench/scheduling_policies.py [CHECKPOINT] [--requests 48] [--turns 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from smoke import parse_arguments

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.generation import SamplingParams
from neso.models import SHIPPED_MODELS

POLICIES = {
    "max_utilization": {},
    "guaranteed_no_evict": {"batch_scheduler_policy": "guaranteed_no_evict"},
    "V1": {"gpt_model_type": "V1"},
}
SEQUENCES = 16
MAX_LENGTH = 48 + 128


@dataclass(frozen=True, slots=True)
class Result:
    """`steps` of the engine; `repeated`: recomputed tokens as a share of the tokens of the requests."""

    tokens_per_second: float
    steps: int
    first_token: float
    preemptions: int
    repeated: float


def requests(count: int, vocabulary: int, stop_early: bool) -> list[EngineRequest]:
    """Prompts of 16 to 48 tokens, outputs of 8 to 128 tokens; `stop_early`: max_tokens is 128 for all requests.

    The id of a request ends with its output length.
    """
    rng = random.Random(0)
    made = []
    for i in range(count):
        prompt = [rng.randrange(10, vocabulary) for _ in range(rng.randrange(16, 49))]
        length = rng.choice([8, 16, 32, 64, 128])
        made.append(
            EngineRequest(
                request_id=f"{i}:{length}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0, ignore_eos=True),
                max_tokens=128 if stop_early else length,
            )
        )
    return made


def serve(core: EngineCore, batch: list[EngineRequest]) -> Result:
    """Run all requests at once; requests that reach their output length are aborted."""
    left = {request.request_id: int(request.request_id.partition(":")[2]) for request in batch}
    preempted_before, first_step = core.scheduler.num_preemptions, core.stats().step
    started = time.perf_counter()
    for request in batch:
        core.add(request)
    first: dict[str, float] = {}
    computed = 0
    while core.has_work:
        for output in core.step():
            name = output.request_id
            first.setdefault(name, time.perf_counter() - started)
            left[name] -= len(output.token_ids)
            if left[name] <= 0:
                core.abort(name)
        computed += core.stats().num_batched_tokens
    seconds = time.perf_counter() - started
    produced = sum(int(name.partition(":")[2]) - rest for name, rest in left.items())
    # The last token of a request is never fed back.
    needed = produced + sum(len(request.prompt_token_ids) - 1 for request in batch)
    return Result(
        produced / seconds,
        core.stats().step - first_step,
        statistics.median(first.values()),
        core.scheduler.num_preemptions - preempted_before,
        computed / needed - 1,
    )


def compare(
    checkpoint: str, num_blocks: int, count: int, stop_early: bool, turns: int
) -> dict[str, list[Result]]:
    """Results of each policy by turn."""
    cores = {}
    for name, policy in POLICIES.items():
        options = {
            "num_blocks": num_blocks,
            "max_num_seqs": SEQUENCES,
            "enable_prefix_caching": False,
            **policy,
        }
        cores[name], info = load_engine(EngineConfig.from_options(checkpoint, options))
    batch = requests(count, info.vocab_size, stop_early)
    results: dict[str, list[Result]] = {name: [] for name in POLICIES}
    for _ in range(turns):
        for name, core in cores.items():
            results[name].append(serve(core, batch))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(SHIPPED_MODELS["neso-pilot"]))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    options = parse_arguments(parser, requests=8, turns=1)
    whole = SEQUENCES * -(-MAX_LENGTH // 16)
    print("cache  outputs               policy   tok/s  ratio  TTFT ms  steps  preempted  repeated")
    for share in (1.0, 0.5, 0.25):
        for stop_early in (False, True):
            blocks = int(whole * share)
            results = compare(options.checkpoint, blocks, options.requests, stop_early, options.turns)
            base = statistics.median(turn.tokens_per_second for turn in results["max_utilization"])
            for name, turns in results.items():
                rate = statistics.median(turn.tokens_per_second for turn in turns)
                ttft = statistics.median(turn.first_token for turn in turns)
                print(
                    f"{share:5.0%}  {'ended' if stop_early else 'max':>7} {name:>20} {rate:7.0f} {rate / base:6.2f} "
                    f"{ttft * 1e3:8.0f} {turns[0].steps:6} {turns[0].preemptions:10} {turns[0].repeated:9.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
