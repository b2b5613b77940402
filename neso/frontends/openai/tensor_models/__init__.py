"""Models with text tensors as language models: ensembles, BLS models and Python models.

Two conventions, also mixed: Triton's vLLM backend, which has `sampling_parameters` as one JSON text, and TensorRT-LLM
models, which have an input per parameter.
"""
