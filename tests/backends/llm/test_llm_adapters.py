"""Adapters through the server: multi_lora.json, lora_name, TensorRT-LLM's tensors, OpenAI's model names, metrics."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[2]
for folder in ("engine", "engine/lora", "frontends/openai"):
    sys.path.insert(0, str(TESTS / folder))

from asgi_client import AsgiClient  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from eventually import until  # noqa: E402
from peft_adapters import greedy_with, write_adapter  # noqa: E402
from test_bad_adapters import as_tensors  # noqa: E402

from neso.engine.text.tokenizer import Tokenizer  # noqa: E402
from neso.frontends.openai import OpenAIOptions, create_app  # noqa: E402
from neso.server.core import Core  # noqa: E402
from neso.server.errors import InvalidArgument  # noqa: E402
from neso.server.inference_request import InferenceRequest  # noqa: E402
from neso.server.options import ServerOptions  # noqa: E402
from neso.server.tensor import Tensor  # noqa: E402

PROMPT = "The quick brown fox"
PARAMETERS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CONFIG = """backend: "llm"
input { name: "lora_weights" data_type: TYPE_FP32 dims: [ -1, -1 ] optional: true }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create a checkpoint, three adapters, and peft's text with each of them and with none."""
    root = tmp_path_factory.mktemp("adapted")
    base = make_checkpoint(root / "base")
    adapters = {
        name: write_adapter(base, root / name, seed=i) for i, name in enumerate(("one", "two", "three"))
    }
    tokenizer = Tokenizer.from_model(base)
    prompt = tokenizer.encode(PROMPT)
    texts = {
        name: tokenizer.decode(greedy_with(base, path, [prompt], 8)[0])
        for name, path in {**adapters, "": None}.items()
    }
    assert len(set(texts.values())) == 4
    return base, adapters, texts


@pytest.fixture
async def core(made, tmp_path):
    base, adapters, _ = made
    version = tmp_path / "tiny" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    options = {"model": str(base), "num_blocks": 64, "dtype": "float32", "runner": "reference"}
    (version / "model.json").write_text(
        json.dumps({**options, "enable_lora": "true", "max_loras": 2, "allow_runtime_lora": True})
    )
    shutil.copytree(adapters["two"], version / "adapters" / "two")
    (version / "multi_lora.json").write_text(
        json.dumps({"one": str(adapters["one"]), "two": "adapters/two"})  # absolute, and relative to the file
    )
    core = Core(ServerOptions((tmp_path,), backend_config={"llm": {"in-process": "true"}}))
    await core.start()
    assert core.ready(), core.repository_index()
    yield core
    await core.stop()


async def send_request(core, parameters=None, **tensors) -> str:
    inputs = {"text_input": Tensor.from_strings("text_input", [PROMPT])}
    inputs |= {name: Tensor.from_numpy(name, array) for name, array in tensors.items()}
    request = InferenceRequest("tiny", inputs, parameters={**PARAMETERS, **(parameters or {})})
    (response,) = [response async for response in core.model("tiny").submit(request)]
    if response.error is not None:
        raise response.error
    return response.output("text_output").strings()[0]


async def test_by_name(core, made):
    _, _, texts = made
    names = ["one", "", "two"] * 3
    answers = await asyncio.gather(
        *(send_request(core, {"lora_name": name} if name else {}) for name in names)
    )
    assert answers == [texts[name] for name in names]
    with pytest.raises(
        InvalidArgument, match=r"LoRA nobody is not supported, we currently support \['one', 'two'\]"
    ):
        await send_request(core, {"lora_name": "nobody"})
    sampling = np.array([json.dumps({**PARAMETERS, "lora_name": "two"}).encode()], object)
    assert await send_request(core, sampling_parameters=sampling) == texts["two"]


async def test_by_path(core, made):
    _, adapters, texts = made
    assert (
        await send_request(core, {"lora_name": "third", "lora_path": str(adapters["three"])})
        == texts["three"]
    )
    assert await send_request(core, {"lora_name": "third"}) == texts["three"], "it stays"
    with pytest.raises(InvalidArgument, match="there is no such directory"):
        await send_request(core, {"lora_name": "fourth", "lora_path": "/nowhere"})


async def test_by_tensors(core, made):
    _, adapters, texts = made
    tensors = as_tensors(adapters["three"])
    rows = np.frombuffer(tensors.weights, np.float32).reshape(-1, tensors.width)
    weights = {"lora_weights": rows, "lora_config": np.array(tensors.config, np.int32)}
    task = {"lora_task_id": np.array([2**63 + 7], np.uint64)}
    with pytest.raises(InvalidArgument, match=f"lora_task_id: {2**63 + 7} is not cached"):
        await send_request(core, **task)
    assert await send_request(core, **task, **weights) == texts["three"]
    assert await send_request(core, **task) == texts["three"]
    with pytest.raises(InvalidArgument, match="lora_config: needs lora_task_id"):
        await send_request(core, lora_config=weights["lora_config"])
    with pytest.raises(InvalidArgument, match="must be sent together with lora_config"):
        await send_request(core, **task, lora_weights=rows)
    with pytest.raises(InvalidArgument, match="cannot be combined with lora_task_id"):
        await send_request(core, {"lora_name": "one"}, **task)
    with pytest.raises(InvalidArgument, match=r"lora_config: .*module id 99"):
        bad = weights["lora_config"].copy()
        bad[0, 0] = 99
        await send_request(core, lora_task_id=np.array([8], np.uint64), lora_weights=rows, lora_config=bad)
    dora = np.concatenate([weights["lora_config"], np.ones((len(rows), 1), np.int32)], axis=1)
    with pytest.raises(InvalidArgument, match="lora_config"):
        await send_request(core, lora_task_id=np.array([9], np.uint64), lora_weights=rows, lora_config=dora)
    assert await send_request(core) == texts[""]


async def test_by_model_name(core, made):
    _, adapters, texts = made
    client = AsgiClient(create_app(core, OpenAIOptions()))

    async def complete(model):
        body = {"model": model, "prompt": PROMPT, **PARAMETERS}
        return (await client.post("/v1/completions", body)).json()

    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert list(cards) == ["tiny", "one", "two"] and cards["one"]["parent"] == "tiny"
    assert (await client.get("/v1/models/tiny:two")).json()["id"] == "tiny:two"
    for model, name in {"one": "one", "tiny:two": "two", "tiny": ""}.items():
        response = await complete(model)
        assert (response["choices"][0]["text"], response["model"]) == (texts[name], model)
    assert (await complete("three"))["error"]["code"] == "model_not_found"

    load = {"lora_name": "three", "lora_path": str(adapters["three"])}
    response = await client.post("/v1/load_lora_adapter", load)
    assert response.body == b"Success: LoRA adapter 'three' added successfully."
    assert (await complete("three"))["choices"][0]["text"] == texts["three"]
    again = (await client.post("/v1/load_lora_adapter", load)).json()
    assert "already been loaded" in again["error"]["message"]
    inplace = {**load, "lora_path": str(adapters["one"]), "load_inplace": True}
    assert (await client.post("/v1/load_lora_adapter", inplace)).status == 200
    assert (await complete("three"))["choices"][0]["text"] == texts["one"]
    broken = await client.post("/v1/load_lora_adapter", {**inplace, "lora_path": "/nowhere"})
    assert broken.status == 400 and "no such directory" in broken.json()["error"]["message"]
    assert (await complete("three"))["choices"][0]["text"] == texts["one"], "the old one stays"
    gone = await client.post("/v1/unload_lora_adapter", {"lora_name": "three"})
    assert gone.body == b"Success: LoRA adapter 'three' removed successfully."
    assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "three"})).status == 404
    assert (await complete("three"))["error"]["code"] == "model_not_found"


async def test_metrics_name_the_adapters(core, step_pace):
    def info():
        return [
            line
            for line in core.metrics.render().decode().splitlines()
            if line.startswith("vllm:lora_requests_info")
        ]

    (line,) = info()
    assert 'max_lora="2",model="tiny",running_lora_adapters="",version="1",waiting_lora_adapters=""' in line
    stream = np.array([True])
    tasks = [
        asyncio.create_task(send_request(core, {"max_tokens": 400, "lora_name": name}, stream=stream))
        for name in ("two", "one")
    ]
    await until(lambda: 'running_lora_adapters="one,two"' in info()[0])
    step_pace.seconds = 0.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: 'running_lora_adapters=""' in info()[0])  # the requests continue
    assert 'running_lora_adapters="",version="1",waiting_lora_adapters=""' in info()[0]


async def test_runtime_lora_is_disabled_by_default(made, tmp_path):
    base, adapters, _ = made
    version = tmp_path / "tiny" / "1"
    version.mkdir(parents=True)
    options = {"model": str(base), "num_blocks": 64, "lora_modules": {"one": str(adapters["one"])}}
    (version / "model.json").write_text(json.dumps(options))
    (version.parent / "config.pbtxt").write_text('backend: "llm"')
    core = Core(ServerOptions((tmp_path,), backend_config={"llm": {"in-process": "true"}}))
    await core.start()
    try:
        with pytest.raises(InvalidArgument, match="allow_runtime_lora"):
            await send_request(core, {"lora_name": "two", "lora_path": str(adapters["two"])})
        client = AsgiClient(create_app(core, OpenAIOptions()))
        load = {"lora_name": "two", "lora_path": str(adapters["two"])}
        assert (await client.post("/v1/load_lora_adapter", load)).status == 403
    finally:
        await core.stop()


async def test_an_invalid_adapter_fails_the_load(made, tmp_path):
    base, _, _ = made
    version = tmp_path / "tiny" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(base), "lora_modules": {"one": "/nowhere"}}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"')
    core = Core(ServerOptions((tmp_path,), backend_config={"llm": {"in-process": "true"}}))
    await core.start()
    try:
        assert "adapter 'one': /nowhere: there is no such directory" in str(core.repository_index())
    finally:
        await core.stop()
