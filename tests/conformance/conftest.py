"""A server with the bundled model for all conformance tests that need no special configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from step_pace import slow_environment

from neso import _native
from neso.engine.client.llm import LLM
from neso.models import SHIPPED_MODELS

# Many tests compare texts of servers with those of an engine that has other requests in its batches. With bfloat16
# weights, AMX rounds differently for few and for many rows; the levels below it do not.
if "amx" in _native.supported_isas():
    os.environ.setdefault("NESO_ISA", "avx512_bf16")

PILOT = SHIPPED_MODELS["neso-pilot"]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.conformance)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """`neso serve` without a model argument: the bundled model."""
    with ServerProcess() as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Like `server`, with steps of 50 ms, so that long requests are still running when a test acts."""
    with ServerProcess(environment=slow_environment(tmp_path_factory.mktemp("slow"))) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model in this process, as the token-by-token reference."""
    return LLM(PILOT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. Of the module's scope, because playwright runs an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if executable is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """`open_page(address, **context options)`. Errors of the pages fail the test, except `allowed` console texts."""
    contexts: list[Any] = []
    errors: list[str] = []
    origins: set[str] = set()

    def open_page(address: str, allowed: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()

        def on_console(message: Any) -> None:
            if message.type in ("error", "warning") and not any(part in message.text for part in allowed):
                errors.append(message.text)

        page.on("console", on_console)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: origins.add("/".join(request.url.split("/")[:3])))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert len({origin for origin in origins if not origin.startswith("data:")}) <= 1, (
        "no request to other hosts"
    )
