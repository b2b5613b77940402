"""Engines without a tokenizer or with the tokenizer of another model; requests without detokenization."""

from __future__ import annotations

import shutil

import pytest

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.text.tokenizer import Tokenizer
from neso.generation import GenerationRequest, GuidedDecoding, InvalidParameter, SamplingParams

PROMPT = list(range(10, 22))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def weights(llama_checkpoint, tmp_path_factory):
    """The checkpoint without its tokenizer."""
    directory = tmp_path_factory.mktemp("weights")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama_checkpoint / name, directory)
    return directory


@pytest.fixture(scope="module")
def expected(llama_checkpoint):
    return tokens(LLM(llama_checkpoint))


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([PROMPT], params, progress=False)[0].outputs[0].token_ids


def test_token_ids_in_and_out(weights, expected):
    llm = LLM(weights, skip_tokenizer_init=True)
    (result,) = llm.generate([PROMPT], GREEDY, progress=False)
    assert (result.outputs[0].token_ids, result.text) == (expected, "")


@pytest.mark.parametrize(
    ("prompt", "further", "message"),
    [
        ("Hello", {}, "prompt: this engine has no tokenizer"),
        (PROMPT, {"stop": ("x",)}, "stop: stop strings need detokenization"),
        (PROMPT, {"bad_words": ("x",)}, "prompt: this engine has no tokenizer"),
        (PROMPT, {"guided_decoding": GuidedDecoding(regex="a")}, "no bytes for single tokens"),
    ],
)
def test_text_features_are_rejected(weights, prompt, further, message):
    llm = LLM(weights, skip_tokenizer_init=True)
    with pytest.raises(InvalidParameter, match=message):
        llm.generate([prompt], SamplingParams(max_tokens=4, **further), progress=False)


def test_the_tokenizer_of_another_model(weights, llama_checkpoint, expected):
    llm = LLM(weights, tokenizer=str(llama_checkpoint))
    (result,) = llm.generate([PROMPT], GREEDY, progress=False)
    assert result.outputs[0].token_ids == expected and result.text
    guided = SamplingParams(max_tokens=8, guided_decoding=GuidedDecoding(regex="abc"))
    assert llm.generate(["x"], guided, progress=False)[0].text == "abc"


async def test_error_without_a_tokenizer(weights):
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        await AsyncEngine.start(EngineConfig(model=str(weights)), in_process=True)


async def test_detokenization_is_per_request(llama_checkpoint, expected):
    engine = await AsyncEngine.start(EngineConfig(model=str(llama_checkpoint)), in_process=True)
    try:
        for detokenize in (True, False):
            request = GenerationRequest(PROMPT, GREEDY, detokenize=detokenize)
            deltas = [delta async for output in engine.generate(request) for delta in output.deltas]
            assert [token for delta in deltas for token in delta.token_ids] == expected
            text = "".join(delta.text for delta in deltas)
            whole = Tokenizer.from_model(llama_checkpoint).decode(PROMPT + expected)
            assert whole.endswith(text) if detokenize else text == ""
        stops = SamplingParams(max_tokens=4, stop=("x",))
        with pytest.raises(InvalidParameter, match="stop: stop strings need detokenization"):
            await anext(engine.generate(GenerationRequest(PROMPT, stops, detokenize=False)))
    finally:
        await engine.stop()
