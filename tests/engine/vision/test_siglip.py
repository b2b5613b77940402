"""SigLIP towers compared with transformers: LLaVA with SigLIP, Idefics 3 and SmolVLM."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import make_llava
from idefics_checkpoint import EDGE, PATCH, SCALE, make_idefics
from PIL import Image
from transformers import AutoProcessor, Idefics3ForConditionalGeneration, LlavaForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from neso.engine.client.llm import LLM
from neso.engine.core.request import PromptImage
from neso.engine.errors import EngineError
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.vision.image_encoder import ImageEncoder
from neso.engine.vision.image_processor import ImageLimits, VisionInfo, read_processor
from neso.generation import InvalidParameter, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ROWS = (EDGE // PATCH // SCALE) ** 2
SCHEDULES = {
    "whole": {},
    "chunks of 7, no prefix cache": {"max_prefill_chunk": 7, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 22, "block_size": 4, "max_prefill_chunk": 9},
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return random colours, smooth enough to keep detail when resized."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def generated(model, inputs) -> list[int]:
    """Return transformers' greedy tokens."""
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=2)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
@pytest.mark.parametrize(
    "overrides, rows",
    [
        ({"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, 16),
        ({"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}, 15),
    ],
)
def test_llava_with_siglip_equals_transformers(tmp_path, runner, overrides, rows):
    directory = make_llava(tmp_path, tower="siglip", text="qwen2", **overrides)
    llm = LLM(directory, runner=runner)
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    prompt, images = "Is <image> like <image>?", [picture(50, 31, seed=1), picture(28, 28, seed=2)]
    ids = [
        part
        for token in llm.tokenizer.encode(prompt)
        for part in [token] * (rows if token == model.config.image_token_id else 1)
    ]
    values = SiglipImageProcessorPil(size={"height": 28, "width": 28})(images, return_tensors="pt")
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": values["pixel_values"]}
    expected = generated(model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})
    (result,) = llm.generate({"prompt": prompt, "images": images}, GREEDY, progress=False)
    assert len(result.prompt_token_ids) == len(ids)
    assert result.outputs[0].token_ids == expected


@pytest.fixture(scope="module")
def idefics(tmp_path_factory):
    return make_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def idefics_oracle(idefics):
    model = Idefics3ForConditionalGeneration.from_pretrained(idefics, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(idefics)


def idefics_tokens(oracle, prompt: str, images: list[Image.Image]) -> tuple[int, list[int]]:
    """Return the length of the prompt and transformers' greedy tokens."""
    model, processor = oracle
    inputs = processor(text=[prompt], images=[images] if images else None, return_tensors="pt")
    return inputs["input_ids"].shape[1], generated(model, inputs)


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_idefics_equals_transformers(idefics, idefics_oracle, runner, options):
    llm = LLM(idefics, runner=runner, **options)
    cases = [
        ("<image>What is this?", [picture(60, 33, seed=1)]),
        ("First <image> then\n<image>, so", [picture(70, 70, seed=2), picture(20, 90, seed=3)]),
        ("No image at all", []),
    ]
    prompts = [{"prompt": prompt, "images": images} for prompt, images in cases]
    results = llm.generate(prompts, GREEDY, progress=False)
    expected = [idefics_tokens(idefics_oracle, prompt, images) for prompt, images in cases]
    assert [len(r.prompt_token_ids) for r in results] == [length for length, _ in expected]
    assert [r.outputs[0].token_ids for r in results] == [tokens for _, tokens in expected]
    if "num_blocks" in options:
        assert llm.core.stats().preemptions
    llm.core.check_integrity()


def test_smolvlm_is_the_same_architecture(idefics, idefics_oracle, tmp_path):
    for file in idefics.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((idefics / "config.json").read_text())
    config |= {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, runner="native")
    prompt = {"prompt": "<image>?", "images": [picture(60, 33, seed=1)]}
    (result,) = llm.generate(prompt, GREEDY, progress=False)
    expected = idefics_tokens(idefics_oracle, prompt["prompt"], prompt["images"])
    assert (len(result.prompt_token_ids), result.outputs[0].token_ids) == expected


def tiles(directory, **limits):
    return read_processor(directory, VisionInfo(0, "tiles", EDGE, ROWS), ImageLimits(**limits))


@pytest.mark.parametrize("size", [(56, 56), (57, 20), (20, 57), (1, 300), (3, 2), (28, 28), (301, 299)])
def test_tiles_equal_the_processor(idefics, size):
    image = picture(*size, seed=5)
    processor = tiles(idefics)
    ours = processor.process(image)
    theirs = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE}, return_row_col_info=True
    )([[image]])
    assert (ours.rows, ours.columns) == (theirs["rows"][0][0], theirs["cols"][0][0])
    values = processor.normalization.apply(ours.pixels).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(values, theirs["pixel_values"][0], atol=1e-6)


def test_an_image_without_splitting_is_one_tile(idefics):
    image = picture(57, 20, seed=5)
    ours = replace(tiles(idefics), splits=False).process(image)
    theirs = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE}, do_image_splitting=False
    )([[image]])
    assert (ours.rows, ours.columns) == (0, 0)
    values = tiles(idefics).normalization.apply(ours.pixels).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(values, theirs["pixel_values"][0], atol=1e-6)


@pytest.mark.parametrize("max_tokens, num_tiles", [(5 * ROWS, 5), (5 * ROWS - 1, 1), (ROWS, 1)])
def test_image_shrinks_to_the_token_limit(idefics, max_tokens, num_tiles):
    assert len(tiles(idefics, max_tokens=max_tokens).process(picture(56, 56)).pixels) == num_tiles


def test_model_whose_tiles_exceed_the_token_limit_is_rejected(idefics):
    with pytest.raises(EngineError, match=f"at least {ROWS} tokens, max_image_tokens is {ROWS - 1}"):
        LLM(idefics, runner="reference", max_image_tokens=ROWS - 1)


def test_images_beyond_the_context_are_rejected(idefics):
    llm = LLM(idefics, runner="reference", max_model_len=30, num_blocks=32)
    prompt = {"prompt": "<image><image>", "images": [picture(56, 56), b"not read"]}
    with pytest.raises(InvalidParameter, match="context is 30"):
        llm.generate(prompt, GREEDY, progress=False)


def test_equal_bytes_of_another_shape_are_another_image():
    class Unused:
        def encode(self, pixels):
            raise AssertionError

    encoder = ImageEncoder(Unused())
    positions = np.arange(2, dtype=np.int32).tobytes()
    rows = [
        encoder.embedding_rows([PromptImage(positions, bytes(24), shape)]) for shape in ((1, 2, 4), (1, 4, 2))
    ]
    assert not set(rows[0].digests) & set(rows[1].digests)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"max_image_size": {"longest_edge": 14}}, "tiles of 14 pixels do not fit"),
        ({"size": {"height": 3, "width": 3}}, "must have a longest_edge"),
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' are not supported"),
    ],
)
def test_unsupported_processors_are_rejected(idefics, tmp_path, overrides, message):
    config = json.loads((idefics / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, **overrides}))
    with pytest.raises(UnsupportedModel, match=message):
        tiles(tmp_path)
