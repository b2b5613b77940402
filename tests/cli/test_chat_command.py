"""`neso chat` against a server with scripted answers."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from neso.cli.chat import ChatSession, InvalidInput
from neso.cli.chat_client import ChatError, ChatServer
from neso.cli.main import app

Chunk = dict[str, Any]


def delta(**fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def end(reason: str = "stop") -> Chunk:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


class ScriptedServer:
    """Answers each chat request with the next list of chunks; `status` other than 200: with an error."""

    def __init__(self) -> None:
        self.answers: list[list[Chunk]] = []
        self.bodies: list[Chunk] = []
        self.status = 200
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

            def do_POST(self) -> None:
                scripted.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if scripted.status != 200:
                    self._send(json.dumps({"error": {"message": "no room"}}).encode())
                    return
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in scripted.answers.pop(0)]
                self._send("".join([*lines, ": comment\n\n", "data: [DONE]\n\n"]).encode())

            def _send(self, data: bytes) -> None:
                self.send_response(scripted.status)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def session(scripted: ScriptedServer) -> ChatSession:
    return ChatSession(ChatServer(scripted.url), "first", out=io.StringIO())


def printed(session: ChatSession) -> str:
    out = session._out
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_turns_are_sent_with_the_earlier_ones(scripted: ScriptedServer, session: ChatSession) -> None:
    scripted.answers = [[delta(content="He"), delta(content="llo"), end()], [delta(content="Bye"), end()]]
    session.fields["temperature"] = 0.5
    session.say("Hi")
    session.say("End")
    assert printed(session) == "Hello\nBye\n"
    body = scripted.bodies[1]
    assert [message["content"] for message in body["messages"]] == ["Hi", "Hello", "End"]
    assert (body["model"], body["temperature"], body["stream"]) == ("first", 0.5, True)


def test_retry_replaces_the_answer(scripted: ScriptedServer, session: ChatSession) -> None:
    scripted.answers = [[delta(content="one"), end()], [delta(content="two"), end()]]
    session.say("Hi")
    session.retry()
    assert [message["content"] for message in session.messages] == ["Hi", "two"]


def test_control_characters_of_a_model_are_not_printed(
    scripted: ScriptedServer, session: ChatSession
) -> None:
    scripted.answers = [[delta(content="a\x1b[2Jb\tc\x07\r\n"), end()]]
    session.say("Hi")
    assert printed(session) == "a[2Jb\tc\n"


def test_reasoning_is_printed_but_not_sent_back(scripted: ScriptedServer, session: ChatSession) -> None:
    scripted.answers = [[delta(reasoning_content="hm"), delta(content="yes"), end()]]
    session.say("Hi")
    assert printed(session) == "hm\n\nyes\n"
    assert session.messages[-1] == {"role": "assistant", "content": "yes"}


def test_images_are_sent_once_as_data(scripted: ScriptedServer, session: ChatSession, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    scripted.answers = [[end()], [end()]]
    session.command(f"/image {tmp_path / 'a.png'}")
    session.say("What is it?")
    session.say("Sure?")
    text, image = scripted.bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert scripted.bodies[1]["messages"][-1]["content"] == "Sure?"


def test_tool_calls_get_typed_results(
    scripted: ScriptedServer, session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "weather", "parameters": {"type": "object"}}]))
    start = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city"'}}
    rest = {"index": 0, "function": {"arguments": ': "Rome"}'}}
    scripted.answers = [
        [delta(tool_calls=[start]), delta(tool_calls=[rest]), end("tool_calls")],
        [delta(content="Sunny"), end()],
    ]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "sun")
    session.command(f"/tools {tools}")
    session.say("Weather in Rome?")
    assert '[call weather({"city": "Rome"})]' in printed(session)
    assert scripted.bodies[0]["tools"][0]["function"]["name"] == "weather"
    call, result = scripted.bodies[1]["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "tool_call_id": "call-1", "content": "sun"}


def test_a_failed_request_leaves_no_message(scripted: ScriptedServer, session: ChatSession) -> None:
    scripted.status = 429
    with pytest.raises(ChatError, match="429 no room"):
        session.say("Hi")
    assert session.messages == []


def test_an_error_in_the_stream_is_raised(scripted: ScriptedServer, session: ChatSession) -> None:
    scripted.answers = [[delta(content="a"), {"error": {"message": "the engine has failed"}}]]
    with pytest.raises(ChatError, match="the engine has failed"):
        session.say("Hi")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set", "needs an argument"),
        ("/set temperature", "/set temperature needs an argument"),
        ("/image", "needs an argument"),
        ("/image /no/such.png", "cannot be read: No such file"),
        ("/tools /no/such.json", "cannot be read"),
        ("/save /no/such/folder/x", "cannot be written"),
        ("/retry", "no message to answer"),
        ("/dance", "no command /dance"),
    ],
)
def test_wrong_commands(session: ChatSession, line: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        session.command(line)


def test_fields_are_set_removed_and_shown(session: ChatSession) -> None:
    session.command("/set temperature 0.2")
    session.command("/set stop END")
    session.command("/unset temperature")
    session.command("/show")
    assert session.fields == {"stop": "END"}
    assert '{"stop": "END"}' in printed(session)
    assert session.command("/exit") is False


def test_one_message_from_standard_input(scripted: ScriptedServer) -> None:
    scripted.answers = [[delta(content="Hello"), end()]]
    result = CliRunner().invoke(app, ["chat", scripted.url, "--system", "Be brief"], input="Hi")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert scripted.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]


def test_missing_default_server_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neso.cli.chat.DEFAULT_URL", "http://127.0.0.1:9")
    failed = CliRunner().invoke(app, ["chat", "http://127.0.0.1:9", "-p", "Hi"])
    assert failed.exit_code == 1 and "`neso chat neso-pilot`" in failed.output


def test_failures_have_a_reason_and_status_1(scripted: ScriptedServer, tmp_path: Path) -> None:
    unreachable = CliRunner().invoke(app, ["chat", "http://127.0.0.1:9", "-p", "Hi"])
    assert unreachable.exit_code == 1 and "cannot be reached" in unreachable.output
    assert "neso serve" not in unreachable.output
    options = CliRunner().invoke(app, ["chat", scripted.url, "-p", "Hi", "--", "--dtype=float32"])
    assert options.exit_code == 1 and "need a MODEL" in options.output
    (tmp_path / "t.json").write_text("{")
    tools = CliRunner().invoke(app, ["chat", scripted.url, "-p", "Hi", "--tools", str(tmp_path / "t.json")])
    assert tools.exit_code == 1 and "is not JSON" in tools.output
