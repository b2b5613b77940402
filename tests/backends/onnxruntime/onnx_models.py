"""ONNX models for tests, created with the `onnx` package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
T, helper, numpy_helper = onnx.TensorProto, onnx.helper, onnx.numpy_helper

Spec = tuple[str, int, list[Any] | None]


def graph(
    nodes: list[Any], inputs: list[Spec], outputs: list[Spec], initializers: dict[str, Any] | None = None
) -> bytes:
    """Return a model from nodes. Specs are name, element type and shape, with text for variable dimensions."""
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(*spec) for spec in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (initializers or {}).items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model.SerializeToString()


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, outputs, **attributes)


def identity(kind: int, shape: list[Any]) -> bytes:
    return graph([node("Identity", ["IN"], ["OUT"])], [("IN", kind, shape)], [("OUT", kind, shape)])


def linear(batch: Any = "N", features: int = 4, outputs: int = 3) -> bytes:
    """Return a model with SUM = X @ W + B and TOP, the index of the largest element."""
    rng = np.random.default_rng(0)
    weights = {
        "W": rng.standard_normal((features, outputs)).astype(np.float32),
        "B": rng.standard_normal(outputs).astype(np.float32),
    }
    nodes = [
        node("MatMul", ["X", "W"], ["XW"]),
        node("Add", ["XW", "B"], ["SUM"]),
        node("ArgMax", ["SUM"], ["TOP"], axis=1, keepdims=0),
    ]
    return graph(
        nodes,
        [("X", T.FLOAT, [batch, features])],
        [("SUM", T.FLOAT, [batch, outputs]), ("TOP", T.INT64, [batch])],
        weights,
    )


def accumulator() -> bytes:
    """Return a model with OUT = STATE_OUT = (START ? 0 : STATE) + IN, the running sum of a sequence."""
    nodes = [
        node("Cast", ["START"], ["FRESH"], to=T.BOOL),
        node("Mul", ["STATE", "ZERO"], ["NOTHING"]),
        node("Where", ["FRESH", "NOTHING", "STATE"], ["BEFORE"]),
        node("Add", ["BEFORE", "IN"], ["OUT"]),
        node("Identity", ["OUT"], ["STATE_OUT"]),
    ]
    return graph(
        nodes,
        [("IN", T.FLOAT, ["N", 1]), ("START", T.INT32, ["N", 1]), ("STATE", T.FLOAT, ["N", 1])],
        [("OUT", T.FLOAT, ["N", 1]), ("STATE_OUT", T.FLOAT, ["N", 1])],
        {"ZERO": np.zeros(1, np.float32)},
    )
