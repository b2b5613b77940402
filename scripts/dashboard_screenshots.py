"""Take the screenshots of the dashboard in docs/images, with a real server under load.

usage: python scripts/dashboard_screenshots.py          needs Chromium and `pip install playwright`
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "conformance")]

from server_process import ServerProcess  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PILOT = ROOT / "neso" / "models" / "neso-pilot"
LOAD_SECONDS = 90
CLIENTS = 6
SIZE: Any = {"width": 1280, "height": 800}
SYSTEM = "You answer questions about an inference server. " * 12
QUESTIONS = (
    *("What is in-flight batching?", "What is paged attention?", "What is chunked prefill?", "Who are you?"),
    *("What is streaming?", "What is a KV cache?", "What is speculative decoding?", "What is TTFT?"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        repository = write_repository(Path(scratch))
        arguments = (
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            "--load-model=neso-pilot",
        )
        failing = ("--load-model=summarizer", "--exit-on-error=false", "--strict-readiness=false")
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        with ServerProcess(*arguments, *failing) as server:
            take(browser, server)
        browser.close()


def write_repository(directory: Path) -> Path:
    """Write a model that is ready, one that cannot be loaded, and one that is not loaded."""
    speculative = {"speculative": "ngram", "num_speculative_tokens": 4}
    for name, backend in (("neso-pilot", "llm"), ("summarizer", "missing"), ("reranker", "python")):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    (directory / "neso-pilot" / "1" / "model.json").write_text(
        json.dumps({"model": str(PILOT), **speculative})
    )
    return directory


def take(browser: Browser, server: ServerProcess) -> None:
    page = open_page(browser, server, "light")
    dark = open_page(browser, server, "dark")
    stopping = threading.Event()
    clients = [threading.Thread(target=make_load, args=(server, stopping, seed)) for seed in range(CLIENTS)]
    for client in clients:
        client.daemon = True
        client.start()
    page.wait_for_timeout(LOAD_SECONDS * 1000)
    page.set_viewport_size(
        {"width": 1280, "height": page.evaluate("document.querySelector('.page').scrollHeight") + 50}
    )
    page.wait_for_timeout(3000)
    page.screenshot(path=IMAGES / "dashboard-overview.png")
    page.set_viewport_size(SIZE)
    dark.locator(".chart").nth(8).scroll_into_view_if_needed()
    dark.wait_for_timeout(500)
    dark.screenshot(path=IMAGES / "dashboard-dark.png")
    stopping.set()
    for client in clients:
        client.join()
    page.set_viewport_size({"width": 1280, "height": 900})
    chat(page, server)
    page.screenshot(path=IMAGES / "dashboard-playground.png")
    page.set_viewport_size({"width": 390, "height": 780})
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / "dashboard-phone.png")


def open_page(browser: Browser, server: ServerProcess, scheme: Any) -> Page:
    context = browser.new_context(viewport=SIZE, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url("/"))
    page.locator(".chart").first.wait_for()
    return page


def make_load(server: ServerProcess, stopping: threading.Event, seed: int) -> None:
    """Send chats with pauses, until `stopping` is set."""
    chance = random.Random(seed)
    while not stopping.is_set():
        question = chance.choice(QUESTIONS)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": "neso-pilot", "messages": messages, "max_tokens": chance.randint(20, 90)}
        server.post("/v1/chat/completions", body, "openai")
        time.sleep(chance.expovariate(2.0))


def chat(page: Page, server: ServerProcess) -> None:
    page.goto(server.url("/#/playground"))
    page.get_by_label("Show tokens with alternatives").check()
    box = page.get_by_label("Message", exact=True)
    for number, question in enumerate(("What is in-flight batching?", "What is paged attention?")):
        box.fill(question)
        box.press("Enter")
        page.locator(".message.assistant .summary").nth(number).wait_for()
    page.get_by_role("button", name="Timeline").last.click()
    page.wait_for_timeout(300)
    page.locator(".message.assistant").first.locator(".token").nth(8).hover()
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
