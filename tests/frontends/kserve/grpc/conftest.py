"""Fixtures: a core with the test models, and a gRPC frontend on a free port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
import tritonclient.grpc.aio
from kserve_backends import Wait
from kserve_grpc_backends import BACKENDS, CONFIGS, Repeat
from tritonclient.grpc import service_pb2_grpc

from neso.frontends.frontend_options import GrpcOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.server import backend
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model repository with one model per test backend."""
    for name, target in BACKENDS.items():
        monkeypatch.setitem(backend.BUILTIN, name, target)
    for name, config in CONFIGS.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    yield tmp_path
    for record in (Repeat.cancelled, Wait.cancelled, Wait.waiting):
        record.clear()


@pytest.fixture
async def core(repository: Path) -> AsyncIterator[Core]:
    """Explicit model control, all models loaded."""
    core = Core(
        ServerOptions(
            (repository,),
            model_control_mode=ModelControlMode.EXPLICIT,
            startup_models=("*",),
            exit_timeout=1.0,
        )
    )
    await core.start()
    yield core
    await core.stop()


@pytest.fixture
async def server(core: Core) -> AsyncIterator[KServeGrpc]:
    server = KServeGrpc(core, GrpcOptions(host="127.0.0.1", port=0))
    await server.start()
    yield server
    await server.stop(grace=0)


@pytest.fixture
async def stub(server: KServeGrpc) -> AsyncIterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    """The generated stub, for messages that tritonclient cannot send."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
async def client(server: KServeGrpc) -> AsyncIterator[tritonclient.grpc.aio.InferenceServerClient]:
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client
