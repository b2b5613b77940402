"""Fuzzing of the HTTP frontend: almost valid, truncated and split requests."""

from __future__ import annotations

import json
import re

from fuzz_oracle import check_message
from fuzz_profile import fuzz_settings
from fuzz_server import FuzzServer
from http_exchange import Reply, exchange
from http_messages import HEADER_NAMES, Message, generate_messages, infer_messages, messages
from hypothesis import example, given
from hypothesis import strategies as st

CLOSE = [(b"Connection", b"close")]
# Allowed statuses. 500 would be a server bug, since no model fails.
STATUSES = {200, 400, 403, 404, 405, 411, 413, 414, 417, 431, 501, 503, 505}
# Except for these errors, which are internal in Triton.
MAY_BE_INTERNAL = re.compile(rb'\{"error":"(Unable to open shared memory region|load failed|failed to load)')


def check(reply: Reply, *, whole: bool = True) -> None:
    internal = reply.status == 500 and MAY_BE_INTERNAL.match(reply.body)
    assert reply.status in STATUSES or internal, (reply.status, reply.body)
    assert reply.complete or not whole, reply
    if reply.body and reply.headers.get(b"content-encoding") in (None, b"identity"):
        text = reply.body.decode("utf-8", "replace")
        if reply.status != 200:
            found = json.loads(text)
            assert list(found) == ["error"], found
            check_message(found["error"])
        elif '"error"' in text:
            check_message(text)


def send_message(server: FuzzServer, message: Message) -> list[Reply]:
    patience = 0.3 if message.has_framing_headers else None
    replies = exchange(server.http.port, [message.encode()], expected=1, patience=patience)
    server.check_sane()
    return replies


@fuzz_settings
@given(messages())
def test_one_request(server, message):
    message.headers.extend(CLOSE)
    replies = send_message(server, message)
    odd = message.has_framing_headers or message.method == b"HEAD"
    assert len(replies) == 1 or odd, replies
    for reply in replies:
        check(reply, whole=not odd)


@fuzz_settings
@given(
    st.one_of(infer_messages(), generate_messages()), st.sampled_from(HEADER_NAMES), st.binary(max_size=12)
)
@example(Message(b"POST", b"/v2/models/echo/infer", [], b"{}"), b"Inference-Header-Content-Length", b"\xb2")
@example(
    Message(b"POST", b"/v2/models/echo/infer", [], b"{}"), b"Inference-Header-Content-Length", b"9" * 5000
)
def test_any_header_value(server, message, name, value):
    value = value.replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")
    message.headers.append((name, value))
    message.headers.extend(CLOSE)
    for reply in send_message(server, message):
        check(reply)


@fuzz_settings
@given(st.lists(st.one_of(infer_messages(), generate_messages()), min_size=2, max_size=6), st.data())
def test_pipelined_requests_split_anywhere(server, sent, data):
    wire = b"".join(message.encode() for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    pieces = [wire[low:high] for low, high in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    replies = exchange(server.http.port, [piece for piece in pieces if piece], expected=len(sent))
    server.check_sane()
    assert len(replies) == len(sent), "every request is answered, once"
    for reply in replies:
        check(reply)


@fuzz_settings
@given(messages(), st.data())
def test_disconnecting_clients(server, message, data):
    wire = message.encode()
    cut = data.draw(st.integers(0, len(wire)))
    exchange(server.http.port, [wire[:cut]] if cut else [], expected=1, read=False)
    server.check_sane()


@fuzz_settings
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_random_bytes(server, pieces):
    for reply in exchange(server.http.port, [*pieces, b"\r\n\r\n\r\n"], expected=1, patience=0.3):
        check(reply)
    server.check_sane()


def test_no_requests_or_tasks_remain(server):
    """Runs last."""
    server.check_idle()
