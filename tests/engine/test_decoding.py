"""Decoding options of `neso.LLM`: beam search, best_of, stop words, bad words, logits."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD, VOCAB_SIZE, load_oracle

from neso.engine.client.llm import LLM
from neso.generation import FinishReason, InvalidParameter, SamplingParams

PROMPT = "The quick brown fox"
FREE = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module", params=["reference", "native", "torch"])
def llm(request, llama_checkpoint):
    return LLM(llama_checkpoint, runner=request.param, dtype="float32", max_prefill_chunk=5)


def run(llm, prompt=PROMPT, **params):
    (result,) = llm.generate(prompt, SamplingParams(**{**FREE, **params}), progress=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_used == 0
    return result


def oracle(llama_checkpoint, ids, **options):
    with torch.no_grad():
        return load_oracle(llama_checkpoint).generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **{
                "max_new_tokens": 20,
                "do_sample": False,
                "eos_token_id": EOS,
                "pad_token_id": PAD,
                "return_dict_in_generate": True,
                "output_scores": True,
                **options,
            },
        )


def test_beam_search(llm, llama_checkpoint):
    result = run(llm, beam_width=4, n=3, length_penalty=0.5, ignore_eos=False, logprobs=2)
    expected = oracle(
        llama_checkpoint, result.prompt_token_ids, num_beams=4, num_return_sequences=3, length_penalty=0.5
    )
    for output, row, score in zip(
        result.outputs, expected.sequences, expected.sequences_scores.tolist(), strict=True
    ):
        tokens = row[len(result.prompt_token_ids) :].tolist()
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert set(tokens[len(output.token_ids) :]) <= {PAD}
        assert output.cumulative_logprob / len(output.token_ids) ** 0.5 == pytest.approx(score, rel=1e-4)
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)
        total = sum(entry.logprob for entry in output.logprobs)
        assert total == pytest.approx(output.cumulative_logprob, rel=1e-4)


def test_beams_are_output_once_while_another_request_streams(llm):
    other = llm.stream("A server", SamplingParams(**FREE))
    next(other)
    outputs = list(llm.stream(PROMPT, SamplingParams(**FREE, beam_width=3, n=2)))
    assert [output.finished for output in outputs] == [True]
    assert [delta.index for delta in outputs[0].deltas] == [0, 1]
    text = "".join(delta.text for output in other for delta in output.deltas)
    assert run(llm, "A server").text.endswith(text)
    assert [delta.text for delta in outputs[0].deltas] == [
        o.text for o in run(llm, beam_width=3, n=2).outputs
    ]


def test_stop_string_truncates_a_beam(llm):
    whole = run(llm, beam_width=3).outputs[0]
    stop = whole.text[3:5]
    cut = run(llm, beam_width=3, stop=(stop,)).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 20


def test_best_of_returns_the_most_likely(llm):
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 8}
    every = run(llm, n=5, logprobs=0, **params)
    every.outputs.sort(key=lambda o: -(o.cumulative_logprob or 0) / len(o.token_ids))
    best = run(llm, n=2, best_of=5, **params)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in every.outputs[:2]]
    assert [o.text for o in best.outputs] == [o.text for o in every.outputs[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert all(o.logprobs is None for o in best.outputs)
    (streamed,) = llm.stream(PROMPT, SamplingParams(**{**FREE, **params}, n=2, best_of=5))
    assert [delta.token_ids for delta in streamed.deltas] == [o.token_ids for o in best.outputs]
    assert streamed.usage.completion_tokens == 40


def test_best_of_ranks_texts_without_stop_strings(llm):
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 8, "stop": ("e", "a")}
    every = run(llm, n=4, logprobs=0, **params)
    every.outputs.sort(key=lambda o: -(o.cumulative_logprob or 0) / len(o.token_ids))
    best = run(llm, n=1, best_of=4, **params)
    assert best.outputs[0].token_ids == every.outputs[0].token_ids


def test_stop_words_end_the_text_and_are_removed(llm):
    free = run(llm).outputs[0]
    word = tuple(free.token_ids[6:9])
    result = run(llm, stop_words=(word, (word[0], 383), (383, 383, 383, 383)))
    (output,) = result.outputs
    assert output.token_ids == free.token_ids[:9]
    assert output.finish_reason is FinishReason.STOP
    decode = llm.tokenizer.decode
    assert output.stop_reason == decode(list(word))
    assert output.text == decode(result.prompt_token_ids + free.token_ids[:6])[len(PROMPT) :]
    kept = run(llm, stop_words=(word,), include_stop_str_in_output=True).outputs[0]
    assert kept.text == decode(result.prompt_token_ids + free.token_ids[:9])[len(PROMPT) :]
    late = run(llm, stop_words=(word,), min_tokens=9).outputs[0]
    assert late.text == free.text, "held tokens come in the end"
    pieces = [
        d.text for o in llm.stream(PROMPT, SamplingParams(**FREE, stop_words=(word,))) for d in o.deltas
    ]
    assert "".join(pieces) == output.text


def test_bad_words_as_text_and_tokens(llm):
    free = run(llm).outputs[0]
    text = llm.tokenizer.decode(free.token_ids[:1]).strip() or llm.tokenizer.decode(free.token_ids[:1])
    pair = tuple(free.token_ids[3:5])
    result = run(llm, bad_words=(pair,)).outputs[0]
    assert result.token_ids[:4] == free.token_ids[:4] and result.token_ids[4] != free.token_ids[4]
    for written in (text, " " + text):
        ids = llm.tokenizer.encode(written, add_special_tokens=False)
        tokens = run(llm, bad_words=(text,), max_tokens=40).outputs[0].token_ids
        assert not any(tokens[i : i + len(ids)] == ids for i in range(len(tokens)))


def test_logits_equal_transformers(llm, llama_checkpoint):
    result = run(llm, return_context_logits=True, return_generation_logits=True, prompt_logprobs=0)
    ids, (output,) = result.prompt_token_ids, result.outputs
    model = load_oracle(llama_checkpoint)
    with torch.no_grad():
        rows = model(torch.tensor([ids + output.token_ids])).logits[0].numpy()
    assert result.context_logits is not None and output.generation_logits is not None
    assert result.context_logits.shape == (len(ids), VOCAB_SIZE)
    np.testing.assert_allclose(result.context_logits, rows[: len(ids)], atol=2e-3)
    np.testing.assert_allclose(output.generation_logits, rows[len(ids) - 1 : -1], atol=2e-3)
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(ids)


def test_logits_of_beams(llm, llama_checkpoint):
    result = run(llm, beam_width=3, n=2, return_context_logits=True, return_generation_logits=True)
    model, ids = load_oracle(llama_checkpoint), result.prompt_token_ids
    assert result.context_logits is not None and len(result.context_logits) == len(ids)
    for output in result.outputs:
        with torch.no_grad():
            rows = model(torch.tensor([ids + output.token_ids])).logits[0].numpy()
        np.testing.assert_allclose(output.generation_logits, rows[len(ids) - 1 : -1], atol=2e-3)


def test_seeds_are_reproducible_in_any_batch(llm):
    odd = {"temperature": 1.2, "seed": 8, "top_p": 0.9, "top_p_decay": 0.8, "no_repeat_ngram_size": 2}
    alone = run(llm, **odd)
    mates = [{"beam_width": 3}, {"n": 2, "best_of": 3, "temperature": 1.0}, {"repetition_penalty": 1.4}]
    params = [SamplingParams(**{**FREE, **p}) for p in [*mates, odd]]
    together = llm.generate([PROMPT] * len(params), params, progress=False)
    assert together[-1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {7: 1e30}},
        {"logit_bias": {7: 1e30}, "temperature": 1e-5},
        {"logit_bias": {7: 1e30}, "repetition_penalty": 1e-6},
        {"logit_bias": {7: 1e30}, "repetition_penalty": 1e6},
        {"embedding_bias": np.eye(VOCAB_SIZE, dtype=np.float32)[7] * 1e30, "logit_bias": {7: 1e30}},
        {"embedding_bias": np.where(np.arange(VOCAB_SIZE) == 7, 0.0, -1e30).astype(np.float32)},
    ],
)
def test_extreme_parameters_give_finite_logits(llm, extreme):
    extreme = {name: v.tobytes() if isinstance(v, np.ndarray) else v for name, v in extreme.items()}
    for more in ({}, {"top_p": 0.9}, {"beam_width": 2}):
        assert run(llm, **{"temperature": 1.0, "seed": 1, **extreme, **more}).outputs[0].token_ids == [7] * 20


def test_very_low_temperature_is_greedy(llm):
    greedy = run(llm).outputs[0].token_ids
    for temperature in (1e-5, 9e-6, 1e-40, 1e-300):
        assert run(llm, temperature=temperature, seed=1).outputs[0].token_ids == greedy
        assert len(run(llm, temperature=temperature, beam_width=2).outputs[0].token_ids) == 20


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("beam_width", {"beam_width": 65}),
        ("best_of", {"best_of": 65}),
        ("bad_words", {"bad_words": ((VOCAB_SIZE,),)}),
        ("stop_words", {"stop_words": ((1, -1),)}),
        ("allowed_token_ids", {"allowed_token_ids": (VOCAB_SIZE,)}),
        ("embedding_bias", {"embedding_bias": bytes(4)}),
        ("embedding_bias", {"embedding_bias": np.full(VOCAB_SIZE, -np.inf, np.float32).tobytes()}),
        ("embedding_bias", {"embedding_bias": np.full(VOCAB_SIZE, np.nan, np.float32).tobytes()}),
    ],
)
def test_unsupported_parameters_are_rejected(llm, field, params):
    with pytest.raises(InvalidParameter) as caught:
        run(llm, **params)
    assert caught.value.field == field


def test_end_tokens_outside_the_vocabulary_are_ignored(llama_checkpoint, tmp_path):
    """Some configurations have such tokens; `min_tokens` has no column to suppress for them."""
    directory = tmp_path / "model"
    shutil.copytree(llama_checkpoint, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, -1, 10**6]}))
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2)
    (result,) = LLM(directory).generate("The quick", params, progress=False)
    (expected,) = LLM(llama_checkpoint).generate("The quick", params, progress=False)
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
