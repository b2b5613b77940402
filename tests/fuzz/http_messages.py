"""Almost valid HTTP requests."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fuzz_server import ECHO, TYPES
from hypothesis import strategies as st
from json_mutations import mutated

Headers = list[tuple[bytes, bytes]]

PATHS = [
    b"/v2", b"/v2/health/live", b"/v2/health/ready", b"/v2/models/stats", b"/v2/models/echo",
    b"/v2/models/echo/config", b"/v2/models/echo/stats", b"/v2/models/echo/versions/1",
    b"/v2/models/echo/versions/" + b"9" * 40, b"/v2/models/echo/versions/" + b"9" * 5000,
    b"/v2/models/echo/versions/\xb2", b"/v2/models/%FF%00/ready", b"/v2//models", b"/v2/models/..%2f..%2fetc/config",
    b"/v2/systemsharedmemory/status", b"*", b"/", b"http://a/v2", b"/v2?x=1#y",
]  # fmt: skip
SAMPLES: dict[str, Any] = {
    "BOOL": [True, False],
    "UINT8": [1, 255],
    "INT32": [-1, 2],
    "INT64": [-1, 2],
    "UINT64": [1, 2],
    "FP32": [1.5, -2],
    "FP64": [1.5, -2],
    "BYTES": ["a", "é"],
}
HEADER_VALUES = [
    b"0", b"1", b"-1", b"12", b"99999999", b"9" * 30, b"9" * 5000, b"", b"x", b"1.5", b" 7", b"0x10", b"\xb2", b"1,1",
    b"gzip", b"deflate", b"identity", b"br", b"gzip, deflate", b"gzip;q=0", b"*;q=nan", b"text", b"json", b"\xff\xfe",
]  # fmt: skip
HEADER_NAMES = [
    b"Inference-Header-Content-Length", b"Content-Encoding", b"Accept-Encoding", b"Content-Type", b"Expect",
    b"endpoint-load-metrics-format", b"Connection", b"X-Other", b"traceparent",
]  # fmt: skip
MODEL = base64.b64encode(ECHO.encode()).decode()
FRAMING_NAMES = [
    b"Content-Length",
    b"Transfer-Encoding",
    b"Host",
    b"Upgrade",
    b"Content-Length\t",
    b"Bad Name",
    b"",
]


@dataclass
class Message:
    method: bytes
    path: bytes
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    chunks: list[int] | None = None

    @property
    def has_framing_headers(self) -> bool:
        """Return whether the server may expect more bytes, or parse a number of requests other than one."""
        return self.method == b"CONNECT" or any(name in FRAMING_NAMES for name, _ in self.headers)

    def encode(self) -> bytes:
        """Return the bytes of the request. Framing headers are correct unless `headers` overrides them."""
        given = {name.lower() for name, _ in self.headers}
        headers = [] if b"host" in given else [(b"Host", b"fuzz")]
        body = self.body
        if self.chunks is not None:
            headers.append((b"Transfer-Encoding", b"chunked"))
            body = _chunked(body, self.chunks)
        elif b"content-length" not in given and (body or self.method == b"POST"):
            headers.append((b"Content-Length", b"%d" % len(body)))
        lines = [b"%s %s HTTP/1.1" % (self.method, self.path)]
        lines += [b"%s: %s" % header for header in [*headers, *self.headers]]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _chunked(body: bytes, sizes: list[int]) -> bytes:
    parts = []
    for size in sizes:
        part, body = body[:size], body[size:]
        if part:
            parts.append(b"%x\r\n%s\r\n" % (len(part), part))
    if body:
        parts.append(b"%x\r\n%s\r\n" % (len(body), body))
    return b"".join(parts) + b"0\r\n\r\n"


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, Any], bytes]:
    """Return a model, a valid infer request for it, and the binary data after the JSON."""
    model = draw(st.sampled_from(["echo", "batched", "pipeline", "sequence", "text"]))
    if model == "echo":
        names = draw(st.lists(st.sampled_from(list(TYPES)), min_size=1, max_size=3, unique=True))
        arrays = {f"IN_{name}": (name, [2], SAMPLES.get(name)) for name in names}
    elif model == "sequence":
        arrays = {"IN": ("INT32", [1, 1], [5])}
    elif model == "text":
        arrays = {"PROMPT": ("BYTES", [1], ["hi"])}
    else:
        arrays = {"IN": ("FP32", [1, 2, 2], [1, 2, 3, 4])}
    inputs, binary = [], b""
    for name, (datatype, shape, data) in arrays.items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if data is not None and draw(st.booleans()):
            entry["data"] = data
        else:
            blob = _wire(datatype, shape, data)
            entry["parameters"] = {"binary_data_size": len(blob)}
            binary += blob
        inputs.append(entry)
    document: dict[str, Any] = {"id": "7", "inputs": inputs, "outputs": [], "parameters": {}}
    if draw(st.booleans()):
        document["outputs"] = [{"name": "OUT", "parameters": {"binary_data": True, "classification": 0}}]
    if model == "sequence":
        document["parameters"] = {"sequence_id": 3, "sequence_start": True, "sequence_end": True}
    return model, document, binary


def _wire(datatype: str, shape: list[int], data: Any) -> bytes:
    if datatype == "BYTES":
        texts = [text.encode() for text in data]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    sizes = {"BOOL": 1, "UINT8": 1, "FP16": 2, "BF16": 2, "INT32": 4, "FP32": 4}
    return bytes(int(np.prod(shape)) * sizes.get(datatype, 8))


@st.composite
def infer_messages(draw: st.DrawFn) -> Message:
    model, document, binary = draw(documents())
    text = _dump(draw(mutated(document)))
    headers: Headers = []
    if binary:
        headers.append((b"Inference-Header-Content-Length", b"%d" % len(text)))
    return Message(b"POST", b"/v2/models/%s/infer" % model.encode(), headers, text + binary)


@st.composite
def generate_messages(draw: st.DrawFn) -> Message:
    model = draw(st.sampled_from([b"text", b"echo", b"repeat"]))
    document = {
        b"text": {"PROMPT": "hi", "STREAM": True, "temperature": 0.5, "parameters": {"max_tokens": 5}},
        b"echo": {"IN_BYTES": ["a", "b"], "IN_FP32": 1.5, "IN_BOOL": True, "id": "9"},
        b"repeat": {"COUNT": 3},
    }[model]
    route = draw(st.sampled_from([b"generate", b"generate_stream"]))
    text = _dump(draw(mutated(document)))
    if draw(st.integers(0, 9)) == 0:
        text = text.replace(b'"COUNT"', b'"COUNT": 1, "COUNT"')
    return Message(b"POST", b"/v2/models/%s/%s" % (model, route), [], text)


@st.composite
def other_messages(draw: st.DrawFn) -> Message:
    """Return management requests and unknown paths; models of other tests are not unloaded."""
    post = {
        b"/v2/repository/index": {"ready": True},
        b"/v2/repository/models/absent/load": {"parameters": {"config": "{}", "file:1/model.py": MODEL}},
        b"/v2/repository/models/absent/unload": {"parameters": {"unload_dependents": True}},
        b"/v2/systemsharedmemory/region/r/register": {"key": "/neso-fuzz", "offset": 0, "byte_size": 64},
        b"/v2/systemsharedmemory/region/r/unregister": {},
        b"/v2/systemsharedmemory/unregister": {},
        b"/v2/models/echo/versions/1/infer": {"inputs": []},
    }
    if draw(st.booleans()):
        method = draw(
            st.sampled_from([b"GET", b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"NONSENSE"])
        )
        return Message(method, draw(st.sampled_from(PATHS)))
    path = draw(st.sampled_from(list(post)))
    return Message(b"POST", path, [], _dump(draw(mutated(post[path]))))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Return any kind of request, possibly with other headers, compressed, chunked or corrupted."""
    message: Message = draw(
        st.one_of(infer_messages(), infer_messages(), generate_messages(), other_messages())
    )
    for _ in range(draw(st.integers(0, 2))):
        names = HEADER_NAMES if draw(st.integers(0, 3)) else FRAMING_NAMES
        message.headers.append((draw(st.sampled_from(names)), draw(st.sampled_from(HEADER_VALUES))))
    change = draw(st.sampled_from(["", "", "", "gzip", "deflate", "chunked", "bytes", "cut", "more"]))
    body = message.body
    if change == "gzip":
        message.headers.append((b"Content-Encoding", b"gzip"))
        message.body = gzip.compress(body)
    elif change == "deflate":
        message.headers.append((b"Content-Encoding", b"deflate"))
        message.body = zlib.compress(body)
    elif change == "chunked":
        message.chunks = draw(st.lists(st.integers(1, 40), max_size=5))
    if change in ("gzip", "deflate", "bytes") and body and draw(st.booleans()):
        at = draw(st.integers(0, len(message.body) - 1))
        message.body = message.body[:at] + draw(st.binary(max_size=4)) + message.body[at + 1 :]
    elif change == "cut":
        message.body = body[: draw(st.integers(0, len(body)))]
    elif change == "more":
        message.body = body + draw(st.binary(max_size=20))
    return message


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()
