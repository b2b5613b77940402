"""Actions on the dashboard's playground in Chromium. Import it after `pytest.importorskip("playwright.sync_api")`."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from server_process import ServerProcess

PATIENCE = 60_000
expect.set_options(timeout=PATIENCE)


def playground(open_page: Any, served: ServerProcess, protocol: str = "openai", **options: Any) -> Any:
    page = open_page(served.url("/#/playground", protocol), **options)
    expect(page.get_by_role("heading", name="Chat with")).to_be_visible()
    return page


def send(page: Any, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def further_fields(page: Any, fields: dict[str, Any]) -> None:
    page.get_by_text("Further fields").click()
    page.get_by_label("JSON object, added to the request").fill(json.dumps(fields))


def reply(page: Any, index: int = -1) -> Any:
    return page.locator(".message.assistant").nth(index)


def finished(page: Any, index: int = -1) -> Any:
    """The last line of an answer, which is shown when it is complete."""
    summary = reply(page, index).locator(".summary")
    expect(summary).to_be_visible()
    return summary


def stream_of(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """Return a stream as a server sends it."""
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = finish
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    return "".join([*events, "data: [DONE]\n\n"])


def answer_with(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Answer chats of the page with these streams. Returns the list that receives the requests."""
    requests: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        requests.append(route.request.post_data_json)
        route.fulfill(body=bodies[len(requests) - 1], content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfil)
    return requests
