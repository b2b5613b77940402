"""ONNX models in a running core, compared with ONNX Runtime."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from core_requests import collect, infer, parameters, reason
from eventually import until
from onnx_models import T, accumulator, graph, identity, linear, node, onnx

from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor

LINEAR = {"model.onnx": linear()}
CONFIG = 'platform: "onnxruntime_onnx"\n'


def direct(model: bytes, **inputs) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model).run(None, inputs)


def batched(x: str, name: str, output: str) -> str:
    """Return a config with the input X of type and dims `x`, and the output `name` of type and dims `output`."""
    return f"max_batch_size: 2 input {{ name: 'X' {x} }} output {{ name: '{name}' {output} }}"


def typed(datatype: str, dims: str) -> str:
    return f"data_type: TYPE_{datatype} dims: {dims}"


async def test_model_without_config_pbtxt(serve_files):
    model = (await serve_files(None, LINEAR)).model("model")
    config = model.config
    assert (config.backend, config.platform, config.max_batch_size) == ("onnxruntime", "onnxruntime_onnx", 4)
    assert config.HasField("dynamic_batching")
    assert model.metadata().platform == "onnxruntime_onnx"
    assert [(t.name, list(t.dims), t.reshape.shape) for t in config.input] == [("X", [4], [])]
    assert [(t.name, list(t.dims), t.HasField("reshape")) for t in config.output] == [
        ("SUM", [3], False),
        ("TOP", [1], True),
    ]
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    outputs = await infer(model, X=x)
    expected_sum, expected_top = direct(linear(), X=x)
    np.testing.assert_array_equal(outputs["SUM"], expected_sum)
    np.testing.assert_array_equal(outputs["TOP"], expected_top[:, None])


@pytest.mark.parametrize(("size", "batches"), [("7", 7), ("1", 1), ("0", 0)])
async def test_default_max_batch_size(serve_files, size, batches):
    settings = {"onnxruntime": {"default-max-batch-size": size}}
    config = (await serve_files(None, LINEAR, backend_config=settings)).model("model").config
    assert config.max_batch_size == batches
    assert config.HasField("dynamic_batching") == (batches > 1)
    assert list(config.input[0].dims) == ([4] if batches else [-1, 4])


async def test_fixed_first_dimension_disables_batching(serve_files):
    model = (await serve_files(None, {"model.onnx": linear(batch=2)})).model("model")
    assert model.config.max_batch_size == 0 and not model.config.HasField("dynamic_batching")
    assert (await infer(model, X=np.ones((2, 4), np.float32)))["SUM"].shape == (2, 3)
    core = await serve_files(CONFIG + "max_batch_size: 2", {"model.onnx": linear(batch=2)})
    assert reason(core) == (
        "autofill failed for model 'model': model does not support batching while non-zero max_batch_size is specified"
    )


@pytest.mark.parametrize("dims", ["[ 1 ]", "[ 1, 1 ]"])
async def test_scalars_can_be_configured_as_tensors_with_one_element(serve_files, dims):
    model = graph([node("Neg", ["IN"], ["OUT"])], [("IN", T.FLOAT, [])], [("OUT", T.FLOAT, [])])
    tensor = f"data_type: TYPE_FP32 dims: {dims}"
    config = f'platform: "onnxruntime_onnx" input {{ name: "IN" {tensor} }} output {{ name: "OUT" {tensor} }}'
    served = (await serve_files(config, {"model.onnx": model})).model("model")
    value = np.full([1] * dims.count("1"), 3, np.float32)
    outputs = await infer(served, IN=value)
    np.testing.assert_array_equal(outputs["OUT"], -value, strict=True)
    wrong = await serve_files(config.replace("1 ]", "2 ]"), {"model.onnx": model})
    assert "the model expects 0 dimensions" in reason(wrong)


async def test_requests_are_batched(serve_files):
    config = CONFIG + "max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 50000 }"
    model = (await serve_files(config, LINEAR)).model("model")
    x = np.random.default_rng(2).standard_normal((16, 4)).astype(np.float32)
    outputs = await asyncio.gather(*(infer(model, X=x[n : n + 2]) for n in range(0, 16, 2)))
    expected, _ = direct(linear(), X=x)
    np.testing.assert_allclose(np.concatenate([a["SUM"] for a in outputs]), expected, rtol=1e-5)
    await until(lambda: model.statistics.execution_count)
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"]) == (16, 1)
    assert statistics["batch_stats"][0]["batch_size"] == 16


KINDS = {
    DataType.BOOL: T.BOOL,
    DataType.UINT8: T.UINT8,
    DataType.UINT16: T.UINT16,
    DataType.UINT32: T.UINT32,
    DataType.UINT64: T.UINT64,
    DataType.INT8: T.INT8,
    DataType.INT16: T.INT16,
    DataType.INT32: T.INT32,
    DataType.INT64: T.INT64,
    DataType.FP16: T.FLOAT16,
    DataType.FP32: T.FLOAT,
    DataType.FP64: T.DOUBLE,
    DataType.BF16: T.BFLOAT16,
    DataType.BYTES: T.STRING,
}


@pytest.mark.parametrize("datatype", list(DataType))
@pytest.mark.parametrize("shape", [[], [2], ["N", "M"]])
async def test_all_datatypes(serve_files, datatype, shape):
    model = (await serve_files(None, {"model.onnx": identity(KINDS[datatype], shape)})).model("model")
    assert model.signature.inputs["IN"].datatype is datatype
    given = {0: (1,), 1: (2,), 2: (2, 3)}[len(shape)]
    if datatype is DataType.BYTES:
        array = np.full(given, "grüß".encode(), np.object_)
    else:
        array = np.arange(np.prod(given)).reshape(given).astype(datatype.dtype)
    outputs = await infer(model, IN=array)
    assert outputs["OUT"].dtype == array.dtype and outputs["OUT"].tolist() == array.tolist()


async def test_bfloat16_with_other_datatypes(serve_files):
    nodes = [node("Cast", ["A"], ["B"], to=T.BFLOAT16), node("Cast", ["C"], ["D"], to=T.FLOAT)]
    specs = (
        [("A", T.FLOAT, ["N", 2]), ("C", T.BFLOAT16, ["N", 2])],
        [("B", T.BFLOAT16, ["N", 2]), ("D", T.FLOAT, ["N", 2])],
    )
    model = (await serve_files(None, {"model.onnx": graph(nodes, *specs)})).model("model")
    a = np.array([[1, 2.5]], np.float32)
    outputs = await infer(model, A=a, C=(2 * a).astype(ml_dtypes.bfloat16))
    assert outputs["B"].dtype == ml_dtypes.bfloat16 and outputs["B"].tolist() == [[1, 2.5]]
    assert outputs["D"].tolist() == [[2, 5]]


async def test_text_that_is_not_utf_8(serve_files):
    model = (await serve_files(None, {"model.onnx": identity(T.STRING, ["N", 1])})).model("model")
    with pytest.raises(Exception, match="tensor 'IN' holds bytes that are not UTF-8"):
        await infer(model, IN=np.array([[b"\xff"]], np.object_))
    assert (await infer(model, IN=np.array([[b"ok"]], np.object_)))["OUT"].tolist() == [[b"ok"]]


async def test_runtime_error_fails_the_request(serve_files):
    """The model rejects a shape at run time."""
    nodes = [node("Reshape", ["IN", "SHAPE"], ["OUT"])]
    model = graph(
        nodes, [("IN", T.FLOAT, ["N"])], [("OUT", T.FLOAT, [2, 2])], {"SHAPE": np.array([2, 2], np.int64)}
    )
    model = (await serve_files(None, {"model.onnx": model})).model("model")
    with pytest.raises(Exception, match=r"onnx runtime error: .*cannot be reshaped"):
        await infer(model, IN=np.zeros(3, np.float32))
    assert (await infer(model, IN=np.zeros(4, np.float32)))["OUT"].shape == (2, 2)


async def test_optional_inputs(serve_files):
    """Inputs with an initial value in the model."""
    model = graph(
        [node("Mul", ["IN", "FACTOR"], ["OUT"])],
        [("IN", T.FLOAT, ["N", 2]), ("FACTOR", T.FLOAT, ["N", 1])],
        [("OUT", T.FLOAT, ["N", 2])],
        {"FACTOR": np.full((1, 1), 3, np.float32)},
    )
    loaded = (await serve_files(None, {"model.onnx": model})).model("model")
    assert [(t.name, t.optional) for t in loaded.config.input] == [("IN", False), ("FACTOR", True)]
    one = np.ones((1, 2), np.float32)
    assert (await infer(loaded, IN=one))["OUT"].tolist() == [[3, 3]]
    assert (await infer(loaded, IN=one, FACTOR=np.full((1, 1), 5, np.float32)))["OUT"].tolist() == [[5, 5]]


async def test_folder_with_external_data(serve_files, tmp_path):
    proto = onnx.load_from_string(linear(features=64, outputs=64))
    path = tmp_path / "external" / "model.onnx"
    path.parent.mkdir()
    onnx.save_model(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    files = {
        f"model.onnx/{name}": (path.parent / name).read_bytes() for name in ("model.onnx", "weights.bin")
    }
    model = (await serve_files(None, files)).model("model")
    x = np.ones((1, 64), np.float32)
    np.testing.assert_array_equal(
        (await infer(model, X=x))["SUM"], direct(linear(features=64, outputs=64), X=x)[0]
    )


async def test_default_model_filename(serve_files):
    core = await serve_files(CONFIG + 'default_model_filename: "net.bin"', {"net.bin": linear()})
    assert (await infer(core.model("model"), X=np.ones((1, 4), np.float32)))["SUM"].shape == (1, 3)


X, OUT = typed("FP32", "[ 4 ]"), typed("FP32", "[ 3 ]")
UNABLE = "unable to load model 'model', configuration expects datatype"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            batched(X, "SUM", OUT).replace("'X'", "'Y'"),
            "unexpected inference input 'Y', allowed inputs are: X",
        ),
        (batched(X, "Q", OUT), "unexpected inference output 'Q', allowed outputs are: SUM, TOP"),
        (
            batched(typed("INT32", "[ 4 ]"), "SUM", OUT),
            f"{UNABLE} TYPE_INT32 for input 'X', model provides TYPE_FP32",
        ),
        (
            batched(X, "SUM", typed("FP64", "[ 3 ]")),
            f"{UNABLE} TYPE_FP64 for output 'SUM', model provides TYPE_FP32",
        ),
        (
            batched(typed("FP32", "[ 5 ]"), "SUM", OUT),
            "model 'model', tensor 'X': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,5])",
        ),
        (
            batched(X, "SUM", OUT).replace("max_batch_size: 2", ""),
            "model 'model', tensor 'X': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
            "specifies 1 dimensions (shape [4])",
        ),
        (
            "optimization { graph { level: 5 } }",
            "optimization graph level of model 'model' is 5, expected one of -1, 0, 1, 2",
        ),
        (
            "optimization { execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }",
            "model 'model' needs OpenVINOExecutionProvider, this build of onnxruntime has",
        ),
        (
            "optimization { execution_accelerators { cpu_execution_accelerator { name: 'magic' } } }",
            "unknown CPU execution accelerator 'magic' is requested for 'model', expected one of openvino",
        ),
        (
            parameters(intra_op_thread_count="many"),
            "parameter 'intra_op_thread_count' of model 'model' is 'many', expected an integer",
        ),
    ],
)
async def test_mismatched_configurations_are_rejected(serve_files, config, message):
    assert message in reason(await serve_files(CONFIG + config, LINEAR))


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is CUDA")
async def test_kind_gpu_without_cuda(serve_files):
    core = await serve_files(CONFIG + "instance_group { kind: KIND_GPU }", LINEAR)
    assert reason(core).startswith(
        "model 'model' needs CUDAExecutionProvider, this build of onnxruntime has "
    )


async def test_missing_or_invalid_model_files(serve_files):
    assert "unable to find '" in reason(await serve_files(CONFIG, {"other": b""}))
    broken = reason(await serve_files(CONFIG, {"model.onnx": b"this is no model"}))
    assert broken.startswith("onnx runtime error: failed to load 'model.onnx': ")


async def test_missing_inputs_are_completed(serve_files):
    nodes = [node("Add", ["A", "B"], ["C"])]
    model = graph(nodes, [("A", T.FLOAT, [2]), ("B", T.FLOAT, [2])], [("C", T.FLOAT, [2])])
    config = "input { name: 'A' data_type: TYPE_FP32 dims: [2] } output { name: 'C' data_type: TYPE_FP32 dims: [2] }"
    assert reason(await serve_files(CONFIG + config, {"model.onnx": model})) == (
        "unable to load model 'model', configuration expects 1 inputs, model provides 2: A, B"
    )


async def test_non_tensor_outputs_are_left_out(serve_files):
    """They are omitted from the completed configuration and cannot be requested."""
    sequence = onnx.helper.make_tensor_sequence_value_info("LIST", T.FLOAT, None)
    made = onnx.load_from_string(linear())
    made.graph.node.append(node("SequenceConstruct", ["SUM"], ["LIST"]))
    made.graph.output.append(sequence)
    files = {"model.onnx": made.SerializeToString()}
    model = (await serve_files(None, files)).model("model")
    assert [t.name for t in model.config.output] == ["SUM", "TOP"]
    assert (await infer(model, X=np.ones((1, 4), np.float32)))["SUM"].shape == (1, 3)
    config = batched(X, "LIST", OUT)
    assert "unsupported type seq(tensor(float)) of output 'LIST'" in reason(
        await serve_files(CONFIG + config, files)
    )


async def test_settings_are_passed_to_the_runtime(serve_files, monkeypatch):
    """Session options and run options."""
    opened, ran = [], []
    real = onnxruntime.InferenceSession

    class Spy(real):
        def __init__(self, path, options, providers):
            opened.append((options, providers))
            super().__init__(path, options, providers=providers)

        def run(self, names, feeds, options=None):
            ran.append(options)
            return super().run(names, feeds, options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Spy)
    values = {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "session.use_device_allocator_for_initializers": "1",
    }
    config = (
        CONFIG + "instance_group { count: 2 } optimization { graph { level: -1 } }" + parameters(**values)
    )
    values_of_backend = {"onnxruntime": {"intra_op_thread_count": "1", "execution_mode": "0"}}
    core = await serve_files(config, LINEAR, backend_config=values_of_backend)
    await infer(core.model("model"), X=np.ones((1, 4), np.float32))
    assert len(opened) == 3  # one to complete the configuration, and one per instance
    for options, providers in opened[1:]:
        assert providers == ["CPUExecutionProvider"]
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert not options.enable_cpu_mem_arena and not options.enable_mem_pattern
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    for value in ("1", "cpu:0"):
        core = await serve_files(
            CONFIG + parameters(**{"memory.enable_memory_arena_shrinkage": value}), LINEAR
        )
        await infer(core.model("model"), X=np.ones((1, 4), np.float32))
        assert ran[-1].get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"


async def test_instances_share_a_session_if_configured(serve_files, monkeypatch):
    opened = []
    real = onnxruntime.InferenceSession

    class Spy(real):
        def __init__(self, path, options, providers):
            opened.append(options)
            super().__init__(path, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Spy)
    config = CONFIG + "instance_group { count: 3 }" + parameters(share_session_between_instances="true")
    core = await serve_files(config, LINEAR, backend_config={"onnxruntime": {"intra_op_thread_count": "1"}})
    assert len(opened) == 2 and opened[1].intra_op_num_threads == 1
    monkeypatch.undo()
    rows = np.eye(4, dtype=np.float32)
    outputs = await asyncio.gather(*(infer(core.model("model"), X=row[None]) for row in rows))
    np.testing.assert_allclose(
        np.concatenate([a["SUM"] for a in outputs]), direct(linear(), X=rows)[0], rtol=1e-6
    )


SEQUENCES = """
platform: "onnxruntime_onnx"
max_batch_size: 4
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""


@pytest.mark.parametrize("completed", [True, False])
async def test_sequences(serve_files, completed):
    config = SEQUENCES
    if not completed:
        config += f"input {{ name: 'IN' {typed('FP32', '[ 1 ]')} }} output {{ name: 'OUT' {typed('FP32', '[ 1 ]')} }}"
    model = (await serve_files(config, {"model.onnx": accumulator()})).model("model")
    assert [t.name for t in model.config.input] == ["IN"] and [t.name for t in model.config.output] == ["OUT"]

    async def sequence(number: int) -> list[float]:
        results = []
        for step in range(5):
            inputs = {"IN": Tensor.from_numpy("IN", np.array([[number]], np.float32))}
            request = InferenceRequest(
                "model", inputs, sequence_id=number, sequence_start=step == 0, sequence_end=step == 4
            )
            (response,) = await collect(model.submit(request))
            assert response.error is None, response.error
            assert [tensor.name for tensor in response.outputs] == ["OUT"]
            results.append(float(response.output("OUT").array[0, 0]))
        return results

    results = await asyncio.gather(*(sequence(number) for number in range(1, 9)))
    assert results == [[float(n * step) for step in range(1, 6)] for n in range(1, 9)]


async def test_ragged_batches(serve_files):
    """Requests of different lengths share a batch: the model gets all elements and the end of each request."""
    nodes = [
        node("Identity", ["IN"], ["ALL"]),
        node("Cast", ["ENDS"], ["ENDS_OUT"], to=T.FLOAT),
    ]
    model = graph(
        nodes,
        [("IN", T.FLOAT, ["E"]), ("ENDS", T.INT32, ["N"])],
        [("ALL", T.FLOAT, ["E"]), ("ENDS_OUT", T.FLOAT, ["N"])],
    )
    config = """
platform: "onnxruntime_onnx"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 50000 }
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "IN" }
output { name: "ALL" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "ENDS_OUT" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
batch_output { target_name: "ALL" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }
"""
    model = (await serve_files(config, {"model.onnx": model})).model("model")
    rows = [np.arange(1, n + 1, dtype=np.float32)[None] for n in (1, 3, 2)]
    results = await asyncio.gather(*(infer(model, IN=row) for row in rows))
    for row, outputs in zip(rows, results, strict=True):
        np.testing.assert_array_equal(outputs["ALL"], row)
    ends = [outputs["ENDS_OUT"].ravel().tolist() for outputs in results]
    assert ends in ([[1], [4], [6]], [[1], [3], [2]])


async def test_event_loop_is_not_blocked(serve_files):
    """The server handles other requests while a model computes."""
    model = graph(
        [
            node("MatMul", ["X", "X"], ["A"]),
            node("MatMul", ["A", "X"], ["B"]),
            node("MatMul", ["B", "A"], ["OUT"]),
        ],
        [("X", T.FLOAT, ["N", "N"])],
        [("OUT", T.FLOAT, ["N", "N"])],
    )
    settings = {"onnxruntime": {"default-max-batch-size": "0", "intra_op_thread_count": "1"}}
    model = (await serve_files(None, {"model.onnx": model}, backend_config=settings)).model("model")
    running = asyncio.ensure_future(infer(model, X=np.ones((1200, 1200), np.float32)))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 50
    assert (await running)["OUT"].shape == (1200, 1200)
