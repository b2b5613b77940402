"""An engine of vLLM (CPU build) that dies is started again, with its adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "conformance"))
sys.path.insert(0, str(TESTS / "engine"))

from eventually import wait_until
from peft_adapters import write_adapter
from server_process import ServerProcess
from vllm_environment import ENVIRONMENT, PYTHON, require_vllm

from neso.models import SHIPPED_MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PILOT = SHIPPED_MODELS["neso-pilot"]
MODEL = "vllm_model"
QUESTION = {"text_input": "What is in-flight batching?", "parameters": {"temperature": 0, "max_tokens": 8}}
ENGINE = {
    "model": "neso-pilot",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "enable_lora": True,
    "max_lora_rank": 8,
}


def test_dead_engine_is_restarted(tmp_path):
    require_vllm()
    version = tmp_path / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"')
    (version / "model.json").write_text(json.dumps(ENGINE))
    adapter = write_adapter(PILOT, tmp_path / "adapter", seed=5)
    (version / "multi_lora.json").write_text(json.dumps({"doll": str(adapter)}))
    with ServerProcess(
        f"--model-repository={tmp_path}", python=PYTHON, environment=ENVIRONMENT, timeout=480
    ) as server:
        assert server.ports, server.output
        texts = [generate(server), generate(server, lora_name="doll")]
        assert texts[0] != texts[1]
        for process in engine_processes(server):
            process.kill()
        wait_until(lambda: server.get("/v2/health/ready")[0] == 400)
        assert server.post(f"/v2/models/{MODEL}/generate", QUESTION)[0] == 503
        assert server.get("/v2/health/live")[0] == 200
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200, seconds=240)
        assert [generate(server), generate(server, lora_name="doll")] == texts
        assert server.gauge("neso_process_restarts_total") == 1
        assert server.stop() == 0


def generate(server: ServerProcess, **parameters: str) -> str:
    body = {**QUESTION, "parameters": {**QUESTION["parameters"], **parameters}}  # type: ignore[dict-item]
    status, answer = server.post(f"/v2/models/{MODEL}/generate", body)
    assert status == 200, answer
    return str(answer["text_output"])


def engine_processes(server: ServerProcess) -> list[psutil.Process]:
    """Return the engine's processes, without helper processes of multiprocessing."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if child.memory_info().rss > 100e6]
