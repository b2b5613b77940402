"""PyTorch programs in a running core, compared with torch."""

from __future__ import annotations

import asyncio
import io
import logging
import zipfile

import numpy as np
import pytest
from core_requests import collect, infer, parameters, reason
from eventually import until
from torch_models import (
    Accumulator,
    AddSub,
    Identity,
    InPlace,
    Linear,
    Number,
    OfDict,
    Scaled,
    Upper,
    export,
    script,
    torch,
    trace,
)

from neso.backends.pytorch import backend as model_module
from neso.backends.pytorch import backend as settings
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:The given NumPy array is not writable:UserWarning"
)
CONFIG = 'platform: "pytorch_libtorch"\n'
BATCHED = CONFIG + "max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 50000 }\n"
ROWS = {0: torch.export.Dim("rows")}


def tensors(*names: str, kind: str = "input", datatype: str = "FP32", dims: str = "[ -1 ]") -> str:
    return "".join(f"{kind} {{ name: '{name}' data_type: TYPE_{datatype} dims: {dims} }}\n" for name in names)


A, B = np.array([5, 7, 9], np.float32), np.array([1, 2, 4], np.float32)
SUM, DIFF = (A + B).tolist(), (A - B).tolist()


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1")),
        (("Q__1", "P__0"), ("Y__1", "X__0")),  # by index, not by order
        (("a", "b"), ("first", "second")),
        (("b", "a"), ("first", "second")),  # by the arguments of forward
        (("LEFT", "RIGHT"), ("OUTPUT__0", "OUTPUT__1")),  # in order
    ],
)
@pytest.mark.parametrize("form", ["script", "trace", "export"])
async def test_naming_conventions(serve_files, inputs, outputs, form):
    examples = torch.ones(3), torch.ones(3)
    saved = {
        "script": lambda: ("model.pt", script(AddSub())),
        "trace": lambda: ("model.pt", trace(AddSub(), *examples)),
        "export": lambda: ("model.pt2", export(AddSub(), examples)),
    }
    name, data = saved[form]()
    core = await serve_files(CONFIG + tensors(*inputs) + tensors(*outputs, kind="output"), {name: data})
    model = core.model("model")
    assert model.metadata().platform == "pytorch_libtorch"
    assert model.config.default_model_filename == name
    by_position = {"Q__1": B, "P__0": A, "b": B, "a": A}
    arrays = {n: by_position.get(n, (A, B)[i]) for i, n in enumerate(inputs)}
    found = await infer(model, **arrays)
    expected = {"Y__1": DIFF, "X__0": SUM}
    for i, output in enumerate(outputs):
        assert found[output].tolist() == expected.get(output, (SUM, DIFF)[i])


@pytest.mark.parametrize("form", ["model.pt", "model.pt2"])
async def test_requests_are_batched(serve_files, form):
    data = script(Linear()) if form == "model.pt" else export(Linear(), (torch.ones(2, 4),), shapes=(ROWS,))
    config = BATCHED + tensors("x", dims="[ 4 ]") + tensors("OUTPUT__0", kind="output", dims="[ 3 ]")
    model = (await serve_files(config, {form: data})).model("model")
    x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    outputs = await asyncio.gather(*(infer(model, x=x[n : n + 2]) for n in range(0, 16, 2)))
    expected = Linear()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(
        np.concatenate([a["OUTPUT__0"] for a in outputs]), expected, rtol=1e-5, atol=1e-6
    )
    await until(lambda: model.statistics.execution_count)
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"]) == (16, 1)
    assert statistics["batch_stats"][0]["batch_size"] == 16


@pytest.mark.parametrize("datatype", [kind for kind in DataType if kind is not DataType.BYTES])
async def test_all_datatypes(serve_files, datatype):
    kind = datatype.value
    config = (
        CONFIG
        + tensors("x", datatype=kind, dims="[ -1, -1 ]")
        + tensors("y", kind="output", datatype=kind, dims="[ -1, -1 ]")
    )
    model = (await serve_files(config, {"model.pt": script(Identity())})).model("model")
    array = np.array([[0, 1, 2], [3, 4, 100]]).astype(datatype.dtype)
    found = (await infer(model, x=array))["y"]
    assert found.dtype == array.dtype and found.tolist() == array.tolist()


async def test_inputs_are_copied_only_for_programs_that_write_to_them(serve_files):
    config = CONFIG + tensors("x") + tensors("y", kind="output")
    array = np.arange(1000, dtype=np.float32)
    same = (await serve_files(config, {"model.pt": script(Identity())})).model("model")
    assert np.shares_memory((await infer(same, x=array))["y"], array)
    array.flags.writeable = False
    assert np.shares_memory((await infer(same, x=array))["y"], array)
    for files in {"model.pt": script(InPlace())}, {"model.pt2": export(InPlace(), (torch.ones(1000),))}:
        double = (await serve_files(config, files)).model("model")
        assert (await infer(double, x=array))["y"].tolist() == (2 * array).tolist()
        assert array.tolist() == list(range(1000))


@pytest.mark.parametrize("form", ["model.pt", "model.pt2"])
async def test_dictionaries(serve_files, form):
    data = (
        script(OfDict())
        if form == "model.pt"
        else export(OfDict(), ({"A": torch.ones(3), "B": torch.ones(3)},))
    )
    config = CONFIG + tensors("B", "A") + tensors("DIFF", kind="output")
    model = (await serve_files(config, {form: data})).model("model")
    assert {n: a.tolist() for n, a in (await infer(model, A=A, B=B)).items()} == {"DIFF": DIFF}


async def test_keyword_arguments_of_an_export(serve_files):
    class Keywords(torch.nn.Module):
        def forward(self, x, *, scale):
            return {"out": (x * scale, x)}

    data = export(Keywords(), (torch.ones(3),), {"scale": torch.ones(1)})
    config = CONFIG + tensors("scale", "x") + tensors("OUT__0", "OUT__1", kind="output")
    model = (await serve_files(config, {"model.pt2": data})).model("model")
    found = await infer(model, x=A, scale=np.array([2], np.float32))
    assert found["OUT__0"].tolist() == (2 * A).tolist() and found["OUT__1"].tolist() == A.tolist()


@pytest.mark.parametrize("batched", [True, False])
async def test_strings(serve_files, batched):
    dims = "[ 1 ] reshape { shape: [ ] }" if batched else "[ -1 ]"
    config = (BATCHED if batched else CONFIG) + tensors("INPUT__0", datatype="STRING", dims=dims)
    config += tensors("OUTPUT__0", kind="output", datatype="STRING", dims=dims)
    model = (await serve_files(config, {"model.pt": script(Upper())})).model("model")
    words = np.array(["ab", "cö"], np.object_)
    if not batched:
        assert (await infer(model, INPUT__0=words))["OUTPUT__0"].tolist() == [
            b"AB",
            "Cö".encode(),
        ]  # ASCII only
        return
    outputs = await asyncio.gather(
        *(infer(model, INPUT__0=np.array([[w]], np.object_)) for w in ("a", "b", "c"))
    )
    assert [a["OUTPUT__0"].tolist() for a in outputs] == [[[b"A"]], [[b"B"]], [[b"C"]]]
    core = await serve_files(config.replace(dims, "[ 1 ]"), {"model.pt": script(Upper())})
    assert (
        reason(core)
        == "only 1 dimensional List of String is supported as input for 'INPUT__0' for model 'model'"
    )


async def test_optional_arguments(serve_files):
    config = CONFIG + tensors("x") + "input { name: 'scale' data_type: TYPE_FP32 dims: [ 1 ] optional: true }"
    model = (await serve_files(config + tensors("y", kind="output"), {"model.pt": script(Scaled())})).model(
        "model"
    )
    assert (await infer(model, x=A))["y"].tolist() == A.tolist()
    assert (await infer(model, x=A, scale=np.array([3], np.float32)))["y"].tolist() == (3 * A).tolist()


SEQUENCES = """
sequence_batching {
  direct { }
  control_input { name: "START__1" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "STATE__2" output_name: "STATE__1" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""


async def test_sequences(serve_files):
    config = CONFIG + "max_batch_size: 4" + SEQUENCES + "instance_group { count: 2 }"
    config += tensors("INPUT__0", dims="[ 1 ]") + tensors("OUTPUT__0", kind="output", dims="[ 1 ]")
    model = (await serve_files(config, {"model.pt": script(Accumulator())})).model("model")

    async def sequence(number: int) -> list[float]:
        results = []
        for step in range(5):
            inputs = {"INPUT__0": Tensor.from_numpy("INPUT__0", np.array([[number]], np.float32))}
            request = InferenceRequest(
                "model", inputs, sequence_id=number, sequence_start=step == 0, sequence_end=step == 4
            )
            (response,) = await collect(model.submit(request))
            assert response.error is None, response.error
            results.append(float(response.output("OUTPUT__0").array[0, 0]))
        return results

    results = await asyncio.gather(*(sequence(number) for number in range(1, 13)))
    assert results == [[float(n * step) for step in range(1, 6)] for n in range(1, 13)]


async def test_program_errors_fail_the_request(serve_files):
    config = CONFIG + tensors("a", "b") + tensors("OUTPUT__0", kind="output")
    model = (await serve_files(config, {"model.pt": script(AddSub())})).model("model")
    with pytest.raises(
        Exception, match=r"^PyTorch execute failure: RuntimeError: The size of tensor a [^\n]*$"
    ):
        await infer(model, a=A, b=B[:2])
    assert (await infer(model, a=A, b=B))["OUTPUT__0"].tolist() == SUM


async def test_missing_outputs_and_wrong_types(serve_files):
    """Errors of requests, with Triton's messages."""
    files = {"model.pt": script(AddSub())}
    model = (await serve_files(CONFIG + tensors("a", "b") + tensors("OUT__2", kind="output"), files)).model(
        "model"
    )
    with pytest.raises(
        Exception,
        match="The output OUT__2 in the model configuration refers to an output index which doesn't exist",
    ):
        await infer(model, a=A, b=B)
    config = CONFIG + tensors("a", "b") + tensors("OUT__0", kind="output", datatype="INT32")
    model = (await serve_files(config, files)).model("model")
    with pytest.raises(
        Exception,
        match="configuration expects datatype TYPE_INT32 for output 'OUT__0', model provides TYPE_FP32",
    ):
        await infer(model, a=A, b=B)


OUT = tensors("OUT__0", kind="output")


@pytest.mark.parametrize(
    ("config", "module", "message"),
    [
        (
            tensors("a") + OUT,
            AddSub,
            "unable to load model 'model', configuration expects 1 inputs, model provides 2: a, b",
        ),
        (
            tensors("a__0", "b__2") + OUT,
            AddSub,
            "input 'b__2' of model 'model' is argument 2 of forward, which has 2: a, b",
        ),
        (
            tensors("a__0", "b__0") + OUT,
            AddSub,
            "more than one input of model 'model' is argument 'a' of forward",
        ),
        (OUT, AddSub, "model configuration must contain at least one input, none were specified."),
        (
            tensors("a", "b"),
            AddSub,
            "model configuration must contain at least one output, none were specified.",
        ),
        (tensors("x", "n") + OUT, Number, "An input of type 'int' was detected in the model."),
        (
            tensors("a", "b") + OUT + "instance_group { kind: KIND_GPU gpus: 99 }",
            AddSub,
            "needs GPU 99, but torch finds",
        ),
        (
            tensors("a", "b") + OUT + parameters(INFERENCE_MODE="perhaps"),
            AddSub,
            "is 'perhaps', expected true or false",
        ),
    ],
)
async def test_mismatched_configurations_are_rejected(serve_files, config, module, message):
    assert message in reason(await serve_files(CONFIG + config, {"model.pt": script(module())}))


async def test_controls_need_an_index(serve_files):
    config = CONFIG + "max_batch_size: 4" + SEQUENCES.replace("START__1", "START")
    config += tensors("INPUT__0", dims="[ 1 ]") + tensors("OUTPUT__0", kind="output", dims="[ 1 ]")
    core = await serve_files(config, {"model.pt": script(Accumulator())})
    assert reason(core) == "input 'START' does not follow <name>__<index> naming convention."


async def test_missing_or_invalid_files(serve_files):
    config = CONFIG + tensors("a", "b") + OUT
    assert "unable to find '" in reason(await serve_files(config, {"other": b""}))
    assert "failed to load TorchScript 'model.pt': " in reason(
        await serve_files(config, {"model.pt": b"nothing"})
    )
    assert "failed to load exported program 'model.pt2': " in reason(
        await serve_files(config, {"model.pt2": b"nothing"})
    )
    compiled = io.BytesIO()
    with zipfile.ZipFile(compiled, "w") as archive:
        archive.writestr("model/data/aotinductor/model/code.so", b"")
    core = await serve_files(config, {"model.pt2": compiled.getvalue()})
    assert "'model.pt2' is an AOTInductor package, which is not supported" in reason(core)


async def test_parameters(serve_files, caplog):
    """The settings apply to the thread that runs the program."""
    seen = []
    config = CONFIG + tensors("x") + OUT + "instance_group { count: 2 }"
    values = parameters(
        INFERENCE_MODE="false",
        DISABLE_OPTIMIZED_EXECUTION="true",
        ENABLE_NVFUSER="true",
        ENABLE_WEIGHT_SHARING="true",
    )
    real = torch.jit.load
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "load", lambda *a, **k: seen.append(a) or real(*a, **k))
        core = await serve_files(config + values, {"model.pt": script(Identity())})
    assert len(seen) == 1
    assert "model 'model': parameter ENABLE_NVFUSER has no effect" in caplog.text
    assert (await infer(core.model("model"), x=A))["OUT__0"].tolist() == A.tolist()


@pytest.mark.parametrize("value", ["true", "false"])
async def test_inference_mode(serve_files, monkeypatch, value):
    modes = []
    real = model_module.to_torch

    def spy(*arguments, **options):
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return real(*arguments, **options)

    monkeypatch.setattr(model_module, "to_torch", spy)
    config = CONFIG + tensors("x") + OUT + parameters(INFERENCE_MODE=value)
    core = await serve_files(config, {"model.pt": script(Identity())})
    await infer(core.model("model"), x=A)
    assert modes == [(value == "true", False)]


async def test_thread_counts_are_process_wide(serve_files, caplog, monkeypatch):
    monkeypatch.setattr(settings, "_threads", {})
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    config = CONFIG + tensors("a", "b") + OUT
    await serve_files(config + parameters(NUM_THREADS="1"), {"model.pt": script(AddSub())})
    with caplog.at_level(logging.WARNING):
        await serve_files(config + parameters(INTRA_OP_THREAD_COUNT="2"), {"model.pt": script(AddSub())})
    assert chosen == [1, 1]
    assert "INTRA_OP_THREAD_COUNT stays 1, because another model has set it" in caplog.text
