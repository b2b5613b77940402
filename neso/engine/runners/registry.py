"""Which runners of specs there are."""

from __future__ import annotations

import logging
import os
from importlib import import_module

from neso.engine.runners.base import SpecRunner

logger = logging.getLogger(__name__)

# Name to module and class, best first: "auto" takes the first that this machine is made for and that can be imported.
RUNNERS = {
    "torch": ("neso.engine.runners.torch.runner", "TorchRunner"),
    "native": ("neso.engine.runners.native.runner", "NativeRunner"),
    "reference": ("neso.engine.runners.reference.runner", "ReferenceRunner"),
}


class UnknownRunner(ValueError):
    """There is no runner of that name, or it cannot run here."""


def runner_class(name: str = "auto") -> type[SpecRunner]:
    """The class of a runner; its module is imported only now. Raises `UnknownRunner`."""
    if name == "auto":
        return _first_that_runs()
    if name not in RUNNERS:
        raise UnknownRunner(
            f"there is no runner {name!r}; there are auto, {', '.join(RUNNERS)}, transformers"
        )
    found = _import(name)
    if isinstance(found, ImportError):
        raise UnknownRunner(f"the runner {name!r} cannot run here: {found}")
    return found


def _first_that_runs() -> type[SpecRunner]:
    for name in RUNNERS:
        if name == "torch" and not has_nvidia_gpu():
            continue
        found = _import(name)
        if isinstance(found, type):
            return found
        logger.warning("the runner %s cannot run here, the next one is slower: %s", name, found)
    raise UnknownRunner("no runner can run here")


def has_nvidia_gpu() -> bool:
    """Whether the driver of one is loaded: to ask torch would cost its import on every machine without."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))


def _import(name: str) -> type[SpecRunner] | ImportError:
    module, class_name = RUNNERS[name]
    try:
        runner: type[SpecRunner] = getattr(import_module(module), class_name)
    except ImportError as error:
        return error
    return runner
