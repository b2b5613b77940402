"""Import of a model's file, isolated from the modules of other models."""

from __future__ import annotations

import builtins
import importlib
import itertools
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from neso.backends.python.errors import TritonModelException

PB_UTILS = "triton_python_backend_utils"

_PREFIX = "neso_python_model_"
_numbers = itertools.count()
_local = threading.local()

# Each model is a package with a unique name, whose path is the version folder:
#   model.py    neso_python_model_<name>_<n>
#   helper.py   neso_python_model_<name>_<n>.helper
# `import helper` in any of these files, in any thread, imports neso_python_model_<name>_<n>.helper.


class _SourceLoader(SourceFileLoader):
    """Loads a file of a model with the model's own `__import__`.

    Always compiles the source: cached bytecode would be stale if a file is replaced within a second by a file of equal
    size.
    """

    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode is kept for models")

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _ModelImport(package)}
        super().exec_module(module)


class _ModelImport:
    """`__import__` of one model. Searches the model's folder first, then `sys.path`."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level > 0 or not self._has(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist or ("__name__",))
        return module if fromlist else sys.modules[f"{self._package}.{top}"]

    def _has(self, top: str) -> bool:
        if f"{self._package}.{top}" in sys.modules:
            return True
        package = sys.modules.get(self._package)
        spec = _FolderFinder.find_spec(f"{self._package}.{top}", package.__path__) if package else None
        if spec is None or spec.loader is not None:
            return spec is not None
        # A folder without __init__.py is imported only if there is no other module with this name.
        return top not in sys.modules and find_spec(top) is None


class _FolderFinder:
    """Meta path finder for modules of models, by their full names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(_PREFIX) or path is None:
            return None
        loaders = (_SourceLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
        for entry in path:
            if (spec := FileFinder(entry, *loaders).find_spec(name)) is not None:
                return spec
        return None


@dataclass(frozen=True, slots=True)
class ModelCode:
    """Absolute paths of the file with the class `TritonPythonModel`, and of the folder of the model's version.

    The file is in the folder, or belongs to a Python-based backend.
    """

    file: Path
    folder: Path

    @classmethod
    def of(cls, config: Any, folder: Path, file: Path | None) -> ModelCode:
        """Return the code of a model version in `folder`; `file` is that of its Python-based backend, if any."""
        folder = folder.absolute()
        return cls(folder / config.default_model_filename if file is None else file.absolute(), folder)


def load_model_class(code: ModelCode, name: str) -> type[Any]:
    """Import a model's file and return its class `TritonPythonModel`.

    Raises `TritonModelException` if the file or class does not exist, and any exception of the file's code.
    """
    path = code.file
    if not path.is_file():
        raise TritonModelException(f"Python model file not found in '{path}'")
    install()
    package = f"{_PREFIX}{re.sub(r'[^a-zA-Z0-9]', '_', name)}_{next(_numbers)}"
    spec = spec_from_file_location(
        package, path, loader=_SourceLoader(package, str(path)), submodule_search_locations=[str(path.parent)]
    )
    if spec is None or spec.loader is None:
        raise TritonModelException(f"'{path}' cannot be imported as a Python module")
    module = module_from_spec(spec)
    sys.modules[package] = module
    try:
        with model_folder(code.folder):
            spec.loader.exec_module(module)
        found = getattr(module, "TritonPythonModel", None)
        if not isinstance(found, type):
            raise TritonModelException(f"'{path}' has no class TritonPythonModel")
        return found
    except BaseException:
        _forget(package)
        raise


def forget_model_class(model_class: type[Any]) -> None:
    """Remove the modules of a model from `sys.modules`, so that they can be garbage collected."""
    _forget(model_class.__module__.partition(".")[0])


@contextmanager
def model_folder(folder: Path) -> Iterator[None]:
    """Make `folder` the `current_folder` of the current thread."""
    before = getattr(_local, "folder", None)
    _local.folder = str(folder.absolute())
    try:
        yield
    finally:
        _local.folder = before


def current_folder() -> str:
    """Return the version folder of the model in this thread. Raises `TritonModelException` in other threads."""
    folder = find_current_folder()
    if folder is None:
        raise TritonModelException("the model's folder is only available in the threads that run the model")
    return folder


def find_current_folder() -> str | None:
    """Return the version folder of the model in this thread; None in other threads."""
    folder: str | None = getattr(_local, "folder", None)
    return folder


def install() -> None:
    """Register `triton_python_backend_utils` and the finder for modules of models."""
    sys.modules[PB_UTILS] = importlib.import_module("neso.backends.python.pb_utils")
    if _FolderFinder not in sys.meta_path:
        sys.meta_path.insert(0, _FolderFinder)


def _forget(package: str) -> None:
    if package.startswith(_PREFIX):
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                sys.modules.pop(name, None)
