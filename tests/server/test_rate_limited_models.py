"""Python models that share rate limiter resources, and passive instances."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from core_requests import collect, send_request
from eventually import until

from neso.server.core import Core
from neso.server.errors import Cancelled, InternalError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.metadata import ModelState
from neso.server.options import RateLimitMode, ResourceLimit
from neso.server.tensor import Tensor

GAUGE = "gauge_of_test_rate_limited_models"
MODEL = f"""
import time
import sys
import triton_python_backend_utils as pb_utils

gauge = sys.modules["{GAUGE}"]

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        gauge.instances.append(self.name)

    def execute(self, requests):
        with gauge.lock:
            gauge.now += 1
            gauge.most = max(gauge.most, gauge.now)
            gauge.executed.append(self.name)
        while gauge.hold:
            time.sleep(0.001)
        time.sleep(0.002)
        with gauge.lock:
            gauge.now -= 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
TENSORS = """
max_batch_size: 2
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
GROUP = 'instance_group {{ count: {count} rate_limiter {{ resources {{ name: "R" count: {needs} }} }} }}'
KINDS = {"plain": "", "dynamic": "dynamic_batching { }", "sequences": "sequence_batching { }"}


@pytest.fixture
def gauge() -> Iterator[Any]:
    """Counts concurrent executions."""
    module: Any = types.ModuleType(GAUGE)
    module.lock, module.now, module.most, module.hold = threading.Lock(), 0, 0, False
    module.executed, module.instances = [], []
    sys.modules[GAUGE] = module
    yield module
    module.hold = False
    del sys.modules[GAUGE]


def submit(core: Core, name: str, number: int) -> ResponseStream:
    request = InferenceRequest(
        name,
        {"IN": Tensor.from_numpy("IN", np.array([[number]], np.float32))},
        sequence_id=number + 1,
        sequence_start=True,
        sequence_end=True,
    )
    return core.model(name).submit(request)


@pytest.mark.parametrize("amount", [1, 2])
async def test_models_with_different_schedulers_share_a_resource(
    repository, start_core, gauge, amount: int
) -> None:
    for name, batching in KINDS.items():
        repository.add(name, MODEL, TENSORS + batching + GROUP.format(count=3, needs=1))
    core = await start_core(
        rate_limit=RateLimitMode.EXECUTION_COUNT, rate_limit_resources=(ResourceLimit("R", amount),)
    )
    streams = [submit(core, name, number) for number in range(12) for name in KINDS]
    for number, stream in enumerate(streams):
        (response,) = await asyncio.wait_for(collect(stream), 60)
        assert response.error is None, response.error
        assert response.output("OUT").array.item() == number // 3
    assert gauge.most == amount
    assert set(gauge.executed) == {f"{name}_0_{i}" for name in KINDS for i in range(3)}
    for name in KINDS:
        assert core.model(name).statistics.inference_count == 12


@pytest.mark.parametrize("kind", KINDS)
async def test_priorities_divide_a_contended_resource(repository, start_core, gauge, kind: str) -> None:
    for name, priority in (("often", 1), ("seldom", 2)):
        group = GROUP.format(count=1, needs=1).replace("resources", f"priority: {priority} resources")
        repository.add(name, MODEL, TENSORS.replace("size: 2", "size: 1") + KINDS[kind] + group)
    core = await start_core(rate_limit=RateLimitMode.EXECUTION_COUNT)
    streams = [submit(core, name, number) for number in range(20) for name in ("often", "seldom")]
    for stream in streams:
        await asyncio.wait_for(collect(stream), 60)
    assert Counter(gauge.executed[:30]) == {"often_0_0": 20, "seldom_0_0": 10}


async def test_rate_limiter_off(repository, start_core, gauge) -> None:
    repository.add("m", MODEL, TENSORS + GROUP.format(count=4, needs=1))
    core = await start_core()
    gauge.hold = True
    streams = [submit(core, "m", number) for number in range(4)]
    await until(lambda: gauge.now == 4)
    gauge.hold = False
    for stream in streams:
        await collect(stream)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiting_request_is_cancelled_immediately(repository, start_core, gauge, kind: str) -> None:
    for name in ("holder", "waiter"):
        repository.add(name, MODEL, TENSORS + KINDS[kind] + GROUP.format(count=1, needs=1))
    core = await start_core(rate_limit=RateLimitMode.EXECUTION_COUNT)
    gauge.hold = True
    holder = submit(core, "holder", 1)
    await until(lambda: gauge.now)
    gone, stays = submit(core, "waiter", 1), submit(core, "waiter", 2)
    await asyncio.sleep(0.02)
    gone.cancel()
    (response,) = await asyncio.wait_for(collect(gone), 60)
    assert isinstance(response.error, Cancelled)
    only = submit(core, "holder", 3)  # another model, without waiting requests after the cancellation
    only.cancel()
    await asyncio.wait_for(collect(only), 60)
    gauge.hold = False
    for stream in (holder, stays):
        (response,) = await asyncio.wait_for(collect(stream), 60)
        assert response.error is None
    assert gauge.most == 1 and len(gauge.executed) == 2


async def test_an_unsatisfiable_need_fails_the_load(repository, start_core, gauge) -> None:
    repository.add("modest", MODEL, TENSORS + GROUP.format(count=1, needs=2))
    repository.add("greedy", MODEL, TENSORS + GROUP.format(count=1, needs=5))
    core = await start_core(
        rate_limit=RateLimitMode.EXECUTION_COUNT, rate_limit_resources=(ResourceLimit("R", 4),)
    )
    entries = {entry.name: entry for entry in core.repository_index()}
    assert entries["modest"].state is ModelState.READY
    assert entries["greedy"].state is ModelState.UNAVAILABLE
    assert "the minimum required count is 5" in entries["greedy"].reason
    assert gauge.instances == ["modest_0_0"]  # rejected before an instance is created


async def test_unload_and_failed_load_release_resources(repository, start_core, gauge) -> None:
    repository.add("large", MODEL, TENSORS + GROUP.format(count=1, needs=4))
    repository.add("small", MODEL, TENSORS + GROUP.format(count=4, needs=1))
    broken = MODEL.replace("self.name = ", "raise ValueError('no')  # ")
    repository.add("broken", broken, TENSORS + GROUP.format(count=1, needs=9))
    core = await start_core(
        explicit=True, startup_models=("large", "small"), rate_limit=RateLimitMode.EXECUTION_COUNT
    )
    with pytest.raises(InternalError):
        await core.load_model("broken")
    gauge.hold = True
    streams = [submit(core, "small", number) for number in range(4)]
    await until(lambda: gauge.now == 4)  # "large" adds a resource of 4, "broken" adds nothing
    gauge.hold = False
    for stream in streams:
        await collect(stream)
    await core.unload_model("large")
    gauge.most = 0
    for stream in [submit(core, "small", number) for number in range(4)]:
        await collect(stream)
    assert gauge.most == 1  # the maximum need of an instance is 1 now


async def test_limited_and_stateful_models_warm_up(repository, start_core, gauge) -> None:
    zeros = "data_type: TYPE_FP32 dims: [ 1 ] zero_data: true"
    warmup = f'model_warmup {{ name: "w" inputs {{ key: "IN" value {{ {zeros} }} }} }}'
    for name, batching in KINDS.items():
        repository.add(name, MODEL, TENSORS + batching + warmup + GROUP.format(count=2, needs=1))
    for mode in RateLimitMode:
        core = await asyncio.wait_for(start_core(rate_limit=mode), 60)
        assert core.ready()


@pytest.mark.parametrize("mode", RateLimitMode)
@pytest.mark.parametrize("kind", KINDS)
async def test_passive_instances_do_not_execute(
    repository, start_core, gauge, kind: str, mode: RateLimitMode
) -> None:
    groups = "instance_group { count: 2 passive: true } " + GROUP.format(count=1, needs=1)
    repository.add("m", MODEL, TENSORS + KINDS[kind] + groups)
    core = await start_core(rate_limit=mode)
    assert sorted(gauge.instances) == ["m_0_0", "m_0_1", "m_1_0"]
    for stream in [submit(core, "m", number) for number in range(5)]:
        (response,) = await asyncio.wait_for(collect(stream), 60)
        assert response.error is None
    assert set(gauge.executed) == {"m_1_0"}


async def test_ignored_fields_are_listed_in_one_warning(repository, start_core, caplog) -> None:
    extra = """
    runtime: "x" optimization { priority: PRIORITY_MAX } model_operations { op_library_filename: "x.so" }
    metric_tags { key: "a" value: "b" } instance_group { host_policy: "numa" rate_limiter { priority: 3 } }
    model_metrics { metric_control { metric_identifier { family: "x" } } }
    """
    tensors = TENSORS.replace("max_batch_size: 2", "")
    repository.add("m", config=tensors + extra)
    core = await start_core()
    assert (await collect(send_request(core.model("m"), IN=np.ones(1, np.float32))))[0].error is None
    (warning,) = [record.message for record in caplog.records if "without effect" in record.message]
    assert warning == (
        "model 'm': its configuration has fields without effect: optimization, model_operations, runtime, "
        "instance_group.host_policy"
    )
