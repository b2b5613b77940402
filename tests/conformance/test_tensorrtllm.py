"""The backend `tensorrtllm` with tritonclient: token ids, and the configuration of the template."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import numpy as np
import openai
import orjson
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment
from triton_tokens import TRUE, i32, new_tokens, outputs, prompt_inputs, tensors, token_stream
from tritonclient.utils import InferenceServerException

from neso.engine.client.llm import LLM
from neso.generation import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "engine"))
sys.path.append(str(Path(__file__).parents[1] / "backends" / "tensorrtllm"))
from checkpoints import EOS, VOCAB_SIZE, load_oracle, make_checkpoint
from trtllm_repository import PROMPT, write_model

LENGTH = 12
FLAGS = (
    *("return_log_probs", "return_context_logits", "return_generation_logits"),
    *("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    write_model(root, checkpoint, max_beam_width=4)
    write_model(root, checkpoint, name="whole", decoupled=False, exclude_input_in_output="true")
    write_model(root, checkpoint, name="static", gpt_model_type="V1", max_batch_size=0, listed=False)
    with ServerProcess(f"--model-repository={root}") as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="module")
def slow_server(checkpoint, tmp_path_factory):
    """Steps take 50 ms, so that a stopped request is still running."""
    root = tmp_path_factory.mktemp("repository")
    write_model(root, checkpoint)
    slow = slow_environment(tmp_path_factory.mktemp("slow"))
    with ServerProcess(f"--model-repository={root}", environment=slow) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def stream(server):
    with token_stream(server.address("grpc")) as found:
        yield found


def greedy(llm, prompt=PROMPT, length=LENGTH, **params):
    params = {"temperature": 0, "max_tokens": length, "ignore_eos": True, **params}
    return llm.generate([prompt], SamplingParams(**params), progress=False)[0]


@pytest.fixture(scope="module")
def expected(llm):
    return greedy(llm).outputs[0].token_ids


def test_tokens_equal_transformers(checkpoint, expected):
    import torch

    model = load_oracle(checkpoint)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(LENGTH):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert ids[len(PROMPT) :] == expected


def test_stream_of_new_tokens(stream, expected):
    responses = stream.send_request(prompt_inputs(PROMPT, LENGTH, streaming=TRUE))
    assert [response["output_ids"].shape for response in responses] == [(1, 1, 1)] * LENGTH
    assert [response["sequence_length"].tolist() for response in responses] == [[[1]]] * LENGTH
    assert new_tokens(responses) == expected
    assert set(responses[0]) == {"output_ids", "sequence_length"}


def test_unary_response_starts_with_the_prompt(stream, expected):
    (response,) = stream.send_request(prompt_inputs(PROMPT, LENGTH))
    assert response["output_ids"].tolist() == [[PROMPT + expected]]
    assert response["sequence_length"].tolist() == [[len(PROMPT) + LENGTH]]
    (response,) = stream.send_request(prompt_inputs(PROMPT, LENGTH, exclude_input_in_output=TRUE))
    assert response["output_ids"].tolist() == [[expected]]


@pytest.mark.parametrize("module", [grpc, http])
def test_unary_without_decoupled_mode(server, module, expected):
    address = server.address(module.__name__.rsplit(".", 1)[1])
    with module.InferenceServerClient(address) as client:
        result = client.infer("whole", tensors(prompt_inputs(PROMPT, LENGTH), module))
        assert result.as_numpy("output_ids").tolist() == [[expected]]
        with pytest.raises(InferenceServerException, match="streaming: is only supported by a decoupled"):
            client.infer("whole", tensors(prompt_inputs(PROMPT, LENGTH, streaming=TRUE), module))
        with pytest.raises(InferenceServerException, match="num_return_sequences: above 1 needs a decoupled"):
            more = prompt_inputs(PROMPT, LENGTH, num_return_sequences=i32([2]), runtime_top_k=i32([5]))
            client.infer("whole", tensors(more, module))
        two = {"input_ids": i32(PROMPT, PROMPT), "input_lengths": i32([12], [12])}
        with pytest.raises(InferenceServerException, match="several sequences needs a decoupled"):
            client.infer("whole", tensors({**two, "request_output_len": i32([3], [3])}, module))


def test_generate_endpoints(server, expected):
    body = {"input_ids": PROMPT, "input_lengths": len(PROMPT), "request_output_len": LENGTH}
    status, response = server.post("/v2/models/whole/generate", body)
    assert (status, response["output_ids"]) == (200, expected)
    status, response = server.post("/v2/models/static/generate", {**body, "end_id": expected[2]})
    assert (status, response["output_ids"]) == (200, PROMPT + expected[:2])


def test_end_token_ends_and_is_not_returned(stream, expected):
    end = i32([expected[5]])
    until = expected.index(expected[5])
    (response,) = stream.send_request(prompt_inputs(PROMPT, LENGTH, end_id=end, exclude_input_in_output=TRUE))
    assert response["output_ids"].tolist() == [[expected[:until]]]
    responses = stream.send_request(prompt_inputs(PROMPT, LENGTH, end_id=end, streaming=TRUE))
    assert new_tokens(responses) == expected[:until]
    assert responses[-1]["output_ids"].shape == (1, 1, 0)


def test_without_end_id_only_the_length_stops(stream, llm):
    """The model's end token does not stop either."""
    bias = np.zeros((1, VOCAB_SIZE), np.float32)
    bias[0, EOS] = 1e4
    (response,) = stream.send_request(
        prompt_inputs(PROMPT, 5, embedding_bias=bias, exclude_input_in_output=TRUE)
    )
    assert response["output_ids"].tolist() == [[[EOS] * 5]]


def test_all_optional_outputs(stream, llm, expected):
    requested = dict.fromkeys(FLAGS, TRUE)
    result = greedy(llm, logprobs=0, return_context_logits=True, return_generation_logits=True)
    (response,) = stream.send_request(prompt_inputs(PROMPT, LENGTH, **requested))
    assert {name: (array.shape, array.dtype) for name, array in response.items()} == {
        "output_ids": ((1, 1, 24), np.int32),
        "sequence_length": ((1, 1), np.int32),
        "cum_log_probs": ((1, 1), np.float32),
        "output_log_probs": ((1, 1, 12), np.float32),
        "context_logits": ((1, 12, VOCAB_SIZE), np.float32),
        "generation_logits": ((1, 1, 12, VOCAB_SIZE), np.float32),
        **dict.fromkeys(("num_input_tokens", "num_output_tokens"), ((1, 1), np.int32)),
        **{f"kv_cache_{kind}_blocks": ((1, 1), np.int32) for kind in ("alloc_new", "alloc_total", "reused")},
        **{f"{kind}_time_ns": ((1, 1), np.int64) for kind in ("arrival", "first_scheduled")},
        **{f"{kind}_token_time_ns": ((1, 1), np.int64) for kind in ("first", "last")},
        "acceptance_rate": ((1, 1), np.float32),
        **{f"total_{kind}": ((1, 1), np.int32) for kind in ("draft_tokens", "accepted_draft_tokens")},
    }
    np.testing.assert_allclose(response["context_logits"][0], result.context_logits, atol=1e-3)
    completion = result.outputs[0]
    np.testing.assert_allclose(response["generation_logits"][0, 0], completion.generation_logits, atol=1e-3)
    log_probs = [entry.logprob for entry in completion.logprobs]
    np.testing.assert_allclose(response["output_log_probs"][0, 0], log_probs, atol=1e-4)
    np.testing.assert_allclose(response["cum_log_probs"][0], [sum(log_probs)], atol=1e-3)
    assert (response["num_input_tokens"], response["num_output_tokens"]) == (len(PROMPT), LENGTH)
    times = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    values = [int(response[name][0, 0]) for name in times]
    assert values == sorted(values) and values[0] > 0
    pieces = stream.send_request(prompt_inputs(PROMPT, LENGTH, streaming=TRUE, **requested))
    assert ["context_logits" in piece for piece in pieces] == [True] + [False] * (LENGTH - 1)
    rows = np.concatenate([piece["generation_logits"][0, 0] for piece in pieces])
    np.testing.assert_allclose(rows, completion.generation_logits, atol=1e-3)
    each = np.concatenate([piece["output_log_probs"][0, 0] for piece in pieces])
    np.testing.assert_allclose(each, log_probs, atol=1e-4)
    last_token_times = [int(piece["last_token_time_ns"][0, 0]) for piece in pieces]
    assert len(last_token_times) == LENGTH and last_token_times == sorted(last_token_times)


def test_reused_blocks_output(stream):
    prompt = [7 * i % 300 + 10 for i in range(40)]
    (first,) = stream.send_request(prompt_inputs(prompt, 4, return_perf_metrics=TRUE))
    (second,) = stream.send_request(prompt_inputs(prompt, 4, return_kv_cache_reuse_stats=TRUE))
    names = [f"kv_cache_{kind}_blocks" for kind in ("alloc_total", "reused", "alloc_new")]
    assert [int(first[name][0, 0]) for name in names] == [3, 0, 3]
    assert [int(second[name][0, 0]) for name in names] == [3, 2, 1]


def test_beams_are_returned_together(stream, llm):
    params = {"beam_width": 3, "n": 3, "length_penalty": 0.0, "early_stopping": True, "logprobs": 0}
    result = greedy(llm, **params)
    for streaming in (np.array([[False]]), TRUE):
        beams = {"beam_width": i32([3]), "return_log_probs": TRUE, "streaming": streaming}
        (response,) = stream.send_request(prompt_inputs(PROMPT, LENGTH, **beams))
        assert response["output_ids"].tolist() == [[PROMPT + beam.token_ids for beam in result.outputs]]
        assert response["sequence_length"].tolist() == [[len(PROMPT) + LENGTH] * 3]
        assert response["output_log_probs"].shape == (1, 3, LENGTH)
        scores = [beam.cumulative_logprob for beam in result.outputs]
        np.testing.assert_allclose(response["cum_log_probs"][0], scores, atol=1e-3)
    (response,) = stream.send_request(
        prompt_inputs(PROMPT, LENGTH, beam_width=i32([3]), num_return_sequences=i32([2]))
    )
    assert response["output_ids"].shape == (1, 2, 24)


def test_sampled_sequences_are_returned_separately(stream):
    several = {
        "num_return_sequences": i32([3]),
        "runtime_top_k": i32([40]),
        "seed": np.array([[5]], np.uint64),
    }
    whole = stream.send_request(prompt_inputs(PROMPT, 6, exclude_input_in_output=TRUE, **several))
    assert sorted(int(response["sequence_index"][0, 0]) for response in whole) == [0, 1, 2]
    pieces = stream.send_request(prompt_inputs(PROMPT, 6, streaming=TRUE, **several))
    for sequence in range(3):
        assert new_tokens(pieces, sequence) == new_tokens(whole, sequence)
    assert len({tuple(new_tokens(whole, sequence)) for sequence in range(3)}) == 3


def test_batches_are_padded(stream, llm, expected):
    batch = {
        "input_ids": i32(PROMPT, PROMPT[:6] + [0] * 6),
        "input_lengths": i32([12], [6]),
        "request_output_len": i32([LENGTH], [5]),
        "exclude_input_in_output": np.array([[True], [True]]),
    }
    rows = {int(response["batch_index"][0, 0]): response for response in stream.send_request(batch)}
    assert rows[0]["output_ids"].tolist() == [[expected]]
    assert rows[1]["output_ids"].tolist() == [[greedy(llm, PROMPT[:6], 5).outputs[0].token_ids]]
    streaming = stream.send_request({**batch, "streaming": np.array([[True], [True]])})
    mine = [r for r in streaming if r["batch_index"][0, 0] == 0]
    assert new_tokens(mine) == expected


def test_words_and_biases(stream, llm, expected):
    words = i32([[expected[3], expected[4], expected[6]], [2, 3, -1]])
    stopped = stream.send_request(prompt_inputs(PROMPT, LENGTH, stop_words_list=words, streaming=TRUE))
    assert new_tokens(stopped) == expected[:5]
    (banned,) = stream.send_request(
        prompt_inputs(PROMPT, LENGTH, bad_words_list=words, exclude_input_in_output=TRUE)
    )
    pairs = (tuple(expected[3:5]), (expected[6],))
    assert banned["output_ids"].tolist() == [[greedy(llm, bad_words=pairs).outputs[0].token_ids]]


@pytest.fixture
def slow_stream(slow_server):
    with token_stream(slow_server.address("grpc")) as found:
        yield found


def test_stop_ends_the_request_with_the_same_id(slow_stream):
    stream = slow_stream
    stream.send(prompt_inputs(PROMPT, 480, streaming=TRUE), "long")
    stream.send(prompt_inputs(PROMPT, 480), "whole")
    assert stream.receive()[0] == "long"
    for name in ("long", "whole"):
        stream.send(prompt_inputs(PROMPT, 1, stop=TRUE), name)
    answers = {"long": [], "whole": []}
    finals = 0
    while finals < 4:
        name, found, final = stream.receive()
        finals += final
        answers[name].append(found)
    assert answers["whole"].count({}) == answers["long"].count({}) == 1
    (whole,) = (found for found in answers["whole"] if found)
    assert 12 <= whole["sequence_length"][0, 0] < 492
    assert sum(len(found) > 0 for found in answers["long"]) < 480


def test_stop_of_an_unknown_id_is_ignored(stream):
    assert stream.send_request(prompt_inputs(PROMPT, 1, stop=TRUE), "unknown") == [{}]
    with pytest.raises(InferenceServerException, match="stop: needs the id"):
        stream.send_request(prompt_inputs(PROMPT, 1, stop=TRUE))


def test_cancelled_stream_frees_the_engine(slow_server):
    server = slow_server
    with grpc.InferenceServerClient(server.address("grpc")) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("tensorrt_llm", tensors(prompt_inputs(PROMPT, 490, streaming=TRUE)))
        client.stop_stream(cancel_requests=True)
    active = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"}'
    wait_until(lambda: server.metrics()[active] == 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam_width": i32([9])}, "beam_width: is 9, max_beam_width of this model is 4"),
        ({"input_lengths": i32([13])}, "input_lengths: is 13, input_ids has 12 tokens"),
        ({"request_output_len": i32([0])}, "request_output_len: must be at least 1"),
        ({"temperature": np.array([[-1]], np.float32)}, "temperature: must be at least 0"),
        ({"runtime_top_p": np.array([[2]], np.float32)}, "runtime_top_p: must be more than 0"),
        ({"end_id": i32([999])}, "end_id: token 999"),
        ({"stop_words_list": i32([[3, 4], [2, 1]])}, "stop_words_list: the second row must say where words"),
        ({"decoder_input_ids": i32([3, 4])}, "decoder_input_ids: models with an encoder are not run"),
        ({"lookahead_window_size": i32([3])}, "lookahead_window_size: there is no lookahead"),
        ({"lora_weights": np.zeros((1, 1, 4), np.float16)}, "lora_weights: needs lora_task_id"),
    ],
)
def test_errors_name_invalid_inputs(stream, change, message):
    with pytest.raises(InferenceServerException, match=message):
        stream.send_request(prompt_inputs(PROMPT, 4) | change)
    assert len(stream.send_request(prompt_inputs(PROMPT, 4))) == 1


def test_static_batches_have_their_own_metrics(server):
    names = {
        name.split("{")[0] + name.split("model=")[1].split(",")[0]
        for name in server.metrics()
        if "nv_trt" in name
    }
    assert 'nv_trt_llm_v1_metrics"static"' in names
    assert 'nv_trt_llm_inflight_batcher_metrics"static"' not in names
    assert 'nv_trt_llm_inflight_batcher_metrics"tensorrt_llm"' in names


def test_unlisted_tensors_without_a_batch(server, expected):
    with token_stream(server.address("grpc"), "static") as stream:
        values = {name: array[0] for name, array in prompt_inputs(PROMPT, LENGTH).items()}
        with pytest.raises(InferenceServerException, match="decoupled"):
            outputs(stream._client.infer("tensorrt_llm", tensors(prompt_inputs(PROMPT, LENGTH))))
        (response,) = stream.send_request(values)
        assert response["output_ids"].tolist() == [PROMPT + expected]
        assert response["sequence_length"].tolist() == [len(PROMPT) + LENGTH]


def test_generate_stream(server, expected):
    body = {
        "input_ids": PROMPT,
        "input_lengths": len(PROMPT),
        "request_output_len": LENGTH,
        "streaming": True,
    }
    request = urllib.request.Request(
        server.url("/v2/models/tensorrt_llm/generate_stream"),
        orjson.dumps(body),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [
            orjson.loads(line.removeprefix(b"data: ")) for line in response if line.startswith(b"data: ")
        ]
    assert [event["output_ids"] for event in events if "output_ids" in event] == expected
    assert {event["sequence_length"] for event in events if "output_ids" in event} == {1}


def test_model_is_available_through_the_openai_api(server, llm, expected):
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none") as client:
        assert {"tensorrt_llm", "whole", "static"} <= {model.id for model in client.models.list()}
        for model in ("tensorrt_llm", "static"):
            response = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=LENGTH, temperature=0, extra_body={"ignore_eos": True}
            )
            whole = llm.tokenizer.decode(PROMPT + expected)
            assert response.choices[0].text == whole[len(llm.tokenizer.decode(PROMPT)) :]


def test_statistics_count_requests(server, stream):
    def counts():
        metrics = server.metrics()
        labels = 'model="tensorrt_llm",version="1"'
        names = ("request_success", "count", "exec_count")
        return [metrics[f"nv_inference_{name}{{{labels}}}"] for name in names] + [
            metrics[f"nv_inference_{name}_duration_us{{{labels}}}"] for name in ("request", "compute_infer")
        ]

    before = counts()
    batch = {
        "input_ids": i32(PROMPT, PROMPT),
        "input_lengths": i32([12], [12]),
        "request_output_len": i32([9], [9]),
    }
    stream.send_request(batch)
    stream.send_request(prompt_inputs(PROMPT, 60, streaming=TRUE))
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True)][:2] == [2, 3]
    assert after[3] - before[3] > after[4] - before[4] > 0


def test_forty_concurrent_clients(server, llm):
    """With in-flight batching each client gets the tokens of a single request."""
    prompts = [[(7 * i + j) % 300 + 6 for j in range(4 + i % 9)] for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = [r.outputs[0].token_ids for r in llm.generate(prompts, params, progress=False)]
    with token_stream(server.address("grpc")) as stream:
        for number, prompt in enumerate(prompts):
            stream.send(prompt_inputs(prompt, 20, streaming=TRUE), str(number))
        found: dict[str, list[int]] = {str(number): [] for number in range(40)}
        finals = 0
        while finals < 40:
            name, response, final = stream.receive()
            finals += final
            found[name] += response["output_ids"][0, 0].tolist()
    assert list(found.values()) == alone
