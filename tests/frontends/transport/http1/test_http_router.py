"""Router: patterns, precedence, 404 and 405."""

from __future__ import annotations

import orjson
import pytest

from neso.frontends.transport.http1 import Request, Response, Router


def request(method: str, path: str) -> Request:
    return Request(method, path.encode(), b"", {}, b"")


def named(name: str):
    return lambda request: Response(orjson.dumps([name, request.params]))


@pytest.fixture
def router() -> Router:
    router = Router()
    router.add("GET", "/", named("root"))
    router.add("GET", "/v2/models/stats", named("stats"))
    router.add("GET", "/v2/models/{model}", named("model"))
    router.add("POST", "/v2/models/{model}/infer", named("infer"))
    router.add("POST", "/v2/models/{model}/versions/{version:digits}/infer", named("infer"))
    router.add("POST", "/v2/repository/index", named("index"))
    router.add("POST", "/v2/repository/{repository}/index", named("index"))
    router.mount("/v1", named("mounted"))
    return router


@pytest.mark.parametrize(
    ("method", "path", "name", "params"),
    [
        ("GET", "/", "root", {}),
        ("HEAD", "/v2/models/m", "model", {"model": "m"}),
        ("GET", "/v2/models/stats", "stats", {}),
        ("POST", "/v2/models/stats/infer", "infer", {"model": "stats"}),
        ("POST", "/v2/models/a%2Fb%20c/infer", "infer", {"model": "a/b c"}),
        ("POST", "/v2/models/m/versions/12/infer", "infer", {"model": "m", "version": "12"}),
        ("POST", "/v2/repository/index", "index", {}),
        ("POST", "/v2/repository/index/index", "index", {"repository": "index"}),
        ("PUT", "/v1/chat/completions", "mounted", {}),
        ("GET", "/v1", "mounted", {}),
    ],
)
def test_matching_route(router: Router, method: str, path: str, name: str, params: dict[str, str]) -> None:
    answer = router(request(method, path))
    assert isinstance(answer, Response)
    assert orjson.loads(answer.body) == [name, params]


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/m/versions/x/infer", "*", "/v1x"],
)
def test_status_404(router: Router, path: str) -> None:
    answer = router(request("GET", path))
    assert isinstance(answer, Response)
    assert answer.status == 404 and answer.body == b'{"error":"Not Found"}'


def test_method_not_allowed(router: Router) -> None:
    answer = router(request("GET", "/v2/models/m/infer"))
    assert isinstance(answer, Response)
    assert answer.status == 405 and answer.body == b'{"error":"Method Not Allowed"}'
    assert dict(answer.headers) == {"allow": "POST"}
