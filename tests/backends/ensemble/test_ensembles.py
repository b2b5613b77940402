"""Ensembles of Python models in a running core."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from core_requests import collect, send_request
from eventually import until
from repository_builder import IDENTITY_TENSORS, REPEAT, REPEAT_TENSORS, RepositoryBuilder

from neso.server.core import Core
from neso.server.errors import Cancelled, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.tensor import Tensor

ADD = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep({seconds})
            total = sum(tensor.as_numpy() for tensor in request.inputs())
            if total.max() > 1000:
                raise pb_utils.TritonModelException("too large")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total + np.float32({plus}))]))
        return responses
"""


def waiting_for(path: Path) -> str:
    """Return a model that writes the file `begun` into its folder and returns its input once `path` exists."""
    wait = f"""
            (Path(pb_utils.get_model_dir()) / "begun").touch()
            end = time.monotonic() + 60
            while not Path({str(path)!r}).exists():
                assert time.monotonic() < end
                time.sleep(0.005)
"""
    code = ADD.format(plus=0, seconds=0).replace("            time.sleep(0)\n", wait.removeprefix("\n"))
    return code.replace("import time\n", "import time\nfrom pathlib import Path\n")


ADD_TENSORS = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] },
        { name: "MORE" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
TO_FLOAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy().astype(np.float32))])
            for r in requests
        ]
"""
TO_FLOAT_TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""


LAST_FIRST = """
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        array = request.inputs()[0].as_numpy().astype(np.float32)
        ended = Path(pb_utils.get_model_dir()) / f"ended{int(array[0])}"
        end = time.monotonic() + 60
        while array[0] < 4 and not ended.with_name(f"ended{int(array[0]) + 1}").exists():
            assert time.monotonic() < end
            time.sleep(0.005)
        ended.touch()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""


SPLIT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    \"\"\"Gives SMALL, and LARGE where there is something large.\"\"\"
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            tensors = [pb_utils.Tensor("SMALL", array[array < 100])]
            if (array >= 100).any():
                tensors.append(pb_utils.Tensor("LARGE", array[array >= 100]))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
SPLIT_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output [ { name: "SMALL" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "LARGE" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f"input_map {{ key: '{k}' value: '{v}' }}" for k, v in inputs.items()]
    maps += [f"output_map {{ key: '{k}' value: '{v}' }}" for k, v in outputs.items()]
    return f"step {{ model_name: '{model}' model_version: -1 {' '.join(maps)} }}"


@pytest.fixture
async def cores():
    running: list[Core] = []
    yield running
    for core in running:
        await core.stop()


class Server:
    """A repository with three adders and further models of a test."""

    def __init__(self, path: Path, cores: list[Core]) -> None:
        self._cores = cores
        self.repository = RepositoryBuilder(path)
        for name, plus, seconds in (("plus1", 1, 0), ("plus10", 10, 0), ("slow", 100, 0.2)):
            self.repository.add(name, ADD.format(plus=plus, seconds=seconds), ADD_TENSORS)

    def add_ensemble(
        self, *steps: str, name: str = "all", tensors: str = IDENTITY_TENSORS, extra: str = ""
    ) -> None:
        folder = self.repository.add(name)
        (folder / "1" / "model.py").unlink()
        scheduling = f"ensemble_scheduling {{ {' '.join(steps)} }}"
        (folder / "config.pbtxt").write_text(f'platform: "ensemble" {tensors} {scheduling} {extra}')

    async def start(self, **options) -> Core:
        core = Core(ServerOptions((self.repository.path,), exit_timeout=1, **options))
        self._cores.append(core)
        await core.start()
        return core


@pytest.fixture
def server(tmp_path: Path, cores: list[Core]) -> Server:
    return Server(tmp_path / "models", cores)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def reason(core: Core, name: str = "all") -> str:
    return next(entry.reason for entry in core.repository_index() if entry.name == name)


async def test_tensors_are_passed_between_steps(server: Server) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "first"}),
        step("plus10", {"IN": "first", "MORE": "IN"}, {"OUT": "OUT"}),
    )
    model = (await server.start()).model("all")
    (response,) = await collect(send_request(model, id="7", IN=floats(1, 2)))
    assert response.error is None and response.final
    assert (response.model_name, response.id) == ("all", "7")
    assert response.output("OUT").array.tolist() == [13, 15]
    assert model.statistics.snapshot()["inference_stats"]["success"]["count"] == 1


async def test_independent_steps_run_concurrently(server: Server) -> None:
    for name, other in (("this", "that"), ("that", "this")):
        server.repository.add(name, waiting_for(server.repository.path / other / "1" / "begun"), ADD_TENSORS)
    server.add_ensemble(
        step("this", {"IN": "IN"}, {"OUT": "a"}),
        step("that", {"IN": "IN"}, {"OUT": "b"}),
        step("plus1", {"IN": "a", "MORE": "b"}, {"OUT": "OUT"}),
    )
    model = (await server.start()).model("all")
    (response,) = await collect(send_request(model, IN=floats(1)))
    assert response.output("OUT").array.tolist() == [3]


async def test_only_steps_of_requested_outputs_run(server: Server) -> None:
    tensors = IDENTITY_TENSORS + 'output { name: "SLOW" data_type: TYPE_FP32 dims: [ -1 ] }'
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "OUT"}),
        step("slow", {"IN": "IN"}, {"OUT": "SLOW"}),
        tensors=tensors,
    )
    core = await server.start()
    before = core.model("slow").statistics.inference_count
    request = InferenceRequest("all", {"IN": Tensor.from_numpy("IN", floats(1))}, requested_outputs=("OUT",))
    (response,) = await collect(core.model("all").submit(request))
    assert [tensor.name for tensor in response.outputs] == ["OUT"]
    assert core.model("slow").statistics.inference_count == before


async def test_omitted_optional_input(server: Server) -> None:
    server.add_ensemble(step("plus1", {"IN": "IN", "MORE": "MORE"}, {"OUT": "OUT"}), tensors=ADD_TENSORS)
    model = (await server.start()).model("all")
    for arrays, expected in (({"IN": floats(1)}, [2]), ({"IN": floats(1), "MORE": floats(5)}, [7])):
        (response,) = await collect(send_request(model, **arrays))
        assert response.output("OUT").array.tolist() == expected


async def test_optional_input_from_a_missing_output(server: Server) -> None:
    """Steps with optional inputs run without it; steps and outputs that require it are omitted."""
    server.repository.add("split", SPLIT, SPLIT_TENSORS)
    outputs = [f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in ("OUT", "LARGE", "MORE")]
    server.add_ensemble(
        step("split", {"IN": "IN"}, {"SMALL": "small", "LARGE": "LARGE"}),
        step("plus1", {"IN": "small", "MORE": "LARGE"}, {"OUT": "OUT"}),
        step("plus10", {"IN": "LARGE"}, {"OUT": "more"}),
        step("slow", {"IN": "more"}, {"OUT": "MORE"}),
        tensors=f'input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} output [ {", ".join(outputs)} ]',
    )
    model = (await server.start()).model("all")
    (response,) = await collect(send_request(model, IN=floats(1, 200)))
    assert {tensor.name: tensor.array.tolist() for tensor in response.outputs} == {
        "OUT": [202],
        "LARGE": [200],
        "MORE": [310],
    }
    (response,) = await collect(send_request(model, IN=floats(1)))
    assert {tensor.name: tensor.array.tolist() for tensor in response.outputs} == {"OUT": [2]}


async def test_missing_required_output_fails_the_request(server: Server) -> None:
    server.repository.add("split", SPLIT, SPLIT_TENSORS)
    server.add_ensemble(
        step("split", {"IN": "IN"}, {"SMALL": "small", "LARGE": "large"}),
        step("plus1", {"IN": "large", "MORE": "small"}, {"OUT": "OUT"}),
    )
    model = (await server.start()).model("all")
    (response,) = await collect(send_request(model, IN=floats(1)))
    assert response.error is not None and "missing required input(s) ['IN']" in response.error.message


async def test_responses_have_sequence_parameters(server: Server) -> None:
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}))
    model = (await server.start()).model("all")
    request = InferenceRequest(
        "all", {"IN": Tensor.from_numpy("IN", floats(1))}, sequence_id=7, sequence_end=True
    )
    (response,) = await collect(model.submit(request))
    assert response.parameters == {"sequence_id": 7, "sequence_start": False, "sequence_end": True}


async def test_steps_after_a_decoupled_step_run_per_response(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.repository.add("repeat", REPEAT, REPEAT_TENSORS)
    server.repository.add("to_float", TO_FLOAT, TO_FLOAT_TENSORS)
    tensors = """
    input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
    """
    for limit in ("", "max_inflight_requests: 1"):
        server.add_ensemble(
            step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
            step("to_float", {"IN": "number"}, {"OUT": "float"}),
            step("slow", {"IN": "IN"}, {"OUT": "late"}),
            step("plus1", {"IN": "float", "MORE": "late"}, {"OUT": "OUT"}),
            tensors=tensors,
            extra="model_transaction_policy { decoupled: true }",
        )
        path = server.repository.path / "all" / "config.pbtxt"
        path.write_text(path.read_text().replace("ensemble_scheduling {", f"ensemble_scheduling {{ {limit}"))
        core = await server.start()
        assert reason(core) == ""
        assert ("'all' configured with max_inflight_requests: 1" in caplog.text) == bool(limit)
        responses = await collect(
            send_request(core.model("all"), COUNT=np.array([5], np.int32), IN=floats(0))
        )
        values = [r.output("OUT").array[0] for r in responses if r.outputs]
        assert values == [101, 102, 103, 104, 105]
        assert all(r.error is None for r in responses)
        # As in Triton: clients of gRPC streams find the end of the request in the last response.
        assert [r.final for r in responses] == [False] * 4 + [True] and not responses[-1].flag_only
        await core.stop()


async def test_responses_are_in_order_if_steps_after_a_decoupled_step_end_in_another_order(
    server: Server,
) -> None:
    """Each execution after the decoupled step waits for the one that begins after it."""
    server.repository.add("repeat", REPEAT, REPEAT_TENSORS)
    server.repository.add("last_first", LAST_FIRST, TO_FLOAT_TENSORS + "instance_group { count: 5 }")
    server.add_ensemble(
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("last_first", {"IN": "number"}, {"OUT": "OUT"}),
        tensors="""
        input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
        """,
    )
    model = (await server.start()).model("all")
    responses = await collect(send_request(model, COUNT=np.array([5], np.int32)))
    assert [r.output("OUT").array[0] for r in responses] == [0, 1, 2, 3, 4]
    assert [r.final for r in responses] == [False] * 4 + [True]


async def test_responses_of_nested_decoupled_steps_are_in_order(server: Server) -> None:
    """The inner step answers as often as its input says, later if that is less."""
    late = REPEAT.replace(
        "        for i in range(count):\n",
        "        import time\n        time.sleep(0.05 * (4 - count))\n        for i in range(count):\n",
    )
    assert late != REPEAT
    server.repository.add("repeat", REPEAT, REPEAT_TENSORS)
    server.repository.add("late", late, REPEAT_TENSORS)
    server.add_ensemble(
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("late", {"COUNT": "number"}, {"OUT": "OUT"}),
        tensors=REPEAT_TENSORS,
    )
    model = (await server.start()).model("all")
    responses = await collect(send_request(model, COUNT=np.array([4], np.int32)))
    assert [int(r.output("OUT").array[0]) for r in responses if r.outputs] == [0, 0, 1, 0, 1, 2]
    assert responses[-1].final


@pytest.mark.parametrize("policy", ["", "model_transaction_policy { decoupled: false }"])
async def test_ensemble_is_decoupled_if_a_step_is(server: Server, policy: str) -> None:
    server.repository.add("repeat", REPEAT, REPEAT_TENSORS)
    server.add_ensemble(step("repeat", {"COUNT": "COUNT"}, {"OUT": "OUT"}), tensors=REPEAT_TENSORS)
    path = server.repository.path / "all" / "config.pbtxt"
    path.write_text(path.read_text().replace("model_transaction_policy { decoupled: true }", policy))
    model = (await server.start()).model("all")
    assert model.decoupled and model.config.model_transaction_policy.decoupled
    responses = await collect(send_request(model, COUNT=np.array([3], np.int32)))
    assert [response.output("OUT").array.tolist() for response in responses[:-1]] == [[0], [1], [2]]
    assert responses[-1].flag_only


async def test_ensemble_without_decoupled_steps_is_not_decoupled(server: Server) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "OUT"}), extra="model_transaction_policy { decoupled: true }"
    )
    model = (await server.start()).model("all")
    assert not model.decoupled and not model.config.model_transaction_policy.decoupled
    (response,) = await collect(send_request(model, IN=floats(1)))
    assert response.final and response.output("OUT").array.tolist() == [2]


async def test_request_fails_after_a_step_has_become_decoupled(server: Server) -> None:
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}))
    core = await server.start(model_control_mode=ModelControlMode.EXPLICIT)
    await core.load_model("all")
    config = server.repository.path / "plus1" / "config.pbtxt"
    config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }")
    await core.load_model("plus1")
    responses = await collect(send_request(core.model("all"), IN=floats(1)))
    if not core.model("all").decoupled:
        (response,) = responses
        assert response.error is not None and "must be loaded again" in response.error.message
        await core.load_model("all")
    assert core.model("all").decoupled


async def test_output_listed_twice_is_one_output(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    twice = IDENTITY_TENSORS + 'output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }'
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}), tensors=twice)
    model = (await server.start()).model("all")
    assert [output.name for output in model.metadata().outputs] == ["OUT"]
    assert "model 'all': its configuration lists output 'OUT' more than once" in caplog.text
    (response,) = await collect(send_request(model, IN=floats(1)))
    assert [tensor.name for tensor in response.outputs] == ["OUT"]


async def test_failing_step_fails_only_its_request(server: Server) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "first"}), step("plus10", {"IN": "first"}, {"OUT": "OUT"})
    )
    model = (await server.start()).model("all")
    bad, good = send_request(model, IN=floats(5000)), send_request(model, IN=floats(1))
    (response,) = await collect(bad)
    assert response.error is not None
    assert "in ensemble 'all', Failed to process" in response.error.message
    assert "too large" in response.error.message
    (response,) = await collect(good)
    assert response.output("OUT").array.tolist() == [12]


async def test_failing_step_counts_as_other_for_the_ensemble(server: Server) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "first"}), step("plus10", {"IN": "first"}, {"OUT": "OUT"})
    )
    core = await server.start()
    await collect(send_request(core.model("all"), IN=floats(5000)))
    failures = {name: core.model(name).statistics.failures for name in ("all", "plus1")}
    assert {reason: count for reason, count in failures["all"].items() if count} == {"OTHER": 1}
    assert {reason: count for reason, count in failures["plus1"].items() if count} == {"BACKEND": 1}


async def test_cancellation_is_passed_to_the_steps(server: Server) -> None:
    folder = server.repository.path / "held" / "1"
    server.repository.add("held", waiting_for(folder / "go"), ADD_TENSORS)
    server.add_ensemble(step("held", {"IN": "IN"}, {"OUT": "a"}), step("plus1", {"IN": "a"}, {"OUT": "OUT"}))
    core = await server.start()
    stream = send_request(core.model("all"), IN=floats(1))
    await until((folder / "begun").exists)
    stream.cancel()
    (response,) = await asyncio.wait_for(collect(stream), 60)
    assert isinstance(response.error, Cancelled)
    (folder / "go").touch()
    await until(lambda: core.model("held").in_flight_count == 0)
    assert {reason: count for reason, count in core.model("all").statistics.failures.items() if count} == {
        "CANCELED": 1
    }
    assert core.model("plus1").statistics.inference_count == 0


async def test_loading_an_ensemble_loads_its_steps(server: Server) -> None:
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}))
    core = await server.start(model_control_mode=ModelControlMode.EXPLICIT)
    await core.load_model("all")
    assert {model.name for model in core.models()} == {"all", "plus1"}
    assert core.model("all").ready()
    await core.unload_model("plus1")
    assert reason(core) == "ensemble 'all' depends on 'plus1' which has no loaded version."
    assert core.models() == [] and core.ready()
    with pytest.raises(Unavailable, match="'all' has no available versions"):
        core.model("all")
    await core.load_model("plus1")
    (response,) = await collect(send_request(core.model("all"), IN=floats(1)))
    assert response.error is None


async def test_unload_dependents_unloads_steps_that_are_not_used_elsewhere(
    server: Server,
) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "a"}), step("plus10", {"IN": "a"}, {"OUT": "OUT"}), name="both"
    )
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}), name="one")
    core = await server.start(model_control_mode=ModelControlMode.EXPLICIT, startup_models=("both", "one"))
    await core.unload_model("both", unload_dependents=True)
    assert {model.name for model in core.models()} == {"one", "plus1"}
    await core.unload_model("one")
    assert {model.name for model in core.models()} == {"plus1"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([step("nope", {"IN": "IN"}, {"OUT": "OUT"})], "depends on 'nope' which has no loaded version"),
        ([step("plus1", {"WHAT": "IN"}, {"OUT": "OUT"})], "model 'plus1' has no input 'WHAT'"),
        ([step("plus1", {"IN": "IN"}, {"WHAT": "OUT"})], "model 'plus1' has no output 'WHAT'"),
        ([step("plus1", {"MORE": "IN"}, {"OUT": "OUT"})], "needs the input 'IN'"),
        ([step("all", {"IN": "IN"}, {"OUT": "OUT"})], "in a cycle: all -> all"),
        ([step("plus1", {"IN": "x"}, {"OUT": "OUT"})], "is neither an input of the ensemble"),
    ],
)
async def test_invalid_ensemble_is_unavailable(server: Server, steps: list[str], message: str) -> None:
    server.add_ensemble(*steps)
    core = await asyncio.wait_for(server.start(), 60)
    assert message in reason(core)
    assert core.model("plus1").ready()


async def test_cyclic_ensembles_do_not_deadlock(server: Server) -> None:
    server.add_ensemble(step("other", {"IN": "IN"}, {"OUT": "OUT"}))
    server.add_ensemble(step("all", {"IN": "IN"}, {"OUT": "OUT"}), name="other")
    core = await asyncio.wait_for(server.start(), 60)
    assert "in a cycle" in reason(core) + reason(core, "other")
    assert not any(model.name in ("all", "other") for model in core.models())


async def test_nested_ensembles(server: Server) -> None:
    server.add_ensemble(step("plus1", {"IN": "IN"}, {"OUT": "OUT"}), name="inner")
    server.add_ensemble(step("inner", {"IN": "IN"}, {"OUT": "a"}), step("inner", {"IN": "a"}, {"OUT": "OUT"}))
    (response,) = await collect(send_request((await server.start()).model("all"), IN=floats(1)))
    assert response.output("OUT").array.tolist() == [3]


SHAPES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    \"\"\"Returns its input, and the number of dimensions that it has.\"\"\"
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", array),
                pb_utils.Tensor("RANK", np.full(array.shape, array.ndim, np.int32)),
            ])
            for array in arrays
        ]
"""
SHAPES_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "RANK" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
RANKS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output [
  { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "FIRST" data_type: TYPE_INT32 dims: [ 2 ] },
  { name: "SECOND" data_type: TYPE_INT32 dims: [ 2 ] }
]
"""


@pytest.mark.parametrize("ensemble_batches", [False, True])
@pytest.mark.parametrize("first_batches", [False, True])
@pytest.mark.parametrize("second_batches", [False, True])
async def test_batch_dimension_is_added_and_removed_between_steps(
    server: Server, ensemble_batches: bool, first_batches: bool, second_batches: bool
) -> None:
    for name, batches in (("first", first_batches), ("second", second_batches)):
        server.repository.add(name, SHAPES, f"max_batch_size: {4 * batches} {SHAPES_TENSORS}")
    server.add_ensemble(
        step("first", {"IN": "IN"}, {"OUT": "a", "RANK": "FIRST"}),
        step("second", {"IN": "a"}, {"OUT": "OUT", "RANK": "SECOND"}),
        tensors=f"max_batch_size: {4 * ensemble_batches} {RANKS}",
    )
    model = (await server.start()).model("all")
    row = floats(1, 2)
    given = row[None] if ensemble_batches else row
    (response,) = await collect(send_request(model, IN=given))
    assert response.error is None, response.error
    assert response.output("OUT").array.tolist() == given.tolist()
    assert (response.output("FIRST").array == 1 + first_batches).all()
    assert (response.output("SECOND").array == 1 + second_batches).all()
    assert {tensor.shape for tensor in response.outputs} == {given.shape}


async def test_batch_size_above_one_does_not_fit_a_step_without_batching(server: Server) -> None:
    server.repository.add("single", SHAPES, SHAPES_TENSORS)
    server.add_ensemble(
        step("single", {"IN": "IN"}, {"OUT": "OUT"}),
        tensors="max_batch_size: 4 " + IDENTITY_TENSORS.replace("-1", "2"),
    )
    model = (await server.start()).model("all")
    (response,) = await collect(send_request(model, IN=np.ones((2, 2), np.float32)))
    assert response.error is not None and "unexpected shape for input 'IN'" in response.error.message


@pytest.mark.parametrize(
    ("tensors", "step_batches", "message"),
    [
        (
            IDENTITY_TENSORS.replace("TYPE_FP32", "TYPE_INT32"),
            False,
            "ensemble tensor 'IN': inconsistent data type: TYPE_INT32 is inferred from model 'all' while TYPE_FP32 "
            "is inferred from model 'single'",
        ),
        (
            IDENTITY_TENSORS.replace("-1", "3"),
            False,
            "ensemble tensor 'IN': inconsistent shape: [3] is inferred from model 'all' while [2] is inferred from "
            "model 'single'",
        ),
        (IDENTITY_TENSORS.replace("-1", "-1, 2"), False, "inconsistent shape: [-1, 2]"),
        (
            "max_batch_size: 4 " + IDENTITY_TENSORS.replace("-1", "-1, 2"),
            True,
            "inconsistent shape: [-1, -1, 2]",
        ),
        (IDENTITY_TENSORS, False, ""),
        (IDENTITY_TENSORS.replace("-1", "-1, 2"), True, ""),
        ("max_batch_size: 4 " + IDENTITY_TENSORS.replace("-1", "2"), False, ""),
    ],
)
async def test_datatypes_and_shapes_of_connected_tensors_are_checked_at_load(
    server: Server, tensors: str, step_batches: bool, message: str
) -> None:
    server.repository.add("single", SHAPES, f"max_batch_size: {4 * step_batches} {SHAPES_TENSORS}")
    server.add_ensemble(step("single", {"IN": "IN"}, {"OUT": "OUT"}), tensors=tensors)
    core = await server.start()
    assert core.model_ready("all") == (not message)
    assert message in reason(core)


async def test_shapes_of_tensors_between_steps_are_checked_at_load(server: Server) -> None:
    for name, size in (("first", 2), ("second", 3)):
        server.repository.add(name, SHAPES, SHAPES_TENSORS.replace("[ 2 ]", f"[ {size} ]"))
    server.add_ensemble(
        step("first", {"IN": "IN"}, {"OUT": "a"}), step("second", {"IN": "a"}, {"OUT": "OUT"})
    )
    core = await server.start()
    assert "tensor 'a': inconsistent shape: [2]" in reason(core)


async def test_steps_must_allow_the_batches_of_the_ensemble(server: Server) -> None:
    server.repository.add("two", SHAPES, "max_batch_size: 2" + SHAPES_TENSORS)
    server.add_ensemble(
        step("two", {"IN": "IN"}, {"OUT": "OUT"}),
        tensors="max_batch_size: 3 " + IDENTITY_TENSORS.replace("-1", "2"),
    )
    core = await server.start()
    assert "'all' allows maximum batch size 3, but it contains model 'two' which only allows" in reason(core)


@pytest.mark.parametrize("joined", [True, False])
async def test_tensors_of_independent_decoupled_steps_cannot_be_joined(server: Server, joined: bool) -> None:
    server.repository.add("repeat", REPEAT, REPEAT_TENSORS)
    server.repository.add("to_float", TO_FLOAT, TO_FLOAT_TENSORS)
    server.add_ensemble(
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "one"}),
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "two"}),
        step("to_float", {"IN": "one"}, {"OUT": "a"}),
        step("to_float", {"IN": "two"}, {"OUT": "b" if joined else "OUT"}),
        *([step("plus1", {"IN": "a", "MORE": "b"}, {"OUT": "OUT"})] if joined else []),
        tensors="""
        input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
        output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "one" data_type: TYPE_INT32 dims: [ 1 ] } ]
        """,
    )
    model = "plus1" if joined else "all"
    message = f"step of model '{model}' receives inputs originated from different decoupled models"
    assert message in reason(await server.start())


LABELLED = """
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }
"""


async def test_classification_uses_labels_of_the_step(server: Server) -> None:
    folder = server.repository.add("classify", config=LABELLED)
    (folder / "labels.txt").write_text("cat\ndog\n")
    tensors = LABELLED.replace('label_filename: "labels.txt"', "")
    server.add_ensemble(step("classify", {"IN": "IN"}, {"OUT": "OUT"}), name="inner", tensors=tensors)
    server.add_ensemble(step("inner", {"IN": "IN"}, {"OUT": "OUT"}), tensors=tensors)
    server.add_ensemble(step("inner", {"IN": "IN"}, {"OUT": "OUT"}), name="renamed", tensors=LABELLED)
    (server.repository.path / "renamed" / "labels.txt").write_text("chat\nchien\n")
    core = await server.start()
    for name, expected in (("inner", b"dog"), ("all", b"dog"), ("renamed", b"chien")):
        request = InferenceRequest(
            name, {"IN": Tensor.from_numpy("IN", floats(0, 1))}, classification={"OUT": 1}
        )
        (response,) = await collect(core.model(name).submit(request))
        assert response.output("OUT").array.tolist() == [b"1.000000:1:" + expected]


async def test_statistics_are_sums_of_the_steps(server: Server) -> None:
    server.add_ensemble(
        step("plus1", {"IN": "IN"}, {"OUT": "a"}),
        step("plus10", {"IN": "a"}, {"OUT": "OUT"}),
        name="inner",
    )
    server.add_ensemble(step("inner", {"IN": "IN"}, {"OUT": "a"}), step("slow", {"IN": "a"}, {"OUT": "OUT"}))
    core = await server.start()
    model = core.model("all")
    stream = send_request(model, IN=floats(1))
    assert model.pending_count == 0
    await collect(stream)
    found = {name: core.model(name).statistics.snapshot() for name in ("all", "plus1", "plus10", "slow")}
    for stage in ("compute_input", "compute_infer", "compute_output"):
        durations = {name: stats["inference_stats"][stage]["ns"] for name, stats in found.items()}
        steps = durations["plus1"] + durations["plus10"] + durations["slow"]
        assert 0 < steps <= durations["all"]
        (batch,) = found["all"]["batch_stats"]
        assert batch[stage] == {"count": 1, "ns": durations["all"]}
    stats = found["all"]["inference_stats"]
    compute = sum(stats[f"compute_{stage}"]["ns"] for stage in ("input", "infer", "output"))
    assert compute + stats["queue"]["ns"] <= stats["success"]["ns"]
