"""`neso perf tune`: find the best engine settings for a load on this machine.

A coordinate search: starting with the defaults, each option is varied alone, and a value is kept if the goal is better
beyond the noise of the runs. Further pairs of runs then compare the best configuration with the default. It is
recommended only if they confirm that it is better.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from rich.console import Console

from neso.engine.config import EngineConfig, engine_options
from neso.engine.core.scheduler_config import CPU_LIMITS, StepLimits
from neso.engine.runners.registry import has_nvidia_gpu
from neso.perf.client.generator import ENDS_SWEEP
from neso.perf.compare import ratio_of
from neso.perf.console import number
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.measurement import Measurement
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.profile import open_generator, run_load
from neso.perf.records import RunResult
from neso.perf.search_options import TuneOptions
from neso.perf.statistics import Interval
from neso.perf.trials import Goal, parse_goal, run_once, trial_folder
from neso.perf.tune_report import write_result

Settings = dict[str, Any]
"""Engine options by name."""

USUAL_SPACE: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (256, 512, 1024, 2048),
    "max_num_seqs": (8, 16, 32, 64, 128),
    "max_prefill_chunk": (128, 256, 512, 1024),
    "max_decode_stretch": (1.5, 2.0, 4.0, 0),
    "batch_scheduler_policy": ("max_utilization", "guaranteed_no_evict"),
    "enable_prefix_caching": (True, False),
    "block_size": (16, 32),
}
"""Values that are tried by default, in this order; num_threads and quantization are added where they apply."""
GPU_SPACE: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (2048, 4096, 8192, 16384),
    "max_num_seqs": (64, 128, 256, 512, 1024),
    "max_prefill_chunk": (512, 2048, 8192),
}
"""Values that replace those of `USUAL_SPACE` on a machine with a GPU."""
START_SECONDS = 600.0
"""Maximum time until a server is ready."""
_CONFIDENCE = 0.95
_READY, _PORT = "Neso is ready", re.compile(r"^  http\s+(\d+)")
_FAILED_LOAD = re.compile(r'"failed to load model (?:[^"\\]|\\.)*"')
"""Message of a log line, a JSON string in every log format."""


@dataclass
class Trial:
    """A configuration with its run, or with the error if it could not run."""

    settings: Settings
    run: Measurement | None = None
    error: str = ""

    @property
    def text(self) -> str:
        """Description of the settings."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "defaults"


@dataclass
class TuneResult:
    """Result of a search. `ratio` is the goal of the best configuration / that of the default, with its interval."""

    goal: Goal
    model: str
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    candidate: Settings = field(default_factory=dict)
    ratio: Interval | None = None
    confirmed: bool = False
    stopped: str = ""

    @property
    def command(self) -> str:
        """Command that serves the model with the recommended settings."""
        settings = self.best.settings if self.best is not None else {}
        options = [f"--engine-config {name}={_yaml(value)}" for name, value in settings.items()]
        return " ".join(["neso serve", shlex.quote(self.model), *options])


class _Interrupted(Exception):
    """Ctrl-C during a run."""


def tune(
    endpoint: EndpointOptions,
    load: LoadOptions,
    inputs: InputOptions,
    output: OutputOptions,
    options: TuneOptions,
) -> TuneResult:
    """Search the settings of `neso serve` for the model of `endpoint`, and write the results to the artifact folder.

    The load should have a request count or a duration. Trials of an earlier search in the artifact folder are used
    again. Raises `PerfError`, also if the server does not run with default settings.
    """
    if len(endpoint.models) != 1 or endpoint.urls:
        raise PerfError("tune starts servers of its own: give one --model, its name or path, and no --url")
    slos = parse_slos(output.goodput)
    goal = parse_goal(options.objective, slos, options.min_good_share, endpoint.streaming)
    result = TuneResult(goal, endpoint.models[0])
    search = _Search(endpoint, load, inputs, output, options, result)
    try:
        search.run()
    except (_Interrupted, KeyboardInterrupt):
        result.stopped = "interrupted"
    if result.trials:
        write_result(result, output.artifact_dir)
    return result


class _Search:
    def __init__(
        self,
        endpoint: EndpointOptions,
        load: LoadOptions,
        inputs: InputOptions,
        output: OutputOptions,
        options: TuneOptions,
        result: TuneResult,
    ) -> None:
        self._endpoint, self._load, self._inputs, self._output = endpoint, load, inputs, output
        self._options, self._result = options, result
        self._started = time.monotonic()
        self._console = Console(stderr=True)

    def run(self) -> None:
        default = self._trial({})
        if default.run is None or not len(default.run):
            raise PerfError(
                f"the server does not run with default settings: {default.error or 'no request succeeded'}"
            )
        self._result.best = best = default
        space = search_space(self._options)
        improved = True
        while improved and not self._is_spent():
            improved = False
            for name, values in space.items():
                for value in values:
                    settings = changed(best.settings, name, value)
                    if settings == best.settings or self._tried(settings) or self._is_spent():
                        continue
                    trial = self._trial(settings)
                    if trial.run is not None and self._is_better(best, trial):
                        self._result.best = best = trial
                        improved = True
        self._result.candidate = dict(best.settings)
        if best is not default:
            self._confirm(default, best)

    def _is_spent(self) -> bool:
        """Whether the maximum number of trials or the time limit is reached."""
        limit = self._options.max_minutes
        if limit is not None and time.monotonic() - self._started > 60 * limit:
            self._result.stopped = f"{limit:g} minutes are over"
        elif len(self._result.trials) >= self._options.max_configurations:
            self._result.stopped = f"{self._options.max_configurations} configurations are tried"
        return bool(self._result.stopped)

    def _tried(self, settings: Settings) -> bool:
        return any(trial.settings == settings for trial in self._result.trials)

    def _is_better(self, best: Trial, trial: Trial) -> bool:
        """Whether a trial meets objectives that the best does not, or is better beyond the noise of the runs."""
        goal = self._result.goal
        assert best.run is not None and trial.run is not None
        met = goal.is_met(best.run), goal.is_met(trial.run)
        if met[0] != met[1]:
            return met[1]
        ratio = ratio_of([best.run], [trial.run], goal.metric, goal.statistic, confidence=_CONFIDENCE)
        return ratio is not None and ratio.excludes(1.0) and (ratio.value > 1) == goal.larger_is_better

    def _confirm(self, default: Trial, best: Trial) -> None:
        """Compare new runs of both configurations, in turn; keep the default unless the best is better again."""
        goal = self._result.goal
        pairs: tuple[list[Measurement], list[Measurement]] = ([], [])
        for number_of_pair in range(1, self._options.confirmations + 1):
            for runs, settings in zip(pairs, (default.settings, best.settings), strict=True):
                trial = self._measured(settings, repeat=number_of_pair)
                if trial.run is not None:
                    runs.append(trial.run)
        if not pairs[0] or not pairs[1]:
            return
        result = self._result
        result.ratio = ratio_of(pairs[0], pairs[1], goal.metric, goal.statistic, confidence=_CONFIDENCE)
        met = [all(map(goal.is_met, runs)) for runs in pairs]
        better = (
            result.ratio is not None
            and result.ratio.excludes(1.0)
            and (result.ratio.value > 1) == goal.larger_is_better
        )
        result.confirmed = met[1] and (better or not met[0])
        if not result.confirmed:
            result.best = default

    def _trial(self, settings: Settings) -> Trial:
        trial = self._measured(settings)
        self._result.trials.append(trial)
        outcome = trial.error or ("" if trial.run is None else number(self._result.goal.value(trial.run)))
        missed = "" if trial.run is None or self._result.goal.is_met(trial.run) else ", objectives not met"
        line = f"{len(self._result.trials):3}  {trial.text}: {outcome}{missed}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return trial

    def _measured(self, settings: Settings, repeat: int = 0) -> Trial:
        """Return the trial of a configuration, from a new server or from an earlier search."""
        identity = [settings, repeat, self._options.serve_arguments]
        identity += [str(one) for one in (self._endpoint, self._load, self._inputs)]
        folder = trial_folder(self._output.artifact_dir / "tune", "trial", identity)
        try:
            run = run_once(folder, lambda: self._served_run(settings), fresh=self._options.fresh)
        except PerfError as error:
            return Trial(settings, error=str(error))
        if run.stop_reason == "interrupted":
            raise _Interrupted
        if run.stop_reason in ENDS_SWEEP:
            return Trial(settings, error="the server stopped answering")
        return Trial(settings, Measurement(run, slos=self._result.goal.slos))

    def _served_run(self, settings: Settings) -> RunResult:
        with served(self._result.model, settings, self._options.serve_arguments) as url:
            endpoint = replace(self._endpoint, urls=(url,), models=(served_name(self._result.model),))
            output = replace(self._output, ui="none" if self._output.ui == "auto" else self._output.ui)
            with open_generator(endpoint, self._load, self._inputs, output) as generator:
                plan, warm_up = next(self._load.loads())
                return run_load(
                    generator, plan, warm_up, self._inputs, output, {"settings": _label(settings)}
                )


def changed(settings: Settings, name: str, value: Any) -> Settings:
    """Return settings with another value of an option; options with their default value are left out."""
    rest = {other: kept for other, kept in settings.items() if other != name}
    default = _default(name)
    return rest if value == default and type(value) is type(default) else {**rest, name: value}


def _default(name: str) -> Any:
    """Return the default of an engine option; None for a limit of a step if there is a GPU, on which it depends."""
    if name in StepLimits._fields:
        return None if has_nvidia_gpu() else getattr(CPU_LIMITS, name)
    return next((option.default for option in engine_options() if option.name == name), None)


def search_space(options: TuneOptions) -> dict[str, tuple[Any, ...]]:
    """Return the values to try by option. Raises `PerfError` for an invalid `--space`."""
    if options.space:
        found = {}
        for text in options.space:
            name, separator, values = text.partition("=")
            if not separator or not name or not values:
                raise PerfError(f"--space {text}: expected NAME=V1,V2,…")
            if name not in EngineConfig.option_names():
                raise PerfError(f"--space {text}: there is no engine option {name}")
            found[name] = tuple(yaml.safe_load(value) for value in values.split(","))
        return found
    space = USUAL_SPACE | GPU_SPACE if has_nvidia_gpu() else dict(USUAL_SPACE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        space["num_threads"] = tuple(sorted({max(1, cores // 4), max(1, cores // 2), cores}))
    if options.allow_quantization:
        space["quantization"] = ("int8", "int4")
    return space


def served_name(model: str) -> str:
    """Return the name under which `neso serve MODEL` serves: NAME of NAME=MODEL, else the last part of a path."""
    name, separator, _ = model.partition("=")
    return name if separator else model.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def served(model: str, settings: Settings, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Start `neso serve` with engine options on free ports, and yield HOST:PORT of its HTTP frontend.

    Raises `PerfError` with the reason if it does not become ready.
    """
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    engine = [f"--engine-config={name}={_yaml(value)}" for name, value in settings.items()]
    addresses = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics", "openai")]
    command = [sys.executable, "-m", "neso.cli", "serve", model, *ports, *addresses, *engine, *arguments]
    with tempfile.TemporaryFile("w+") as log:
        # A group of its own: Ctrl-C reaches the search, which stops the server.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            port = _wait_until_ready(process)
            if port is None:
                log.seek(0)
                raise PerfError(f"the server did not start: {start_failure(log.read())}")
            yield f"127.0.0.1:{port}"
        finally:
            _stop(process)


def start_failure(log: str) -> str:
    """Return why a server did not start: the last failed load of a model in its log, or else the last line."""
    failed_loads = [json.loads(message) for message in _FAILED_LOAD.findall(log)]
    lines = [line for line in log.splitlines() if line.strip()]
    return (failed_loads or lines or ["no message"])[-1]


def _wait_until_ready(process: subprocess.Popen[str]) -> int | None:
    """Return the HTTP port when the server is ready; None if it exits or needs too long."""
    port: list[int] = []
    ready = threading.Event()
    watchdog = threading.Timer(START_SECONDS, process.kill)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _PORT.match(line):
                port.append(int(found[1]))
            if line.startswith(_READY):
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    watchdog.start()
    try:
        ready.wait()
    finally:
        watchdog.cancel()
    return port[0] if port and process.poll() is None else None


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _label(settings: Settings) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items()) or "default"
