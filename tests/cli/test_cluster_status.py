"""`neso cluster status`, from the text of the metrics."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from neso.cli.cluster import _STAGE_COLUMNS, _show, status_tables
from neso.cli.main import app

METRICS = """\
# TYPE neso_cluster_workers gauge
neso_cluster_workers{model="m",version="1"} 2
# TYPE neso_cluster_queued_requests gauge
neso_cluster_queued_requests{model="m",version="1"} 5
# TYPE neso_cluster_retries_total counter
neso_cluster_retries_total{model="m",version="1"} 3
# TYPE neso_worker_requests gauge
neso_worker_requests{model="m",version="1",worker="prefill-0",roles="prefill"} 0
neso_worker_requests{model="m",version="1",worker="decode-1",roles="decode"} 7
# TYPE neso_worker_kv_cache_usage gauge
neso_worker_kv_cache_usage{model="m",version="1",worker="decode-1",roles="decode"} 0.25
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 3
"""


def printed(metrics: str) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        for table in status_tables(metrics):
            console.print(table)
    lines = capture.get().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_workers_and_queue_are_printed():
    rows = printed(METRICS)
    assert ["decode-1", "decode", "7", "0", "0", "0", "25%", "0", "0.0"] in rows
    assert ["prefill-0", "prefill", "0", "0", "0", "0", "0%", "0", "0.0"] in rows
    assert ["requests in the queue", "5"] in rows
    assert ["repeated because a worker was lost", "3"] in rows


def test_stages_are_printed_in_one_table():
    metrics = """\
# TYPE neso_stage_workers gauge
neso_stage_workers{model="encoder",version="1"} 2
neso_stage_workers{model="post",version="1"} 1
# TYPE neso_stage_worker_requests gauge
neso_stage_worker_requests{model="encoder",version="1",worker="encoder-1"} 3
neso_stage_worker_requests{model="encoder",version="1",worker="encoder-2"} 1
# TYPE neso_stage_kept_bytes_total counter
neso_stage_kept_bytes_total{model="encoder",version="1"} 2500000
"""
    rows = printed(metrics)
    assert ["encoder (version 1)", "2", "4", "0", "0", "0", "0.00", "0", "0", "0", "0", "2.5"] in rows
    assert ["post (version 1)", "1", "0", "0", "0", "0", "0.00", "0", "0", "0", "0", "0.0"] in rows


def test_titles_are_complete_in_the_output_for_a_file(capsys: pytest.CaptureFixture[str]):
    _show(status_tables('neso_stage_workers{model="post-processing",version="1"} 1\n'))
    output = capsys.readouterr().out
    assert "post-processing (version 1)" in output
    for title in _STAGE_COLUMNS.values():
        assert f" {title} " in output


def test_server_without_workers_has_no_tables():
    assert status_tables("nv_inference_count 3\n") == []


def test_server_that_does_not_answer_is_an_error():
    result = CliRunner().invoke(app, ["cluster", "status", "--url", "http://127.0.0.1:1/metrics"])
    assert result.exit_code == 1
