"""Model names in one repository and in several."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository_builder import RepositoryBuilder

from neso.server.errors import AlreadyExists, InvalidArgument, NotFound
from neso.server.repository.repositories import ModelRepositories


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
    with pytest.raises(InvalidArgument, match="not unique"):
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
