"""Qwen2-VL and Qwen2.5-VL compared with transformers: pixels, embeddings, rotary positions and tokens."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from parallel.thread_ranks import ThreadRanks
from PIL import Image
from qwen_vl_checkpoint import EDGE, IMAGE, MERGE, PATCH, make_qwen_vl
from runners.plan_builder import PlanBuilder, random_tokens, run
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from neso.engine.addons.image_positions import ImageGrid, RotaryPlan, position_offsets
from neso.engine.addons.input_embeddings import EmbeddingInputs
from neso.engine.client.llm import LLM
from neso.engine.runners.registry import runner_class
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.config_reader import InvalidConfig, UnsupportedModel
from neso.engine.specs.registry import decoder_spec
from neso.engine.specs.vision_spec import language_config, vision_spec
from neso.engine.vision.grid_tower import window_order
from neso.engine.vision.image_processor import ImageLimits, VisionInfo, read_processor
from neso.engine.weights.checkpoint import open_source
from neso.generation import InvalidParameter, SamplingParams

KINDS = ["qwen2_vl", "qwen2_5_vl"]
RUNNERS = ["reference", "native", "torch"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEDULES = {
    "whole": {},
    "one by one": {"max_prefill_chunk": 1},
    "chunks of 7, no prefix cache": {"max_prefill_chunk": 7, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 24, "block_size": 4, "max_prefill_chunk": 9},
}
AREA = {"shortest_edge": 2 * EDGE**2, "longest_edge": 24 * EDGE**2}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return random colours, smooth enough to keep detail when resized."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


CASES = [
    (f"{IMAGE}What is this?", [picture(60, 33, seed=1)]),
    (
        f"First {IMAGE} then\n{IMAGE}, so what is the difference?",
        [picture(70, 70, seed=2), picture(20, 90, seed=3)],
    ),
    ("No image at all", []),
    (f"Two {IMAGE}{IMAGE}", [picture(16, 8, seed=4), picture(40, 9, seed=5)]),
]


def processed(images: list[Image.Image]):
    processor = Qwen2VLImageProcessorPil(size=AREA, patch_size=PATCH, merge_size=MERGE)
    return processor(images, return_tensors="pt")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A checkpoint and transformers' model of it."""
    directory = make_qwen_vl(tmp_path_factory.mktemp(request.param), request.param)
    return directory, AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def oracle_inputs(oracle, llm: LLM, prompt: str, images: list[Image.Image]):
    values = processed(images) if images else {}
    grids = iter(values["image_grid_thw"].prod(-1).tolist() if images else [])
    image_token = oracle.config.image_token_id
    ids = []
    for token in llm.tokenizer.encode(prompt):
        ids += [token] * (next(grids) // MERGE**2 if token == image_token else 1)
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **values}
    return {**inputs, "mm_token_type_ids": (input_ids == image_token).int()}


def oracle_tokens(oracle, llm: LLM, prompt: str, images: list[Image.Image]) -> tuple[int, list[int]]:
    """Return the length of the prompt and transformers' greedy tokens."""
    inputs = oracle_inputs(oracle, llm, prompt, images)
    with torch.no_grad():
        output = oracle.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=2)
    length = inputs["input_ids"].shape[1]
    return length, output[0, length:].tolist()


@pytest.fixture(scope="module")
def expected(model):
    """The length of the prompt and transformers' greedy tokens of each case."""
    directory, oracle = model
    llm = LLM(directory, runner="reference", num_blocks=16)
    return [oracle_tokens(oracle, llm, prompt, images) for prompt, images in CASES]


@pytest.mark.parametrize(
    "runner, schedule",
    [
        ("reference", "chunks of 7, no prefix cache"),
        *(("native", schedule) for schedule in SCHEDULES),
        ("torch", "preempted"),
    ],
)
def test_tokens_equal_transformers(model, expected, runner, schedule):
    options = SCHEDULES[schedule]
    llm = LLM(model[0], runner=runner, **options)
    prompts = [{"prompt": prompt, "images": images} for prompt, images in CASES]
    results = llm.generate(prompts, GREEDY, progress=False)
    assert [(len(r.prompt_token_ids), r.outputs[0].token_ids) for r in results] == expected
    if "num_blocks" in options:
        assert llm.core.stats().preemptions
    llm.core.check_integrity()


@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_equal_transformers(model, runner):
    directory, oracle = model
    llm = LLM(directory, runner=runner, max_prefill_chunk=11)
    for prompt, images in CASES:
        params = SamplingParams(temperature=0, max_tokens=1, return_context_logits=True)
        (result,) = llm.generate({"prompt": prompt, "images": images}, params, progress=False)
        with torch.no_grad():
            expected = oracle(**oracle_inputs(oracle, llm, prompt, images)).logits[0]
        np.testing.assert_allclose(result.context_logits, expected.numpy(), atol=2e-3, rtol=2e-3)


def test_the_output_depends_on_the_size_of_an_image(model):
    """Images of one colour differ in their number of rows and columns only."""
    directory, _ = model
    llm = LLM(directory, runner="reference")
    pixels = [np.full((*size, 3), 99, np.uint8) for size in ((16, 64), (64, 16), (32, 32))]
    params = SamplingParams(temperature=0, max_tokens=1, return_context_logits=True)
    prompts = [{"prompt": f"{IMAGE}What?", "images": [image]} for image in pixels]
    last = [result.context_logits[-1] for result in llm.generate(prompts, params, progress=False)]
    assert not np.allclose(last[0], last[1], atol=1e-3) and not np.allclose(last[0], last[2], atol=1e-3)


@pytest.mark.parametrize("size", [(60, 33), (8, 8), (9, 70), (300, 20), (64, 24)])
def test_embeddings_equal_transformers(model, size):
    directory, oracle = model
    llm = LLM(directory, runner="reference")
    image = picture(*size, seed=7)
    values = processed([image])
    with torch.no_grad():
        features = oracle.get_image_features(values["pixel_values"], values["image_grid_thw"]).pooler_output
    pixels = read(directory).process(image).pixels
    rows = llm.core.addon(EmbeddingInputs).images.encode(pixels)
    np.testing.assert_allclose(rows, features[0].numpy(), atol=1e-4, rtol=1e-4)


def read(directory, **limits):
    return read_processor(directory, VisionInfo(0, "grid", EDGE, 1), ImageLimits(**limits))


@pytest.mark.parametrize(
    "size", [(60, 33), (33, 60), (8, 8), (3, 2), (1, 190), (500, 29), (299, 301), (64, 24)]
)
def test_pixels_equal_the_processor(model, size):
    image = picture(*size, seed=5)
    processor = read(model[0])
    ours, theirs = processor.process(image), processed([image])
    assert [1, ours.rows * MERGE, ours.columns * MERGE] == theirs["image_grid_thw"][0].tolist()
    cut = processor.normalization.apply(ours.pixels[0]).reshape(
        ours.rows, MERGE, PATCH, ours.columns, MERGE, PATCH, 3
    )
    patches = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, PATCH, PATCH)
    expected = theirs["pixel_values"].numpy().reshape(-1, 3, 2, PATCH, PATCH)
    np.testing.assert_allclose(np.broadcast_to(patches, expected.shape), expected, atol=1e-6)


def test_image_shrinks_to_the_token_limit(model):
    image = picture(100, 100)
    assert [read(model[0], max_tokens=limit).process(image).rows for limit in (100, 9, 3)] == [4, 3, 1]


@pytest.mark.parametrize(
    "size, limits, message",
    [
        ((402, 2), {}, "too narrow: an edge may be at most 200 times the other"),
        ((398, 2), {"max_tokens": 4}, "takes 20 tokens, max_image_tokens is 4"),
        ((60, 33), {"max_pixels": 60 * 33 - 1}, None),
        ((3, 2), {"max_pixels": 10}, "the model's size makes it 16 x 16"),
    ],
)
def test_images_beyond_the_limits_are_rejected(model, size, limits, message):
    processor = read(model[0], **limits)
    if message is None:
        assert processor.process(picture(*size)).rows == 3
        return
    with pytest.raises(InvalidParameter, match=message) as caught:
        processor.process(picture(*size))
    assert caught.value.field == "images"


def test_cached_images_are_not_encoded_again(model):
    directory, oracle = model
    llm = LLM(directory, runner="native", block_size=4)
    encoder = llm.core.addon(EmbeddingInputs).images
    prompt, images = CASES[1]
    request = {"prompt": prompt, "images": images}
    first = llm.generate(request, GREEDY, progress=False)[0].outputs[0].token_ids
    encoder.forget()
    hits = llm.core.stats().prefix_hit_tokens
    assert llm.generate(request, GREEDY, progress=False)[0].outputs[0].token_ids == first
    assert encoder.num_encoded == 2 and llm.core.stats().prefix_hit_tokens >= hits + 24
    # The same text with another second image shares the blocks before it.
    other = [images[0], picture(90, 20, seed=9)]
    hits = llm.core.stats().prefix_hit_tokens
    (result,) = llm.generate({**request, "images": other}, GREEDY, progress=False)
    assert result.outputs[0].token_ids == oracle_tokens(oracle, llm, prompt, other)[1]
    assert llm.core.stats().prefix_hit_tokens > hits


def test_draft_tokens_after_an_image_have_its_offset(model, expected):
    llm = LLM(model[0], runner="native", speculative="ngram", num_speculative_tokens=3)
    prompt, images = CASES[1]
    (result,) = llm.generate({"prompt": prompt, "images": images}, GREEDY, progress=False)
    assert result.outputs[0].token_ids == expected[1][1]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_ranks_get_the_positions_of_an_image(model, runner, layout):
    directory, _ = model

    def logits(*layout: int) -> np.ndarray:
        with open_source(directory) as source:
            spec = decoder_spec(language_config(source.config))
            options = RunnerOptions(dtype="float32", num_threads=1)
            ranks = ThreadRanks.open(runner_class(runner), spec, source, *layout, options)
        builder = PlanBuilder()
        ranks.allocate_cache(builder.layout)
        sequence = builder.sequence(random_tokens(20))
        offsets = position_offsets([ImageGrid(2, 3, 4)])
        found = []
        for count in (9, 11):
            plan = builder.plan([(sequence, count)])
            at = np.minimum(plan.positions(), offsets.shape[1] - 1)
            found.append(run(ranks, plan.with_part(RotaryPlan(offsets[:, at]))))
        return np.concatenate(found)

    np.testing.assert_allclose(logits(*layout), logits(1, 1), atol=2e-4)


def test_position_offsets_equal_transformers(model):
    _, oracle = model
    grids = [ImageGrid(3, 2, 4), ImageGrid(13, 3, 1), ImageGrid(16, 1, 1)]
    kinds = torch.zeros(1, 20, dtype=torch.int)
    for grid in grids:
        kinds[0, grid.first : grid.first + grid.rows * grid.columns] = 1
    kinds[0, 11:13] = 0
    # transformers takes adjacent images for one, so the last image is compared by its size alone.
    kinds[0, 16] = 0
    sizes = torch.tensor([[1, grid.rows * MERGE, grid.columns * MERGE] for grid in grids[:2]])
    expected = oracle.model.get_rope_index(torch.zeros_like(kinds).long(), kinds, sizes)[0][:, 0].numpy()
    offsets = position_offsets(grids)
    columns = np.minimum(np.arange(20), offsets.shape[1] - 1)
    np.testing.assert_array_equal(np.arange(20) + offsets[:, columns], expected)
    assert RotaryPlan(offsets).offsets.max() == 0


@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 2), (3, 5), (4, 1)])
def test_windows_hold_every_cell_once(rows, columns):
    order, starts = window_order(rows, columns, 2)
    assert sorted(order.tolist()) == list(range(rows * columns)) and starts[-1] == rows * columns
    for start, end in itertools.pairwise(starts):
        row, column = np.divmod(order[start:end], columns)
        assert len(set(zip(row // 2, column // 2, strict=True))) == 1


_PUBLISHED_TEXT = {
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1e6,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "hidden_size": 2048,
}


def test_config_with_the_published_sizes():
    """The fields of a released Qwen2.5-VL with 3 billion parameters."""
    vision = {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    }
    config = {
        **_PUBLISHED_TEXT,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
    }
    tower, text = vision_spec(config), decoder_spec(language_config(config))
    assert (tower.tile_edge, tower.window, tower.head_dim, tower.image_token_id) == (28, 4, 80, 151655)
    assert [layer for layer in range(32) if not tower.attends_within_windows(layer)] == [7, 15, 23, 31]
    assert {rotary.sections for rotary in text.rotaries} == {(16, 24, 24)}
    assert text.widest_window is None and text.tied_embeddings


def test_config_of_older_checkpoints_is_flat(model, expected, tmp_path):
    directory, _ = model
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    llm = LLM(tmp_path, runner="native")
    prompt, images = CASES[0]
    (result,) = llm.generate({"prompt": prompt, "images": images}, GREEDY, progress=False)
    assert result.outputs[0].token_ids == expected[0][1]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"num_heads": 8}, "heads of 2, which must be divisible by 4"),
        ({"num_heads": 5}, "is no multiple of 5"),
        ({"hidden_act": "other"}, "'other' is not supported"),
    ],
)
def test_unsupported_towers_are_rejected(model, overrides, message):
    config = json.loads((model[0] / "config.json").read_text())
    config["vision_config"] |= overrides
    with pytest.raises((InvalidConfig, UnsupportedModel), match=message):
        vision_spec(config)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"patch_size": 5}, "squares of 10 pixels do not fit"),
        ({"do_resize": False}, "do_resize false"),
        ({"max_pixels": 0}, "max_pixels 0"),
        ({"size": 7}, "size of 7"),
        ({"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' are not supported"),
    ],
)
def test_unsupported_processors_are_rejected(model, tmp_path, overrides, message):
    config = json.loads((model[0] / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, **overrides}))
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path)
