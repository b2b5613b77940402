"""The configuration file `--config`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serve_arguments import parse

from neso.cli.flag_values import OptionError
from neso.server.options import ModelControlMode


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "serve.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"--config={path}"

    return write


def test_all_value_types(config):
    options = parse(
        config(
            """
            # a comment
            model-store: [/models/a, /models/b]
            model-control-mode: explicit
            load-model:
              - left
              - "07"
            strict-readiness: no way
            """.replace("no way", "off")
            + """
            disable-auto-complete-config: true
            exit-timeout-secs: 2.5
            http-port: 18000
            grpc-port: 0
            models: pilot=neso-pilot
            """
        )
    )
    assert options.server.model_repository == (Path("/models/a"), Path("/models/b"))
    assert options.server.model_control_mode is ModelControlMode.EXPLICIT
    assert options.server.startup_models == ("left", "07")
    assert not options.server.strict_readiness and options.server.disable_auto_complete_config
    assert options.server.exit_timeout == 2.5
    assert (options.http.port, options.grpc.port) == (18000, 0)
    assert [model.name for model in options.models] == ["pilot"]


def test_command_line_takes_precedence(config):
    file = config("http-port: 18000\ngrpc-port: 18001\nmodel-repository: [a, b]")
    options = parse(file, "--http-port=28000", "--model-store=c")
    assert (options.http.port, options.grpc.port) == (28000, 18001)
    assert options.server.model_repository == (Path("c"),)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_empty_file_changes_nothing(config, text):
    assert parse(config(text)).http.port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http-port: 1\n\nhttp-prt: 2", ":3: http-prt: unknown option, did you mean 'http-port'?"),
        ("warp: 9", ":1: warp: unknown option"),
        ("config: other.yaml", ":1: config: unknown option"),
        ("\nhttp-port: eighty", ":2: http-port: expected an integer, got 'eighty'"),
        ("http-port: [1, 2]", ":1: http-port: expected one value, not a list"),
        ("load-model:\n  - {a: b}", ":2: load-model: expected a value or a list of values"),
        ("http-port:", ":1: http-port: expected a value or a list of values"),
        ("http-port: 1\nhttp-port: 2", ":2: http-port: already given in line 1"),
        ("model-store: a\nmodel-repository: b", ":2: model-repository: is the same as 'model-store'"),
        ("- http-port", ":1: expected lines of the form 'option: value'"),
        ("a: b\n  c: d", ":2: mapping values are not allowed here"),
        ("a: [", ":1: expected the node content"),
        (b"a: \xff", ":1: "),
        ("? [a]\n: b", ":1: expected the name of an option"),
    ],
)
def test_errors_name_file_and_line(config, text, message):
    file = config(text)
    with pytest.raises(OptionError, match="^" + re.escape(file.removeprefix("--config=") + message)):
        parse(file)


def test_overridden_value_is_validated(config):
    with pytest.raises(OptionError, match=":1: http-port: expected an integer"):
        parse(config("http-port: x"), "--http-port=1")


def test_missing_file(tmp_path):
    with pytest.raises(OptionError, match=r"--config: cannot read '.*none.yaml': No such file"):
        parse(f"--config={tmp_path}/none.yaml")


def test_ignored_option_of_the_file_warns(config):
    assert len(parse(config("http-thread-count: 4")).warnings) == 1
