"""Where the torch runner computes."""

from __future__ import annotations

import torch

from neso.engine.runners.base import RunnerOptions
from neso.engine.runners.torch.operations import Operations, PlainOperations


def prepare_device(options: RunnerOptions) -> torch.device:
    """The current CUDA device where there is one, else the CPU, with as many threads as the options say."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    return torch.device("cpu")


def operations_for(device: torch.device) -> Operations:
    """Triton kernels on a GPU, torch's own operations elsewhere."""
    if device.type != "cuda":
        return PlainOperations()
    from neso.engine.runners.torch.kernels.operations import TritonOperations

    return TritonOperations()
