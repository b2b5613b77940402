"""`neso.LLM`."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.generation import FinishReason, InvalidParameter, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(llama_checkpoint):
    return LLM(llama_checkpoint, runner="reference")


def test_results_are_in_order_and_complete(llm):
    prompts = ["The quick", "A server answers", [10, 11, 12]]
    together = llm.generate(prompts, GREEDY, progress=False)
    alone = [llm.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts]
    assert [r.text for r in together] == [r.text for r in alone]
    assert [r.prompt for r in together] == prompts
    assert together[0].prompt_token_ids == llm.tokenizer.encode("The quick")
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_used == 0


def test_progress_bar_does_not_change_results(llm, capsys):
    assert (
        llm.generate("The quick", GREEDY)[0].text == llm.generate("The quick", GREEDY, progress=False)[0].text
    )


def test_stream_gives_the_same_text(llm):
    outputs = list(llm.stream("The quick", GREEDY))
    assert len(outputs) > 1
    assert (
        "".join(d.text for o in outputs for d in o.deltas)
        == llm.generate("The quick", GREEDY, progress=False)[0].text
    )
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].usage.completion_tokens == sum(len(d.token_ids) for o in outputs for d in o.deltas)


def test_streams_interleave_and_closing_one_aborts_it(llm):
    first, second = llm.stream("The quick", GREEDY), llm.stream("A server", GREEDY)
    texts = [next(first).deltas[0].text, next(second).deltas[0].text]
    expected = llm.generate(["The quick", "A server"], GREEDY, progress=False)
    first.close()
    texts[1] += "".join(d.text for o in second for d in o.deltas)
    assert texts[1] == expected[1].text and expected[0].text.startswith(texts[0])
    assert not llm.core.has_work
    assert llm.core.scheduler.kv.pool.num_used == 0


def test_n_sequences_and_seed(llm):
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=10, ignore_eos=True)
    (result,) = llm.generate("The quick", params, progress=False)
    (again,) = llm.generate("The quick", params, progress=False)
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in result.outputs}) > 1
    assert [o.token_ids for o in result.outputs] == [o.token_ids for o in again.outputs]


def test_stop_string_ends_the_text_before_it(llm):
    (free,) = llm.generate(
        "The quick", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), progress=False
    )
    stop = free.text[4:6]
    cut = free.text[: free.text.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,))
    (result,) = llm.generate("The quick", params, progress=False)
    assert (result.text, result.outputs[0].finish_reason, result.outputs[0].stop_reason) == (
        cut,
        FinishReason.STOP,
        stop,
    )
    assert not llm.core.has_work


def test_stop_token_is_not_output(llm):
    (free,) = llm.generate(
        [10, 11], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), progress=False
    )
    ids = free.outputs[0].token_ids
    stop = ids[5]
    kept = ids[: ids.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    (result,) = llm.generate([10, 11], params, progress=False)
    output = result.outputs[0]
    assert (output.token_ids, output.stop_reason) == ([*kept, stop], stop)
    assert output.text == llm.tokenizer.decode(kept)


def test_logprobs_and_prompt_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (result,) = llm.generate([10, 11, 12, 13], params, progress=False)
    output = result.outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 4
    assert [entry.rank for entry in output.logprobs] == [1, 1, 1, 1]
    assert all(len(entry.top) == 3 and entry.top[0][1] == entry.logprob for entry in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    scored = [entry.token_id for entry in result.prompt_logprobs[1:]]
    assert scored == [11, 12, 13]
    # Teacher forcing: scoring the generated text gives the log probabilities of its generation.
    whole = [10, 11, 12, 13, *output.token_ids]
    (again,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    rescored = [entry.logprob for entry in again.prompt_logprobs[4:]]
    assert rescored == pytest.approx([entry.logprob for entry in output.logprobs], abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1] * 600, {}, "prompt"),
        ("", {}, "prompt"),
        ([5, 9999], {}, "prompt"),
        ("x", {"logit_bias": {9999: 1.0}}, "logit_bias"),
        ("x", {"stop_token_ids": (9999,)}, "stop_token_ids"),
        ("x", {"min_tokens": 600}, "min_tokens"),
    ],
)
def test_unsupported_requests_are_rejected(llm, prompt, params, field):
    with pytest.raises(InvalidParameter) as caught:
        llm.generate(["fine", prompt], SamplingParams(**params), progress=False)
    assert caught.value.field == field
    assert not llm.core.has_work, "nothing of the batch was started"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"logprobs": -2}, "logprobs"),
        ({"temperature": "warm"}, "temperature"),
        ({"tempreature": 1}, "tempreature"),
        ({"presence_penalty": 1e7}, "presence_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"-1": 2}}, "logit_bias"),
    ],
)
def test_invalid_sampling_parameters_name_their_field(params, field):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams.from_mapping(params)
    assert caught.value.field == field


def test_max_tokens_is_limited_to_the_context(llm):
    (result,) = llm.generate(
        [[7] * 500], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), progress=False
    )
    assert len(result.outputs[0].token_ids) == 12
    assert result.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "options", [{"max_model_len": 10_000}, {"num_blocks": 1}, {"kv_cache_memory": 10}, {"runner": "warp"}]
)
def test_invalid_engine_options(llama_checkpoint, options):
    with pytest.raises((EngineError, ValueError), match=next(iter(options)) + "|warp"):
        LLM(llama_checkpoint, **options)


@pytest.mark.parametrize("runner", ["auto", "transformers"])
def test_invalid_max_model_len_is_rejected_before_loading(llama_checkpoint, tmp_path, runner):
    directory = shutil.copytree(llama_checkpoint, tmp_path / "no_weights")
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor[:1].clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = EngineConfig.from_options(str(directory), {"runner": runner, "max_model_len": 10_000})
    with pytest.raises(EngineError, match="max_model_len 10000 must be between 2 and the model's 512"):
        load_engine(config)
