"""The backend for ONNX models, by ONNX Runtime."""

from neso.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
