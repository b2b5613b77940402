"""Fingerprints of model folders detect changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neso.server.repository.source import Fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.pbtxt", "labels.txt", "1/model.py", "1/data/weights", "2/model.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_unchanged_folders_have_equal_fingerprints(folder: Path) -> None:
    assert Fingerprint.of_folder(folder) == Fingerprint.of_folder(folder)


@pytest.mark.parametrize(
    ("change", "versions"),
    [
        (lambda f: (f / "config.pbtxt").write_text("other"), set()),
        (lambda f: (f / "1/model.py").write_text("other"), {1}),
        (lambda f: os.utime(f / "1/model.py", ns=(1, 1)), {1}),
        (lambda f: (f / "1/data/weights").unlink(), {1}),
        (lambda f: (f / "1/helper.py").touch(), {1}),
        (lambda f: (f / "labels.txt").write_text("other"), {1, 2}),
        (lambda f: (f / "3").mkdir(), set()),
    ],
)
def test_changed_folders_have_different_fingerprints(folder: Path, change, versions) -> None:
    before = Fingerprint.of_folder(folder)
    change(folder)
    after = Fingerprint.of_folder(folder)
    assert after != before
    assert {version for version in (1, 2) if not after.same_version(before, version)} == versions


def test_ignored_files(folder: Path) -> None:
    before = Fingerprint.of_folder(folder)
    (folder / ".config.pbtxt.swp").touch()
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").touch()
    assert Fingerprint.of_folder(folder) == before


def test_links_are_followed_without_cycles(folder: Path, tmp_path_factory) -> None:
    weights = tmp_path_factory.mktemp("elsewhere") / "weights"
    weights.write_text("a")
    (folder / "1" / "linked").symlink_to(weights)
    (folder / "1" / "back").symlink_to(folder)
    (folder / "1" / "nowhere").symlink_to(folder / "nothing")
    before = Fingerprint.of_folder(folder)
    weights.write_text("ab")
    assert Fingerprint.of_folder(folder) != before
