"""Base of backends whose models map arrays to arrays. Provides instance threads, batching and error handling.

To write a backend: implement `TensorModel`, set it as `model_class` of a subclass of `TensorBackend`, and register
the subclass as an entry point of the group `neso.backends`.
"""

from neso.backends.tensor.backend import TensorBackend
from neso.backends.tensor.model import Instance, InstanceKind, Parameters, TensorModel

__all__ = ["Instance", "InstanceKind", "Parameters", "TensorBackend", "TensorModel"]
