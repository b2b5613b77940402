"""Fetching of images that chat messages reference by URL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from neso.frontends.openai.errors import ApiError, invalid

if TYPE_CHECKING:
    from neso.frontends.openai.chat.public_http import PublicHttpClient

MAX_BYTES = 20 * 1024 * 1024
"""Maximum size of an encoded image."""
MAX_SECONDS = 10.0
"""Time limit per image, including redirects."""
MAX_URLS = 32
"""Maximum number of URLs per chat."""
MAX_REDIRECTS = 3
ANY_DOMAIN = "*"


class ImageFetcher:
    """Fetches images over HTTP and HTTPS from allowed `domains` ("*": any). Redirects must stay on the same host."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._http: PublicHttpClient | None = None

    async def fetch(self, images: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace URLs in `images` by the fetched bytes; no change if no domain is allowed. Raises `ApiError`."""
        urls = list(dict.fromkeys(filter(_is_url, images))) if self._domains else []
        if not urls:
            return images
        if len(urls) > MAX_URLS:
            raise _error(f"there are {len(urls)} URLs of images, at most {MAX_URLS} are fetched")
        tasks = [asyncio.ensure_future(self._fetch(url)) for url in urls]
        try:
            files = dict(zip(urls, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(files[image] if _is_url(image) else image for image in images)

    async def close(self) -> None:
        """Close idle connections."""
        if self._http is not None:
            await self._http.close()

    async def _fetch(self, url: str) -> bytes:
        # Imported on demand: the import takes 100 ms, and most servers do not fetch images.
        from neso.frontends.openai.chat.public_http import FetchError, PublicHttpClient

        self._http = self._http or PublicHttpClient()
        try:
            return await asyncio.wait_for(self._follow(url, self._http), MAX_SECONDS)
        except asyncio.TimeoutError:
            raise _error(f"{_redacted(url)} took longer than {MAX_SECONDS:g} s") from None
        except FetchError as error:
            raise _error(f"{_redacted(url)} cannot be fetched: {error}") from None

    async def _follow(self, url: str, http: PublicHttpClient) -> bytes:
        first = url
        for _ in range(MAX_REDIRECTS + 1):
            if self._allowed_host(url) != self._allowed_host(first):
                raise _error(f"{_redacted(first)} leads to another host")
            fetched = await http.get(url, MAX_BYTES)
            if isinstance(fetched, bytes):
                return fetched
            url = fetched.url
        raise _error(f"{_redacted(first)} is behind more than {MAX_REDIRECTS} redirects")

    def _allowed_host(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").lower(), parts.port
            url.encode("ascii")
        except ValueError:
            raise _error("an image has an invalid URL") from None
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise _error(f"{_redacted(url)} is not a valid HTTP or HTTPS URL")
        if host not in self._domains and ANY_DOMAIN not in self._domains:
            raise _error(f"the server fetches no images from {host}")
        return host


def _is_url(image: Any) -> bool:
    return isinstance(image, str) and image[:8].lower().startswith(("http://", "https://"))


def _redacted(url: str) -> str:
    """Return the URL for error messages: without the query, which may contain secrets."""
    return url.partition("?")[0][:200]


def _error(message: str) -> ApiError:
    return invalid("messages", f"Invalid 'messages': {message}.")
