"""A model whose responses are cached in Redis: a request waits for the cache's answer before it is executed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.response_cache.cached_model import CachedModel, Miss
from neso.server.response_cache.key import request_key
from neso.server.response_cache.response import FORMAT, CachedResponse

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.response_cache.redis import RedisCache

logger = logging.getLogger(__name__)

PREFIX = "neso"


class RemoteCachedModel(CachedModel[str]):
    """Keys are `neso:<model>:<version>:<hash>`. The hash is of the request, the configuration and the version's files.

    So servers with the same model share what they cached, and a model that was changed does not get what the old one
    said.
    """

    def __init__(
        self,
        context: ModelContext,
        cache: RedisCache,
        start: Callable[[ResponseStream], None],
        ended: Callable[[ResponseStream], None],
    ) -> None:
        super().__init__(context, start, ended)
        self._cache = cache
        self._tasks: set[asyncio.Task[Any]] = set()
        config = context.config.SerializeToString(deterministic=True)
        # Large files take their time: requests wait, the event loop does not.
        self._fingerprint = self._begin(asyncio.to_thread(fingerprint, config, context.version_directory))

    async def close(self) -> None:
        """Give up what is asked and stored at the moment."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, stream: ResponseStream) -> bool:
        self._begin(self._look_up(stream))
        stream.fail_if_cancelled_while_waiting()
        return True

    async def _look_up(self, stream: ResponseStream) -> None:
        started = time.monotonic_ns()
        key, found = "", None
        try:
            key = await self._key(stream.request)
            found = await self._cache.get(key)
        except Exception:  # a cache that fails must not fail a request
            logger.exception("the response cache of model '%s' failed", self._name)
        if stream.closed:  # cancelled, or the model is unloaded
            return
        if found is not None:
            self._answer(stream, found, started)
            return
        if key:
            self._miss(stream, key, started)
        self._start(stream)

    async def _key(self, request: InferenceRequest) -> str:
        scope = (FORMAT, self._name, self._version, await asyncio.shield(self._fingerprint))
        digest = request_key(scope, request.inputs, request.requested_outputs, request.parameters)
        return f"{PREFIX}:{self._name}:{self._version}:{digest.hex()}"

    def _keep(self, miss: Miss[str]) -> None:
        if len(miss.responses) == 1:
            kept = miss.responses[0]
            self._begin(self._put(miss, CachedResponse.copy_of(kept.outputs, kept.parameters)))
        else:
            self._count(miss, time.monotonic_ns())

    async def _put(self, miss: Miss[str], response: CachedResponse) -> None:
        started = time.monotonic_ns()
        try:
            await self._cache.put(miss.key, response)
        except Exception:
            logger.exception("the response cache of model '%s' failed", self._name)
        self._count(miss, started)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def fingerprint(config: bytes, version_directory: Path) -> str:
    """A hash of a configuration and of all files of a version. Blocks. Raises `OSError`."""
    digest = hashlib.sha256(hashlib.sha256(config).digest())
    for path in sorted(version_directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            # Of each part its own hash: their lengths do not matter then.
            digest.update(hashlib.sha256(str(path.relative_to(version_directory)).encode()).digest())
            digest.update(_hash_of_file(path))
    return digest.hexdigest()


def _hash_of_file(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()
