"""Import a model's file so that models do not see each other's modules."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from neso.backends.python.errors import TritonModelException

PB_UTILS = "triton_python_backend_utils"

_numbers = itertools.count()
_importing = threading.Lock()
_here = threading.local()


class _FolderFinder:
    """Finds the modules beside a model's file, for the threads that run this model only.

    With `sys.path`, two models that both have a `utils.py` would get the one that was imported first.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = getattr(_here, "folder", None)
        if folder is None or path is not None:
            return None
        return PathFinder.find_spec(name, [str(folder)])


def load_model_class(path: Path, name: str) -> type[Any]:
    """Import the file under a name of its own and return its `TritonPythonModel`. Raises `TritonModelException`.

    Whatever else the file raises goes through.
    """
    if not path.is_file():
        raise TritonModelException(f"Python model file not found in '{path}'")
    install()
    module_name = f"neso_python_model_{name}_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TritonModelException(f"'{path}' cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
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
    """Let the module of a class go, so that its memory can be freed."""
    sys.modules.pop(model_class.__module__, None)


@contextmanager
def model_folder(folder: Path) -> Iterator[None]:
    """Run this thread as part of the model in `folder`: imports look there first, `current_folder` is it."""
    before = getattr(_here, "folder", None)
    _here.folder = folder
    try:
        yield
    finally:
        _here.folder = before
        _hide_modules_of(folder)


def current_folder() -> Path:
    """The version folder of the model that this thread runs. Raises `TritonModelException` elsewhere."""
    folder: Path | None = getattr(_here, "folder", None)
    if folder is None:
        raise TritonModelException("the model's folder is known in the threads that run the model only")
    return folder


def install() -> None:
    """Make `import triton_python_backend_utils` and the modules beside a model's file importable."""
    from neso.backends.python import pb_utils

    sys.modules[PB_UTILS] = pb_utils
    if _FolderFinder not in sys.meta_path:
        sys.meta_path.insert(0, _FolderFinder)


def _hide_modules_of(folder: Path) -> None:
    """Take the folder's modules out of `sys.modules`; the model keeps those that it has imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("neso_python_model_"):
            continue
        if _is_beside(module, folder):
            del sys.modules[name]


def _is_beside(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)
