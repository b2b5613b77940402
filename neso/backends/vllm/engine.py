"""Wrapper of vLLM's engine: life cycle, requests and error conversion."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from multiprocessing import active_children
from typing import Any

from neso.backends.vllm import library
from neso.backends.vllm.conversion import IMAGES
from neso.backends.vllm.orphan_reaper import OrphanReaper
from neso.generation import InvalidParameter, check_prompt_length
from neso.server.errors import (
    InternalError,
    InvalidArgument,
    Overloaded,
    Restarting,
    ServerError,
    Unavailable,
)

logger = logging.getLogger(__name__)


class RequestRejected(InvalidParameter):
    """A request rejected by vLLM, with vLLM's message. `field`: the invalid parameter, if it can be determined."""

    def __str__(self) -> str:
        return self.message


_WATCH_SECONDS = 0.5
"""Seconds between two looks for processes of an engine that is being started."""
_FIELDS = {"input_tokens": "prompt", "input_text": "prompt", "image": "images"}
"""vLLM's parameter name -> Neso's parameter name, for names that differ."""


class VllmEngine:
    """A running engine, created by `start`. Used on one event loop."""

    def __init__(
        self,
        engine: Any,
        orphan_reaper: OrphanReaper,
        tasks: frozenset[str],
        arguments: Any,
        record: library.Record | None,
    ) -> None:
        self._engine, self._orphan_reaper = engine, orphan_reaper
        self._arguments, self._record = arguments, record
        self._names = itertools.count()
        self._num_requests = 0
        self.tasks = tasks
        self.restarts = False
        """Whether the engine is restarted when it ends; the errors of its requests say so."""

    @classmethod
    async def start(cls, arguments: Any, record: library.Record | None = None) -> VllmEngine:
        """Start the engine's processes and load the model. Raises `InvalidArgument`."""
        engine = cls(*await _start(arguments, record), frozenset(), arguments, record)
        try:
            engine.tasks = await library.supported_tasks(engine._engine)
        except BaseException as error:
            await asyncio.shield(engine.stop())  # its processes would hold the model's memory
            if not isinstance(error, Exception):
                raise
            raise InvalidArgument(f"vLLM cannot load the model: {error}") from None
        return engine

    async def restart(self) -> None:
        """Shut down what is left of an engine that has ended, and start it again. Raises `InvalidArgument`."""
        await self.stop()
        self._engine, self._orphan_reaper = await _start(self._arguments, self._record)

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens."""
        return int(self._engine.model_config.max_model_len)

    @property
    def model_config(self) -> Any:
        """vLLM's `ModelConfig`."""
        return self._engine.model_config

    @property
    def alive(self) -> bool:
        """Whether the engine can serve requests."""
        return not self._engine.errored

    @property
    def num_requests(self) -> int:
        """Number of requests in flight."""
        return self._num_requests

    async def healthy(self) -> bool:
        """Return the result of vLLM's health check."""
        try:
            await self._engine.check_health()
        except Exception:  # vLLM raises various types
            return False
        return True

    async def answers(self, timeout: float) -> bool:
        """Return whether the engine process answers within `timeout` seconds; it does so between two steps.

        vLLM's health check does not ask the process. `is_sleeping` does, and is a part of vLLM's interface of engines.
        """
        try:
            await asyncio.wait_for(self._engine.is_sleeping(), timeout)
        except asyncio.TimeoutError:
            return not self.alive
        except Exception:  # vLLM raises various types when the engine has ended, which `alive` shows
            logger.debug("vLLM's engine cannot be asked", exc_info=True)
        return True

    def kill(self) -> None:
        """Kill the engine's processes, also stopped ones. vLLM then reports the engine as ended."""
        library.kill_processes(self._engine)

    async def tokenizer(self) -> Any:
        """vLLM's tokenizer of the model, with the interface of transformers."""
        return await library.tokenizer_of(self._engine)

    def sampling_params(self, values: Mapping[str, Any], *, stream: bool) -> Any:
        """Create vLLM's `SamplingParams`; see `library.sampling_params`. Raises `RequestRejected`."""
        try:
            return library.sampling_params(values, stream=stream)
        except Exception as error:
            if library.about_request(error):
                raise rejection(error) from None
            raise

    def generate(
        self, prompt: dict[str, Any], params: Any, *, lora: Any = None, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's `RequestOutput`s. Closing the iterator early aborts the request.

        `prompt`: a `TextPrompt` or `TokensPrompt`. Raises `RequestRejected`, `PromptTooLong` if the prompt including
        image tokens is too long, `Unavailable` if the engine has ended or its queue is full, `InternalError`.
        """
        return self._run(self._engine.generate, prompt, params, lora_request=lora, priority=priority)

    async def encode(self, prompt: dict[str, Any], params: Any, *, priority: int = 0) -> Any:
        """Return vLLM's `PoolingRequestOutput`. Cancelling aborts the request. Raises the same errors as `generate`."""
        last = None
        stream = self._run(self._engine.encode, prompt, params, priority=priority)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise InternalError("vLLM returned no output")
        return last

    async def _run(
        self, submit: Callable[..., Any], prompt: dict[str, Any], params: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Run one request: count it, abort it if the iterator is closed early, and convert errors."""
        name = f"neso-{next(self._names)}"
        self._num_requests += 1
        finished = False
        try:
            ready = await self._prepared(prompt)
            async with aclosing(submit(ready, params, name, **options)) as outputs:
                async for output in outputs:
                    finished = output.finished
                    yield output
        except (ServerError, InvalidParameter):
            raise
        except Exception as error:
            finished = True  # vLLM has already released the request
            raise _convert_error(error, restarts=self.restarts) from None
        finally:
            self._num_requests -= 1
            if not finished and self.alive:
                await self._engine.abort(name)

    async def _prepared(self, prompt: dict[str, Any]) -> Any:
        """See `library.prepared`. Errors of a prompt with images are attributed to the images."""
        if IMAGES not in prompt:
            return await library.prepared(self._engine, prompt)
        try:
            ready = await library.prepared(self._engine, prompt)
        except Exception as error:
            if self.alive and library.about_images(error):
                raise _image_rejection(error) from None
            raise
        num_tokens = library.num_prompt_tokens(ready)
        if num_tokens is not None:
            check_prompt_length(num_tokens, self.max_model_len)
        return ready

    async def add_lora(self, lora: Any) -> None:
        """Load an adapter. Raises `InvalidArgument`."""
        try:
            await self._engine.add_lora(lora)
        except Exception as error:
            raise InvalidArgument(f"vLLM cannot load adapter '{lora.lora_name}': {_text(error)}") from None

    async def remove_lora(self, number: int) -> None:
        """Unload an adapter."""
        await self._engine.remove_lora(number)

    async def stop(self) -> None:
        """End the engine's processes. No effect on an engine that was stopped."""
        if isinstance(self._engine, _Ended):
            return
        engine, self._engine = self._engine, _Ended(self._engine)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(self._orphan_reaper.dismiss)


class _Ended:
    """Placeholder for an engine that was shut down, so that the engine can be garbage collected."""

    errored = True

    def __init__(self, engine: Any) -> None:
        self.model_config = engine.model_config

    async def check_health(self) -> None:
        raise RuntimeError("the engine was shut down")


async def _start(arguments: Any, record: library.Record | None) -> tuple[Any, OrphanReaper]:
    """Start an engine, and the reaper of its processes, which also end if the server does during the start."""
    reaper = OrphanReaper()
    starting = asyncio.ensure_future(asyncio.to_thread(library.start_engine, arguments, record))
    try:
        while not starting.done():
            await asyncio.wait({starting}, timeout=_WATCH_SECONDS)
            # All children, also those of other engines: none may outlive the server.
            reaper.watch(process.pid for process in active_children() if process.pid)
        return starting.result(), reaper
    except asyncio.CancelledError:
        starting.add_done_callback(functools.partial(_shut_down, reaper))
        raise
    except Exception as error:
        await asyncio.to_thread(reaper.dismiss)
        raise InvalidArgument(f"vLLM cannot load the model: {error}") from None


def _shut_down(reaper: OrphanReaper, starting: asyncio.Future[Any]) -> None:
    """Shut down an engine whose start was cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().shutdown()
    reaper.dismiss()


def _convert_error(error: Exception, *, restarts: bool) -> Exception:
    """Convert vLLM's exception to an error that is sent to the client."""
    if library.about_dead_engine(error):
        if restarts:
            return Restarting("vLLM's engine has ended: retry the request later")
        return Unavailable("vLLM's engine has ended and is not restarted")
    if library.about_full_queue(error):
        return Overloaded(str(error))
    if library.about_request(error):
        return rejection(error)
    return InternalError(_text(error))


def rejection(error: BaseException) -> RequestRejected:
    """Convert vLLM's exception about a request."""
    text = str(error.args[0]) if error.args else _text(error)
    return RequestRejected(_field(error, text), text)


def _image_rejection(error: Exception) -> RequestRejected:
    """Convert vLLM's exception about a prompt with images. If it names no parameter, it is attributed to the images."""
    rejected = rejection(error)
    if getattr(error, "parameter", None) is None and rejected.field in ("prompt", "request"):
        return RequestRejected("images", f"vLLM cannot put the images into the prompt: {rejected.message}")
    return rejected


def _field(error: BaseException, text: str) -> str:
    """Return the parameter named by an exception or at the start of its message; otherwise "prompt" or "request"."""
    named = getattr(error, "parameter", None)
    if named is not None:
        return _FIELDS.get(named, str(named))
    first = text.replace("`", "").partition(" ")[0].rstrip(":,.")
    if first in library.sampling_fields():
        return first
    return "prompt" if "prompt" in text or text.startswith("Token id") else "request"


def _text(error: BaseException) -> str:
    """Return the message of an exception, or of its cause if the engine wrapped an internal error without message."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
