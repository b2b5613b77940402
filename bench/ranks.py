"""Cost of ranks: sums and plans between two ranks on this host, and tokens per second of one and of two ranks.

- sums by size: shared memory, MPI_Allreduce called from C++, and mpi4py's Allreduce, in turns
- plans by batch size: encoding, sending, receiving and decoding, against MPI_Bcast of the same bytes
- tokens per second: one rank of two threads against two ranks and two pipeline stages of one thread, in turns, and what
  the model of the costs predicts for more ranks

usage: python bench/ranks.py [--model m] [--repeats 5]      (pip install neso-server[mpi])
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoint import SHAPES, write_checkpoint
from smoke import exit_missing, parse_arguments

from neso.engine.addons.registry import PLAN_PARTS
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.core.step_plan import StepPlan
from neso.engine.errors import EngineError
from neso.engine.parallel.launcher import mpiexec_command, own_environment
from neso.engine.parallel.plan_channel import PlanReceiver, PlanSender
from neso.engine.parallel.plan_codec import PlanCodec
from neso.generation import GenerationRequest, SamplingParams

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 21)
"""Floats of a sum: one row of a small model to a prefill chunk of a large one."""
BATCHES = (1, 16, 64, 256)
PROMPT, OUTPUT = 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="m", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300, help="calls per size and repeat")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parse_arguments(parser, model="tiny", repeats=1, calls=5)
    if options.worker:
        run_worker(Path(options.worker), options.calls, options.repeats)
        return
    try:
        command = mpiexec_command(2)
    except EngineError as error:
        exit_missing(str(error))
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, __file__, "--worker", folder]
        flags = ["--calls", str(options.calls), "--repeats", str(options.repeats)]
        subprocess.run([*command, *worker, *flags], env=own_environment(), check=True)
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, options.model)
        costs = json.loads((Path(folder) / "costs.json").read_text())
        compare_engines(checkpoint, options.model, options.repeats, costs)


# -- costs of one operation ---------------------------------------------------------------------------------------


def run_worker(folder: Path, calls: int, repeats: int) -> None:
    """Measure sums and plans as one of two ranks; rank 0 prints."""
    from mpi4py import MPI

    from neso.engine.parallel.launched_rank import launched_rank
    from neso.engine.parallel.layout import RankLayout
    from neso.engine.parallel.mpi import MpiCommunicator, finalize, library_version

    launched = launched_rank()
    assert launched is not None
    rank = launched.rank
    shared = MpiCommunicator(RankLayout(rank, 2, 1))
    plain = MpiCommunicator(RankLayout(rank, 2, 1), shared_memory=False)
    if rank == 0:
        print(f"{library_version()}\n\nsum of two ranks, µs (10th percentile; ratio to mpi4py)")
        print(f"{'floats':>9} {'shared memory':>18} {'MPI from C++':>18} {'mpi4py':>9}")
    costs = {}
    for size in SIZES:
        values = np.ones(size, np.float32)

        def bare(values: np.ndarray = values) -> None:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values)

        ways: list[Callable[[], object]] = [
            lambda values=values: shared.all_reduce(values),
            lambda values=values: plain.all_reduce(values),
            bare,
        ]
        times = measure(ways, max(5, calls * 1024 // max(size, 1024)), repeats, shared.barrier, values)
        if rank == 0:
            fast, own, other = (value * 1e6 for value in times)
            print(
                f"{size:9} {fast:10.1f} ({fast / other:4.2f}) {own:11.1f} ({own / other:4.2f}) {other:9.1f}"
            )
            costs[size] = times[0]
    plan_seconds = measure_plans(folder, rank, calls, MPI)
    if rank == 0:
        (folder / "costs.json").write_text(json.dumps({"sums": costs, "plan": plan_seconds}))
    finalize()


def measure(
    ways: list[Callable[[], object]],
    calls: int,
    repeats: int,
    barrier: Callable[[], object],
    values: np.ndarray,
) -> list[float]:
    """Return the seconds per call of each way, measured in turns."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, times in zip(ways, found, strict=True):
            barrier()
            for _ in range(calls):
                values[:] = 1
                started = time.perf_counter()
                way()
                times.append(time.perf_counter() - started)
    return [quick(times) for times in found]


def quick(times: list[float]) -> float:
    """Return the time that nine of ten calls exceed: on a busy machine the others wait for a core."""
    return float(np.quantile(times, 0.1))


def make_plan(batch: int) -> StepPlan:
    """Return a decode step of sequences of 2,000 tokens."""
    numbers = np.arange(batch, dtype=np.int32)
    return StepPlan(
        step=1,
        sequence_ids=numbers,
        token_ids=numbers,
        query_start=np.arange(batch + 1, dtype=np.int32),
        num_computed=np.full(batch, 2000, np.int32),
        block_tables=np.zeros((batch, 126), np.int32),
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=numbers,
    )


def measure_plans(folder: Path, rank: int, calls: int, mpi: object) -> float:
    """Print the cost of a plan by batch size; returns that of the smallest in seconds."""
    world = mpi.COMM_WORLD  # type: ignore[attr-defined]
    codec, address, token = PlanCodec(PLAN_PARTS), str(folder / "plans"), "token"
    back = str(folder / "back")
    if rank == 0:
        plans = PlanSender(address)
        plans.accept(1, token, 60)
        replies = PlanReceiver(back, token, 60)
        print("\nplan of a decode step to the other rank, µs (10th percentile)")
        print(f"{'batch':>9} {'bytes':>9} {'encode':>9} {'decode':>9} {'socket':>9} {'MPI_Bcast':>10}")
    else:
        sender = PlanSender(back)
        receiver = PlanReceiver(address, token, 60)
        sender.accept(1, token, 60)
    smallest = 0.0
    for batch in BATCHES:
        plan = make_plan(batch)
        message = codec.encode(codec.pack_plan(plan))
        buffer = bytearray(message)
        empty = bytearray(1)
        encode, decode, trips, broadcasts = [], [], [], []
        for _ in range(calls):
            if rank:
                sender.send(receiver.receive()[:1])
                world.Bcast(buffer, 0)
                world.Bcast(empty, 1)
                continue
            started = time.perf_counter()
            codec.encode(codec.pack_plan(plan))
            encode.append(time.perf_counter() - started)
            started = time.perf_counter()
            codec.unpack_plan(codec.decode(message))  # type: ignore[arg-type]
            decode.append(time.perf_counter() - started)
            started = time.perf_counter()
            plans.send(message)
            replies.receive()
            trips.append((time.perf_counter() - started) / 2)
            started = time.perf_counter()
            world.Bcast(buffer, 0)
            world.Bcast(empty, 1)
            broadcasts.append((time.perf_counter() - started) / 2)
        if rank == 0:
            parts = [quick(times) for times in (encode, decode, trips, broadcasts)]
            cells = " ".join(f"{value * 1e6:9.1f}" for value in parts)
            print(f"{batch:9} {len(message):9} {cells}")
            smallest = smallest or sum(parts[:3])
    return smallest


# -- engines ------------------------------------------------------------------------------------------------------


def compare_engines(checkpoint: Path, model: str, repeats: int, costs: dict[str, object]) -> None:
    """Print tokens per second of engines with the same number of threads, and the model of the costs."""
    engines = {
        "1 rank, 1 thread": {"num_threads": 1},
        "1 rank, 2 threads": {"num_threads": 2},
        "2 ranks, 1 thread": {"num_threads": 1, "tensor_parallel_size": 2},
        "2 stages, 1 thread": {"num_threads": 1, "pipeline_parallel_size": 2},
    }
    cases = {"prefill, batch 8": (8, 1), "decode, batch 1": (1, OUTPUT), "decode, batch 8": (8, OUTPUT)}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for engine, options in engines.items():
            for case, seconds in asyncio.run(run_engine(checkpoint, options, cases)).items():
                found.setdefault((engine, case), []).append(seconds)
    print(f"\ntokens per second, model {model} (best of {repeats} runs in turns; ratio to 1 rank, 2 threads)")
    print(" " * 20 + "".join(f"{case:>22}" for case in cases))
    rates = {key: tokens_of(cases[key[1]]) / min(times) for key, times in found.items()}
    for engine in engines:
        cells = ""
        for case in cases:
            rate = rates[engine, case]
            cells += f"{rate:13.1f} ({rate / rates['1 rank, 2 threads', case]:5.2f})"
        print(f"{engine:20}{cells}")
    predict(model, 1 / rates["1 rank, 1 thread", "decode, batch 1"], costs)
    measured = rates["2 ranks, 1 thread", "decode, batch 1"] / rates["1 rank, 1 thread", "decode, batch 1"]
    print(f"measured for 2 ranks: {measured:.2f}")


def tokens_of(case: tuple[int, int]) -> int:
    batch, output = case
    return batch * (PROMPT if output == 1 else output - 1)


async def run_engine(
    checkpoint: Path, options: dict[str, object], cases: dict[str, tuple[int, int]]
) -> dict[str, float]:
    """Return the seconds of each case: prefill, or decode after the first token."""
    common = {"skip_tokenizer_init": True, "num_blocks": 512, "enable_prefix_caching": False}
    engine = await AsyncEngine.start(EngineConfig.from_options(str(checkpoint), {**common, **options}))
    seconds = {}
    try:
        for case, (batch, output) in cases.items():
            firsts: list[float] = []

            async def one(seed: int, firsts: list[float] = firsts, output: int = output) -> None:
                prompt = [(seed * 31 + i * 7) % 900 + 2 for i in range(PROMPT)]
                params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
                got = 0
                async for item in engine.generate(GenerationRequest(prompt, params)):
                    if not got:
                        firsts.append(time.perf_counter())
                    got += sum(len(delta.token_ids) for delta in item.deltas)

            await one(99)
            firsts.clear()
            started = time.perf_counter()
            await asyncio.gather(*(one(seed) for seed in range(batch)))
            ended = time.perf_counter()
            seconds[case] = ended - (started if output == 1 else max(firsts))
    finally:
        await engine.stop()
    return seconds


def predict(model: str, one_thread: float, costs: dict[str, object]) -> None:
    """Print the expected speed of a decode step at batch 1 for more ranks.

    T(N) = T(1) / N + sums * cost(hidden) + plan: weights are divided evenly, each rank has the memory bandwidth of the
    single one, and a sum of N ranks takes (N - 1) times as long as one of two, because each rank reads all others.
    """
    shape = SHAPES[model]
    sums = 2 * shape["layers"] + 1
    by_size: dict[str, float] = costs["sums"]  # type: ignore[assignment]
    sizes = sorted(int(size) for size in by_size)
    cost = float(np.interp(shape["hidden"], sizes, [by_size[str(size)] for size in sizes]))
    plan = float(costs["plan"])  # type: ignore[arg-type]
    print(
        f"\ndecode step of one thread: {one_thread * 1e3:.2f} ms; {sums} sums of {cost * 1e6:.1f} µs, "
        f"plan {plan * 1e6:.1f} µs"
    )
    print("predicted speed-up over one rank of one thread, if each rank adds its own memory bandwidth:")
    for ranks in (2, 4, 8):
        expected = one_thread / ranks + sums * cost * (ranks - 1) + plan
        print(f"  {ranks} ranks: {one_thread / expected:.2f}")


if __name__ == "__main__":
    main()
