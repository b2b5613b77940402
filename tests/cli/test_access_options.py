"""Access options of the OpenAI API."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_arguments import parse

from neso.cli.flag_values import OptionError
from neso.cli.serve import join_restricted_api
from neso.frontends.openai.access import AccessOptions, Quota


def access(*arguments: str | Path) -> AccessOptions:
    options = parse(*arguments).openai
    assert options is not None
    return options.access


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NESO_API_KEY", raising=False)


def test_no_key_is_required_by_default() -> None:
    assert access() == AccessOptions()


def test_keys_of_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("alice:sk-3\n")
    monkeypatch.setenv("NESO_API_KEY", " sk-4 ")
    keys = access("--api-key=sk-1", "--api-key=sk-2", f"--api-key-file={tmp_path}/keys").keys
    assert keys is not None
    found = [keys.find(f"sk-{number}".encode()) for number in range(1, 6)]
    assert [key and key.name for key in found] == ["key-1", "key-2", "alice", "key-3", None]


def test_quotas_and_origins() -> None:
    options = access(
        "--openai-requests-per-minute=5",
        "--openai-tokens-per-minute=100",
        "--cors-allow-origin=a",
        "--cors-allow-origin=b",
    )
    assert (options.quota, options.origins) == (Quota(5, 100), ("a", "b"))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("health", ("health",)),
        ("health,metrics,docs", ("health", "metrics", "docs")),
        ("nothing", ()),
        ("", ()),
    ],
)
def test_open_groups(text: str, groups: tuple[str, ...]) -> None:
    assert access(f"--api-key-open={text}").open_groups == groups


def test_unrestricted_kserve_warns() -> None:
    (warning,) = parse("--api-key=a").warnings
    assert "--allow-http=false --allow-grpc=false" in warning
    (warning,) = parse("--api-key=a", "--allow-grpc=false").warnings
    assert "--allow-grpc" not in warning
    closed = ("--allow-http=false", "--grpc-restricted-protocol=health,inference:key=value")
    assert parse("--api-key=a", *closed).warnings == ()


@pytest.mark.parametrize(
    "spelling",
    [
        ["--openai-restricted-api", "inference,metrics", "admin-key", "a=b:c"],
        ["--openai-restricted-api", "inference,metrics:admin-key=a=b:c"],
        ["--openai-restricted-api=inference,metrics:admin-key=a=b:c"],
    ],
)
def test_spellings_of_restricted_groups(spelling: list[str]) -> None:
    options = parse(*spelling, "--openai-port=1").openai
    assert options is not None
    for group in ("inference", "metrics"):
        required = options.openai_restrictions.get(group)
        assert required is not None
        assert (required.name, required.value) == ("admin-key", b"a=b:c")
    assert options.openai_restrictions.get("health") is None
    assert not options.restrictions


def test_other_arguments_are_unchanged() -> None:
    arguments = ["--http-port", "1", "--openai-restricted-api", "a", "b"]
    assert join_restricted_api(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--openai-restricted-api", "shared-memory", "key", "value"],
            "unknown restricted group 'shared-memory'",
        ),
        (["--openai-restricted-api=inference"], "expected GROUP"),
        (["--openai-restricted-api=health,health:k=v"], "more than once"),
        (["--api-key-open=all"], "--api-key-open: expected some of health, metrics, docs"),
        (["--lora-separator="], "--lora-separator: must not be empty"),
        (["--openai-root-cert=x"], "--openai-server-cert and --openai-server-key must be given together"),
    ],
)
def test_invalid_values(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(*arguments)


def test_flags_of_tritons_openai_frontend() -> None:
    options = parse(
        "--tokenizer=t",
        "--kserve-http-port=1",
        "--kserve-grpc-port=2",
        "--tritonserver-log-verbose-level=1",
        "--enable-kserve-frontends",
        "--backend=vllm",
        "--uvicorn-log-level=debug",
    )
    assert options.http is not None and options.http.port == 1
    assert options.grpc is not None and options.grpc.port == 2
    assert options.log.verbose_level == 1
    assert options.openai is not None and options.openai.tokenizer == "t"
    assert len(options.warnings) == 3
