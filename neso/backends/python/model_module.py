"""Import a model's file so that models do not see each other's modules."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from neso.backends.python.errors import TritonModelException

PB_UTILS = "triton_python_backend_utils"

_numbers = itertools.count()
_importing = threading.Lock()
_here = threading.local()
_modules: dict[tuple[str, str], ModuleType] = {}  # by folder and name, those that are hidden


class _SourceLoader(SourceFileLoader):
    """Reads the source each time: a cached bytecode file is stale when a file is replaced within a second."""

    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode is kept for models")


class _Again(Loader):
    """Gives a module that was hidden, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it was executed when it was imported first."""


class _FolderFinder:
    """Finds the modules beside a model's file, for the threads that run this model only.

    With `sys.path`, two models that both have a `utils.py` would get the one that was imported first.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        folder: str | None = getattr(_here, "folder", None)
        if folder is None:
            return None
        if (module := _modules.get((folder, name))) is not None:
            package = hasattr(module, "__path__")
            return ModuleSpec(name, _Again(module), origin=module.__file__, is_package=package)
        for entry in path if path is not None else [folder]:
            if entry == folder or entry.startswith(folder + os.sep):
                finder = FileFinder(
                    entry, (_SourceLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
                )
                if (spec := finder.find_spec(name)) is not None and spec.loader is not None:
                    _here.found.append(name)
                    return spec
        return None


def load_model_class(path: Path, name: str) -> type[Any]:
    """Import the file under a name of its own; its `TritonPythonModel`. Raises `TritonModelException`.

    Whatever else the file raises goes through.
    """
    path = path.absolute()
    if not path.is_file():
        raise TritonModelException(f"Python model file not found in '{path}'")
    install()
    _forget_hidden(path.parent)
    module_name = f"neso_python_model_{name}_{next(_numbers)}"
    spec = spec_from_file_location(module_name, path, loader=_SourceLoader(module_name, str(path)))
    if spec is None or spec.loader is None:
        raise TritonModelException(f"'{path}' cannot be imported as a Python module")
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importing, model_folder(path.parent):
            spec.loader.exec_module(module)
        found = getattr(module, "TritonPythonModel", None)
        if not isinstance(found, type):
            raise TritonModelException(f"'{path}' has no class TritonPythonModel")
        return found
    except BaseException:
        sys.modules.pop(module_name, None)
        raise


def forget_model_class(model_class: type[Any]) -> None:
    """Let the module of a class go, and those beside it, so that their memory can be freed."""
    module = sys.modules.pop(model_class.__module__, None)
    if module is not None and module.__file__ is not None:
        _forget_hidden(Path(module.__file__).parent)


@contextmanager
def model_folder(folder: Path) -> Iterator[None]:
    """Run this thread as part of the model in `folder`: imports look there first, `current_folder` is it."""
    before = getattr(_here, "folder", None), getattr(_here, "found", [])
    _here.folder, _here.found = str(folder.absolute()), []
    try:
        yield
    finally:
        hide_modules()
        _here.folder, _here.found = before


def hide_modules() -> None:
    """Take what this thread has imported from its model's folder out of `sys.modules`.

    The model keeps what it imported, and an `import` in it gets the same module again. Others do not see it.
    """
    for name in _here.found:
        module = sys.modules.pop(name, None)
        if module is not None:
            _modules[_here.folder, name] = module
    _here.found.clear()


def current_folder() -> str:
    """The version folder of the model that this thread runs. Raises `TritonModelException` elsewhere."""
    folder: str | None = getattr(_here, "folder", None)
    if folder is None:
        raise TritonModelException("the model's folder is known in the threads that run the model only")
    return folder


def install() -> None:
    """Make `import triton_python_backend_utils` and the modules beside a model's file importable."""
    from neso.backends.python import pb_utils

    sys.modules[PB_UTILS] = pb_utils
    if _FolderFinder not in sys.meta_path:
        sys.meta_path.insert(0, _FolderFinder)


def _forget_hidden(folder: Path) -> None:
    for key in [key for key in _modules if key[0] == str(folder)]:
        del _modules[key]
