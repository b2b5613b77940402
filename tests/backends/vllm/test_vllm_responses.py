"""Conversion of vLLM's outputs to tensors, outputs and metrics, with stand-ins for vLLM's objects."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from neso.backends.vllm.conversion import OutputConverter
from neso.backends.vllm.metrics import VllmMetrics
from neso.backends.vllm.tensors import REQUESTABLE_OUTPUTS, ResponseTensors, TextRequest, embedding_tensors
from neso.generation import FinishReason, SamplingParams
from neso.server.metrics.registry import MetricsRegistry, ModelMetrics


def logprob(value: float, rank: int, text: str) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=text)


def completion(index: int, text: str, token_ids: list[int], **fields: Any) -> SimpleNamespace:
    others = {"logprobs": None, "cumulative_logprob": None, "finish_reason": None, "stop_reason": None}
    return SimpleNamespace(index=index, text=text, token_ids=token_ids, **{**others, **fields})


def output(*completions: SimpleNamespace, finished: bool = False, **fields: Any) -> SimpleNamespace:
    others = {"prompt_logprobs": None, "num_cached_tokens": None, "metrics": None}
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=[7, 8, 9],
        outputs=list(completions),
        finished=finished,
        **{**others, **fields},
    )


def request_for(*expected: str, prepend: bool = False) -> TextRequest:
    return TextRequest("Say: ", (), not prepend, prepend, frozenset(expected), {}, None)


def as_python(tensors: list[Any]) -> dict[str, list[Any]]:
    return {t.name: t.strings() if t.datatype.value == "BYTES" else t.array.tolist() for t in tensors}


def test_prompt_is_prepended_to_every_sequence():
    tensors = ResponseTensors(request_for(prepend=True), 2)
    written = as_python(tensors.of(output(completion(1, "b", [2]), completion(0, "a", [1]), finished=True)))
    assert written == {"text_output": ["Say: a", "Say: b"]}


def test_stream_of_several_sequences():
    tensors = ResponseTensors(request_for(*REQUESTABLE_OUTPUTS), 2)
    position = {5: logprob(-0.5, 1, "x"), 6: logprob(float("-inf"), 2, "y")}
    first = tensors.of(output(completion(1, "x", [5], logprobs=[position], cumulative_logprob=-0.5)))
    written = as_python(first)
    assert written["text_output"] == ["", "x"]
    assert written["finish_reason"] == ["None", "None"]
    assert written["cumulative_logprob"] == [0.0, -0.5]
    assert written["num_input_tokens"] == [3]
    assert written["num_output_tokens"] == [0, 1]
    assert json.loads(written["logprobs"][0]) == []
    assert json.loads(written["logprobs"][1]) == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
            "6": {"logprob": -9999.0, "rank": 2, "decoded_token": "y"},
        }
    ]
    second = tensors.of(output(completion(0, "z", [6, 6], finish_reason="length"), finished=True))
    written = as_python(second)
    assert written["text_output"] == ["z", ""]
    assert written["finish_reason"] == ["length", "None"]
    assert written["cumulative_logprob"] == [0.0, -0.5]
    assert written["logprobs"] == ["null", "[]"]


def test_embedding_response():
    written = as_python(
        embedding_tensors([0.5, -1.0], 4, frozenset({"num_input_tokens", "num_output_tokens"}))
    )
    assert written == {"text_output": ["[0.5,-1.0]"], "num_input_tokens": [4], "num_output_tokens": [0]}


def test_vllm_outputs_are_converted():
    outputs = OutputConverter(SamplingParams(n=2, logprobs=1, prompt_logprobs=1))
    prompt = [None, {8: logprob(-1.0, 3, "eight"), 1: logprob(-0.1, 1, "one")}, {9: logprob(-0.2, 1, "nine")}]
    position = {5: logprob(-2.0, 4, "five"), 1: logprob(-0.1, 1, "one")}
    made = outputs.of(
        output(
            completion(0, "five", [5], logprobs=[position], cumulative_logprob=-2.0),
            prompt_logprobs=prompt,
            num_cached_tokens=2,
            metrics=SimpleNamespace(scheduled_ts=1.5),
        )
    )
    (delta,) = made.deltas
    assert (delta.text, delta.token_ids, delta.cumulative_logprob) == ("five", [5], -2.0)
    assert delta.logprobs is not None
    assert (delta.logprobs[0].token, delta.logprobs[0].rank) == ("five", 4)
    assert delta.logprobs[0].top == ((1, -0.1, "one"),)
    assert made.prompt_logprobs is not None and made.prompt_logprobs[0] is None
    assert made.prompt_logprobs[1] is not None
    assert made.prompt_logprobs[1].token == "eight" and made.prompt_logprobs[1].top == ((1, -0.1, "one"),)
    assert (made.prompt_token_ids, made.scheduled_ns) == ([7, 8, 9], 1_500_000_000)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.cached_tokens) == (3, 1, 2)
    last = outputs.of(
        output(completion(1, "", [6, 6], finish_reason="repetition", stop_reason=None), finished=True)
    )
    assert last.finished and last.deltas[0].finish_reason is FinishReason.STOP
    assert last.usage.completion_tokens == 3
    assert last.prompt_token_ids == [] and last.prompt_logprobs is None


@pytest.mark.parametrize(("reason", "made"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
def test_finish_reasons(reason, made):
    outputs = OutputConverter(SamplingParams())
    assert outputs.of(output(completion(0, "", [], finish_reason=reason))).deltas[0].finish_reason is made


def scheduler(running: int, waiting: int, usage: float) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=10, hits=4),
    )


def iteration(*finished: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        num_preempted_reqs=1,
        num_prompt_tokens=12,
        num_generation_tokens=3,
        time_to_first_tokens_iter=[0.05],
        inter_token_latencies_iter=[0.01, 0.02],
        n_params_iter=[2],
        max_num_generation_tokens_iter=[6],
        finished_requests=list(finished),
    )


def test_metrics_follow_the_steps():
    registry, in_flight = MetricsRegistry(), [1]
    metrics = VllmMetrics(ModelMetrics(registry, "m", "1"), lambda: in_flight[0])

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", {"model": "m", "version": "1"})

    ended = SimpleNamespace(
        finish_reason="length",
        e2e_latency=2.0,
        queued_time=0.1,
        prefill_time=0.2,
        decode_time=1.5,
        inference_time=1.7,
        num_prompt_tokens=12,
        num_generation_tokens=4,
        max_tokens_param=4,
    )
    metrics.record(scheduler(3, 2, 0.25), iteration(ended), 0)
    metrics.record(scheduler(1, 0, 0.5), None, 1)
    assert (value("num_requests_running"), value("num_requests_waiting")) == (4, 4)
    assert value("kv_cache_usage_perc") == 0.5
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (20, 8)
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (12, 3)
    assert (value("num_preemptions_total"), value("time_to_first_token_seconds_count")) == (1, 1)
    assert value("time_per_output_token_seconds_count") == value("inter_token_latency_seconds_count") == 2
    assert (value("request_params_n_sum"), value("request_params_best_of_sum")) == (2, 2)
    assert (value("e2e_request_latency_seconds_sum"), value("request_generation_tokens_sum")) == (2, 4)
    assert value("request_time_per_output_token_seconds_sum") == 0.5
    in_flight[0] = 0  # the last was aborted, which vLLM does not report
    assert value("num_requests_running") == value("kv_cache_usage_perc") == 0
    metrics.close()
    assert value("num_requests_running") is None
    assert value("generation_tokens_total") == 3
