"""Fuzzing of model configurations: random fields and mutated text, through load and inference."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from fuzz_oracle import check_message
from fuzz_profile import fuzz_settings
from fuzz_server import BATCHED, ECHO, EVERY_TYPE, PIPELINE, SEQUENCE, FuzzServer
from google.protobuf import json_format, text_format
from hypothesis import example, given
from hypothesis import strategies as st
from protobuf_messages import filled
from repository_builder import REPEAT_TENSORS
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

Result = TypeVar("Result")

TIMEOUT = 30.0
NAME = "fuzzed"
TEMPLATES = [
    EVERY_TYPE,
    BATCHED,
    SEQUENCE,
    PIPELINE,
    REPEAT_TENSORS,
    """
    max_batch_size: 4
    input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] reshape { shape: [ 2, 1 ] } }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 2, 1 ] reshape { shape: [ 2 ] } label_filename: "labels.txt" }
    instance_group [ { count: 2 kind: KIND_CPU } ]
    version_policy { specific { versions: [ 1 ] } }
    model_warmup [ {
      name: "w" batch_size: 1
      inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 2 ] random_data: true } }
    } ]
    parameters { key: "p" value { string_value: "v" } }
    response_cache { enable: true }
    """,
    """
    max_batch_size: 2
    sequence_batching {
      oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100 }
      control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]
      state [ {
        input_name: "IN_S" output_name: "OUT_S" data_type: TYPE_INT32 dims: [ 1 ]
        initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "s" }
      } ]
    }
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
    """,
]
OVERRIDES = {
    "inference.ModelConfig.name": st.sampled_from(["", NAME, NAME, "other"]),
    "inference.ModelConfig.backend": st.sampled_from(["", "python", "python", "nothing", "../x"]),
    "inference.ModelConfig.platform": st.sampled_from(["", "ensemble", "onnxruntime_onnx", "x"]),
    "inference.ModelConfig.default_model_filename": st.sampled_from(
        ["", "model.py", "../../x.py", "/etc/passwd", "a/b"]
    ),
    "inference.ModelEnsembling.Step.model_name": st.sampled_from(["echo", "batched", "absent", NAME, ""]),
    # Bounded sizes: the server would allocate the largest batch, queue or warm-up as configured.
    "inference.ModelInstanceGroup.count": st.integers(-1, 3),
    "inference.ModelDynamicBatching.max_queue_delay_microseconds": st.integers(0, 1000),
    "inference.ModelSequenceBatching.StrategyDirect.max_queue_delay_microseconds": st.integers(0, 1000),
    "inference.ModelSequenceBatching.StrategyOldest.max_queue_delay_microseconds": st.integers(0, 1000),
    "inference.ModelWarmup.count": st.integers(0, 2),
    "inference.ModelWarmup.batch_size": st.integers(0, 4),
    "inference.ModelWarmup.Input.dims": st.integers(-1, 3),
    "inference.ModelInput.dims": st.sampled_from([-1, 0, 1, 2, 3, -2]),
    "inference.ModelSequenceBatching.InitialState.dims": st.integers(-1, 3),
    "inference.ModelSequenceBatching.State.dims": st.integers(-1, 3),
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Return a valid configuration with additional random fields."""
    template = draw(st.sampled_from(TEMPLATES))
    config = draw(filled(lambda: text_format.Parse(template, ModelConfig()), OVERRIDES, max_fields=3))
    if config.platform != "ensemble" and not config.backend and draw(st.integers(0, 9)):
        config.backend = "python"
    return config


async def load_and_infer(server: FuzzServer, config: str | None, files: dict[str, bytes] | None) -> None:
    """Load, send a matching request if possible, unload. Errors must be meant for clients."""
    core = server.core
    try:
        await within(core.load_model(NAME, config, files), f"the load of {config or _text(server)}")
    except ServerError as error:
        check_message(error.message)
    try:
        model = core.model(NAME)
    except ServerError as error:
        check_message(error.message)
    else:
        request = InferenceRequest(NAME, {spec.name: _ones(spec) for spec in model.metadata().inputs})
        try:
            responses = await within(_collect(model.submit(request)), f"a request to {model.config}")
        except ServerError as error:
            check_message(error.message)
        else:
            for response in responses:
                if response.error is not None:
                    check_message(response.error.message)
    core.repository_index()
    await core.render_metrics()
    await within(core.unload_model(NAME), "unload")


async def within(work: Coroutine[Any, Any, Result], what: str) -> Result:
    """Return the result of an operation that must not hang."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=TIMEOUT)
    if not done:
        task.cancel()
    assert done, f"{what} hangs"
    return task.result()


async def _collect(stream: ResponseStream) -> list[InferenceResponse]:
    return [response async for response in stream]


def _ones(spec) -> Tensor:
    datatype = DataType(spec.datatype)
    shape = tuple(1 if extent < 0 else extent for extent in spec.shape)
    if datatype is DataType.BYTES:
        return Tensor(spec.name, datatype, np.full(shape, b"x", np.object_))
    return Tensor(spec.name, datatype, np.ones(shape, datatype.dtype))


@fuzz_settings
@given(configs(), st.booleans())
def test_random_configs(server, config, by_file):
    text = text_format.MessageToString(config)
    if by_file:
        _write(server, text)
        server.call(load_and_infer(server, None, None))
    else:
        _write(server, 'backend: "python"')
        server.call(load_and_infer(server, json_format.MessageToJson(config), None))
    server.check_sane()


@fuzz_settings
@given(st.sampled_from(TEMPLATES), st.data())
def test_mutated_text(server, template, data):
    text = 'backend: "python"\n' * ("ensemble" not in template) + template
    for _ in range(data.draw(st.integers(1, 3))):
        low = data.draw(st.integers(0, len(text)))
        high = min(len(text), low + data.draw(st.sampled_from([0, 1, 1, 5, 40])))
        tokens = ["", "", "0", "-1", "9" * 25, "{", "}", "[", '"', "TYPE_", text[low:high]]
        new = data.draw(st.sampled_from(tokens) | st.text(max_size=3))
        text = text[:low] + new + text[high:]
    _write(server, text)
    server.call(load_and_infer(server, None, None))
    server.check_sane()


@pytest.mark.parametrize("number", ["77", "-1", "4000000000", "9" * 25])
@pytest.mark.parametrize(
    "template",
    [
        'input {{ name: "IN" data_type: {number} dims: 1 }}',
        "instance_group {{ kind: {number} }}",
        "optimization {{ priority: {number} }}",
    ],
)
def test_unknown_enum_numbers(server, template, number):
    _write(server, 'backend: "python"\n' + template.format(number=number))
    server.call(load_and_infer(server, None, None))
    server.check_sane()


FILES = st.dictionaries(
    st.sampled_from([
        "file:1/model.py", "file:2/model.py", "file:1", "file:../x", "file:/tmp/x", "file:", "file:a/../1/model.py",
        "file:1/model.py/x", "file:x\0y", "file:" + "n" * 300, "file:01/model.py", "file:labels.txt",
    ]),
    st.sampled_from([ECHO.encode(), b"", b"\xff\xfe"]),
    max_size=3,
)  # fmt: skip
JSON = configs().map(json_format.MessageToJson)
ODD_JSON = st.sampled_from(["", "{", "[]", "null", "{}", '{"backend": 5}', '{"input": [{"dims": [1e3]}]}'])


@fuzz_settings
@given(st.one_of(JSON, ODD_JSON), FILES)
@example("{}", {"file:1/model.py": ECHO.encode(), "file:1": b""})
@example("[" * 10_000, {})
def test_load_requests(server, config, files):
    _write(server, BATCHED)
    server.call(load_and_infer(server, config, files))
    server.check_sane()


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_unmodified_templates_load(server, template):
    """Otherwise the fuzz tests above would pass trivially."""
    _write(server, 'backend: "python"\n' * ("ensemble" not in template) + template)
    server.call(load_and_infer_strictly(server))


async def load_and_infer_strictly(server: FuzzServer) -> None:
    await server.core.load_model(NAME)
    await server.core.unload_model(NAME)


def test_no_requests_or_tasks_remain(server):
    """Runs last."""
    server.check_idle()


def _text(server: FuzzServer) -> str:
    return (server.repository.path / NAME / "config.pbtxt").read_text()


def _write(server: FuzzServer, config: str) -> None:
    folder: Path = server.repository.add(NAME, ECHO)
    (folder / "config.pbtxt").write_bytes(config.encode("utf-8", "surrogatepass"))
    (folder / "labels.txt").write_text("a\nb\n")
