"""Time to first token of prompts with a common prefix, with and without the prefix cache.

Requests run one after another, each with the same prefix (a system prompt) and its own suffix. The two engines take
turns; the first request of each fills the cache and is not counted. Prompts without a common prefix show the cost of
the lookup. The ratio is the time without the cache divided by the time with it.

usage: python bench/prefix_cache.py [CHECKPOINT] [--requests 12] [--prompt 1024]
Default: a new checkpoint with 28 M parameters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from checkpoint import write_checkpoint
from smoke import parse_arguments

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.generation import SamplingParams

SHARES = (0.0, 0.5, 0.9, 0.99)


def prompts(count: int, length: int, shared: int, vocabulary: int) -> list[list[int]]:
    """Prompts of `length` tokens, of which the first `shared` are the same."""
    rng = random.Random(shared)
    beginning = [rng.randrange(10, vocabulary) for _ in range(shared)]
    return [beginning + [rng.randrange(10, vocabulary) for _ in range(length - shared)] for _ in range(count)]


def first_token(core: EngineCore, name: str, prompt: list[int]) -> float:
    """Seconds to the first token of a request."""
    started = time.perf_counter()
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, max_tokens=1))
    while core.has_work:
        core.step()
    return time.perf_counter() - started


def compare(checkpoint: str, length: int, shared: int, count: int) -> tuple[float, float]:
    """Median seconds to the first token with the cache and without."""
    cores = []
    for caching in (True, False):
        core, info = load_engine(
            EngineConfig.from_options(
                checkpoint, {"enable_prefix_caching": caching, "num_blocks": 1024, "max_num_seqs": 4}
            )
        )
        assert isinstance(core, EngineCore)
        cores.append(core)
    seconds: list[list[float]] = [[], []]
    for i, prompt in enumerate(prompts(count + 1, length, shared, info.vocab_size)):
        for times, core in zip(seconds, cores, strict=True):
            times.append(first_token(core, str(i), prompt))
    cached, plain = (statistics.median(times[1:]) for times in seconds)
    return cached, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    options = parse_arguments(parser, requests=2, prompt=128)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint
        if checkpoint is None:
            write_checkpoint(Path(folder), "s")
            checkpoint = folder
        print(f"prompts of {options.prompt} tokens\nshared  with ms  without ms  ratio")
        for share in SHARES:
            cached, plain = compare(checkpoint, options.prompt, int(options.prompt * share), options.requests)
            print(f"{share:6.0%} {cached * 1e3:8.1f} {plain * 1e3:11.1f} {plain / cached:6.2f}", flush=True)


if __name__ == "__main__":
    main()
