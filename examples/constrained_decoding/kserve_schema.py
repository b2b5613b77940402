"""Output that matches a JSON schema, with KServe over gRPC and tritonclient."""

from __future__ import annotations

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as triton

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="neso-pilot")
    options = parser.parse_args()

    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"Plan a trip."], np.object_))
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(options.url) as client:
        # Language models are decoupled and require a stream; without the parameter `stream` there is one response.
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(
            options.model,
            [text],
            parameters={"guided_json": json.dumps(SCHEMA), "max_tokens": 100, "temperature": "0"},
        )
        answer = answers.get(timeout=60)
    if isinstance(answer, Exception):
        raise answer
    print(json.loads(answer.as_numpy("text_output")[0]))


if __name__ == "__main__":
    main()
