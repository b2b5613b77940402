"""Parses arguments of `neso serve` without starting a server."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from neso.cli.main import app
from neso.cli.serve_options import ServeOptions


def parse(*arguments: str | Path) -> ServeOptions:
    """Raises `OptionError`."""
    with patch("neso.cli.server_process.run", return_value=0) as ran:
        result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return ServeOptions.read(ran.call_args.args[0])
