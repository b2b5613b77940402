"""Models with text tensors as language models: ensembles, BLS models and Python models.

Supports two conventions and combinations of them: Triton's vLLM backend, which has `sampling_parameters` as one JSON
text, and TensorRT-LLM models, which have an input per parameter.
"""
