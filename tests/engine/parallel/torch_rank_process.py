"""A rank that torchrun starts: runs the torch runner on each model, and rank 0 writes the logits.

torchrun --nproc-per-node N torch_rank_process.py OUTPUT TENSOR_PARALLEL PIPELINE_PARALLEL DTYPE MODEL ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from runners.plan_builder import mixed_batch

from neso.engine.parallel.launched_rank import launched_rank
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.torch_communicator import TorchCommunicator
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source


def main(output: str, tensor_parallel: str, pipeline_parallel: str, dtype: str, *models: str) -> None:
    found = launched_rank()
    assert found is not None
    layout = RankLayout(found.rank, int(tensor_parallel), int(pipeline_parallel))
    assert layout.size == found.size
    communicator = TorchCommunicator(layout)
    results = {}
    for index, model in enumerate(models):
        with open_source(model) as source:
            options = RunnerOptions(dtype=dtype, num_threads=1, layout=layout)  # type: ignore[arg-type]
            runner = TorchRunner.load(decoder_spec(source.config), source, options)
        runner.connect(communicator)
        results[str(index)] = mixed_batch(runner)
        communicator.barrier()
    if layout.rank == 0:
        np.savez(output, **results)
    sums = np.full((2, 3), layout.rank + 1, np.float32)
    communicator.all_reduce(sums)
    assert (sums == sum(rank + 1 for rank in layout.tp_group)).all()
    parts = communicator.gather(np.full((2, 1 + layout.tp_rank), layout.tp_rank, np.float32))
    if layout.tp_rank == 0:
        assert parts is not None
        np.testing.assert_array_equal(
            np.concatenate(parts, axis=1)[0],
            np.repeat(range(layout.tensor_parallel), range(1, layout.tensor_parallel + 1)),
        )
    values = np.full(4, layout.rank, np.float32)
    if not layout.is_last_stage:
        communicator.send(values, layout.next)
    if not layout.is_first_stage:
        communicator.receive(values, layout.previous)
        assert (values == layout.previous).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
