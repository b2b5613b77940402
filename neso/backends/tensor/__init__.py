"""The base of backends whose models turn arrays into arrays: threads, batches and errors are taken care of."""

from neso.backends.tensor.backend import TensorBackend
from neso.backends.tensor.model import Instance, InstanceKind, Parameters, TensorModel

__all__ = ["Instance", "InstanceKind", "Parameters", "TensorBackend", "TensorModel"]
