"""Backend `onnxruntime`: ONNX models."""
