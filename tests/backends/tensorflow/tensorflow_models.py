"""TensorFlow models as the files of a model version. TensorFlow is imported in functions: this takes seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if (_spec := find_spec("tensorflow")) is None or _spec.origin is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
Files = dict[str, bytes]


def tensorflow():
    """Import TensorFlow as the backend does."""
    import neso.backends.tensorflow  # noqa: F401

    # isort: split
    import tensorflow as tf

    return tf


def _saved(save: Callable[[str], object]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.savedmodel"
        save(str(path))
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }


def saved_model(signatures: dict[str, tuple[Callable, list]], variable: np.ndarray | None = None) -> Files:
    """Return a SavedModel. `signatures`: by name, a function of tensors and, if `variable` is given, of the variable,
    and the `TensorSpec`s of its arguments."""
    tf = tensorflow()
    module = tf.Module()
    if variable is not None:
        module.variable = tf.Variable(variable)
    functions = {}
    for name, (function, specs) in signatures.items():
        call = function if variable is None else lambda *a, f=function: f(*a, module.variable)
        functions[name] = tf.function(call).get_concrete_function(*specs)
    return _saved(lambda path: tf.saved_model.save(module, path, signatures=functions))


@lru_cache
def linear() -> Files:
    """OUT = X @ WEIGHTS, with 4 columns in X and 3 in OUT; the signature "negative" returns the negative."""
    tf = tensorflow()
    spec = [tf.TensorSpec([None, 4], tf.float32, name="X")]
    return saved_model(
        {
            "serving_default": (lambda x, w: {"OUT": x @ w}, spec),
            "negative": (lambda x, w: {"OUT": -(x @ w)}, spec),
        },
        WEIGHTS,
    )


def double(shape: list, dtype) -> Files:
    """OUT = X + X."""
    tf = tensorflow()
    return saved_model(
        {"serving_default": (lambda x: {"OUT": x + x}, [tf.TensorSpec(shape, dtype, name="X")])}
    )


@lru_cache
def tagged() -> Files:
    """OUT = X * 3 in a graph with the tag "train", written with the API of TensorFlow 1; two signatures."""
    tf = tensorflow()

    def save(path: str) -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, [None, 2])
            by = {
                name: tf.compat.v1.saved_model.predict_signature_def({"X": x}, {"OUT": x * factor})
                for name, factor in (("thrice", 3.0), ("twice", 2.0))
            }
            builder = tf.compat.v1.saved_model.Builder(path)
            builder.add_meta_graph_and_variables(session, ["train"], signature_def_map=by)
            builder.save()

    return _saved(save)


@lru_cache
def graph_def() -> Files:
    """OUT = X @ WEIGHTS, and `halves`, the two halves of X, in a frozen graph."""
    tf = tensorflow()
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="X")
        tf.matmul(x, WEIGHTS, name="OUT")
        tf.split(x, 2, axis=1, name="halves")
        return {"model.graphdef": graph.as_graph_def().SerializeToString()}


@lru_cache
def with_variable() -> Files:
    """OUT = X + a variable, which the operation "set" sets to 5."""
    tf = tensorflow()
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1], name="X")
        variable = tf.compat.v1.get_variable("v", [1], use_resource=False)
        tf.compat.v1.assign(variable, [5.0], name="set")
        tf.add(x, variable, name="OUT")
        return {"model.graphdef": graph.as_graph_def().SerializeToString()}


@lru_cache
def running_sum() -> Files:
    """OUT = SUM_OUT = X + SUM, where SUM counts as 0 if START is 1, in a frozen graph."""
    tf = tensorflow()
    with tf.Graph().as_default() as graph:
        x, earlier = (tf.compat.v1.placeholder(tf.float32, [None, 1], name=name) for name in ("X", "SUM"))
        start = tf.compat.v1.placeholder(tf.int32, [None, 1], name="START")
        total = tf.add(x, earlier * tf.cast(1 - start, tf.float32), name="OUT")
        tf.identity(total, name="SUM_OUT")
        return {"model.graphdef": graph.as_graph_def().SerializeToString()}
