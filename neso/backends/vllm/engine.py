"""vLLM's engine, which works in processes of its own, as the server sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from multiprocessing import active_children
from typing import Any

from neso.backends.vllm import library
from neso.backends.vllm.conversion import IMAGES
from neso.backends.vllm.orphan_reaper import Guardian
from neso.generation import InvalidParameter, check_prompt_length
from neso.server.errors import InternalError, InvalidArgument, ServerError, Unavailable


class Refused(InvalidParameter):
    """A request that vLLM does not take, in vLLM's words; `field` is what they are about, as far as they tell."""

    def __str__(self) -> str:
        return self.message


_FIELDS = {"input_tokens": "prompt", "input_text": "prompt", "image": "images"}
"""What vLLM calls otherwise."""


class VllmEngine:
    """Made by `start`. Its methods belong to one event loop; each request is vLLM's from the moment it is asked for."""

    def __init__(self, engine: Any, tasks: frozenset[str]) -> None:
        self._engine = engine
        self._guardian = Guardian(process.pid for process in active_children() if process.pid)
        self._names = itertools.count()
        self._num_requests = 0
        self.tasks = tasks

    @classmethod
    async def start(cls, arguments: Any, record: library.Record | None = None) -> VllmEngine:
        """Start the engine's processes and wait until the model is loaded. Raises `InvalidArgument` with the reason."""
        starting = asyncio.ensure_future(asyncio.to_thread(library.start_engine, arguments, record))
        try:
            engine = await asyncio.shield(starting)
            return cls(engine, await library.supported_tasks(engine))
        except asyncio.CancelledError:
            starting.add_done_callback(_shut_down)
            raise
        except Exception as error:
            raise InvalidArgument(f"vLLM cannot load the model: {error}") from None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return int(self._engine.model_config.max_model_len)

    @property
    def model_config(self) -> Any:
        """vLLM's `ModelConfig`."""
        return self._engine.model_config

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return not self._engine.errored

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._num_requests

    async def healthy(self) -> bool:
        """What vLLM's own check says."""
        try:
            await self._engine.check_health()
        except Exception:  # of vLLM's, whatever it is
            return False
        return True

    async def tokenizer(self) -> Any:
        """vLLM's tokenizer of the model, in transformers' interface."""
        return await library.tokenizer_of(self._engine)

    def sampling_params(self, values: Mapping[str, Any], *, stream: bool) -> Any:
        """vLLM's `SamplingParams`; see `library.sampling_params`. Raises `Refused`."""
        try:
            return library.sampling_params(values, stream=stream)
        except Exception as error:
            if library.about_request(error):
                raise refusal(error) from None
            raise

    def generate(
        self, prompt: dict[str, Any], params: Any, *, lora: Any = None, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        """vLLM's `RequestOutput`s. Closing the iterator early aborts the request.

        `prompt` is a `TextPrompt` or a `TokensPrompt`. Raises `Refused` for what the engine does not take,
        `PromptTooLong` for a prompt that its images make too long, `Unavailable` when the engine has ended or takes no
        more requests, and `InternalError`.
        """
        return self._follow(self._engine.generate, prompt, params, lora_request=lora, priority=priority)

    async def encode(self, prompt: dict[str, Any], params: Any, *, priority: int = 0) -> Any:
        """vLLM's `PoolingRequestOutput`. Cancelling aborts the request; raises as `generate` does."""
        last = None
        followed = self._follow(self._engine.encode, prompt, params, priority=priority)
        async with aclosing(followed) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise InternalError("vLLM gave no vector")
        return last

    async def _follow(
        self, ask: Callable[..., Any], prompt: dict[str, Any], params: Any, **how: Any
    ) -> AsyncGenerator[Any, None]:
        """The outputs of one request; it is counted, aborted when the caller leaves, and its errors are worded."""
        name = f"neso-{next(self._names)}"
        self._num_requests += 1
        finished = False
        try:
            ready = await self._prepared(prompt)
            async with aclosing(ask(ready, params, name, **how)) as outputs:
                async for output in outputs:
                    finished = output.finished
                    yield output
        except (ServerError, InvalidParameter):
            raise
        except Exception as error:
            finished = True  # vLLM has let it go
            raise _worded(error) from None
        finally:
            self._num_requests -= 1
            if not finished and self.alive:
                await self._engine.abort(name)

    async def _prepared(self, prompt: dict[str, Any]) -> Any:
        """See `library.prepared`. What fails here of a prompt with images is about those."""
        if IMAGES not in prompt:
            return await library.prepared(self._engine, prompt)
        try:
            ready = await library.prepared(self._engine, prompt)
        except Exception as error:
            if self.alive and library.about_images(error):
                raise _image_refusal(error) from None
            raise
        num_tokens = library.num_prompt_tokens(ready)
        if num_tokens is not None:
            check_prompt_length(num_tokens, self.max_model_len)
        return ready

    async def add_lora(self, lora: Any) -> None:
        """Load an adapter before the first request that wants it. Raises `InvalidArgument`."""
        try:
            await self._engine.add_lora(lora)
        except Exception as error:
            raise InvalidArgument(f"vLLM cannot load adapter '{lora.lora_name}': {_text(error)}") from None

    async def remove_lora(self, number: int) -> None:
        """Forget an adapter."""
        await self._engine.remove_lora(number)

    async def stop(self) -> None:
        """End the engine's processes, which gives their memory back."""
        engine, self._engine = self._engine, _Ended(self._engine)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(self._guardian.dismiss)


class _Ended:
    """In place of an engine that was shut down, which may go with all it holds."""

    errored = True

    def __init__(self, engine: Any) -> None:
        self.model_config = engine.model_config

    async def check_health(self) -> None:
        raise RuntimeError("was shut down")


def _shut_down(starting: asyncio.Future[Any]) -> None:
    """End an engine that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().shutdown()


def _worded(error: Exception) -> Exception:
    """vLLM's error as one that clients can be told."""
    if library.about_dead_engine(error):
        return Unavailable("vLLM's engine has ended")
    if library.about_full_queue(error):
        return Unavailable(str(error))
    if library.about_request(error):
        return refusal(error)
    return InternalError(_text(error))


def refusal(error: BaseException) -> Refused:
    """What vLLM says of a request."""
    text = str(error.args[0]) if error.args else _text(error)
    return Refused(_field(error, text), text)


def _image_refusal(error: Exception) -> Refused:
    """What vLLM says of a prompt with images; where it names no parameter, they are to blame."""
    found = refusal(error)
    if getattr(error, "parameter", None) is None and found.field in ("prompt", "request"):
        return Refused("images", f"vLLM cannot put the images into the prompt: {found.message}")
    return found


def _field(error: BaseException, text: str) -> str:
    """The parameter that vLLM names, or begins with; what it says of lengths and tokens is about the prompt."""
    named = getattr(error, "parameter", None)
    if named is not None:
        return _FIELDS.get(named, str(named))
    first = text.replace("`", "").partition(" ")[0].rstrip(":,.")
    if first in library.sampling_fields():
        return first
    return "prompt" if "prompt" in text or text.startswith("Token id") else "request"


def _text(error: BaseException) -> str:
    """What it says, or what its cause says: errors within the engine are wrapped into one without a text."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
