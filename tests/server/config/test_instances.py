"""Instances defined by the instance groups of a configuration."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.config.model_config import complete_config
from neso.server.config.scheduling import instances_of


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
