"""Request inputs beyond token ids: adapters, prompt tables, draft tokens, guided decoding and decoding modes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "lora"))
from checkpoints import VOCAB_SIZE, load_oracle
from medusa_files import HIDDEN, NUM_HEADS, VOCAB, head_tensors, write_heads
from peft_adapters import greedy_with, write_adapter
from safetensors.numpy import save_file
from test_bad_adapters import as_tensors
from trtllm_repository import NAME, PROMPT

from neso.backends.tensorrtllm.backend import MAX_WARNINGS
from neso.engine.text.tokenizer import Tokenizer
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor

LENGTH = 8


def row(value, dtype=np.int32):
    """Return a tensor of one row with one element."""
    return np.array([[value]], dtype)


def text(value: str):
    return np.array([[value.encode()]], np.object_)


# -- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """Return an adapter's tensors as a client sends them, [1, rows, width] and [1, rows, 3], and peft's tokens."""
    path = write_adapter(checkpoint, tmp_path_factory.mktemp("adapter") / "one", seed=1)
    tensors = as_tensors(path)
    weights = np.frombuffer(tensors.weights, np.float32).reshape(1, -1, tensors.width)
    return weights, np.array([tensors.config], np.int32), greedy_with(checkpoint, path, [PROMPT], LENGTH)[0]


def float32_weights(config: str) -> str:
    """The configuration for adapters in float32: half precision would change tokens here."""
    parsed = text_format.Parse(config, pb.ModelConfig())
    (tensor,) = (tensor for tensor in parsed.input if tensor.name == "lora_weights")
    tensor.data_type = pb.TYPE_FP32
    return text_format.MessageToString(parsed)


async def test_adapter_is_sent_once_and_cached(serve_model, adapter, greedy):
    weights, config, expected = adapter
    served = await serve_model(change=float32_weights)
    task = {"lora_task_id": row(7, np.uint64)}
    with pytest.raises(ServerError, match="lora_task_id: 7 is not cached"):
        await served.tokens(**task)
    assert await served.tokens(**task, lora_weights=weights, lora_config=config) == expected != greedy()
    assert await served.tokens(**task) == expected
    assert await served.tokens() == greedy()
    with pytest.raises(ServerError, match="lora_weights: must be sent together with lora_config"):
        await served.tokens(lora_task_id=row(8, np.uint64), lora_weights=weights)


async def test_prefetched_adapters(serve_model, adapter, tmp_path):
    weights, config, expected = adapter
    folder = tmp_path / "adapters" / "3"
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_weights.npy", weights)
    np.save(folder / "model.lora_config.npy", config)
    served = await serve_model(lora_prefetch_dir=tmp_path / "adapters")
    assert await served.tokens(lora_task_id=row(3, np.uint64)) == expected
    (folder / "model.lora_config.npy").write_bytes(b"nothing")
    broken = await serve_model(lora_prefetch_dir=tmp_path / "adapters")
    assert broken.reason.startswith("lora_prefetch_dir: ") and "model.lora_config.npy" in broken.reason
    missing = await serve_model(lora_prefetch_dir="nowhere")
    assert "'lora_prefetch_dir' of model 'tensorrt_llm' is 'nowhere', expected a directory" in missing.reason


# -- prompt tables, draft tokens, grammars --------------------------------------------------------------------------


async def test_prompt_embedding_table(serve_model, checkpoint):
    """Ids from the vocabulary size on select rows of the table, as in P-tuning."""
    import torch

    served = await serve_model()
    table = np.random.default_rng(0).normal(size=(1, 4, 48)).astype(np.float16)
    ids = [VOCAB_SIZE, VOCAB_SIZE + 3, *PROMPT]
    model = load_oracle(checkpoint)
    expected: list[int] = []
    with torch.no_grad():
        rows = torch.tensor(table[0, [0, 3]].astype(np.float32))
        for _ in range(LENGTH):
            words = model.get_input_embeddings()(torch.tensor(PROMPT + expected))
            logits = model(inputs_embeds=torch.cat([rows, words])[None]).logits
            expected.append(int(logits[0, -1].argmax()))
    given = {"prompt_embedding_table": table, "prompt_vocab_size": row(4)}
    assert await served.tokens(ids, **given) == expected
    extra = {"prompt_table_extra_ids": np.array([[1, 1, *([0] * len(PROMPT))]], np.uint64)}
    assert await served.tokens(ids, **given, **extra) == expected
    with pytest.raises(ServerError, match="prompt_vocab_size: is 5, but prompt_embedding_table has 4 rows"):
        await served.tokens(ids, **given | {"prompt_vocab_size": row(5)})


@pytest.mark.parametrize("token", [VOCAB_SIZE, 2**31 - 1, -5])
async def test_embedding_of_a_token_outside_the_vocabulary_is_zero(serve_model, caplog, token):
    served = await serve_model()
    zeros = {"prompt_embedding_table": np.zeros((1, 1, 48), np.float16), "prompt_vocab_size": row(1)}
    expected = await served.tokens([VOCAB_SIZE, *PROMPT, VOCAB_SIZE], **zeros)
    assert await served.tokens([token, *PROMPT, token]) == expected != await served.tokens([0, *PROMPT, 0])
    inputs = {"input_ids": np.array([[token, 3]], np.int32), "input_lengths": row(2)}
    (response,) = await served.responses(inputs | {"request_output_len": row(1)})
    assert response["output_ids"][0, 0, :2].tolist() == [token, 3]
    assert caplog.text.count("input_ids has tokens outside the vocabulary, their embeddings are zero") == 1


async def test_long_prompt_of_tokens_outside_the_vocabulary_is_rejected_early(serve_model):
    """Before a row of embeddings is made for each of its tokens."""
    served = await serve_model()
    tracemalloc.start()
    try:
        with pytest.raises(ServerError, match="input_ids: "):
            await served.tokens([VOCAB_SIZE] * 200_000)
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20  # the rows would take 37 MiB
    finally:
        tracemalloc.stop()


async def test_table_for_a_prompt_without_virtual_tokens_has_no_effect(serve_model, caplog, greedy):
    served = await serve_model()
    assert await served.tokens(prompt_embedding_table=np.ones((1, 2, 48), np.float16)) == greedy()
    assert "prompt_embedding_table has no effect: input_ids has no virtual tokens" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder_output_lengths", row(3)),
        ("mrope_position_deltas", row(3, np.int64)),
        ("context_phase_params", np.ones((1, 3), np.uint8)),
    ],
)
async def test_inputs_of_unsupported_features_are_rejected(serve_model, name, value):
    served = await serve_model()
    with pytest.raises(ServerError, match=f"{name}: "):
        await served.tokens(**{name: value})


async def test_size_of_a_missing_table_is_logged(serve_model, caplog, greedy):
    served = await serve_model()
    assert await served.tokens(prompt_vocab_size=row(4)) == greedy()
    assert "prompt_vocab_size has no effect without prompt_embedding_table" in caplog.text


# -- request parameters ---------------------------------------------------------------------------------------------


async def test_request_parameters_are_used_as_inputs(serve_model, caplog):
    served = await serve_model(max_beam_width=2)

    async def tokens(**parameters):
        (response,) = await served.responses(
            {
                "input_ids": np.array([PROMPT], np.int32),
                "input_lengths": row(len(PROMPT)),
                "request_output_len": row(LENGTH),
                "beam_width": row(2),
            },
            parameters=parameters,
        )
        return response

    assert (await tokens())["output_ids"].shape[1] == 2
    one = await tokens(num_return_sequences=1, exclude_input_in_output=True)
    assert one["output_ids"].shape[:2] == (1, 1)
    assert one["output_ids"].shape[2] <= LENGTH
    for name in ("len_penalty", "length_penalty"):
        with pytest.raises(ServerError, match="len_penalty: must be at least -10"):
            await tokens(**{name: 11})
    with pytest.raises(ServerError, match="temperature: must be of the type FP32, got 'hot'"):
        await tokens(temperature="hot")
    with pytest.raises(ServerError, match="end_id: 3000000000 is out of the range of INT32"):
        await tokens(end_id=3_000_000_000)
    for _ in range(2):
        await tokens(temprature=0.5)
    assert caplog.text.count("request parameter 'temprature' has no effect") == 1
    await tokens(**{f"name{number}": 1 for number in range(2 * MAX_WARNINGS)})
    assert caplog.text.count("has no effect") == MAX_WARNINGS


async def test_both_names_of_the_length_penalty(serve_model):
    served = await serve_model(max_beam_width=2)
    for name in ("len_penalty", "length_penalty"):
        with pytest.raises(ServerError, match="len_penalty: must be at least -10"):
            await served.tokens(**{name: row(11, np.float32)})


async def test_penalties_of_any_size(serve_model, greedy):
    served = await serve_model()
    penalties = {"presence_penalty": 30.0, "frequency_penalty": -40.0}
    given = {name: row(value, np.float32) for name, value in penalties.items()}
    assert await served.tokens(length=20, **given) == greedy(length=20, **penalties) != greedy(length=20)


async def test_normalized_log_probs(serve_model):
    """Those of the tokens that could be sampled; among two, at most one is less likely than the other."""
    served = await serve_model(normalize_log_probs="true")
    plain = await serve_model()
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(len(PROMPT)),
        "request_output_len": row(LENGTH),
        "return_log_probs": row(True, np.bool_),
        "seed": row(5, np.uint64),
    }
    (certain,) = await served.responses(inputs)
    assert certain["output_log_probs"].tolist() == [[[0.0] * LENGTH]]
    sampled = inputs | {"runtime_top_k": row(2), "temperature": row(2.0, np.float32)}
    (normalized,), (full,) = await served.responses(sampled), await plain.responses(sampled)
    assert normalized["output_ids"].tolist() == full["output_ids"].tolist()
    assert (normalized["output_log_probs"] > full["output_log_probs"]).all()
    assert normalized["cum_log_probs"][0, 0] == pytest.approx(normalized["output_log_probs"].sum(), abs=1e-4)


async def test_draft_tokens(serve_model, greedy):
    expected = greedy()
    served = await serve_model()
    guess = np.array([[*expected[:2], expected[2] + 1]], np.int32)
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(len(PROMPT)),
        "request_output_len": row(LENGTH),
        "draft_input_ids": guess,
        "return_perf_metrics": row(True, np.bool_),
        "exclude_input_in_output": row(True, np.bool_),
    }
    (response,) = await served.responses(inputs)
    assert response["output_ids"].tolist() == [[expected]]
    assert response["total_draft_tokens"].item() == 3
    assert response["total_accepted_draft_tokens"].item() == 2
    assert response["acceptance_rate"].item() == pytest.approx(2 / 3)
    logits = np.full((1, 3, VOCAB_SIZE), -10, np.float32)
    np.put_along_axis(logits, guess[..., None], 10, axis=2)
    given = {"draft_logits": logits, "draft_acceptance_threshold": row(0.9, np.float32)}
    assert len(await served.tokens(draft_input_ids=guess, **given)) == LENGTH
    with pytest.raises(ServerError, match="draft_logits"):
        await served.tokens(draft_input_ids=guess, draft_logits=logits[..., :5])
    with pytest.raises(ServerError, match="draft_input_ids: token 999"):
        await served.tokens(draft_input_ids=np.array([[999]], np.int32))


@pytest.mark.parametrize(
    ("kind", "guide", "fits"),
    [
        ("json", None, lambda response: isinstance(json.loads(response), dict)),
        ("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}', json.loads),
        ("regex", "a{3}b", lambda response: response == "aaab"),
        ("ebnf_grammar", 'root ::= "x" "y"', lambda response: response == "xy"),
    ],
)
async def test_guided_decoding(serve_model, checkpoint, kind, guide, fits):
    served = await serve_model()
    given = {"guided_decoding_guide_type": text(kind)} | (
        {"guided_decoding_guide": text(guide)} if guide else {}
    )
    tokenizer = Tokenizer.from_model(checkpoint)
    bias = np.zeros((1, VOCAB_SIZE), np.float32)
    bias[0, tokenizer.encode("}", add_special_tokens=False)] = 50  # or JSON of random tokens never ends
    tokens = await served.tokens(length=60, **given, end_id=row(1), embedding_bias=bias)
    response = tokenizer.decode(tokens)
    assert fits(response) is not False, response


async def test_unknown_guide_type_is_rejected(serve_model):
    served = await serve_model()
    with pytest.raises(ServerError, match="guided_decoding_guide_type: must be one of json, json_schema"):
        await served.tokens(guided_decoding_guide_type=text("xml"))
    with pytest.raises(ServerError, match="guided_decoding_guide"):
        await served.tokens(guided_decoding_guide_type=text("regex"))


# -- sampling --------------------------------------------------------------------------------------------------------


async def test_greedy_decoding_without_top_k_and_top_p(serve_model, greedy):
    served = await serve_model()
    hot = {"temperature": row(2, np.float32)}
    assert await served.tokens(**hot) == greedy()
    assert await served.tokens(**hot, runtime_top_k=row(0), runtime_top_p=row(0, np.float32)) == greedy()
    assert await served.tokens(**hot, runtime_top_k=row(50), seed=row(1, np.uint64)) != greedy()


@pytest.mark.parametrize("name", ["seed", "random_seed"])
async def test_both_names_of_seed(serve_model, name, greedy):
    served = await serve_model()
    draw = {"runtime_top_k": row(50), "runtime_top_p": row(0.9, np.float32), name: row(2**63 + 1, np.uint64)}
    expected = greedy(temperature=1.0, top_k=50, top_p=float(np.float32(0.9)), seed=2**63 + 1, min_tokens=1)
    assert await served.tokens(**draw) == await served.tokens(**draw) == expected


@pytest.mark.parametrize(
    ("mode", "top_k", "top_p"), [("top_k", 50, 1.0), ("top_p", 0, 0.5), ("top_k_top_p", 50, 0.5)]
)
async def test_decoding_modes(serve_model, mode, top_k, top_p, greedy):
    served = await serve_model(decoding_mode=mode)
    both = {"runtime_top_k": row(50), "runtime_top_p": row(0.5, np.float32), "seed": row(3, np.uint64)}
    expected = greedy(temperature=1.0, top_k=top_k, top_p=top_p, seed=3, min_tokens=1, length=20)
    assert await served.tokens(length=20, **both) == expected


async def test_beam_search_mode_does_not_sample(serve_model, greedy):
    served = await serve_model(decoding_mode="beam_search", max_beam_width=2)
    assert await served.tokens(runtime_top_k=row(50), temperature=row(2, np.float32)) == greedy()


async def test_medusa(serve_model, tmp_path, greedy):
    output = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    heads = write_heads(tmp_path / "heads", head_tensors([output] * NUM_HEADS))
    served = await serve_model(
        decoding_mode="medusa", medusa_choices="{0}, {0, 0}, {1}", speculative_model=heads
    )
    assert await served.tokens(length=20) == greedy(length=20)
    assert served.backend.engine.stats.drafts.draft_tokens > 0


@pytest.mark.parametrize("mode", ["", "top_k_top_p"])
async def test_medusa_heads_in_the_checkpoint_select_medusa(
    serve_model, checkpoint, tmp_path, greedy, caplog, mode
):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    output = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    save_file(head_tensors([output] * NUM_HEADS, "medusa_head."), model / "medusa_lm_head.safetensors")
    served = await serve_model(model, decoding_mode=mode)
    assert await served.tokens(length=20) == greedy(length=20)
    assert served.backend.engine.stats.drafts.draft_tokens > 0
    instead = f" instead of '{mode}'" if mode else ""
    assert f"decoding_mode is 'medusa'{instead}: the checkpoint has Medusa heads" in caplog.text


async def test_both_names_of_min_tokens(serve_model, greedy):
    served = await serve_model()
    end = greedy()[0]
    for name in ("min_length", "min_tokens"):
        tokens = await served.tokens(end_id=row(end), **{name: row(4)})
        assert tokens == greedy(min_tokens=4, stop_token_ids=(end,))[: len(tokens)] and len(tokens) >= 4
    # At least one token is generated.
    assert len(await served.tokens(end_id=row(end))) >= 1


async def test_decoder_start_token_is_ignored(serve_model, greedy):
    """TensorRT-LLM's preprocessing sends it to every model."""
    served = await serve_model()
    none = np.zeros((1, 2, 0), np.int32)
    filler = {"decoder_input_ids": row(2), "decoder_input_lengths": row(1), "stop_words_list": none}
    padded = {
        "bad_words_list": np.array([[[0], [-1]]], np.int32),
        "embedding_bias": np.zeros((1, 0), np.float32),
    }
    assert await served.tokens(**filler, **padded) == greedy()


# -- request lifecycle ------------------------------------------------------------------------------------------------


async def test_beams_of_different_lengths_are_padded(serve_model, greedy):
    served = await serve_model(max_beam_width=2)
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(len(PROMPT)),
        "request_output_len": row(LENGTH),
        "beam_width": row(2),
        "end_id": row(greedy()[1]),
        "exclude_input_in_output": row(True, np.bool_),
    }
    for pad, expected in ((None, -1), (2, 2)):
        (response,) = await served.responses(inputs | ({} if pad is None else {"pad_id": row(pad)}))
        ids, lengths = response["output_ids"][0], response["sequence_length"][0]
        assert len(set(lengths.tolist())) == 2, "the test needs beams of different lengths"
        assert (ids[np.arange(ids.shape[1]) >= lengths[:, None]] == expected).all()


async def test_token_counts_are_returned(serve_model):
    served = await serve_model()
    await served.tokens(length=3)
    await served.tokens(length=60)
    metrics = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in served.core.metrics.collect()
        for sample in family.samples
        if sample.name.startswith("nv_llm_")
    }
    buckets = ("10.0", "50.0", "100.0", "500.0", "1000.0", "+Inf")
    rendered = (await served.core.render_metrics()).decode()
    labels = 'model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"'
    assert f'nv_llm_input_token_len_bucket{{{labels},le="10"}} 0' in rendered
    assert [metrics["nv_llm_input_token_len_bucket", le] for le in buckets] == [0, 2, 2, 2, 2, 2]
    assert [metrics["nv_llm_output_token_len_bucket", le] for le in buckets] == [1, 1, 2, 2, 2, 2]


async def test_logits_have_the_configured_datatype(serve_model):
    def half(config: str) -> str:
        parsed = text_format.Parse(config, pb.ModelConfig())
        for tensor in parsed.output:
            if tensor.name.endswith("logits"):
                tensor.data_type = pb.TYPE_FP16
        return text_format.MessageToString(parsed)

    served = await serve_model(change=half)
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(12),
        "request_output_len": row(2),
    }
    flags = {f"return_{kind}_logits": row(True, np.bool_) for kind in ("context", "generation")}
    (response,) = await served.responses(inputs | flags)
    assert {response[f"{kind}_logits"].dtype for kind in ("context", "generation")} == {np.dtype(np.float16)}


async def test_stop_before_the_request_starts(serve_model):
    served = await serve_model()
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(12),
        "request_output_len": row(400),
    }
    running = asyncio.ensure_future(served.responses(inputs, id="7"))
    await asyncio.sleep(0)  # submitted, but its task has not started
    assert await served.responses(inputs | {"stop": row(True, np.bool_)}, id="7") == [{}]
    (response,) = await running
    assert response["output_ids"].tolist() == [[PROMPT]]
    assert not len(served.backend._running)


async def test_stop_ends_all_rows_of_a_batch(serve_model, step_pace):
    served = await serve_model()
    inputs = {
        "input_ids": np.array([PROMPT, PROMPT[::-1]], np.int32),
        "input_lengths": np.array([[12], [12]], np.int32),
        "request_output_len": np.array([[490], [490]], np.int32),
    }
    begun = asyncio.Event()
    served.backend.engine.engines[0].on_stats(lambda stats: begun.set())
    running = asyncio.ensure_future(served.responses(inputs, id="7"))
    await begun.wait()
    stop = {name: array[:1] for name, array in inputs.items()} | {"stop": row(True, np.bool_)}
    assert await served.responses(stop, id="7") == [{}]
    rows = {int(response["batch_index"].item()): response for response in await running}
    assert rows.keys() == {0, 1}
    assert all(12 <= response["sequence_length"].item() < 502 for response in rows.values())
    assert (await served.backend.engine.check_integrity()).num_requests == 0


async def test_failing_row_fails_the_request(serve_model):
    served = await serve_model()
    inputs = {
        "input_ids": np.array([PROMPT, PROMPT], np.int32),
        "end_id": np.array([[-1], [999]], np.int32),
        "input_lengths": np.array([[12], [12]], np.int32),
        "request_output_len": np.array([[400], [400]], np.int32),
    }
    with pytest.raises(ServerError, match="end_id: token 999"):
        await served.responses(inputs)
    with pytest.raises(ServerError, match="input_ids: has no rows"):
        await served.responses({name: array[:0] for name, array in inputs.items()})
    assert (await served.backend.engine.check_integrity()).num_requests == 0


async def test_cancellation_before_the_request_starts(serve_model):
    from neso.server.inference_request import InferenceRequest
    from neso.server.tensor import Tensor

    served = await serve_model()
    inputs = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": row(12),
        "request_output_len": row(400),
    }
    tensors = {name: Tensor.from_numpy(name, array) for name, array in inputs.items()}
    model = served.core.model("tensorrt_llm")
    stream = model.submit(InferenceRequest("tensorrt_llm", tensors))
    stream.cancel()
    (response,) = [response async for response in stream]
    assert "cancelled" in response.error.message and model.in_flight_count == 0


async def test_text_interface_of_the_model(serve_model, checkpoint, greedy):
    """Other frontends get a language model."""
    from neso.generation import GenerationRequest, SamplingParams

    served = await serve_model()
    model = served.core.model("tensorrt_llm")
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    pieces = [output async for output in model.generate(GenerationRequest(PROMPT, params))]
    response = "".join(delta.text for output in pieces for delta in output.deltas)
    tokenizer = Tokenizer.from_model(checkpoint)
    assert response == tokenizer.decode(PROMPT + greedy())[len(tokenizer.decode(PROMPT)) :]


async def test_high_priority_blocks_are_retained(serve_model):
    """A cache of 8 blocks of 16 tokens: later prompts would evict the first one."""
    served = await serve_model(num_blocks=8, max_num_seqs=1)

    async def reused(first: int, **further) -> int:
        inputs = {
            "input_ids": np.arange(first, first + 48, dtype=np.int32)[np.newaxis],
            "input_lengths": row(48),
            "request_output_len": row(2),
            "return_perf_metrics": row(True, np.bool_),
        }
        (response,) = await served.responses(inputs | further)
        return int(response["kv_cache_reused_blocks"].item())

    kept = {
        "retention_token_range_starts": row(0),
        "retention_token_range_ends": row(-1),
        "retention_token_range_priorities": row(90),
    }
    for further, expected in (({}, 0), (kept, 2)):
        await reused(10, **further)
        for other in range(4):
            await reused(70 + 60 * other)
        assert await reused(10) == expected
    with pytest.raises(
        ServerError, match="retention_token_range_priorities: must be at least 0 and at most 100"
    ):
        await reused(10, **kept | {"retention_token_range_priorities": row(101)})
    with pytest.raises(ServerError, match="retention_token_range_ends: must have as many values"):
        await reused(10, retention_token_range_starts=row(0))


async def test_requests_of_a_busy_client_are_delayed_in_the_queue(serve_model, monkeypatch):
    monkeypatch.setattr("neso.server.admission._FAIR_SEQUENCES", -100)
    served = await serve_model()
    engine = served.backend.engine
    delays = []
    process = engine.process

    def record(request):
        delays.append(request.queue_delay)
        return process(request)

    monkeypatch.setattr(engine, "process", record)
    inputs = {"input_ids": PROMPT, "input_lengths": [len(PROMPT)], "request_output_len": [2]}
    tensors = {name: Tensor.from_numpy(name, np.array([value], np.int32)) for name, value in inputs.items()}
    stream = served.core.model(NAME).submit(InferenceRequest(NAME, tensors, client="busy"))
    assert [response.error async for response in stream] == [None]
    assert delays == [pytest.approx(5, rel=0.1)]
