"""Model configurations (config.pbtxt): read, complete, check, write as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from neso.server.config.scheduling import available_gpus, check_scheduling
from neso.server.errors import InvalidArgument
from neso.server.repository.names import is_inside
from neso.server.schedulers.sequence_batcher import DEFAULT_IDLE_US

logger = logging.getLogger(__name__)

_FIELDS = ("optimization", "cc_model_filenames", "model_operations", "runtime")
_FIELDS_OF_INSTANCE_GROUP = ("host_policy", "secondary_devices")


def ignored_fields(config: Any, implemented: Set[str] = frozenset()) -> list[str]:
    """Return the configured fields that have no effect. The backend implements the fields in `implemented`."""
    names = [field.name for field, _ in config.ListFields() if field.name in _FIELDS]
    for group in config.instance_group:
        names += [
            f"instance_group.{field.name}"
            for field, _ in group.ListFields()
            if field.name in _FIELDS_OF_INSTANCE_GROUP
        ]
    return [name for name in dict.fromkeys(names) if name not in implemented]


def string_parameter(config: Any, name: str, default: str = "") -> str:
    """Return the string value of a parameter of a `ModelConfig` message; `default` if it is not set."""
    parameters = config.parameters
    # Looking up a missing name in a map of messages would insert it.
    return str(parameters[name].string_value) if name in parameters else default


_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "off", "0"), False),
}


def parse_bool(text: str) -> bool | None:
    """Parse the text of a boolean parameter, ignoring case; None if it is not a boolean."""
    return _BOOLEANS.get(text.strip().lower())


TENSORRT_LLM_PLACEHOLDER = "${triton_backend}"
"""The backend in the template of TensorRT-LLM's model, if it was not filled in."""
CONFIG_FILENAME = "config.pbtxt"
CONFIG_FOLDER = "configs"

_BACKEND_OF_FILE = {
    "model.py": "python",
    "model.onnx": "onnxruntime",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.plan": "tensorrt",
    "model.xml": "openvino",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
}
_OTHER_FILES = {
    "openvino": ("model.onnx", "model.pdmodel", "model.tflite", "model.saved_model", "model.savedmodel")
}
"""Files that a backend reads if the configuration names it; without a backend, they are for another one or for none."""
_BACKEND_OF_PLATFORM = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_FILE_OF_PLATFORM = {"tensorflow_graphdef": "model.graphdef", "tensorflow_savedmodel": "model.savedmodel"}
_PLATFORM_OF_BACKEND = {"onnxruntime": "onnxruntime_onnx", "pytorch": "pytorch_libtorch"}


def read_config(directory: Path, custom_name: str = "") -> ModelConfig | None:
    """Parse the model's `configs/<custom_name>.pbtxt`, or else its config.pbtxt; None if neither file exists.

    Raises `InvalidArgument` with line and column.
    """
    path = directory / CONFIG_FOLDER / f"{custom_name}.pbtxt"
    if not (custom_name and path.is_file()):
        path = directory / CONFIG_FILENAME
    if not path.is_file():
        return None
    try:
        return _check_enums(text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig()))
    except (text_format.ParseError, ValueError, OSError) as error:
        # protobuf raises a plain ValueError for an enum number out of range, without its position.
        raise InvalidArgument(f"failed to read text proto from {path}: {error}") from None


def config_from_json(text: str) -> ModelConfig:
    """Parse a configuration as JSON; a repeated field can be a single value, as in Triton. Raises `InvalidArgument`."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise InvalidArgument("failed to parse the model configuration: expected a JSON object")
        document = _lists_of_repeated(document, ModelConfig.DESCRIPTOR)
        return _check_enums(json_format.ParseDict(document, ModelConfig()))
    except (json_format.ParseError, ValueError) as error:
        raise InvalidArgument(f"failed to parse the model configuration: {error}") from None
    except RecursionError:
        raise InvalidArgument("failed to parse the model configuration: nested too deeply") from None


def _lists_of_repeated(value: Any, descriptor: Any) -> Any:
    """Return the JSON of a message with a list for each repeated field: `{"dims": 4}` becomes `{"dims": [4]}`."""
    if not isinstance(value, dict) or descriptor is None:
        return value
    fields = {**descriptor.fields_by_camelcase_name, **descriptor.fields_by_name}
    return {name: _list_if_repeated(content, fields.get(name)) for name, content in value.items()}


def _list_if_repeated(value: Any, field: Any) -> Any:
    if field is None or value is None:
        return value
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        of_value = message.fields_by_name["value"].message_type
        if not isinstance(value, dict):
            return value
        return {key: _lists_of_repeated(entry, of_value) for key, entry in value.items()}
    if not field.is_repeated:
        return _lists_of_repeated(value, message)
    return [_lists_of_repeated(item, message) for item in (value if isinstance(value, list) else [value])]


def _check_enums(message: Any, path: str = "") -> Any:
    """Return the message. Raises `ValueError` for undefined enum numbers, which proto3 parsers accept."""
    for field, value in message.ListFields():
        if field.message_type is None and field.enum_type is None:
            continue
        is_map = field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry
        if is_map:
            entries = [(f"{field.name}['{key}']", value[key]) for key in value]
        elif field.is_repeated:
            entries = [(f"{field.name}[{i}]", element) for i, element in enumerate(value)]
        else:
            entries = [(field.name, value)]
        for name, entry in entries:
            if field.enum_type is not None and entry not in field.enum_type.values_by_number:
                raise ValueError(f"{path}{name}: {field.enum_type.name} has no value {entry}")
            if field.message_type is not None and hasattr(entry, "ListFields"):
                _check_enums(entry, f"{path}{name}.")
    return message


def config_to_json(config: ModelConfig) -> str:
    """Convert the configuration to JSON with protobuf field names."""
    return json.dumps(config_to_dict(config))


def config_to_dict(message: Any) -> dict[str, Any]:
    """Convert a message to a dictionary with protobuf field names, including default values.

    64-bit integers stay integers, as Triton clients expect; protobuf's JSON mapping would convert them to strings.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            entry = field.message_type
            if entry is not None and entry.GetOptions().map_entry:
                of_value = entry.fields_by_name["value"]
                result[field.name] = {str(key): _plain(of_value, value[key]) for key in sorted(value)}
            else:
                result[field.name] = [_plain(field, element) for element in value]
        elif not field.has_presence or message.HasField(field.name):
            result[field.name] = _plain(field, value)
    return result


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return config_to_dict(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


def is_ensemble(config: ModelConfig) -> bool:
    """Return whether the model is an ensemble."""
    return bool(config.platform == "ensemble")


def complete_config(config: ModelConfig, name: str, version_directory: Path) -> None:
    """Fill in defaults that do not depend on the backend: name, backend, file name, version policy, instance groups."""
    if not config.name:
        config.name = name
    if config.backend == TENSORRT_LLM_PLACEHOLDER:
        config.backend = "tensorrtllm"
    if not config.backend and not is_ensemble(config):
        config.backend = _infer_backend(config, version_directory)
    config.platform = config.platform or _PLATFORM_OF_BACKEND.get(config.backend, "")
    config.default_model_filename = (
        config.default_model_filename
        or _FILE_OF_PLATFORM.get(config.platform)
        or _find_file(config.backend, version_directory)
    )
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    _drop_repeated_outputs(config)
    if is_ensemble(config) or config.HasField("ensemble_scheduling"):
        return
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
        if batching.WhichOneof("strategy_choice") is None:
            batching.direct.SetInParent()
    if not config.instance_group:
        config.instance_group.add()
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{name}_{index}"
        group.count = max(group.count, 1)
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            group.kind = ModelInstanceGroup.KIND_GPU if group.gpus else ModelInstanceGroup.KIND_CPU
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(available_gpus())


def complete_batching(config: ModelConfig) -> None:
    """Fill in the preferred batch size: `max_batch_size`, as in Triton. Call when `max_batch_size` is final."""
    if config.max_batch_size <= 0:
        return
    batchers = []
    if config.HasField("dynamic_batching"):
        batchers.append(config.dynamic_batching)
    if config.sequence_batching.HasField("oldest"):
        batchers.append(config.sequence_batching.oldest)
    for batcher in batchers:
        if not batcher.preferred_batch_size:
            batcher.preferred_batch_size.append(config.max_batch_size)


def _drop_repeated_outputs(config: ModelConfig) -> None:
    """Drop outputs that are equal to an earlier one: Triton accepts them, and published repositories have them."""
    repeated = [i for i, tensor in enumerate(config.output) if tensor in config.output[:i]]
    for index in reversed(repeated):
        logger.warning(
            "model '%s': its configuration lists output '%s' more than once",
            config.name,
            config.output[index].name,
        )
        del config.output[index]


def _infer_backend(config: ModelConfig, version_directory: Path) -> str:
    """Infer the backend from platform, file name, existing files or model name; "" if unknown."""
    if config.platform:
        return _BACKEND_OF_PLATFORM.get(config.platform, "")
    if config.default_model_filename:
        return _BACKEND_OF_FILE.get(config.default_model_filename, "")
    for filename, backend in _BACKEND_OF_FILE.items():
        if (version_directory / filename).exists():
            return backend
    return str(config.name).rpartition(".")[2] if "." in config.name else ""


def _find_file(backend: str, version_directory: Path) -> str:
    """Return the first of the backend's model file names that exists; its first name if none exists."""
    names = [filename for filename, of in _BACKEND_OF_FILE.items() if of == backend]
    names += _OTHER_FILES.get(backend, ())
    return next((name for name in names if (version_directory / name).exists()), names[0] if names else "")


def check_config(config: ModelConfig, name: str, *, complete: bool = True) -> None:
    """Check that the configuration is consistent and supported. Raises `ServerError`.

    `complete`: tensors must have datatype and dims; false before the backend completes the configuration.
    """
    if config.name != name:
        raise InvalidArgument(
            f"unexpected directory name '{name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    _check_schedulers(config)
    if config.backend == TENSORRT_LLM_PLACEHOLDER:
        config.backend = "tensorrtllm"
    if not config.backend and not is_ensemble(config):
        raise InvalidArgument(
            f"unexpected platform type '{config.platform}' for {name}"
            if config.platform
            else f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'."
        )
    if config.max_batch_size < 0:
        raise InvalidArgument(f"'max_batch_size' must be non-negative value for {name}")
    for kind, tensors in (("input", config.input), ("output", config.output)):
        seen: set[str] = set()
        for tensor in tensors:
            _check_tensor(tensor, kind, config, complete)
            if tensor.name in seen:
                raise InvalidArgument(f"model {kind} '{tensor.name}' is specified more than once for {name}")
            seen.add(tensor.name)
    check_scheduling(config)
    _check_filenames(config)


def _check_filenames(config: ModelConfig) -> None:
    names = [("default_model_filename", config.default_model_filename)]
    names += [
        (f"cc_model_filenames['{key}']", filename) for key, filename in config.cc_model_filenames.items()
    ]
    for field, filename in names:
        if not is_inside(filename):
            raise InvalidArgument(
                f"{field} '{filename}' must stay inside the version folder of model '{config.name}'"
            )


def differ_in_instances_only(old: ModelConfig, new: ModelConfig) -> bool:
    """Return whether two completed configurations differ at most in instance groups and version policies."""
    copies = []
    for config in (old, new):
        copy = ModelConfig()
        copy.CopyFrom(config)
        copy.ClearField("instance_group")
        copy.ClearField("version_policy")
        copies.append(copy)
    return bool(copies[0] == copies[1])


def _check_schedulers(config: ModelConfig) -> None:
    scheduler = config.WhichOneof("scheduling_choice")
    if (scheduler == "ensemble_scheduling") != (config.platform == "ensemble"):
        raise InvalidArgument(
            f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
            if config.platform == "ensemble"
            else f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        )
    if is_ensemble(config) and config.instance_group:
        raise InvalidArgument(f"instance group should not be specified for ensemble '{config.name}'")


def _check_tensor(tensor: Any, kind: str, config: ModelConfig, complete: bool) -> None:
    where = f"for {config.name}"
    if not tensor.name:
        raise InvalidArgument(f"model {kind} must specify 'name' {where}")
    if not tensor.data_type and complete:
        raise InvalidArgument(f"model {kind} '{tensor.name}' must specify 'data_type' {where}")
    if not tensor.dims and config.max_batch_size == 0 and complete:
        raise InvalidArgument(f"model {kind} '{tensor.name}' must specify 'dims' {where}")
    for what, extents in (("dimension", tensor.dims), ("reshape dimensions", tensor.reshape.shape)):
        for extent in extents:
            if extent < 1 and extent != -1:
                raise InvalidArgument(
                    f"model {kind} '{tensor.name}' {what} must be integer >= 1, or -1 to indicate a "
                    f"variable-size dimension {where}"
                )
    if tensor.is_shape_tensor:
        raise InvalidArgument(f"shape tensors are only supported for TensorRT platform {where}")
    if tensor.is_non_linear_format_io:
        raise InvalidArgument(
            f"non-linear formats of tensors are only supported for TensorRT platform {where}"
        )
    if getattr(tensor, "format", 0) and len(tensor.dims) != 3:
        raise InvalidArgument(f"model input NHWC/NCHW require 3 dims {where}")
    if tensor.HasField("reshape"):
        _check_reshape(tensor, kind, where)


def _check_reshape(tensor: Any, kind: str, where: str) -> None:
    """Raise `InvalidArgument` unless the numbers of elements between variable dimensions are equal."""
    dims, shape = _fixed_counts(tensor.dims), _fixed_counts(tensor.reshape.shape)
    if len(dims) != len(shape) and len(dims) > 1 and len(shape) > 1:
        raise InvalidArgument(
            f"model {kind} '{tensor.name}' has different number of variable-size dimensions for dims "
            f"and reshape {where}"
        )
    if dims != shape:
        raise InvalidArgument(f"model {kind} '{tensor.name}' has different size for dims and reshape {where}")


def _fixed_counts(extents: Iterable[int]) -> list[int]:
    """Return the numbers of elements before, between and after the variable dimensions."""
    counts = [1]
    for extent in extents:
        if extent == -1:
            counts.append(1)
        else:
            counts[-1] *= extent
    return counts
