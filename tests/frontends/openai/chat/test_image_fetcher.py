"""Images by URL: allowed domains, public addresses, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from neso.frontends.openai.chat import image_fetcher, public_http
from neso.frontends.openai.chat.image_fetcher import ImageFetcher
from neso.frontends.openai.chat.public_http import is_public
from neso.frontends.openai.errors import ApiError

FILE = b"\x89PNG not really"


@pytest.fixture
async def site() -> AsyncIterator[str]:
    """A local web site."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().partition("?")[0]
        status, extra, body = "200 OK", "", FILE
        if path == "/there":
            status, extra, body = "302 Found", "Location: /image\r\n", b""
        elif path == "/round":
            status, extra, body = "302 Found", "Location: /round\r\n", b""
        elif path == "/elsewhere":
            status, extra, body = "302 Found", "Location: http://127.0.0.1:1/x\r\n", b""
        elif path == "/gone":
            status, body = "404 Not Found", b""
        elif path == "/large":
            body = b"x" * 5000
        elif path == "/slow":
            await asyncio.sleep(300)
        head = f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://localhost:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture
async def fetcher(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ImageFetcher]:
    """A fetcher that treats local addresses as public."""
    monkeypatch.setattr(public_http, "is_public", lambda address: True)
    monkeypatch.setattr(image_fetcher, "MAX_BYTES", 1000)
    monkeypatch.setattr(image_fetcher, "MAX_SECONDS", 60.0)
    made = ImageFetcher(["localhost"])
    yield made
    await made.close()


async def test_urls_are_replaced_by_files(fetcher: ImageFetcher, site: str) -> None:
    images: tuple[Any, ...] = (
        "data:image/png;base64,AAAA",
        f"{site}/image",
        b"bytes",
        f"{site}/there?key=secret",
    )
    assert await fetcher.fetch(images) == (images[0], FILE, b"bytes", FILE)


async def test_nothing_is_fetched_by_default(site: str) -> None:
    assert await ImageFetcher([]).fetch((f"{site}/image",)) == (f"{site}/image",)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/gone", "status 404"),
        ("/large", "larger than 1000 bytes"),
        ("/slow", "longer than 2 s"),
        ("/round", "more than 3 redirects"),
        ("/elsewhere", "fetches no images from 127.0.0.1"),
    ],
)
async def test_failed_fetches(
    fetcher: ImageFetcher, site: str, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    if path == "/slow":
        monkeypatch.setattr(image_fetcher, "MAX_SECONDS", 2.0)
    with pytest.raises(ApiError, match=why) as caught:
        await fetcher.fetch((f"{site}{path}?key=secret",))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.com/x.png", "fetches no images from example.com"),
        ("http://localhost@evil.com/x.png", "not a valid HTTP"),
        ("http:///x.png", "not a valid HTTP"),
        ("http://[::1/x.png", "invalid URL"),
        ("http://localhost:x/x.png", "invalid URL"),
        ("http://localhost:1/x.png", "cannot be fetched"),
    ],
)
async def test_invalid_urls(fetcher: ImageFetcher, url: str, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        await fetcher.fetch((url,))


async def test_redirects_to_another_host_are_not_followed(
    fetcher: ImageFetcher, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_domains", frozenset({"*"}))
    with pytest.raises(ApiError, match="another host"):
        await fetcher.fetch((f"{site}/elsewhere",))


async def test_private_addresses_are_rejected(site: str) -> None:
    everywhere = ImageFetcher(["*"])
    for url in (
        f"{site}/image",
        "http://10.0.0.1/x",
        "http://169.254.169.254/x",
        "http://[::ffff:127.0.0.1]/x",
    ):
        with pytest.raises(ApiError, match="no public address"):
            await everywhere.fetch((url,))
    await everywhere.close()


async def test_too_many_urls() -> None:
    with pytest.raises(ApiError, match="at most 32"):
        await ImageFetcher(["a"]).fetch(tuple(f"http://a/{number}" for number in range(33)))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:0a00:0001::", False),
        ("2606:4700:4700::1111", True),
    ],
)
def test_is_public(address: str, public: bool) -> None:
    assert is_public(address) == public
