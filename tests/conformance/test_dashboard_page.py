"""The dashboard in Chromium, with real servers. Every test also checks that the page reports no errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_browser import (
    answer_with,
    finished,
    further_fields,
    playground,
    reply,
    send,
    stream_of,
)
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment

from neso.models import SHIPPED_MODELS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
expect = playwright.expect
TEXT_MODELS = Path(__file__).parent / "repositories" / "text_models"
LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A repository with a slow language model, a model that fails to load, and an unloaded one; explicit control."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "pilot" / "1").mkdir(parents=True)
    (repository / "pilot" / "1" / "model.json").write_text(
        json.dumps({"model": str(SHIPPED_MODELS["neso-pilot"])})
    )
    (repository / "pilot" / "config.pbtxt").write_text('backend: "llm"')
    shutil.copytree(TEXT_MODELS / "echo", repository / "echo")
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text('backend: "nonexistent"')
    with ServerProcess(
        *(f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=pilot"),
        *("--load-model=broken", "--exit-on-error=false", "--strict-readiness=false"),
        environment=slow_environment(tmp_path_factory.mktemp("slow")),
    ) as process:
        assert process.ports, process.output
        yield process


@pytest.mark.parametrize("protocol", ["http", "openai"])
def test_overview_shows_models(open_page: Any, served: ServerProcess, protocol: str) -> None:
    page = open_page(served.url("/", protocol))
    pilot = page.locator('tr[data-model="pilot"]')
    expect(pilot).to_contain_text("Ready")
    expect(pilot).to_contain_text("chat")
    expect(page.get_by_text("Connecting")).to_have_count(0)
    broken = page.locator('tr[data-model="broken"]')
    expect(broken).to_contain_text("Failed")
    expect(broken).to_contain_text("nonexistent")
    pilot.get_by_role("button", name="Details of pilot").click()
    dialog = page.get_by_role("dialog", name="pilot")
    expect(dialog).to_contain_text('"backend": "llm"')
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()


def test_load_and_unload(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"))
    echo = page.locator('tr[data-model="echo"]')
    expect(echo).to_contain_text("Not loaded")
    echo.get_by_role("button", name="Load echo").click()
    expect(echo).to_contain_text("Ready")
    assert served.get("/v2/models/echo/ready")[0] == 200
    echo.get_by_role("button", name="Unload echo").click()
    expect(echo).to_contain_text("Not loaded")
    assert served.get("/v2/models/echo/ready")[0] == 400


def test_failed_load_shows_the_reason(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"), allowed=("status of 400",))
    page.get_by_role("button", name="Load broken").click()
    expect(page.get_by_role("alert")).to_contain_text("nonexistent")


def test_chat_remembers_the_conversation(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    send(page, "What is in-flight batching?")
    first = finished(page)
    expect(reply(page)).to_contain_text("In-flight batching")
    expect(first).to_contain_text("tokens/s")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Who are you?")
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "In-flight batching" in messages[1]["content"]
    finished(page)
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


def test_answer_streams_until_it_is_stopped(open_page: Any, served: ServerProcess) -> None:
    def aborted() -> float:
        return sum(
            value
            for name, value in served.metrics().items()
            if name.startswith("vllm:request_success_total") and 'finished_reason="abort"' in name
        )

    before = aborted()
    page = playground(open_page, served)
    further_fields(page, LONG)
    send(page, "What is in-flight batching?")
    expect(page.locator(".message.assistant[aria-busy=true] .markdown")).to_contain_text("In-flight")
    page.get_by_role("button", name="Stop").click()
    expect(finished(page)).to_contain_text("stopped")
    wait_until(lambda: aborted() == before + 1)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_charts_move(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"))
    throughput = page.locator(".chart", has_text="Throughput")
    expect(throughput).to_be_visible()
    samples = int(throughput.get_attribute("data-samples"))
    chat = {"model": "pilot", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 5}
    # A rate needs a sample before and one after the request.
    expect(throughput).not_to_have_attribute("data-samples", str(samples))
    assert served.post("/v1/chat/completions", chat, "openai")[0] == 200
    expect(throughput.locator(".series-1 b")).to_have_text(re.compile(r"^[\d.]*[1-9][\d.]*k?$"))
    expect(page.locator(".chart", has_text="Time to first token").locator(".series-1 b")).to_contain_text("s")
    expect(page.locator(".chart", has_text="Draft tokens")).to_contain_text(
        "speculative decoding is not used"
    )


def test_log_probabilities_on_hover_and_by_keyboard(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    page.get_by_label("Show tokens with alternatives").check()
    page.get_by_label("Max tokens").fill("8")
    send(page, "Who are you?")
    finished(page)
    tokens = reply(page).locator(".token")
    expect(tokens).to_have_count(8)
    tokens.nth(2).hover()
    tip = page.get_by_role("tooltip")
    expect(tip.locator("tbody tr")).to_have_count(5)
    expect(tip.locator("tr.chosen")).to_have_count(1)
    page.mouse.move(0, 0)
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_be_visible()
    page.keyboard.press("Escape")
    expect(tip).not_to_be_visible()


def test_timeline(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    page.get_by_label("Max tokens").fill("8")
    send(page, "Who are you?")
    finished(page)
    page.get_by_role("button", name="Timeline").click()
    timeline = reply(page).locator(".timeline")
    for phase in ("Queue", "Prefill", "Decode"):
        expect(timeline).to_contain_text(phase)
    assert timeline.locator("line.tick").count() >= 8


def test_code_of_the_request_runs(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("System prompt").fill("It's a test with 'quotes', $HOME and \\ signs.")
    page.get_by_label("Message", exact=True).fill("Who are you?")
    page.get_by_role("button", name="Code").click()
    code = page.get_by_role("dialog").locator("pre")
    curl = subprocess.run(
        ["bash", "-c", f"{code.inner_text()} -sS"], capture_output=True, text=True, timeout=60
    )
    assert "[DONE]" in curl.stdout and "error" not in curl.stdout, curl.stdout + curl.stderr
    page.get_by_role("button", name="Python").click()
    expect(code).to_contain_text("import openai")
    python = subprocess.run(
        [sys.executable, "-c", code.inner_text()], capture_output=True, text=True, timeout=60
    )
    assert python.returncode == 0 and python.stdout.strip(), python.stderr


def test_completion_and_embeddings(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    page.get_by_role("button", name="Completion").click()
    page.get_by_label("Max tokens").fill("4")
    page.get_by_role("button", name="Complete", exact=True).click()
    expect(finished(page)).to_contain_text("tokens")
    page.get_by_role("button", name="Embeddings").click()
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_text("3 vectors of")).to_be_visible()
    assert page.locator("td.number", has_text="1.000").count() >= 3


ATTACKS = """<img src=x onerror="window.attacked = 1"><script>window.attacked = 1</script>

**<b onmouseover="window.attacked=1">bold</b>** `<svg onload=window.attacked=1>`
[link](javascript:window.attacked=1) [data](data:text/html,<script>window.attacked=1</script>) [safe](https://example.org/)

| <i>cell</i> | <iframe src="javascript:window.attacked=1"> |
|---|---|
| &lt;u&gt; | "><script>window.attacked=1</script> |

```html
</pre><script>window.attacked = 1</script>
```
![image](https://example.org/tracker.png)
"""


def test_text_of_models_never_becomes_html(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    call = {"index": 0, "id": "1", "function": {"name": "<img src=x>", "arguments": "<script>1</script>"}}
    answer_with(page, stream_of({"content": ATTACKS, "reasoning_content": ATTACKS}, {"tool_calls": [call]}))
    send(page, ATTACKS)
    finished(page)
    expect(reply(page)).to_contain_text('<img src=x onerror="window.attacked = 1">')
    expect(reply(page).locator(".code").first).to_contain_text("</pre><script>window.attacked = 1</script>")
    forbidden = "script, iframe, svg:not(.timeline svg), img, b[onmouseover], u, i"
    assert page.locator(".message").locator(forbidden).count() == 0
    links = page.locator(".message a").evaluate_all("links => links.map(link => [link.href, link.rel])")
    assert {target for target, _ in links} == {"https://example.org/", "https://example.org/tracker.png"}
    assert {relation for _, relation in links} == {"noopener noreferrer nofollow"}
    assert page.evaluate("window.attacked") is None


def test_tool_calls_and_results(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    parts = [{"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":'}}]
    rest = [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]
    requests = answer_with(
        page,
        stream_of({"tool_calls": parts}, {"tool_calls": rest}, finish="tool_calls"),
        stream_of({"content": "It rains."}),
    )
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Use the example").click()
    send(page, "What is the weather in Oslo?")
    expect(page.locator(".call")).to_contain_text('"city": "Oslo"')
    page.get_by_label("Result of get_weather").fill("rain")
    page.get_by_role("button", name="Send results").click()
    expect(page.get_by_text("It rains.")).to_be_visible()
    assert requests[0]["tools"][0]["function"]["name"] == "get_weather"
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert requests[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    page.get_by_label("JSON array of tools").fill("[")
    send(page, "Again")
    expect(page.get_by_role("alert")).to_contain_text("Tools:")


def test_images_are_sent_to_vision_models(open_page: Any, served: ServerProcess, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    page = open_page("about:blank")

    def with_images(route: Any) -> None:
        state = route.fetch().json()
        state["models"] = [{**model, "images": True} for model in state["models"]]
        route.fulfill(json=state)

    page.route("**/dashboard/state", with_images)
    page.goto(served.url("/#/playground", "openai"))
    requests = answer_with(page, stream_of({"content": "Red."}))
    expect(page.get_by_role("button", name="Image")).to_be_enabled()
    page.locator("input[type=file]").set_input_files(tmp_path / "red.png")
    expect(page.get_by_role("button", name="Remove image 1")).to_be_visible()
    send(page, "Which colour?")
    expect(page.get_by_text("Red.")).to_be_visible()
    image, text = requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "Which colour?"}


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_dark_mode(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"), color_scheme="dark")
    expect(page.locator(".tiles")).to_be_visible()
    dark = background(page)
    page.get_by_role("button", name="Use light colours").click()
    light = background(page)
    assert sum(map(int, dark[4:-1].split(","))) < 200 < 600 < sum(map(int, light[4:-1].split(",")))
    page.reload()
    expect(page.get_by_role("button", name="Use dark colours")).to_be_visible()
    assert background(page) == light


def test_phone(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"), viewport={"width": 360, "height": 740}, has_touch=True)
    expect(page.locator(".chart").last).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 360
    page.get_by_role("link", name="Playground").click()
    settings = page.get_by_label("System prompt")
    expect(settings).not_to_be_visible()
    page.get_by_role("button", name="Parameters", exact=True).click()
    expect(settings).to_be_visible()
    page.get_by_role("button", name="Close parameters").click()
    expect(settings).not_to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_keyboard_and_accessible_names(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/"))
    expect(page.locator(".tiles")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    unnamed = """() => [...document.querySelectorAll("button, input, select, textarea, a")].filter((element) =>
        element.checkVisibility() && !(element.innerText?.trim() || element.ariaLabel || element.labels?.length))
        .map((element) => element.outerHTML)"""
    assert page.evaluate(unnamed) == []
    page.goto(served.url("/#/playground"))
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    assert page.evaluate(unnamed) == []


def test_api_documentation(open_page: Any, served: ServerProcess) -> None:
    page = open_page(served.url("/docs", "openai"))
    page.locator(".opblock", has_text="Create a chat completion").first.click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()


def test_key_is_required_and_kept_in_the_tab(open_page: Any) -> None:
    with ServerProcess("--api-key=right", "--allow-grpc=false") as server:
        page = open_page(server.url("/#/playground", "openai"), allowed=("status of 401",))
        expect(page.get_by_label("Message", exact=True)).to_be_disabled()
        page.get_by_role("link", name="Overview", exact=True).click()
        expect(page.locator('tr[data-model="neso-pilot"]')).to_contain_text("Ready")
        page.get_by_role("button", name="Details of neso-pilot").click()
        expect(page.get_by_role("dialog")).to_contain_text("API key")
        page.keyboard.press("Escape")
        for key in ("wrong", "right"):
            page.get_by_role("banner").get_by_role("button", name="Enter key").click()
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_role("dialog")).not_to_be_visible()
        page.get_by_role("link", name="Playground").click()
        expect(page.get_by_label("Message", exact=True)).to_be_enabled()
        send(page, "Who are you?")
        finished(page)
        assert "right" in page.evaluate("JSON.stringify({...sessionStorage})")
        assert "right" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
        page.get_by_role("button", name="Access").click()
        page.get_by_role("button", name="Forget").click()
        expect(page.get_by_label("Message", exact=True)).to_be_disabled()
        page.close()


def test_disabled(open_page: Any) -> None:
    with ServerProcess("--dashboard=false", "--allow-grpc=false") as server:
        for protocol in ("http", "openai"):
            assert server.get("/", protocol)[0] == 404
            assert server.get("/dashboard/state", protocol)[0] == 404
