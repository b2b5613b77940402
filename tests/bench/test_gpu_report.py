"""The report about a GPU: results of parts, headlines, time limits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import wait_until

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import gpu_report
from gpu_report import Part, render, run


@pytest.fixture(autouse=True)
def _restore_sigterm() -> Iterator[None]:
    """`main` sets a handler."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run_code(code: str, timeout: float = 60.0, *, visible: str | None = None) -> gpu_report.Result:
    return run(Part("code", "Code", ("-c", code)), timeout, visible)


def test_summary_has_headlines_and_failures() -> None:
    results = [
        run_code("print('headline: 2.0 | 3.0 times'); print('end')"),
        run_code("print('headline: 9.9'); raise RuntimeError('no kernel')"),
        run_code("print('3 passed'); print('```')"),
        run_code("raise SystemExit(77)"),
    ]
    report = render("facts", results)
    summary = report.partition("facts")[0].splitlines()
    cells = [[cell.strip() for cell in line.split(" | ")][1:3] for line in summary if "Code" in line]
    assert cells == [
        ["passed", r"2.0 \| 3.0 times"],
        ["**failed** (1)", "RuntimeError: no kernel"],
        ["passed", "```"],
        ["not run", ""],
    ]
    assert [result.failed for result in results] == [False, True, False, False]
    assert report.count("````text") == 4 and "Send this report" in report


def test_part_that_takes_too_long_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "STOP_SECONDS", 0.5)
    result = run_code(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\n"
        "child.wait()",
        2.0,
    )
    assert result.status is None and result.failed and result.outcome == "**too long**"
    status = Path("/proc", result.output.strip(), "stat")
    # Gone, or a zombie that nobody has waited for; a killed process ends only when it is scheduled.
    wait_until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX")


@pytest.mark.parametrize(("visible", "used"), [(None, "0"), ("2,3", "2")])
def test_parts_use_the_first_gpu(visible: str | None, used: str) -> None:
    result = run_code("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", visible=visible)
    assert result.headline == used


def test_tests_on_two_gpus_see_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    (part,) = (part for part in gpu_report.parts((9, 0), None, True) if part.all_gpus)
    code = ("-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    result = run(Part(part.name, part.title, code, part.all_gpus), 60.0, os.environ["CUDA_VISIBLE_DEVICES"])
    assert result.headline == "2,3"


def test_long_output_keeps_begin_and_end() -> None:
    result = run_code(f"print('begin' + '.' * {2 * gpu_report.MAX_OUTPUT} + 'end')")
    section = result.section()
    assert "begin" in section and "end\n" in section and "characters ...]" in section
    assert len(section) < gpu_report.MAX_OUTPUT + 500


@pytest.mark.parametrize(("capability", "float8"), [((8, 0), False), ((9, 0), True)])
def test_commands_of_the_parts_exist(capability: tuple[int, int], float8: bool) -> None:
    parts = gpu_report.parts(capability, Path("/venv"), True)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert all(
            (gpu_report.ROOT / word).exists() for word in part.command if "/" in word and word[0] != "/"
        )
    (llama,) = (part for part in parts if part.name == "llama")
    assert ("fp8" in llama.command) == float8


def test_report_is_written_after_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    before = "print('found', open(sys.argv[1]).read().count('## First'))"
    parts = [
        Part("first", "First", ("-c", "raise SystemExit(3)")),
        Part("second", "Second", ("-c", f"import sys; {before}", str(report))),
        Part("third", "Third", ("-c", "")),
    ]
    monkeypatch.setattr(gpu_report, "find_gpu", lambda: gpu_report.Gpu("GPU 1", 80.0, (9, 0), "13.0"))
    monkeypatch.setattr(gpu_report, "parts", lambda *arguments: parts)
    options = ["--output", str(report), "--only", "first", "second"]
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *options])
    with pytest.raises(SystemExit, match="failed: First"):
        gpu_report.main()
    text = report.read_text()
    assert "| First | **failed** (3) |" in text and "| Second | passed | found 1 |" in text
    assert "| GPU | GPU 1 |" in text and "Third" not in text
    assert str(report) in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--only", "fourth"])
    with pytest.raises(SystemExit, match="2"):
        gpu_report.main()
    assert "there is no part fourth, but first, second, third" in capsys.readouterr().err


def test_without_a_gpu_there_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    with pytest.raises(SystemExit, match="77"):
        gpu_report.main()
