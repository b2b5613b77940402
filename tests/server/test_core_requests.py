"""Validation of requests against the configuration, and statistics."""

from __future__ import annotations

import re

import numpy as np
import pytest
from core_requests import collect, send_request, send_slow_request
from repository_builder import IDENTITY_TENSORS

from neso.generation import GenerationRequest
from neso.server.config.model_config import config_from_json, config_to_dict, config_to_json
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inference_request import InferenceRequest
from neso.server.metrics.registry import Family
from neso.server.tensor import Tensor

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B")
            b = 0 * a if b is None else b.as_numpy()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFF", a - b), pb_utils.Tensor("NO", a)
            ]))
        return responses
"""
ADD_SUB_TENSORS = """
input { name: "A" data_type: TYPE_INT32 dims: [ 2 ] }
input { name: "B" data_type: TYPE_INT32 dims: [ 2 ] optional: true }
output { name: "SUM" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "DIFF" data_type: TYPE_INT32 dims: [ 2 ] }
"""

PAIR = np.array([1, 2], np.int32)


@pytest.fixture
async def add_sub(repository, start_core):
    repository.add("add_sub", ADD_SUB, ADD_SUB_TENSORS)
    repository.add("batched", ADD_SUB, "max_batch_size: 3" + ADD_SUB_TENSORS)
    return await start_core()


@pytest.mark.parametrize(
    ("model", "arrays", "message"),
    [
        ("add_sub", {}, "expected number of inputs between 1 and 2 but got 0 inputs for model 'add_sub'"),
        ("add_sub", {"A": PAIR, "C": PAIR}, "unexpected inference input 'C' for model 'add_sub'"),
        ("add_sub", {"B": PAIR}, "Got input(s) ['B'], but missing required input(s) ['A']. Please"),
        (
            "add_sub",
            {"A": PAIR.astype(np.int64)},
            "inference input 'A' data-type is 'INT64', but model 'add_sub' expects 'INT32'",
        ),
        (
            "add_sub",
            {"A": PAIR[:1]},
            "unexpected shape for input 'A' for model 'add_sub'. Expected [2], got [1]",
        ),
        ("add_sub", {"A": PAIR[None]}, "Expected [2], got [1,2]"),
        (
            "batched",
            {"A": PAIR},
            "unexpected shape for input 'A' for model 'batched'. Expected [-1,2], got [2]",
        ),
        (
            "batched",
            {"A": np.ones((4, 2), np.int32)},
            "inference request batch-size must be <= 3 for 'batched'",
        ),
        (
            "batched",
            {"A": np.ones((1, 2), np.int32), "B": np.ones((2, 2), np.int32)},
            "input 'B' batch size does not match other inputs for 'batched'",
        ),
        (
            "batched",
            {"A": np.array(1, np.int32)},
            "input 'A' has no shape but model requires batch dimension",
        ),
    ],
)
async def test_mismatched_requests_are_rejected(add_sub, model, arrays, message):
    if model == "batched" and message.startswith("unexpected shape"):
        arrays = {"A": np.ones(2, np.int32)}
    with pytest.raises(InvalidArgument, match=re.escape(message)) as raised:
        send_request(add_sub.model(model), id="r1", **arrays)
    assert raised.value.message.startswith("[request id: r1] ")
    assert add_sub.model(model).statistics.fail.count == 0


async def test_requested_outputs(add_sub):
    model = add_sub.model("add_sub")
    (response,) = await collect(send_request(model, A=PAIR, B=PAIR))
    assert {t.name: t.array.tolist() for t in response.outputs} == {"SUM": [2, 4], "DIFF": [0, 0]}
    request = InferenceRequest("add_sub", {"A": Tensor.from_numpy("A", PAIR)}, requested_outputs=("DIFF",))
    (response,) = await collect(model.submit(request))
    assert [t.name for t in response.outputs] == ["DIFF"]
    request = InferenceRequest("add_sub", {"A": Tensor.from_numpy("A", PAIR)}, requested_outputs=("NO",))
    with pytest.raises(InvalidArgument, match="unexpected inference output 'NO' for model 'add_sub'"):
        model.submit(request)


async def test_reshape_is_reverted_for_outputs(repository, start_core):
    repository.add(
        "scalar",
        config="""
        max_batch_size: 4
        input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
        output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
        """,
        code="""
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                array = requests[0].inputs()[0].as_numpy()
                assert array.shape == (3,), array.shape
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
        """,
    )
    core = await start_core()
    (response,) = await collect(send_request(core.model("scalar"), IN=np.ones((3, 1), np.float32)))
    assert response.error is None and response.output("OUT").shape == (3, 1)


async def test_statistics_count_exactly(add_sub, repository):
    model = add_sub.model("batched")
    for batch in (1, 2, 2):
        await collect(send_request(model, A=np.ones((batch, 2), np.int32)))
    with pytest.raises(InvalidArgument):
        send_request(model)
    stats = model.statistics.snapshot()
    assert (stats["name"], stats["version"]) == ("batched", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (5, 3)
    assert stats["last_inference"] > 1_600_000_000_000
    inference = stats["inference_stats"]
    for stage in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert inference[stage]["count"] == 3
    assert inference["fail"] == {"count": 0, "ns": 0}
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    total = inference["success"]["ns"]
    assert total == pytest.approx(sum(inference[stage]["ns"] for stage in stages), rel=0.01)
    batches = {b["batch_size"]: b["compute_infer"]["count"] for b in stats["batch_stats"]}
    assert batches == {1: 1, 2: 2}


async def test_metrics_have_triton_names(repository, start_core):
    repository.add_standard()
    repository.add("tagged", config=IDENTITY_TENSORS + 'metric_tags { key: "team" value: "a\\"b" }')
    core = await start_core()
    for _ in range(2):
        await collect(send_request(core.model("identity"), IN=np.ones(1, np.float32)))
    stream = send_slow_request(core.model("slow"))
    waiting = send_slow_request(core.model("slow"))
    text = core.metrics.render().decode()
    assert "# TYPE nv_inference_request_success counter\n" in text
    for line in (
        'nv_inference_request_success{model="identity",version="1"} 2',
        'nv_inference_count{model="identity",version="1"} 2',
        'nv_inference_exec_count{model="identity",version="1"} 2',
        'nv_inference_request_failure{model="identity",reason="BACKEND",version="1"} 0',
        'nv_inference_request_success{_team="a\\"b",model="tagged",version="1"} 0',
    ):
        assert line + "\n" in text
    for family in (
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_output_duration_us",
        "nv_inference_pending_request_count",
        "nv_model_load_duration_secs",
    ):
        assert f'{family}{{model="identity",version="1"}} ' in text
    assert 'nv_inference_pending_request_count{model="slow",version="1"} 0' not in text
    for each in (waiting, stream):
        each.cancel()
        await collect(each)
    text = core.metrics.render().decode()
    assert 'nv_inference_request_failure{model="slow",reason="CANCELED",version="1"} 2\n' in text
    assert 'nv_inference_pending_request_count{model="slow",version="1"} 0\n' in text


async def test_backends_share_metric_families(start_core):
    core = await start_core()
    family = Family("vllm:prompt_tokens_total", "counter", "Tokens.")
    tokens = core.metrics.counter(family)
    assert core.metrics.counter(family) is tokens
    tokens.labels("m", "1").inc(3)
    histogram = core.metrics.histogram(Family("vllm:ttft", "histogram", "Time.", buckets=(0.5,)))
    histogram.labels("m", "1").observe(0.25)
    lines = core.metrics.render().decode().splitlines()
    assert "# TYPE vllm:prompt_tokens_total counter" in lines
    assert 'vllm:prompt_tokens_total{model="m",version="1"} 3' in lines
    assert 'vllm:ttft_bucket{model="m",version="1",le="+Inf"} 1' in lines
    assert 'vllm:ttft_sum{model="m",version="1"} 0.25' in lines
    assert not any("_created" in line for line in lines)


async def test_text_interface_of_a_model_without_text(add_sub):
    with pytest.raises(Unsupported, match="not a language model"):
        async for _ in add_sub.model("add_sub").generate(GenerationRequest("Hi")):
            pass


async def test_configuration_as_json(add_sub):
    config = add_sub.model("batched").config
    values = config_to_dict(config)
    assert values["max_batch_size"] == 3 and values["version_policy"] == {"latest": {"num_versions": 1}}
    assert values["input"][0]["dims"] == [2] and values["input"][0]["data_type"] == "TYPE_INT32"
    assert values["instance_group"][0]["kind"] == "KIND_CPU" and values["instance_group"][0]["count"] == 1
    assert "sequence_batching" not in values
    assert config_from_json(config_to_json(config)) == config
