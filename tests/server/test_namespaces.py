"""Models with the same name in several repositories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from core_requests import collect, send_request
from repository_builder import RepositoryBuilder

from neso.server.core import Core
from neso.server.errors import InvalidArgument


class Pair:
    """Two repositories, each with an ensemble and a step of the same name in both."""

    def __init__(self, path: Path) -> None:
        self.one, self.two = RepositoryBuilder(path / "one"), RepositoryBuilder(path / "two")
        self.one.add_constant("step", 1)
        self.one.add_ensemble("first", "step")
        self.two.add_constant("step", 2)
        self.two.add_ensemble("second", "step")
        self.paths = (self.one.path, self.two.path)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


async def values(core: Core) -> list[float]:
    found = []
    for name in ("first", "second"):
        (response,) = await collect(send_request(core.model(name), IN=np.zeros(1, np.float32)))
        assert response.error is None, response.error
        found.append(float(response.output("OUT").array[0]))
    return found


def ambiguous(core: Core, name: str = "step") -> None:
    with pytest.raises(
        InvalidArgument,
        match=f"There are 2 identifiers of model '{name}' in global map, model "
        "namespace must be provided to resolve ambiguity.",
    ):
        core.model(name)
    assert not core.model_ready(name)


async def test_steps_are_resolved_in_the_namespace_of_the_ensemble(pair: Pair, start_core) -> None:
    core = await start_core(model_repository=pair.paths, model_namespacing=True)
    assert core.ready() and await values(core) == [1, 2]
    ambiguous(core)
    assert [entry.name for entry in core.repository_index()] == ["first", "second", "step", "step"]


async def test_metrics_have_the_namespace(pair: Pair, start_core) -> None:
    core = await start_core(model_repository=pair.paths, model_namespacing=True)
    await values(core)
    lines = (await core.render_metrics()).decode().splitlines()
    samples = [line for line in lines if line.startswith('nv_inference_request_success{model="step"')]
    assert sorted(samples) == sorted(
        f'nv_inference_request_success{{model="step",namespace="{path}",version="1"}} 1'
        for path in pair.paths
    )


async def test_metrics_without_namespaces_have_no_such_label(
    repository: RepositoryBuilder, start_core
) -> None:
    repository.add_constant("step", 1)
    core = await start_core()
    assert "namespace=" not in (await core.render_metrics()).decode()


async def test_without_namespaces_the_step_is_not_loaded(pair: Pair, start_core) -> None:
    core = await start_core(model_repository=pair.paths)
    assert core.models() == []
    assert {entry.name: entry.reason for entry in core.repository_index()}["step"].endswith(
        "model appears in two or more repositories"
    )


async def test_ensembles_with_the_same_name(tmp_path: Path, start_core) -> None:
    one, two = RepositoryBuilder(tmp_path / "one"), RepositoryBuilder(tmp_path / "two")
    for repository, step, value in ((one, "a", 1), (two, "b", 2)):
        repository.add_constant(step, value)
        repository.add_ensemble("all", step)
    core = await start_core(explicit=True, model_repository=(one.path, two.path), model_namespacing=True)
    await core.load_model("all")
    assert {model.name for model in core.models()} == {"a", "b", "all"} and len(core.models()) == 4
    ambiguous(core, "all")
    await core.unload_model("all", unload_dependents=True)
    assert core.models() == []


@pytest.mark.parametrize("poll", [True, False])
async def test_an_ensemble_uses_another_namespace_while_its_step_is_unloaded(
    pair: Pair, start_core, poll
) -> None:
    own = pair.one.path / "step"
    away = own.rename(pair.one.path.parent / "away")
    core = await start_core(poll=poll, explicit=not poll, model_repository=pair.paths, model_namespacing=True)
    if not poll:
        await core.load_model("first")
        await core.load_model("second")
    assert await values(core) == [2, 2]
    assert core.model("step").ready()
    shutil.move(away, own)
    if poll:
        await core.poll_repositories()
    else:
        await core.load_model("first")
    assert await values(core) == [1, 2]
    ambiguous(core)


async def test_a_load_applies_to_all_models_with_the_name(pair: Pair, start_core) -> None:
    core = await start_core(explicit=True, model_repository=pair.paths, model_namespacing=True)
    await core.load_model("step")
    assert len(core.models()) == 2
    config = {"backend": "python", "parameters": {"x": {"string_value": "y"}}}
    await core.load_model("step", json.dumps(config))
    assert [model.config.parameters["x"].string_value for model in core.models()] == ["y", "y"]
    await core.unload_model("step")
    assert core.models() == []
