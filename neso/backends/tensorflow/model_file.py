"""SavedModel and GraphDef files: their signatures, and sessions that run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from neso.backends.tensor import Parameters
from neso.backends.tensor.model import output_names, server_inputs
from neso.backends.tensor.signature import ModelSignature, ModelTensor, check_config
from neso.backends.tensorflow.options import SAVED_MODEL, session_config
from neso.server.errors import InternalError, InvalidArgument, Unavailable
from neso.server.repository.names import is_inside
from neso.server.tensor import DataType

DEFAULT_TAG, DEFAULT_SIGNATURE = "serve", "serving_default"
_DATATYPES = {
    tf.bool: DataType.BOOL,
    tf.uint8: DataType.UINT8,
    tf.uint16: DataType.UINT16,
    tf.uint32: DataType.UINT32,
    tf.uint64: DataType.UINT64,
    tf.int8: DataType.INT8,
    tf.int16: DataType.INT16,
    tf.int32: DataType.INT32,
    tf.int64: DataType.INT64,
    tf.float16: DataType.FP16,
    tf.float32: DataType.FP32,
    tf.float64: DataType.FP64,
    tf.bfloat16: DataType.BF16,
    tf.string: DataType.BYTES,
}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A session with a loaded graph. Thread-safe. `inputs` and `outputs`: tensors of the graph by name."""

    session: tf.compat.v1.Session
    signature: ModelSignature
    inputs: dict[str, tf.Tensor]
    outputs: dict[str, tf.Tensor]


def read_signature(path: Path, config: Any, settings: Parameters) -> ModelSignature:
    """Read the inputs and outputs of a SavedModel without loading its weights. Raises `ServerError`."""
    _require(path, config.name)
    saved = SavedModel()
    try:
        if (binary := path / "saved_model.pb").is_file():
            saved.ParseFromString(binary.read_bytes())
        else:
            text_format.Parse((path / "saved_model.pbtxt").read_text(), saved)
    except (DecodeError, ValueError, OSError) as error:
        raise InternalError(
            f"unable to load model '{config.name}': cannot read '{path.name}': {error}"
        ) from None
    tag = _tag(settings)
    for graph in saved.meta_graphs:
        if set(graph.meta_info_def.tags) == {tag}:
            definition = _find_signature(graph, config.name, settings)
            return ModelSignature(_described(definition.inputs), _described(definition.outputs))
    found = "; ".join(", ".join(graph.meta_info_def.tags) for graph in saved.meta_graphs)
    raise InvalidArgument(
        f"unable to load model '{config.name}': it has no graph with the tag '{tag}', only {found}"
    )


def open_model(path: Path, directory: Path, config: Any, settings: Parameters) -> OpenModel:
    """Load a model into a new session, and check its configuration. `directory`: of the model. Raises `ServerError`."""
    _require(path, config.name)
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph, config=session_config(config, settings))
    load = _load_saved_model if config.platform == SAVED_MODEL else _load_graph_def
    try:
        with graph.as_default():
            signature, inputs, outputs = load(session, path, directory, config, settings)
    except tf.errors.OpError as error:
        raise InternalError(f"unable to load model '{config.name}': {explain(error)}") from None
    check_config(config, signature)
    return OpenModel(session, signature, inputs, outputs)


Loaded = tuple[ModelSignature, dict[str, tf.Tensor], dict[str, tf.Tensor]]


def _load_saved_model(
    session: tf.compat.v1.Session, path: Path, directory: Path, config: Any, settings: Parameters
) -> Loaded:
    # The signature is read first: its errors list the tags and signatures that the model has.
    signature = read_signature(path, config, settings)
    try:
        loaded = tf.compat.v1.saved_model.load(session, [_tag(settings)], str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise InternalError(f"unable to load model '{config.name}': {error}") from None
    definition = _find_signature(loaded, config.name, settings)
    inputs = _graph_tensors(session.graph, definition.inputs)
    return signature, inputs, _graph_tensors(session.graph, definition.outputs)


def _graph_tensors(graph: tf.Graph, infos: Any) -> dict[str, tf.Tensor]:
    """Return the tensors with a name; others, such as sparse ones, have no datatype in the signature."""
    return {name: graph.get_tensor_by_name(info.name) for name, info in infos.items() if info.name}


def _load_graph_def(
    session: tf.compat.v1.Session, path: Path, directory: Path, config: Any, settings: Parameters
) -> Loaded:
    """Load a frozen graph. The configured names are those of its operations, or of tensors such as "split:1"."""
    definition = tf.compat.v1.GraphDef()
    try:
        definition.ParseFromString(path.read_bytes())
        tf.graph_util.import_graph_def(definition, name="")
    except (DecodeError, OSError, ValueError) as error:
        raise InternalError(
            f"unable to load model '{config.name}': cannot read '{path.name}': {error}"
        ) from None
    for name in _init_operations(path, directory, config, settings):
        session.run(_find(session.graph.get_operation_by_name, name, session.graph, config.name))

    def tensor(name: str) -> tf.Tensor:
        return session.graph.get_tensor_by_name(name if ":" in name else f"{name}:0")

    def tensors(names: Iterable[str]) -> dict[str, tf.Tensor]:
        return {name: _find(tensor, name, session.graph, config.name) for name in names}

    inputs = [*(tensor.name for tensor in config.input), *server_inputs(config)]
    found = tensors(inputs), tensors(output_names(config))
    signature = ModelSignature(
        *({name: _describe(name, t.dtype, t.shape) for name, t in of.items()} for of in found)
    )
    return signature, *found


def _find(get: Callable[[str], Any], name: str, graph: tf.Graph, model: str) -> Any:
    try:
        return get(name)
    except (KeyError, ValueError):
        placeholders = [op.name for op in graph.get_operations() if op.type == "Placeholder"]
        raise InvalidArgument(
            f"unable to load model '{model}': its graph has no '{name}'; its placeholders are "
            f"{', '.join(placeholders) or 'none'}"
        ) from None


def _init_operations(path: Path, directory: Path, config: Any, settings: Parameters) -> list[str]:
    """Return the names in TF_INIT_OPS_FILE, of the version or else of the model. Raises `InvalidArgument`."""
    filename = settings.get("TF_INIT_OPS_FILE", "")
    if not filename:
        return []
    where = f"TF_INIT_OPS_FILE '{filename}' of model '{config.name}'"
    if not is_inside(filename):
        raise InvalidArgument(f"{where} must stay inside the model's folder")
    files = [folder / filename for folder in (path.parent, directory)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise InvalidArgument(f"{where} exists neither in the version folder nor in the model's folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{where} is not JSON: {error}") from None
    names = content.get("init_ops") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f'{where} must have the form {{"init_ops": ["name", …]}}')
    return names


def _require(path: Path, model: str) -> None:
    if not path.exists():
        raise Unavailable(f"unable to find '{path}' for model '{model}'")


def _tag(settings: Parameters) -> str:
    return settings.get("TF_GRAPH_TAG", DEFAULT_TAG)


def _find_signature(graph: Any, model: str, settings: Parameters) -> Any:
    """Return TF_SIGNATURE_DEF, else `serving_default`, else the first signature. Raises `InvalidArgument`."""
    known = {name: graph.signature_def[name] for name in sorted(graph.signature_def) if name[:2] != "__"}
    wanted = settings.get("TF_SIGNATURE_DEF", "")
    if not wanted and known:
        wanted = DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in known else next(iter(known))
    if wanted not in known:
        raise InvalidArgument(
            f"unable to load model '{model}': it has no signature '{wanted or DEFAULT_SIGNATURE}', only "
            f"{', '.join(known) or 'none'}"
        )
    return known[wanted]


def _described(infos: Any) -> dict[str, ModelTensor]:
    tensors = {}
    for name in sorted(infos):
        info = infos[name]
        if info.name:
            tensors[name] = _describe(name, tf.as_dtype(info.dtype), tf.TensorShape(info.tensor_shape))
        else:
            tensors[name] = ModelTensor(name, str(info.WhichOneof("encoding")), None, None)
    return tensors


def _describe(name: str, dtype: tf.DType, shape: tf.TensorShape) -> ModelTensor:
    dims = None if shape.rank is None else tuple(-1 if extent is None else extent for extent in shape)
    return ModelTensor(name, dtype.name, _DATATYPES.get(dtype), dims)


def explain(error: tf.errors.OpError) -> str:
    """Return what went wrong: the line before the operations of the graph, which are in double brackets."""
    message = error.message.partition("[[{{node ")[0].strip() or error.message.strip()
    return message.splitlines()[-1].strip() if message else type(error).__name__
