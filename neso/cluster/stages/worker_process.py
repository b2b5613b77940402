"""A worker process of a stage: `python -m neso.cluster.stages.worker_process OPTIONS_JSON`, started by the server."""

from __future__ import annotations

import sys

from neso.cluster.stages.worker import StageAgent, StageWorkerOptions
from neso.cluster.worker_process import run_child

if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1], StageWorkerOptions, StageAgent))
