"""The `python` backend: models written as Triton's `TritonPythonModel` classes."""

from neso.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
