"""docs/reference/command-line.md matches the flags."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from serve_arguments import parse

ROOT = Path(__file__).parents[2]


def test_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "command_line_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text()
    assert text == module.page(text), "run: python scripts/command_line_docs.py"


def test_example_file_is_valid(tmp_path):
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert found is not None
    (tmp_path / "serve.yaml").write_text(found[1])
    options = parse(f"--config={tmp_path}/serve.yaml")
    assert options.warnings == () and options.http is not None and options.http.port == 8080
    assert options.models[0].name == "chat" and options.server.startup_models == ("greeter",)
