"""Log records, formats, and changes of the log settings at runtime."""

from __future__ import annotations

import json
import logging
import os
import re
import time

import pytest

from neso.server.errors import ErrorCode, ServerError, Unavailable
from neso.server.log import LogFormat, LogOptions, LogSettings

log = logging.getLogger("neso.test")


@pytest.fixture
def install():
    """Apply settings to the process's log; restore the old ones at the end."""
    loggers = [logging.getLogger(name) for name in ("", "neso", "urllib3")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]

    def install(options: LogOptions) -> LogSettings:
        settings = LogSettings(options)
        settings.install()
        return settings

    yield install
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def lines(tmp_path):
    """Return the lines logged since the last call."""
    path = tmp_path / "log"
    seen = 0

    def lines() -> list[str]:
        nonlocal seen
        text = path.read_text()
        text, seen = text[seen:], len(text)
        return text.splitlines()

    return lines


@pytest.fixture
def options(tmp_path):
    return lambda **given: LogOptions(file=str(tmp_path / "log"), **given)


def log_all_levels() -> None:
    log.debug("verbose")
    log.info("info")
    log.warning("warning")
    log.error("error")


def messages_of(lines: list[str]) -> list[str]:
    return [line.rpartition(" ")[2].strip('"') for line in lines]


def test_default_format(install, options, lines):
    install(options())
    log.info("loaded '%s'\nand \"more\"", "m")
    (line,) = lines()
    pattern = r'I(\d{4} \d\d:\d\d:\d\d)\.\d{6} (\d+) test_log\.py:\d+\] (".*")'
    moment, pid, message = re.fullmatch(pattern, line).groups()
    assert json.loads(message) == "loaded 'm'\nand \"more\""
    assert int(pid) == os.getpid()
    assert moment[:7] == time.strftime("%m%d %H", time.gmtime())[:7]


def test_iso8601(install, options, lines):
    install(options(format=LogFormat.ISO8601))
    log.warning("x")
    (line,) = lines()
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ W \d+ test_log\.py:\d+\] "x"', line)


def test_json(install, options, lines):
    install(options(format=LogFormat.JSON))
    log.error("a %s", "b", extra={"model": "m", "request_id": "", "trace_id": "t"})
    (line,) = lines()
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", entry.pop("time"))
    assert entry.pop("line") > 0
    assert entry == {
        "level": "ERROR",
        "logger": "neso.test",
        "file": "test_log.py",
        "pid": os.getpid(),
        "message": "a b",
        "model": "m",
        "trace_id": "t",
    }


def test_exceptions(install, options, lines):
    settings = install(options())
    for format in (LogFormat.DEFAULT, LogFormat.JSON):
        settings.update({"log_format": format.value})
        try:
            raise ValueError("so")
        except ValueError:
            log.exception("it failed")
    *plain, line = lines()
    assert plain[0].endswith('] "it failed"') and plain[-1] == "ValueError: so"
    assert json.loads(line)["exception"].endswith("ValueError: so")


def test_unescaped_messages(install, options, lines, monkeypatch):
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    install(options())
    log.info('say "so"')
    assert lines()[0].endswith('] say "so"')


def test_each_level_can_be_disabled(install, options, lines):
    settings = install(options())
    log_all_levels()
    assert messages_of(lines()) == ["info", "warning", "error"]
    settings.update({"log_verbose_level": 1, "log_warning": False})
    log_all_levels()
    assert messages_of(lines()) == ["verbose", "info", "error"]
    settings.update({"log_verbose_level": 0, "log_info": False, "log_error": False})
    assert not log.isEnabledFor(logging.INFO) or lines() == []
    log_all_levels()
    assert messages_of(lines()) == []
    settings.update({"log_error": True})
    log_all_levels()
    assert messages_of(lines()) == ["error"]


def test_disabled_levels_are_not_formatted(install, options):
    settings = install(options())
    assert not log.isEnabledFor(logging.DEBUG)
    settings.update({"log_info": False, "log_warning": False})
    assert not log.isEnabledFor(logging.WARNING)


def test_libraries_log_only_at_level_2(install, options, lines):
    settings = install(options(verbose_level=1))
    library = logging.getLogger("urllib3.x")
    library.debug("chatter")
    settings.update({"log_verbose_level": 2})
    library.debug("more")
    assert messages_of(lines()) == ["more"]


def test_updates_are_atomic(install, options):
    settings = install(options())
    before = settings.settings()
    assert list(before) == [
        "log_file",
        "log_info",
        "log_warning",
        "log_error",
        "log_verbose_level",
        "log_format",
    ]
    for values, code in (
        ({"log_info": False, "log_file": "x"}, ErrorCode.UNSUPPORTED),
        ({"log_info": False, "log_format": "x"}, ErrorCode.INVALID_ARG),
        ({"log_info": False, "what": 1}, ErrorCode.INVALID_ARG),
        ({"log_info": False, "log_verbose_level": 2**32}, ErrorCode.INVALID_ARG),
    ):
        with pytest.raises(ServerError) as caught:
            settings.update(values)
        assert caught.value.code is code
        assert settings.settings() == before


def test_log_handlers_of_the_application_are_kept(capsys):
    root = list(logging.getLogger().handlers)
    level = logging.getLogger("neso").level
    try:
        LogSettings().update({"log_info": False})
        assert logging.getLogger().handlers == root
        assert not log.isEnabledFor(logging.INFO) and log.isEnabledFor(logging.WARNING)
    finally:
        logging.getLogger("neso").setLevel(level)


def test_logs_go_to_standard_error(install, capsys):
    install(LogOptions())
    log.info("hello")
    assert capsys.readouterr().err.endswith('"hello"\n')


def test_an_unwritable_file(tmp_path):
    with pytest.raises(Unavailable, match=r"cannot write the log file '.*/no/where': No such file"):
        LogSettings(LogOptions(file=str(tmp_path / "no" / "where"))).install()
