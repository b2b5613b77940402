"""Which runners there are."""

from __future__ import annotations

from importlib import import_module

from neso.engine.runners.base import Runner

# Name to module and class, best first: "auto" takes the first that can be imported.
RUNNERS = {
    "native": ("neso.engine.runners.native.runner", "NativeRunner"),
    "reference": ("neso.engine.runners.reference.runner", "ReferenceRunner"),
}


class UnknownRunner(ValueError):
    """There is no runner of that name, or it cannot run here."""


def runner_class(name: str = "auto") -> type[Runner]:
    """The class of a runner; its module is imported only now. Raises `UnknownRunner`."""
    if name == "auto":
        return next(found for found in map(_import, RUNNERS) if isinstance(found, type))
    if name not in RUNNERS:
        raise UnknownRunner(f"there is no runner {name!r}; there are auto, {', '.join(RUNNERS)}")
    found = _import(name)
    if isinstance(found, ImportError):
        raise UnknownRunner(f"the runner {name!r} cannot run here: {found}")
    return found


def _import(name: str) -> type[Runner] | ImportError:
    module, class_name = RUNNERS[name]
    try:
        runner: type[Runner] = getattr(import_module(module), class_name)
    except ImportError as error:
        return error
    return runner
