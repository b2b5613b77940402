"""Images through the server: OpenAI chats with the `openai` client, and Triton's `image` tensor."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
import tritonclient.http as triton
from server_process import ServerProcess

from neso.engine.client.llm import LLM
from neso.generation import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from checkpoints import make_llava
from qwen_vl_checkpoint import make_qwen_vl

image_module = pytest.importorskip("PIL.Image")

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def vision(directory):
    with ServerProcess(f"llava={directory}") as process:
        assert process.ports, process.output
        yield process


def encoded(seed: int, size: tuple[int, int] = (30, 40)) -> str:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    image_module.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chat(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_chat_with_images(vision, directory):
    urls = [f"data:image/png;base64,{encoded(seed)}" for seed in (1, 2)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = chat(parts[0], {"type": "text", "text": "and"}, parts[1], {"type": "text", "text": "differ?"})
    expected = LLM(directory).chat(messages, GREEDY)
    with openai.OpenAI(base_url=vision.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model="llava", messages=messages, temperature=0, max_tokens=8)
        assert reply.choices[0].message.content == expected.text
        assert reply.usage.prompt_tokens == len(expected.prompt_token_ids) > 32
        for url, why in (
            ("https://example.com/x.png", "not fetched"),
            ("data:image/png;base64,AAAA", "cannot be read"),
        ):
            part = {"type": "image_url", "image_url": {"url": url}}
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                client.chat.completions.create(model="llava", messages=chat(part))
            assert caught.value.param == "messages"


def test_chat_with_images_of_different_sizes(tmp_path):
    """Qwen2.5-VL: the number of tokens of an image depends on its size."""
    directory = make_qwen_vl(tmp_path, "qwen2_5_vl")
    urls = [f"data:image/png;base64,{encoded(seed, size)}" for seed, size in ((1, (16, 32)), (2, (60, 21)))]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = chat(parts[0], {"type": "text", "text": "and"}, parts[1], {"type": "text", "text": "differ?"})
    expected = LLM(directory).chat(messages, GREEDY)
    with ServerProcess(f"qwen={directory}") as process:
        assert process.ports, process.output
        with openai.OpenAI(base_url=process.url("/v1", "openai"), api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(
                model="qwen", messages=messages, temperature=0, max_tokens=8
            )
            assert reply.choices[0].message.content == expected.text
            assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
            video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
            with pytest.raises(openai.BadRequestError, match="video") as caught:
                client.chat.completions.create(model="qwen", messages=chat(video))
            assert "not supported" in str(caught.value)


def test_the_image_tensor(vision, directory):
    prompt = {"prompt": "<image>What is this?", "images": [encoded(3)]}
    (expected,) = LLM(directory).generate(prompt, GREEDY, progress=False)
    body = {
        "text_input": prompt["prompt"],
        "image": encoded(3),
        "parameters": {"temperature": 0, "max_tokens": 8},
    }
    status, reply = vision.post("/v2/models/llava/generate", body)
    assert (status, reply["text_output"]) == (200, expected.text)
    with triton.InferenceServerClient(vision.address("http")) as client:
        metadata = client.get_model_metadata("llava")
    assert {"name": "image", "datatype": "BYTES", "shape": [-1]} in metadata["inputs"]
    status, reply = vision.post("/v2/models/llava/generate", {**body, "image": [encoded(3)] * 2})
    assert status == 400 and reply["error"].startswith(
        "image: there are 2, but the prompt has 1 image tokens"
    )


def test_text_model_rejects_images(server):
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(1)}"}}
    refused = pytest.raises(openai.BadRequestError, match="text only")
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none") as client, refused:
        client.chat.completions.create(model="neso-pilot", messages=chat(part))
