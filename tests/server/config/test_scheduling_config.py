"""Validation of batching, sequence and instance settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.config.model_config import check_config, complete_config
from neso.server.config.scheduling import instances_of
from neso.server.errors import InvalidArgument

BASE = """
name: "m" backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
ELEMENTS = 'kind: BATCH_ELEMENT_COUNT data_type: TYPE_INT32 source_input: "IN"'
SCATTER = "kind: BATCH_SCATTER_WITH_INPUT_SHAPE"
DELAY = "timeout_action: DELAY default_timeout_microseconds: 1"


def check(text: str, base: str = BASE) -> None:
    check_config(text_format.Parse(base + text, ModelConfig()), "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_batching { preferred_batch_size: 0 }", "dynamic batching preferred size must be positive"),
        (
            "dynamic_batching { preferred_batch_size: [ 2, 5 ] }",
            "dynamic batching preferred size must be <= max batch size",
        ),
        ("dynamic_batching { priority_levels: 2 }", "default priority level must be in range [1, 2]"),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            "default priority level must be in range [1, 2]",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 } }",
            "priority queue policy must have priority level in range [1, 2]",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
            "Only one priority level is allowed when 'preserve_ordering' is true",
        ),
        (
            f"dynamic_batching {{ preserve_ordering: true default_queue_policy {{ {DELAY} }} }}",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true",
        ),
        (
            "sequence_batching { oldest { preferred_batch_size: -1 } }",
            "sequence batching preferred batch size must be positive",
        ),
        (
            "sequence_batching { oldest { preferred_batch_size: 5 } }",
            "sequence batching preferred batch size must be <= max batch size",
        ),
        (
            "sequence_batching { oldest { max_candidate_sequences: -1 } }",
            "max candidate sequences must be non-negative",
        ),
        (
            "sequence_batching { direct { minimum_slot_utilization: 1.5 } }",
            "minimum slot utilization must be in range (0.0, 1.0]",
        ),
        (
            'instance_group { name: "g" kind: KIND_CPU gpus: 0 }',
            "instance group g of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            'instance_group { kind: KIND_CPU profile: "0" }',
            "specifies profile field which is only supported for TensorRT models",
        ),
        ("instance_group { passive: true }", "model m must have an instance group that is not passive"),
        (
            "batch_input { kind: BATCH_ITEM_SHAPE data_type: TYPE_INT32 }",
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 0",
        ),
        (
            'batch_input { data_type: TYPE_INT64 source_input: "IN" }',
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        (
            'batch_input { data_type: TYPE_INT32 source_input: "X" }',
            "unknown source input name 'X'",
        ),
        (
            f'batch_input {{ {ELEMENTS} target_name: "IN" }}',
            "target input name 'IN' can only be specified once",
        ),
        (
            f"batch_output {{ {SCATTER} }}",
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input",
        ),
        (
            f'batch_output {{ {SCATTER} source_input: "IN" target_name: "X" }}',
            "unknown target output name 'X'",
        ),
        (
            f'batch_output {{ {SCATTER} source_input: "IN" target_name: [ "OUT", "OUT" ] }}',
            "target output name 'OUT' can only be specified once",
        ),
        (
            'input { name: "S" data_type: TYPE_INT32 dims: [ 1 ] is_shape_tensor: true }',
            "shape tensors are only supported for TensorRT platform",
        ),
        (
            'input { name: "S" data_type: TYPE_INT32 dims: [ 1 ] format: FORMAT_NCHW }',
            "model input NHWC/NCHW require 3 dims",
        ),
    ],
)
def test_invalid_configurations_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check(text)
    assert message in raised.value.message
    assert raised.value.message.endswith(" for m") or "model m " in raised.value.message


def test_preferred_sizes_need_a_batch_dimension() -> None:
    with pytest.raises(InvalidArgument, match="preferred size must be <= max batch size for m"):
        check("dynamic_batching { preferred_batch_size: 1 }", BASE.replace("max_batch_size: 4", ""))


@pytest.mark.parametrize(
    "text",
    [
        "dynamic_batching { preferred_batch_size: [ 1, 4 ] preserve_ordering: true priority_levels: 1 "
        "default_priority_level: 1 }",
        f"dynamic_batching {{ default_queue_policy {{ {DELAY} allow_timeout_override: true max_queue_size: 3 }} }}",
        "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 9 } }",
        "sequence_batching { direct { minimum_slot_utilization: 1.0 } }",
        "instance_group { count: 2 } instance_group { passive: true }",
        f'batch_input {{ {ELEMENTS} target_name: "COUNT" }} '
        f'batch_output {{ {SCATTER} source_input: "IN" target_name: "OUT" }}',
        "model_transaction_policy { decoupled: true } dynamic_batching { }",
    ],
)
def test_valid_configurations_are_accepted(text: str) -> None:
    check(text)


def instances(text: str) -> list[tuple[str, str, int, bool]]:
    config = text_format.Parse(f'backend: "python" {text}', ModelConfig())
    complete_config(config, "m", Path())
    return [(spec.name, spec.kind, spec.device, spec.passive) for spec in instances_of(config)]


def test_default_is_one_cpu_instance() -> None:
    assert instances("") == [("m_0_0", "CPU", 0, False)]


def test_counts_are_per_gpu() -> None:
    assert instances('instance_group { name: "g" count: 2 kind: KIND_GPU gpus: [ 1, 3 ] }') == [
        ("g_0", "GPU", 1, False),
        ("g_1", "GPU", 1, False),
        ("g_2", "GPU", 3, False),
        ("g_3", "GPU", 3, False),
    ]


def test_a_group_runs_on_its_gpus() -> None:
    assert instances("instance_group { gpus: 2 }") == [("m_0_0", "GPU", 2, False)]
    assert instances("instance_group { kind: KIND_GPU }") == [("m_0_0", "GPU", 0, False)]


def test_passive_instances_come_last() -> None:
    groups = "instance_group { passive: true count: -1 } instance_group { kind: KIND_MODEL count: 2 }"
    assert instances(groups) == [
        ("m_1_0", "MODEL", 0, False),
        ("m_1_1", "MODEL", 0, False),
        ("m_0_0", "CPU", 0, True),
    ]
