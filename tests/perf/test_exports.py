"""Files of a run."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from fake_runs import fake_run, run_of
from rich.console import Console

from neso.perf.compare import compare_folders, print_comparison, write_comparison
from neso.perf.console import WIDTH, Progress, number, print_run, print_sweep
from neso.perf.errors import PerfError
from neso.perf.exports import finish, write_run
from neso.perf.exports.run_folder import folder_name, load_run, load_runs, write_inputs
from neso.perf.measurement import Measurement
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.records import Records, RequestRecord
from neso.perf.report.charts import Chart, Limit, Series

STATISTICS = {"avg", "min", "max", "std", "p99", "p95", "p90", "p75", "p50", "p25", "p10", "p5", "p1"}
GENAI_PERF_CSV = """Metric,avg,min,max,p99,p95,p90,p75,p50,p25,p10,p5,p1
Time To First Token (ms),
Time To Second Token (ms),
Request Latency (ms),
Inter Token Latency (ms),
Output Token Throughput Per User (tokens/sec/user),
Output Sequence Length (tokens),
Input Sequence Length (tokens),
Metric,Value
Output Token Throughput (tokens/sec),
Request Throughput (per sec),
Request Goodput (per sec),
Request Count (count),"""
"""Header and names in a file of genai-perf 0.0.16."""


@pytest.fixture
def options(tmp_path: Path) -> OutputOptions:
    return OutputOptions(artifact_dir=tmp_path, goodput=("time_to_first_token:30",))


def test_json_has_the_keys_of_genai_perf(options):
    folder = write_run(fake_run(), options)
    content = json.loads((folder / "profile_export_genai_perf.json").read_text())
    for name, unit in (
        ("request_throughput", "requests/sec"),
        ("request_latency", "ms"),
        ("request_count", "count"),
        ("time_to_first_token", "ms"),
        ("time_to_second_token", "ms"),
        ("inter_token_latency", "ms"),
        ("output_token_throughput", "tokens/sec"),
        ("output_token_throughput_per_user", "tokens/sec/user"),
        ("output_sequence_length", "tokens"),
        ("input_sequence_length", "tokens"),
        ("goodput", "requests/sec"),
        ("request_goodput", "requests/sec"),
    ):
        assert content[name]["unit"] == unit
        assert "avg" in content[name]
    assert content["time_to_first_token"].keys() >= STATISTICS
    config = content["input_config"]
    assert config["endpoint"]["models"] == config["model_names"] == ["neso-pilot"]
    assert config["endpoint"]["type"] == "chat"
    assert config["perf_analyzer"]["stimulus"] == {"concurrency": 4}
    assert content["errors"] == {"http 503": {"count": 3, "example": "<busy>"}}
    assert folder.name == "neso-pilot-openai-chat-concurrency4"


def test_csv_has_two_tables(options):
    folder = write_run(fake_run(), options)
    rows = list(csv.reader(io.StringIO((folder / "profile_export_genai_perf.csv").read_text())))
    expected = list(csv.reader(io.StringIO(GENAI_PERF_CSV)))
    assert rows[0] == expected[0]
    empty = rows.index([])
    assert rows[1][0] == "Time To First Token (ms)" and len(rows[1]) == len(rows[0])
    assert rows[empty + 1] == ["Metric", "Value"]
    assert {row[0] for row in rows if row} >= {row[0] for row in expected}


def test_jsonl_has_a_line_for_each_request_also_failed_ones(options, monkeypatch):
    monkeypatch.setattr("neso.perf.exports.jsonl._ROWS", 7)
    run = fake_run(requests=40)
    folder = write_run(run, options)
    lines = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    for line, record in zip(lines, run.records, strict=True):
        assert line["metadata"]["session_num"] == record.number
        if record.ok:
            ttft = (record.arrivals_ns[0] - record.start_ns) / 1e6
            assert line["error"] is None
            assert line["metrics"]["time_to_first_token"] == {"value": pytest.approx(ttft), "unit": "ms"}
            gaps = line["metrics"]["inter_chunk_latency"]["value"]
            assert len(gaps) == len(record.arrivals_ns) - 1
            assert sum(gaps) == pytest.approx((record.arrivals_ns[-1] - record.arrivals_ns[0]) / 1e6)
        else:
            assert line["error"] == {"type": "http", "code": 503, "message": "<busy>"}


def test_raw_profile_has_the_timestamps_of_perf_analyzer(tmp_path):
    run = fake_run(requests=5)
    folder = write_run(run, OutputOptions(artifact_dir=tmp_path, export_raw=True))
    content = json.loads((folder / "profile_export.json").read_text())
    assert content["endpoint"] == "v1/chat/completions"
    (experiment,) = content["experiments"]
    assert experiment["experiment"] == {"mode": "concurrency", "value": 4}
    assert [len(one["response_timestamps"]) for one in experiment["requests"]] == [
        len(record.arrivals_ns) for record in run.records
    ]


def test_a_saved_run_is_read_again(options):
    run = fake_run()
    loaded = load_run(write_run(run, options))
    assert list(loaded.records) == list(run.records)
    assert (loaded.load, loaded.settings, loaded.start_ns) == (run.load, run.settings, run.start_ns)
    with pytest.raises(PerfError, match="no run of neso perf"):
        load_run(options.artifact_dir)


def test_runs_of_a_sweep_are_read_in_the_order_of_their_load(options):
    runs = [fake_run(concurrency) for concurrency in (16, 2, 8)]
    for run in runs:
        write_run(run, options)
    assert [run.load["concurrency"] for run in load_runs(options.artifact_dir)] == [2, 8, 16]
    report = finish(runs, options)
    assert report == options.artifact_dir / "sweep_report.html"
    assert 'href="neso-pilot-openai-chat-concurrency16/report.html"' in report.read_text()


@pytest.mark.parametrize(
    ("load", "settings", "name"),
    [
        ({"request_rate": 2.5}, {}, "neso-pilot-openai-chat-request_rate2.5"),
        ({"concurrency": 1}, {"models": ["a/b", "c"]}, "a_b_multi-openai-chat-concurrency1"),
        ({"concurrency": 1}, {"endpoint_type": "kserve"}, "neso-pilot-triton-kserve-concurrency1"),
        ({"concurrency": 1}, {"endpoint_type": "../x"}, "neso-pilot-openai-.._x-concurrency1"),
    ],
)
def test_folder_names(load, settings, name):
    assert folder_name(run_of([], load, **settings)) == name


def test_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfError, match="cannot write to"):
        write_run(fake_run(), OutputOptions(artifact_dir=tmp_path / "file"))


def test_inputs_have_the_form_of_genai_perf(tmp_path):
    write_inputs([[b'{"model": "m", "prompt": "a"}'], [b'{"n": 1}', b'{"n": 2}']], tmp_path)
    content = json.loads((tmp_path / "inputs.json").read_text())
    assert content == {
        "data": [{"payload": [{"model": "m", "prompt": "a"}]}, {"payload": [{"n": 1}, {"n": 2}]}]
    }


def printed(show) -> str:
    console = Console(width=WIDTH, file=io.StringIO())
    show(console)
    return console.file.getvalue()


@pytest.mark.parametrize("verbose", [False, True])
def test_tables_fit_80_columns_and_cut_no_number(verbose):
    run = fake_run(16, requests=200)
    run.records.columns["end_ns"] += 10**13  # latencies of hours
    run.records.arrivals_ns += 10**13
    measurement = Measurement(run, slos=parse_slos(["ttft:30"]))
    for text in (
        printed(lambda console: print_run(measurement, verbose=verbose, console=console)),
        printed(lambda console: print_sweep([measurement] * 3, console)),
    ):
        assert all(len(line) <= WIDTH for line in text.splitlines())
        assert "…" not in text
    assert "p50" in text and "TTFT" in text


def test_console_shows_errors_and_early_ends():
    run = fake_run()
    run.stop_reason = "interrupted"
    run.errors.append("worker 3 died")
    text = printed(lambda console: print_run(Measurement(run), console=console))
    assert "3 requests failed: http 503. <busy>" in text
    assert "was interrupted" in text and "worker 3 died" in text
    text = printed(
        lambda console: print_run(Measurement(run_of([RequestRecord(error_kind="connect")])), console=console)
    )
    assert "No request succeeded" in text


@pytest.mark.parametrize(
    "value", [0.0, 1.234, -5.5, 123.45, 99999.0, 123456789.0, float("nan"), float("inf")]
)
def test_numbers_are_short(value):
    assert len(number(value)) <= 7


def test_progress_counts_without_warm_up(capsys):
    warm = RequestRecord(start_ns=1, arrivals_ns=[2], end_ns=2, warm_up=True)
    with Progress("simple", {"concurrency": 4}, requests=10) as progress:
        progress._printed -= 60
        progress.update(Records.of([warm, RequestRecord(start_ns=1, arrivals_ns=[2, 3], end_ns=3)]))
    assert "concurrency 4: 1 of 10 requests" in capsys.readouterr().err


def test_report_is_self_contained_and_valid(tmp_path):
    options = OutputOptions(artifact_dir=tmp_path, goodput=("ttft:30",), generate_plots=True)
    folder = write_run(fake_run(), options)
    text = (folder / "report.html").read_text()
    for title in ("Time To First Token", "Timeline", "Inter chunk latency by position", "Goodput by limits",
                  "Prompt and output lengths"):  # fmt: skip
        assert f"<h3>{title}</h3>" in text
    assert "<busy>" not in text and "&lt;busy&gt;" in text
    without_namespace = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in without_namespace and "https://" not in without_namespace
    charts = list((folder / "plots").glob("*.svg"))
    assert len(charts) >= 9
    for chart in charts:
        ElementTree.parse(chart)


def test_names_of_a_chart_are_inside_it():
    series = tuple(Series(f'number_of_requests{{model="{i}"}}' * 3, [0, 1], [i, 1]) for i in range(3))
    text = Chart("t", "x", "y", series, limits=(Limit(0, "p50 0.0324", vertical=True),)).svg()
    ElementTree.fromstring(text)
    rows = re.findall(r'<rect x="(\d+)" y="([\d.]+)" width="10"', text)
    assert [x for x, _ in rows] == ["62"] * 3 and len({y for _, y in rows}) == 3
    assert "…" in text and re.search(r'text-anchor="start">p50 0.0324<', text)


def test_a_line_of_one_point_is_drawn():
    assert "<circle" in Chart("t", "x", "y", (Series("a", [1], [1]),)).svg()


def test_report_of_failures_only_is_written(options):
    folder = write_run(run_of([RequestRecord(error_kind="connect", error_message="refused")]), options)
    assert "refused" in (folder / "report.html").read_text()


def test_no_report_writes_none(tmp_path):
    folder = write_run(fake_run(), OutputOptions(artifact_dir=tmp_path, report=False))
    assert not (folder / "report.html").exists()


def test_comparison_tells_differences_from_noise(tmp_path):
    folders = []
    for name, concurrency, seed in (("base", 2, 0), ("same", 2, 1), ("slow", 8, 2)):
        options = OutputOptions(artifact_dir=tmp_path / name, report=False)
        folders.append(write_run(fake_run(concurrency, 300, seed), options))
    comparisons, runs = compare_folders(folders)
    same, slow = ({(d.metric, d.statistic): d for d in one.differences} for one in comparisons)
    assert same["time_to_first_token", "p50"].verdict == ""
    assert slow["time_to_first_token", "p50"].verdict == "worse"
    assert slow["output_token_throughput", "avg"].verdict == "better"
    text = printed(lambda console: print_comparison(comparisons[1], console))
    assert all(len(line) <= WIDTH for line in text.splitlines()) and "worse" in text
    write_comparison(comparisons, runs, tmp_path / "compare.html")
    write_comparison(comparisons, runs, tmp_path / "compare.json")
    assert "<svg" in (tmp_path / "compare.html").read_text()
    assert len(json.loads((tmp_path / "compare.json").read_text())) == 2


def test_comparison_of_too_few_requests_has_no_interval(tmp_path):
    folders = []
    for name in "ab":
        options = OutputOptions(artifact_dir=tmp_path / name, report=False)
        folders.append(write_run(fake_run(requests=5), options))
    (comparison,), _ = compare_folders(folders)
    ttft = next(one for one in comparison.differences if one.metric == "time_to_first_token")
    assert ttft.ratio is None and ttft.verdict == ""


def test_comparison_needs_two_folders_with_common_loads(tmp_path):
    with pytest.raises(PerfError, match="at least two"):
        compare_folders([tmp_path])
    for name, loads in (("a", (1, 2)), ("b", (3, 4))):
        for load in loads:
            write_run(fake_run(load), OutputOptions(artifact_dir=tmp_path / name, report=False))
    with pytest.raises(PerfError, match="no load in common"):
        compare_folders([tmp_path / "a", tmp_path / "b"])
