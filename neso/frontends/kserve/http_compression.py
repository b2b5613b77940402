"""Compression of bodies with Triton's two codings: gzip, and deflate (the zlib format)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from neso.frontends.kserve.errors import INPUT_SIZE_HINT
from neso.frontends.transport.http1 import Response
from neso.server.errors import InvalidArgument, Unsupported

GZIP = "gzip"
DEFLATE = "deflate"
IDENTITY = "identity"

# `wbits` of zlib: the largest window, plus 16 for the gzip format.
_WINDOW = {GZIP: zlib.MAX_WBITS + 16, DEFLATE: zlib.MAX_WBITS}
_LEVEL = 1  # higher levels take several times as long and barely shrink tensors further


class UnsupportedEncoding(Unsupported):
    """The coding of a request body is unknown; the response lists the supported codings (`ACCEPTED`)."""


ACCEPTED = (("Accept-Encoding", f"{GZIP}, {DEFLATE}"),)


def decompress(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Decompress the body of a request with the Content-Encoding `encoding`.

    Raises `UnsupportedEncoding`, and `InvalidArgument` for data that is corrupt, not exactly one complete stream, or
    larger than `limit` bytes when decompressed.
    """
    coding = (encoding or IDENTITY).strip().lower() or IDENTITY
    if coding == IDENTITY:
        return body
    window = _WINDOW.get(coding)
    if window is None:
        raise UnsupportedEncoding("Unsupported compression type")
    decompressor = zlib.decompressobj(window)
    try:
        # One byte over the limit detects an excess; a max_length of 0 would mean no limit.
        data = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise _decompress_error(coding, str(error)) from None
    if len(data) > limit:
        raise InvalidArgument(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. {INPUT_SIZE_HINT}"
        )
    if not decompressor.eof:
        raise _decompress_error(coding, "it is cut off")
    if decompressor.unused_data:
        # gzip allows several members, but a body with millions of empty members would take hours.
        raise _decompress_error(coding, f"{len(decompressor.unused_data)} bytes follow its end")
    return data


def accepted_encoding(header: str | None) -> str:
    """Return the preferred response coding of an Accept-Encoding header. Ties: gzip before deflate.

    "identity" if the client accepts neither or prefers an uncompressed body.
    """
    if not header:
        return IDENTITY
    weights = _weights(header)
    others = weights.get("*", 0.0)
    best = max((GZIP, DEFLATE), key=lambda coding: weights.get(coding, others))
    weight = weights.get(best, others)
    return best if weight > 0 and weight >= weights.get(IDENTITY, 0.0) else IDENTITY


def compress(response: Response, encoding: str) -> Response:
    """Compress the body of a response.

    Inference-Header-Content-Length remains the length of the JSON before compression, as clients expect.
    """
    if encoding == IDENTITY or not response.size:
        return response
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    body: Sequence[bytes | memoryview] = (
        [response.body] if isinstance(response.body, bytes) else response.body
    )
    compressed = b"".join([*map(compressor.compress, body), compressor.flush()])
    headers = (*response.headers, ("Content-Encoding", encoding))
    return Response(compressed, response.status, response.content_type, headers)


def _decompress_error(coding: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"failed to decompress the {coding} request body: {reason}")


def _weights(header: str) -> dict[str, float]:
    """Parse the q-values of an Accept-Encoding header by coding; invalid values count as 0."""
    weights: dict[str, float] = {}
    for entry in header.lower().split(","):
        coding, *parameters = (part.strip() for part in entry.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        weights[coding] = weight
    return weights
