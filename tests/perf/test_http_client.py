from __future__ import annotations

import asyncio
import ssl

import orjson
import pytest
import trustme
from eventually import until
from stub import StubRequest, response, stream, stub_server

from neso.perf.client.http import HttpTarget
from neso.perf.endpoints.openai import ChatEndpoint, CompletionsEndpoint
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

DONE = b"data: [DONE]\n\n"


def chunk(**delta: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'


def options(url: str, **fields) -> EndpointOptions:
    return EndpointOptions(models=("m",), urls=(url,), **{"streaming": True, **fields})


async def send(
    target: HttpTarget, request: PerfRequest | None = None, *, keep: bool = False, **fields
) -> RequestRecord:
    record = RequestRecord("m", output_text="" if keep else None, session=fields.pop("session", ""))
    await target.send(request or PerfRequest("hello", max_tokens=2), record, [], **fields)
    return record


async def answer(data: bytes, *, keep: bool = False, **fields) -> RequestRecord:
    """Send a request to a server that answers with `data`."""

    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    async with stub_server(handle) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url, **fields)), options(stub.url, **fields))
        record = await asyncio.wait_for(send(target, keep=keep), 20)
        await target.close()
    return record


@pytest.mark.parametrize("keep", [False, True])
async def test_events_with_output_are_counted(keep):
    first = chunk(role="assistant", content="")
    record = await answer(stream(first, chunk(content="a"), chunk(content='"b'), USAGE, DONE), keep=keep)
    assert record.ok and record.status == 200 and len(record.arrivals_ns) == 2
    assert (record.input_tokens, record.output_tokens) == (3, 2)
    assert record.output_text == ('a"b' if keep else None)
    assert record.start_ns < record.first_byte_ns <= record.arrivals_ns[0] <= record.end_ns


async def test_events_may_be_split_anywhere():
    data = stream(
        chunk(content="a"), b": comment\r\n\r\n" + chunk(content="b").replace(b"\n", b"\r\n"), USAGE, DONE
    )

    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        for position in range(len(data)):
            writer.write(data[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async with stub_server(handle) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url)), options(stub.url))
        record = await send(target)
        await target.close()
    assert record.ok and len(record.arrivals_ns) == 2 and record.output_tokens == 2


async def test_reasoning_is_output_but_not_the_first_answer():
    record = await answer(stream(chunk(reasoning_content="hm"), chunk(content="a"), DONE), keep=True)
    assert len(record.arrivals_ns) == 2 and record.output_text == "hma"
    assert record.first_output_ns == record.arrivals_ns[1]


async def test_usage_of_each_event_gives_the_tokens_of_the_event():
    def event(text: str, tokens: int) -> bytes:
        message = {
            "choices": [{"delta": {"content": text}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": tokens},
        }
        return b"data: " + orjson.dumps(message) + b"\n\n"

    record = await answer(stream(event("a", 1), event("bcd", 4), DONE))
    assert record.event_tokens == [1, 3] and record.output_tokens == 4


async def test_a_response_that_is_not_streamed_has_one_arrival():
    message = {
        "choices": [{"message": {"content": "text"}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }
    record = await answer(response(orjson.dumps(message)), keep=True, streaming=False)
    assert (
        record.ok
        and record.output_text == "text"
        and len(record.arrivals_ns) == 1
        and record.output_tokens == 5
    )


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (response(b'{"error":{"message":"no model m"}}', "404 Not Found"), "http", "HTTP 404: no model m"),
        (response(b"busy", "503 Busy", "text/plain"), "http", "HTTP 503: busy"),
        (
            stream(chunk(content="a"), b'data: {"error":{"message":"out of memory"}}\n\n'),
            "stream",
            "out of memory",
        ),
        (stream(b"data: {not json}\n\n"), "protocol", "unexpected response"),
        (stream(chunk(role="assistant"), DONE), "empty", "no output"),
        (response(b"[1]"), "protocol", "unexpected response"),
        (b"220 smtp.example.org\r\n", "protocol", "not an HTTP response"),
    ],
)
async def test_a_bad_response_is_an_error_of_its_kind(data, kind, message):
    record = await answer(data)
    assert record.error_kind == kind and message in record.error_message and record.end_ns


async def test_a_connection_that_ends_in_the_middle_is_a_disconnect():
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(chunk(content="a"))[:-5])
        writer.close()

    async with stub_server(handle) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url)), options(stub.url))
        record = await send(target)
    assert record.error_kind == "disconnect" and "in the middle" in record.error_message


async def test_a_body_without_length_ends_with_the_connection():
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + chunk(content="a") + DONE
        )
        writer.close()

    async with stub_server(handle) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url)), options(stub.url))
        record = await send(target)
    assert record.ok and len(record.arrivals_ns) == 1


async def test_a_request_on_an_idle_connection_that_the_server_closed_is_repeated():
    async def handle(request: StubRequest, writer: asyncio.StreamWriter) -> None:
        if stub.num_connections == 1 and len(stub.requests) == 2:
            writer.close()
        else:
            writer.write(stream(chunk(content="a"), DONE))

    async with stub_server(handle) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url)), options(stub.url))
        records = [await send(target) for _ in range(3)]
        await target.close()
    assert all(record.ok for record in records) and stub.num_connections == 2 and len(stub.requests) == 4


@pytest.mark.parametrize(
    ("strategy", "connections"), [("pooled", 1), ("never", 4), ("sticky-user-sessions", 2)]
)
async def test_connections_follow_the_strategy(strategy, connections):
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(chunk(content="a"), DONE))

    async with stub_server(handle) as stub:
        given = options(stub.url, connections=strategy)
        target = HttpTarget(ChatEndpoint(given), given)
        for session in ("a", "b", "a", "b"):
            assert (await send(target, session=session)).ok
        await target.close()
    assert stub.num_connections == connections


async def test_requests_go_to_all_urls_in_turn():
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(chunk(content="a"), DONE))

    async with stub_server(handle) as one, stub_server(handle) as two:
        given = EndpointOptions(models=("m",), urls=(one.url, two.url), streaming=True)
        target = HttpTarget(ChatEndpoint(given), given)
        for _ in range(4):
            await send(target)
        await target.close()
    assert len(one.requests) == len(two.requests) == 2


async def _silent(_: StubRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def test_a_request_without_response_times_out():
    async with stub_server(_silent) as stub:
        given = options(stub.url, request_timeout=0.05)
        record = await send(HttpTarget(ChatEndpoint(given), given))
    assert record.error_kind == "timeout" and "0.05 s" in record.error_message


async def test_each_request_times_out_at_its_own_time():
    async with stub_server(_silent) as stub:
        given = options(stub.url, request_timeout=0.2)
        target = HttpTarget(ChatEndpoint(given), given)
        first = asyncio.ensure_future(send(target))
        await asyncio.sleep(0.1)
        records = await asyncio.gather(first, send(target))
        await target.close()
    assert [record.error_kind for record in records] == ["timeout", "timeout"]
    assert all(record.end_ns - record.start_ns >= 0.19e9 for record in records)


async def test_a_cancelled_request_closes_its_connection_and_is_no_error():
    async with stub_server(_silent) as stub:
        target = HttpTarget(ChatEndpoint(options(stub.url)), options(stub.url))
        record = await send(target, cancel_after=0.02)
        assert record.cancelled and not record.error_kind
        waiting = asyncio.ensure_future(send(target))
        await until(lambda: len(stub.requests) == 2)
        target.cancel_all()
        assert (await waiting).cancelled


async def test_a_server_that_does_not_listen_is_a_connect_error():
    record = await send(HttpTarget(ChatEndpoint(options("127.0.0.1:9")), options("127.0.0.1:9")))
    assert record.error_kind == "connect" and "127.0.0.1:9" in record.error_message and record.end_ns


async def test_headers_and_key_are_sent():
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(chunk(content="a"), DONE))

    async with stub_server(handle) as stub:
        given = options(stub.url + "/base", headers=("X-Team: blue",), api_key="secret", path="/custom")
        target = HttpTarget(ChatEndpoint(given), given)
        assert (await send(target)).ok
        await target.close()
    [request] = stub.requests
    assert request.path == "/base/custom" and request.headers["x-team"] == "blue"
    assert request.headers["authorization"] == "Bearer secret"
    assert orjson.loads(request.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_tls_verifies_the_server(tmp_path):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(stream(chunk(content="a"), DONE))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for fields, kind in (({"ca_file": tmp_path / "ca.pem"}, ""), ({"insecure": True}, ""), ({}, "connect")):
        target = HttpTarget(ChatEndpoint(options(url, **fields)), options(url, **fields))
        record = await send(target)
        await target.close()
        assert record.error_kind == kind, record.error_message
    server.close()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://no-such-host.invalid", "http://x:port"])
def test_bad_urls_are_refused(url):
    with pytest.raises(PerfError, match="--url"):
        HttpTarget(ChatEndpoint(options(url)), options(url))


async def test_a_request_that_the_endpoint_cannot_send_is_an_error():
    given = options("127.0.0.1:9")
    record = await send(
        HttpTarget(CompletionsEndpoint(given), given), PerfRequest(messages=[{"role": "user"}])
    )
    assert record.error_kind == "build" and "texts" in record.error_message
