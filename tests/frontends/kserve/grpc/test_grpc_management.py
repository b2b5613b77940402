"""Health, metadata, configuration, statistics and the model repository, with tritonclient."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest
from kserve_grpc_requests import repeat_request
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from neso.frontends.frontend_options import GrpcOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.server.core import Core
from neso.server.errors import Unavailable


async def test_health_and_readiness(client):
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("identity")
    assert await client.is_model_ready("identity", "1")
    assert not await client.is_model_ready("identity", "7")
    assert not await client.is_model_ready("nobody")


async def test_standard_health_service(server):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Watch")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_server_metadata(client):
    metadata = await client.get_server_metadata()
    assert metadata.name == "neso"
    assert "statistics" in metadata.extensions


async def test_model_metadata_has_the_batch_dimension(client):
    metadata = await client.get_model_metadata("wait")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("wait", ["1"], "test_wait")
    [tensor] = metadata.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("X", "INT32", [-1, 1])


async def test_model_config(client):
    config = (await client.get_model_config("repeat")).config
    assert config.name == "repeat"
    assert config.model_transaction_policy.decoupled


async def test_unknown_model_is_not_found(client):
    for send_request in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match="'nobody' is not found") as caught:
            await send_request("nobody")
        assert caught.value.status() == "StatusCode.NOT_FOUND"


async def test_statistics_count_requests(client):
    tensor = InferInput("IN_FP32", [2], "FP32")
    tensor.set_data_from_numpy(np.zeros(2, np.float32))
    for _ in range(3):
        await client.infer("identity", [tensor])
    [stats] = (await client.get_inference_statistics("identity")).model_stats
    assert (stats.name, stats.version, stats.inference_count) == ("identity", "1", 3)
    assert stats.inference_stats.success.count == 3
    assert stats.inference_stats.success.ns > 0
    assert [batch.batch_size for batch in stats.batch_stats] == [1]
    assert {stats.name for stats in (await client.get_inference_statistics()).model_stats} == {
        "identity",
        "repeat",
        "wait",
    }


async def test_statistics_without_a_version_cover_all_ready_versions(client, repository):
    (repository / "wait" / "2").mkdir()
    await client.load_model("wait", config='{"backend": "test_wait", "version_policy": {"all": {}}}')
    stats = (await client.get_inference_statistics("wait")).model_stats
    assert sorted(each.version for each in stats) == ["1", "2"]
    [latest] = (await client.get_inference_statistics("wait", "2")).model_stats
    assert latest.version == "2"


async def test_repository_index_load_and_unload(client):
    await client.unload_model("wait")
    states = {entry.name: entry.state for entry in (await client.get_model_repository_index()).models}
    assert (states["identity"], states["wait"]) == ("READY", "UNAVAILABLE")
    assert not await client.is_model_ready("wait")
    await client.load_model("wait")
    assert await client.is_model_ready("wait")


async def test_load_with_config_override(client):
    await client.load_model("wait", config='{"backend": "test_wait", "max_batch_size": 9}')
    assert (await client.get_model_config("wait")).config.max_batch_size == 9


async def test_load_unknown_model(client):
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
        await client.load_model("nobody")


@pytest.mark.parametrize(
    ("method", "message", "status"),
    [
        (
            "RepositoryIndex",
            service_pb2.RepositoryIndexRequest(repository_name="r"),
            grpc.StatusCode.UNIMPLEMENTED,
        ),
        (
            "RepositoryModelLoad",
            service_pb2.RepositoryModelLoadRequest(
                model_name="wait", parameters={"config": {"int64_param": 1}}
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "RepositoryModelUnload",
            service_pb2.RepositoryModelUnloadRequest(
                model_name="wait", parameters={"x": {"bool_param": True}}
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_rejected_requests(stub, method, message, status):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(message)
    assert caught.value.code() is status
    assert "support" in caught.value.details() or "parameter" in caught.value.details()


async def test_malformed_message_fails_only_its_call(server):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer()
        await stream.write(repeat_request("a", 1))
        assert (await stream.read()).infer_response.id == "a"
        for method in ("ModelMetadata", "SystemSharedMemoryRegister"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.aio.AioRpcError, match="Unable to parse request") as caught:
                await call(b"\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError, match="malformed RepositoryModelLoadRequest") as caught:
            await channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")(b"\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await stream.write(repeat_request("b", 1))
        assert (await stream.read()).infer_response.id == "b"
        stream.cancel()


async def test_unexpected_exception_is_an_internal_error(stub, core: Core, monkeypatch, caplog):
    monkeypatch.setattr(core, "metadata", lambda: 1 // 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ServerMetadata(service_pb2.ServerMetadataRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "ServerMetadata: ZeroDivisionError" in caught.value.details()
    assert "unexpected error in ServerMetadata" in caplog.text
    assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live


async def test_port_in_use(server: KServeGrpc, core: Core):
    second = KServeGrpc(core, GrpcOptions(host="127.0.0.1", port=server.port))
    with pytest.raises(Unavailable, match=f"127.0.0.1:{server.port}"):
        await second.start()
    await second.stop()


async def test_restart_after_stop(core: Core):
    server = KServeGrpc(core, GrpcOptions(host="127.0.0.1", port=0))
    for _ in range(2):
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(repeat_request("a", 1))
            assert (await asyncio.wait_for(call.read(), 60)).infer_response.id == "a"
            call.cancel()
        await server.stop()
