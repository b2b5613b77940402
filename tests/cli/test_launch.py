"""`neso launch`: its commands, and the servers it finds running."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import neso.cli.launch as module
from neso.cli.launch import running_servers
from neso.cli.main import app


@pytest.fixture
def started(monkeypatch) -> list[tuple[int, list[str], bool]]:
    """Calls of `run`, instead of processes; no server is running."""
    calls: list[tuple[int, list[str], bool]] = []
    monkeypatch.setattr(
        module, "run", lambda size, words, *, background: calls.append((size, words, background))
    )
    monkeypatch.setattr(module, "running_servers", list)
    return calls


def launch(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["launch", *arguments])
    return result.exit_code, result.output + (result.stderr if result.stderr_bytes else "")


PORTS = ["--http-port=8000", "--grpc-port=8001", "--metrics-port=8002"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--world_size=4", "--model_repo=/m"],
            (4, [*PORTS, "--model-repository=/m", "--rank-model=tensorrt_llm"]),
        ),
        (
            ["--world_size", "2", "--model_repo", "/m", "--tensorrt_llm_model_name", "other", "-f"],
            (2, [*PORTS, "--model-repository=/m", "--rank-model=other"]),
        ),
        (["--model_repo=/m", "--multi-model"], (1, [*PORTS, "--model-repository=/m", "--multi-model"])),
        (
            ["--model_repo=/m", "--multi-model", "--disable-spawn-processes", "--world_size=5"],
            (1, [*PORTS, "--model-repository=/m", "--multi-model"]),
        ),
        (
            [
                "--http_port",
                "1",
                "--grpc_port",
                "2",
                "--metrics_port",
                "3",
                "--log",
                "--log-file",
                "f",
                "--no-mpi",
            ],
            (1, ["--http-port=1", "--grpc-port=2", "--metrics-port=3", "--log-verbose=3", "--log-file=f"]),
        ),
        (["--oversubscribe", "--tritonserver", "/x"], (1, PORTS)),
        (["--", "--allow-openai=false", "neso-pilot"], (1, [*PORTS, "--allow-openai=false", "neso-pilot"])),
    ],
)
def test_commands(started, arguments, expected):
    status, output = launch(*arguments)
    assert status == 0, output
    assert started == [(*expected, False)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--disable-spawn-processes"],
        ["--multi-model", "--disable-spawn-processes"],
        ["--multimodal_gpu0_cuda_mem_pool_bytes=1000"],
        ["--tritonserver=/x"],
    ],
)
def test_options_without_effect_are_reported(started, arguments):
    status, output = launch(*arguments)
    assert status == 0 and started
    assert f"{arguments[-1].partition('=')[0]} has no effect" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world_size=2", "--multi-model"], "--world_size must be 1 with --multi-model"),
        (["--world_size=2", "--no-mpi"], "--world_size must be 1 with --no-mpi"),
        (["--world_size=2", "--tensorrt_llm_model_name=a,b"], "one model runs on the ranks"),
    ],
)
def test_wrong_combinations(started, arguments, message):
    status, output = launch(*arguments)
    assert status == 2 and message in output and not started


def test_running_server_is_an_error_unless_forced(started, monkeypatch):
    monkeypatch.setattr(module, "running_servers", lambda: [7, 9])
    status, output = launch("--model_repo=/m")
    assert status == 2 and "PID 7 9" in output and "--force" in output and not started
    assert launch("--model_repo=/m", "--force")[0] == 0 and started


def test_servers_are_found_by_their_command_line(tmp_path):
    commands = {
        "10": "python3\0-m\0neso.cli\0serve\0model\0",
        "11": "/usr/bin/python3.11\0/usr/bin/neso\0serve\0model\0",
        "12": "python3\0-m\0neso.cli\0build\0model\0",
        "13": "vi\0neso\0serve\0model\0",
        "14": "",
        "self": "python3\0-m\0neso.cli\0serve\0x\0",
    }
    for name, command in commands.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_text(command)
    (tmp_path / "15").mkdir()  # has ended
    assert running_servers(tmp_path) == [10, 11]
