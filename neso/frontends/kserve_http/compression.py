"""Compressed bodies, by the two codings that Triton knows: gzip, and deflate (which is zlib's format)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from neso.frontends.transport.http1 import Response
from neso.server.errors import InvalidArgument, Unsupported

GZIP = "gzip"
DEFLATE = "deflate"
IDENTITY = "identity"

# zlib's `wbits`: the largest window, and 16 more for gzip's header and trailer.
_WINDOW = {GZIP: zlib.MAX_WBITS + 16, DEFLATE: zlib.MAX_WBITS}
_LEVEL = 1  # tensors barely shrink further at higher levels, which take several times as long


class UnsupportedEncoding(Unsupported):
    """A request body in a coding that is not known here; the answer names those that are, in `ACCEPTED`."""


ACCEPTED = (("Accept-Encoding", f"{GZIP}, {DEFLATE}"),)


def decompress(body: bytes, encoding: str | None, limit: int) -> bytes:
    """The body of a request as it was before `encoding`, the value of its Content-Encoding header.

    Raises `UnsupportedEncoding`, and `InvalidArgument` for data that are broken, not one whole stream, or would
    become more than `limit` bytes.
    """
    coding = (encoding or IDENTITY).strip().lower() or IDENTITY
    if coding == IDENTITY:
        return body
    window = _WINDOW.get(coding)
    if window is None:
        raise UnsupportedEncoding("Unsupported compression type")
    decompressor = zlib.decompressobj(window)
    try:
        # One byte over the limit tells that there are too many; 0 would mean no limit.
        data = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise _broken(coding, str(error)) from None
    if len(data) > limit:
        raise InvalidArgument(
            f"the {coding} request body exceeds the limit of {limit} bytes once decompressed"
        )
    if not decompressor.eof:
        raise _broken(coding, "it is cut off")
    if decompressor.unused_data:
        # gzip allows further members, but a body of millions of empty ones would take hours.
        raise _broken(coding, f"{len(decompressor.unused_data)} bytes follow its end")
    return data


def accepted_encoding(header: str | None) -> str:
    """What to compress a response by: the coding that Accept-Encoding weighs highest, gzip before deflate.

    "identity" where the client accepts neither, and where it prefers a body that is not compressed.
    """
    if not header:
        return IDENTITY
    weights = _weights(header)
    others = weights.get("*", 0.0)
    best = max((GZIP, DEFLATE), key=lambda coding: weights.get(coding, others))
    weight = weights.get(best, others)
    return best if weight > 0 and weight >= weights.get(IDENTITY, 0.0) else IDENTITY


def compress(response: Response, encoding: str) -> Response:
    """The response with its body compressed, buffer by buffer. The other headers stay as they are.

    So Inference-Header-Content-Length is still that of the JSON before compression, as clients expect.
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


def _broken(coding: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"failed to decompress the {coding} request body: {why}")


def _weights(header: str) -> dict[str, float]:
    """The codings of an Accept-Encoding header, each with its q-value; what cannot be read counts as 0."""
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
