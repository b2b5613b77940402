"""Models whose text comes and goes as tensors: ensembles, business logic and Python models, as language models.

Two conventions are known, and mixtures of them: that of Triton's vLLM backend, which takes `sampling_parameters` as one
JSON text, and that of TensorRT-LLM's models, which have an input for each parameter.
"""

from neso.frontends.openai.tensor_models.language_model import TensorLanguageModel
from neso.frontends.openai.tensor_models.request_tensors import (
    missing_for_text,
    takes_adapter,
    takes_adapter_number,
)

__all__ = ["TensorLanguageModel", "missing_for_text", "takes_adapter", "takes_adapter_number"]
