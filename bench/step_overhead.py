"""Overhead of the engine's Python code per step, with a runner that computes nothing.

Prints microseconds per decode step by part, at several batch sizes, including the server's side.

usage: python bench/step_overhead.py [--steps 400]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from checkpoint import SHAPES, write_checkpoint
from smoke import parse_arguments

from neso.engine.addons.registry import standard_addons
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.step_plan import StepPlan
from neso.engine.ipc.messages import StepOutputs, event_decoder, event_encoder
from neso.engine.loop.engine_core import EngineCore
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.generation import SamplingParams

PROMPT, OUTPUT = 64, 100_000


# Small except for the vocabulary: only the sampler is used.
SHAPES["idle"] = {"vocab": 32000, "hidden": 64, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 64}


class IdleRunner(NativeRunner):
    """Returns the same logits for every row; samples like the native runner."""

    @classmethod
    def make(cls, checkpoint: Path) -> IdleRunner:
        with Checkpoint(checkpoint) as source:
            spec = decoder_spec(source.config)
            runner = cls.load(spec, source)
        runner._logits = np.random.default_rng(0).standard_normal((1024, spec.vocab_size)).astype(np.float32)
        return runner

    def step(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        return self._logits[: len(plan.logits_rows)]


def measure(runner: IdleRunner, batch: int, steps: int, sampling: SamplingParams) -> dict[str, float]:
    """Microseconds per step by part."""
    core = EngineCore(runner, SchedulerConfig(), batch * 400, standard_addons(runner))
    for i in range(batch):
        core.add(
            EngineRequest(
                request_id=str(i), prompt_token_ids=[7 + i] * PROMPT, sampling=sampling, max_tokens=6000
            )
        )
    spent: dict[str, float] = defaultdict(float)
    for _ in range(20):
        core.step()
    time_calls(core.scheduler, "schedule", spent)
    time_calls(core.scheduler, "advance", spent)
    time_calls(core.scheduler, "register", spent)
    time_calls(core.selector.sampler, "sample", spent)
    for _ in range(steps):
        started = time.perf_counter()
        outputs = core.step()
        stepped = time.perf_counter()
        message = event_encoder.encode(StepOutputs(outputs, core.stats()))
        encoded = time.perf_counter()
        event_decoder.decode(message)
        spent["whole step"] += stepped - started
        spent["encode"] += encoded - stepped
        spent["decode, in the server"] += time.perf_counter() - encoded
    return {part: 1e6 * seconds / steps for part, seconds in spent.items()}


def time_calls(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Add the seconds of each call of a method of `owner` to `spent[name]`."""
    function: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        spent[name] += time.perf_counter() - started
        return result

    setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parse_arguments(parser, steps=5)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "idle")
        runner = IdleRunner.make(Path(folder))
    kinds = {
        "greedy": SamplingParams(temperature=0, ignore_eos=True),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True, seed=1),
    }
    for name, sampling in kinds.items():
        for batch in (1, 16, 64):
            parts = measure(runner, batch, arguments.steps, sampling)
            line = "  ".join(f"{part} {us:.0f}" for part, us in sorted(parts.items(), key=lambda p: -p[1]))
            print(f"{name:7} batch {batch:3}: {line}  (us)", flush=True)


if __name__ == "__main__":
    main()
