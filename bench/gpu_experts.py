"""A mixture-of-experts layer on a GPU: all rows in one grouped product, against a loop over the experts.

Prints milliseconds of a layer for several numbers of tokens: the loop, which waits for the number of rows of each
expert; the grouped kernels; the same kernels in a CUDA graph, as in a decode step; the ratio of the first to the last;
and the relative error between the two. Weights and routing are random. `--smoke` runs a tiny layer, without a GPU in
Triton's interpreter, to test the script.

usage: python bench/gpu_experts.py [--experts 128] [--top-k 8] [--hidden 2048] [--width 768] [--quantization fp8]
           [--tokens 1,16,64,256,4096] [--smoke]
"""

from __future__ import annotations

import argparse
import os

import torch
from smoke import exit_missing, parse_arguments
from torch import Tensor

if not torch.cuda.is_available():
    # Read when the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"

from gpu_model import captured, check_close, seconds

from neso.engine.runners.runner_options import DEFAULT_OPTIONS
from neso.engine.runners.torch.device_runner import operations_for
from neso.engine.runners.torch.linears import DenseLinear, ExpertLinears, Float8Linear, stack_experts
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.triton_operations import TritonOperations
from neso.engine.runners.torch.weights import Experts

MAX_ERROR = 0.05
"""Between experts of both ways: each rounds to bfloat16, and to float8 if the weights are."""


def random_experts(
    count: int, hidden: int, width: int, float8: bool, dtype: torch.dtype, device: torch.device
) -> Experts:
    def matrices(outputs: int, inputs: int) -> ExpertLinears:
        linear = Float8Linear.quantized if float8 else DenseLinear
        made = [linear(torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02) for _ in range(count)]
        return stack_experts(made, dtype)

    router = DenseLinear(torch.randn(count, hidden, dtype=dtype, device=device))
    return Experts(router, matrices(2 * width, hidden), matrices(hidden, width), None)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--tokens", default="1,16,64,256,4096")
    arguments = parse_arguments(parser, experts=4, top_k=2, hidden=64, width=32, tokens="8")
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.smoke:
        exit_missing("torch finds no GPU: see docs/guides/gpu.md")
    device, runs = torch.device("cuda" if gpu else "cpu"), 1 if arguments.smoke else 20
    # The interpreter does not multiply bfloat16.
    dtype = torch.bfloat16 if gpu else torch.float32
    grouped, looped = (
        operations_for(device, DEFAULT_OPTIONS) if gpu else TritonOperations(),
        PlainOperations(),
    )
    experts = random_experts(
        arguments.experts, arguments.hidden, arguments.width, arguments.quantization == "fp8", dtype, device
    )
    print(torch.cuda.get_device_name() if gpu else "interpreter")
    shape = f"{arguments.experts} experts of {arguments.hidden} x {arguments.width}"
    print(f"{shape}, {arguments.top_k} per token, {arguments.quantization or dtype}")
    print(f"{'tokens':>6} {'loop ms':>9} {'grouped ms':>11} {'in a graph ms':>14} {'ratio':>6} {'error':>7}")
    ratios = []
    for tokens in map(int, arguments.tokens.split(",")):
        x = torch.randn(tokens, arguments.hidden, dtype=dtype, device=device)
        weights, chosen = experts.router(x).float().softmax(dim=-1).topk(arguments.top_k, dim=-1)

        def run(
            operations: PlainOperations | TritonOperations, x=x, chosen=chosen, weights=weights
        ) -> Tensor:
            return operations.experts(x, experts, chosen, weights, "silu")

        error = check_close(f"{tokens} tokens", run(grouped), run(looped), MAX_ERROR)
        taken = [
            1e3 * seconds(function, runs)
            for function in (
                lambda run=run: run(looped),
                lambda run=run: run(grouped),
                captured(lambda run=run: run(grouped)),
            )
        ]
        ratio = taken[0] / taken[2]
        ratios.append(f"{ratio:.1f} with {tokens} tokens")
        print(f"{tokens:6} {taken[0]:9.2f} {taken[1]:11.2f} {taken[2]:14.2f} {ratio:6.1f} {error:7.4f}")
    print(f"headline: times as fast as a loop over the experts: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
