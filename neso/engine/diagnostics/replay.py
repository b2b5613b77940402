"""Records engine steps, and replays recordings: `python -m neso.engine.diagnostics.replay FOLDER [--against NAME]`.

FOLDER is written by the option `record_steps` or by the watchdog. The command prints the time of each step; with
--against, also the largest difference of the logits of two runners. If a recording does not begin with the first step
of its sequences, the cache lacks earlier steps: times are valid, logits are meaningless.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.addons.registry import PLAN_PARTS
from neso.engine.config import EngineConfig
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout, Runner
from neso.engine.runners.registry import open_model
from neso.engine.weights.checkpoint import open_source

logger = logging.getLogger(__name__)
_ENGINE = "engine.json"


class RecordedEngine(msgspec.Struct, frozen=True):
    """The engine whose steps are recorded."""

    config: EngineConfig
    num_blocks: int
    num_host_blocks: int = 0


class StepRecorder:
    """Writes plans to a folder: one file per step, and `engine.json`. The constructor raises `OSError`."""

    def __init__(self, folder: Path, config: EngineConfig, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.folder = folder
        self._failed = False
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ENGINE).write_bytes(
            msgspec.json.encode(RecordedEngine(config, num_blocks, num_host_blocks))
        )

    def record(self, plan: StepPlan) -> None:
        """Write one step. Recording stops at the first step that cannot be written."""
        if self._failed:
            return
        try:
            plan.dump(self.folder / f"step-{plan.step:09}.npz")
        except OSError as error:
            self._failed = True
            logger.error("recording of steps stopped: %s", error)


def read_engine(folder: Path) -> RecordedEngine:
    """Read the engine of a recording. Raises `OSError`, `msgspec.DecodeError`."""
    return msgspec.json.decode((folder / _ENGINE).read_bytes(), type=RecordedEngine)


def read_steps(folder: Path) -> Iterator[StepPlan]:
    """Read the steps of a recording, in order."""
    for path in sorted(folder.glob("step-*.npz")):
        yield StepPlan.load(path, PLAN_PARTS)


Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Result of one step. `seconds`: time of the first runner. The other values are None without a second runner.

    - max_difference: largest difference of two logits
    - same_tokens: whether the most likely token of every row is the same
    """

    plan: StepPlan
    seconds: float
    max_difference: float | None = None
    same_tokens: bool | None = None


def replay(folder: Path, runners: list[Runner]) -> Iterator[ReplayedStep]:
    """Run the steps of a recording on one runner, or on two to compare them."""
    recorded = read_engine(folder)
    block_size = recorded.config.scheduler.block_size
    for runner in runners:
        runner.allocate_cache(CacheLayout(recorded.num_blocks, block_size, recorded.num_host_blocks))
    for step in read_steps(folder):
        plan = _with_known_tokens(step)
        results = [_timed(runner, plan) for runner in runners]
        (logits, seconds), others = results[0], results[1:]
        if not others or not len(logits):
            yield ReplayedStep(plan, seconds)
            continue
        other = others[0][0]
        same = bool((logits.argmax(axis=1) == other.argmax(axis=1)).all())
        yield ReplayedStep(plan, seconds, float(np.abs(logits - other).max()), same)


def load_runner(config: EngineConfig, name: str) -> Runner:
    """Load the recorded model with a runner. Raises the errors of `open_model`."""
    options = config.runner_options
    if name != config.runner:
        # The recorded backend may be of another runner.
        options = replace(options, attention_backend="auto")
    with open_source(config.model) as source:
        return open_model(source, name, options, lambda length: min(length, config.max_model_len or length))


def _timed(runner: Runner, plan: StepPlan) -> tuple[Float32Array, float]:
    started = time.perf_counter()
    logits = np.array(runner.step(plan)[:])
    return logits, time.perf_counter() - started


def _with_known_tokens(plan: StepPlan) -> StepPlan:
    """Replace tokens that were unknown when the step was started (in plans written by the watchdog) by token 0."""
    if not (plan.token_ids < 0).any():
        return plan
    return replace(plan, token_ids=np.maximum(plan.token_ids, 0))


def main(arguments: list[str] | None = None) -> int:
    """Run the command. The exit status is 1 if two runners choose different tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runner", help="default: that of the recording")
    parser.add_argument("--against", help="a second runner, to compare logits with")
    options = parser.parse_args(arguments)
    recorded = read_engine(options.folder)
    names = [options.runner or recorded.config.runner] + ([options.against] if options.against else [])
    runners = [load_runner(recorded.config, name) for name in names]
    agree, total = True, 0.0
    print(
        f"{'step':>9} {'sequences':>9} {'tokens':>7} {'ms':>9}"
        + ("  logits apart" if options.against else "")
    )
    for step in replay(options.folder, runners):
        total += step.seconds
        line = f"{step.plan.step:9} {step.plan.num_sequences:9} {step.plan.num_tokens:7} {step.seconds * 1e3:9.3f}"
        if step.max_difference is not None:
            line += f"  {step.max_difference:.2e}" + ("" if step.same_tokens else "  other tokens")
            agree = agree and bool(step.same_tokens)
        print(line)
    print(f"{total:.3f} s in all")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
