"""Which models have a text face by their tensors, and what such a request is made of."""

from __future__ import annotations

from neso.frontends.openai.tensor_models import input_tensors as sampling_inputs
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
"""Outputs that are asked for wherever the model has them."""

RETURN_LOGPROBS, LOGPROBS = "return_log_probs", "output_log_probs"

_REFUSED = ("prompt_embeds", "prompt_embedding_table", "draft")
_KNOWN = sampling_inputs.NAMES.union(
    (TEXT_INPUT, SAMPLING_PARAMETERS), STREAM, EXCLUDE_INPUT, (f"return_{name}" for name in RETURNED)
)


def unsupported_reason(signature: Signature) -> str:
    """Why a model cannot be asked for text; "" for one that can."""
    for name, tensors in ((TEXT_INPUT, signature.inputs), (TEXT_OUTPUT, signature.outputs)):
        spec = tensors.get(name)
        if spec is None or spec.datatype is not DataType.BYTES:
            return f"it has no tensor '{name}' of strings"
    needed = [name for name, spec in signature.inputs.items() if not spec.optional and name not in _KNOWN]
    if needed:
        return f"it needs the input '{needed[0]}', which no request of this API has"
    return ""


def accepts_json(signature: Signature) -> bool:
    """Whether sampling parameters go to a model as one JSON text, as in vLLM's convention."""
    return InputTensors(signature).declared((SAMPLING_PARAMETERS,), str) is not None


def accepts_max_tokens(signature: Signature) -> bool:
    """Whether a model can be told how many tokens to generate at most."""
    return accepts_json(signature) or sampling_inputs.accepts_max_tokens(signature)


def accepts_stop(signature: Signature) -> bool:
    """Whether a model can be told stop strings."""
    return accepts_json(signature) or InputTensors(signature).declared(sampling_inputs.STOP, str) is not None


def accepts_seed(signature: Signature) -> bool:
    """Whether a model can be told what its choice of tokens depends on."""
    seed = sampling_inputs.SCALARS["seed"]
    return accepts_json(signature) or InputTensors(signature).declared(seed, float) is not None


def can_exclude_prompt(signature: Signature) -> bool:
    """Whether a model can be told not to repeat the prompt."""
    return InputTensors(signature).declared(EXCLUDE_INPUT, bool) is not None


def accepts_adapter(signature: Signature) -> bool:
    """Whether a model can be told which adapter to apply."""
    named = InputTensors(signature).declared(LORA_NAME, str) is not None
    return accepts_json(signature) or named or accepts_adapter_number(signature)


def accepts_adapter_number(signature: Signature) -> bool:
    """Whether a model knows adapters by numbers."""
    return InputTensors(signature).declared(LORA_TASK, float) is not None


def request_tensors(
    signature: Signature, request: GenerationRequest, prompt: str, sampling: SamplingParams, *, stream: bool
) -> dict[str, Tensor]:
    """The inputs for one sequence of a request. Raises `InvalidParameter` for what the model cannot be told."""
    inputs = InputTensors(signature)
    _put(inputs, (TEXT_INPUT,), prompt, "prompt")
    _flag(inputs, STREAM, stream)
    _flag(inputs, EXCLUDE_INPUT, True)
    for name in RETURNED:
        _flag(inputs, (f"return_{name}",), True)
    for name in _REFUSED:
        if getattr(request, name) is not None:
            raise InvalidParameter(name, sampling_inputs.NO_INPUT)
    if request.cache_salt:
        raise InvalidParameter("cache_salt", sampling_inputs.NO_INPUT)
    if request.images:
        _put_images(inputs, request.images)
    if accepts_json(signature):
        _flag(inputs, ("return_logprobs",), sampling.logprobs is not None)
        lora = request.lora.name if request.lora is not None else ""
        _put(inputs, (SAMPLING_PARAMETERS,), sampling_json(sampling, lora), SAMPLING_PARAMETERS)
    else:
        sampling_inputs.write_sampling(inputs, sampling)
        if sampling.logprobs is not None:
            _ask_for_logprobs(inputs, signature, sampling.logprobs)
        if request.lora is not None:
            _put_adapter(inputs, request.lora.name)
    return inputs.tensors


def requested_outputs(signature: Signature, inputs: dict[str, Tensor]) -> tuple[str, ...]:
    """The outputs to ask for: some models compute only those.

    One that is given on demand (`return_…`) is asked for only where that was declared.
    """
    wanted = [TEXT_OUTPUT]
    for name in (*RETURNED, "logprobs"):
        flag = inputs.get(f"return_{name}")
        if name in signature.outputs and flag is not None and flag.array.all():
            wanted.append(name)
    if RETURN_LOGPROBS in inputs:
        wanted.append(LOGPROBS)
    if "finish_reason" in signature.outputs and "finish_reason" not in wanted:
        wanted.append("finish_reason")
    return tuple(wanted)


def _ask_for_logprobs(inputs: InputTensors, signature: Signature, top: int) -> None:
    """TensorRT-LLM's models tell them without the tokens, and of no others."""
    spec = inputs.declared((RETURN_LOGPROBS,), bool)
    if spec is None or LOGPROBS not in signature.outputs or not can_exclude_prompt(signature):
        raise InvalidParameter(
            "logprobs",
            f"the model tells none: it would need the inputs '{RETURN_LOGPROBS}' and '{EXCLUDE_INPUT[0]}' and the "
            f"output '{LOGPROBS}'",
        )
    if top != 0:
        raise InvalidParameter("logprobs", f"the model tells those of its own tokens only: 0, got {top}")
    inputs.put(spec, [True], "logprobs")


def _flag(inputs: InputTensors, names: tuple[str, ...], value: bool) -> None:
    spec = inputs.declared(names, bool)
    if spec is not None:
        inputs.put(spec, [value], spec.name)


def _put(inputs: InputTensors, names: tuple[str, ...], value: str, field: str) -> None:
    spec = inputs.declared(names, str)
    assert spec is not None, "a model with a text face has it"
    inputs.put(spec, [value], field)


def _put_images(inputs: InputTensors, images: tuple[object, ...]) -> None:
    spec = inputs.declared(IMAGES, str)
    if spec is None:
        raise InvalidParameter("messages", "the model takes no images")
    texts = [image for image in images if isinstance(image, str)]
    if len(texts) < len(images):
        raise InvalidParameter("messages", "the model takes images as URLs or base64 only")
    if spec.name == "image":  # vLLM's backend reads base64 alone
        texts = [text.partition("base64,")[2] if text.startswith("data:") else text for text in texts]
    inputs.put(spec, texts, "messages")


def _put_adapter(inputs: InputTensors, name: str) -> None:
    """By its name, or by the number that TensorRT-LLM's models know it by."""
    named = inputs.declared(LORA_NAME, str)
    if named is not None:
        inputs.put(named, [name], "model")
        return
    numbered = inputs.declared(LORA_TASK, float)
    number = name.removeprefix(TASK_PREFIX)
    if numbered is None or not number.isdecimal():
        raise InvalidParameter("model", f"the model has no adapter '{name}'")
    inputs.put(numbered, [int(number)], "model")
