"""Requests by every protocol that are in flight when something fails."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import openai
from tritonclient.grpc import service_pb2, service_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from eventually import wait_until
from server_process import ServerProcess

MODEL = "neso-pilot"
QUESTION = "What is paged attention?"
LONG = {"text_input": QUESTION, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


def ready(server: ServerProcess) -> bool:
    return server.get("/v2/health/ready")[0] == 200


def live(server: ServerProcess) -> bool:
    return server.get("/v2/health/live")[0] == 200


def answer(server: ServerProcess) -> str:
    status, body = server.post(
        f"/v2/models/{MODEL}/generate", {"text_input": QUESTION, "max_tokens": 12, "temperature": 0}
    )
    assert status == 200, body
    return body["text_output"]


def _running(server: ServerProcess) -> float:
    """Return the number of requests of `MODEL` in the engine."""
    samples = server.metrics().items()
    names = ("vllm:num_requests_running{", f'"{MODEL}"')
    return sum(value for key, value in samples if key.startswith(names[0]) and names[1] in key)


class InFlight:
    """One long request by each protocol, in threads. `errors` maps the protocol to the error that it ended with."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.errors: dict[str, str] = {}
        self._begun: set[str] = set()  # streams whose first event has arrived
        works = (self._generate, self._stream, self._grpc, self._openai, self._openai_stream)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.errors or (_running(server) == len(works) and len(self._begun) == 2))
        assert not self.errors

    def join(self) -> dict[str, str]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), f"a request got no response: {self.errors}"
        return self.errors

    def _generate(self) -> None:
        status, body = self._server.post(f"/v2/models/{MODEL}/generate", LONG)
        self.errors["generate"] = f"{status} {body['error']}"

    def _stream(self) -> None:
        request = urllib.request.Request(
            self._server.url(f"/v2/models/{MODEL}/generate_stream"),
            json.dumps({**LONG, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events = []
            for line in response:
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    self._begun.add("generate_stream")
        assert len(events) > 1 and all("text_output" in event for event in events[:-1])
        self.errors["generate_stream"] = events[-1]["error"]

    def _grpc(self) -> None:
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            QUESTION.encode()
        )
        request.parameters["max_tokens"].int64_param = 1000
        request.parameters["ignore_eos"].bool_param = True
        with grpc.insecure_channel(self._server.address("grpc")) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            (*_, last) = stub.ModelStreamInfer(iter([request]), timeout=60)
            self.errors["grpc"] = last.error_message

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self._server.url("/v1", "openai"), api_key="none", max_retries=0)

    def _openai(self) -> None:
        with self._client() as client:
            try:
                client.completions.create(
                    model=MODEL, prompt=QUESTION, max_tokens=1000, extra_body={"ignore_eos": True}
                )
            except openai.APIStatusError as error:
                self.errors["openai"] = f"{error.status_code} {error.message}"

    def _openai_stream(self) -> None:
        chunks = 0
        with self._client() as client:
            try:
                for _ in client.completions.create(
                    model=MODEL,
                    prompt=QUESTION,
                    max_tokens=1000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    chunks += 1
                    self._begun.add("openai stream")
            except openai.APIError as error:
                assert chunks
                self.errors["openai stream"] = error.message
