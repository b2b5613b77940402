"""Endpoints of SageMaker and Vertex AI containers, requested as these clouds do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from kserve_http_backends import CONFIGS

from neso.cli.flag_values import OptionError
from neso.cli.serve_options import ServeOptions
from neso.frontends.cloud_options import SageMakerOptions, VertexAiOptions
from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.cloud_endpoints import SageMakerHttp, VertexAiHttp
from neso.frontends.security import Restrictions
from neso.server.core import Core
from neso.server.errors import InvalidArgument

HTTP = HttpOptions("127.0.0.1", max_input_size=1 << 20)
SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_TYPE = "application/vnd.vertex-ai-triton.binary+json;json-header-size="


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The folder of the models that SageMaker has downloaded: one model, and an ensemble with its step."""
    root = tmp_path / "ml"
    (root / "a1" / "model" / "1").mkdir(parents=True)
    (root / "a1" / "model" / "config.pbtxt").write_text(CONFIGS["batched"])
    for name, config in {
        "step": CONFIGS["any_strings"],
        "whole": """
            platform: "ensemble"
            input { name: "IN" data_type: TYPE_STRING dims: [-1] }
            output { name: "OUT" data_type: TYPE_STRING dims: [-1] }
            ensemble_scheduling { step { model_name: "step" model_version: -1
                input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
        """,
    }.items():
        (root / "b2" / "model" / name / "1").mkdir(parents=True)
        (root / "b2" / "model" / name / "config.pbtxt").write_text(config)
    (root / "c3" / "model" / "broken" / "1").mkdir(parents=True)
    (root / "c3" / "model" / "broken" / "config.pbtxt").write_text("max_batch_size: -1")
    (root / "d4" / "model").mkdir(parents=True)
    (tmp_path / "outside" / "model").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    return root


Start = Callable[..., Any]


@pytest.fixture
async def start(core: Core, models: Path, connect) -> AsyncIterator[Start]:
    """`await start(OPTIONS)` serves the endpoints and returns a client."""
    fronts: list[SageMakerHttp | VertexAiHttp] = []

    async def start(options: SageMakerOptions | VertexAiOptions) -> Any:
        kind = SageMakerHttp if isinstance(options, SageMakerOptions) else VertexAiHttp
        fronts.append(kind(core, options))
        await fronts[-1].start()
        return connect(fronts[-1].port)

    yield start
    for front in fronts:
        await front.stop(1.0)


def sagemaker(models: Path | None = None, **options: Any) -> SageMakerOptions:
    return SageMakerOptions(port=0, http=HTTP, models_directory=models or Path("/opt/ml/models"), **options)


def vertex(**options: Any) -> VertexAiOptions:
    return VertexAiOptions(port=0, http=HTTP, **options)


def grid() -> tuple[bytes, int]:
    """Return an infer request for FP32[2, 3] with binary tensors, and the length of its JSON."""
    tensor = triton.InferInput("IN", [1, 2, 3], "FP32")
    tensor.set_data_from_numpy(np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    body, length = triton.InferenceServerClient.generate_request_body([tensor])
    return body, length


def values(body: bytes, length: int) -> list[float]:
    result = triton.InferenceServerClient.parse_response_body(body, header_length=length)
    return list(result.as_numpy("OUT").ravel())


async def test_sagemaker_ping_and_invocations(start: Start, core: Core) -> None:
    client = await start(sagemaker(default_model="batched"))
    assert (await client.get("/ping")).status == 200
    body, length = grid()
    reply = await client.post("/invocations", body, content_type=f"{SAGEMAKER_TYPE}{length}")
    assert reply.status == 200
    size = int(reply.headers["content-type"].removeprefix(SAGEMAKER_TYPE))
    assert values(reply.body, size) == [0, 1, 2, 3, 4, 5]
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 2, 1], "data": [1, 2]}
    reply = await client.post("/invocations", {"inputs": [tensor]})
    assert reply.json["outputs"][0]["data"] == [1, 2]
    await core.unload_model("batched")
    reply = await client.post("/invocations", {"inputs": [tensor]})
    assert reply.status == 503 and "unknown model: 'batched'" in reply.error


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("x", "Unable to parse"),
        ("-1", "should be in range"),
        ("100000", "should be in range"),
        ("", "Unable"),
    ],
)
async def test_invalid_json_header_size(start: Start, length: str, message: str) -> None:
    client = await start(sagemaker(default_model="batched"))
    reply = await client.post("/invocations", grid()[0], content_type=f"{SAGEMAKER_TYPE}{length}")
    assert reply.status == 400 and message in reply.error
    reply = await client.post("/invocations", grid()[0], content_type=f"text/{SAGEMAKER_TYPE}1")
    assert reply.status == 400 and "expect MIME type" in reply.error


async def test_sagemaker_generates(start: Start) -> None:
    client = await start(sagemaker(default_model="text", inference_type="generate"))
    reply = await client.post("/invocations", {"PROMPT": "hi"})
    assert reply.status == 200 and reply.json["model_name"] == "text"
    client = await start(sagemaker(default_model="decoupled", inference_type="generate_stream"))
    reply = await client.post("/invocations", {"PROMPT": "hi", "REPEAT": 2})
    assert reply.body.count(b"data: ") == 2


async def test_openai_types_need_the_openai_api(start: Start) -> None:
    client = await start(sagemaker(inference_type="chat_completions"))
    reply = await client.post("/invocations", {"model": "m", "messages": []})
    assert reply.status == 400 and "--allow-openai=true" in reply.error


async def test_several_models_without_a_default(start: Start) -> None:
    client = await start(sagemaker())
    reply = await client.post("/invocations", {})
    assert reply.status == 400 and "there is no default model" in reply.error


async def test_sagemaker_ping_of_a_stopping_server(start: Start, core: Core) -> None:
    ready, live = await start(sagemaker()), await start(sagemaker(ping_mode="live"))
    await core.stop()
    assert (await ready.get("/ping")).status == 400
    assert (await live.get("/ping")).status == 400


async def test_multi_model_contract(start: Start, models: Path) -> None:
    client = await start(sagemaker(models))
    load = {"model_name": "m1", "url": f"{models}/a1/model"}
    assert (await client.get("/models")).json == {"models": []}
    assert (await client.post("/models", load)).status == 200
    assert (await client.post("/models", load)).status == 409
    entry = {"modelName": "m1", "modelUrl": f"{models}/a1"}
    assert (await client.get("/models")).json == {"models": [entry]}
    assert (await client.get("/models/m1")).json == entry
    body, length = grid()
    assert (await client.post("/models/m1/invoke", b"[]")).status == 400
    reply = await client.post("/models/m1/invoke", body, content_type=f"{SAGEMAKER_TYPE}{length}")
    assert reply.status == 200
    assert (await client.request("DELETE", "/models/m1")).status == 200
    for method, path in (("GET", "/models/m1"), ("DELETE", "/models/m1"), ("POST", "/models/m1/invoke")):
        assert (await client.request(method, path)).status == 404
    assert (await client.post("/models", load)).status == 200, "an unloaded model can be loaded again"


async def test_ensemble_of_an_archive(start: Start, models: Path, core: Core) -> None:
    client = await start(sagemaker(models))
    load = {"model_name": "hash", "url": f"{models}/b2/model"}
    reply = await client.post("/models", load, X_Amzn_SageMaker_Target_Model="archive")
    assert reply.status == 200
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    reply = await client.post("/models/hash/invoke", {"inputs": [tensor]})
    assert (reply.json["model_name"], reply.json["outputs"][0]["data"]) == ("archive", ["x"])
    assert (await client.request("DELETE", "/models/hash")).status == 200
    assert not core.model_ready("step"), "the step is unloaded with its ensemble"


@pytest.mark.parametrize(
    "url",
    ["", "a1/model", "/etc", "{}/a1", "{}/a1/other", "{}/a1/model/../../x", "{}/none/model", "{}/d4/model",
     "{}/link/model", "{}/../outside/model", "/proc/self/model"],
)  # fmt: skip
async def test_models_outside_the_folder_are_rejected(start: Start, models: Path, url: str) -> None:
    client = await start(sagemaker(models))
    reply = await client.post("/models", {"model_name": "m", "url": url.format(models)})
    assert reply.status == 400 and reply.error
    assert (await client.get("/models")).json == {"models": []}


async def test_failed_load_leaves_nothing(start: Start, models: Path) -> None:
    client = await start(sagemaker(models))
    load = {"model_name": "m", "url": f"{models}/c3/model"}
    for _ in range(2):  # the second time, the repository is not "already registered"
        reply = await client.post("/models", load)
        assert reply.status == 400 and "no backend" in reply.error
    assert (await client.get("/models/m")).status == 404


async def test_restricted_groups_apply(start: Start, models: Path) -> None:
    restrictions = Restrictions.parse(["model-repository,inference:key=secret"])
    http = HttpOptions("127.0.0.1", restrictions=restrictions)
    client = await start(
        SageMakerOptions(port=0, http=http, models_directory=models, default_model="batched")
    )
    assert (await client.get("/ping")).status == 200
    assert (await client.get("/models")).status == 403
    assert (await client.request("GET", "/models", headers={"key": "secret"})).status == 200
    assert (await client.post("/invocations", grid()[0])).status == 403


async def test_vertex_ai_predicts_and_redirects(start: Start) -> None:
    client = await start(vertex(default_model="batched", predict_route="/p", health_route="/h"))
    assert (await client.get("/h")).status == 200
    body, length = grid()
    headers = {"content_type": f"{VERTEX_TYPE}{length}"}
    for redirect in ({}, {"X_Vertex_Ai_Triton_Redirect": "v2/models/batched/infer"}):
        reply = await client.post("/p", body, **headers, **redirect)
        assert values(reply.body, int(reply.headers["inference-header-content-length"])) == [0, 1, 2, 3, 4, 5]

    async def redirected(path: str) -> Any:
        return await client.post("/p", b"{}", X_Vertex_Ai_Triton_Redirect=path)

    assert (await redirected("v2")).json["name"] == "neso"
    assert (await redirected("v2/health/ready")).status == 200
    assert (await redirected("v2/models/batched/config")).json["name"] == "batched"
    assert (await redirected("v2/models/batched/versions/1/stats")).json["model_stats"][0][
        "name"
    ] == "batched"
    assert {entry["name"] for entry in (await redirected("v2/repository/index")).json} >= {"batched", "text"}
    assert b"nv_inference_request_success" in (await redirected("metrics")).body
    assert "shared memory is disabled" in (await redirected("v2/systemsharedmemory/status")).error


@pytest.mark.parametrize(
    "path",
    ["v2/repository/models/text/unload", "v2/repository/models/text/load", "v2/logging", "v2/trace/setting",
     "v2/systemsharedmemory/region/x/register", "v2/cudasharedmemory/unregister"],
)  # fmt: skip
async def test_vertex_ai_cannot_change_the_server(start: Start, core: Core, path: str) -> None:
    client = await start(vertex())
    reply = await client.post("/predict", b"{}", X_Vertex_Ai_Triton_Redirect=path)
    assert reply.status == 403 and core.model_ready("text")
    assert (await client.post("/predict", b"{}", X_Vertex_Ai_Triton_Redirect="v3")).status == 404


def read(*arguments: str) -> ServeOptions:
    given = [argument.removeprefix("--").partition("=") for argument in arguments]
    return ServeOptions.read({name: [value] for name, _, value in given})


def test_environment_of_sagemaker() -> None:
    options = SageMakerOptions().with_environment({
        "SAGEMAKER_TRITON_PING_MODE": "live",
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m",
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate",
    })  # fmt: skip
    assert (options.ping_mode, options.default_model, options.inference_type) == ("live", "m", "generate")
    with pytest.raises(InvalidArgument, match="SAGEMAKER_TRITON_INFERENCE_TYPE: expected one of infer"):
        SageMakerOptions().with_environment({"SAGEMAKER_TRITON_INFERENCE_TYPE": "guess"})


def test_options_of_sagemaker() -> None:
    options = read("--allow-sagemaker=true", "--sagemaker-port=9999", "--sagemaker-safe-port-range=8000-9000")
    assert options.sagemaker is not None and options.sagemaker.port == 9999
    assert read().sagemaker is None
    for arguments, message in (
        (("--sagemaker-safe-port-range=9000-8000",), "two ports in ascending order"),
        (("--sagemaker-safe-port-range=8000-8001",), "the metrics port 8002 is not in 8000-8001"),
        (("--sagemaker-port=8000",), "SageMaker requests at the same"),
    ):
        with pytest.raises(OptionError, match=message):
            read("--allow-sagemaker=true", *arguments)


def test_environment_of_vertex_ai(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().vertex_ai is None
    with pytest.raises(OptionError, match="AIP_PREDICT_ROUTE: expected a path"):
        read("--allow-vertex-ai=true")
    for name, value in {
        "PREDICT_ROUTE": "/p",
        "HEALTH_ROUTE": "/h",
        "HTTP_PORT": "7080",
        "MODE": "PREDICTION",
    }.items():
        monkeypatch.setenv(f"AIP_{name}", value)
    options = read()
    assert options.vertex_ai is not None and options.vertex_ai.port == 7080
    assert options.http is None and options.grpc is None, "other protocols are served on request"
    options = read("--allow-http=true", "--vertex-ai-port=7081", "--vertex-ai-default-model=m")
    assert options.http is not None and options.vertex_ai is not None
    assert (options.vertex_ai.port, options.vertex_ai.default_model) == (7081, "m")
    assert read("--allow-vertex-ai=false").vertex_ai is None
    monkeypatch.setenv("AIP_HTTP_PORT", "many")
    with pytest.raises(OptionError, match="AIP_HTTP_PORT: expected a port"):
        read()


def test_error_of_short_memory_is_507() -> None:
    from neso.frontends.kserve.cloud_endpoints import sagemaker_error

    reply = sagemaker_error(InvalidArgument("CUDA out of memory. Tried to allocate 2 GiB"))
    assert reply.status == 507 and "out of memory" in json.loads(reply.body)["error"]
    assert sagemaker_error(InvalidArgument("bad")).status == 400
