"""The backend `vllm` with a vision model: tokens equal transformers for every protocol."""

from __future__ import annotations

import base64
import io
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as triton
from eventually import wait_until
from PIL import Image
from server_process import ServerProcess
from transformers import AutoProcessor, Idefics3ForConditionalGeneration
from vllm_environment import ENVIRONMENT, PYTHON, require_vllm

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from idefics_checkpoint import make_idefics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL, CONTEXT = "sees", 1000
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = {
    "one": ("<image>What is this?", ["a"]),
    "another": ("<image>What is this?", ["b"]),
    "two": ("<image>and<image>differ?", ["a", "b"]),
    "two, the other way round": ("<image>and<image>differ?", ["b", "a"]),
    "none": ("What is this?", []),
}
CONFIG = """
backend: "vllm"
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "yes" } }
"""

Oracle = Callable[..., tuple[list[int], int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    require_vllm()
    repository = tmp_path_factory.mktemp("repository")
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    (repository / MODEL / "config.pbtxt").write_text(CONFIG)
    engine = {
        "model": str(directory),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "limit_mm_per_prompt": {"image": 2},
    }
    (version / "model.json").write_text(json.dumps(engine))
    arguments = (f"--model-repository={repository}",)
    with ServerProcess(*arguments, python=PYTHON, environment=ENVIRONMENT, timeout=480) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="module")
def openai_client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = server.url("/v1", "openai")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    """Return transformers' greedy tokens, and the number of prompt tokens including images."""
    processor = AutoProcessor.from_pretrained(directory)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Idefics3ForConditionalGeneration.from_pretrained(directory, **options).eval()
    model.generation_config.eos_token_id = None

    def tokens(prompt: str, images: Sequence[str], most: int = 8) -> tuple[list[int], int]:
        pictures = [picture(name) for name in images] or None
        inputs = processor(text=prompt, images=pictures, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        length = inputs["input_ids"].shape[1]
        return output[0, length:].tolist(), length

    return tokens


def picture(name: str) -> Image.Image:
    """Return random colours, different for each name; not square, so that it is tiled."""
    pixels = np.random.default_rng(ord(name)).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(pixels).resize((40, 30), Image.Resampling.BICUBIC)


def encoded(name: str) -> str:
    file = io.BytesIO()
    picture(name).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def generate(server: ServerProcess, prompt: str, images: Any, **params: Any) -> tuple[int, Any]:
    """Use Triton's HTTP endpoint; `images` as in the body."""
    body = {"text_input": prompt, "return_logprobs": True, "return_num_input_tokens": True}
    body |= {"parameters": {**GREEDY, **params}, "exclude_input_in_output": True}
    if images:
        body["image"] = images
    return server.post(f"/v2/models/{MODEL}/generate", body)


def token_ids(logprobs: str) -> list[int]:
    """Return the token ids from the output `logprobs`, whose entries start with the chosen token."""
    return [int(next(iter(position))) for position in json.loads(logprobs)]


def strings_input(name: str, values: Sequence[str]) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], np.object_))
    return tensor


def inputs_of(prompt: str, images: Sequence[str], params: dict[str, Any]) -> list[triton.InferInput]:
    """Return the inputs of a stream that outputs its tokens."""
    flags = []
    for name in ("stream", "return_logprobs"):
        flags.append(triton.InferInput(name, [1], "BOOL"))
        flags[-1].set_data_from_numpy(np.array([True]))
    texts = [
        strings_input("text_input", [prompt]),
        strings_input("sampling_parameters", [json.dumps(params)]),
    ]
    return [*texts, *flags, strings_input("image", [encoded(name) for name in images])]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat_of(*parts: str) -> list[dict[str, Any]]:
    """Return a message; parts of one letter are names of pictures, the others text."""
    content = [
        image_part(f"data:image/png;base64,{encoded(part)}")
        if len(part) == 1
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


# -- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "images"), PROMPTS.values(), ids=PROMPTS)
def test_generate_equals_transformers(server, oracle, prompt, images):
    expected, length = oracle(prompt, images)
    status, response = generate(server, prompt, [encoded(name) for name in images])
    assert status == 200, response
    assert token_ids(response["logprobs"]) == expected
    assert response["num_input_tokens"] == length


def test_output_depends_on_the_images(oracle):
    """Otherwise the token comparisons would prove nothing."""
    answers = {tuple(oracle(*prompt)[0]) for prompt in PROMPTS.values()}
    assert len(answers) == len(PROMPTS)


def test_base64_plain_wrapped_and_in_a_url(server, oracle):
    expected, _ = oracle("<image>x", ["a"])
    in_lines = base64.encodebytes(base64.b64decode(encoded("a"))).decode()
    for image in (encoded("a"), in_lines, f"data:image/png;base64,{encoded('a')}"):
        _, response = generate(server, "<image>x", image)
        assert token_ids(response["logprobs"]) == expected


def test_a_stream_over_grpc(server, oracle):
    prompt, images = PROMPTS["two"]
    responses: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.address("grpc")) as client:
        client.start_stream(partial(lambda put, result, error: put(error or result), responses.put))
        inputs = inputs_of(prompt, images, GREEDY)
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        tokens, final = [], False
        while not final:
            result = responses.get(timeout=60)
            assert not isinstance(result, Exception), result
            logprobs = result.as_numpy("logprobs")
            if logprobs is not None and len(logprobs):
                tokens += token_ids(logprobs[0])
            final = result.get_response().parameters["triton_final_response"].bool_param
    assert tokens == oracle(prompt, images)[0]


@pytest.mark.parametrize("parts", [("a", "What?"), ("b", "What?"), ("a", "and", "b", "differ?")])
def test_chats(openai_client, oracle, parts):
    words = "".join("<image>" if len(part) == 1 else part for part in parts)
    images = [part for part in parts if len(part) == 1]
    expected, length = oracle(f"<|user|>{words}</s><|assistant|>", images)
    options = {"temperature": 0, "max_tokens": 8, "model": MODEL, "messages": chat_of(*parts)}
    further = {"ignore_eos": True, "return_token_ids": True}
    reply = openai_client.chat.completions.create(**options, extra_body=further)
    assert reply.choices[0].token_ids == expected
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (length, 8)
    stream = openai_client.chat.completions.create(**options, extra_body=further, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == reply.choices[0].message.content


def test_output_without_a_limit_fills_the_context(openai_client, oracle):
    _, length = oracle("<|user|><image>What?</s><|assistant|>", ["a"])
    reply = openai_client.chat.completions.create(
        model=MODEL, messages=chat_of("a", "What?"), temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage.completion_tokens == CONTEXT - length


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "images", "why"),
    [
        ("<image>", ["!!"], "an image is not valid base64"),
        (
            "<image>",
            [base64.b64encode(b"no image").decode()],
            "an image cannot be read: expected one of PNG, JPEG",
        ),
        ("<image>", [encoded("a")[:200]], "an image cannot be read: image file is truncated"),
        ("<image>", ["https://example.com/x.png"], "https: URLs are not fetched"),
        ("<image><image><image>", [encoded("a")] * 3, "At most 2 image(s) may be provided in one prompt."),
        ("none", [encoded("a")], "vLLM cannot put the images into the prompt"),
        ("<image>", [encoded("a")] * 2, "vLLM cannot put the images into the prompt"),
    ],
)
def test_invalid_images_in_tensors(server, prompt, images, why):
    status, response = generate(server, prompt, images)
    assert status == 400
    assert response["error"].startswith(f"Error generating stream: image: {why}")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user", "content": [image_part("data:image/png;base64,!!")]}], "not valid base64"),
        ([{"role": "user", "content": [image_part("data:image/png;base64,AAAA")]}], "cannot be read"),
        ([{"role": "user", "content": [image_part("https://example.com/x.png")]}], "not fetched"),
        (chat_of("a", "b", "a"), "At most 2 image"),
    ],
)
def test_invalid_images_in_chats(openai_client, messages, why):
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=messages)
    assert caught.value.param == "messages"


def test_images_exceed_the_context_length(server, openai_client):
    """The text alone would fit; the image tokens count too."""
    words = "x" * (CONTEXT - 20)  # one token each
    assert generate(server, words, [], max_tokens=1)[0] == 200
    status, response = generate(server, f"<image>{words}", [encoded("a")])
    assert status == 400 and f"this model's context is {CONTEXT} tokens" in response["error"]
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=chat_of("a", words))
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


# -- concurrent requests ----------------------------------------------------------------------------------------


def test_disconnects_and_errors_do_not_affect_others(server, oracle):
    """A long request is cancelled; vLLM's token count shows that it stopped."""
    prompt, images = PROMPTS["two"]
    most, longest = 100, CONTEXT - 100
    expected, _ = oracle(prompt, images, most)
    before = server.gauge("vllm:generation_tokens_total")
    answers: queue.Queue[Any] = queue.Queue()
    files = [encoded(name) for name in images]
    stays = threading.Thread(
        target=lambda: answers.put(generate(server, prompt, files, max_tokens=most)), daemon=True
    )
    with triton.InferenceServerClient(server.address("grpc")) as client:
        first = threading.Event()
        client.start_stream(lambda result, error: first.set())
        client.async_stream_infer(MODEL, inputs_of(prompt, ["b", "a"], {**GREEDY, "max_tokens": longest}))
        assert first.wait(60)
        stays.start()
        assert generate(server, "<image>", ["!!"])[0] == 400
        assert generate(server, "none", files)[0] == 400
        client.stop_stream(cancel_requests=True)
    status, response = answers.get(timeout=120)
    assert status == 200 and token_ids(response["logprobs"]) == expected
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)
    assert server.gauge("vllm:generation_tokens_total") - before < longest
    _, response = generate(server, prompt, files)
    assert token_ids(response["logprobs"]) == expected[:8]
