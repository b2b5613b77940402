"""docs/guides/tensorrtllm-backend.md: its tables match the code, its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from neso.backends.tensorrtllm import signature
from neso.backends.tensorrtllm.parameters import PARAMETERS

sys.path.append(str(Path(__file__).parents[2] / "conformance"))
from server_process import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "tensorrtllm-backend.md").read_text()


def section(title: str) -> str:
    """Return the text under a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_parameter_tables_match_the_code():
    for title, has_effect in (("Parameters that have an effect", True), ("Parameters that have none", False)):
        rows = [line for line in section(title).splitlines() if line.startswith("| `")]
        reported = [
            f"| `{p.name}` | {p.effect} |" for p in PARAMETERS if bool(p.option or p.setting) is has_effect
        ]
        assert rows == reported


def names_in(text: str) -> set[str]:
    """Return the names in backticks; a leading … stands for the prefix of the name before it."""
    found: set[str] = set()
    last = ""
    for name in re.findall(r"`([a-z_\u2026*]+)[^`]*`", text):
        if name.startswith("\u2026"):
            name = last[: last.rindex(name[1])] + name[1:]
        last = name
        found.add(name)
    return found


def test_all_tensors_are_documented():
    inputs = names_in(section("Inputs"))
    lookahead = {field.name for field in signature.INPUTS if field.name.startswith("lookahead_")}
    assert {field.name for field in signature.INPUTS} - inputs == lookahead
    assert {field.name for field in signature.OUTPUTS} <= names_in(section("Outputs"))


def test_documented_example_runs(tmp_path):
    (config,) = re.findall(r"```protobuf\n(.*?)```", PAGE, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "models" / "tensorrt_llm" / "1").mkdir(parents=True)
    (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").write_text(config)
    with ServerProcess(f"--model-repository={tmp_path / 'models'}") as server:
        code = code.replace("localhost:8001", server.address("grpc"))
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"^\[\d+\]$", ran.stdout, re.MULTILINE)) == 16, ran.stdout
