"""API keys: given, read from a file, and reloaded."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from neso.frontends.openai.access import ApiKeys, Quota, api_keys
from neso.server.errors import InvalidArgument

FILE = """
# who may ask
alice:sk-alice rpm=10
bob:sk:with:colons  rpm=unlimited tpm=500

sk-nameless
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


def name_of(keys: ApiKeys, secret: str) -> str | None:
    found = keys.find(secret.encode())
    return None if found is None else found.name


def test_given_keys() -> None:
    keys = ApiKeys(["one", "two"])
    assert [name_of(keys, secret) for secret in ("one", "two", "three", "", "tw")] == [
        "key-1",
        "key-2",
        None,
        None,
        None,
    ]


def test_key_file(file: Path) -> None:
    keys = ApiKeys(["given"], file)
    names = [
        name_of(keys, secret) for secret in ("given", "sk-alice", "sk:with:colons", "sk-nameless", "alice")
    ]
    assert names == ["key-1", "alice", "bob", "line-6", None]


def test_quotas_of_keys(file: Path) -> None:
    keys = ApiKeys(file=file)
    default = Quota(requests=5, tokens=100)
    quotas = {
        name: keys.find(name.encode()).quota(default)
        for name in ("sk-alice", "sk:with:colons", "sk-nameless")
    }
    assert quotas == {"sk-alice": Quota(10, 100), "sk:with:colons": Quota(0, 500), "sk-nameless": default}


def test_secrets_are_not_stored(file: Path) -> None:
    keys = ApiKeys(["secret-1"], file)
    assert "secret-1" not in repr(vars(keys))
    assert "sk-alice" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nobody\n", "contains no keys"),
        ("a:\n", ":1: expected"),
        ("\n:b\n", ":2: expected"),
        ("a:b rpm=often\n", ":1: expected rpm=N"),
        ("a:b hello\n", ":1: expected rpm=N"),
        ("a:b\na:c\n", "the same"),
        ("a:b\nc:b\n", "the same"),
    ],
)
def test_invalid_key_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        ApiKeys(file=file)


def test_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        ApiKeys(file=tmp_path / "keys")


def test_changed_file_is_reloaded(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "_CHECK_INTERVAL", 0.0)
    keys = ApiKeys(["given"], file)
    file.write_text("carol:sk-carol\n")
    assert name_of(keys, "sk-carol") == "carol"
    assert name_of(keys, "sk-alice") is None
    assert name_of(keys, "given") == "key-1"
    with caplog.at_level(logging.ERROR):
        file.write_text("carol:\n")
        assert name_of(keys, "sk-carol") == "carol"
        file.unlink()
        assert name_of(keys, "sk-carol") == "carol"
    assert "were not reloaded" in caplog.text


def test_file_is_not_checked_on_every_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_CHECK_INTERVAL", 60.0)
    keys = ApiKeys(file=file)
    file.write_text("carol:sk-carol\n")
    os.utime(file, (time.time(), time.time() + 5))
    assert name_of(keys, "sk-carol") is None
    keys.reload(force=True)
    assert name_of(keys, "sk-carol") == "carol"


def test_unnamed_key_keeps_its_owner_when_its_line_moves(file: Path) -> None:
    """A different key in the same line must not take over stored responses and rate limits."""
    keys = ApiKeys(file=file)
    before = keys.find(b"sk-nameless")
    file.write_text("# moved\nsk-first\n\n\n\nsk-new\nsk-nameless\nalice:sk-renewed\n")
    keys.reload(force=True)
    after, new, alice = (keys.find(key) for key in (b"sk-nameless", b"sk-new", b"sk-renewed"))
    assert before and after and new and alice
    assert (before.name, new.name, after.name) == ("line-6", "line-6", "line-7")
    assert before.owner == after.owner != new.owner
    assert alice.owner == "alice"


def test_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:sk-alice\n", encoding="utf-8-sig")
    assert name_of(ApiKeys(file=file), "sk-alice") == "alice"


def test_key_of_arbitrary_bytes() -> None:
    """Invalid UTF-8 on the command line arrives as surrogates."""
    keys = ApiKeys([os.fsdecode(b"sk-\xff\xfe"), "sk-ü"])
    found = [keys.find(secret) for secret in (b"sk-\xff\xfe", "sk-ü".encode(), b"sk-")]
    assert [key and key.name for key in found] == ["key-1", "key-2", None]
