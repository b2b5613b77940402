"""In-flight batching: a short request sent after a long one does not wait for it."""

from __future__ import annotations

import threading

from eventually import wait_until

MODEL = "neso-pilot"
GENERATE = f"/v2/models/{MODEL}/generate"


def test_short_request_overtakes_a_long_one(slow_server):
    finished: list[str] = []

    def send_request(name: str, max_tokens: int) -> None:
        body = {"text_input": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        status, _ = slow_server.post(GENERATE, body)
        assert status == 200
        finished.append(name)

    long = threading.Thread(target=send_request, args=("long", 60))
    long.start()
    wait_until(lambda: slow_server.gauge("vllm:num_requests_running"))
    send_request("short", 4)
    long.join()
    assert finished == ["short", "long"]
