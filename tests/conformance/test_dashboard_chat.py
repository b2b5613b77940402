"""The chat of the dashboard in Chromium, with models that see images and call tools, and what the browser keeps."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

from neso.models import SHIPPED_MODELS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
image_module = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "engine"))
from checkpoints import make_llava  # noqa: E402
from dashboard_browser import (  # noqa: E402
    answer_with,
    finished,
    further_fields,
    playground,
    reply,
    send,
    stream_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
expect = playwright.expect
MAX_FIRST_LOAD = 400_000
"""Bytes of the page's files."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The pilot model, and a vision model."""
    llava = make_llava(tmp_path_factory.mktemp("llava"))
    with ServerProcess(f"pilot={SHIPPED_MODELS['neso-pilot']}", f"llava={llava}") as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    image_module.new("RGB", (30, 40), "red").save(path)
    return path


def choose(page: Any, model: str) -> None:
    page.get_by_role("combobox", name="Model").select_option(model)


def drop(page: Any, name: str, media_type: str, data: bytes) -> None:
    """Drop a file on the conversation."""
    transfer = page.evaluate_handle(
        """([name, type, data]) => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
            transfer.items.add(new File([bytes], name, { type }));
            return transfer;
        }""",
        [name, media_type, base64.b64encode(data).decode()],
    )
    for event in ("dragover", "drop"):
        page.get_by_role("log").dispatch_event(event, {"dataTransfer": transfer})


def copied_code(page: Any, language: str) -> str:
    """The request as code, from the clipboard."""
    page.get_by_role("button", name="Code").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=language).click()
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    page.keyboard.press("Escape")
    return str(page.evaluate("navigator.clipboard.readText()")).strip()


def run_code(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "error" not in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_vision_model_answers_about_an_image(open_page: Any, served: ServerProcess, picture: Path) -> None:
    page = playground(open_page, served, permissions=["clipboard-read", "clipboard-write"])
    choose(page, "llava")
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Temperature").fill("0")
    page.locator("input[type=file]").set_input_files(picture)
    expect(page.get_by_role("button", name="Remove image 1")).to_be_visible()
    page.get_by_label("Message", exact=True).fill("Which colour?")
    curl, python = copied_code(page, "curl"), copied_code(page, "Python")
    page.get_by_role("button", name="Send").click()
    expect(finished(page)).to_contain_text("4 tokens")
    expect(page.get_by_alt_text("Attached image")).to_be_visible()
    answer = reply(page).locator(".markdown").inner_text().strip()
    for code in (curl, python):
        assert base64.b64encode(picture.read_bytes()).decode() in code
    assert "[DONE]" in run_code("bash", "-c", f"{curl} -sS")
    assert answer and answer.split() == run_code(sys.executable, "-c", python).split()


def test_images_are_dropped_and_refused(open_page: Any, served: ServerProcess, picture: Path) -> None:
    page = playground(open_page, served)
    problem = page.get_by_role("alert")
    choose(page, "pilot")
    drop(page, "picture.png", "image/png", picture.read_bytes())
    expect(problem).to_contain_text("pilot takes text only")
    choose(page, "llava")
    drop(page, "notes.txt", "text/plain", b"notes")
    expect(problem).to_contain_text("Only images")
    drop(page, "picture.png", "image/png", picture.read_bytes())
    expect(page.get_by_role("button", name="Remove image 1")).to_be_visible()
    expect(problem).to_have_count(0)
    page.get_by_role("button", name="Remove image 1").click()
    expect(page.locator(".thumbnails")).to_have_count(0)


def test_forced_tool_call_and_its_result(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served, permissions=["clipboard-read", "clipboard-write"])
    choose(page, "pilot")
    page.get_by_label("Temperature").fill("0")
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Use the example").click()
    page.get_by_label("Tool choice").select_option("get_weather")
    page.get_by_label("Message", exact=True).fill("Who are you?")  # the model calls no tool by itself
    python = copied_code(page, "Python")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert sent.value.post_data_json["tool_choice"] == {
        "type": "function",
        "function": {"name": "get_weather"},
    }
    call = page.locator(".call")
    expect(call).to_contain_text("get_weather")
    finished(page)
    assert isinstance(json.loads(call.locator("pre").inner_text())["city"], str)
    assert "get_weather" in run_code(sys.executable, "-c", python)
    page.get_by_label("Tool choice").select_option("none")
    page.get_by_label("Result of get_weather").fill("rain")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    finished(page)
    expect(reply(page).get_by_role("alert")).to_have_count(0)
    assert reply(page).locator(".markdown").inner_text().strip()


def test_conversations_and_parameters_are_kept(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    choose(page, "pilot")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("System prompt").fill("Be short.")
    for question in ("Who are you?", "What is paged attention?"):
        send(page, question)
        finished(page)
        page.get_by_role("button", name="New chat").click()
    later = page.context.new_page()  # the first tab is closed
    page.close()
    later.goto(served.url("/#/playground", "openai"))
    expect(later.get_by_label("Temperature")).to_have_value("0")
    expect(later.get_by_label("System prompt")).to_have_value("Be short.")
    kept = later.get_by_role("region", name="Conversations")
    expect(kept.locator("li .title")).to_have_text(["What is paged attention?", "Who are you?"])
    kept.get_by_role("button", name="Who are you?", exact=True).click()
    expect(later.locator(".message")).to_have_count(2)
    expect(reply(later)).to_contain_text("neso-pilot")
    later.reload()
    expect(reply(later)).to_contain_text("neso-pilot")
    later.get_by_role("button", name="New chat").click()
    kept.get_by_role("button", name="Delete Who are you?").click()
    expect(kept.locator("li")).to_have_count(1)
    later.once("dialog", lambda dialog: dialog.accept())
    kept.get_by_role("button", name="Delete all").click()
    expect(kept).to_have_count(0)
    assert "paged" not in later.evaluate("JSON.stringify({...localStorage})")


def test_oldest_conversations_make_room(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    kept = page.evaluate(
        """async (module) => {
            const { keepConversation, listConversations, loadConversation } = await import(module);
            const talk = (size) => [{ role: "user", text: "x".repeat(size), images: [] }];
            for (let id = 0; id < 60; id += 1) {
                keepConversation(`small ${id}`, talk(10));
            }
            const small = listConversations().map((each) => each.id);
            const large = [0, 1, 2, 3, 4].map((id) => keepConversation(`large ${id}`, talk(1.5e6)));
            const entries = listConversations();
            return {
                small, large,
                complete: entries.every((each) => loadConversation(each.id).length === 1),
                newest: entries[0].id,
                tooLarge: keepConversation("too large", talk(3e6)),
                after: listConversations().length === entries.length,
            };
        }""",
        served.url("/static/dashboard/conversations.js", "openai"),
    )
    assert kept["small"] == [f"small {number}" for number in range(59, 9, -1)]
    assert kept["large"] == [True] * 5 and kept["complete"] and kept["newest"] == "large 4"
    assert (kept["tooLarge"], kept["after"]) == (False, True)


def test_cut_off_answer_is_continued(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    choose(page, "pilot")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("6")
    send(page, "What is in-flight batching?")
    expect(finished(page)).to_contain_text("length limit")
    page.get_by_label("Max tokens").fill("")
    reply(page).get_by_role("button", name="Continue").click()
    expect(reply(page)).to_contain_text(
        "In-flight batching lets new requests join the running batch at every step and lets finished ones leave"
    )
    expect(finished(page)).not_to_contain_text("length limit")
    expect(page.locator(".message.assistant")).to_have_count(1)
    expect(reply(page).get_by_role("button", name="Continue")).to_have_count(0)


def test_edited_message_and_regenerated_answer(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served)
    choose(page, "pilot")
    page.get_by_label("Temperature").fill("0")
    send(page, "Who are you?")
    finished(page)
    page.get_by_role("button", name="Edit").click()
    edited = page.get_by_label("Edited message")
    edited.fill("What is paged attention?")
    page.get_by_role("button", name="Send").first.click()
    expect(reply(page)).to_contain_text("Paged attention")
    finished(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Regenerate").click()
    assert [each["content"] for each in sent.value.post_data_json["messages"]] == ["What is paged attention?"]
    finished(page)
    expect(page.locator(".message")).to_have_count(2)


def test_speed_is_shown_while_an_answer_arrives(open_page: Any, slow_server: ServerProcess) -> None:
    page = playground(open_page, slow_server)
    further_fields(page, {"max_tokens": 1000, "ignore_eos": True})
    send(page, "Who are you?")
    expect(reply(page).locator(".progress")).to_have_text(re.compile(r"^[1-9]\d* tokens · [\d.]+ tokens/s$"))
    page.get_by_label("Message", exact=True).press("Escape")
    expect(finished(page)).to_contain_text(re.compile(r"stopped · .*tokens/s"))


def test_unreachable_server_is_reported(open_page: Any, served: ServerProcess) -> None:
    page = playground(open_page, served, allowed=("ERR_INTERNET_DISCONNECTED",))
    answer_with(page, stream_of({"content": "The beginning"}).replace("data: [DONE]\n\n", ""))
    send(page, "Who are you?")
    error = reply(page).get_by_role("alert")
    expect(error).to_contain_text("connection to the server was lost")
    expect(reply(page)).to_contain_text("The beginning")
    page.unroute_all()
    page.context.set_offline(True)
    page.get_by_role("button", name="Regenerate").click()
    expect(error).to_contain_text("cannot be reached")
    expect(page.get_by_role("status")).to_contain_text("Unreachable")
    page.context.set_offline(False)
    expect(page.get_by_role("status")).to_contain_text("Ready")
    page.get_by_role("button", name="Regenerate").click()
    expect(error).to_have_count(0)
    finished(page)


def test_first_load_is_small(open_page: Any, served: ServerProcess) -> None:
    """The page appears after one round of requests. Prints the time, which depends on the machine."""
    page = open_page(served.url("/"))
    expect(page.locator(".tiles")).to_be_visible()
    files = page.evaluate(
        """() => performance.getEntriesByType("resource").filter((each) => each.name.includes("/static/"))
            .map((each) => [each.name, each.decodedBodySize, each.initiatorType])"""
    )
    paint = page.evaluate('performance.getEntriesByName("first-contentful-paint")[0].startTime')
    total = sum(size for _, size, _ in files)
    print(f"first paint after {paint:.0f} ms, {len(files)} files, {total / 1000:.0f} kB")
    assert 50_000 < total < MAX_FIRST_LOAD
    assert {kind for _, _, kind in files} <= {"link", "script", "img", "css", "other"}
