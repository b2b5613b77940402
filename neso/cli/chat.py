"""`neso chat`: a conversation in the terminal with a model of a server, or with a model that it serves itself."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from neso.cli.chat_client import ChatError, ChatServer, Reply, ServerUnreachable
from neso.frontends.openai_options import API_KEY_VARIABLE

DEFAULT_URL = "http://localhost:9000"
_MAX_IMAGE_BYTES = 20 << 20
_MAX_HISTORY = 1000
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_HELP = """\
/image FILE|URL    add an image to the next message
/tools [FILE]      let the model call the tools in a JSON file, in OpenAI's form; without FILE: no tools
/system [TEXT]     set the system message, and start again
/set NAME VALUE    set a field of the requests, for example: /set temperature 0.2
/unset NAME        remove a field
/show              print the fields and the number of messages
/retry             answer the last message again
/new               start again
/save FILE         write the messages as JSON
/exit, Ctrl-D      end
A line that ends with \\ continues on the next line. Ctrl-C stops an answer."""


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|URL",
            help="URL of a server with an OpenAI API, or a model to serve for this chat: a checkpoint directory, a "
            "GGUF file, an org/name on the hub, or neso-pilot.",
        ),
    ] = DEFAULT_URL,
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS",
            help="Options of `neso serve` for MODEL, for example: -- --quantization=int8",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model on the server. Default: its first one.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this message and exit.", metavar="TEXT")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="Image of the first message: a file or a URL. Repeatable.")
    ] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file with tools, in OpenAI's form.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=[API_KEY_VARIABLE, "OPENAI_API_KEY"], help="API key of the server.", show_default=False
        ),
    ] = None,
    history: Annotated[bool, typer.Option(help="Keep the typed lines for the next chat.")] = True,
) -> None:
    """Chat with a model. Without a terminal, standard input is one message."""
    fields = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    try:
        with _open_server(target, serve_options or [], api_key) as server:
            session = ChatSession(server, model or _first_model(server), system)
            session.fields |= {name: value for name, value in fields.items() if value is not None}
            for path in image or ():
                session.add_image(path)
            if tools is not None:
                session.load_tools(tools)
            if prompt is not None or not sys.stdin.isatty():
                session.say(prompt if prompt is not None else sys.stdin.read())
            else:
                _converse(session, history)
    except (ChatError, InvalidInput) as error:
        typer.echo(f"neso chat: {error}", err=True)
        if isinstance(error, ServerUnreachable) and target == DEFAULT_URL:
            typer.echo(
                "Start a server with `neso serve`, or chat without one: `neso chat neso-pilot`.", err=True
            )
        raise typer.Exit(1) from None


class InvalidInput(Exception):
    """A file or a command that cannot be used."""


@contextlib.contextmanager
def _open_server(target: str, serve_options: list[str], api_key: str | None) -> Iterator[ChatServer]:
    if target.startswith(("http://", "https://")):
        if serve_options:
            raise InvalidInput(f"options of neso serve need a MODEL; {target} is a running server")
        yield ChatServer(target, api_key)
        return
    from neso.cli.private_server import ServerFailed, private_server

    try:
        with private_server(target, serve_options) as server:
            yield server
    except ServerFailed as error:
        raise InvalidInput(str(error)) from None


def _first_model(server: ChatServer) -> str:
    models = server.models()
    if not models:
        raise InvalidInput(f"{server.base} serves no model")
    return models[0]


class ChatSession:
    """A conversation. `fields` are further fields of the requests; answers are written to `out`.

    Control characters are removed from answers, so that a model cannot control the terminal.
    """

    def __init__(
        self, server: ChatServer, model: str, system: str | None = None, out: TextIO | None = None
    ) -> None:
        self._server, self.model = server, model
        self._out = sys.stdout if out is None else out
        self._system = system
        self._images: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self.fields: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.restart()

    def restart(self, system: str | None = None) -> None:
        """Forget the messages. `system`: new system message; "" for none; None keeps it."""
        if system is not None:
            self._system = system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> None:
        """Send a message with the images that were added, and print the answer. Raises `ChatError`."""
        content: Any = text
        if self._images:
            content = [{"type": "text", "text": text}, *self._images]
        self.messages.append({"role": "user", "content": content})
        try:
            self._answer()
        except ChatError:
            del self.messages[-1]
            raise
        self._images = []

    def retry(self) -> None:
        """Remove the last answer and request another one. Raises `ChatError`."""
        while self.messages and self.messages[-1]["role"] not in ("user", "system"):
            del self.messages[-1]
        if not self.messages or self.messages[-1]["role"] != "user":
            raise InvalidInput("there is no message to answer")
        self._answer()

    def add_image(self, path: str) -> None:
        """Add an image to the next message. Raises `InvalidInput`."""
        url = path
        if not path.startswith(("http://", "https://", "data:")):
            data = _read(Path(path))
            if len(data) > _MAX_IMAGE_BYTES:
                raise InvalidInput(f"{path} has {len(data)} bytes, at most {_MAX_IMAGE_BYTES} are sent")
            kind = mimetypes.guess_type(path)[0] or "image/png"
            url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})

    def load_tools(self, path: Path | None) -> None:
        """Use the tools of a JSON file, or none. Raises `InvalidInput`."""
        self._tools = []
        if path is None:
            return
        try:
            tools = json.loads(_read(path))
        except ValueError as error:
            raise InvalidInput(f"{path} is not JSON: {error}") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidInput(f"{path}: expected a list of tools in OpenAI's form")
        # Both {"type": "function", "function": {...}} and the function alone.
        self._tools = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]

    def _answer(self) -> None:
        """Print answers until one has no tool calls; the user types the results of the calls."""
        while True:
            reply = self._stream()
            self.messages.append(reply.message())
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                self._print(f"[call {call.name}({call.arguments})]\n")
                if not sys.stdin.isatty():
                    continue
                result = input("result> ")
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not sys.stdin.isatty():
                return

    def _stream(self) -> Reply:
        """Print an answer while it is generated. Ctrl-C cancels it; what was received is kept."""
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.fields}
        body["stream_options"] = {"include_usage": True}
        if self._tools:
            body["tools"] = self._tools
        reply, started, first = Reply(), time.perf_counter(), 0.0
        with contextlib.closing(self._server.stream(body)) as chunks, contextlib.suppress(KeyboardInterrupt):
            in_reasoning = False
            for chunk in chunks:
                text, reasoning = reply.add(chunk)
                first = first or (time.perf_counter() if text or reasoning or reply.tool_calls else 0.0)
                if reasoning:
                    self._print(reasoning, dim=True)
                    in_reasoning = True
                if text:
                    self._print(("\n\n" if in_reasoning else "") + text)
                    in_reasoning = False
        self._print("" if reply.content.endswith("\n") else "\n")
        self._print_speed(reply, started, first)
        return reply

    def _print_speed(self, reply: Reply, started: float, first: float) -> None:
        if not self._out.isatty() or not first or reply.num_tokens is None:
            return
        now = time.perf_counter()
        parts = [f"{reply.num_tokens} tokens", f"first after {1000 * (first - started):.0f} ms"]
        if now - first > 0.05:  # less is the time of the connection
            parts.append(f"{(reply.num_tokens - 1) / (now - first):.1f} tokens/s")
        if reply.finish_reason == "length":
            parts.append("cut off: the maximum length was reached")
        self._print(f"{', '.join(parts)}\n", dim=True)

    def _print(self, text: str, *, dim: bool = False) -> None:
        text = "".join(char for char in text if char.isprintable() or char in "\n\t")
        if dim and self._out.isatty():
            text = f"{_DIM}{text}{_RESET}"
        self._out.write(text)
        self._out.flush()

    def command(self, line: str) -> bool:
        """Execute a command that starts with "/". Returns False for the end. Raises `InvalidInput`, `ChatError`."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/help":
                self._print(_HELP + "\n")
            case "/image":
                self.add_image(_required(name, argument))
            case "/tools":
                self.load_tools(Path(argument) if argument else None)
            case "/system":
                self.restart(argument)
            case "/set":
                field, _, value = _required(name, argument).partition(" ")
                self.fields[field] = _json_or_text(_required(f"{name} {field}", value.strip()))
            case "/unset":
                self.fields.pop(_required(name, argument), None)
            case "/show":
                self._print(f"{self.model} at {self._server.base}\n{json.dumps(self.fields)}\n")
                self._print(f"{len(self.messages)} messages, {len(self._tools)} tools\n")
            case "/retry":
                self.retry()
            case "/new":
                self.restart()
            case "/save":
                _write(Path(_required(name, argument)), json.dumps(self.messages, indent=2) + "\n")
            case "/exit" | "/quit":
                return False
            case _:
                raise InvalidInput(f"there is no command {name}; /help lists them")
        return True


def _converse(session: ChatSession, history: bool) -> None:
    """Read messages and commands until /exit or the end of the input."""
    print(f"{session.model}. /help lists the commands.")
    with _line_history(history):
        while True:
            try:
                text = _read_message()
                if not text.strip():
                    continue
                if text.startswith("/"):
                    if not session.command(text.strip()):
                        return
                else:
                    session.say(text)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
            except (ChatError, InvalidInput) as error:
                print(f"error: {error}", file=sys.stderr)


def _read_message() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    return "\n".join(lines)


@contextlib.contextmanager
def _line_history(keep: bool) -> Iterator[None]:
    """Edit lines with readline, where Python has it; `keep`: with the lines of earlier chats."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "neso" / "chat_history"
    readline.set_history_length(_MAX_HISTORY)
    if keep:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield
    finally:
        if keep:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(path)
                path.chmod(0o600)


def _required(name: str, argument: str) -> str:
    if not argument:
        raise InvalidInput(f"{name} needs an argument; /help shows it")
    return argument


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.expanduser().write_text(text)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
