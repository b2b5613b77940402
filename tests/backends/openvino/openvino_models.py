"""Models made with OpenVINO's opset, as the files of a model version."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

openvino = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset13")

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
"""Exact in bfloat16, in which OpenVINO computes float32 models on CPUs with instructions for it."""


def ir(*outputs, inputs, layout: str = "") -> dict[str, bytes]:
    """Return model.xml and model.bin. `outputs`: nodes by position, named OUT, OUT1, …"""
    results = []
    for index, node in enumerate(outputs):
        result = ops.result(node, name=f"OUT{index or ''}")
        result.output(0).get_tensor().set_names({f"OUT{index or ''}"})
        results.append(result)
    model = openvino.Model(results, list(inputs), "model")
    if layout:
        for port in model.inputs:
            port.node.layout = openvino.Layout(layout)
    return _files(model)


def parameter(shape, datatype=np.float32, name: str = "X"):
    node = ops.parameter(shape, datatype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def linear(batch: int = -1, layout: str = "") -> dict[str, bytes]:
    """OUT = X @ WEIGHTS, with 4 columns in X and 3 in OUT."""
    x = parameter([batch, 4])
    return ir(ops.matmul(x, ops.constant(WEIGHTS), False, False), inputs=[x], layout=layout)


def double(shape, datatype=np.float32) -> dict[str, bytes]:
    """OUT = X + X."""
    x = parameter(shape, datatype)
    return ir(ops.add(x, x), inputs=[x])


def fixed_batch() -> dict[str, bytes]:
    """A model whose reshape to [2, 2] makes any other batch size than 2 impossible."""
    x = parameter([2, 2])
    flat = ops.reshape(x, ops.constant(np.array([2, 2], np.int64)), False)
    return ir(ops.multiply(flat, ops.constant(np.float32(3))), inputs=[x])


def accumulator() -> dict[str, bytes]:
    """OUT = X + the sum of all earlier X, which the model keeps in a variable."""
    opset6 = pytest.importorskip("openvino.opset6")
    x = parameter([1])
    start = ops.constant(np.zeros(1, np.float32))
    kept = opset6.read_value(start, "sum", openvino.Type.f32, openvino.PartialShape([1]))
    total = ops.add(kept, x)
    result = ops.result(total, name="OUT")
    result.output(0).get_tensor().set_names({"OUT"})
    return _files(
        openvino.Model(results=[result], sinks=[opset6.assign(total, "sum")], parameters=[x], name="m")
    )


def _files(model) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(model, Path(folder) / "model.xml", compress_to_fp16=False)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
