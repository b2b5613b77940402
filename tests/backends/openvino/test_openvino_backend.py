"""OpenVINO models in a running core."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from core_requests import infer, parameters, reason
from eventually import until
from openvino_models import WEIGHTS, accumulator, double, fixed_batch, ir, linear, openvino, parameter

from neso.server.tensor import DataType

BACKEND = 'backend: "openvino"\n'
X = np.random.default_rng(1).integers(-8, 8, (16, 4)).astype(np.float32)


def tensors(x: str = "TYPE_FP32 dims: [ 4 ]", out: str = "TYPE_FP32 dims: [ 3 ]") -> str:
    return f"input {{ name: 'X' data_type: {x} }} output {{ name: 'OUT' data_type: {out} }}\n"


async def test_model_without_config_pbtxt(serve_files):
    model = (await serve_files(None, linear())).model("model")
    config = model.config
    assert (config.backend, config.max_batch_size, config.HasField("dynamic_batching")) == (
        "openvino",
        4,
        True,
    )
    assert [(t.name, list(t.dims)) for t in [*config.input, *config.output]] == [("X", [4]), ("OUT", [3])]
    outputs = await infer(model, X=X[:3])
    np.testing.assert_allclose(outputs["OUT"], X[:3] @ WEIGHTS, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layout", "size"), [("", 0), ("NC", 4), ("CN", 0)])
async def test_batching_of_a_fixed_batch_dimension_needs_a_layout(serve_files, layout, size):
    model = (await serve_files(None, linear(batch=1, layout=layout))).model("model")
    assert (model.config.max_batch_size, list(model.config.input[0].dims)) == (size, [4] if size else [1, 4])
    rows = 3 if size else 1
    np.testing.assert_allclose(
        (await infer(model, X=X[:rows]))["OUT"], X[:rows] @ WEIGHTS, rtol=1e-5, atol=1e-6
    )


async def test_default_max_batch_size(serve_files):
    settings = {"openvino": {"default-max-batch-size": "7"}}
    assert (await serve_files(None, linear(), backend_config=settings)).model(
        "model"
    ).config.max_batch_size == 7


async def test_requests_are_batched_on_several_instances(serve_files):
    config = (
        BACKEND + "max_batch_size: 16 instance_group { count: 2 kind: KIND_CPU }\n"
        "dynamic_batching { max_queue_delay_microseconds: 50000 }\n"
        + parameters(NUM_STREAMS="2", PERFORMANCE_HINT="throughput", INFERENCE_NUM_THREADS="2")
    )
    model = (await serve_files(config, linear())).model("model")
    outputs = await asyncio.gather(*(infer(model, X=X[n : n + 2]) for n in range(0, 16, 2)))
    np.testing.assert_allclose(np.concatenate([a["OUT"] for a in outputs]), X @ WEIGHTS, rtol=1e-5, atol=1e-6)
    await until(lambda: model.statistics.execution_count)
    statistics = model.statistics.snapshot()
    assert statistics["inference_count"] == 16 and statistics["execution_count"] < 8


@pytest.mark.parametrize(
    "datatype",
    [d for d in DataType if d not in (DataType.BYTES, DataType.BOOL)],
    ids=lambda datatype: datatype.name,
)
async def test_datatypes(serve_files, datatype):
    files = double([-1, 2], openvino.Type.bf16 if datatype is DataType.BF16 else datatype.dtype)
    model = (await serve_files(None, files)).model("model")
    assert DataType.of_message(model.config.input[0]) is datatype
    array = np.array([[1, 2], [3, 4]]).astype(datatype.dtype)
    found = (await infer(model, X=array))["OUT"]
    assert found.dtype == datatype.dtype
    np.testing.assert_array_equal(found.astype(np.float64), 2 * array.astype(np.float64))


async def test_strings(serve_files):
    x = parameter([-1, 2], openvino.Type.string)
    model = (await serve_files(None, ir(x, inputs=[x]))).model("model")
    text = np.array([["a", "grüß"], ["", "c"]], np.object_)
    (given,), (output,) = model.config.input, model.config.output
    found = (await infer(model, **{given.name: text}))[output.name]
    assert found.tolist() == [[b"a", "grüß".encode()], [b"", b"c"]]


async def test_tensors_without_names(serve_files, tmp_path):
    x = openvino.opset13.parameter([-1, 4], np.float32)
    result = openvino.opset13.result(openvino.opset13.add(x, x))
    model = openvino.Model([result], [x], "m")
    for port in (*model.inputs, *model.outputs):
        port.get_tensor().set_names(set())
    openvino.save_model(model, tmp_path / "model.xml")
    files = {name: (tmp_path / name).read_bytes() for name in ("model.xml", "model.bin")}
    served = (await serve_files(None, files)).model("model")
    assert served.config.input[0].name == "INPUT__0"
    found = await infer(served, INPUT__0=X[:2])
    np.testing.assert_array_equal(found["OUTPUT__0"], 2 * X[:2])


async def test_configured_datatypes_are_converted(serve_files):
    config = BACKEND + "max_batch_size: 4\n" + tensors("TYPE_INT32 dims: [ 2 ]", "TYPE_FP16 dims: [ 2 ]")
    model = (await serve_files(config, double([-1, 2]))).model("model")
    found = (await infer(model, X=np.array([[1, 2]], np.int32)))["OUT"]
    assert found.dtype == np.float16 and found.tolist() == [[2, 4]]


async def test_scalars(serve_files):
    model = (await serve_files(None, double([]))).model("model")
    assert list(model.config.input[0].dims) == [1]
    assert (await infer(model, X=np.array([3], np.float32)))["OUT"].tolist() == [6]


async def test_fixed_batch_size_and_padding(serve_files):
    config = BACKEND + "max_batch_size: 2\n" + tensors("TYPE_FP32 dims: [ 2 ]", "TYPE_FP32 dims: [ 2 ]")
    core = await serve_files(config, fixed_batch())
    assert "output 'OUT' has the shape [2, 2] when the inputs have the batch size -1" in reason(core)
    core = await serve_files(config + parameters(SKIP_OV_DYNAMIC_BATCHSIZE="YES"), fixed_batch())
    rows = np.array([[1, 2], [3, 4]], np.float32)
    assert (await infer(core.model("model"), X=rows))["OUT"].tolist() == [[3, 6], [9, 12]]
    with pytest.raises(Exception, match="expected requests with batch size '2', got '1'"):
        await infer(core.model("model"), X=rows[:1])
    core = await serve_files(config + parameters(ENABLE_BATCH_PADDING="yes"), fixed_batch())
    assert (await infer(core.model("model"), X=rows[:1]))["OUT"].tolist() == [[3, 6]]


async def test_reshape_io_layers(serve_files):
    config = BACKEND + tensors("TYPE_FP32 dims: [ -1, 5 ]", "TYPE_FP32 dims: [ -1, 5 ]")
    assert "the model expects 2 dimensions (shape [1,2])" in reason(await serve_files(config, double([1, 2])))
    model = (await serve_files(config + parameters(RESHAPE_IO_LAYERS="yes"), double([1, 2]))).model("model")
    assert (await infer(model, X=np.ones((3, 5), np.float32)))["OUT"].shape == (3, 5)
    core = await serve_files(
        BACKEND
        + tensors("TYPE_FP32 dims: [ 1, 5 ]", "TYPE_FP32 dims: [ 1, 3 ]")
        + parameters(RESHAPE_IO_LAYERS="yes"),
        linear(batch=1),
    )
    assert "the model cannot have inputs of the shape X [1,5]" in reason(core)


async def test_requests_do_not_see_the_state_of_earlier_ones(serve_files):
    model = (await serve_files(None, accumulator())).model("model")
    for _ in range(3):
        assert (await infer(model, X=np.array([2], np.float32)))["OUT"].tolist() == [2]


async def test_onnx_file(serve_files):
    onnx = pytest.importorskip("onnx")
    file = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[n, 3] X) => (float[n, 3] Y) { Y = Mul(X, X) }'
    ).SerializeToString()
    model = (await serve_files(BACKEND, {"model.onnx": file})).model("model")
    assert (model.config.default_model_filename, model.config.max_batch_size) == ("model.onnx", 4)
    assert (await infer(model, X=np.array([[1, 2, 3]], np.float32)))["Y"].tolist() == [[1, 4, 9]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (parameters(NUM_STREAMS="many"), "'NUM_STREAMS' of model 'model' to be AUTO, NUMA or a number"),
        (parameters(INFERENCE_NUM_THREADS="-1"), "to be a non-negative number, got '-1'"),
        (parameters(PERFORMANCE_HINT="FAST"), "to be one of LATENCY, THROUGHPUT, CUMULATIVE_THROUGHPUT"),
        (parameters(HINT_BF16="NO"), "to be YES, got 'NO'"),
        (parameters(ENABLE_BATCH_PADDING="maybe"), "expected true or false"),
        (parameters(NO_SUCH_PROPERTY="1"), "Unsupported property NO_SUCH_PROPERTY by CPU plugin"),
        (parameters(TARGET_DEVICE="NPU"), "on device 'NPU' (available: CPU"),
        (parameters(CPU_EXTENSION_PATH="/no/such.so"), "failed to load 'model.xml'"),
        ("instance_group { kind: KIND_GPU gpus: [ 0 ] }", "supports only KIND_CPU"),
        ("max_batch_size: 2\n" + tensors(x="TYPE_FP32 dims: [ 9 ]"), "tensor 'X': the model expects 2 dim"),
        (
            "max_batch_size: 2 input { name: 'Z' data_type: TYPE_FP32 dims: 4 } "
            "output { name: 'OUT' data_type: TYPE_FP32 dims: 3 }",
            "unexpected inference input 'Z'",
        ),
        ("default_model_filename: 'other.xml'", "unable to find"),
    ],
)
async def test_load_errors(serve_files, config, message):
    assert message in reason(await serve_files(BACKEND + config, linear()))


async def test_broken_file(serve_files):
    message = reason(await serve_files(None, {"model.xml": b"<net"}))
    assert "failed to load 'model.xml': Unable to read the model" in message and "src/" not in message


async def test_properties_of_openvino_are_passed_on(serve_files):
    core = await serve_files(BACKEND + parameters(INFERENCE_PRECISION_HINT="f32"), linear())
    x = np.random.default_rng(2).standard_normal((4, 4)).astype(np.float32)
    found = (await infer(core.model("model"), X=x))["OUT"]
    np.testing.assert_allclose(found, x @ WEIGHTS, rtol=1e-5, atol=1e-6)


async def test_parameters_in_lower_case_belong_to_the_user(serve_files):
    core = await serve_files(BACKEND + parameters(owner="me", CACHE_MODE="OPTIMIZE_SPEED"), linear())
    assert (await infer(core.model("model"), X=X[:1]))["OUT"].shape == (1, 3)


async def test_wrong_shape(serve_files):
    model = (await serve_files(None, linear())).model("model")
    with pytest.raises(Exception, match="unexpected shape for input 'X'"):
        await infer(model, X=np.ones((1, 5), np.float32))
