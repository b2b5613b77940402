"""Closed-loop load on an OpenAI completions endpoint by `neso perf`: throughput, TTFT, TPOT, ITL, goodput.

Prompts are random tokens without common prefixes. They are sent as token ids. With --words CHECKPOINT they are sent as
words that are one token each in the checkpoint's byte-level vocabulary, for servers that accept only text.

usage: python bench/load.py [URL] [MODEL] [--isl 128] [--osl 64] [--concurrency 8] [--requests 32] [--long-isl 0]
                            [--vocab 8000] [--seed 0] [--words CHECKPOINT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neso_server import served
from smoke import parse_arguments

from neso.perf.client.generator import LoadGenerator
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.load.plan import LoadPlan
from neso.perf.measurement import Measurement
from neso.perf.metrics import parse_slos
from neso.perf.requests import PerfRequest

GOOD = parse_slos(("time_to_first_token:1000", "time_per_output_token:50"))
"""Goodput counts requests within these limits, in milliseconds."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens; every fourth prompt has `long_isl` tokens, if given."""

    isl: int
    osl: int
    concurrency: int
    requests: int
    long_isl: int = 0
    vocab: int = 8000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        lengths = [self.long_isl if self.long_isl and i % 4 == 3 else self.isl for i in range(self.requests)]
        return [[rng.randrange(6, self.vocab) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class LoadResult:
    """Results of a load; times in milliseconds."""

    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    goodput: float

    @classmethod
    def of(cls, run: Measurement) -> LoadResult:
        summaries = run.summaries
        ttft, itl = summaries["time_to_first_token"], summaries.get("pooled_inter_token_latency")
        tpot = summaries.get("time_per_output_token")
        return cls(
            output_tokens_per_second=summaries["output_token_throughput"].avg,
            ttft_p50=ttft.percentiles[50],
            ttft_p99=ttft.percentiles[99],
            tpot_p50=tpot.percentiles[50] if tpot else 0.0,
            itl_p50=itl.percentiles[50] if itl else 0.0,
            itl_p99=itl.percentiles[99] if itl else 0.0,
            goodput=summaries["goodput"].avg,
        )

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_second:7.1f} tok/s  TTFT {self.ttft_p50:6.0f} / {self.ttft_p99:6.0f} ms  "
            f"ITL {self.itl_p50:6.1f} / {self.itl_p99:6.1f} ms  goodput {self.goodput:5.2f} /s"
        )


def run_load(
    url: str,
    model: str,
    workload: Workload,
    *,
    words: list[str] | None = None,
    endpoint_type: str = "completions",
    temperature: float = 0.0,
) -> LoadResult:
    """Send all requests, `concurrency` at a time; with `words`, prompts are text.

    Raises `RuntimeError` if a request fails.
    """
    extra: dict[str, Any] = {"temperature": temperature, "ignore_eos": True}
    if endpoint_type == "generate":
        extra["return_num_output_tokens"] = True
    requests = [
        PerfRequest(
            text="" if words is None else "".join(words[i % len(words)] for i in ids),
            token_ids=ids if words is None else None,
            max_tokens=workload.osl,
            extra=extra,
        )
        for ids in workload.prompts()
    ]
    options = EndpointOptions(
        models=(model,),
        urls=(url,),
        endpoint_type=endpoint_type,
        streaming=True,
        per_chunk_usage=True,
        request_timeout=600.0,
    )
    return LoadResult.of(run_requests(options, requests, workload.concurrency))


def run_requests(
    options: EndpointOptions, requests: Sequence[PerfRequest], concurrency: int, *, warm_up: int = 0
) -> Measurement:
    """Send all requests once, `concurrency` at a time, after `warm_up` of them that are not counted.

    Raises `RuntimeError` if a request fails.
    """
    plan = LoadPlan(concurrency=concurrency, requests=len(requests))
    before = replace(plan, requests=warm_up) if warm_up else None
    with LoadGenerator(options, requests) as generator:
        measured = Measurement(generator.run(plan, warm_up=before), slos=GOOD)
    if measured.errors:
        raise RuntimeError(f"{options.models[0]}: {measured.errors}")
    return measured


def one_token_words(checkpoint: Path) -> list[str]:
    """Words with a leading space that are one token each in a byte-level BPE vocabulary, also when joined."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    words = [token[1:] for token in vocabulary if token.startswith("Ġ")]
    return [" " + word for word in words if word.isascii() and word.isalpha()]


@contextmanager
def smoke_server() -> Iterator[str]:
    """Yield the URL of a server with the bundled model."""
    with served() as server:
        yield f"http://127.0.0.1:{server.ports['openai']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:9000")
    parser.add_argument("model", nargs="?", default="neso-pilot")
    defaults = Workload(isl=128, osl=64, concurrency=8, requests=32)
    for name, default in asdict(defaults).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, isl=16, osl=4, concurrency=2, requests=4, vocab=200)
    workload = Workload(**{name: getattr(arguments, name) for name in asdict(defaults)})
    words = one_token_words(arguments.words) if arguments.words else None
    with smoke_server() if arguments.smoke else nullcontext(arguments.url) as url:
        result = run_load(url, arguments.model, workload, words=words)
    print(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
