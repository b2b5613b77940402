"""A worker process: `python -m neso.cluster.worker_process OPTIONS_JSON`, started by the server."""

from __future__ import annotations

import sys

from neso.cluster.agent import run_child
from neso.cluster.worker import Worker
from neso.cluster.worker_options import WorkerOptions

if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1], WorkerOptions, Worker))
