"""Models on workers: the work queue of the server process, and the worker processes that pull requests from it.

On the server's side, `front_end` has the requests and `connections` the workers; `worker` is a worker's side, and
`messages` are what both send to each other. `stages` are models of a repository on workers.

The names in `__all__` are the public API, see docs/guides/cluster-api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.cluster.cluster_engine import ClusterEngine
    from neso.cluster.router import Choice, Router
    from neso.cluster.stages.manifold import Manifold
    from neso.cluster.stages.tensors import TensorReader, TensorRef, TensorServer, TensorStore, map_tensor
    from neso.cluster.stages.worker import StageAgent, StageWorkerOptions
    from neso.cluster.work_queue import Job, WorkerState, WorkQueue
    from neso.cluster.worker import Worker
    from neso.cluster.worker_options import WorkerOptions
    from neso.engine.cluster_config import ClusterConfig
    from neso.engine.config import EngineConfig
    from neso.engine.core.request import KvExport, KvImport
    from neso.server.stage_options import StageOptions

__all__ = [
    "Choice",
    "ClusterConfig",
    "ClusterEngine",
    "EngineConfig",
    "Job",
    "KvExport",
    "KvImport",
    "Manifold",
    "Router",
    "StageAgent",
    "StageOptions",
    "StageWorkerOptions",
    "TensorReader",
    "TensorRef",
    "TensorServer",
    "TensorStore",
    "WorkQueue",
    "Worker",
    "WorkerOptions",
    "WorkerState",
    "map_tensor",
]

# Imported on first use: a worker of a language model needs no server core.
_MODULES = {
    "neso.cluster.cluster_engine": ("ClusterEngine",),
    "neso.cluster.router": ("Choice", "Router"),
    "neso.cluster.stages.manifold": ("Manifold",),
    "neso.cluster.stages.tensors": ("TensorReader", "TensorRef", "TensorServer", "TensorStore", "map_tensor"),
    "neso.cluster.stages.worker": ("StageAgent", "StageWorkerOptions"),
    "neso.cluster.work_queue": ("Job", "WorkQueue", "WorkerState"),
    "neso.cluster.worker": ("Worker",),
    "neso.cluster.worker_options": ("WorkerOptions",),
    "neso.engine.cluster_config": ("ClusterConfig",),
    "neso.engine.config": ("EngineConfig",),
    "neso.engine.core.request": ("KvExport", "KvImport"),
    "neso.server.stage_options": ("StageOptions",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'neso.cluster' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
