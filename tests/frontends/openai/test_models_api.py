"""`/v1/models`, health, and the OpenAPI document."""

from __future__ import annotations

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedModel
from starlette.applications import Starlette
from starlette.routing import Route

from neso.frontends.openai import OpenAIOptions, create_app
from neso.frontends.openai.access import AccessOptions, ApiKeys
from neso.server.core import Core

PAGES = {"/", "/openapi.json", "/docs", "/redoc", "/static/{path:path}"}
PAGE_OPERATIONS = "/dashboard/"


async def test_list_models(client: AsgiClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert isinstance(card.pop("created"), int)
    (permission,) = card.pop("permission")
    assert permission["allow_sampling"] is True
    assert card == {
        "id": "scripted",
        "object": "model",
        "owned_by": "neso",
        "max_model_len": 1000,
        "root": "scripted",
        "parent": None,
    }


async def test_get_model(client: AsgiClient) -> None:
    assert (await client.get("/v1/models/scripted")).json()["id"] == "scripted"
    response = await client.get("/v1/models/org/nope")
    assert response.status == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'org/nope'" in response.json()["error"]["message"]


@pytest.fixture
def like_triton(core: Core) -> AsgiClient:
    return AsgiClient(create_app(core, OpenAIOptions(triton_compatibility=True, max_body_size=1000)))


async def test_triton_compatibility_lists_all_models(client: AsgiClient, like_triton: AsgiClient) -> None:
    listed = [
        [card["id"] for card in (await each.get("/v1/models")).json()["data"]]
        for each in (client, like_triton)
    ]
    assert listed == [["scripted"], ["adder", "scripted"]]
    assert (await client.get("/v1/models/adder")).status == 400
    assert (await like_triton.get("/v1/models/adder")).json()["id"] == "adder"


@pytest.fixture
def adapters(script: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model have an adapter."""
    for name, value in (
        ("allows_runtime_lora", False),
        ("list_loras", lambda: {"doll": "/doll"}),
        ("load_lora", print),
        ("unload_lora", print),
    ):
        monkeypatch.setattr(script, name, value, raising=False)


async def test_adapters(client: AsgiClient, like_triton: AsgiClient, adapters: None) -> None:
    for each, listed in (
        (client, ["scripted", "doll"]),
        (like_triton, ["adder", "scripted", "scripted:doll"]),
    ):
        assert [card["id"] for card in (await each.get("/v1/models")).json()["data"]] == listed
        assert (await each.get("/v1/models/scripted:doll")).json()["parent"] == "scripted"


async def test_unknown_adapters(client: AsgiClient, like_triton: AsgiClient, adapters: None) -> None:
    body = {"model": "scripted:sheep", "prompt": "a"}
    answer = await client.post("/v1/completions", body)
    assert (
        answer.status == 404
        and "model 'scripted' has no adapter 'sheep'" in answer.json()["error"]["message"]
    )
    answer = await like_triton.post("/v1/completions", body)
    detail = "Unknown LoRA: sheep; for model: scripted:sheep"
    assert (answer.status, answer.json()) == (400, {"detail": detail})
    answer = await like_triton.get("/v1/models/scripted:sheep")
    assert (answer.status, answer.json()) == (404, {"detail": "Unknown model: scripted:sheep"})


async def test_triton_compatibility_changes_the_error_format(like_triton: AsgiClient) -> None:
    path = "/v1/completions"
    answer = await like_triton.post(path, {"model": "scripted", "prompt": "a", "temperature": "hot"})
    (error,) = answer.json()["detail"]
    assert answer.status == 422 and error["loc"] == ["body", "temperature"] and error["msg"]
    answer = await like_triton.request("POST", path, b"{")
    assert answer.status == 422 and answer.json()["detail"][0]["type"] == "json_invalid"
    answer = await like_triton.post(path, {"model": "nope", "prompt": "a"})
    assert (answer.status, answer.json()) == (400, {"detail": "Unknown model: nope"})
    answer = await like_triton.post(path, {"model": "adder", "prompt": "a"})
    assert answer.status == 400 and "not a language model" in answer.json()["detail"]
    answer = await like_triton.get("/v1/models/nope")
    assert (answer.status, answer.json()) == (404, {"detail": "Unknown model: nope"})
    answer = await like_triton.get("/v1/nothing")
    assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
    answer = await like_triton.post(path, {"model": "scripted", "prompt": "a" * 2000})
    assert answer.status == 413 and answer.json()["error"]["code"] == "content_too_large"


async def test_health(client: AsgiClient, core: Core) -> None:
    paths = ("/health", "/health/ready", "/health/live")
    assert [(await client.get(path)).status for path in paths] == [200] * 3
    await core.stop()
    assert [(await client.get(path)).status for path in paths] == [503] * 3


async def test_openapi_document(client: AsgiClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert {"temperature", "messages", "tools"} <= set(schemas["ChatCompletionRequest"]["properties"])
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/CompletionRequest"}
    assert all(name in schemas for name in _references(document))
    page = await client.get("/docs")
    assert page.status == 200
    assert b"swagger" in page.body


async def test_document_has_every_route(app: Starlette, client: AsgiClient) -> None:
    document = (await client.get("/openapi.json")).json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    served = set()
    for route in app.routes:
        is_page = isinstance(route, Route) and (route.path in PAGES or route.path.startswith(PAGE_OPERATIONS))
        if isinstance(route, Route) and not is_page:
            path = route.path.replace(":path}", "}")
            served |= {(path, method) for method in (route.methods or ()) if method != "HEAD"}
    assert served == described


def _references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(_references(item) for item in value.values()))
    return set().union(*(_references(item) for item in value)) if isinstance(value, list) else set()


async def test_document_has_security_schemes(core: Core) -> None:
    access = AccessOptions(keys=ApiKeys(["secret"]), open_groups=("health", "docs"))
    document = (await AsgiClient(create_app(core, OpenAIOptions(access=access))).get("/openapi.json")).json()
    (name,) = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][name] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{name: []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/metrics"]["get"]
    assert "401" in document["paths"]["/v1/completions"]["post"]["responses"]
