"""Loading, replacing and unloading models."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from core_requests import collect, index_of, send_request, send_slow_request
from eventually import until
from repository_builder import IDENTITY, IDENTITY_TENSORS, RepositoryBuilder

from neso.server.backend import BUILTIN
from neso.server.core import Core
from neso.server.errors import (
    Cancelled,
    ErrorCode,
    InternalError,
    InvalidArgument,
    NotFound,
    ServerError,
    Unavailable,
    Unsupported,
)
from neso.server.metadata import IndexEntry, ModelState
from neso.server.options import ModelControlMode, ServerOptions


async def test_models_of_a_repository_are_ready(repository, start_core):
    repository.add_standard()
    core = await start_core()
    assert core.live() and core.ready()
    assert [model.name for model in core.models()] == ["identity", "repeat", "slow"]
    assert index_of(core, "identity") == [IndexEntry("identity", "1", ModelState.READY)]
    (response,) = await collect(
        send_request(core.model("identity"), id="7", IN=np.arange(3, dtype=np.float32))
    )
    assert (response.model_name, response.model_version, response.id) == ("identity", "1", "7")
    assert response.final and response.output("OUT").array.tolist() == [0, 1, 2]


async def test_decoupled_model_streams(repository, start_core):
    repository.add_standard()
    core = await start_core()
    responses = await collect(send_request(core.model("repeat"), COUNT=np.array([3], np.int32)))
    assert [r.output("OUT").array[0] for r in responses[:3]] == [0, 1, 2]
    assert [r.final for r in responses] == [False, False, False, True]
    assert responses[3].flag_only


async def test_unknown_models_and_versions(repository, start_core):
    repository.add("identity")
    core = await start_core(explicit=True, startup_models=("identity",))
    for name, version, error, message in [
        ("nope", "", NotFound, "Request for unknown model: 'nope' is not found"),
        ("identity", "7", NotFound, "Request for unknown model: 'identity' version 7 is not found"),
        ("identity", "x", InvalidArgument, "failed to get model version from specified version string 'x'"),
    ]:
        with pytest.raises(error) as raised:
            core.model(name, version)
        assert raised.value.message.startswith(message)
    await core.unload_model("identity")
    with pytest.raises(Unavailable, match="'identity' has no available versions"):
        core.model("identity")
    with pytest.raises(Unavailable, match="'identity' version 1 is not at ready state"):
        core.model("identity", "1")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("fooo: 3", '2:1 : Message type "inference.ModelConfig" has no field named "fooo"'),
        ('name: "other"', "unexpected directory name 'broken' for model 'other'"),
        ("max_batch_size: -1", "'max_batch_size' must be non-negative"),
        ("input { name: 'A' data_type: TYPE_INT8 dims: [0] }", "dimension must be integer >= 1"),
        ("input { name: 'A' dims: [1] }", "must specify 'data_type'"),
        ("input { data_type: TYPE_INT8 dims: [1] }", "must specify 'name'"),
        (
            "output { name: 'A' data_type: TYPE_INT8 dims: [1] } output { name: 'A' data_type: TYPE_INT8 dims: [2] }",
            "model output 'A' is specified more than once",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
            "must be <= max batch size for broken",
        ),
        (
            "sequence_batching { control_input { name: 'A' control { kind: CONTROL_SEQUENCE_END } } }",
            "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_END",
        ),
        (
            "sequence_batching { control_input { name: 'A' control { fp32_false_true: [1] } } }",
            "'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START",
        ),
        (
            "sequence_batching { state { input_name: 'A' output_name: 'B' data_type: TYPE_FP32 dims: 2 "
            "initial_state { data_type: TYPE_FP32 dims: 3 zero_data: true } } }",
            "initial_state of 'A' has other dims",
        ),
        (
            "sequence_batching { state { input_name: 'A' output_name: 'B' data_type: TYPE_FP32 dims: 2 "
            "initial_state { data_type: TYPE_FP32 dims: 2 data_file: 'none' } } }",
            "failed to read initial state 'A'",
        ),
        *(
            (
                "sequence_batching { state { input_name: 'A' output_name: 'B' data_type: TYPE_FP32 dims: 2 "
                f"initial_state {{ data_type: TYPE_FP32 dims: 2 data_file: '{file}' }} }} }}",
                f"data_file '{file}' of state 'A' must stay inside the model's folder",
            )
            for file in ("../config.pbtxt", "/etc/hostname")
        ),
        ("version_policy { specific { versions: [4] } }", "requested 4, found 1"),
        (
            "input { name: 'A' data_type: TYPE_INT8 dims: [4] reshape { shape: [3] } }",
            "different size for dims and reshape",
        ),
        (
            "input { name: 'A' data_type: TYPE_INT8 dims: [2, -1, 3] reshape { shape: [3, -1, 2] } }",
            "different size for dims and reshape",
        ),
        (
            "input { name: 'A' data_type: TYPE_INT8 dims: [-1] reshape { shape: [-1, -1] } }",
            "different number of variable-size dimensions",
        ),
        (
            "input { name: 'A' data_type: TYPE_INT8 dims: [1] reshape { shape: [1, 0] } }",
            "model input 'A' reshape dimensions must be integer >= 1",
        ),
    ],
)
async def test_an_invalid_configuration_affects_only_its_model(repository, start_core, config, reason):
    repository.add("identity")
    repository.add("broken", config=config)
    core = await start_core()
    (entry,) = index_of(core, "broken")
    assert entry.state is ModelState.UNAVAILABLE and reason in entry.reason
    assert core.live() and not core.ready()
    assert core.model("identity").ready()
    with pytest.raises(Unavailable):
        core.model("broken")


async def test_readiness_without_strict_readiness(repository, start_core):
    repository.add("broken", config="fooo: 3")
    assert (await start_core(strict_readiness=False)).ready()


async def test_unknown_backends(repository, start_core):
    (repository.add("other") / "config.pbtxt").write_text('backend: "dali"')
    (repository.add("ensemble") / "config.pbtxt").write_text('platform: "ensemble"')
    core = await start_core()
    assert "unable to find backend 'dali'" in index_of(core, "other")[0].reason
    assert "ensemble scheduling must be set for ensemble" in index_of(core, "ensemble")[0].reason


async def test_backend_import_error(repository, start_core, monkeypatch):
    monkeypatch.setitem(BUILTIN, "odd", "no_such_package:Backend")
    (repository.add("odd") / "config.pbtxt").write_text('backend: "odd"')
    repository.add("identity")
    core = await start_core()
    assert (
        index_of(core, "odd")[0].reason == "unable to load backend 'odd': No module named 'no_such_package'"
    )
    assert core.model("identity").ready()


async def test_a_model_that_fails_to_initialize(repository, start_core):
    repository.add(
        "failing",
        """
        class TritonPythonModel:
            def initialize(self, args):
                raise RuntimeError("no weights")
            def execute(self, requests):
                return []
        """,
    )
    core = await start_core()
    (entry,) = index_of(core, "failing")
    assert (entry.version, entry.state) == ("1", ModelState.UNAVAILABLE)
    assert entry.reason == "RuntimeError: no weights"


async def test_configuration_is_optional(repository, start_core):
    code = (
        IDENTITY
        + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config
"""
    )
    (repository.add("bare", code) / "config.pbtxt").unlink()
    core = await start_core()
    metadata = core.model("bare").metadata()
    assert (metadata.platform, metadata.versions) == ("python", ["1"])
    assert [(t.name, t.datatype, t.shape) for t in metadata.inputs] == [("IN", "FP32", (-1,))]


COMPLETED = """
    @staticmethod
    def auto_complete_config(config):
        {statement}
        return config
"""


async def test_auto_completion_fills_in_what_tensors_lack(repository, start_core):
    add = 'config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})'
    config = """
        input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "OUT" }
    """
    repository.add("m", IDENTITY + COMPLETED.replace("{statement}", add), config)
    core = await start_core()
    assert [(t.name, t.datatype, t.shape) for t in core.model("m").metadata().outputs] == [
        ("OUT", "FP32", (4,))
    ]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("pass", "model output 'OUT' must specify 'dims'"),
        (
            "config.set_max_batch_size(1)",
            "configuration specified max_batch_size 4, but in auto-complete-config",
        ),
        (
            "config.set_dynamic_batching()",
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for "
            "model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        ("return 1", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        (
            "config.add_input({'name': 'IN'})",
            "input 'IN' in auto-complete-config function for model 'm' is missing 'data_type' property.",
        ),
        (
            "config.add_output({'dims': [1]})",
            "output in auto-complete-config function for model 'm' is missing 'name' property.",
        ),
        (
            "config.add_output({'name': 'OUT', 'data_type': 'TYPE_FP32', 'dims': [1], 'optional': True})",
            "contains property other than 'name', 'data_type' and 'dims'.",
        ),
        (
            "config.add_input({'name': 'IN', 'data_type': 'TYPE_INT8', 'dims': [1]})",
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'IN', model provides "
            "TYPE_INT8",
        ),
        (
            "config.add_input({'name': 'IN', 'data_type': 'TYPE_FP32', 'dims': [1]})",
            "model 'm', tensor 'IN': the model expects dims [1] but the model configuration specifies dims [4]",
        ),
        (
            "config.set_model_transaction_policy({'x': 1})",
            "model transaction property in auto-complete-config function for model 'm' contains property other than "
            "'decoupled'",
        ),
    ],
)
async def test_failed_auto_completion_has_the_message_of_triton(repository, start_core, statement, reason):
    batching = "" if statement == "pass" else "max_batch_size: 4 sequence_batching { }"
    config = f"""
        {batching}
        input {{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }}
        output {{ name: "OUT" data_type: TYPE_FP32 }}
    """
    repository.add("m", IDENTITY + COMPLETED.replace("{statement}", statement), config)
    core = await start_core()
    (entry,) = index_of(core, "m")
    assert entry.state is ModelState.UNAVAILABLE and reason in entry.reason


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["3", "10"]),
        ("version_policy { all { } }", ["1", "3", "10"]),
        ("version_policy { specific { versions: [1, 3] } }", ["1", "3"]),
    ],
)
async def test_version_policies(repository, start_core, policy, served):
    repository.add("m", config=IDENTITY_TENSORS + policy, versions=("1", "3", "10", "007", "x", "0"))
    core = await start_core()
    assert [model.version for model in core.models()] == served
    assert core.model("m").version == served[-1]
    assert core.model("m").metadata().versions == served


async def test_several_repositories(repository, start_core, tmp_path):
    other = RepositoryBuilder(tmp_path / "other")
    repository.add("a")
    repository.add("twice")
    other.add("b")
    other.add("twice")
    core = await start_core(model_repository=(repository.path, other.path))
    assert [model.name for model in core.models()] == ["a", "b"]
    assert index_of(core, "twice")[0].reason == "model appears in two or more repositories"


async def test_a_repository_must_exist(tmp_path):
    with pytest.raises(NotFound):
        await Core(ServerOptions((tmp_path / "nope",))).start()


async def test_load_and_unload_need_explicit_control(repository, start_core):
    repository.add("identity")
    core = await start_core()
    for work in (core.load_model("identity"), core.unload_model("identity")):
        with pytest.raises(
            Unavailable, match="explicit model load / unload is not allowed if polling is enabled"
        ):
            await work


def test_unsupported_options_are_rejected():
    with pytest.raises(InvalidArgument, match="explicit"):
        ServerOptions(startup_models=("a",))
    with pytest.raises(InvalidArgument, match="must be the ONLY startup model"):
        ServerOptions(model_control_mode=ModelControlMode.EXPLICIT, startup_models=("*", "a"))
    for options in (
        {"repository_poll_secs": -1},
        {"model_load_thread_count": 0},
        {"max_call_backlog": 1},
        {"call_backlog_timeout": float("inf")},
        {"model_load_retry_count": -1},
        {"model_config_name": "../config"},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            ServerOptions(**options)


async def test_load_and_unload(repository, start_core):
    repository.add("identity")
    core = await start_core(explicit=True)
    assert core.ready() and core.models() == []
    assert index_of(core, "identity") == [IndexEntry("identity")]
    await core.load_model("identity")
    assert core.model("identity").ready()
    await core.unload_model("identity")
    assert index_of(core, "identity") == [IndexEntry("identity", "1", ModelState.UNAVAILABLE, "unloaded")]
    assert core.ready()
    await core.unload_model("never-heard-of")
    await core.load_model("identity")
    assert core.model("identity").ready()


@pytest.mark.parametrize("name", ["../models/identity", "", "..", ".", "a/b", "a\\b", "/etc"])
async def test_names_cannot_leave_the_repository(repository, start_core, name):
    repository.add("identity")
    core = await start_core(explicit=True)
    with pytest.raises(InvalidArgument, match=r"[Mm]odel name"):
        await core.load_model(name)


async def test_loading_an_unknown_model(start_core):
    core = await start_core(explicit=True)
    with pytest.raises(ServerError, match="failed to load 'nope', failed to poll from model repository"):
        await core.load_model("nope")


async def test_load_with_a_configuration_and_files(repository, start_core):
    repository.add("identity")
    core = await start_core(explicit=True)
    config = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": ["-1"]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    await core.load_model("identity", json.dumps(config))
    assert core.model("identity").config.max_batch_size == 2
    await core.load_model("made", json.dumps(config), {"file:5/model.py": IDENTITY.encode()})
    model = core.model("made", "5")
    (response,) = await collect(send_request(model, IN=np.ones((2, 1), np.float32)))
    assert response.output("OUT").shape == (2, 1)
    await core.load_model("rooted", json.dumps(config), {"file:/1/model.py": IDENTITY.encode()})
    assert core.model("rooted").ready()
    failed = "failed to load '{}', failed to poll from model repository: .*{}"
    with pytest.raises(InvalidArgument, match=failed.format("made", "requires the model config")):
        await core.load_model("made", files={"1/model.py": b""})
    for path in ("../model.py", "file:/../model.py", "file:1/../../model.py", "file:/", "file:"):
        with pytest.raises(InvalidArgument, match=failed.format("made", "must stay inside")):
            await core.load_model("made", json.dumps(config), {path: b""})
    with pytest.raises(InvalidArgument, match=failed.format("identity", "failed to parse")):
        await core.load_model("identity", "{")


async def test_reload_does_not_drop_requests_in_flight(repository, start_core):
    repository.add_standard()
    core = await start_core(explicit=True, startup_models=("slow",))
    old = core.model("slow")
    stream = send_slow_request(old)
    repository.add("slow", IDENTITY)
    await core.load_model("slow")
    new = core.model("slow")
    assert new is not old
    (response,) = await collect(send_request(new, IN=np.zeros(1, np.float32)))
    assert response.error is None
    (response,) = await collect(send_request(old, IN=np.zeros(1, np.float32)))  # passed on to the successor
    assert response.error is None and new.statistics.success.count == 2
    (repository.path / "slow" / "1" / "go").touch()
    (response,) = await collect(stream)
    assert response.error is None and response.output("OUT").array.tolist() == [1, 1]


async def test_a_failed_reload_keeps_the_loaded_versions(repository, start_core):
    repository.add("identity")
    core = await start_core(explicit=True, startup_models=("identity",))
    repository.add("identity", "import no_such_module")
    with pytest.raises(ServerError, match=r"load failed for model 'identity': .*no_such_module"):
        await core.load_model("identity")
    (response,) = await collect(send_slow_request(core.model("identity")))
    assert response.error is None
    (repository.path / "identity" / "config.pbtxt").write_text("fooo")
    with pytest.raises(ServerError) as raised:
        await core.load_model("identity")
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert core.model("identity").ready()


async def test_a_reload_that_drops_a_version_unloads_it(repository, start_core):
    repository.add("m", config=IDENTITY_TENSORS + "version_policy { all { } }", versions=("1", "2"))
    core = await start_core(explicit=True, startup_models=("m",))
    repository.add("m", versions=())
    await core.load_model("m")
    assert [model.version for model in core.models()] == ["2"]
    await until(lambda: index_of(core, "m")[0].reason == "unloaded")
    assert [entry.state for entry in index_of(core, "m")] == [ModelState.UNAVAILABLE, ModelState.READY]


async def test_unload_waits_for_requests_in_flight(repository, start_core):
    repository.add_standard()
    core = await start_core(explicit=True, startup_models=("slow",))
    stream = send_slow_request(core.model("slow"))
    unloading = asyncio.ensure_future(core.unload_model("slow"))
    await until(lambda: index_of(core, "slow")[0].state is ModelState.UNLOADING)
    await asyncio.sleep(0.05)
    assert not unloading.done()
    with pytest.raises(Unavailable):
        core.model("slow")
    (repository.path / "slow" / "1" / "go").touch()
    await unloading
    (response,) = await collect(stream)
    assert response.error is None


async def test_cancellation_reaches_the_model(repository, start_core):
    repository.add_standard()
    core = await start_core()
    stream = send_slow_request(core.model("slow"))
    await until((repository.path / "slow" / "1" / "begun").exists)
    stream.cancel()
    (response,) = await asyncio.wait_for(collect(stream), 60)
    assert response.error is not None and response.error.code is ErrorCode.CANCELLED
    assert response.error.message == "seen"


async def test_a_request_cancelled_in_the_queue_is_not_executed(repository, start_core):
    repository.add_standard()
    core = await start_core()
    first, second = send_slow_request(core.model("slow")), send_slow_request(core.model("slow"))
    second.cancel()
    first.cancel()
    await collect(first)
    (response,) = await collect(second)
    assert isinstance(response.error, Cancelled) and "before it was executed" in response.error.message


async def test_stop_cancels_requests_after_the_timeout(repository, start_core):
    repository.add_standard()
    core = await start_core(exit_timeout=0.05)
    stream = send_slow_request(core.model("slow"))
    stopped = asyncio.ensure_future(core.stop())
    await asyncio.sleep(0)
    assert not core.live() and not core.ready()
    with pytest.raises(Unavailable, match="Server is stopping"):
        core.model("slow")
    await asyncio.wait_for(stopped, 60)
    (response,) = await collect(stream)
    assert response.error is not None


async def test_stop_does_not_wait_for_a_load(repository, start_core, tmp_path):
    go = tmp_path / "go"
    wait = f"import time, pathlib\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.005)\n"
    repository.add("late", wait + IDENTITY)
    core = await start_core(explicit=True)
    loading = asyncio.ensure_future(core.load_model("late"))
    await until(lambda: index_of(core, "late")[0].state is ModelState.LOADING)
    await core.stop()
    with pytest.raises(Unavailable):
        await loading
    go.touch()


async def test_models_load_concurrently(repository, start_core, tmp_path):
    companion = f"""
    import time
    from pathlib import Path
    class TritonPythonModel:
        def initialize(self, args):
            Path({str(tmp_path)!r}, args["model_name"] + ".begun").touch()
            end = time.monotonic() + 60
            while len(list(Path({str(tmp_path)!r}).glob("*.begun"))) < 3:
                assert time.monotonic() < end, "alone"
                time.sleep(0.005)
        def execute(self, requests):
            return []
    """
    for i in range(3):
        repository.add(f"m{i}", companion)
    assert (await start_core()).ready()


async def test_a_model_without_a_repository(repository, tmp_path):
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    folder = repository.add("identity")
    core = Core(ServerOptions())
    config = ModelConfig(backend="python")
    core.add_model("named", config, folder)
    await core.start()
    assert core.model("named").config.name == "named"
    await core.stop()


async def test_a_configuration_of_another_name(repository, start_core):
    for name in ("with", "without"):
        repository.add(name)
    (repository.path / "with" / "configs").mkdir()
    custom = 'backend: "python" max_batch_size: 3 ' + IDENTITY_TENSORS
    (repository.path / "with" / "configs" / "small.pbtxt").write_text(custom)
    core = await start_core(model_config_name="small")
    assert [model.config.max_batch_size for model in core.models()] == [3, 0]


async def test_registered_repositories(repository, start_core, tmp_path):
    other = RepositoryBuilder(tmp_path / "other")
    folder = other.add("folder")
    (folder / "config.pbtxt").write_text('name: "folder" backend: "python"' + IDENTITY_TENSORS)
    core = await start_core(explicit=True)
    await core.register_repository(other.path, {"renamed": "folder"})
    assert index_of(core, "renamed") == [IndexEntry("renamed")] and not index_of(core, "folder")
    await core.load_model("renamed")
    assert core.model("renamed").config.name == "renamed"
    await core.unregister_repository(other.path)
    assert core.model("renamed").ready()
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        await core.load_model("renamed")
    core = await start_core()
    for work in (core.register_repository(other.path), core.unregister_repository(other.path)):
        with pytest.raises(
            Unsupported, match="registration is not allowed if model control mode is not EXPLICIT"
        ):
            await work


async def test_explicitly_loaded_steps_stay_loaded(repository, start_core):
    repository.add("step")
    repository.add_ensemble("all", "step")
    core = await start_core(explicit=True)
    for explicit in (False, True):
        if explicit:
            await core.load_model("step")
        await core.load_model("all")
        await core.unload_model("all", unload_dependents=True)
        assert [model.name for model in core.models()] == (["step"] if explicit else [])


@pytest.mark.parametrize(
    "files",
    [
        {"1/model.py": b"", "1": b""},
        {"1/model.py/x": b"", "1/model.py": b""},
        {"a\0b": b""},
        {"n" * 300: b""},
    ],
)
async def test_invalid_override_files(start_core, files):
    core = await start_core(explicit=True)
    with pytest.raises(InvalidArgument, match="file"):
        await core.load_model("made", config='{"backend": "python"}', files=files)


@pytest.mark.parametrize("config", ["null", "[]", "5", "", "[" * 10_000])
async def test_configuration_must_be_an_object(repository, start_core, config):
    repository.add("model")
    core = await start_core(explicit=True)
    with pytest.raises(InvalidArgument, match="failed to parse the model configuration"):
        await core.load_model("model", config=config)


async def test_a_negative_number_of_instances_is_one(repository, start_core):
    repository.add("model", config=IDENTITY_TENSORS + "instance_group { count: -1 }")
    core = await start_core()
    assert core.model("model").config.instance_group[0].count == 1
