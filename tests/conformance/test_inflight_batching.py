"""In-flight batching is real: a short request sent after a long one does not wait for it."""

from __future__ import annotations

import threading
import time

MODEL = "neso-pilot"
GENERATE = f"/v2/models/{MODEL}/generate"


def test_short_request_overtakes_a_long_one(server):
    finished: dict[str, float] = {}

    def ask(name: str, max_tokens: int) -> None:
        body = {"text_input": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        status, _ = server.post(GENERATE, body)
        assert status == 200
        finished[name] = time.perf_counter()

    started = time.perf_counter()
    long = threading.Thread(target=ask, args=("long", 800))
    long.start()
    while server.gauge("vllm:num_requests_running") == 0:
        time.sleep(0.01)
    sent = time.perf_counter()
    ask("short", 8)
    long.join()
    assert finished["short"] < finished["long"]
    assert (finished["short"] - sent) < 0.25 * (finished["long"] - started)
