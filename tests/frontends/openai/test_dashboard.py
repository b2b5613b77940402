"""The web page at `/`, its operations, its files, and protection against other sites."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from asgi_client import AsgiClient, AsgiResponse
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.frontends.openai import OpenAIOptions, create_app
from neso.frontends.openai.access import AccessOptions, ApiKeys
from neso.frontends.openai.dashboard import WEB
from neso.frontends.security import Restrictions, is_cross_site
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions

VENDOR = WEB / "vendor"
LIBRARIES = json.loads((VENDOR / "vendored.json").read_text())


def client_of(core: Core, **options: Any) -> AsgiClient:
    return AsgiClient(create_app(core, OpenAIOptions(**options)))


async def get(client: AsgiClient, path: str, **headers: str) -> AsgiResponse:
    pairs = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    return await client.request("GET", path, b"", headers=pairs)


async def test_page_allows_only_its_own_files(client: AsgiClient) -> None:
    page = await client.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_files_of_a_page_are_served(client: AsgiClient, path: str) -> None:
    page = (await client.get(path)).body.decode()
    assert "//" not in page.replace("<!DOCTYPE", ""), "no file of another host"
    assert not re.search(r"<script>|<style>|\bon\w+=|style=", page), "inline code"
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        file = await client.get(f"/{name}")
        assert file.status == 200, name
        assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css", "image/svg+xml")


async def test_modules_import_existing_files() -> None:
    for module in (WEB / "dashboard").glob("*.js"):
        for name in re.findall(r'from "(.+?)"', module.read_text()):
            assert name.startswith("./") and (module.parent / name).is_file(), f"{module.name}: {name}"


async def test_modules_are_fetched_at_once() -> None:
    """The page names all modules, so that the browser does not find them one after the other."""
    page = (WEB / "dashboard" / "index.html").read_text()
    scripts = set(re.findall(r'static/dashboard/(\w+\.js)"', page))
    assert scripts == {path.name for path in (WEB / "dashboard").glob("*.js")}


async def test_unchanged_files_are_not_sent_again(client: AsgiClient) -> None:
    first = await client.get("/static/dashboard/app.js")
    again = await get(client, "/static/dashboard/app.js", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/static/../dashboard.py",
            "/static/%2e%2e/dashboard.py",
            "/static//etc/passwd",
            "/static/dashboard",
        ),
        *("/static/vendor/README.md", "/static/vendor/vendored.json", "/static/"),
    ],
)
async def test_other_files_are_not_served(client: AsgiClient, path: str) -> None:
    assert (await client.get(path)).status == 404


async def test_dashboard_can_be_disabled(core: Core) -> None:
    client = client_of(core, dashboard=False)
    for path in ("/", "/dashboard/state", "/dashboard/metrics", "/dashboard/models/scripted"):
        assert (await client.get(path)).status == 404
    assert (await client.get("/docs")).status == 200


async def test_redoc_redirects_to_docs(client: AsgiClient) -> None:
    response = await client.get("/redoc")
    assert (response.status, response.headers["location"]) == (307, "docs")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library["name"])
def test_vendored_files_are_those_of_the_release(library: dict[str, Any]) -> None:
    directory = VENDOR / library["name"]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}
    assert files == library["sha256"]
    assert "LICENSE" in files
    assert library["version"] in library["source"]


def test_no_other_files_are_vendored() -> None:
    names = {path.name for path in VENDOR.iterdir() if path.is_dir()}
    assert names == {library["name"] for library in LIBRARIES}


# Operations of the page


async def test_state_has_models_and_capabilities(client: AsgiClient) -> None:
    state = (await client.get("/dashboard/state")).json()
    models = {model["name"]: model for model in state["models"]}
    assert state["ready"] and state["metrics"] and not state["keys"] and state["authorized"]
    assert state["control"] == "none"
    assert models["scripted"]["state"] == "READY"
    assert models["scripted"]["chat"] and models["scripted"]["completions"]
    assert not models["adder"]["chat"] and not models["adder"]["completions"]


async def test_metrics_and_details(client: AsgiClient) -> None:
    assert b"nv_inference_request_success" in (await client.get("/dashboard/metrics")).body
    details = (await client.get("/dashboard/models/scripted")).json()
    assert details["config"]["name"] == "scripted"
    assert details["statistics"][0]["name"] == "scripted"
    assert (await client.get("/dashboard/models/nope")).status == 404


async def test_no_metrics_if_they_are_off(core: Core) -> None:
    client = client_of(core, metrics=False)
    assert (await client.get("/dashboard/metrics")).status == 404
    assert not (await client.get("/dashboard/state")).json()["metrics"]


async def test_read_only_without_a_key(core: Core, tmp_path: Path) -> None:
    await fail_to_load(core, tmp_path)
    client = client_of(core, access=AccessOptions(keys=ApiKeys(["right"])))
    assert [(await client.get(path)).status for path in ("/", "/static/dashboard/app.js")] == [200, 200]
    state = (await client.get("/dashboard/state")).json()
    assert (state["keys"], state["authorized"]) == (True, False)
    assert {model["reason"] for model in state["models"]} == {""}
    assert (await client.get("/dashboard/metrics")).status == 200
    assert (await client.get("/dashboard/models/scripted")).status == 401
    assert (await client.post("/v1/models/scripted/unload", {})).status == 401

    wrong = await get(client, "/dashboard/state", authorization="Bearer wrong")
    assert (wrong.status, wrong.json()["authorized"]) == (200, False)
    with_key = (await get(client, "/dashboard/state", authorization="Bearer right")).json()
    assert with_key["authorized"]
    assert any(model["reason"] for model in with_key["models"])
    details = await get(client, "/dashboard/models/scripted", authorization="Bearer right")
    assert details.status == 200


async def fail_to_load(core: Core, directory: Path) -> None:
    core.add_model("broken", ModelConfig(name="broken", backend="nonexistent"), directory)
    with pytest.raises(Exception, match="nonexistent"):
        await core.require_model("broken")


async def test_state_can_require_a_key(core: Core) -> None:
    client = client_of(core, access=AccessOptions(keys=ApiKeys(["right"]), open_groups=("health",)))
    assert [(await client.get(path)).status for path in ("/", "/static/dashboard/app.js")] == [200, 200]
    assert [(await client.get(f"/dashboard/{name}")).status for name in ("state", "metrics")] == [401, 401]


@pytest.mark.parametrize(
    "group, restricted",
    [
        ("model-repository", ["state", "models/scripted"]),
        ("model-config", ["models/scripted"]),
        ("statistics", ["metrics", "models/scripted"]),
    ],
)
async def test_restricted_apis_apply(core: Core, group: str, restricted: list[str]) -> None:
    client = client_of(core, restrictions=Restrictions.parse([f"{group}:admin-key=S3cret"]))
    for name in ("state", "metrics", "models/scripted"):
        expected = 403 if name in restricted else 200
        assert (await client.get(f"/dashboard/{name}")).status == expected, name
        assert (await get(client, f"/dashboard/{name}", admin_key="S3cret")).status == 200


# Requests of other sites


@pytest.mark.parametrize(
    "headers, refused",
    [
        ({}, False),
        ({"origin": "http://host:8000", "host": "host:8000"}, False),
        ({"origin": "http://evil.example", "host": "host:8000"}, True),
        ({"origin": "http://host:9999", "host": "host:8000"}, True),
        ({"origin": "null", "host": "host:8000"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy", "host": "inner"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site", "origin": "http://host:9999"}, True),
        ({"sec-fetch-site": "cross-site", "origin": "https://allowed.example"}, False),
    ],
)
def test_cross_site_requests_are_detected(headers: dict[str, str], refused: bool) -> None:
    assert is_cross_site(headers.get, ("https://allowed.example",)) is refused
    assert not is_cross_site(headers.get, ("*",))


@pytest.mark.parametrize(
    "path", ["/v1/models/scripted/unload", "/v1/models/scripted/load", "/v1/unload_lora_adapter"]
)
async def test_control_refuses_other_sites(core: Core, path: str) -> None:
    client = client_of(core)
    attack = ((b"origin", b"https://evil.example"), (b"host", b"localhost:9000"))
    response = await client.post(path, {"lora_name": "a"}, headers=attack)
    assert (response.status, response.json()["error"]["code"]) == (403, "cross_site_request")
    own = ((b"origin", b"http://localhost:9000"), (b"host", b"localhost:9000"))
    response = await client.post(path, {"lora_name": "a"}, headers=own)
    assert response.json()["error"]["code"] != "cross_site_request"


async def test_control_from_allowed_origins(core: Core) -> None:
    client = client_of(core, access=AccessOptions(origins=("https://console.example",)))
    headers = ((b"origin", b"https://console.example"), (b"sec-fetch-site", b"cross-site"))
    response = await client.post("/v1/models/scripted/unload", {}, headers=headers)
    assert (response.status, response.json()["error"]["code"]) == (400, None)  # the control mode is `none`


async def test_control_mode_is_reported(tmp_path: Path) -> None:
    core = Core(ServerOptions((tmp_path,), model_control_mode=ModelControlMode.EXPLICIT))
    await core.start()
    try:
        assert (await client_of(core).get("/dashboard/state")).json()["control"] == "explicit"
    finally:
        await core.stop()


# Timings of a request, which the page draws as a timeline

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def test_timings_of_a_response(client: AsgiClient) -> None:
    response = (await client.post("/v1/chat/completions", {**CHAT, "return_timings": True})).json()
    check_timings(response["timings"], response["usage"])
    assert "timings" not in (await client.post("/v1/chat/completions", CHAT)).json()


@pytest.mark.parametrize("include_usage", [False, True])
async def test_timings_of_a_stream(client: AsgiClient, include_usage: bool) -> None:
    body = {**CHAT, "stream": True, "return_timings": True, "stream_options": {"include_usage": True}}
    if not include_usage:
        del body["stream_options"]
    *chunks, end, done = (await client.post("/v1/chat/completions", body)).events()
    assert done == "[DONE]" and end["choices"] == []
    assert ("usage" in end) is include_usage
    assert not any("timings" in chunk for chunk in chunks)
    check_timings(end["timings"], end.get("usage"))


def check_timings(timings: dict[str, Any], usage: dict[str, Any] | None) -> None:
    assert all(timings[name] >= 0 for name in ("queue_ms", "prompt_ms", "predicted_ms"))
    assert timings["draft_n"] == timings["draft_n_accepted"] == 0
    assert timings["predicted_n"] == 3
    if usage is not None:
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
