"""Limits of an engine step compared: throughput, latency, and where the time goes, by kind of step.

Each variant sets options of the scheduler. All run the same closed loop in turn, on one runner without server and
clients; output lengths vary by half, so that requests do not stay in step. Figures are relative to the default in the
same round; medians of the rounds are printed. Then follows the time of the steps of each variant by kind, with the
share of the limit of the machine (see bench/roofline.py) and of the time that is spent outside the runner.

usage: python bench/studies/step_limits.py [CHECKPOINT] [--loads 128/64 1024/32] [--concurrency 16 64] [--rounds 3]
           [--variants max_decode_stretch=4 max_num_batched_tokens=256,max_prefill_chunk=256] [--waves 3] [--equal]

--waves: requests per place of the loop. --equal: all outputs have the same length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from checkpoint import write_checkpoint
from load import Workload
from machine_limits import MachineLimits, describe, use_smoke_sizes
from machine_limits import measure as measure_limits
from roofline import Model, Phase
from servers import Load
from smoke import parse_arguments
from step_overhead import time_calls

from neso.engine.addons.registry import standard_addons
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import CPU_LIMITS, SchedulerOptions
from neso.engine.loop.engine_core import EngineCore
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.runner_options import RunnerOptions
from neso.generation import SamplingParams

DEFAULT = "default"
VARIANTS = (
    *("max_decode_stretch=1.5", "max_decode_stretch=3", "max_decode_stretch=4", "max_decode_stretch=0"),
    *("max_num_batched_tokens=256", "max_num_batched_tokens=512", "max_num_batched_tokens=2048"),
    *("max_prefill_chunk=128", "max_prefill_chunk=1024"),
)
MIXED_ROWS = (64, 128, 256)
"""Mixed steps are counted separately up to each of these numbers of tokens, and above."""
FIGURES = ("tok/s", "CPU/tok", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


class StepTime(NamedTuple):
    """Numbers of decoding sequences and of prompt tokens, and seconds: of the step, the model and the sampler."""

    decoding: int
    prompt: int
    seconds: float
    model_seconds: float
    sampler_seconds: float

    @property
    def kind(self) -> str:
        if not self.prompt:
            return "decode only"
        if not self.decoding:
            return "prefill only"
        rows = self.decoding + self.prompt
        bound = next((bound for bound in MIXED_ROWS if rows <= bound), None)
        return f"mixed, over {MIXED_ROWS[-1]}" if bound is None else f"mixed, up to {bound}"


@dataclass
class Run:
    """One closed loop; times in seconds."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    started: set[str] = field(default_factory=set)

    def figures(self) -> list[float]:
        """Return `FIGURES`; times in milliseconds."""
        latencies = [
            float(np.percentile(times, percent))
            for times in (self.first_tokens, self.intervals)
            for percent in (50, 99)
        ]
        times = [self.cpu_seconds / self.tokens, *latencies]
        return [self.tokens / self.seconds, *(1e3 * one for one in times)]


class Engine:
    """An engine core with its own scheduler, on a runner that others use in turn."""

    def __init__(
        self, runner: NativeRunner, options: dict[str, Any], load: Load, spent: dict[str, float]
    ) -> None:
        """`spent`: seconds of the runner's methods, see `time_calls`."""
        config = SchedulerOptions(
            # The cache has the keys of the engine that ran last.
            **{"max_num_seqs": load.concurrency, "enable_prefix_caching": False, **options}
        ).resolve(CPU_LIMITS)
        blocks = load.concurrency * -(-(load.isl + 2 * load.osl) // config.block_size)
        self._core = EngineCore(runner, config, blocks, standard_addons(runner))
        self._spent = spent

    def run(self, requests: Sequence[EngineRequest], concurrency: int) -> Run:
        """Run all requests, `concurrency` at a time."""
        core, run, left = self._core, Run(), deque(requests)
        last_event: dict[str, float] = {}
        cpu, began = time.process_time(), time.perf_counter()
        while left or core.has_work:
            while left and len(last_event) < concurrency:
                request = left.popleft()
                last_event[request.request_id] = time.perf_counter()
                core.add(request)
            self._spent.clear()
            started = time.perf_counter()
            outputs = core.step()
            ended = time.perf_counter()
            stats = core.stats()
            spent = self._spent["step"], self._spent["choose"]
            run.steps.append(StepTime(stats.num_decoding, stats.num_context_tokens, ended - started, *spent))
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                name = output.request_id
                times = run.intervals if name in run.started else run.first_tokens
                times.append(ended - last_event[name])
                run.started.add(name)
                run.tokens += len(output.token_ids)
                last_event[name] = ended
                if output.finish_reason is not None:
                    del last_event[name]
        run.seconds, run.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--loads", nargs="+", default=["128/64"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--equal", action="store_true")
    arguments = parse_arguments(
        parser, loads=["16/4"], concurrency=[2], variants=["max_decode_stretch=4"], rounds=1, waves=2
    )
    if arguments.smoke:
        use_smoke_sizes()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            write_checkpoint(Path(folder), "tiny" if arguments.smoke else "m")
        model = Model(arguments.checkpoint or Path(folder), RunnerOptions(), (Phase("", 1, 1, 1),))
    limits = measure_limits()
    print(describe(limits), end="")
    spent: dict[str, float] = defaultdict(float)
    time_calls(model.runner, "step", spent)
    time_calls(model.runner, "choose", spent)
    for load in arguments.loads:
        for concurrency in arguments.concurrency:
            study(model, limits, Load(*map(int, load.split("/")), concurrency), spent, arguments)


def study(
    model: Model, limits: MachineLimits, load: Load, spent: dict[str, float], arguments: argparse.Namespace
) -> None:
    """Run all variants in turn and print their figures and steps. `spent`: see `Engine`."""
    variants = {DEFAULT: {}} | {text: parse_options(text) for text in arguments.variants}
    engines = {name: Engine(model.runner, options, load, spent) for name, options in variants.items()}
    vocab = model.spec.vocab_size
    for engine in engines.values():  # touches the cache, and lets the engine measure its steps
        engine.run(requests_of(load, 0, load.concurrency, vocab, arguments.equal), load.concurrency)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for number in range(arguments.rounds):
        requests = requests_of(load, 1 + number, arguments.waves * load.concurrency, vocab, arguments.equal)
        for name, engine in engines.items():
            runs[name].append(engine.run(requests, load.concurrency))
    print(f"\n{load}, {load.concurrency} in flight")
    show_figures(runs)
    show_steps(runs, Limit(model, limits, load))


def parse_options(text: str) -> dict[str, Any]:
    """Parse name=number,name=number."""
    pairs = (pair.split("=") for pair in text.split(","))
    return {name: float(value) if "." in value else int(value) for name, value in pairs}


def requests_of(load: Load, number: int, count: int, vocab: int, equal: bool) -> list[EngineRequest]:
    """Return requests with outputs of half to one and a half of the load's length, or all of it."""
    rng = random.Random(number)
    prompts = Workload(load.isl, load.osl, load.concurrency, count, vocab=vocab, seed=number).prompts()
    sampling = SamplingParams(temperature=1.0, seed=1, ignore_eos=True)
    return [
        EngineRequest(
            request_id=f"{number}-{i}",
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=load.osl if equal else rng.randint(load.osl // 2, load.osl * 3 // 2),
        )
        for i, prompt in enumerate(prompts)
    ]


class Limit:
    """The limit of the machine for steps of a load."""

    def __init__(self, model: Model, limits: MachineLimits, load: Load) -> None:
        self._model, self._limits = model, limits
        self._cached = load.isl + load.osl // 2
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, step: StepTime) -> float:
        """Return the least time of a step; all prompt tokens are taken for one prompt's, sequences for average ones."""
        key = step.decoding, step.prompt
        if key not in self._known:
            phase = Phase("", step.decoding, 1, self._cached, step.prompt)
            read, flops = self._model.read_bytes(phase), self._model.flops(phase)
            self._known[key] = self._limits.seconds(read, flops, self._model.kind)
        return self._known[key]


def show_figures(runs: dict[str, list[Run]]) -> None:
    """Print the medians of the default, and of the ratios of the others to it."""
    print(f"{'':44}" + " ".join(f"{name:>9}" for name in FIGURES))
    base = [run.figures() for run in runs[DEFAULT]]
    for name, own in runs.items():
        rounds = [run.figures() for run in own]
        values = [statistics.median(column) for column in zip(*rounds, strict=True)]
        if name != DEFAULT:
            pairs = [zip(one, ours, strict=True) for one, ours in zip(rounds, base, strict=True)]
            ratios = [[a / b if b else float("nan") for a, b in pair] for pair in pairs]
            values = [statistics.median(column) for column in zip(*ratios, strict=True)]
        unit = " (tok/s, ms)" if name == DEFAULT else ""
        print(f"{name + unit:44}" + " ".join(f"{value:9.2f}" for value in values), flush=True)


def show_steps(runs: dict[str, list[Run]], limit: Limit) -> None:
    """Print the time of all steps by kind, and the averages of their tokens."""
    columns = ("steps", "decoding", "prompt", "ms", "of time", "of limit", "sampler", "other")
    print(f"{'':36}{'':18}" + " ".join(f"{name:>9}" for name in columns))
    for name, own in runs.items():
        by_kind: dict[str, list[StepTime]] = defaultdict(list)
        for run in own:
            for step in run.steps:
                by_kind[step.kind].append(step)
        whole = sum(step.seconds for steps in by_kind.values() for step in steps)
        for kind, steps in sorted(by_kind.items()):
            show_kind(f"{name:36}{kind:18}", steps, whole, limit)
        show_kind(f"{name:36}{'all':18}", [step for run in own for step in run.steps], whole, limit)


def show_kind(title: str, steps: list[StepTime], whole: float, limit: Limit) -> None:
    decoding, prompt, seconds, model, sampler = (sum(column) for column in zip(*steps, strict=True))
    count = len(steps)
    shares = (
        seconds / whole,
        sum(map(limit.seconds, steps)) / seconds,
        sampler / seconds,
        (seconds - model - sampler) / seconds,
    )
    averages = f"{count:9} {decoding / count:9.1f} {prompt / count:9.1f} {1e3 * seconds / count:9.2f}"
    print(f"{title}{averages} " + " ".join(f"{100 * share:7.1f} %" for share in shares), flush=True)


if __name__ == "__main__":
    main()
