"""Repositories in buckets: URIs, and models copied from fsspec's in-memory file system."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import fsspec
import numpy as np
import pytest
from core_requests import collect, index_of, send_request
from repository_builder import CONSTANT, IDENTITY_TENSORS

from neso.server.core import Core
from neso.server.errors import InvalidArgument, NotFound, Unsupported
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.repository.cloud import Bucket, CloudRepository, parse_uri


@pytest.mark.parametrize(
    ("uri", "bucket"),
    [
        ("s3://bucket/models/", Bucket("s3", "bucket/models", {})),
        (
            "s3://https://host:9000/bucket/models",
            Bucket("s3", "bucket/models", {"client_kwargs": {"endpoint_url": "https://host:9000"}}),
        ),
        (
            "s3://localhost:9000/bucket",
            Bucket("s3", "bucket", {"client_kwargs": {"endpoint_url": "http://localhost:9000"}}),
        ),
        ("gs://bucket/models", Bucket("gs", "bucket/models", {})),
        (
            "as://account.blob.core.windows.net/container/models",
            Bucket("abfs", "container/models", {"account_name": "account", "account_key": "secret"}),
        ),
        ("memory://models", Bucket("memory", "models", {})),
    ],
)
def test_uris(uri: str, bucket: Bucket, monkeypatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "secret")
    assert parse_uri(uri) == bucket


@pytest.mark.parametrize("uri", ["s3://", "://models", "as://account"])
def test_invalid_uris(uri: str) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        parse_uri(uri)


def test_unknown_file_systems(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(
        Unsupported, match=r"model repository 'gs://bucket' needs the extra 'neso-server\[cloud\]'"
    ):
        CloudRepository("gs://bucket")
    with pytest.raises(InvalidArgument, match="Protocol not known: nonsense"):
        CloudRepository("nonsense://models")


@pytest.fixture
def bucket():
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    files.pipe("/models/README", b"an empty folder is no folder")

    def write(value: float) -> None:
        files.pipe("/models/m/config.pbtxt", f'backend: "python" {IDENTITY_TENSORS}'.encode())
        files.pipe("/models/m/1/model.py", CONSTANT.format(value=value).encode())

    write(1)
    yield write
    files.store.clear()


async def value_of(core: Core) -> float:
    (response,) = await collect(send_request(core.model("m"), IN=np.zeros(1, np.float32)))
    assert response.error is None, response.error
    return float(response.output("OUT").array[0])


async def test_models_are_copied_on_load(bucket) -> None:
    core = Core(
        ServerOptions(("memory://models",), model_control_mode=ModelControlMode.POLL, repository_poll_secs=0)
    )
    await core.start()
    assert await value_of(core) == 1
    copied = Path(core.model("m")._backend.context.directory)
    assert (copied / "1" / "model.py").is_file()
    loaded = core.model("m")
    await core.poll_repositories()
    assert core.model("m") is loaded
    del loaded
    bucket(22)
    await core.poll_repositories()
    assert await value_of(core) == 22
    fsspec.filesystem("memory").rm("/models/m", recursive=True)
    await core.poll_repositories()
    assert index_of(core, "m") == []
    await core.stop()
    gc.collect()
    assert not await asyncio.to_thread(copied.exists)


async def test_register_a_bucket_by_request(bucket) -> None:
    core = Core(ServerOptions(("memory://models",), model_control_mode=ModelControlMode.EXPLICIT))
    await core.start()
    assert [entry.name for entry in core.repository_index()] == ["m"]
    await core.load_model("m")
    assert await value_of(core) == 1
    await core.stop()


async def test_a_bucket_must_exist(bucket) -> None:
    with pytest.raises(NotFound, match="'memory://nope' is not a directory"):
        await Core(ServerOptions(("memory://nope",))).start()
