"""Searches: the best load of `analyze`, the best engine settings of `tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_runs import MS, run_of

from neso.perf import tune as tune_module
from neso.perf.analyze import search_load, sweep_values
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.measurement import Measurement
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.records import RequestRecord, RunResult
from neso.perf.search_options import AnalyzeOptions, TuneOptions
from neso.perf.trials import best_of, parse_goal, run_once
from neso.perf.tune import Settings, changed, search_space, served_name, start_failure, tune


def steady_run(rate: float, latency_ms: float, requests: int = 200, **load: object) -> RunResult:
    """Return a run of `rate` requests per second, each of two tokens."""
    records = []
    for number in range(requests):
        start = 10**9 + int(number / rate * 1e9)
        jitter = (number * 7919 % 101 - 50) / 1000
        end = start + int(latency_ms * (1 + jitter) * MS)
        records.append(
            RequestRecord(
                number=number,
                intended_ns=start,
                start_ns=start,
                arrivals_ns=[(start + end) // 2, end],
                end_ns=end,
                output_tokens=2,
            )
        )
    return run_of(records, dict(load))


def server_of(capacity: float):
    """Return a measurement by concurrency, of a server with 100 ms of latency up to its capacity."""
    tried: list[int] = []

    def measure(value: float) -> Measurement:
        tried.append(int(value))
        rate = min(value * 10, capacity)
        run = steady_run(rate, 1000 * value / rate, concurrency=int(value))
        return Measurement(run, slos=parse_slos(["request_latency:300"]))

    return measure, tried


def test_load_search_finds_the_largest_load_within_the_objectives():
    measure, tried = server_of(capacity=100)
    goal = parse_goal("request_throughput", parse_slos(["request_latency:300"]), 95, streaming=True)
    runs: list[Measurement] = []
    search_load(lambda value: runs.append(measure(value)) or runs[-1], goal, 1024)
    best = best_of(goal, runs)
    assert best is not None and 10 <= best.result.load["concurrency"] <= 30
    assert tried[:6] == [1, 2, 4, 8, 16, 32], "doubled until the objective fails at 32"
    assert len(tried) == len(set(tried)) <= 14


def test_load_search_ends_at_saturation_and_at_the_limit():
    goal = parse_goal("request_throughput", (), 95, streaming=True)
    measure, tried = server_of(capacity=80)
    search_load(measure, goal, 1024)
    assert max(tried) == 32, "two doublings beyond 8 do not help"
    measure, tried = server_of(capacity=1e9)
    search_load(measure, goal, 16)
    assert max(tried) == 16


def test_without_a_run_within_the_objectives_there_is_no_best():
    goal = parse_goal("request_throughput", parse_slos(["request_latency:1"]), 95, streaming=True)
    runs = [Measurement(steady_run(10, 100), slos=goal.slos)]
    assert best_of(goal, runs) is None


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, None),
        ({"sweep_list": "1,4,9"}, [1, 4, 9]),
        ({"sweep_range": "1:20"}, [1, 2, 4, 8, 16]),
        ({"sweep_range": "10:50:20"}, [10, 30, 50]),
        ({"sweep_list": "0.5,1", "sweep_type": "request_rate"}, [0.5, 1]),
    ],
)
def test_sweep_values(options, values):
    assert sweep_values(AnalyzeOptions(**options)) == values


@pytest.mark.parametrize(
    "options",
    [
        {"sweep_list": "1,x"},
        {"sweep_range": "5"},
        {"sweep_range": "9:1"},
        {"sweep_range": "1:9:0"},
        {"sweep_list": "0"},
        {"sweep_list": "1.5"},
        {"sweep_list": "1", "sweep_range": "1:2"},
    ],
)
def test_invalid_sweeps_are_rejected(options):
    with pytest.raises(PerfError):
        sweep_values(AnalyzeOptions(**options))


def test_goals():
    assert parse_goal("", (), 95, streaming=True).metric == "output_token_throughput"
    assert parse_goal("", (), 95, streaming=False).metric == "request_throughput"
    goal = parse_goal("ttft:p99", (), 95, streaming=True)
    assert (goal.metric, goal.statistic, goal.larger_is_better) == ("time_to_first_token", "p99", False)
    fast, slow = (Measurement(steady_run(10, latency)) for latency in (50, 80))
    assert goal.rank(fast) > goal.rank(slow)
    for text, message in (("speed", "no metric"), ("ttft:p98", "one of"), ("goodput", "needs --goodput")):
        with pytest.raises(PerfError, match=message):
            parse_goal(text, (), 95, streaming=True)


def test_runs_are_used_again_unless_they_were_interrupted(tmp_path):
    calls = []

    def measure(reason: str) -> RunResult:
        calls.append(reason)
        run = steady_run(10, 50, 5)
        run.stop_reason = reason
        return run

    run_once(tmp_path / "a", lambda: measure("interrupted"), fresh=False)
    run_once(tmp_path / "a", lambda: measure("requests"), fresh=False)
    again = run_once(tmp_path / "a", lambda: measure("requests"), fresh=False)
    assert calls == ["interrupted", "requests"] and len(again.records) == 5
    run_once(tmp_path / "a", lambda: measure("requests"), fresh=True)
    assert len(calls) == 3


ENDPOINT = EndpointOptions(models=("neso-pilot",), streaming=True)


class FakeServers:
    """Stands in for real servers: requests per second by settings. 32 tokens do not start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate) -> None:
        self.served: list[Settings] = []

        def served_run(search: object, settings: Settings) -> RunResult:
            self.served.append(dict(settings))
            if settings.get("max_num_batched_tokens") == 32:
                raise PerfError("the server did not start: too few tokens")
            return steady_run(rate(settings, len(self.served)), 50)

        monkeypatch.setattr(tune_module._Search, "_served_run", served_run)


def run_tune(folder: Path, **options) -> tune_module.TuneResult:
    output = OutputOptions(artifact_dir=folder)
    space = ("max_num_seqs=8,64", "max_num_batched_tokens=32,2048", "block_size=32")
    return tune(ENDPOINT, LoadOptions(), InputOptions(), output, TuneOptions(space=space, **options))


def test_tune_finds_the_best_combination_and_writes_it(tmp_path, monkeypatch):
    def rate(settings: Settings, call: int) -> float:
        return (
            10
            * (2 if settings.get("max_num_seqs") == 8 else 1)
            * (1.5 if "max_num_batched_tokens" in settings else 1)
        )

    servers = FakeServers(monkeypatch, rate)
    result = run_tune(tmp_path)
    assert result.confirmed and result.best.settings == {"max_num_seqs": 8, "max_num_batched_tokens": 2048}
    assert result.ratio.low < 3 < result.ratio.high or result.ratio.value == pytest.approx(3, rel=0.05)
    assert result.command == (
        "neso serve neso-pilot --engine-config max_num_seqs=8 --engine-config max_num_batched_tokens=2048"
    )
    assert {"max_num_seqs": 64} not in servers.served, "the default is not tried again"
    failed = [trial for trial in result.trials if trial.error]
    assert failed and "too few tokens" in failed[0].error
    assert json.loads((tmp_path / "best_engine_config.json").read_text()) == result.best.settings
    assert "too few tokens" in (tmp_path / "tune_report.html").read_text()
    calls = len(servers.served)
    failures = sum(trial.error != "" for trial in result.trials)
    assert run_tune(tmp_path).best.settings == result.best.settings
    assert len(servers.served) == calls + failures, "only configurations that failed are started again"


def test_tune_keeps_the_default_if_an_improvement_is_not_confirmed(tmp_path, monkeypatch):
    FakeServers(monkeypatch, lambda settings, call: 20 if settings and call < 3 else 10)
    result = run_tune(tmp_path, max_configurations=2)
    assert result.candidate and not result.confirmed
    assert result.best.settings == {} and result.command == "neso serve neso-pilot"


def test_tune_stops_at_its_limit(tmp_path, monkeypatch):
    FakeServers(monkeypatch, lambda settings, call: 10)
    result = run_tune(tmp_path, max_configurations=2)
    assert len(result.trials) == 2 and "2 configurations" in result.stopped


def test_tune_rejects_a_url_and_invalid_spaces(tmp_path):
    with pytest.raises(PerfError, match="no --url"):
        tune(
            EndpointOptions(models=("m",), urls=("h:1",)),
            LoadOptions(),
            InputOptions(),
            OutputOptions(artifact_dir=tmp_path),
            TuneOptions(),
        )
    with pytest.raises(PerfError, match="expected NAME="):
        search_space(TuneOptions(space=("max_num_seqs",)))
    with pytest.raises(PerfError, match="no engine option speed"):
        search_space(TuneOptions(space=("speed=1,2",)))


def test_settings_leave_defaults_out(monkeypatch):
    monkeypatch.setattr(tune_module, "has_nvidia_gpu", lambda: False)
    assert changed({}, "max_num_seqs", 64) == {}
    assert changed({"max_num_seqs": 8, "block_size": 32}, "max_num_seqs", 64) == {"block_size": 32}
    assert changed({}, "enable_prefix_caching", False) == {"enable_prefix_caching": False}
    assert 16384 not in search_space(TuneOptions())["max_num_batched_tokens"]
    monkeypatch.setattr(tune_module, "has_nvidia_gpu", lambda: True)
    assert changed({}, "max_num_seqs", 64) == {"max_num_seqs": 64}, "the default of the GPU is not known here"
    assert 16384 in search_space(TuneOptions())["max_num_batched_tokens"]
    assert "quantization" not in search_space(TuneOptions())
    assert "quantization" in search_space(TuneOptions(allow_quantization=True))


def test_names_of_served_models():
    assert [served_name(one) for one in ("neso-pilot", "org/model", "/a/b/", "name=/a/b")] == [
        "neso-pilot",
        "model",
        "b",
        "name",
    ]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ('E1129 06:00:00.000001 7 m.py:1] "failed to load model \'m\': no \\"x\\""\nneso: m', 'no "x"'),
        ('{"level":"ERROR","message":"failed to load model \'m\': no file","pid":7}\nneso: m', "no file"),
    ],
)
def test_reason_of_a_failed_start_is_in_the_log(log, reason):
    assert start_failure(log) == f"failed to load model 'm': {reason}"


def test_reason_of_a_failed_start_is_the_last_line_without_a_failed_load():
    assert start_failure("neso serve: warning\nneso: port in use\n\n") == "neso: port in use"
    assert start_failure("") == "no message"


@pytest.mark.slow
def test_tune_measures_real_servers(tmp_path):
    result = tune(
        ENDPOINT,
        LoadOptions(concurrency=(4,), request_count=20),
        # Sampled responses may end with their first token, without any output.
        InputOptions(
            input_tokens_mean=20,
            output_tokens_mean=4,
            output_tokens_deterministic=True,
            extra_inputs=("temperature:0",),
        ),
        OutputOptions(artifact_dir=tmp_path, ui="none"),
        TuneOptions(space=("max_num_batched_tokens=0,2048",), confirmations=1),
    )
    assert [trial.error == "" for trial in result.trials] == [True, False, True]
    assert "max_num_batched_tokens must be at least 1" in result.trials[1].error
    runs = [trial.run for trial in result.trials if trial.run is not None]
    assert [(len(run), run.errors) for run in runs] == [(20, {})] * 2
