"""Plans a step of the native runner on many cores, on a machine with few.

The loops of a step (ThreadTeam::for_each) are timed on one thread. A model computes from them the time on N cores:

    loops     each loop takes its time on one thread multiplied by the part of its work that the busiest of N threads is
              assigned; a runner with N threads says which part that is
    memory    products take at least the time in which the machine reads the weights and the cached keys and values
    barriers  a loop ends with a cache line written by each thread of a group of 8, one after the other, another by each
              group, and a third that all read. Each of these transfers between cores takes --transfer ns
    rest      what one thread does outside loops, and waking the threads: until then, the caller works alone

Assumptions: the machine's bandwidth (--bandwidth), the transfer time, the time to wake threads (--wake), cores as fast
as this one, and memory divided among the NUMA nodes as evenly as the work. Unknown and not contained: the clock at
which many cores run, shared caches, links between nodes, and other processes.

With two threads, the prediction is compared with a measurement, both with the bandwidth of this machine. Steps with
more threads than cores are run to compare the tokens.

usage: python bench/many_cores.py [--size m] [--steps 10] [--batches 1 16 64] [--bandwidth 300] [--transfer 100]
           [--wake 50] [--smoke]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoint import write_checkpoint
from machine_limits import bandwidths
from roofline import CONTEXT, Model, Phase
from smoke import parse_arguments

import neso._native as _native
from neso.engine.core.step_plan import StepPlan
from neso.engine.host_resources import available_cores
from neso.engine.parallel.sharding import shard_of
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.thread_placement import place_threads

THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
COMPARED = (2, 8, 64)
"""Numbers of threads with which the tokens are compared to those of one."""

GROUP = 8
"""Threads that count finished chunks on one cache line, see ThreadTeam."""

Loop = tuple[float, bool, float]
"""See `Decoder.record_loops`: part of the busiest thread, whether it is a matrix product, seconds."""


@dataclass(frozen=True)
class Machine:
    """Assumptions about a machine: bytes per second of all cores, seconds of a transfer and of waking the threads."""

    bandwidth: float
    transfer: float
    wake: float

    def barrier(self, threads: int) -> float:
        """Return the seconds in which `threads` threads end a loop."""
        groups = -(-threads // GROUP)
        transfers = min(threads, GROUP) + (groups if groups > 1 else 0) + 1
        return transfers * self.transfer if threads > 1 else 0.0


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step on `threads` cores. `memory` is the least time of products, and not added."""

    threads: int
    products: float
    others: float
    memory: float
    barriers: float
    rest: float

    @property
    def step(self) -> float:
        return max(self.products, self.memory) + self.others + self.barriers + self.rest

    def line(self, one: Prediction) -> str:
        parts = (self.products + self.others, self.memory, self.barriers, self.rest, self.step)
        return (
            f"  {self.threads:7} "
            + " ".join(f"{1e3 * part:9.2f}" for part in parts)
            + (f"  {one.step / self.step:8.1f}")
        )


def loops_of(runner: NativeRunner, plan: StepPlan, repeats: int) -> tuple[list[Loop], float]:
    """Return the loops of a step and the seconds outside loops, each the shortest of all steps."""
    runs, outside = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        loops = runner._decoder.record_loops(lambda: runner.step(plan))
        outside.append(time.perf_counter() - started - sum(seconds for _, _, seconds in loops))
        runs.append(loops)
    return [(*same[0][:2], min(seconds for _, _, seconds in same)) for same in zip(*runs, strict=True)], min(
        outside
    )


def predict(
    machine: Machine, threads: int, one: list[Loop], many: list[Loop], outside: float, read: float
) -> Prediction:
    """Predict a step. `one`, `many`: its loops on one and on `threads` threads; `read`: bytes."""
    if [is_product for _, is_product, _ in one] != [is_product for _, is_product, _ in many]:
        raise ValueError("with more threads, the step has other loops; use shorter contexts")
    seconds = {True: 0.0, False: 0.0}
    for (_, is_product, alone), (share, _, _) in zip(one, many, strict=True):
        seconds[is_product] += alone * share
    waking = machine.wake * (1 - 1 / threads)
    barriers = len(one) * machine.barrier(threads)
    return Prediction(
        threads, seconds[True], seconds[False], read / machine.bandwidth, barriers, outside + waking
    )


def tokens(runner: NativeRunner, plan: StepPlan) -> list[int]:
    return [int(token) for token in runner.step(plan).argmax(axis=1)]


def measured_speedup(runners: dict[int, NativeRunner], plan: StepPlan, repeats: int) -> float:
    """Speedup of two threads. In turns, because other load on the host changes within seconds."""
    best = {1: float("inf"), 2: float("inf")}
    for _ in range(repeats):
        for threads in best:
            started = time.perf_counter()
            runners[threads].step(plan)
            best[threads] = min(best[threads], time.perf_counter() - started)
    return best[1] / best[2]


def report(
    machine: Machine,
    here: Machine,
    model: Model,
    runners: dict[int, NativeRunner],
    phase: Phase,
    repeats: int,
) -> None:
    plan, read = model.plan(phase), model.read_bytes(phase)
    expected = tokens(runners[1], plan)
    for threads in COMPARED:
        if tokens(runners[threads], plan) != expected:
            raise SystemExit(f"{phase.name}: other tokens with {threads} threads")
    one, outside = loops_of(runners[1], plan, repeats)
    many = {threads: loops_of(runner, plan, 1)[0] for threads, runner in runners.items()}
    alone, two = (predict(here, threads, one, many[threads], outside, read) for threads in (1, 2))
    measured = measured_speedup(runners, plan, 2 * repeats)
    print(f"\n{phase.name}: {len(one)} loops; the same tokens with {', '.join(map(str, COMPARED))} threads")
    print(
        f"  2 threads here: measured {measured:.2f} times the speed of one, predicted {alone.step / two.step:.2f}"
    )
    print("  threads  loops ms memory ms  barriers   rest ms   step ms   speedup")
    predictions = [predict(machine, threads, one, many[threads], outside, read) for threads in runners]
    for prediction in predictions:
        print(prediction.line(predictions[0]))


def _runner(model: Model, threads: int) -> NativeRunner:
    """Return a runner with the same weights and a cache of its own."""
    runner = NativeRunner(shard_of(model.spec, RunnerOptions().layout), model.weights, place_threads(threads))
    runner.allocate_cache(model.cache_layout)
    model.fill(runner)
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="m", help="checkpoint of bench/checkpoint.py")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--bandwidth", type=float, default=300, help="of the machine with many cores, GB/s")
    parser.add_argument("--transfer", type=float, default=100, help="ns to move a cache line to another core")
    parser.add_argument("--wake", type=float, default=50, help="µs until the other threads begin a step")
    arguments = parse_arguments(parser, size="tiny", steps=2, batches=[1, 4])
    if available_cores() < 2:
        raise SystemExit("two cores are needed, to compare the prediction with a measurement")
    phases = tuple(Phase(f"decode, batch {batch}", batch, 1, CONTEXT) for batch in arguments.batches)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), arguments.size)
        model = Model(Path(folder), RunnerOptions(num_threads=1), phases)
    model.fill()
    runners = {threads: model.runner if threads == 1 else _runner(model, threads) for threads in THREADS}
    machine = Machine(1e9 * arguments.bandwidth, 1e-9 * arguments.transfer, 1e-6 * arguments.wake)
    size = {"size": 1 << 22, "least": 0.0} if arguments.smoke else {}
    here = Machine(
        1e9 * max(bandwidths(model.runner.isa, 2, **size).values()), machine.transfer, machine.wake
    )
    barrier = min(_native.loop_seconds(2, 1000) for _ in range(5))
    print(
        f"{model.runner.isa} kernels, {arguments.size}. Assumed: {arguments.bandwidth:g} GB/s, "
        f"{arguments.transfer:g} ns per transfer, {arguments.wake:g} µs to wake the threads\n"
        f"Here: {1e-9 * here.bandwidth:.1f} GB/s with 2 threads, whose barrier takes {1e9 * barrier:.0f} ns "
        f"({1e9 * machine.barrier(2):.0f} assumed)"
    )
    for phase in phases:
        report(machine, here, model, runners, phase, arguments.steps)


if __name__ == "__main__":
    main()
