"""Requests whose prompt another engine has computed, or which continue after another engine's tokens, give the same
results as in one engine."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from eventually import wait_until
from request_mix import METHODS, REGEX, WINDOW, AnyRequest, Files, Mixed, with_prompt

from neso.engine.core.request import EngineRequest, KvExport, KvImport, SequenceOutput
from neso.generation import DraftTokens, LoraRequest, PoolingRequest

SMALL: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_prefill_chunk": 7, "kv_transfer": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "reference": ("reference", {}),
    "torch": ("torch", {}),
    "torch with a window": ("torch", WINDOW),
    "messages": ("native", {"kv_transfer_via": "messages"}),
    "window": ("native", WINDOW),
    "drafts": ("native", METHODS["ngram"]),
    "one by one": ("native", {"max_prefill_chunk": 1, "max_num_seqs": 3}),
}
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def files(checkpoint_factory, tmp_path_factory) -> Files:
    same = checkpoint_factory("llama")
    return Files(tmp_path_factory.mktemp("transfers"), same, same)


class Decoding(Mixed):
    """Takes the prompts of all requests from `prefill`, which gets them at the same time."""

    def connect(self, prefill: Mixed, address: str) -> None:
        self.prefill, self._address = prefill, address

    def engine_request(self, name: str, requested: AnyRequest) -> EngineRequest:
        request = super().engine_request(name, requested)
        if isinstance(requested, PoolingRequest):
            return request
        assert self.prefill.core.add(request.prefill_only(KvExport(name))) == []
        return msgspec.structs.replace(request, kv_import=KvImport(self._address, name, 60.0))


def open_pair(files: Files, runner: str, options: dict[str, Any]) -> Decoding:
    own = files.engine_options({**SMALL, **options})
    prefill, decode = (
        Mixed(str(files.same), runner=runner, **own),
        Decoding(str(files.same), runner=runner, **own),
    )
    decode.connect(prefill, prefill.info.kv_address)
    return decode


@pytest.mark.parametrize("case", CASES)
def test_results_equal_those_of_one_engine(files, case):
    runner, options = CASES[case]
    windowed = options is WINDOW
    requests = files.catalogue(runner, windowed)
    rng = random.Random(case)
    names = rng.sample(sorted(name for name in requests if not name.startswith("pooling")), NUM_REQUESTS)
    decode = open_pair(files, runner, options)
    prefill = decode.prefill
    arriving = list(names)

    def finished() -> bool:
        if arriving and rng.random() < 0.5:
            name = arriving.pop()
            decode.add(name, requests[name])
        for output in prefill.core.step():
            assert not output.error, output.error
        prefill.core.check_integrity()
        decode.step()
        return not arriving and not decode.running

    wait_until(finished, 200)
    for name in names:
        decode.answers[name].assert_equal(files.alone(name, runner, windowed), name)
    stats = decode.core.stats().kv_transfer
    assert stats.imports > 0 and stats.fallbacks == 0

    def empty() -> bool:
        decode.core.step()
        prefill.core.step()
        return prefill.core.stats().kv_transfer.leases == 0 and not decode.core.has_work

    wait_until(empty)
    decode.assert_empty()
    assert prefill.core.scheduler.kv.pool.num_used == 0
    decode.core.close()
    prefill.core.close()


RESUMED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "decay": {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_p_decay": 0.8, "top_p_reset_ids": 40},
    "no-repeat": {"no_repeat_ngram_size": 2, "bad_words": ("ab",)},
    "minimum": {"min_tokens": 9, "stop_token_ids": tuple(range(6, 200))},
    "stop-words": {"temperature": 1.0, "seed": 6, "stop_words": ((9,), (20, 30))},
    "guided": {"guided_decoding": REGEX, "temperature": 0.9, "seed": 21},
    "scores": {"logprobs": 2, "return_generation_logits": True},
    "prompt-scores": {"logprobs": 1, "prompt_logprobs": 1},
    "lora": {"temperature": 0.8, "seed": 5},
    "drafts": {"temperature": 0.8, "seed": 30},
}


def outputs_of(engine: Mixed, request: EngineRequest) -> list[SequenceOutput]:
    outputs = engine.core.add(request)
    for _ in range(1000):
        if not engine.core.has_work:
            break
        outputs += engine.core.step()
        engine.core.check_integrity()
    assert not any(output.error for output in outputs), outputs
    engine.assert_empty()
    return outputs


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_continued_requests_equal_whole_ones_at_every_position(files, method):
    engine = files.open("native", SMALL, METHODS[method])
    for name, params in RESUMED.items():
        lora = LoraRequest(name="a") if name == "lora" else None
        draft = DraftTokens([9, 20, 30]) if name == "drafts" else None
        request = engine.engine_request(name, with_prompt("long", params, lora=lora, draft=draft))
        whole = outputs_of(engine, request)
        tokens = [token for output in whole for token in output.token_ids]
        logprobs = [entry for output in whole for entry in output.logprobs]
        assert len(tokens) > 1, name
        for split in range(1, len(tokens)):
            rest = outputs_of(engine, msgspec.structs.replace(request, output_token_ids=tokens[:split]))
            assert [token for output in rest for token in output.token_ids] == tokens[split:], (name, split)
            assert rest[-1].finish_reason == whole[-1].finish_reason
            assert rest[-1].end_token_id == whole[-1].end_token_id
            assert not any(output.prompt_logprobs for output in rest)
            entries = [entry for output in rest for entry in output.logprobs]
            assert [entry.top_ids for entry in entries] == [entry.top_ids for entry in logprobs[split:]]
            assert rest[0].scheduled_ns > 0 and rest[0].cached_tokens <= len(request.prompt_token_ids)
    engine.core.close()


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"n": 2}, [9], "one generated sequence"),
        ({"beam_width": 2}, [9], "one generated"),
        ({}, [9] * 18, "18 tokens"),
    ],
)
def test_requests_that_cannot_continue(files, params, tokens, reason):
    engine = files.open("reference", SMALL)
    request = engine.engine_request("r", with_prompt("short", params))
    (output,) = engine.core.add(msgspec.structs.replace(request, output_token_ids=tokens))
    assert output.error_field == "output_token_ids" and reason in output.error
    engine.assert_empty()
    engine.core.close()


def test_adapters_of_the_same_name_with_other_weights_are_refused(files):
    decode = open_pair(files, "reference", {"lora_modules": {"a": files.adapters["a"]}})
    swapped = files.engine_options({**SMALL, "lora_modules": {"a": files.adapters["b"]}})
    prefill = Mixed(str(files.same), runner="reference", **swapped)
    decode.prefill.core.close()
    decode.connect(prefill, prefill.info.kv_address)
    decode.add("r", with_prompt("long", {}, lora=LoraRequest(name="a")))

    def finished() -> bool:
        prefill.core.step()
        decode.step()
        return not decode.running

    wait_until(finished)
    assert decode.core.stats().kv_transfer.fallbacks == 1
    plain = files.open("reference", {"lora_modules": {"a": files.adapters["a"]}})
    expected = plain.alone("r", with_prompt("long", {}, lora=LoraRequest(name="a")))
    decode.answers["r"].assert_equal(expected, "r")
    decode.core.close()
    prefill.core.close()
