"""Images that chats name by URLs, fetched from where the server's owner allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from neso.frontends.openai.errors import ApiError, invalid

if TYPE_CHECKING:
    from neso.frontends.openai.chat.public_http import PublicHttp


MAX_BYTES = 20 * 1024 * 1024
"""Of one image, as sent."""
MAX_SECONDS = 10.0
"""For one image, with its redirects."""
MAX_URLS = 32
"""Of one chat."""
MAX_REDIRECTS = 3
ANY = "*"


class Media:
    """Fetches images over HTTP and HTTPS, from `domains` only ("*": any), and not by redirects to another host."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._http: PublicHttp | None = None

    async def fetched(self, images: tuple[Any, ...]) -> tuple[Any, ...]:
        """`images` with the bytes of files in place of URLs, if any are allowed at all. Raises `ApiError`."""
        urls = list(dict.fromkeys(filter(_is_url, images))) if self._domains else []
        if not urls:
            return images
        if len(urls) > MAX_URLS:
            raise _refusal(f"there are {len(urls)} URLs of images, at most {MAX_URLS} are fetched")
        tasks = [asyncio.ensure_future(self._fetch(url)) for url in urls]
        try:
            files = dict(zip(urls, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(files[image] if _is_url(image) else image for image in images)

    async def close(self) -> None:
        """Close connections that are kept."""
        if self._http is not None:
            await self._http.close()

    async def _fetch(self, url: str) -> bytes:
        # Takes a tenth of a second to import, which most servers need not spend.
        from neso.frontends.openai.chat.public_http import FetchError, PublicHttp

        self._http = self._http or PublicHttp()
        try:
            return await asyncio.wait_for(self._follow(url, self._http), MAX_SECONDS)
        except asyncio.TimeoutError:
            raise _refusal(f"{_shown(url)} took longer than {MAX_SECONDS:g} s") from None
        except FetchError as error:
            raise _refusal(f"{_shown(url)} cannot be fetched: {error}") from None

    async def _follow(self, url: str, http: PublicHttp) -> bytes:
        first = url
        for _ in range(MAX_REDIRECTS + 1):
            if self._allowed_host(url) != self._allowed_host(first):
                raise _refusal(f"{_shown(first)} leads to another host")
            answer = await http.get(url, MAX_BYTES)
            if isinstance(answer, bytes):
                return answer
            url = answer.url
        raise _refusal(f"{_shown(first)} is behind more than {MAX_REDIRECTS} redirects")

    def _allowed_host(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").lower(), parts.port
            url.encode("ascii")
        except ValueError:
            raise _refusal("an image's URL is none") from None
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise _refusal(f"{_shown(url)} is no URL of HTTP or HTTPS")
        if host not in self._domains and ANY not in self._domains:
            raise _refusal(f"the server fetches no images from {host}")
        return host


def _is_url(image: Any) -> bool:
    return isinstance(image, str) and image[:8].lower().startswith(("http://", "https://"))


def _shown(url: str) -> str:
    """A URL as it may stand in a message: without what may be secret in it."""
    return url.partition("?")[0][:200]


def _refusal(message: str) -> ApiError:
    return invalid("messages", f"Invalid 'messages': {message}.")
