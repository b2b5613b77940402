"""ONNX models, executed by ONNX Runtime."""
