"""Options of stages: `neso serve --stage` and `neso worker --stage`."""

from __future__ import annotations

import pytest
from serve_arguments import parse
from typer.testing import CliRunner

from neso.cli.flag_values import OptionError
from neso.cli.main import app


def test_stages_are_read():
    options = parse(
        *("--stage=encoder=2", "--stage=post=0", "--stage-address=tcp://0.0.0.0:9101"),
        *("--stage-token-file=token", "--stage-max-attempts=5", "--stage-heartbeat-timeout=6"),
    )
    stages = options.server.stages
    assert stages.workers == {"encoder": 2, "post": 0}
    assert (stages.address, stages.token_file) == ("tcp://0.0.0.0:9101", "token")
    assert (stages.max_attempts, stages.heartbeat_timeout) == (5, 6.0)


def test_defaults():
    stages = parse().server.stages
    assert (stages.workers, stages.address, stages.max_attempts, stages.heartbeat_timeout) == (
        {},
        None,
        3,
        30.0,
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--stage=encoder",), "--stage: expected MODEL=COUNT, got 'encoder'"),
        (("--stage=encoder=-1",), "--stage: expected MODEL=COUNT, got 'encoder=-1'"),
        (("--stage=a=1", "--stage=a=2"), "--stage: 'a' is given twice"),
        (("--stage=a=0",), "--stage a=0 needs --stage-address"),
        (("--stage-address=tcp://h:1",), "--stage-address needs --stage"),
        (("--stage=a=1", "--stage-address=udp://h:1"), "must begin with tcp:// or ipc://"),
        (("--stage=a=1", "--stage-address=tcp://h:1"), "needs --stage-token-file"),
        (("--stage-max-attempts=0",), "expected at least 1"),
    ],
)
def test_invalid_options_are_explained(arguments: tuple[str, ...], message: str):
    with pytest.raises(OptionError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--stage=a",), "--stage needs --model-repository"),
        (("--stage=a", "--model-repository=."), "--join is required: the --stage-address"),
        (("--stage=a", "--model-repository=.", "--join=tcp://h:1"), "needs a file with a token"),
        (("--stage=a", "--model-repository=.", "model"), "one model of a repository with --stage"),
    ],
)
def test_invalid_options_of_a_worker_are_explained(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["worker", *arguments])
    assert result.exit_code == 2
    assert message in result.output
