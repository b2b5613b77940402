"""Access control of the OpenAI API: a server process, the `openai` client and plain HTTP."""

from __future__ import annotations

import json
import signal
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import trustme
from eventually import wait_until
from server_process import ServerProcess

REPOSITORY = Path(__file__).parent / "repositories" / "text_models"
MODELS = ("--model-repository", REPOSITORY, "--model-control-mode=explicit", "--load-model=echo")
BODY = {"model": "echo", "prompt": "hello"}


def client(
    server: ServerProcess, key: str = "none", protocol: str = "openai", **options: Any
) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url("/v1", protocol), api_key=key, max_retries=0, **options)


def complete_text(client: openai.OpenAI) -> str:
    return client.completions.create(**BODY).choices[0].text


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# people\nalice:sk-alice\nfew:sk-few rpm=2\n")
    return path


@pytest.fixture(scope="module")
def server(key_file: Path) -> Iterator[ServerProcess]:
    """A server with keys from all sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NESO_API_KEY", "sk-environment")
        process = ServerProcess(
            *MODELS,
            "--api-key=sk-one",
            "--api-key=sk-two",
            f"--api-key-file={key_file}",
            "--cors-allow-origin=https://chat.example",
            "--log-verbose=1",
            "--http-max-input-size=100000",
        )
    with process:
        assert process.ports, process.output
        yield process


@pytest.mark.parametrize("protocol", ["openai", "http"])
@pytest.mark.parametrize("key", ["sk-one", "sk-two", "sk-alice", "sk-environment"])
def test_key_works_on_both_ports(server: ServerProcess, key: str, protocol: str) -> None:
    assert complete_text(client(server, key, protocol)) == "hello"
    status, _ = server.post("/v1/completions", BODY, protocol, **{"x-api-key": key})
    assert status == 200


@pytest.mark.parametrize("protocol", ["openai", "http"])
def test_missing_key_is_unauthorized(server: ServerProcess, protocol: str) -> None:
    with pytest.raises(openai.AuthenticationError) as refusal:
        complete_text(client(server, "sk-wrong", protocol))
    assert refusal.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        list(client(server, "sk-wrong", protocol).models.list())
    assert server.post("/v1/completions", BODY, protocol)[0] == 401


async def test_asynchronous_clients(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="sk-one") as client:
        stream = await client.completions.create(**BODY, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"
    async with openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(**BODY, stream=True)


def test_only_health_needs_no_key(server: ServerProcess) -> None:
    assert server.get("/health/ready", "openai")[0] == 200
    assert server.get("/metrics", "openai")[0] == 401
    assert server.get("/v2/health/ready")[0] == 200


def test_key_file_is_reloaded(server: ServerProcess, key_file: Path) -> None:
    before = key_file.read_text()
    key_file.write_text(before + "bob:sk-bob\n")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.post("/v1/completions", BODY, "openai", **{"x-api-key": "sk-bob"})[0] == 200)
    key_file.write_text(before)
    wait_until(lambda: server.post("/v1/completions", BODY, "openai", **{"x-api-key": "sk-bob"})[0] == 401)


def fixed_clock() -> None:
    """Wait if needed: quotas reset at full minutes, and a test must not span two of them."""
    while time.time() % 60 > 50:
        time.sleep(0.1)


def test_per_key_rate_limits(server: ServerProcess) -> None:
    fixed_clock()
    api = client(server, "sk-few")
    assert [complete_text(api) for _ in range(2)] == ["hello"] * 2
    with pytest.raises(openai.RateLimitError) as refusal:
        complete_text(api)
    assert refusal.value.code == "rate_limit_exceeded"
    headers = refusal.value.response.headers
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert int(headers["retry-after"]) >= 1
    assert complete_text(client(server, "sk-one")) == "hello"


def test_requests_have_ids(server: ServerProcess) -> None:
    response = client(server, "sk-one").completions.with_raw_response.create(
        **BODY, extra_headers={"X-Request-ID": "from-the-client"}
    )
    assert response.headers["x-request-id"] == "from-the-client"
    assert client(server, "sk-one").completions.create(**BODY)._request_id.startswith("req_")
    wait_until(lambda: "from-the-client" in server.output)


def test_cors(server: ServerProcess) -> None:
    requested = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    response = requests.options(server.url("/v1/chat/completions", "openai"), headers=requested)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    response = requests.options(
        server.url("/v1/chat/completions", "openai"), headers={**requested, "origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_bodies(server: ServerProcess, chunked: bool) -> None:
    body = b"x" * 200_000
    response = requests.post(
        server.url("/v1/completions", "openai"),
        data=iter([body[:100], body]) if chunked else body,
        headers={"authorization": "Bearer sk-one"},
    )
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "content_too_large")
    assert "--http-max-input-size" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nothing", b"", 404, "unknown_url"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/completions", b"{", 400, None),
        ("POST", "/v1/completions", b'{"model": "nope", "prompt": ""}', 404, "model_not_found"),
        ("GET", "/v1/models/nope", b"", 404, "model_not_found"),
    ],
)
def test_access_errors_have_openai_format(
    server: ServerProcess, method: str, path: str, body: bytes, status: int, code: str | None
) -> None:
    response = requests.request(
        method, server.url(path, "openai"), data=body, headers={"authorization": "Bearer sk-one"}
    )
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_no_key_is_in_the_log(server: ServerProcess) -> None:
    assert not [key for key in ("sk-one", "sk-alice", "sk-wrong", "sk-environment") if key in server.output]
    wait_until(lambda: "no valid API key" in server.output)


# -- without keys ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited() -> Iterator[ServerProcess]:
    with ServerProcess(
        *MODELS,
        "--tokenizer=neso-pilot",
        "--openai-tokens-per-minute=60",
        "--openai-restricted-api",
        "model-repository,metrics",
        "admin-key",
        "sk=secret",
        timeout=60,
    ) as process:
        assert process.ports, process.output
        yield process


def test_rate_limit_per_address_without_keys(limited: ServerProcess) -> None:
    fixed_clock()
    api = client(limited)
    with pytest.raises(openai.RateLimitError) as refusal:
        for _ in range(200):
            api.completions.create(model="echo", prompt="several words of a prompt")
    assert refusal.value.response.headers["x-ratelimit-limit-tokens"] == "60"
    assert refusal.value.type == "tokens"


def test_restricted_groups(limited: ServerProcess) -> None:
    right = {"admin-key": "sk=secret"}
    for path in ("/v1/models", "/v1/models/echo", "/metrics"):
        url = limited.url(path, "openai")
        refused = requests.get(url, headers={"admin-key": "wrong"})
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_auth"
        assert "admin-key" in refused.json()["error"]["message"]
        assert requests.get(url, headers=right).status_code == 200
    assert requests.post(limited.url("/v1/models/echo/unload", "openai")).status_code == 401
    assert requests.get(limited.url("/health/ready", "openai")).status_code == 200


def test_metrics(limited: ServerProcess) -> None:
    response = requests.get(limited.url("/metrics", "openai"), headers={"admin-key": "sk=secret"})
    assert response.headers["content-type"].startswith("text/plain")
    assert 'nv_inference_request_success{model="echo"' in response.text


# -- loading and unloading -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explicit() -> Iterator[ServerProcess]:
    with ServerProcess(
        "--model-repository", REPOSITORY, "--model-control-mode=explicit", timeout=60
    ) as process:
        assert process.ports, process.output
        yield process


def control(server: ServerProcess, name: str, action: str, body: Any = b"") -> tuple[int, Any]:
    return server.post(f"/v1/models/{name}/{action}", body, "openai")


def names(server: ServerProcess) -> list[str]:
    return [card.id for card in client(server).models.list()]


def test_one_of_several_concurrent_unloads_succeeds(explicit: ServerProcess) -> None:
    control(explicit, "echo", "load")
    with ThreadPoolExecutor(5) as pool:
        statuses = [status for status, _ in pool.map(lambda _: control(explicit, "echo", "unload"), range(5))]
    assert sorted(statuses) == [200, 400, 400, 400, 400]


def test_load_and_unload_models(explicit: ServerProcess) -> None:
    assert names(explicit) == []
    status, response = control(explicit, "echo", "load")
    assert status == 200
    assert (response["status"], response["model"], response["id"], response["object"]) == (
        "success",
        "echo",
        "echo",
        "model",
    )
    assert names(explicit) == ["echo"]
    status, response = control(explicit, "echo", "load")
    assert (status, "already loaded" in response["error"]["message"]) == (400, True)
    assert control(explicit, "echo", "unload") == (200, {"status": "success", "model": "echo"})
    assert explicit.get("/v1/models/echo", "openai")[0] == 404
    status, response = control(explicit, "echo", "unload")
    assert (status, "Unknown model" in response["error"]["message"]) == (400, True)


def test_loading_an_ensemble_loads_its_steps(explicit: ServerProcess) -> None:
    assert control(explicit, "words_ensemble", "load")[0] == 200
    assert names(explicit) == ["trtllm_words", "words_ensemble", "poet"]
    assert control(explicit, "words_ensemble", "unload", {"unload_dependents": True})[0] == 200
    assert names(explicit) == []


def test_load_with_config_override(explicit: ServerProcess) -> None:
    assert control(explicit, "echo", "load")[0] == 200
    tensor = {"data_type": "TYPE_STRING", "dims": [1]}
    config = {
        "backend": "python",
        "input": [{"name": "text_input", **tensor}],
        "output": [{"name": "text_output", **tensor}],
        "parameters": {"max_model_len": {"string_value": "77"}},
    }
    for given in (config, json.dumps(config)):
        assert control(explicit, "echo", "load", {"config": given})[0] == 200
        assert client(explicit).models.retrieve("echo").max_model_len == 77
    control(explicit, "echo", "unload")


@pytest.mark.parametrize(
    ("name", "body", "status", "param"),
    [
        ("nowhere", b"", 404, "model"),
        ("..%2Fecho", b"", 400, "model"),
        ("a/../echo", b"", 400, "model"),
        ("echo", b"{", 400, None),
        ("echo", {"parameters": {}}, 400, "parameters"),
        ("echo", {"config": "{"}, 400, None),
    ],
)
def test_rejected_loads(
    explicit: ServerProcess, name: str, body: Any, status: int, param: str | None
) -> None:
    got, response = control(explicit, name, "load", body)
    assert (got, response["error"]["param"]) == (status, param), response


def test_loads_need_explicit_model_control() -> None:
    with ServerProcess("--model-repository", REPOSITORY, timeout=60) as server:
        for action in ("load", "unload"):
            status, response = control(server, "echo", action)
            assert status == 400
            assert "--model-control-mode=explicit" in response["error"]["message"]


# -- certificate of the port -----------------------------------------------------------------------------------------


def test_openai_port_with_a_separate_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with ServerProcess(
        *MODELS,
        f"--openai-server-cert={tmp_path}/cert.pem",
        f"--openai-server-key={tmp_path}/key.pem",
        "--api-key=sk-one",
    ) as server:
        assert server.ports, server.output
        trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=tmp_path / "ca.pem"))
        client = openai.OpenAI(
            base_url=f"https://127.0.0.1:{server.ports['openai']}/v1", api_key="sk-one", http_client=trusting
        )
        assert complete_text(client) == "hello"
        assert server.get("/v2/health/ready")[0] == 200  # HTTP has none


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key="], "must not be empty"),
        (["--api-key-file=/nowhere"], "/nowhere"),
        (["--api-key-open=all"], "--api-key-open"),
        (["--openai-server-cert=/nowhere"], "--openai-server-key"),
        (["--openai-restricted-api", "everything", "key", "value"], "everything"),
        (["--openai-requests-per-minute=0"], "at least 1"),
    ],
)
def test_invalid_options(options: list[str], message: str) -> None:
    with ServerProcess(*MODELS, *options) as server:
        assert server.process.wait(60) == 2
        assert message in server.output
