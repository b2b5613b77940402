"""Python models over HTTP, end to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from eventually import until

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.core import Core
from neso.server.options import ServerOptions

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B"))
            outputs = [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
ADD_SUB_CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "A" data_type: TYPE_FP32 dims: [4] }, { name: "B" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "SUM" data_type: TYPE_FP32 dims: [4] }, { name: "DIFFERENCE" data_type: TYPE_FP32 dims: [4] }]
"""
WORDS = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            for word in text.split():
                if request.is_cancelled():
                    pathlib.Path(__file__).with_name("cancelled").touch()
                    break
                output = pb_utils.Tensor("text_output", np.array([word], dtype=object))
                sender.send(pb_utils.InferenceResponse([output]))
                time.sleep(0.005)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WORDS_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[KServeHttp]:
    for name, config, model in (("add_sub", ADD_SUB_CONFIG, ADD_SUB), ("words", WORDS_CONFIG, WORDS)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        (tmp_path / name / "1" / "model.py").write_text(model)
    core = Core(ServerOptions(model_repository=(tmp_path,), exit_timeout=2.0))
    await core.start()
    front = KServeHttp(core, HttpOptions("127.0.0.1", 0))
    await front.start()
    yield front
    await front.stop(1.0)
    await core.stop()


@pytest.mark.parametrize("binary", [True, False])
async def test_add_sub(front: KServeHttp, binary: bool) -> None:
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), 0.5, np.float32)

    def infer() -> tuple[np.ndarray, np.ndarray]:
        with triton.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            inputs = [triton.InferInput(name, [2, 4], "FP32") for name in "AB"]
            for tensor, array in zip(inputs, (a, b), strict=True):
                tensor.set_data_from_numpy(array, binary_data=binary)
            outputs = [triton.InferRequestedOutput(n, binary_data=binary) for n in ("SUM", "DIFFERENCE")]
            result = client.infer("add_sub", inputs, outputs=outputs)
            return result.as_numpy("SUM"), result.as_numpy("DIFFERENCE")

    total, difference = await asyncio.to_thread(infer)
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(difference, a - b)


async def test_generate_stream(client) -> None:
    reply = await client.post("/v2/models/words/generate_stream", {"text_input": "the moon of Neptune"})
    events = [json.loads(part.removeprefix(b"data: ")) for part in reply.body.split(b"\n\n")[:-1]]
    assert [event["text_output"] for event in events] == ["the", "moon", "of", "Neptune"]
    reply = await client.post("/v2/models/words/generate", {"text_input": "one"})
    assert reply.json["text_output"] == "one"


async def test_disconnect_cancels_the_model(front: KServeHttp, tmp_path: Path) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    body = json.dumps({"text_input": "word " * 100_000}).encode()
    head = b"POST /v2/models/words/generate_stream HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await reader.readuntil(b"\n\n")
    writer.close()
    await until((tmp_path / "words" / "1" / "cancelled").exists)
