"""TensorRT-LLM's layout as written by `neso repo init`, with real clients."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from eventually import wait_until
from layout_repository import ANSWER, PROMPT, Stream, init, send_request, tensors, text
from perf_command import perf
from server_process import ServerProcess
from step_pace import slow_environment
from tritonclient.utils import InferenceServerException

from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
CHAINS = ("ensemble", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = init(tmp_path_factory.mktemp("trtllm"), "--max-beam-width=3", "--draft-model=neso-pilot")
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        yield server


@pytest.fixture(scope="module")
def slow_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Steps take 50 ms: an abandoned request runs longer than the test waits."""
    repository = init(tmp_path_factory.mktemp("trtllm"))
    slow = slow_environment(tmp_path_factory.mktemp("slow"))
    with ServerProcess(f"--model-repository={repository}", environment=slow) as server:
        assert server.ports, server.output
        yield server


@pytest.fixture(scope="module")
def address(served: ServerProcess) -> str:
    return served.address("grpc")


@pytest.mark.parametrize("model", CHAINS)
def test_generate(served, model):
    """With curl as in the guide of TensorRT-LLM's backend, and the keys that it shows."""
    body = {"text_input": PROMPT, "max_tokens": 12, "bad_words": "", "stop_words": ""}
    status, response = served.post(f"/v2/models/{model}/generate", body)
    assert status == 200
    assert response["text_output"] == PROMPT + ANSWER
    expected = {"model_name", "model_version", "text_output"}
    if model == "ensemble":
        expected |= {"sequence_id", "sequence_start", "sequence_end"}
    assert response.keys() == expected
    _, response = served.post(f"/v2/models/{model}/generate", body | {"exclude_input_in_output": True})
    assert response["text_output"] == ANSWER


@pytest.mark.parametrize("model", CHAINS)
def test_streams_return_deltas(address, model):
    results = send_request(address, model, text_input=PROMPT, max_tokens=12, stream=True)
    assert len(results) == 12
    assert text(results) == ANSWER


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens(address, model, stream):
    written = "héllo 你好, 🎉🎉 ça va!"
    results = send_request(
        address,
        model,
        text_input="Say:",
        max_tokens=60,
        stream=stream,
        exclude_input_in_output=True,
        guided_decoding_guide_type="regex",
        guided_decoding_guide=f" {written}",
    )
    assert text(results) == f" {written}"
    assert not stream or len(results) > 15
    assert all("\ufffd" not in text([result]) for result in results)


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("stream", [False, True])
def test_words(address, model, stream):
    given = {"text_input": PROMPT, "max_tokens": 12, "stream": stream, "exclude_input_in_output": True}
    assert text(send_request(address, model, **given, stop_words=["", "time"])) == " TTFT is the time"
    assert "time" not in text(send_request(address, model, **given, bad_words=["time", "nothing"]))
    biased = send_request(
        address, model, **given, embedding_bias_words=[" time"], embedding_bias_weights=[-100.0]
    )
    assert "time" not in text(biased)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_within_tokens(address, stream):
    given = {"text_input": PROMPT, "max_tokens": 12, "stream": stream, "exclude_input_in_output": True}
    assert (
        text(send_request(address, "tensorrt_llm_bls", **given, stop_words=["irst to"]))
        == " TTFT is the time to first to"
    )
    assert text(send_request(address, "tensorrt_llm_bls", **given, stop_words=["token!"])) == ANSWER


@pytest.mark.parametrize("model", CHAINS)
def test_batches(address, model):
    results = send_request(
        address, model, 2, text_input=[[PROMPT], ["What is Neso?"]], max_tokens=8, stream=True
    )
    rows: list[list] = [[], []]
    for result in results:
        rows[result.as_numpy("batch_index").item()].append(result)
    for row, prompt in zip(rows, (PROMPT, "What is Neso?"), strict=True):
        assert text(row) == text(send_request(address, model, text_input=prompt, max_tokens=8, stream=True))


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("stream", [False, True])
def test_beams(address, model, stream):
    (result,) = send_request(address, model, text_input=PROMPT, max_tokens=8, beam_width=3, stream=stream)
    texts = [beam.decode() for beam in result.as_numpy("text_output")]
    assert len(set(texts)) == 3
    assert any(beam.startswith(PROMPT + ANSWER[:20]) for beam in texts)


@pytest.mark.parametrize("model", CHAINS)
def test_several_sequences(address, model):
    results = send_request(
        address,
        model,
        text_input=PROMPT,
        max_tokens=6,
        num_return_sequences=3,
        top_k=50,
        temperature=3.0,
        seed=1,
    )
    assert sorted(result.as_numpy("sequence_index").item() for result in results) == [0, 1, 2]
    assert len({text([result]) for result in results}) == 3


@pytest.mark.parametrize("model", CHAINS)
def test_outputs_besides_text(address, model):
    names = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics")
    counts = ("return_num_input_tokens", "return_num_output_tokens")
    (result,) = send_request(
        address, model, text_input=PROMPT, max_tokens=5, **dict.fromkeys(names + counts, True)
    )
    assert result.as_numpy("output_log_probs").shape == (1, 1, 5)
    assert result.as_numpy("cum_log_probs").shape == (1, 1)
    assert result.as_numpy("context_logits").shape == (1, 4, 4096)
    assert result.as_numpy("generation_logits").shape == (1, 1, 5, 4096)
    assert result.as_numpy("num_input_tokens").item() == 4
    assert result.as_numpy("num_output_tokens").item() == 5
    assert result.as_numpy("first_token_time_ns").item() <= result.as_numpy("last_token_time_ns").item()


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_ends_the_generation(slow_served, model, stream):
    served, address = slow_served, slow_served.address("grpc")
    given = tensors(1, text_input=PROMPT, max_tokens=1900, end_id=-1, stream=stream)
    request = Stream(address, model, given)
    if stream:
        request.next()
    wait_until(lambda: running(served) == 1)
    request.client.stop_stream(cancel_requests=True)
    wait_until(lambda: running(served) == 0)
    assert text(send_request(address, model, text_input=PROMPT, max_tokens=12)) == PROMPT + ANSWER


def running(served: ServerProcess) -> float:
    name = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"}'
    return served.metrics()[name]


@pytest.mark.parametrize("model", CHAINS)
def test_rejected_requests(address, model):
    for wrong, word in (
        ({"max_tokens": 0}, "request_output_len"),
        ({"beam_width": 9}, "beam_width"),
        ({"text_input": b"\xff\xfe"}, "QUERY: is not UTF-8"),
        ({"stop_words": b"\xff\xfe"}, "STOP_WORDS_DICT: is not UTF-8"),
        ({"stop_words": "x" * 257}, "STOP_WORDS_DICT: each must be at most 256 long, got one of 257"),
        (
            {"text_input": "word " * 1_000_000},
            "QUERY: is at least [0-9]+ tokens long, too long for the model",
        ),
        ({"min_length": 9}, "min_length: 9 is more than"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias"),
        ({"guided_decoding_guide_type": "magic", "guided_decoding_guide": "x"}, "guide"),
    ):
        with pytest.raises(InferenceServerException, match=word):
            send_request(address, model, **{"text_input": PROMPT, "max_tokens": 5, **wrong})


@pytest.mark.parametrize("model", CHAINS)
def test_a_batch_without_rows(address, model):
    inputs = tensors(None, text_input=np.empty((0, 1), object), max_tokens=np.empty((0, 1), np.int32))
    with pytest.raises(InferenceServerException, match="has no rows"):
        Stream(address, model, inputs).all()


@pytest.mark.parametrize("model", CHAINS)
def test_empty_prompt_is_rejected(served, model):
    status, answer = served.post(f"/v2/models/{model}/generate", {"text_input": "", "max_tokens": 4})
    assert status == 400
    assert "input_lengths: is 0" in answer["error"] and "/" not in answer["error"]


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("name", ["length_penalty", "len_penalty"])
def test_both_names_of_the_length_penalty(served, model, name):
    body = {"text_input": PROMPT, "max_tokens": 4, "beam_width": 2}
    status, answer = served.post(f"/v2/models/{model}/generate", {**body, name: 99})
    assert status == 400 and "len_penalty: must be at least -10.0 and at most 10.0" in answer["error"]


@pytest.mark.parametrize("model", CHAINS)
def test_parameters_without_effect_are_logged(served, model):
    name = f"{model}_temperature"
    body = {"text_input": PROMPT, "max_tokens": 1, name: 0.5, "runtime_top_p": 2.0}
    status, answer = served.post(f"/v2/models/{model}/generate", body)
    assert status == 400 and "runtime_top_p: must be more than 0" in answer["error"]
    del body["runtime_top_p"]
    assert served.post(f"/v2/models/{model}/generate", body)[0] == 200
    wait_until(lambda: f"request parameter '{name}' has no effect" in served.output)


def test_preprocessing_returns_a_decoder_start_token(served):
    inputs = [
        {"name": "QUERY", "datatype": "BYTES", "shape": [2, 1], "data": [PROMPT, "Hello."]},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [2, 1], "data": [4, 4]},
    ]
    _, answer = served.post("/v2/models/preprocessing/infer", {"inputs": inputs})
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["DECODER_INPUT_ID"] == outputs["OUT_PAD_ID"]
    assert outputs["REQUEST_DECODER_INPUT_LEN"] == [1, 1]


def test_unknown_tokenizer_type_is_rejected(tmp_path):
    init(tmp_path)
    for name in ("preprocessing", "postprocessing"):
        path = tmp_path / name / "config.pbtxt"
        path.write_text(path.read_text().replace('"auto"', '"t5"'))
    with ServerProcess(f"--model-repository={tmp_path}", "--exit-on-error=false") as server:
        index = {entry["name"]: entry for entry in server.post("/v2/repository/index", {})[1]}
    for name in ("preprocessing", "postprocessing"):
        assert "tokenizer_type: is 't5', expected one of auto, llama" in index[name]["reason"]


def test_ensemble_as_in_published_repositories(tmp_path):
    """It declares no transaction policy, lists an output twice, and its model has the template's placeholder."""
    init(tmp_path)
    ensemble = tmp_path / "ensemble" / "config.pbtxt"
    given = ensemble.read_text().replace("model_transaction_policy { decoupled: true }\n", "")
    (repeated,) = re.findall(r"(?m)^ *\{ name: \"kv_cache_alloc_total_blocks\".*$", given)
    ensemble.write_text(given.replace(repeated, f"{repeated.rstrip(',')},\n{repeated}"))
    model = tmp_path / "tensorrt_llm" / "config.pbtxt"
    model.write_text(model.read_text().replace('backend: "tensorrtllm"', 'backend: "${triton_backend}"'))
    with ServerProcess(f"--model-repository={tmp_path}") as server:
        assert server.ports, server.output
        results = send_request(
            server.address("grpc"),
            "ensemble",
            text_input=PROMPT,
            max_tokens=12,
            stream=True,
            return_perf_metrics=True,
        )
    assert len(results) == 12 and "".join(text([result]) for result in results) == ANSWER
    blocks = [result.as_numpy("kv_cache_alloc_total_blocks").item() for result in results]
    assert blocks == sorted(blocks) and blocks[0] > 0


def test_mismatched_sequences_and_lengths(served):
    def given(name, shape, data):
        return {"name": name, "datatype": "INT32", "shape": shape, "data": data}

    ids = given("TOKENS_BATCH", [1, 1, 3], [5, 6, 7])
    status, response = served.post(
        "/v2/models/postprocessing/infer", {"inputs": [ids, given("SEQUENCE_LENGTH", [1, 2], [1, 1])]}
    )
    assert status == 400 and "SEQUENCE_LENGTH: has 2 values" in response["error"]


def test_legacy_names(served, address):
    values = {"random_seed": 7, "top_k": 40, "temperature": 2.0}
    texts = {
        text(send_request(address, "ensemble", text_input=PROMPT, max_tokens=8, **values)) for _ in range(3)
    }
    assert len(texts) == 1
    status, _ = served.post(
        "/v2/models/ensemble/generate", {"text_input": PROMPT, "max_tokens": 8, "min_length": 8}
    )
    assert status == 200


def test_speculative_decoding(address):
    given = {"text_input": PROMPT, "max_tokens": 30}
    alone = text(send_request(address, "tensorrt_llm_bls", **given))
    for extra in ({}, {"use_draft_logits": True}):
        (result,) = send_request(address, "tensorrt_llm_bls", **given, num_draft_tokens=4, **extra)
        assert text([result]) == alone
        assert result.as_numpy("total_accepted_draft_tokens").item() >= 20
        assert result.as_numpy("acceptance_rate").item() == 1.0
    stopped = send_request(
        address, "tensorrt_llm_bls", **given, num_draft_tokens=4, stop_words=["first token"]
    )
    assert text(stopped) == PROMPT + " TTFT is the time to first token"
    for refused in ("return_context_logits", "return_generation_logits", "stream"):
        with pytest.raises(InferenceServerException, match=refused):
            send_request(address, "tensorrt_llm_bls", **given, num_draft_tokens=4, **{refused: True})


@pytest.mark.slow
@pytest.mark.parametrize("model", [*CHAINS, "tensorrt_llm"])
def test_load_of_neso_perf(served, tmp_path, model):
    options = ["--streaming", "--isl", "9", "--osl", "5", "--tokenizer", "neso-pilot", "--concurrency", "2"]
    found = perf(served.address("grpc"), tmp_path, model, "kserve", *options)
    assert found["input_sequence_length"]["min"] == found["input_sequence_length"]["max"] == 9
    # Each chunk is one token; an end token has no text.
    assert found["output_sequence_length"]["max"] == 5 and "time_to_first_token" in found


@pytest.fixture(scope="module", params=[8, 0])
def rows(request: pytest.FixtureRequest) -> int:
    """`max_batch_size` of models that are not decoupled; 0: no batch dimension."""
    return request.param


@pytest.fixture(scope="module")
def plain(rows, tmp_path_factory) -> Iterator[grpc_client.InferenceServerClient]:
    """Non-decoupled models that exclude the prompt from the output."""
    options = ("--no-decoupled", f"--max-batch-size={rows}", "--exclude-input-in-output")
    repository = init(tmp_path_factory.mktemp("plain"), *options)
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        with grpc_client.InferenceServerClient(server.address("grpc")) as client:
            yield client


@pytest.mark.parametrize("model", CHAINS)
def test_one_response_per_request(plain, rows, model):
    batch = 1 if rows else None
    result = plain.infer(model, tensors(batch, text_input=PROMPT, max_tokens=12))
    assert result.as_numpy("text_output").tolist() == [ANSWER.encode()]
    with pytest.raises(InferenceServerException, match="decoupled"):
        plain.infer(model, tensors(batch, text_input=PROMPT, max_tokens=5, stream=True))


def test_one_response_per_batch(plain, rows):
    if not rows:
        pytest.skip("there are no rows")
    prompts = [[PROMPT], ["What is Neso?"], [PROMPT]]
    given = tensors(3, text_input=prompts, max_tokens=12, return_log_probs=True)
    result = plain.infer("tensorrt_llm_bls", given)
    texts = result.as_numpy("text_output").tolist()
    assert texts[0] == texts[2] == ANSWER.encode() and texts[1] != texts[0]
    assert result.as_numpy("output_log_probs").shape == (3, 1, 12)
    assert result.as_numpy("batch_index").tolist() == [[0], [1], [2]]


def test_accumulated_tokens(tmp_path):
    repository = init(tmp_path, "--accumulate-tokens")
    with ServerProcess(f"--model-repository={repository}") as server:
        given = {"text_input": PROMPT, "max_tokens": 12, "stream": True}
        results = send_request(server.address("grpc"), "tensorrt_llm_bls", **given)
    texts = [text([result]) for result in results]
    assert texts[0] == " TTFT" and texts[-1] == ANSWER
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    assert np.all(np.diff([len(part) for part in texts]) > 0)


def test_repository_in_the_legacy_layout(tmp_path):
    """Configured as in its guide, with transformers tokenizers.

    Preprocessing never sends one of its outputs, and log probabilities pass through postprocessing.
    """
    pytest.importorskip("transformers")
    shutil.copytree(Path(__file__).parent / "repositories" / "older_trtllm", tmp_path / "models")
    for path in (tmp_path / "models").glob("*/config.pbtxt"):
        filled = path.read_text().replace("${tokenizer_dir}", str(PILOT)).replace("${engine_dir}", str(PILOT))
        path.write_text(filled)
    with ServerProcess(f"--model-repository={tmp_path}/models") as server:
        body = {"text_input": PROMPT, "max_tokens": 12, "bad_words": "", "stop_words": ""}
        _, response = server.post("/v2/models/ensemble/generate", body)
        assert response["text_output"] == PROMPT + ANSWER and response["cum_log_probs"] == 0.0
        _, response = server.post("/v2/models/ensemble/generate", {**body, "return_log_probs": True})
        assert response["cum_log_probs"] < 0
        given = {
            "text_input": PROMPT,
            "max_tokens": 12,
            "bad_words": [""],
            "stop_words": [" time"],
            "stream": True,
        }
        assert text(send_request(server.address("grpc"), "ensemble", **given)) == " TTFT is the time"
        # Neso's ensemble with another postprocessing model.
        init(tmp_path / "ours")
        shutil.copytree(tmp_path / "ours" / "tensorrt_llm_bls", tmp_path / "models" / "tensorrt_llm_bls")
    with ServerProcess(f"--model-repository={tmp_path}/models") as server:
        given |= {"stop_words": ["irst to"]}
        response = text(send_request(server.address("grpc"), "tensorrt_llm_bls", 1, **given))
        assert response == " TTFT is the time to first to"


PICKY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()[0]
            if (tokens[0] == 1451).any():
                raise pb_utils.TritonModelException("not this token")
            texts = np.array([b"x" * length for length in lengths], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", texts)]))
        return responses
"""


def test_undecodable_output_fails_only_its_request(tmp_path):
    """Postprocessing decodes several requests together."""
    init(tmp_path)
    (tmp_path / "postprocessing" / "1" / "model.py").write_text(PICKY)
    with ServerProcess(f"--model-repository={tmp_path}") as server:

        def one(prompt: str) -> str:
            return text(
                send_request(
                    server.address("grpc"), "tensorrt_llm_bls", text_input=prompt, max_tokens=8, stream=True
                )
            )

        with ThreadPoolExecutor(8) as pool:
            good = [pool.submit(one, "Hello.") for _ in range(6)]
            bad = [pool.submit(one, PROMPT) for _ in range(2)]
            assert {future.result() for future in good} == {"x" * 8}
            for future in bad:
                with pytest.raises(InferenceServerException, match="not this token"):
                    future.result()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_many_streams_with_disconnects(tmp_path, mode):
    init(tmp_path, "--parameter=max_num_seqs=8")
    setting = f"--backend-config=python,execution-mode={mode}"
    with ServerProcess(f"--model-repository={tmp_path}", setting, timeout=90) as server:
        address = server.address("grpc")

        def stay_connected(model: str) -> str:
            return text(send_request(address, model, text_input=PROMPT, max_tokens=12, stream=True))

        def disconnect(model: str) -> None:
            given = tensors(1, text_input="Tell me", max_tokens=1900, end_id=-1, stream=True)
            request = Stream(address, model, given)
            request.next()
            request.client.stop_stream(cancel_requests=True)

        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(stay_connected, CHAINS[i % 2]) for i in range(24)]
            gone = [pool.submit(disconnect, CHAINS[i % 2]) for i in range(24)]
            assert {future.result() for future in answers} == {ANSWER}
            for future in gone:
                future.result()
        wait_until(lambda: running(server) == 0)
        used = (
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"}'
        )
        wait_until(lambda: server.metrics()[used] == 0)
