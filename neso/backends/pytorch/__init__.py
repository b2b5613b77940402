"""The backend for TorchScript and exported PyTorch programs."""

from neso.backends.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
