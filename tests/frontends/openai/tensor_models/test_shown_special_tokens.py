"""Special tokens needed by a parser, for models that show all or none."""

from __future__ import annotations

import json

from neso.backends.vllm.conversion import to_vllm_sampling
from neso.frontends.openai.tensor_models.input_tensors import sampling_json
from neso.generation import SamplingParams


def test_all_special_tokens_are_shown() -> None:
    needed = SamplingParams(shown_special_tokens=("[TOOL_CALLS]",))
    assert json.loads(sampling_json(needed))["skip_special_tokens"] is False
    assert "shown_special_tokens" not in json.loads(sampling_json(needed))
    assert "skip_special_tokens" not in json.loads(sampling_json(SamplingParams()))
    assert to_vllm_sampling(needed)["skip_special_tokens"] is False
    assert to_vllm_sampling(SamplingParams())["skip_special_tokens"] is True
