"""examples/stable_diffusion and examples/multimodal, with small random checkpoints."""

from __future__ import annotations

import base64
import io
import json
import queue
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from doc_reader import DocReader
from server_process import ServerProcess
from tiny_pipeline import make_stable_diffusion
from tritonclient.utils import np_to_triton_dtype

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "engine"))
pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")
checkpoints = pytest.importorskip("checkpoints")

pytestmark = pytest.mark.slow

STABLE_DIFFUSION = "stable-diffusion-v1-5/stable-diffusion-v1-5"
LLAVA = "llava-hf/llava-1.5-7b-hf"
PROMPT = "a lighthouse at dawn"
ONE_THREAD = ("OMP_NUM_THREADS", "1")
"""Enough for small models; more would wait for each other."""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> dict[str, str]:
    """Small checkpoints in place of those that the examples name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        STABLE_DIFFUSION: str(make_stable_diffusion(root / "stable_diffusion")),
        LLAVA: str(checkpoints.make_llava(root / "llava")),
    }


def copy_example(name: str, folder: Path, stand_ins: dict[str, str]) -> Path:
    """Copy an example, with the stand-ins in its configuration. Returns its model's folder."""
    shutil.copytree(ROOT / "examples" / name, folder, dirs_exist_ok=True)
    config = folder / "models" / name / "config.pbtxt"
    text = config.read_text()
    for checkpoint, stand_in in stand_ins.items():
        text = text.replace(checkpoint, stand_in)
    config.write_text(text)
    return config.parent


@pytest.fixture(scope="module")
def served(tmp_path_factory, stand_ins):
    """A server with both examples, and `progress`: Stable Diffusion as a decoupled model without a limit of steps."""
    folder = tmp_path_factory.mktemp("examples")
    copy_example("multimodal", folder, stand_ins)
    model = copy_example("stable_diffusion", folder, stand_ins)
    progress = shutil.copytree(model, model.with_name("progress")) / "config.pbtxt"
    progress.write_text(DECOUPLED + progress.read_text().replace('"100"', '"1000"'))
    long = folder / "models" / "multimodal" / "config.pbtxt"
    long.write_text(long.read_text().replace('"1024"', '"100000"'))
    with ServerProcess(f"--model-repository={folder / 'models'}", environment=dict([ONE_THREAD])) as server:
        assert server.ports, server.output
        yield server


def post(served, model: str, call: str = "generate", **fields):
    """Return the JSON of the response, or of the events of `generate_stream`; also of an error."""
    request = urllib.request.Request(
        f"http://{served.address('http')}/v2/models/{model}/{call}", json.dumps(fields).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
    if call == "generate":
        return json.loads(text)
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def pixels(encoded: str | bytes) -> np.ndarray:
    """Decode an image to integers of shape [height, width, 3]."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert image.format == "PNG"
    return np.asarray(image).astype(int)


def picture(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return file.getvalue()


def tensor(module, name: str, array: np.ndarray):
    given = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array)
    return given


def close(image: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two images are equal, except for rounding: a batch is computed in another order."""
    return image.shape == other.shape and bool(np.abs(image - other).max() <= 1)


def test_image_is_that_of_the_pipeline(served, stand_ins):
    torch = pytest.importorskip("torch")
    from diffusers import AutoPipelineForText2Image

    pipeline = AutoPipelineForText2Image.from_pretrained(stand_ins[STABLE_DIFFUSION])
    expected = pipeline(
        PROMPT,
        negative_prompt="fog",
        num_inference_steps=3,
        guidance_scale=4.0,
        height=32,
        width=64,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    ).images[0]
    fields = {
        "negative_prompt": "fog",
        "steps": 3,
        "guidance_scale": 4.0,
        "height": 32,
        "width": 64,
        "seed": 7,
    }
    found = pixels(post(served, "stable_diffusion", prompt=PROMPT, **fields)["image"])
    assert close(found, (expected * 255).round().astype(int))
    for changed in ({"seed": 8}, {"guidance_scale": 1.0}, {"steps": 4}, {"negative_prompt": "rain"}):
        other = pixels(post(served, "stable_diffusion", prompt=PROMPT, **fields | changed)["image"])
        assert not np.array_equal(found, other), changed


def test_rows_and_concurrent_requests_are_computed_together(served):
    def inputs(first: int, rows: int) -> list:
        prompts = np.array([[f"prompt {first + row}".encode()] for row in range(rows)], np.object_)
        seeds = np.arange(first, first + rows, dtype=np.int64).reshape(-1, 1)
        steps = np.full((rows, 1), 2, np.int32)
        given = {"prompt": prompts, "seed": seeds, "steps": steps}
        return [tensor(http_client, name, array) for name, array in given.items()]

    with http_client.InferenceServerClient(served.address("http"), concurrency=8) as client:
        before = client.get_inference_statistics("stable_diffusion")["model_stats"][0]
        pending = [client.async_infer("stable_diffusion", inputs(2 * n, 2)) for n in range(4)]
        found = [image for request in pending for image in request.get_result().as_numpy("image").ravel()]
        after = client.get_inference_statistics("stable_diffusion")["model_stats"][0]
        assert after["inference_count"] - before["inference_count"] == 8
        assert after["execution_count"] - before["execution_count"] < 4
        for row, image in enumerate(found):
            alone = client.infer("stable_diffusion", inputs(row, 1)).as_numpy("image").item()
            assert close(pixels(image), pixels(alone))


def test_random_seeds_differ(served):
    images = [post(served, "stable_diffusion", prompt=PROMPT, steps=1)["image"] for _ in range(2)]
    assert images[0] != images[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be from 1 to 100, got 0"),
        ({"steps": 101}, "steps must be from 1 to 100, got 101"),
        ({"height": 64}, "height and width must be set together"),
        ({"height": 60, "width": 64}, "must be multiples of 8"),
        ({"height": 8192, "width": 8192}, "at most 1048576 pixels"),
    ],
)
def test_settings_out_of_range(served, fields, message):
    assert message in post(served, "stable_diffusion", prompt=PROMPT, **fields)["error"]


def test_rows_of_a_request_with_different_settings(served):
    prompts = tensor(grpc_client, "prompt", np.array([[b"a"], [b"b"]], np.object_))
    steps = tensor(grpc_client, "steps", np.array([[1], [2]], np.int32))
    message = "steps must be equal for all prompts of a request"
    with (
        grpc_client.InferenceServerClient(served.address("grpc")) as client,
        pytest.raises(Exception, match=message),
    ):
        client.infer("stable_diffusion", [prompts, steps])


def test_progress(served):
    events = post(served, "progress", "generate_stream", prompt=PROMPT, seed=7, steps=3)
    assert [event["step"] for event in events[:-1]] == [1, 2, 3]
    plain = post(served, "stable_diffusion", prompt=PROMPT, seed=7, steps=3)
    assert events[-1]["image"] == plain["image"]


def cancel_after_first_response(served, model: str, inputs: dict[str, np.ndarray]) -> None:
    responses: queue.Queue = queue.Queue()
    with grpc_client.InferenceServerClient(served.address("grpc")) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, [tensor(grpc_client, *item) for item in inputs.items()])
        _, error = responses.get(timeout=60)
        assert error is None, error
        client.stop_stream(cancel_requests=True)


def cancelled(served, model: str) -> int:
    """Return the number of cancelled requests of a model."""
    with urllib.request.urlopen(f"http://{served.address('metrics')}/metrics") as response:
        text = response.read().decode()
    line = rf'nv_inference_request_failure{{[^}}]*model="{model}"[^}}]*reason="CANCELED"[^}}]*}} (\d+)'
    return int(re.search(line, text)[1])


def test_cancelled_images_end_between_steps(served):
    prompt, steps = np.array([[PROMPT.encode()]], np.object_), np.array([[900]], np.int32)
    cancel_after_first_response(served, "progress", {"prompt": prompt, "steps": steps})
    assert post(served, "progress", "generate_stream", prompt=PROMPT, steps=1)[-1]["image"]
    assert cancelled(served, "progress") == 1


def test_text_is_that_of_transformers(served, stand_ins):
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(stand_ins[LLAVA])
    model = transformers.AutoModelForImageTextToText.from_pretrained(stand_ins[LLAVA])
    image = Image.open(io.BytesIO(picture("red")))
    given = processor(images=image, text="<|user|><image>What is it?</s><|assistant|>", return_tensors="pt")
    tokens = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    expected = processor.tokenizer.decode(tokens, skip_special_tokens=True)
    encoded = base64.b64encode(picture("red")).decode()
    events = post(
        served, "multimodal", "generate_stream", text_input="What is it?", image=encoded, max_tokens=12
    )
    assert expected and "".join(event["text_output"] for event in events) == expected


def test_temperature_and_seed(served):
    fields = {"text_input": "Why?", "image": base64.b64encode(picture("blue")).decode(), "max_tokens": 16}
    texts = [
        post(served, "multimodal", "generate_stream", temperature=2.0, seed=seed, **fields)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "bm90IGFuIGltYWdl"}, "cannot read the image"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to 100000, got 0"),
        ({"temperature": -1}, "temperature must be 0 or larger"),
    ],
)
def test_invalid_questions(served, fields, message):
    valid = {"text_input": "What?", "image": base64.b64encode(picture("red")).decode()}
    (event,) = post(served, "multimodal", "generate_stream", **valid | fields)
    assert message in event["error"]


def test_cancelled_texts_end_between_tokens(served):
    question = {
        "text_input": np.array([b"What?"], np.object_),
        "image": np.array([picture("red")], np.object_),
        "max_tokens": np.array([100000], np.int32),
    }
    cancel_after_first_response(served, "multimodal", question)
    encoded = base64.b64encode(picture("red")).decode()
    assert post(served, "multimodal", "generate_stream", text_input="What?", image=encoded, max_tokens=2)
    assert cancelled(served, "multimodal") == 1


def test_clients(served, tmp_path):
    folder = ROOT / "examples"
    (tmp_path / "red.png").write_bytes(picture("red"))
    for command in (
        [
            folder / "stable_diffusion" / "client.py",
            "a cat",
            "a dog",
            "--steps=2",
            f"--url={served.address('http')}",
        ],
        [folder / "multimodal" / "client.py", "red.png", "What?", f"--url={served.address('grpc')}"],
    ):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, timeout=110
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
    assert pixels(base64.b64encode((tmp_path / "image1.png").read_bytes())).shape == (32, 32, 3)


@pytest.mark.parametrize("name", ["stable_diffusion", "multimodal"])
def test_pages(name, tmp_path, stand_ins, monkeypatch):
    monkeypatch.setenv(*ONE_THREAD)
    copy_example(name, tmp_path, stand_ins)
    page = (ROOT / "docs" / "guides" / f"{name.replace('_', '-')}.md").read_text()
    with DocReader(tmp_path, stand_ins) as reader:
        assert reader.follow(page)
