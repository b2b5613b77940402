"""The parsers that run in the server process, as functions of arbitrary bytes.

A target returns normally for invalid input: it catches only the errors that its parser documents. Anything else is a
defect, as is a run that takes seconds or much more memory than its input. `scripts/fuzz.py` runs the targets with
coverage-guided inputs; `test_fuzz_targets.py` runs them with their seeds, with `corpus/TARGET/*` (inputs that showed a
defect) and with random changes of both.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "transport" / "http2"))

import numpy as np
from http2_client import REQUEST, Echo, FakeTransport, frame
from pydantic import BaseModel, ValidationError
from tritonclient.grpc import model_config_pb2, service_pb2

from neso.engine.guided.grammar import GrammarError, grammar_text
from neso.engine.text.gguf_tokenizer import read_gguf_tokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.vision.image_processor import ImageLimits, Normalization, SquareProcessor
from neso.engine.weights.gguf.config import model_config as gguf_model_config
from neso.engine.weights.gguf.file import GGUFFile
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError
from neso.frontends.kserve import grpc_codec, http_codec
from neso.frontends.kserve.generate import read_generate_request
from neso.frontends.kserve.http_compression import decompress
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.openai.chat.schemas import ChatCompletionRequest
from neso.frontends.openai.completions import CompletionRequest
from neso.frontends.openai.errors import ApiError, validation_error
from neso.frontends.openai.pooling import EmbeddingRequest, RerankRequest
from neso.frontends.openai.prompt_embeds import decode_embeddings
from neso.frontends.openai.responses.schemas import ResponseRequest
from neso.frontends.openai.routing import parse_body
from neso.frontends.openai.tokenization import TokenizeRequest
from neso.frontends.transport.http1 import HttpServerOptions, Request
from neso.frontends.transport.http1.parser import RequestParser
from neso.frontends.transport.http2 import (
    Http2Connection,
    Http2Options,
    ServerContext,
    encode_headers,
    frames,
)
from neso.frontends.transport.http2.frames import Http2ConnectionError, Http2StreamError
from neso.frontends.transport.http2.headers import HeaderDecoder
from neso.generation import GuidedDecoding, InvalidParameter
from neso.generation.guided_decoding import read_guided_decoding
from neso.server.config.model_config import check_config, complete_config, config_from_json, read_config
from neso.server.errors import ServerError
from neso.server.shared_memory.regions import SharedMemory
from neso.server.signature import Signature
from neso.server.tensor import DataType, Tensor

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Target:
    """A parser. `seeds`: inputs that it accepts, or nearly."""

    name: str
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]

    def inputs(self) -> list[bytes]:
        """Return the seeds and the corpus."""
        folder = CORPUS / self.name
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [*self.seeds, *(file.read_bytes() for file in files)]


TARGETS: dict[str, Target] = {}


def target(*seeds: bytes) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Register a function as a target with its name."""

    def register(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run.__name__, run, seeds)
        return run

    return register


# Transport.

_HTTP1 = HttpServerOptions(max_body=4096, max_head=1024)
_GET = b"GET /v2?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
_POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
_CHUNKED = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nA: b\r\n\r\n"
_OTHERS = (
    b"POST http://h/ HTTP/1.0\r\nExpect: 100-continue\r\nConnection: keep-alive\r\nUpgrade: h2c"
    b"\r\nContent-Length: 1\r\n\r\nx"
)


@target(_GET + _POST, _CHUNKED + _GET, _OTHERS)
def http1(data: bytes) -> None:
    """Bytes arrive at once, or in pieces: the requests are the same."""
    whole, pieces = RequestParser(_HTTP1), RequestParser(_HTTP1)
    whole.feed(data)
    for start in range(0, len(data), 7):
        pieces.feed(data[start : start + 7])
    ours = [(r.method, r.raw_path, r.query, r.headers, r.body) for r in whole.requests]
    assert ours == [(r.method, r.raw_path, r.query, r.headers, r.body) for r in pieces.requests]


_BLOCK = encode_headers([(name.encode(), value.encode()) for name, value in REQUEST])
_SETTINGS = frame(frames.SETTINGS, 0, 0, struct.pack(">HIHI", 3, 7, 4, 70000))


@target(
    _SETTINGS + frame(frames.HEADERS, 4, 1, _BLOCK) + frame(frames.DATA, 1, 1, b"hi"),
    _SETTINGS + frame(frames.HEADERS, 0, 1, _BLOCK[:9]) + frame(frames.CONTINUATION, 5, 1, _BLOCK[9:]),
    frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\1") + frame(frames.PING, 0, 0, bytes(8)),
    frame(frames.HEADERS, 5, 3, _BLOCK)
    + frame(frames.RST_STREAM, 0, 3, bytes(4))
    + frame(frames.GOAWAY, 0, 0, bytes(8)),
)
def http2(data: bytes) -> None:
    """Frames after the preface. A connection that fails is closed without an internal error."""

    async def run() -> None:
        context = ServerContext(Echo(), Http2Options(turn=60.0))
        connection, transport = Http2Connection(context), FakeTransport()
        transport.protocol = connection
        connection.connection_made(transport)
        connection.data_received(frames.PREFACE)
        for start in range(0, len(data), 50):
            connection.data_received(data[start : start + 50])
        assert b"internal error" not in transport.written
        connection.connection_lost(None)
        assert not connection.streams

    asyncio.run(run())


@target(
    _BLOCK,
    b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff",
    b"\x3f\xe1\x1f\x40\x01a\x01b\xbe",
)
def hpack(data: bytes) -> None:
    """Header blocks of one connection: the first half, then the second half, then the first again."""
    decoder = HeaderDecoder(4096)
    with suppress(Http2ConnectionError, Http2StreamError):
        for block in (data[: len(data) // 2], data[len(data) // 2 :], data[: len(data) // 2]):
            decoder.decode(block).validate_request()


# KServe.

_SHARED_MEMORY = SharedMemory(enabled=False)
_LIMITS = RequestLimits(values=1_000_000)
_CONFIG = """
    max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] }
    input { name: "S" data_type: TYPE_STRING dims: [ 1 ] optional: true }
    output { name: "B" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""


def _fake_model() -> Any:
    from google.protobuf import text_format

    config = text_format.Parse(f'name: "m" backend: "python" {_CONFIG}', model_config_pb2.ModelConfig())
    signature = Signature(config)
    metadata = SimpleNamespace(inputs=signature.metadata(signature.inputs))
    return SimpleNamespace(name="m", config=config, signature=signature, metadata=lambda: metadata)


_MODEL = _fake_model()
_INFER = (
    b'{"id":"1","inputs":[{"name":"A","shape":[1,1,2],"datatype":"FP32","data":[[[1.5,-2e3]]]},{"name'
    b'":"S","shape":[1,1],'
    b'"datatype":"BYTES","data":["x"]}],"outputs":[{"name":"B","parameters":{"binary_data":false,"classification":2}}],'
    b'"parameters":{"sequence_id":5,"priority":1}}'
)
_BINARY = b'{"inputs":[{"name":"A","shape":[1,1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'


@target(
    b"\0" + _INFER,
    bytes([len(_BINARY)]) + _BINARY + bytes(8),
    b"\1" + bytes(8),
    b'\0{"inputs":[{"shape":[0,99]}],"x":NaN}',
)
def infer_json(data: bytes) -> None:
    """A body; the first byte selects the length of the JSON: all, none (a raw tensor), or that number of bytes."""
    lengths = {0: {}, 1: {b"inference-header-content-length": b"0"}}
    headers = lengths.get(
        data[0] if data else 0, {b"inference-header-content-length": b"%d" % (data or b"\0")[0]}
    )
    request = Request("POST", b"/", b"", headers, data[1:])
    with suppress(ServerError):
        inference, _ = http_codec.read_infer_request(request, _MODEL, "", _SHARED_MEMORY, _LIMITS)
        _MODEL.signature.check(inference)


@target(b'{"A":[1,2],"S":"x","parameters":{"n":1},"id":"7"}', b'{"A":NaN,"A":[]}')
def generate_json(data: bytes) -> None:
    """A body of the generate extension."""
    with suppress(ServerError):
        _MODEL.signature.check(read_generate_request(data, _MODEL, ""))


def _infer_message() -> bytes:
    message = service_pb2.ModelInferRequest(model_name="m", id="5", raw_input_contents=[bytes(8)])
    message.inputs.add(name="A", datatype="FP32", shape=[1, 1, 2])
    message.outputs.add(name="B").parameters["classification"].int64_param = 2
    message.parameters["sequence_id"].string_param = "x"
    return message.SerializeToString()  # type: ignore[no-any-return]


def _typed_message() -> bytes:
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="A", datatype="FP32", shape=[1, 1, 2]).contents.fp32_contents.extend([1.0, 2.0])
    message.inputs.add(name="S", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"x")
    return message.SerializeToString()  # type: ignore[no-any-return]


@target(_infer_message(), _typed_message())
def infer_protobuf(data: bytes) -> None:
    """A `ModelInferRequest`. Padding with an unknown field selects the path for large messages."""
    for message in (data, data + b"\xfa\x7f\x80\x80\x04" + bytes(1 << 16)):
        with suppress(ServerError):
            infer = grpc_codec.decode_infer_message(*grpc_codec.scan_infer_message(message, _LIMITS)[1:])
            request, _ = grpc_codec.read_infer_request(infer, _SHARED_MEMORY, _LIMITS)
            _MODEL.signature.check(request)


_TYPES = list(DataType)


@target(*(bytes([number, 1, 1, 2]) + bytes(8) for number in range(len(_TYPES))), b"\x0d\1\2\1\0\0\0a\0\0\0\0")
def binary_tensor(data: bytes) -> None:
    """The datatype, the number of dimensions, the dimensions and the content."""
    if len(data) < 2:
        return
    datatype, rank = _TYPES[data[0] % len(_TYPES)], data[1]
    shape = tuple(byte if byte < 250 else 2**62 for byte in data[2 : 2 + rank])
    with suppress(ServerError):
        tensor = Tensor.from_wire("x", datatype, shape, data[2 + rank :])
        assert Tensor.from_wire("x", datatype, shape, tensor.to_wire()).byte_size == tensor.byte_size


@target(
    b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x4b\x04\0\x43\xbe\xb7\xe8\1\0\0\0",
    b"\x78\x9c\x4b\x04\0\0\x62\0\x62",
)
def compressed(data: bytes) -> None:
    """A compressed body. The result is within the limit."""
    for encoding in ("gzip", "deflate"):
        with suppress(ServerError):
            assert len(decompress(data, encoding, 1 << 16)) <= 1 << 16


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="neso-fuzz-") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


@target(
    _CONFIG.encode(),
    b'name: "m" backend: "python" instance_group [ { count: 2 kind: KIND_CPU } ] parameters { key: "a'
    b'" value { string_value: "b" } }',
    b'platform: "ensemble" ensemble_scheduling { step [ { model_name: "a" model_version: -1 input_map'
    b' { key: "x" value: "y" } } ] }',
    b"sequence_batching { oldest { max_candidate_sequences: 4 } } default_model_filename: 'a/b' max_b"
    b"atch_size: 99999999999",
)
def config_text(data: bytes) -> None:
    """A config.pbtxt."""
    with tempfile.TemporaryDirectory(prefix="neso-fuzz-") as folder:
        directory = Path(folder)
        (directory / "config.pbtxt").write_bytes(data)
        with suppress(ServerError):
            config = read_config(directory)
            complete_config(config, "m", directory)  # type: ignore[arg-type]
            check_config(config, "m")  # type: ignore[arg-type]
            Signature(config)


@target(
    b'{"name":"m","backend":"python","input":[{"name":"A","data_type":"TYPE_FP32","dims":[-1]}],"max_batch_size":8}',
    b'{"x":1}',
)
def config_json(data: bytes) -> None:
    """The configuration of a load request."""
    with suppress(ServerError, UnicodeDecodeError):
        config = config_from_json(data.decode())
        complete_config(config, "m", Path("/nonexistent"))
        check_config(config, "m")


# OpenAI API.

_SCHEMAS: list[type[BaseModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    ResponseRequest,
    EmbeddingRequest,
    RerankRequest,
    TokenizeRequest,
]


@target(
    b'\0{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[{"t'
    b'ype":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"auto","'
    b'stop":["a"]}',
    b'\1{"model":"m","prompt":[1,2],"logprobs":1,"stream":true,"stream_options":{"include_usage":true}}',
    b'\2{"model":"m","input":[{"type":"message","role":"user","content":"x"}],"text":{"format":{"type'
    b'":"json_object"}}}',
    b'\3{"model":"m","input":["a","b"],"dimensions":2}',
    b'\4{"model":"m","query":"a","documents":["b",{"text":"c"}]}',
    b'\5{"prompt":"x"}',
)
def openai_body(data: bytes) -> None:
    """The body of a request; the first byte selects the schema. Errors have a message."""
    if not data:
        return
    try:
        parse_body(data[1:], _SCHEMAS[data[0] % len(_SCHEMAS)], 1_000_000)
    except ApiError as error:
        assert error.status == 400 and json.loads(error.body())["error"]["message"]
    except ValidationError as error:  # pragma: no cover: a body that `parse_body` does not convert
        raise AssertionError(validation_error(error)) from None


def _torch_file() -> bytes:
    import zipfile

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4tQ"
    shape = b"K\0(K\2K\2t(K\2K\1t\x89ccollections\nOrderedDict\n)R"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "a/data.pkl", b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + storage + shape + b"tR."
        )
        archive.writestr("a/data/0", np.arange(4, dtype=np.float32).tobytes())
    return file.getvalue()


def _numpy_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((2, 2), np.float16))
    return file.getvalue()


@target(_torch_file(), _numpy_file())
def prompt_embeddings(data: bytes) -> None:
    """A file of torch.save or numpy.save. The tensor is not larger than the file."""
    import base64

    with suppress(ValueError):
        assert decode_embeddings(base64.b64encode(data).decode()).nbytes <= len(data)


def _image(format: str, **options: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (5, 3), "red").save(file, format, **options)
    return file.getvalue()


_IMAGES = SquareProcessor(
    3, Normalization(1.0, (0.0,) * 3, (1.0,) * 3), ImageLimits(1 << 16), resize_to=(8,), crop=8
)


@target(*(_image(format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")))
def image(data: bytes) -> None:
    """An image file."""
    with suppress(InvalidParameter):
        assert _IMAGES.process(data).pixels.shape == (1, 8, 8, 3)


@target(
    b'{"guided_json":{"type":"object","properties":{"a":{"type":"integer"}}}}',
    b'{"guided_regex":"[a-z]+(x|y){2}"}',
    b'{"guided_choice":["a","b"]}',
    b'{"guided_grammar":"root ::= \\"a\\" | [0-9]+ root"}',
    b'{"structured_outputs":{"structural_tag":{"type":"structural_tag","format":{"type":"tag","begin"'
    b':"<a>","content":{"type":"any_text"},"end":"</a>"}}}}',
    b'{"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"array"}}}}',
)
def grammar(data: bytes) -> None:
    """Parameters of guided decoding, up to the text of the grammar; grammars are compiled in a sandbox process."""
    with suppress(InvalidParameter, GrammarError, ValueError):
        values = json.loads(data)
        guided = read_guided_decoding(values) if isinstance(values, dict) else None
        if isinstance(guided, GuidedDecoding):
            grammar_text(guided, {"<a>": 3})


# Files of models.


def _safetensors(header: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + content


@target(
    _safetensors(b'{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}', bytes(8)),
    _safetensors(b'{"__metadata__":{"x":"y"},"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}', b""),
)
def safetensors(data: bytes) -> None:
    """A safetensors file; every tensor is read."""
    with _file(data) as path, suppress(CheckpointError):
        opened = SafetensorsFile(path)
        for name in opened.names():
            opened.tensor(name)


def _gguf() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, 1),
        text(b"llama.embedding_length") + struct.pack("<II", 4, 32),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b"),
        text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"gpt2"),
        text(b"tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 0),
    ]
    tensor = text(b"output.weight") + struct.pack("<IQIQ", 1, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor
    return head + bytes(-len(head) % 32) + bytes(16)


@target(_gguf())
def gguf(data: bytes) -> None:
    """A GGUF file: its tensors, configuration and tokenizer are read."""
    with _file(data) as path, suppress(CheckpointError, TokenizerError):
        with GGUFFile(path) as opened:
            for name in opened.names():
                opened.tensor(name)
            with suppress(CheckpointError):
                gguf_model_config(opened)
        read_gguf_tokenizer(path)
