"""The llm backend in a running core: repository formats, input and output tensors, metrics, unload and reload."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path

import numpy as np
import orjson
import psutil
import pytest
from eventually import until

import neso.server.core
from neso.generation import GenerationRequest, SamplingDefaults, SamplingParams
from neso.models import SHIPPED_MODELS
from neso.server.core import Core
from neso.server.errors import InvalidArgument, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.model_metrics import KvCacheLoad
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.tensor import Tensor

PILOT = SHIPPED_MODELS["neso-pilot"]
PROMPT = "What is paged attention?"


def write_repository(root, config='backend: "llm"', **model_json):
    (root / "pilot" / "1").mkdir(parents=True)
    (root / "pilot" / "config.pbtxt").write_text(config)
    (root / "pilot" / "1" / "model.json").write_bytes(orjson.dumps({"model": "neso-pilot", **model_json}))


@pytest.fixture
async def core(tmp_path):
    write_repository(tmp_path, num_blocks=256)
    options = ServerOptions(
        model_repository=(tmp_path,),
        model_control_mode=ModelControlMode.EXPLICIT,
        startup_models=("*",),
        backend_config={"llm": {"in-process": "true"}},
        metrics=MetricsConfig(histogram_latencies=True),
    )
    core = neso.server.core.Core(options)
    await core.start()
    assert core.ready(), core.repository_index()
    yield core
    await core.stop()


def request(prompt: str = PROMPT, parameters=None, **flags) -> InferenceRequest:
    inputs = {"text_input": Tensor.from_strings("text_input", [prompt])}
    for name, value in flags.items():
        inputs[name] = Tensor.from_numpy(name, np.array([value]))
    return InferenceRequest("pilot", inputs, parameters={"temperature": 0.0, **(parameters or {})})


async def outputs(core, request) -> list:
    responses = [response async for response in core.model("pilot").submit(request)]
    for response in responses:
        assert response.error is None, response.error
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    return responses


async def test_one_response_unless_streaming(core):
    (whole,) = await outputs(core, request())
    text = whole.output("text_output").strings()[0]
    pieces = await outputs(core, request(stream=True))
    assert len(pieces) > 5
    assert "".join(p.output("text_output").strings()[0] for p in pieces) == text
    assert [t.name for t in whole.outputs] == ["text_output"]


async def test_all_outputs(core):
    flags = {
        f"return_{name}": True
        for name in (
            "finish_reason",
            "cumulative_logprob",
            "logprobs",
            "num_input_tokens",
            "num_output_tokens",
        )
    }
    (response,) = await outputs(core, request(parameters={"max_tokens": 4, "n": 2}, **flags))
    assert {t.name: t.array.shape for t in response.outputs} == {
        "text_output": (2,),
        "finish_reason": (2,),
        "cumulative_logprob": (2,),
        "logprobs": (2,),
        "num_input_tokens": (1,),
        "num_output_tokens": (2,),
    }
    assert response.output("num_output_tokens").array.tolist() == [4, 4]


async def test_logits_as_tensors(core):
    flags = {"return_context_logits": True, "return_generation_logits": True, "return_num_input_tokens": True}
    (response,) = await outputs(core, request(parameters={"max_tokens": 4, "n": 2}, **flags))
    vocabulary = core.model("pilot").language_model.engine.info.vocab_size
    (length,) = response.output("num_input_tokens").array
    context, generation = (response.output(f"{kind}_logits").array for kind in ("context", "generation"))
    assert (context.shape, context.dtype) == ((length, vocabulary), np.float32)
    assert generation.shape == (2, 4, vocabulary)
    np.testing.assert_allclose(generation[0, 0], context[-1], atol=1e-4)
    pieces = await outputs(core, request(stream=True, parameters={"max_tokens": 4}, **flags))
    rows = np.concatenate([piece.output("generation_logits").array[0] for piece in pieces])
    np.testing.assert_allclose(rows, generation[0], atol=1e-3)
    named = ["context_logits" in [tensor.name for tensor in piece.outputs] for piece in pieces]
    assert named == [True, False, False, False]


async def test_beam_search_with_tensorrt_llm_names(core):
    parameters = {
        "beam_width": 3,
        "num_return_sequences": 3,
        "len_penalty": 0.0,
        "early_stopping": 1,
        "max_tokens": 6,
        "min_length": 2,
        "bad_words": '["is", [3]]',
        "stop_words": "[[7, 8], [9]]",
        "runtime_top_k": 1,
        "random_seed": 4,
    }
    flags = {"return_cumulative_logprob": True, "return_finish_reason": True}
    for stream in (False, True):
        (response,) = await outputs(core, request(parameters=parameters, stream=stream, **flags))
        texts = response.output("text_output").strings()
        assert len(set(texts)) == 3 and not any("is" in text for text in texts)
        scores = response.output("cumulative_logprob").array.tolist()
        assert scores == sorted(scores, reverse=True) and scores[0] < 0


async def test_prompt_is_included_on_request(core):
    (response,) = await outputs(core, request(exclude_input_in_output=False, parameters={"max_tokens": 3}))
    assert response.output("text_output").strings()[0].startswith(PROMPT)


async def test_parameters_as_json_text(core):
    (response,) = await outputs(core, request(parameters={"stop": '["is", "a"]', "max_tokens": 30}))
    text = response.output("text_output").strings()[0]
    assert "is" not in text and "a" not in text


async def test_invalid_parameter_is_rejected(core):
    (response,) = [r async for r in core.model("pilot").submit(request(parameters={"temperature": -1.0}))]
    assert isinstance(response.error, InvalidArgument) and "temperature" in response.error.message


async def test_cancel_frees_blocks_and_is_counted(core, step_pace):
    model = core.model("pilot")
    stream = model.submit(request(stream=True, parameters={"ignore_eos": True, "max_tokens": 1000}))
    await anext(stream)
    stream.cancel()
    rest = [response async for response in stream]
    assert rest[-1].error is not None and rest[-1].error.code.value == "CANCELLED"
    stats = await model.language_model.engine.check_integrity()
    assert stats.num_used_blocks == 0
    assert (
        b'nv_inference_request_failure{model="pilot",reason="CANCELED",version="1"} 1'
        in core.metrics.render()
    )


async def test_generation_payload_and_tensors_agree(core):
    model = core.model("pilot")
    (response,) = await outputs(core, request())
    generated = model.generate(GenerationRequest(PROMPT, SamplingParams(temperature=0)))
    text = "".join([delta.text async for output in generated for delta in output.deltas])
    assert response.output("text_output").strings() == [text]
    assert b'nv_inference_request_success{model="pilot",version="1"} 2' in core.metrics.render()


async def test_first_responses_are_measured_for_payloads_and_tensors(core):
    model = core.model("pilot")
    await outputs(core, request(stream=True))
    async for _ in model.generate(GenerationRequest(PROMPT, SamplingParams(temperature=0))):
        pass
    name = "nv_inference_first_response_histogram_ms"
    assert f'{name}_count{{model="pilot",version="1"}} 2\n' in core.metrics.render().decode()


async def test_kv_cache_load(core, step_pace):
    assert core.kv_cache_load() == KvCacheLoad(
        0.0, 256 * core.model("pilot").language_model.engine.info.block_size
    )
    stream = core.model("pilot").submit(
        request(stream=True, parameters={"ignore_eos": True, "max_tokens": 1000})
    )
    async for _ in stream:
        if core.kv_cache_load().utilization > 0:
            break
    stream.cancel()
    assert [response async for response in stream][-1].final


async def test_reload_waits_for_requests_in_flight(core):
    parameters = {"ignore_eos": True, "max_tokens": 60}
    (expected,) = await outputs(core, request(parameters=parameters))
    running = asyncio.create_task(outputs(core, request(stream=True, parameters=parameters)))
    await asyncio.sleep(0.05)
    await core.load_model("pilot")
    text = "".join(r.output("text_output").strings()[0] for r in await running)
    assert text == expected.output("text_output").strings()[0]
    assert len(await outputs(core, request())) == 1
    await asyncio.gather(*core._lifecycle._retiring)
    assert b"vllm:num_requests_running{" in core.metrics.render(), (
        "the new one's gauges outlive the old one's"
    )
    await core.unload_model("pilot")
    with pytest.raises(ServerError):
        core.model("pilot")
    assert b"vllm:num_requests_running{" not in core.metrics.render()


@pytest.mark.parametrize(
    ("model_json", "reason"),
    [
        ({"max_model_len": 1_000_000}, "max_model_len"),
        ({"max_modle_len": 100}, "max_modle_len"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"model": 5}, "model"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"generation_config": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"override_generation_config": {"top_k": "x"}}, "override_generation_config: top_k: Expected `int`"),
    ],
)
async def test_invalid_options_are_reported(tmp_path, model_json, reason):
    write_repository(tmp_path, **model_json)
    core = neso.server.core.Core(
        ServerOptions(model_repository=(tmp_path,), backend_config={"llm": {"in-process": "true"}})
    )
    await core.start()
    (entry,) = core.repository_index()
    assert entry.state.value == "UNAVAILABLE" and reason in entry.reason
    await core.stop()


async def test_default_sampling_does_not_apply_to_tensors(tmp_path):
    write_repository(tmp_path, num_blocks=256, generation_config="defaults")
    version = tmp_path / "pilot" / "1"
    (version / "defaults").mkdir()
    (version / "defaults" / "generation_config.json").write_bytes(
        orjson.dumps({"temperature": 0.7, "top_k": 1, "max_new_tokens": 3})
    )
    core = neso.server.core.Core(
        ServerOptions(model_repository=(tmp_path,), backend_config={"llm": {"in-process": "true"}})
    )
    await core.start()
    assert core.ready(), core.repository_index()
    assert core.model("pilot").language_model.default_sampling == SamplingDefaults(
        temperature=0.7, top_k=1, max_new_tokens=3, limits_tokens=True
    )
    hot = {"temperature": 5.0, "max_tokens": 8, "ignore_eos": True}
    texts = set()
    for seed in range(3):
        requested = request(parameters={**hot, "seed": seed}, return_num_output_tokens=True)
        (whole,) = await outputs(core, requested)
        assert whole.output("num_output_tokens").array.tolist() == [8]
        texts.add(whole.output("text_output").strings()[0])
    assert len(texts) > 1
    await core.stop()


@pytest.mark.parametrize(
    "parameters",
    [
        {"guided_choice": '["yes", "no"]'},
        {"guided_regex": "yes|no"},
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "yes|no"},
        {"response_format": '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}}'},
    ],
)
async def test_guided_decoding(core, parameters):
    (response,) = await outputs(core, request(parameters=parameters, return_finish_reason=True))
    assert response.output("text_output").strings()[0] in ("yes", "no", "7")
    assert response.output("finish_reason").strings() == ["stop"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"guided_regex": "a(b"}, "guided_regex: invalid regex"),
        ({"guided_json": '{"type": "object", "not": {}}'}, "guided_json: Unimplemented"),
        ({"guided_json": "{"}, "guided_json: not valid JSON"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
    ],
)
async def test_invalid_grammar_names_its_field(core, parameters, message):
    with pytest.raises(ServerError, match=message) as caught:
        responses = [r async for r in core.model("pilot").submit(request(parameters=parameters))]
        raise responses[0].error
    assert caught.value.code.name == "INVALID_ARG"


async def use(core: Core) -> weakref.ref[object]:
    model = core.model("m")
    inputs = {"text_input": Tensor.from_numpy("text_input", np.array([b"What is"], np.object_))}
    stream = model.submit(InferenceRequest("m", inputs, parameters={"max_tokens": 2}))
    responses = [response async for response in stream]
    assert responses[-1].error is None, responses[-1].error
    return weakref.ref(model)


def taken() -> tuple[int, int, int]:
    process = psutil.Process()
    # The thread pool of the event loop may grow up to its maximum.
    threads = [
        thread for thread in threading.enumerate() if not thread.name.startswith(("asyncio_", "uvloop_"))
    ]
    return process.num_fds(), len(threads), len(process.children(recursive=True))


async def test_memory_of_a_language_model_is_released(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "llm"')
    (tmp_path / "m" / "1" / "model.json").write_text('{"model": "neso-pilot", "num_threads": 1}')
    core = Core(ServerOptions((tmp_path,), model_control_mode=ModelControlMode.EXPLICIT))
    await core.start()
    try:
        await core.load_model("m")
        await use(core)
        await core.unload_model("m")
        before, memory = taken(), psutil.Process().memory_info().rss
        for _ in range(3):
            await core.load_model("m")
            model = await use(core)
            assert psutil.Process().children()
            await core.unload_model("m")
            assert model() is None
        # Socket threads end asynchronously: those of the first engine may end after they were counted.
        await until(lambda: all(now <= then for now, then in zip(taken(), before, strict=True)))
        assert psutil.Process().memory_info().rss - memory < 32 << 20
    finally:
        await core.stop()


async def test_engine_that_ends_during_an_unload_is_not_restarted(core):
    backend = core.model("pilot")._backend
    supervisor, (engine,) = backend._supervisor, backend.engine.engines

    async def restart() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for callback in engine._on_dead:
                callback("it has ended again")

    supervisor._restarting[0] = first = asyncio.create_task(restart())
    await asyncio.sleep(0)
    await core.unload_model("pilot")
    assert supervisor._restarting[0] is not first and supervisor._restarting[0].cancelled()


@pytest.mark.parametrize(
    "options, message",
    [({"workers": 1}, "workers, worker_address: cannot be combined with --stage"), ({}, "")],
    ids=["workers", "none"],
)
async def test_worker_of_a_stage_has_an_engine_without_a_limit_of_its_queue(tmp_path, options, message):
    write_repository(tmp_path, num_blocks=64, max_num_seqs=3, max_queue_size=2, **options)
    core = Core(
        ServerOptions(
            model_repository=(tmp_path,),
            model_control_mode=ModelControlMode.EXPLICIT,
            backend_config={"llm": {"in-process": "true"}},
            stage_share=(1, 2),
        )
    )
    await core.start()
    try:
        if message:
            with pytest.raises(ServerError, match=message):
                await core.load_model("pilot")
            return
        await core.load_model("pilot")
        model = core.model("pilot")
        assert (model.capacity, model.max_queue_size) == (3, 2)
        results = await asyncio.gather(*(outputs(core, request()) for _ in range(8)))
        assert len(results) == 8
    finally:
        await core.stop(0)
