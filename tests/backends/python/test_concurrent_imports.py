"""Models that load at the same time in threads and import the same large package."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from repository_builder import IDENTITY_TENSORS, RepositoryBuilder

from neso.server.core import Core
from neso.server.import_turn import INITIALIZE_SECONDS, ImportTurn
from neso.server.options import ModelControlMode, ServerOptions

# Like transformers, the package replaces itself in sys.modules at the end of its import. A thread that has waited for
# the import of another thread gets the module before the replacement.
PACKAGE = """
import sys, time, types

time.sleep(0.05)
full = types.ModuleType(__name__)
full.__spec__, full.__path__ = __spec__, __path__
full.Tokenizer = object
sys.modules[__name__] = full
"""
AT_IMPORT = """
from {package} import Tokenizer

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
IN_INITIALIZE = """
class TritonPythonModel:
    def initialize(self, args):
        from {package} import Tokenizer

    def execute(self, requests):
        return []
"""
WAITS_FOR_THE_OTHER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("needed")

    def execute(self, requests):
        return []
"""
REPETITIONS = 10


def core_of(repository: RepositoryBuilder, **options) -> Core:
    return Core(ServerOptions((repository.path,), exit_timeout=1, **options))


@pytest.mark.parametrize(
    "codes", [(AT_IMPORT, AT_IMPORT), (IN_INITIALIZE, AT_IMPORT)], ids=["import", "initialize"]
)
async def test_models_that_import_the_same_package_load_concurrently(tmp_path, monkeypatch, codes):
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in range(REPETITIONS):
        package = f"large_package_{number}"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(PACKAGE)
        repository = RepositoryBuilder(tmp_path / f"models{number}")
        for name, code in zip(("first", "second", "third"), (*codes, codes[0]), strict=True):
            repository.add(name, code.format(package=package), IDENTITY_TENSORS)
        core = core_of(repository)
        await core.start()
        reasons = {entry.name: entry.reason for entry in core.repository_index()}
        await core.stop()
        assert reasons == {"first": "", "second": "", "third": ""}
        sys.modules.pop(package)


async def test_initialize_can_load_another_model(tmp_path):
    """It must not hold the turn that the other model needs."""
    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("needing", WAITS_FOR_THE_OTHER, IDENTITY_TENSORS)
    repository.add(
        "needed", AT_IMPORT.format(package="json").replace("Tokenizer", "JSONEncoder"), IDENTITY_TENSORS
    )
    core = core_of(repository, model_control_mode=ModelControlMode.EXPLICIT, startup_models=("needing",))
    started = time.monotonic()
    await core.start()
    assert core.model_ready("needing") and core.model_ready("needed")
    assert time.monotonic() - started < INITIALIZE_SECONDS
    await core.stop()


def test_turn_is_lost_after_its_time():
    turn, order = ImportTurn(), []
    released = threading.Event()

    def hold(name: str, seconds: float) -> None:
        with turn.held(seconds):
            order.append(name)
            released.wait(60)

    slow = threading.Thread(target=hold, args=("slow", 0.2))
    slow.start()
    while not order:
        time.sleep(0.001)
    next_one = threading.Thread(target=hold, args=("next", 60))
    next_one.start()
    next_one.join(0.05)
    assert order == ["slow"]
    while len(order) < 2:
        time.sleep(0.001)
    assert slow.is_alive(), "it goes on without the turn"
    released.set()
    for thread in (slow, next_one):
        thread.join()
    with turn.held(1):
        order.append("last")
    assert order == ["slow", "next", "last"]


TRANSFORMERS = """
import asyncio, sys
from neso.server.core import Core
from neso.server.options import ServerOptions

async def main():
    core = Core(ServerOptions((sys.argv[1],), exit_timeout=1))
    await core.start()
    for entry in core.repository_index():
        print(f"{entry.name}: {entry.reason}" if entry.reason else "loaded")
    await core.stop()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_that_import_transformers_load_concurrently(tmp_path):
    """In a new process each time, because a package is imported once."""
    repository = RepositoryBuilder(tmp_path / "models")
    imports = (
        "AutoTokenizer, AutoModelForCausalLM",
        "pipeline, BertModel",
        "LlamaForCausalLM, GPT2LMHeadModel",
    )
    for number, names in enumerate(imports):
        code = AT_IMPORT.format(package="transformers").replace("Tokenizer", names, 1)
        repository.add(f"model{number}", code, IDENTITY_TENSORS)
    for _ in range(5):
        result = subprocess.run(
            [sys.executable, "-c", TRANSFORMERS, str(repository.path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert result.stdout.split("\n")[:-1] == ["loaded"] * 3, result.stdout
