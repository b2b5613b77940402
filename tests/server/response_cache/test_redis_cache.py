"""Models with responses cached in a real Redis."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
import pytest
from eventually import until
from redis_process import RedisProcess, needs_redis
from test_cached_models import COUNTING, ENABLED, TENSORS, count, send_request

from neso.server.cache_options import RedisOptions
from neso.server.errors import ErrorCode, InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.options import ServerOptions
from neso.server.response_cache import cached_model as opening
from neso.server.response_cache import redis as redis_cache
from neso.server.response_cache.cache import CachedResponse
from neso.server.response_cache.redis import RedisCache
from neso.server.tensor import Tensor

redis = pytest.importorskip("redis")
pytestmark = needs_redis

PATIENT = {"socket_timeout": 60_000, "connect_timeout": 60_000}


@pytest.fixture
def process(tmp_path):
    with RedisProcess(tmp_path) as running:
        yield running


@pytest.fixture
def serve(repository, start_core, process):
    """`await serve(config, code)` returns the model on a new server with the cache in Redis."""

    async def start(config: str = ENABLED, code: str = COUNTING, **options):
        repository.add("model", code, TENSORS + config)
        options = {**PATIENT, **options}
        return (await start_core(redis_cache=RedisOptions("127.0.0.1", process.port, **options))).model(
            "model"
        )

    return start


def keys(process) -> list[str]:
    with redis.Redis(port=process.port) as client:
        return sorted(key.decode() for key in client.scan_iter())


async def settle(process, number: int) -> None:
    """Wait until responses are stored, shortly after they were sent."""
    await until(lambda: len(keys(process)) >= number)


@pytest.mark.parametrize("batcher", ["", "max_batch_size: 4 dynamic_batching {}"])
async def test_hits_do_not_reach_the_backend(serve, process, batcher):
    model = await serve(ENABLED + batcher)
    shape = (1, -1) if batcher else (-1,)
    first = await send_request(model, 1, 2, id="a", shape=shape)
    await settle(process, 1)
    second = await send_request(model, 1, 2, id="b", shape=shape)
    assert (first.id, second.id) == ("a", "b")
    assert second.final and (second.model_name, second.model_version) == ("model", "1")
    for response in first, second:
        assert response.output("OUT").array.tolist() == np.reshape([1, 2], shape).tolist()
        assert response.output("COUNT").array.flat[0] == 1
    assert second.output("OUT").array.flags.writeable
    assert await count(model, 1, 3, shape=shape) == 2
    await settle(process, 2)
    assert all(key.startswith("neso:model:1:") for key in keys(process))
    await until(lambda: model.statistics.snapshot()["execution_count"] == 2)
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"]) == (2, 2)
    times = statistics["inference_stats"]
    assert (times["cache_hit"]["count"], times["cache_miss"]["count"]) == (1, 2)
    assert times["cache_hit"]["ns"] > 0 and times["cache_miss"]["ns"] > 0
    assert (times["success"]["count"], times["compute_infer"]["count"]) == (3, 2)
    assert model.in_flight_count == 0


async def test_servers_share_entries(serve, process):
    one, other = await serve(), await serve()
    assert await count(one, 5) == 1
    await settle(process, 1)
    assert await count(other, 5) == 1
    assert other.statistics.snapshot()["inference_count"] == 0


async def test_a_changed_model_does_not_share_entries(serve, process):
    """Neither with changed code nor with a changed configuration."""
    assert (await send_request(await serve(), 4)).output("OUT").array.tolist() == [4]
    await settle(process, 1)
    changed = await serve(code=COUNTING.replace('"OUT", values', '"OUT", -values'))
    assert (await send_request(changed, 4)).output("OUT").array.tolist() == [-4]
    again = await serve(ENABLED + "parameters { key: 'a' value { string_value: 'b' } }")
    assert await count(again, 4) == 1 and again.statistics.cache_hit.count == 0


async def test_uncached_requests(serve, process):
    model = await serve()
    assert (await send_request(model, 13)).error.message == "unlucky"
    assert (await send_request(model, 13)).error.message == "unlucky"
    assert [await count(model, cacheable=False), await count(model, sequence_id=3)] == [3, 4]
    await asyncio.sleep(0.05)
    assert keys(process) == []


async def test_a_restart_of_redis_causes_only_misses(serve, process, caplog, monkeypatch):
    monkeypatch.setattr(redis_cache, "PAUSE", 0.1)
    model = await serve()
    assert await count(model, 1) == 1
    await settle(process, 1)
    assert await count(model, 1) == 1
    process.stop()
    with caplog.at_level(logging.INFO):
        assert [await count(model, 1) for _ in range(5)] == [2, 3, 4, 5, 6]
        await until(lambda: model.statistics.cache_miss.count == 6)  # no response is still being stored
        process.start()
        await asyncio.sleep(0.15)
        assert await count(model, 1) == 7
        await settle(process, 1)
        assert await count(model, 1) == 7
    lines = [record.message for record in caplog.records if "Redis" in record.message]
    assert len(lines) == 2
    assert lines[0].startswith(
        f"Redis at 127.0.0.1:{process.port} does not respond, responses are not cached: "
    )
    assert lines[1] == f"Redis at 127.0.0.1:{process.port} responds again"
    assert model.in_flight_count == 0 and model.statistics.fail.count == 0


async def test_a_quick_restart_of_redis_is_retried(serve, process, caplog):
    """Closed connections are reopened."""
    model = await serve()
    assert await count(model, 1) == 1
    await settle(process, 1)
    process.stop()
    process.start()
    with caplog.at_level(logging.WARNING):
        assert await count(model, 1) == 2
        await settle(process, 1)
        assert await count(model, 1) == 2
    assert not [record for record in caplog.records if "Redis" in record.message]


async def test_an_unresponsive_redis(serve, process, monkeypatch):
    """The first request waits for the timeout; others skip the cache during the pause."""
    monkeypatch.setattr(redis_cache, "PAUSE", 3600)
    before = await serve()
    assert await count(before, 1) == 1
    await settle(process, 1)
    model = await serve(socket_timeout=300)
    process.suspend()
    started = time.monotonic()
    assert await count(model, 1) == 1
    assert time.monotonic() - started > 0.25
    process.resume()
    assert await count(model, 1) == 2
    assert await count(before, 1) == 1


async def test_a_waiting_request_does_not_block_the_loop(serve, process):
    model = await serve()
    await send_request(model, 1)
    await settle(process, 1)
    process.suspend()
    waiting = asyncio.ensure_future(send_request(model, 1))
    for _ in range(50):
        await asyncio.sleep(0.001)
        assert not waiting.done()
    process.resume()
    assert (await waiting).error is None


async def test_cancel_during_a_lookup(serve, process):
    model = await serve()
    await send_request(model, 1)
    await settle(process, 1)
    process.suspend()
    inputs = {"IN": Tensor.from_numpy("IN", np.ones(1, np.float32))}
    stream = model.submit(InferenceRequest("model", inputs))
    await asyncio.sleep(0.05)
    assert model.in_flight_count == 1
    stream.cancel()
    (response,) = [r async for r in stream]
    assert response.error.code is ErrorCode.CANCELLED
    assert model.in_flight_count == 0
    await asyncio.wait_for(model.unload(3600), 30)


async def test_unload_cancels_pending_lookups(serve, process):
    model = await serve(socket_timeout=0)
    await send_request(model, 1)
    await settle(process, 1)
    process.suspend()
    inputs = {"IN": Tensor.from_numpy("IN", np.ones(1, np.float32))}
    stream = model.submit(InferenceRequest("model", inputs))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(model.unload(0.1), 60)
    (response,) = [r async for r in stream]
    assert response.error.code is ErrorCode.CANCELLED


async def test_without_redis_responses_are_computed(repository, start_core, process):
    process.stop()
    repository.add("model", COUNTING, TENSORS + ENABLED)
    core = await start_core(redis_cache=RedisOptions("127.0.0.1", process.port))
    assert core.ready()
    assert [await count(core.model("model")), await count(core.model("model"))] == [1, 2]


async def test_full_redis(tmp_path, repository, start_core, caplog):
    with RedisProcess(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as process:
        repository.add("model", COUNTING, TENSORS + ENABLED)
        core = await start_core(redis_cache=RedisOptions("127.0.0.1", process.port, **PATIENT))
        model = core.model("model")
        with caplog.at_level(logging.WARNING):
            assert [await count(model) for _ in range(3)] == [1, 2, 3]
            await until(lambda: model.statistics.cache_miss.count == 3)  # counted when it has been tried
    lines = [record.message for record in caplog.records if "Redis" in record.message]
    assert len(lines) == 1 and "used memory > 'maxmemory'" in lines[0]


async def test_invalid_entries_are_ignored(process, caplog):
    cache = RedisCache(RedisOptions("127.0.0.1", process.port))
    kept = CachedResponse((Tensor.from_numpy("OUT", np.ones(2, np.float32)),), {"a": 1})
    await cache.put("one", kept)
    found = await cache.get("one")
    assert found.outputs[0].array.tolist() == [1, 1] and found.parameters == {"a": 1}
    with redis.Redis(port=process.port) as client:
        client.set("two", b"what is this")
        client.lpush("three", b"a list")
    with caplog.at_level(logging.WARNING):
        assert [await cache.get("two"), await cache.get("two"), await cache.get("three")] == [
            None,
            None,
            None,
        ]
    assert len(caplog.records) == 2
    await cache.close()


@pytest.mark.parametrize(("password", "stored"), [("right", 1), ("wrong", 0)])
async def test_passwords_users_and_databases(tmp_path, repository, start_core, password, stored):
    with RedisProcess(
        tmp_path, "--user", "neso", "on", ">right", "~*", "+@all", "--requirepass", "other"
    ) as process:
        repository.add("model", COUNTING, TENSORS + ENABLED)
        options = RedisOptions("127.0.0.1", process.port, user="neso", password=password, db=3, **PATIENT)
        core = await start_core(redis_cache=options)
        model = core.model("model")
        assert await count(model) == 1
        await until(lambda: model.statistics.cache_miss.count == 1)  # counted when it has been tried
        with redis.Redis(port=process.port, password="other", db=3) as client:
            assert client.dbsize() == stored
        with redis.Redis(port=process.port, password="other", db=0) as client:
            assert client.dbsize() == 0


@pytest.mark.parametrize("name", ["", "cache.internal"])
async def test_tls(tmp_path, repository, start_core, name):
    """With certificates on both sides; the server's is for its address, or for another name."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for who, certificate in (
        ("server", authority.issue_cert(name or "127.0.0.1")),
        ("client", authority.issue_cert("client")),
    ):
        certificate.private_key_pem.write_to_path(tmp_path / f"{who}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{who}.pem")
    files = {
        key: str(tmp_path / file)
        for key, file in (("cert", "client.pem"), ("key", "client.key"), ("cacert", "ca.pem"))
    }
    arguments = (
        "--tls-cert-file",
        "server.pem",
        "--tls-key-file",
        "server.key",
        "--tls-ca-cert-file",
        "ca.pem",
    )
    arguments = [str(tmp_path / a) if "." in a else a for a in arguments]
    with RedisProcess(tmp_path, *arguments, tls=True) as process:
        repository.add("model", COUNTING, TENSORS + ENABLED)
        options = RedisOptions("127.0.0.1", process.port, sni=name, **files, **PATIENT)
        model = (await start_core(redis_cache=options)).model("model")
        assert await count(model) == 1
        await until(lambda: model.statistics.cache_miss.count == 1)  # counted once it is stored
        assert await count(model) == 1
        if name:
            strict = (
                await start_core(redis_cache=RedisOptions("127.0.0.1", process.port, **files, **PATIENT))
            ).model("model")
            assert [await count(strict), await count(strict)] == [1, 2]


def test_missing_client_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "neso.server.response_cache.redis", None)
    with pytest.raises(InvalidArgument, match=r"needs `pip install 'neso-server\[redis\]'`"):
        opening.open_cache(ServerOptions(redis_cache=RedisOptions("a", 1)))
