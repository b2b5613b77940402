"""Speculative decoding on the server: options, metrics, and draft tokens from clients."""

from __future__ import annotations

import numpy as np
from test_llm_backend import PROMPT, outputs, request
from test_llm_metrics import serving, value

from neso.models import SHIPPED_MODELS
from neso.server.tensor import Tensor


async def text(core, sent) -> str:
    (response,) = await outputs(core, sent)
    (tensor,) = [tensor for tensor in response.outputs if tensor.name == "text_output"]
    return tensor.strings()[0]


async def test_a_draft_model_changes_no_text_and_has_metrics(tmp_path):
    parameters = {"max_tokens": 24, "ignore_eos": True}
    async with serving(tmp_path / "plain") as core:
        expected = await text(core, request(parameters=parameters))
    options = {
        "speculative_model": str(SHIPPED_MODELS["neso-pilot"]),
        "num_speculative_tokens": 3,
        "adaptive_speculation": False,
    }
    async with serving(tmp_path / "guessing", **options) as core:
        assert await text(core, request(parameters=parameters)) == expected
        drafts = value(core, "vllm:spec_decode_num_drafts_total")
        accepted = value(core, "vllm:spec_decode_num_accepted_tokens_total")
        assert 5 <= drafts <= 8
        assert accepted == value(core, "vllm:spec_decode_num_draft_tokens_total") == 23 - drafts
        assert drafts == value(core, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0")


async def test_draft_tokens_of_a_client(tmp_path):
    async with serving(tmp_path) as core:
        ids = core.model("pilot").language_model.text
        parameters = {"max_tokens": 8, "ignore_eos": True}
        expected = await text(core, request(parameters=parameters))
        guess = ids.encode(PROMPT + expected)[len(ids.encode(PROMPT)) :][:3]
        by_parameter = request(parameters={**parameters, "draft_input_ids": str(guess)})
        by_tensor = request(parameters=parameters)
        by_tensor.inputs["draft_input_ids"] = Tensor.from_numpy("draft_input_ids", np.array(guess, np.int32))
        for sent in (by_parameter, by_tensor):
            (response,) = await outputs(core, sent)
            tensors = {tensor.name: tensor for tensor in response.outputs}
            assert tensors["text_output"].strings()[0] == expected
            assert tensors["total_draft_tokens"].array.tolist() == [3]
            accepted = tensors["total_accepted_draft_tokens"].array.tolist()[0]
            assert accepted >= 1
            assert tensors["acceptance_rate"].array[0] == np.float32(accepted / 3)


async def test_invalid_draft_tokens_name_their_field(tmp_path):
    async with serving(tmp_path) as core:
        sent = request(parameters={"draft_input_ids": "[99999999]"})
        (response,) = [response async for response in core.model("pilot").submit(sent)]
        assert "draft_input_ids" in str(response.error)
