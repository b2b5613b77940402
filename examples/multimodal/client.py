"""Ask about an image, and print the answer as it arrives: tritonclient over a gRPC stream."""

import argparse
import queue
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import triton_to_np_dtype


def tensor(name, value, datatype):
    given = triton.InferInput(name, [1], datatype)
    given.set_data_from_numpy(np.array([value], triton_to_np_dtype(datatype)))
    return given


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path, help="image file")
parser.add_argument("question")
parser.add_argument("--url", default="localhost:8001", help="address of the server")
parser.add_argument("--model", default="multimodal", help="name of the model")
parser.add_argument("--max-tokens", type=int, default=128, help="largest number of tokens of the answer")
parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token")
options = parser.parse_args()

inputs = [
    tensor("text_input", options.question.encode(), "BYTES"),
    tensor("image", options.image.read_bytes(), "BYTES"),
    tensor("max_tokens", options.max_tokens, "INT32"),
    tensor("temperature", options.temperature, "FP32"),
]
responses = queue.Queue()
with triton.InferenceServerClient(options.url) as client:
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer(options.model, inputs, enable_empty_final_response=True)
    while True:
        result, error = responses.get()
        if error is not None:
            raise SystemExit(str(error))
        if (text := result.as_numpy("text_output")) is not None:
            print(text[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
print()
