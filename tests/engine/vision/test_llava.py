"""Images in prompts compared with transformers: pixels, embedding rows, and tokens."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_llava
from PIL import Image
from transformers import LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from neso.engine.addons.input_embeddings import EmbeddingInputs
from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.engine.vision.image_processor import ImageLimits, VisionInfo, read_processor
from neso.generation import InvalidParameter, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEDULES = {
    "whole": {},
    "one by one": {"max_prefill_chunk": 1},
    "chunks of 7, no prefix cache": {"max_prefill_chunk": 7, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 24, "block_size": 4, "max_prefill_chunk": 9},
}


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return random colours, smooth enough to keep detail when resized."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def open_processor(directory: Path):
    return read_processor(directory, VisionInfo(0, "square", 28, 16), ImageLimits())


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def oracle(llava):
    return LlavaForConditionalGeneration.from_pretrained(
        llava, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def continued(oracle, llm: LLM, prompt: str, images: list[Image.Image]) -> list[int]:
    """Return transformers' greedy tokens."""
    ids = []
    for token in llm.tokenizer.encode(prompt):
        ids += [token] * (16 if token == oracle.config.image_token_id else 1)
    size = {"height": 28, "width": 28}
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    inputs = {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]} if images else {}
    with torch.no_grad():
        output = oracle.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=2,
            **inputs,
        )
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_tokens_equal_transformers(llava, oracle, runner, options):
    llm = LLM(llava, runner=runner, **options)
    cases = [
        ("<image>What is this?", [picture(seed=1)]),
        ("First <image> then <image>, so", [picture(60, 28, seed=2), picture(28, 90, seed=3)]),
        ("No image at all", []),
        ("<image>", [picture(seed=4)]),
    ]
    prompts = [{"prompt": prompt, "images": images} for prompt, images in cases]
    results = llm.generate(prompts, GREEDY, progress=False)
    expected = [continued(oracle, llm, prompt, images) for prompt, images in cases]
    assert [r.outputs[0].token_ids for r in results] == expected
    if "num_blocks" in options:
        assert llm.core.stats().preemptions
    llm.core.check_integrity()


def test_the_output_depends_on_the_image(llava):
    llm = LLM(llava, runner="reference")
    prompts = [{"prompt": "<image>What?", "images": [picture(seed=n)]} for n in range(4)]
    results = llm.generate(prompts, GREEDY, progress=False)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) > 1


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (28, 28), (9, 9), (500, 29), (29, 301), (28, 10)])
def test_pixels_equal_the_processor(llava, size):
    image = picture(*size, seed=5)
    processor = open_processor(llava)
    ours = processor.normalization.apply(processor.process(image).pixels[0]).transpose(2, 0, 1)
    theirs = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})(image)
    np.testing.assert_allclose(ours, theirs["pixel_values"][0], atol=1e-6)


@pytest.mark.parametrize("size", [(20, 40), (40, 20), (21, 19), (27, 60)])
def test_small_images_are_padded_with_black(size):
    image = picture(*size, seed=6)
    crop = {"height": 28, "width": 28}
    theirs = CLIPImageProcessorPil(do_resize=False, crop_size=crop, do_normalize=False, do_rescale=False)(
        image
    )
    processor = replace(open_processor(Path("/nonexistent")), resize_to=None)
    np.testing.assert_array_equal(
        processor.process(image).pixels[0].transpose(2, 0, 1), theirs["pixel_values"][0]
    )


def test_cached_images_are_not_encoded_again(llava):
    llm = LLM(llava, runner="native", block_size=4)
    encoder = llm.core.addon(EmbeddingInputs).images
    prompt = {"prompt": "<image>What is this thing here?", "images": [picture(seed=1)]}
    first = llm.generate(prompt, GREEDY, progress=False)[0].outputs[0].token_ids
    hits = llm.core.stats().prefix_hit_tokens
    encoder.forget()
    # All of its rows are in the prefix cache, identified by the pixels.
    assert llm.generate(prompt, GREEDY, progress=False)[0].outputs[0].token_ids == first
    assert encoder.num_encoded == 1 and llm.core.stats().prefix_hit_tokens >= hits + 16
    # Another image in the same text, with the same placeholder tokens.
    hits = llm.core.stats().prefix_hit_tokens
    llm.generate({**prompt, "images": [picture(seed=2)]}, GREEDY, progress=False)
    assert encoder.num_encoded == 2 and llm.core.stats().prefix_hit_tokens == hits


def test_image_formats(llava):
    llm = LLM(llava, runner="reference")
    image = picture(seed=1)
    encoded = base64.b64encode(png(image)).decode()
    lines = base64.encodebytes(png(image)).decode()
    forms = [image, png(image), encoded, lines, f"data:image/png;base64,{encoded}", np.asarray(image)]
    texts = {
        llm.generate({"prompt": "<image>x", "images": [form]}, GREEDY, progress=False)[0].text
        for form in forms
    }
    assert len(texts) == 1
    by_vllm = {"prompt": "<image>x", "multi_modal_data": {"image": image}}
    assert llm.generate(by_vllm, GREEDY, progress=False)[0].text in texts
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    chats = [
        llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], GREEDY).text
        for part in (url, {"type": "image", "image": image})
    ]
    assert chats[0] == chats[1]


@pytest.mark.parametrize(
    "prompt, images, message",
    [
        ("<image>", [], "0, but the prompt has 1"),
        ("none", [picture()], "1, but the prompt has 0"),
        ("<image>", [b"no image"], "cannot be read: expected one of PNG, JPEG"),
        ("<image>", ["https://example.com/x.png"], "not fetched"),
        ("<image>", ["file:///etc/passwd"], "not fetched"),
        ("<image>", ["data:image/png,plain"], "base64"),
        ("<image>", ["§§"], "base64"),
        ("<image>", [np.zeros((4, 4), np.uint8)], "uint8"),
        ("<image>", [7], "int"),
    ],
)
def test_invalid_images_are_rejected(llava, prompt, images, message):
    llm = LLM(llava, runner="reference", num_blocks=32)
    with pytest.raises(InvalidParameter, match=message) as caught:
        llm.generate({"prompt": prompt, "images": images}, GREEDY, progress=False)
    assert caught.value.field == "images"


def test_decompressed_size_is_limited(llava):
    llm = LLM(llava, runner="reference", num_blocks=32, max_image_pixels=1000)
    with pytest.raises(InvalidParameter, match="too large"):
        llm.generate({"prompt": "<image>", "images": [png(picture())]}, GREEDY, progress=False)


@pytest.mark.parametrize("size", [(1, 8192), (8192, 1)])
def test_too_long_image_is_rejected_before_resizing(llava, monkeypatch, size):
    def resize(image, size, **options):
        raise AssertionError(f"resized to {size}")

    processor = open_processor(llava)
    file = png(Image.new("RGB", size))
    smaller = replace(processor, limits=ImageLimits(28 * 28 * 8192 - 1))
    with monkeypatch.context() as patched, pytest.raises(InvalidParameter, match="too long") as caught:
        patched.setattr(Image.Image, "resize", resize)
        smaller.process(file)
    assert caught.value.field == "images"
    fitting = replace(processor, limits=ImageLimits(28 * 28 * 8192))
    assert fitting.process(file).pixels.shape == (1, 28, 28, 3)


def test_too_long_prompt_is_rejected_before_reading_images(llava):
    llm = LLM(llava, runner="reference", max_model_len=40, num_blocks=32)
    prompt = {"prompt": "<image><image><image>", "images": [b"no image"] * 3}
    with pytest.raises(InvalidParameter, match=r"tokens long.*context is 40") as caught:
        llm.generate(prompt, GREEDY, progress=False)
    assert caught.value.field == "prompt"


def test_vision_tower_error_fails_only_its_request(llava, monkeypatch):
    llm = LLM(llava, runner="reference")

    def broken(pixels):
        raise MemoryError("no room")

    monkeypatch.setattr(llm.core.addon(EmbeddingInputs).images, "encode", broken)
    stream = llm.stream("A text", GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="processing its images failed: no room"):
        llm.generate({"prompt": "<image>x", "images": [picture()]}, GREEDY, progress=False)
    assert list(stream)[-1].finished
    llm.core.check_integrity()


def test_text_models_reject_images(tmp_path):
    llm = LLM(make_checkpoint(tmp_path), runner="reference", num_blocks=16)
    with pytest.raises(InvalidParameter, match="text only"):
        llm.generate({"prompt": "x", "images": [picture()]}, GREEDY, progress=False)


@pytest.mark.parametrize(
    "overrides", [{"vision_feature_select_strategy": "full"}, {"vision_feature_layer": 2}]
)
def test_vision_feature_options(tmp_path, overrides):
    directory = make_llava(tmp_path, text="mistral", **overrides)
    llm = LLM(directory, runner="native")
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    processor = open_processor(directory)
    pixels = processor.process(picture(seed=3)).pixels
    values = torch.tensor(processor.normalization.apply(pixels).transpose(0, 3, 1, 2))
    with torch.no_grad():
        features = model.get_image_features(
            pixel_values=values,
            vision_feature_layer=model.config.vision_feature_layer,
            vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        )
    expected = features.pooler_output[0]
    rows = llm.core.addon(EmbeddingInputs).images.encode(pixels)
    assert len(rows) == llm.info.vision.tokens_per_tile
    np.testing.assert_allclose(rows, expected.numpy(), atol=1e-4)
