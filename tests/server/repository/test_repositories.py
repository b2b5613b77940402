"""Model names in one repository and in several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from repository_builder import RepositoryBuilder

from neso.server.errors import AlreadyExists, InvalidArgument, NotFound
from neso.server.repository.repositories import ModelRepositories
from neso.server.repository.source import Fingerprint


@pytest.fixture
def both(tmp_path: Path) -> tuple[RepositoryBuilder, RepositoryBuilder]:
    first, second = RepositoryBuilder(tmp_path / "first"), RepositoryBuilder(tmp_path / "second")
    for repository, name in ((first, "a"), (first, "twice"), (second, "b"), (second, "twice")):
        repository.add(name)
    (first.path / ".hidden").mkdir()
    (first.path / "README").touch()
    return first, second


def test_names_are_unique(both) -> None:
    repositories = ModelRepositories([repository.path for repository in both])
    assert repositories.names() == {"a", "b", "twice"}
    (a,) = repositories.find("a")
    assert (a.id, a.directory, a.namespace, a.renamed) == ("a", both[0].path / "a", "", False)
    with pytest.raises(InvalidArgument, match="two or more repositories"):
        repositories.find("twice")
    with pytest.raises(NotFound):
        repositories.find("README")
    scan = repositories.scan()
    assert set(scan.sources) == {"a", "b"} and scan.ambiguous == {"twice"}
    assert scan.sources["a"] == a


def test_names_in_namespaces(both) -> None:
    repositories = ModelRepositories([repository.path for repository in both], namespacing=True)
    first, second = (str(repository.path) for repository in both)
    assert {source.id for source in repositories.find("twice")} == {f"{first}::twice", f"{second}::twice"}
    assert set(repositories.scan().sources) == {
        f"{first}::a",
        f"{first}::twice",
        f"{second}::b",
        f"{second}::twice",
    }
    assert repositories.find_one("twice", second).namespace == second
    assert repositories.find_one("a", second).namespace == first
    with pytest.raises(InvalidArgument, match="ambiguous"):
        repositories.find_one("twice", "")


def test_registration_with_other_names(both) -> None:
    first, second = both
    repositories = ModelRepositories([first.path])
    repositories.register(second.path, {"renamed": "twice"})
    assert repositories.names() == {"a", "b", "twice", "renamed"}
    (source,) = repositories.find("renamed")
    assert source.directory == second.path / "twice" and source.renamed
    assert repositories.find("twice")[0].directory == first.path / "twice"
    assert set(repositories.scan().sources) == {"a", "b", "twice", "renamed"}
    repositories.unregister(second.path)
    assert repositories.names() == {"a", "twice"}
    with pytest.raises(NotFound):
        repositories.find("renamed")


def test_invalid_registrations(both, tmp_path: Path) -> None:
    first, second = both
    repositories = ModelRepositories([first.path])
    with pytest.raises(InvalidArgument, match=r"failed to register '.*nope', repository not found"):
        repositories.register(tmp_path / "nope")
    with pytest.raises(AlreadyExists, match="has already been registered"):
        repositories.register(first.path)
    with pytest.raises(InvalidArgument, match="is not in the repository"):
        repositories.register(second.path, {"x": "../first/a"})
    with pytest.raises(InvalidArgument, match=r"failed to unregister '.*second', repository not found"):
        repositories.unregister(second.path)
    repositories.register(second.path, {"x": "b"})
    third = RepositoryBuilder(tmp_path / "third")
    with pytest.raises(AlreadyExists, match="failed to register 'x', there is a conflicting mapping for 'x'"):
        repositories.register(third.path, {"x": "c"})
    assert repositories.names() == {"a", "twice", "x"}


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
