"""The examples of agents and constrained decoding, run unchanged with the bundled model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_agent(server):
    arguments = ("--prompt", "How's Nvidia doing?", "-o", "200", "--url", server.url("/v1", "openai"))
    *steps, response = run("agent/client.py", *arguments, "--verbose").splitlines()
    readme = (EXAMPLES / "agent" / "README.md").read_text()
    for line in (*steps, response):
        assert f"    {line}\n" in readme
    assert "Executing function: get_current_stock_price({'symbol': 'NVDA'})" in steps
    assert "Function response: 106.38" in steps
    assert response == "The price of NVDA is now 106.38 dollars."
    assert run("agent/client.py", *arguments) == response + "\n"


def test_agent_without_forced_tools(server):
    """The answer may be poor, but it is not empty."""
    output = run(
        "agent/client.py",
        "--prompt=How is TSLA doing?",
        "--free-answer",
        f"--url={server.url('/v1', 'openai')}",
    )
    assert output.strip()


@pytest.mark.parametrize(
    ("script", "protocol"),
    [("openai_schema.py", "openai"), ("generate_schema.py", "http"), ("kserve_schema.py", "kserve")],
)
def test_constrained_decoding(server, script, protocol):
    urls = {"openai": server.url("/v1", "openai"), "http": server.url(), "kserve": server.address("grpc")}
    output = run(f"constrained_decoding/{script}", f"--url={urls[protocol]}")
    assert any(city in output for city in ("Paris", "Rome", "Oslo")) and "days" in output
