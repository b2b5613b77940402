"""A worker process of a stage: `python -m neso.cluster.stages.worker_process OPTIONS_JSON`, started by the server."""

from __future__ import annotations

import sys

from neso.cluster.agent import run_child
from neso.cluster.stages.worker import StageAgent, StageWorkerOptions

if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1], StageWorkerOptions, StageAgent))
