"""Validation of ensemble configurations."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.backends.ensemble.graph import EnsembleGraph
from neso.server.errors import InvalidArgument


def graph(*steps: str, inputs: str = "A", outputs: str = "Z") -> EnsembleGraph:
    """Return steps written as "model: in1 in2 -> out1 out2"; tensor names are the same in the models."""
    config = ModelConfig(name="e", platform="ensemble")
    for name in inputs.split():
        config.input.add(name=name, data_type="TYPE_FP32", dims=[1])
    for name in outputs.split():
        config.output.add(name=name, data_type="TYPE_FP32", dims=[1])
    for text in steps:
        model, _, tensors = text.partition(":")
        read, _, written = tensors.partition("->")
        step = config.ensemble_scheduling.step.add(model_name=model)
        for name in read.split():
            step.input_map[name] = name
        for name in written.split():
            step.output_map[name] = name
    text_format.MessageToString(config)
    return EnsembleGraph(config)


def test_steps_for_outputs() -> None:
    found = graph("one: A -> B", "two: B -> C", "three: B -> Z", "four: C -> Y", outputs="Z Y")
    assert found.steps_for(["Z"]) == {0, 2}
    assert found.steps_for(["Y"]) == {0, 1, 3}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "must specify 'step'"),
        (["m: B -> Z"], "tensor 'B', which step 0 .'m'. reads, is neither an input"),
        (["m: A -> B"], "no step produces the output 'Z'"),
        (["m: A -> Z", "n: A -> Z"], "'Z' can have only one producer"),
        (["m: A -> Z A"], "'A' can have only one producer"),
        (["m: A C -> B", "n: B -> C Z"], "in a cycle: 0 .'m'., 1 .'n'."),
        (["m: -> Z"], "must specify 'input_map' in step 0"),
        (["m: A -> "], "must specify 'output_map' in step 0"),
        ([": A -> Z"], "must specify 'model_name' in step 0"),
    ],
)
def test_invalid_graphs_are_rejected(steps: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        graph(*steps)
