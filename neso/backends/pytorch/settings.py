"""The parameters of PyTorch models, and what they switch."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from neso.backends.tensor import Parameters

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = (
    "ENABLE_NVFUSER",
    "ENABLE_TENSOR_FUSER",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
)
_threads: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one model. Threads are those of the process: the first model that sets a number decides."""

    inference_mode: bool
    optimized_execution: bool
    cudnn: bool
    cleans_cache: bool

    @classmethod
    def of(cls, model: str, parameters: Parameters) -> Settings:
        """Raises `InvalidArgument`."""
        for name in WITHOUT_EFFECT:
            if name in parameters:
                logger.warning("model '%s': parameter %s has no effect", model, name)
        intra = parameters.integer("INTRA_OP_THREAD_COUNT", parameters.integer("NUM_THREADS", 0))
        _set_threads("INTRA_OP_THREAD_COUNT", intra, model)
        _set_threads("INTER_OP_THREAD_COUNT", parameters.integer("INTER_OP_THREAD_COUNT", 0), model)
        return cls(
            inference_mode=parameters.boolean("INFERENCE_MODE", True),
            optimized_execution=not parameters.boolean("DISABLE_OPTIMIZED_EXECUTION", False),
            cudnn=not parameters.boolean("DISABLE_CUDNN", False),
            cleans_cache=parameters.boolean("ENABLE_CACHE_CLEANING", False),
        )

    def enter(self) -> ExitStack:
        """Switch them on for the thread; closing the stack, in the same thread, switches them off."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode() if self.inference_mode else torch.no_grad())
        if not self.optimized_execution:
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        if not self.cudnn:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        return stack


def _set_threads(name: str, number: int, model: str) -> None:
    if number <= 0:
        return
    first = _threads.setdefault(name, number)
    if first != number:
        logger.warning("model '%s': %s stays %d, as another model has set it", model, name, first)
    if name == "INTRA_OP_THREAD_COUNT":
        torch.set_num_threads(first)  # what is set is the calling thread's
    elif torch.get_num_interop_threads() != first:
        try:
            torch.set_num_interop_threads(first)
        except RuntimeError:
            logger.warning("model '%s': %s comes too late, torch has computed before", model, name)
