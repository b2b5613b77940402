"""Models in processes: settings, signals, logging and forks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from core_requests import collect, send_request
from eventually import until
from repository_builder import IDENTITY_TENSORS, RepositoryBuilder

from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions

HEAD = """
import logging, multiprocessing, os, signal, subprocess, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(*values):
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))])]

class TritonPythonModel:
"""


@pytest.fixture
async def start(tmp_path: Path):
    """`await start(code, config, **settings)` returns a core with "model" in a process."""
    cores: list[Core] = []

    async def make(code: str, config: str = "", auto_complete: bool = True, **settings: str) -> Core:
        repository = RepositoryBuilder(tmp_path / "models")
        repository.add("model", HEAD + code, IDENTITY_TENSORS + config)
        backend_config = {key.replace("_", "-"): value for key, value in settings.items()}
        backend_config["execution-mode"] = "process"
        core = Core(
            ServerOptions(
                (repository.path,),
                exit_timeout=1,
                backend_config={"python": backend_config},
                disable_auto_complete_config=not auto_complete,
            )
        )
        cores.append(core)
        await core.start()
        return core

    yield make
    for core in cores:
        await core.stop()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def outcome(core: Core, *values: float) -> list[float] | str:
    stream = send_request(core.model("model"), IN=np.array(values or (1,), np.float32))
    (response,) = await asyncio.wait_for(collect(stream), 60)
    return response.error.message if response.error is not None else response.outputs[0].array.tolist()


def reason(core: Core) -> str:
    return core.repository_index()[0].reason


async def test_model_imports_its_own_file_by_name(start):
    core = await start("""
    value = 3
    def execute(self, requests):
        import model
        return answer(model.TritonPythonModel.value)
""")
    assert await outcome(core) == [3]


async def test_shared_memory_sizes_follow_the_settings(start):
    core = await start(
        """
    def execute(self, requests):
        return answer(*requests[0].inputs()[0].as_numpy())
""",
        shm_default_byte_size="65536",
        shm_growth_byte_size="131072",
        shm_region_prefix_name="my_region",
    )
    values = list(map(float, range(4000)))
    assert await outcome(core, *values) == values
    (instance,) = core.model("model")._backend._instances._instances
    process = instance._running._process
    assert process.codec.own.size == 65536
    assert "memfd:my_region" in maps(process.pid)
    assert len(await outcome(core, *[1.0] * 50_000)) == 50_000
    assert process.codec.own.size == 65536 + 2 * 131072


@pytest.mark.parametrize("auto_complete", [True, False])
async def test_process_start_times_out(start, tmp_path, auto_complete):
    program = tmp_path / "environment" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    environment = (
        f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/environment" }} }}'
    )
    core = await start(
        "    def execute(self, requests): pass\n", environment, auto_complete, stub_timeout_seconds="1"
    )
    assert "did not start within 1 s" in reason(core)


async def test_a_crash_in_auto_complete_fails_the_load(start):
    core = await start("""
    @staticmethod
    def auto_complete_config(config):
        os._exit(9)
    def execute(self, requests): pass
""")
    assert "auto_complete_config of model 'model' ended with exit status 9" in reason(core)


async def test_model_threads_do_not_block_auto_complete(start):
    core = await start("""
    @staticmethod
    def auto_complete_config(config):
        threading.Thread(target=time.sleep, args=(100,)).start()
        return config
    def execute(self, requests):
        return answer(1)
""")
    assert await outcome(core) == [1]


async def test_the_model_runs_in_the_main_thread_and_survives_ctrl_c(start):
    core = await start("""
    def execute(self, requests):
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        # What it starts must not have to live with that.
        child = subprocess.Popen(["sleep", "100"])
        child.send_signal(signal.SIGINT)
        return answer(child.wait(60))
""")
    assert await outcome(core) == [-signal.SIGINT]


async def test_forked_processes_do_not_use_the_channel(start):
    core = await start("""
    def execute(self, requests):
        array = requests[0].inputs()[0].as_numpy()
        child = os.fork()
        if child == 0:
            del requests, array
            os._exit(0)
        os.waitpid(child, 0)
        return answer(*array)
""")
    for _ in range(3):
        assert await outcome(core, *[1.0] * 5000) == [1.0] * 5000


async def test_log_records_are_written_by_the_server(start, caplog):
    caplog.set_level("INFO")
    core = await start("""
    def initialize(self, args):
        logging.getLogger("library").warning("as %s", "told")
        pb_utils.Logger.log_verbose("too much")
    def execute(self, requests):
        raise ValueError("bad day")
""")
    assert "message: ValueError: bad day" in await outcome(core)
    (record,) = [record for record in caplog.records if record.name == "library"]
    assert record.getMessage() == "as told" and record.filename == "model.py"
    assert "in execute" in caplog.text and "too much" not in caplog.text


async def test_initialize_error_is_reported(start):
    core = await start(
        "    def initialize(self, args):\n        raise KeyError('weights')\n    def execute(self, requests): pass\n"
    )
    assert "KeyError: 'weights'" in reason(core)


async def test_parameters_of_numpy_types_reach_the_client(start):
    core = await start("""
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.ones(1, np.float32))
        return [pb_utils.InferenceResponse([out], parameters={"a": np.float64(2.5), "b": True, "c": "x"})]
""")
    (response,) = await collect(send_request(core.model("model"), IN=np.ones(1, np.float32)))
    assert response.parameters == {"a": 2.5, "b": True, "c": "x"}


async def test_bls_call_is_cancelled_when_its_caller_dies(start, tmp_path):
    RepositoryBuilder(tmp_path / "models").add(
        "slow",
        """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for _ in range(10_000):
            if requests[0].is_cancelled():
                return [pb_utils.InferenceResponse(error=pb_utils.TritonError("seen", pb_utils.TritonError.CANCELLED))]
            time.sleep(0.01)
""",
    )
    core = await start("""
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] == 2:
            os.kill(int(requests[0].inputs()[0].as_numpy()[1]), 9)
        threading.Timer(0.3, lambda: os._exit(4)).start()
        pb_utils.InferenceRequest(
            model_name="slow", requested_output_names=["OUT"], inputs=requests[0].inputs()).exec()
""")
    assert "exit status 4" in await outcome(core)
    slow = core.model("slow")
    await until(lambda: slow.in_flight_count == 0)
    assert slow.in_flight_count == 0 and slow.statistics.failures["CANCELED"] == 1


def test_model_process_needs_only_numpy():
    """Environments of models have numpy, but not the other packages of the server."""
    blocked = ["msgspec", "orjson", "grpc", "tritonclient", "prometheus_client", "zmq", "pydantic", "uvloop"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\nimport neso.backends.python.process.child"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


async def test_libraries_find_the_files_of_the_model(start) -> None:
    core = await start("""
    def execute(self, requests):
        import importlib
        found = importlib.import_module("model").TritonPythonModel
        return answer(found.__name__ == "TritonPythonModel", len(sys.argv))
""")
    model = core.model("model")
    (response,) = await asyncio.wait_for(collect(send_request(model, IN=np.ones(1, np.float32))), 60)
    assert response.error is None, response.error
    assert response.output("OUT").array.tolist() == [1, 1]


async def test_instances_are_added_and_removed_without_a_reload(tmp_path):
    log = tmp_path / "log"
    code = f"""
    name = None
    def note(self, sign):
        with open({str(log)!r}, "a") as file:
            file.write(sign + self.name + "\\n")
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.note("+")
    def execute(self, requests):
        time.sleep(0.002)
        return answer(os.getpid())
    def finalize(self):
        self.note("-")
    """

    def groups(first: int, second: int) -> str:
        group = "instance_group {{ name: '{}' kind: KIND_CPU count: {} }}"
        return IDENTITY_TENSORS + group.format("a", first) + group.format("b", second)

    def instances() -> set[str]:
        lines = log.read_text().split()
        return {line[1:] for line in lines if lines.count("+" + line[1:]) > lines.count("-" + line[1:])}

    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("model", HEAD + code, groups(1, 1))
    backend_config = {"python": {"execution-mode": "process"}}
    core = Core(
        ServerOptions(
            (repository.path,),
            model_control_mode=ModelControlMode.EXPLICIT,
            startup_models=("model",),
            backend_config=backend_config,
        )
    )
    await core.start()
    try:
        model, stop, answers = core.model("model"), asyncio.Event(), set()

        async def send() -> None:
            while not stop.is_set():
                (response,) = await collect(send_request(model, IN=np.zeros(1, np.float32)))
                assert response.error is None, response.error
                answers.add(float(response.output("OUT").array[0]))

        senders = [asyncio.ensure_future(send()) for _ in range(8)]
        for first, second in ((2, 1), (1, 2)):
            repository.configure("model", groups(first, second))
            await core.load_model("model")
            assert core.model("model") is model
            names = {f"a_{index}" for index in range(first)} | {f"b_{index}" for index in range(second)}
            assert instances() == names
        stop.set()
        await asyncio.gather(*senders)
        assert len(answers) > 1
    finally:
        await core.stop()
    assert instances() == set()
