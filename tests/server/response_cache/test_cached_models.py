"""Models with cached responses."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from core_requests import collect
from eventually import until
from repository_builder import IDENTITY_TENSORS

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.options import ServerOptions
from neso.server.tensor import Tensor

# Returns its input and the number of executions; 13 is an error.
COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    count = 0

    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, values):
        self.count += 1
        if 13 in values:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky"))
        count = pb_utils.Tensor("COUNT", np.full(values.shape, self.count, np.float32))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values), count])
"""
THROUGH_SENDER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    count = 0

    def execute(self, requests):
        for request in requests:
            self.count += 1
            count = pb_utils.Tensor("COUNT", np.full(1, self.count, np.float32))
            out = pb_utils.Tensor("OUT", np.zeros(1, np.float32))
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([out, count]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = IDENTITY_TENSORS + 'output { name: "COUNT" data_type: TYPE_FP32 dims: [ -1 ] }'
ENABLED = "response_cache { enable: true }"


async def send_request(model, *values: float, **options):
    """Return the output values and the last response."""
    inputs = {
        "IN": Tensor.from_numpy("IN", np.array(values or (1,), np.float32).reshape(options.pop("shape", -1)))
    }
    responses = await collect(model.submit(InferenceRequest(model.name, inputs, **options)))
    return responses[0]


async def count(model, *values: float, **options) -> int:
    """Return the execution number that produced the response."""
    return int((await send_request(model, *values, **options)).output("COUNT").array.flat[0])


@pytest.fixture
def serve(repository, start_core):
    """`await serve(config, code)` returns the model on a server with a cache."""

    async def start(config: str = ENABLED, code: str = COUNTING, size: int = 1 << 20):
        repository.add("model", code, TENSORS + config)
        return (await start_core(response_cache_size=size)).model("model")

    return start


@pytest.mark.parametrize("batcher", ["", "max_batch_size: 4 dynamic_batching {}"])
async def test_hits_do_not_reach_the_backend(serve, batcher):
    model = await serve(ENABLED + batcher)
    shape = (1, -1) if batcher else (-1,)
    first = await send_request(model, 1, 2, id="a", shape=shape)
    second = await send_request(model, 1, 2, id="b", shape=shape)
    assert (first.id, second.id) == ("a", "b")
    assert second.final and (second.model_name, second.model_version) == ("model", "1")
    for response in first, second:
        assert response.output("OUT").array.tolist() == np.reshape([1, 2], shape).tolist()
        assert response.output("COUNT").array.flat[0] == 1
    assert await count(model, 1, 3, shape=shape) == 2
    assert await count(model, 1, 2, shape=shape) == 1
    # An execution of a batch is counted shortly after its responses.
    await until(lambda: model.statistics.snapshot()["execution_count"] == 2)
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"]) == (2, 2)
    times = statistics["inference_stats"]
    assert (times["cache_hit"]["count"], times["cache_miss"]["count"]) == (2, 2)
    assert times["cache_hit"]["ns"] > 0 and times["cache_miss"]["ns"] > 0
    assert (times["success"]["count"], times["queue"]["count"], times["compute_infer"]["count"]) == (4, 4, 2)
    assert model.in_flight_count == 0


async def test_metrics(repository, start_core):
    repository.add("model", COUNTING, TENSORS + ENABLED)
    repository.add("other", COUNTING, TENSORS)
    core = await start_core(response_cache_size=1 << 20)
    for _ in range(3):
        await send_request(core.model("model"))
        await send_request(core.model("other"))
    lines = core.metrics.render().decode().splitlines()
    assert 'nv_cache_num_hits_per_model{model="model",version="1"} 2' in lines
    assert 'nv_cache_num_misses_per_model{model="model",version="1"} 1' in lines
    values = [line for line in lines if line.startswith("nv_cache_")]
    assert [line.split("{")[0] for line in values] == [
        f"nv_cache_{name}_per_model" for name in ("num_hits", "num_misses", "hit_duration", "miss_duration")
    ]


async def test_cache_key_fields(serve):
    model = await serve()
    assert await count(model) == 1
    assert await count(model, requested_outputs=("COUNT",)) == 2
    assert await count(model, requested_outputs=("OUT", "COUNT")) == 3
    assert await count(model, requested_outputs=("COUNT", "OUT")) == 3
    assert await count(model, parameters={"a": 1}) == 4
    assert await count(model, id="7", model_version="1", timeout_us=10**9, priority=0) == 1


@pytest.mark.parametrize("options", [{"sequence_id": 3}, {"sequence_id": "x"}, {"cacheable": False}])
async def test_uncached_requests(serve, options):
    model = await serve()
    assert [await count(model, **options), await count(model, **options)] == [1, 2]
    assert await count(model) == 3
    assert await count(model, **options) == 4


async def test_errors_are_not_cached(serve):
    model = await serve()
    for _ in range(2):
        response = await send_request(model, 13)
        assert response.error is not None and response.error.message == "unlucky"
    assert await count(model) == 3
    assert model.statistics.cache_miss.count == 1 and model.statistics.fail.count == 2


async def test_response_with_a_separate_final_flag(serve):
    model = await serve(code=THROUGH_SENDER)
    assert [await count(model), await count(model)] == [1, 1]


async def test_cached_outputs_are_copied(serve):
    model = await serve()
    for _ in range(3):
        array = (await send_request(model, 5)).output("OUT").array
        assert array.tolist() == [5]
        if array.flags.writeable:
            array[:] = 7


async def test_small_caches_evict(serve):
    model = await serve(size=1000)
    assert [await count(model, n) for n in (1, 1, 2, 2, 1)] == [1, 1, 2, 2, 3]


async def test_a_reload_does_not_use_old_entries(repository, start_core):
    repository.add("model", COUNTING, TENSORS + ENABLED)
    core = await start_core(explicit=True, startup_models=("model",), response_cache_size=1 << 20)
    assert (await send_request(core.model("model"), 4)).output("OUT").array.tolist() == [4]
    repository.add("model", COUNTING.replace('"OUT", values', '"OUT", -values'), TENSORS + ENABLED)
    await core.load_model("model")
    assert (await send_request(core.model("model"), 4)).output("OUT").array.tolist() == [-4]


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (ENABLED, 0, "the server has no cache"),
        (ENABLED + "model_transaction_policy { decoupled: true }", 1 << 20, "it is decoupled"),
    ],
)
async def test_unsupported_models_log_a_warning(serve, caplog, config, size, why):
    code = THROUGH_SENDER if "decoupled" in config else COUNTING
    with caplog.at_level(logging.WARNING):
        model = await serve(config, code, size)
    assert f"model 'model': response_cache has no effect, {why}" in caplog.text
    assert not model.uses_cache
    assert [await count(model), await count(model)] == [1, 2]


async def test_disabled_by_default(serve):
    model = await serve("")
    assert [await count(model), await count(model)] == [1, 2]


def test_negative_size_is_rejected():
    with pytest.raises(InvalidArgument, match="must not be negative"):
        ServerOptions(response_cache_size=-1)
