"""TensorFlow models in a running core."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from core_requests import collect, infer, parameters, reason
from eventually import until
from tensorflow_models import (
    WEIGHTS,
    double,
    graph_def,
    linear,
    running_sum,
    saved_model,
    tagged,
    tensorflow,
    with_variable,
)

from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor

# Not in a process with the tests of NIXL: loading it after TensorFlow aborts, because both define flags of gRPC.
pytestmark = [pytest.mark.slow, pytest.mark.alone]

BACKEND = 'backend: "tensorflow"\n'
GRAPH = 'platform: "tensorflow_graphdef"\n'
X = np.random.default_rng(1).integers(-8, 8, (16, 4)).astype(np.float32)


def tensors(x: str = "TYPE_FP32 dims: [ 4 ]", out: str = "TYPE_FP32 dims: [ 3 ]") -> str:
    return f"input {{ name: 'X' data_type: {x} }} output {{ name: 'OUT' data_type: {out} }}\n"


async def test_saved_model_without_config_pbtxt(serve_files):
    model = (await serve_files(None, linear())).model("model")
    config = model.config
    assert (config.backend, config.platform, config.default_model_filename) == (
        "tensorflow",
        "tensorflow_savedmodel",
        "model.savedmodel",
    )
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (4, True)
    assert [(t.name, list(t.dims)) for t in [*config.input, *config.output]] == [("X", [4]), ("OUT", [3])]
    np.testing.assert_array_equal((await infer(model, X=X[:3]))["OUT"], X[:3] @ WEIGHTS)


async def test_default_max_batch_size(serve_files):
    settings = {"tensorflow": {"default-max-batch-size": "7"}}
    core = await serve_files(None, linear(), backend_config=settings)
    assert core.model("model").config.max_batch_size == 7


async def test_requests_are_batched_on_instances_that_share_sessions(serve_files, monkeypatch):
    from neso.backends.tensorflow import backend

    sessions = []
    open_model = backend.open_model
    monkeypatch.setattr(backend, "open_model", lambda *a: sessions.append(a) or open_model(*a))
    config = (
        BACKEND + "max_batch_size: 16 instance_group { count: 3 kind: KIND_CPU }\n"
        "dynamic_batching { max_queue_delay_microseconds: 50000 }\n"
        + parameters(MAX_SESSION_SHARE_COUNT="2", TF_NUM_INTRA_THREADS="1", TF_USE_PER_SESSION_THREADS="On")
    )
    model = (await serve_files(config, linear())).model("model")
    outputs = await asyncio.gather(*(infer(model, X=X[n : n + 2]) for n in range(0, 16, 2)))
    np.testing.assert_array_equal(np.concatenate([a["OUT"] for a in outputs]), X @ WEIGHTS)
    await until(lambda: model.statistics.execution_count)
    statistics = model.statistics.snapshot()
    assert statistics["inference_count"] == 16 and statistics["execution_count"] < 8
    assert len(sessions) == 2


async def test_signature_by_name(serve_files):
    core = await serve_files(BACKEND + parameters(TF_SIGNATURE_DEF="negative"), linear())
    np.testing.assert_array_equal((await infer(core.model("model"), X=X[:2]))["OUT"], -(X[:2] @ WEIGHTS))


async def test_graph_tag_and_first_signature(serve_files):
    assert "no graph with the tag 'serve', only train" in reason(await serve_files(BACKEND, tagged()))
    core = await serve_files(BACKEND + parameters(TF_GRAPH_TAG="train"), tagged())
    x = np.array([[1, 2]], np.float32)
    assert (await infer(core.model("model"), X=x))["OUT"].tolist() == [[3, 6]]


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES], ids=lambda d: d.name)
async def test_datatypes(serve_files, datatype):
    tf = tensorflow()
    spec = [tf.TensorSpec([None, 2], tf.as_dtype(datatype.dtype), name="X")]
    files = saved_model({"serving_default": (lambda x: {"OUT": tf.reverse(x, [1])}, spec)})
    model = (await serve_files(None, files)).model("model")
    assert DataType.of_message(model.config.input[0]) is datatype
    array = np.array([[1, 0], [0, 1]]).astype(datatype.dtype)
    found = (await infer(model, X=array))["OUT"]
    assert found.dtype == datatype.dtype
    np.testing.assert_array_equal(found.astype(np.float64), array[:, ::-1].astype(np.float64))


async def test_strings(serve_files):
    tf = tensorflow()
    function = (lambda x: {"OUT": tf.strings.join([x, "!"])}, [tf.TensorSpec([None, 2], tf.string, name="X")])
    model = (await serve_files(None, saved_model({"serving_default": function}))).model("model")
    found = (await infer(model, X=np.array([["a", "grüß"], ["", "c"]], np.object_)))["OUT"]
    assert found.tolist() == [[b"a!", "grüß!".encode()], [b"!", b"c!"]]


@pytest.mark.parametrize("dtype", ["float32", "string"])
async def test_scalars(serve_files, dtype):
    model = (await serve_files(None, double([], dtype))).model("model")
    assert list(model.config.input[0].dims) == [1]
    given = np.array([3], np.float32) if dtype == "float32" else np.array([b"ab"], np.object_)
    assert (await infer(model, X=given))["OUT"].tolist() == ([6] if dtype == "float32" else [b"abab"])


async def test_dimension_that_only_the_model_fixes(serve_files):
    config = BACKEND + "max_batch_size: 4\n" + tensors(x="TYPE_FP32 dims: [ -1 ]")
    model = (await serve_files(config, linear())).model("model")
    with pytest.raises(Exception, match="Cannot feed value of shape"):
        await infer(model, X=np.ones((1, 5), np.float32))


async def test_graph_def(serve_files):
    config = (
        GRAPH
        + "max_batch_size: 8\n"
        + tensors()
        + "output { name: 'halves:1' data_type: TYPE_FP32 dims: [ 2 ] }"
    )
    model = (await serve_files(config, graph_def())).model("model")
    assert (model.config.backend, model.config.default_model_filename) == ("tensorflow", "model.graphdef")
    found = await infer(model, X=X[:3])
    np.testing.assert_array_equal(found["OUT"], X[:3] @ WEIGHTS)
    np.testing.assert_array_equal(found["halves:1"], X[:3, 2:])


@pytest.mark.parametrize("folder", [".", ".."])
async def test_init_operations(serve_files, folder):
    config = GRAPH + tensors("TYPE_FP32 dims: [ 1 ]", "TYPE_FP32 dims: [ 1 ]")
    files = with_variable() | {f"{folder}/init.json": b'{"init_ops": ["set"]}'}
    core = await serve_files(config + parameters(TF_INIT_OPS_FILE="init.json"), files)
    assert (await infer(core.model("model"), X=np.array([1], np.float32)))["OUT"].tolist() == [6]
    core = await serve_files(config, with_variable())
    with pytest.raises(Exception, match="uninitialized value v"):
        await infer(core.model("model"), X=np.array([1], np.float32))


async def test_error_of_the_model(serve_files):
    tf = tensorflow()

    def check(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x, message="too small")]):
            return {"OUT": tf.identity(x)}

    spec = [tf.TensorSpec([None, 1], tf.float32, name="X")]
    model = (await serve_files(None, saved_model({"serving_default": (check, spec)}))).model("model")
    with pytest.raises(Exception, match=r"tensorflow error: assertion failed: .*too small"):
        await infer(model, X=np.array([[-1]], np.float32))
    assert (await infer(model, X=np.array([[1]], np.float32)))["OUT"].tolist() == [[1]]


SEQUENCES = """
max_batch_size: 4
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""


async def test_sequences_keep_their_state(serve_files):
    config = GRAPH + SEQUENCES + tensors("TYPE_FP32 dims: [ 1 ]", "TYPE_FP32 dims: [ 1 ]")
    model = (await serve_files(config, running_sum())).model("model")

    async def sequence(number: int) -> list[float]:
        sums = []
        for step in range(4):
            inputs = {"X": Tensor.from_numpy("X", np.full((1, 1), number, np.float32))}
            request = InferenceRequest(
                "model", inputs, sequence_id=number, sequence_start=step == 0, sequence_end=step == 3
            )
            (response,) = await asyncio.wait_for(collect(model.submit(request)), 60)
            assert response.error is None
            sums.append(float(response.outputs[0].array[0, 0]))
        return sums

    results = await asyncio.gather(*(sequence(number) for number in range(1, 5)))
    assert results == [[number * step for step in range(1, 5)] for number in range(1, 5)]


async def test_warm_up(serve_files):
    config = BACKEND + (
        "model_warmup { name: 'zeros' batch_size: 2 "
        "inputs { key: 'X' value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }"
    )
    model = (await serve_files(config, linear())).model("model")
    assert (await infer(model, X=X[:1]))["OUT"].shape == (1, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (parameters(TF_NUM_INTRA_THREADS="-1"), "is -1, expected a non-negative number"),
        (parameters(TF_NUM_INTER_THREADS="many"), "expected an integer"),
        (parameters(TF_USE_PER_SESSION_THREADS="maybe"), "expected true or false"),
        (parameters(TF_NUM_THREADS="1"), "unknown parameter 'TF_NUM_THREADS'"),
        (parameters(MAX_SESSION_SHARE_COUNT="0"), "must be at least 1"),
        (
            parameters(TF_INIT_OPS_FILE="init.json"),
            "does not apply to models of platform tensorflow_savedmodel",
        ),
        (parameters(TF_SIGNATURE_DEF="other"), "no signature 'other', only negative, serving_default"),
        ("platform: 'tensorflow_lite'", "expected tensorflow_savedmodel or tensorflow_graphdef"),
        ("instance_group { kind: KIND_GPU gpus: [ 0 ] }", "supports only KIND_CPU"),
        ("max_batch_size: 2\n" + tensors(x="TYPE_FP32 dims: [ 9 ]"), "tensor 'X': the model expects 2 dim"),
        (
            "max_batch_size: 2\n" + tensors(x="TYPE_INT32 dims: [ 4 ]"),
            "expects datatype TYPE_INT32 for input 'X'",
        ),
        ("default_model_filename: 'other.savedmodel'", "unable to find"),
        (
            "optimization { execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }",
            "execution accelerators are not supported",
        ),
    ],
)
async def test_load_errors(serve_files, config, message):
    assert message in reason(await serve_files(BACKEND + config, linear()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "needs inputs and outputs in its configuration: a GraphDef has no signature"),
        (tensors().replace("'X'", "'Z'"), "its graph has no 'Z'; its placeholders are X"),
        (
            tensors() + parameters(TF_SIGNATURE_DEF="a"),
            "does not apply to models of platform tensorflow_graphdef",
        ),
        (tensors() + parameters(TF_INIT_OPS_FILE="no.json"), "exists neither in the version folder nor"),
        (tensors() + parameters(TF_INIT_OPS_FILE="../../no.json"), "must stay inside the model's folder"),
        (tensors() + parameters(TF_INIT_OPS_FILE="bad.json"), 'must have the form {"init_ops": ["name", …]}'),
        (tensors() + parameters(TF_INIT_OPS_FILE="none.json"), "its graph has no 'none'"),
    ],
)
async def test_load_errors_of_graphs(serve_files, config, message):
    files = graph_def() | {"bad.json": b'["set"]', "none.json": b'{"init_ops": ["none"]}'}
    assert message in reason(await serve_files(GRAPH + "max_batch_size: 2\n" + config, files))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"version": "1"}, "runs TensorFlow 2, got version=1"),
        ({"gpu-memory-fraction": "0.5"}, "gpu-memory-fraction must be 0"),
        ({"gpu-memory-fraction": "half"}, "expected a number"),
    ],
)
async def test_backend_settings_that_are_not_supported(serve_files, setting, message):
    assert message in reason(await serve_files(BACKEND, linear(), backend_config={"tensorflow": setting}))


@pytest.mark.parametrize(
    "files",
    [
        {"model.savedmodel/saved_model.pb": b"\xffno"},
        {"model.savedmodel/x": b""},
        {"model.graphdef": b"\xffno"},
    ],
)
async def test_broken_files(serve_files, files):
    platform = GRAPH + tensors() if "model.graphdef" in files else BACKEND
    assert "cannot read 'model." in reason(await serve_files(platform, files))


def test_session_options():
    tensorflow()
    from neso.backends.tensor import Parameters
    from neso.backends.tensorflow.options import session_config
    from neso.server.config.model_config import ModelConfig

    config = ModelConfig(name="m")
    config.optimization.graph.level = 1
    settings = Parameters(
        config, {"TF_NUM_INTRA_THREADS": "2", "TF_NUM_INTER_THREADS": "3", "TF_USE_PER_SESSION_THREADS": "1"}
    )
    found = session_config(config, settings)
    assert (found.intra_op_parallelism_threads, found.inter_op_parallelism_threads) == (2, 3)
    assert found.use_per_session_threads and found.allow_soft_placement
    levels = []
    for level in (-1, 0, 1, 2):
        config.optimization.graph.level = level
        optimizer = session_config(config, settings).graph_options.optimizer_options
        levels.append(optimizer.GlobalJitLevel.Name(optimizer.global_jit_level))
    assert levels == ["OFF", "DEFAULT", "ON_1", "ON_2"]


def test_the_backend_and_triton_in_one_process():
    pytest.importorskip("triton")
    code = "import neso.backends.tensorflow.backend, triton.language; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert "imported" in done.stdout, done.stderr[-2000:]
