"""Detection of models with text tensors, and the input tensors of a generation request."""

from __future__ import annotations

from neso.frontends.openai.tensor_models import input_tensors
from neso.frontends.openai.tensor_models.input_tensors import InputTensors, sampling_json
from neso.generation import GenerationRequest, InvalidParameter, SamplingParams
from neso.generation.request import TASK_PREFIX
from neso.server.signature import Signature
from neso.server.tensor import DataType, Tensor

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
SAMPLING_PARAMETERS = "sampling_parameters"
STREAM = ("stream", "streaming")
EXCLUDE_INPUT = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
LORA_NAME, LORA_TASK = ("lora_name",), ("lora_task_id", "lora_id")
IMAGES = ("image", "image_url_input", "image_url")
RETURNED = ("finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens")
"""Outputs that are requested if the model declares them."""

RETURN_LOGPROBS, LOGPROBS = "return_log_probs", "output_log_probs"

_UNSUPPORTED_FIELDS = ("prompt_embeds", "prompt_embedding_table", "draft")
_KNOWN_INPUTS = input_tensors.NAMES.union(
    (TEXT_INPUT, SAMPLING_PARAMETERS), STREAM, EXCLUDE_INPUT, (f"return_{name}" for name in RETURNED)
)


def unsupported_reason(signature: Signature) -> str:
    """Return why a model cannot generate text from requests of this API, or "" if it can."""
    for name, tensors in ((TEXT_INPUT, signature.inputs), (TEXT_OUTPUT, signature.outputs)):
        spec = tensors.get(name)
        if spec is None or spec.datatype is not DataType.BYTES:
            return f"it has no tensor '{name}' of strings"
    needed = [
        name for name, spec in signature.inputs.items() if not spec.optional and name not in _KNOWN_INPUTS
    ]
    if needed:
        return f"it needs the input '{needed[0]}', which no request of this API has"
    return ""


def accepts_json(signature: Signature) -> bool:
    """Whether a model accepts sampling parameters as one JSON text, as in vLLM's convention."""
    return InputTensors(signature).declared((SAMPLING_PARAMETERS,), str) is not None


def accepts_max_tokens(signature: Signature) -> bool:
    """Whether a model has an input for `max_tokens`."""
    return accepts_json(signature) or input_tensors.accepts_max_tokens(signature)


def accepts_stop(signature: Signature) -> bool:
    """Whether a model has an input for stop strings."""
    return accepts_json(signature) or InputTensors(signature).declared(input_tensors.STOP, str) is not None


def accepts_seed(signature: Signature) -> bool:
    """Whether a model has an input for the random seed."""
    seed = input_tensors.SCALARS["seed"]
    return accepts_json(signature) or InputTensors(signature).declared(seed, float) is not None


def can_exclude_prompt(signature: Signature) -> bool:
    """Whether a model has an input that excludes the prompt from the output."""
    return InputTensors(signature).declared(EXCLUDE_INPUT, bool) is not None


def accepts_adapter(signature: Signature) -> bool:
    """Whether a model has an input for a LoRA adapter, by name or number."""
    named = InputTensors(signature).declared(LORA_NAME, str) is not None
    return accepts_json(signature) or named or accepts_adapter_number(signature)


def accepts_adapter_number(signature: Signature) -> bool:
    """Whether a model has an input for the number of a LoRA adapter."""
    return InputTensors(signature).declared(LORA_TASK, float) is not None


def request_tensors(
    signature: Signature, request: GenerationRequest, prompt: str, sampling: SamplingParams, *, stream: bool
) -> dict[str, Tensor]:
    """Create the input tensors of one sequence. Raises `InvalidParameter` for parameters without an input."""
    inputs = InputTensors(signature)
    _set_text(inputs, (TEXT_INPUT,), prompt, "prompt")
    _set_flag(inputs, STREAM, stream)
    _set_flag(inputs, EXCLUDE_INPUT, True)
    for name in RETURNED:
        _set_flag(inputs, (f"return_{name}",), True)
    for name in _UNSUPPORTED_FIELDS:
        if getattr(request, name) is not None:
            raise InvalidParameter(name, input_tensors.NO_INPUT)
    if request.cache_salt:
        raise InvalidParameter("cache_salt", input_tensors.NO_INPUT)
    if request.images:
        _set_images(inputs, request.images)
    if accepts_json(signature):
        _set_flag(inputs, ("return_logprobs",), sampling.logprobs is not None)
        lora = request.lora.name if request.lora is not None else ""
        _set_text(inputs, (SAMPLING_PARAMETERS,), sampling_json(sampling, lora), SAMPLING_PARAMETERS)
    else:
        input_tensors.write_sampling(inputs, sampling)
        if sampling.logprobs is not None:
            _request_logprobs(inputs, signature, sampling.logprobs)
        if request.lora is not None:
            _set_adapter(inputs, request.lora.name)
    return inputs.tensors


def requested_outputs(signature: Signature, inputs: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the outputs to request; some models compute only requested outputs.

    Outputs with an input `return_…` are requested only if that input is true.
    """
    names = [TEXT_OUTPUT]
    for name in (*RETURNED, "logprobs"):
        flag = inputs.get(f"return_{name}")
        if name in signature.outputs and flag is not None and flag.array.all():
            names.append(name)
    if RETURN_LOGPROBS in inputs:
        names.append(LOGPROBS)
    if "finish_reason" in signature.outputs and "finish_reason" not in names:
        names.append("finish_reason")
    return tuple(names)


def _request_logprobs(inputs: InputTensors, signature: Signature, top: int) -> None:
    """TensorRT-LLM models return log probabilities of the generated tokens only, without token ids."""
    spec = inputs.declared((RETURN_LOGPROBS,), bool)
    if spec is None or LOGPROBS not in signature.outputs or not can_exclude_prompt(signature):
        raise InvalidParameter(
            "logprobs",
            f"the model returns none: it would need the inputs '{RETURN_LOGPROBS}' and '{EXCLUDE_INPUT[0]}' and the "
            f"output '{LOGPROBS}'",
        )
    if top != 0:
        raise InvalidParameter(
            "logprobs", f"the model returns log probabilities of generated tokens only: expected 0, got {top}"
        )
    inputs.put(spec, [True], "logprobs")


def _set_flag(inputs: InputTensors, names: tuple[str, ...], value: bool) -> None:
    spec = inputs.declared(names, bool)
    if spec is not None:
        inputs.put(spec, [value], spec.name)


def _set_text(inputs: InputTensors, names: tuple[str, ...], value: str, field: str) -> None:
    spec = inputs.declared(names, str)
    assert spec is not None, "checked by unsupported_reason"
    inputs.put(spec, [value], field)


def _set_images(inputs: InputTensors, images: tuple[object, ...]) -> None:
    spec = inputs.declared(IMAGES, str)
    if spec is None:
        raise InvalidParameter("messages", "the model takes no images")
    texts = [image for image in images if isinstance(image, str)]
    if len(texts) < len(images):
        raise InvalidParameter("messages", "the model takes images as URLs or base64 only")
    if spec.name == "image":  # vLLM's backend expects plain base64
        texts = [text.partition("base64,")[2] if text.startswith("data:") else text for text in texts]
    inputs.put(spec, texts, "messages")


def _set_adapter(inputs: InputTensors, name: str) -> None:
    """Set the adapter by name, or by the number that TensorRT-LLM models use."""
    named = inputs.declared(LORA_NAME, str)
    if named is not None:
        inputs.put(named, [name], "model")
        return
    numbered = inputs.declared(LORA_TASK, float)
    number = name.removeprefix(TASK_PREFIX)
    if numbered is None or not number.isdecimal():
        raise InvalidParameter("model", f"the model has no adapter '{name}'")
    inputs.put(numbered, [int(number)], "model")
