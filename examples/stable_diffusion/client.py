"""Write the images of prompts: one request with a row for each prompt, by tritonclient over HTTP."""

import argparse
import base64
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import triton_to_np_dtype


def tensor(name, values, datatype):
    array = np.array(values, triton_to_np_dtype(datatype)).reshape(-1, 1)
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompts", nargs="+", metavar="PROMPT")
parser.add_argument("--url", default="localhost:8000", help="address of the server")
parser.add_argument("--model", default="stable_diffusion", help="name of the model")
parser.add_argument("--steps", type=int, default=30, help="number of denoising steps")
parser.add_argument("--guidance-scale", type=float, default=7.5, help="weight of the prompt")
parser.add_argument(
    "--seed", type=int, default=0, help="seed of the first image; the next ones have the next seeds"
)
parser.add_argument("--output", type=Path, default=Path(), help="folder of the images")
options = parser.parse_args()

count = len(options.prompts)
inputs = [
    tensor("prompt", [prompt.encode() for prompt in options.prompts], "BYTES"),
    tensor("seed", np.arange(options.seed, options.seed + count), "INT64"),
    tensor("steps", [options.steps] * count, "INT32"),
    tensor("guidance_scale", [options.guidance_scale] * count, "FP32"),
]
with triton.InferenceServerClient(options.url, network_timeout=3600) as client:
    images = client.infer(options.model, inputs).as_numpy("image").ravel()
options.output.mkdir(parents=True, exist_ok=True)
for row, image in enumerate(images):
    path = options.output / f"image{row}.png"
    path.write_bytes(base64.b64decode(image))
    print(path)
