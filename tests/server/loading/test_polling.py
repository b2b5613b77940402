"""Model control mode POLL."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from core_requests import collect, index_of, send_request, send_slow_request
from eventually import until
from repository_builder import IDENTITY_TENSORS, SLOW, RepositoryBuilder

from neso.server.core import Core
from neso.server.errors import NotFound, Unavailable
from neso.server.metadata import ModelState


async def value_of(core: Core, name: str, version: str = "") -> float:
    (response,) = await collect(send_request(core.model(name, version), IN=np.zeros(1, np.float32)))
    assert response.error is None, response.error
    return float(response.output("OUT").array[0])


async def test_new_models_are_loaded_and_removed_ones_unloaded(repository: RepositoryBuilder, start_core):
    repository.add_constant("stays", 1)
    gone = repository.add_constant("goes", 2)
    core = await start_core(poll=True)
    stays = core.model("stays")
    shutil.rmtree(gone)
    repository.add_constant("comes", 3)
    await core.poll_repositories()
    assert [model.name for model in core.models()] == ["comes", "stays"]
    assert core.model("stays") is stays
    assert await value_of(core, "comes") == 3
    assert index_of(core, "goes") == []
    with pytest.raises(NotFound, match="'goes' is not found"):
        core.model("goes")


async def test_changed_files_are_reloaded(repository: RepositoryBuilder, start_core):
    repository.add_constant("m", 1)
    core = await start_core(poll=True)
    old = core.model("m")
    repository.add_constant("m", 22)
    await core.poll_repositories()
    assert await value_of(core, "m") == 22 and core.model("m") is not old
    loaded = core.model("m")
    await core.poll_repositories()
    assert core.model("m") is loaded


async def test_added_and_removed_versions_leave_others_loaded(repository: RepositoryBuilder, start_core):
    policy = {"config": IDENTITY_TENSORS + "version_policy { all { } }"}
    folder = repository.add_constant("m", 1, versions=("1", "2"), **policy)
    core = await start_core(poll=True)
    first = core.model("m", "1")
    repository.add_constant("m", 3, versions=("3",), **policy)
    shutil.rmtree(folder / "2")
    await core.poll_repositories()
    assert [model.version for model in core.models()] == ["1", "3"]
    assert core.model("m", "1") is first
    assert first.metadata().versions == ["1", "3"]
    assert (await value_of(core, "m"), await value_of(core, "m", "1")) == (3, 1)


async def test_an_invalid_change_keeps_the_loaded_version(repository: RepositoryBuilder, start_core):
    folder = repository.add_constant("m", 1)
    core = await start_core(poll=True)
    for break_it in (
        lambda: (folder / "config.pbtxt").write_text("fooo"),
        lambda: repository.add("m", "import no_such_module"),
        lambda: shutil.rmtree(folder / "1"),
    ):
        break_it()
        await core.poll_repositories()
        assert await value_of(core, "m") == 1
    repository.add_constant("m", 2)
    await core.poll_repositories()
    assert await value_of(core, "m") == 2


async def test_failed_models_are_retried(repository: RepositoryBuilder, start_core, tmp_path):
    code = f"""
    from pathlib import Path
    class TritonPythonModel:
        def initialize(self, args):
            assert Path({str(tmp_path / "weights")!r}).exists(), "no weights"
        def execute(self, requests):
            return []
    """
    repository.add("m", code)
    core = await start_core(poll=True)
    assert index_of(core, "m")[0].reason == "AssertionError: no weights" and not core.ready()
    (tmp_path / "weights").touch()
    await core.poll_repositories()
    assert core.ready() and core.model("m").ready()


async def test_a_name_that_becomes_ambiguous(repository: RepositoryBuilder, start_core, tmp_path):
    other = RepositoryBuilder(tmp_path / "other")
    repository.add_constant("m", 1)
    core = await start_core(poll=True, model_repository=(repository.path, other.path))
    twin = other.add_constant("m", 2)
    for _ in range(2):
        await core.poll_repositories()
        (entry,) = index_of(core, "m")
        assert (
            entry.state is ModelState.UNAVAILABLE
            and entry.reason == "model appears in two or more repositories"
        )
    shutil.rmtree(twin)
    await core.poll_repositories()
    assert await value_of(core, "m") == 1


async def test_an_unreadable_repository_unloads_nothing(repository: RepositoryBuilder, start_core, tmp_path):
    repository.add_constant("m", 1)
    core = await start_core(poll=True)
    repository.path.rename(tmp_path / "away")
    await core.poll_repositories()
    assert core.model("m").ready()
    (tmp_path / "away").rename(repository.path)
    await core.poll_repositories()
    assert core.model("m").ready()


async def test_ensembles_follow_their_steps(repository: RepositoryBuilder, start_core):
    repository.add_ensemble("all", "step")
    core = await start_core(poll=True)
    assert "depends on 'step' which has no loaded version" in index_of(core, "all")[0].reason
    step = repository.add_constant("step", 1)
    await core.poll_repositories()
    assert await value_of(core, "all") == 1
    repository.add_constant("step", 22)
    await core.poll_repositories()
    assert await value_of(core, "all") == 22
    shutil.rmtree(step)
    await core.poll_repositories()
    assert core.models() == []
    assert "depends on 'step' which has no loaded version" in index_of(core, "all")[0].reason
    repository.add_constant("step", 3)
    await core.poll_repositories()
    assert await value_of(core, "all") == 3


async def test_an_ensemble_incompatible_with_its_changed_step_is_unloaded(
    repository: RepositoryBuilder, start_core
):
    repository.add_ensemble("all", "step")
    repository.add_constant("step", 1)
    core = await start_core(poll=True)
    repository.add("step", config=IDENTITY_TENSORS.replace("OUT", "OTHER"))
    await core.poll_repositories()
    (entry,) = index_of(core, "all")
    assert entry.state is ModelState.UNAVAILABLE and "has no output 'OUT'" in entry.reason
    assert core.model("step").ready()


async def test_requests_in_flight_outlive_their_model(repository: RepositoryBuilder, start_core):
    folder = repository.add("slow", SLOW)
    core = await start_core(poll=True)
    stream = send_slow_request(core.model("slow"))
    await until((folder / "1" / "begun").exists)
    (folder / "config.pbtxt").rename(repository.path / "kept")  # the code folder is kept for the test
    moved = folder.rename(repository.path.parent / "moved")
    polling = asyncio.ensure_future(core.poll_repositories())
    await until(lambda: index_of(core, "slow")[0].state is ModelState.UNLOADING)
    folder.mkdir()
    (folder / "1").mkdir()
    (folder / "1" / "go").touch()
    await polling
    (response,) = await collect(stream)
    assert response.error is None and moved.exists()


async def test_polling_interval(repository: RepositoryBuilder, start_core):
    core = await start_core(poll=True, repository_poll_secs=0.05)
    repository.add_constant("m", 1)
    await until(core.models)
    assert await value_of(core, "m") == 1
    await asyncio.wait_for(core.stop(), 60)


async def test_load_requests_are_rejected(repository: RepositoryBuilder, start_core):
    repository.add_constant("m", 1)
    core = await start_core(poll=True)
    for work in (core.load_model("m"), core.unload_model("m")):
        with pytest.raises(
            Unavailable, match="explicit model load / unload is not allowed if polling is enabled"
        ):
            await work
    with pytest.raises(Unavailable, match="polling is disabled"):
        await (await start_core(explicit=True)).poll_repositories()
