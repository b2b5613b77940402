"""Features of the torch runner on a GPU, each relative to a baseline in the same run.

- attention: FlashAttention and FlashInfer, where installed, against the Triton kernel: the attention of a step
- adapters: steps with LoRA adapters against steps without, and without CUDA graphs
- sampling: top-p, penalties, grammar masks and log probabilities against greedy sampling
- products: matrices in int8, int4, GPTQ's, AWQ's and float8 formats against bfloat16
- graphs: decode steps with CUDA graphs against steps without
- overlap: an engine that launches a step while the previous one runs, against one that waits

Results are compared with those of the plain implementation; a part fails if they differ by more than rounding. The
ratios are: times as fast as the baseline.

usage: python bench/gpu_features.py [PART ...] [--layers N] [--smoke]

`--smoke` runs tiny shapes to test the script; without a GPU attention and products run in Triton's interpreter, the
rest in plain torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from smoke import exit_missing, parse_arguments
from torch import Tensor

if not torch.cuda.is_available():
    # Read when the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
from gpu_model import (
    BLOCK_SIZE,
    RandomWeights,
    captured,
    check_close,
    device_seconds,
    fill_cache,
    layers_that_fit,
    llama_config,
    logits_of,
    plan,
    relative_error,
    release,
    seconds,
)

from neso.engine.addons.registry import standard_addons
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.step_plan import StepPlan
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.adapter import TARGETS, LoraAdapter, LoraPlan, LowRank
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.runner_options import AttentionBackendName, RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.attention import (
    Attention,
    AttentionNeeds,
    check_attention,
    open_attention,
)
from neso.engine.runners.torch.device_runner import LaunchedDeviceLogits
from neso.engine.runners.torch.grouped_weights import GroupedWeights
from neso.engine.runners.torch.kv_cache import HeadShape, LayerCache
from neso.engine.runners.torch.linears import DenseLinear, Float8Linear, Linear, QuantizedLinear
from neso.engine.runners.torch.operations import Operations, PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.runners.torch.step_inputs import choose_tile_queries, step_inputs
from neso.engine.runners.torch.triton_attention import paged_attention
from neso.engine.sampling.adjustments import Cells, LogitAdjustments
from neso.engine.sampling.token_sampling import RowMasks, SamplingBatch
from neso.engine.sampling.token_scores import ScoreRequest, sample_and_score
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.quantized import Float8Matrix, QuantizedMatrix
from neso.generation import SamplingParams


@dataclass(frozen=True)
class Setup:
    """What all parts share. `dtype`: the interpreter does not multiply bfloat16. `runs`: measurements of a median."""

    config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    runs: int

    @property
    def smoke(self) -> bool:
        return self.runs == 1

    @property
    def spec(self) -> DecoderSpec:
        return decoder_spec(self.config)

    def seconds(self, function: Callable[[], object]) -> float:
        return seconds(function, self.runs, warm_ups=1 if self.smoke else 3)

    def load(self, **options: Any) -> TorchRunner:
        """Return a runner; without a GPU it has neither Triton kernels nor CUDA graphs."""
        name = str(self.dtype).removeprefix("torch.")
        return TorchRunner.load(self.spec, RandomWeights(self.config), RunnerOptions(name, **options))


def without_graphs(runner: TorchRunner, operations: Operations | None = None) -> TorchRunner:
    """Return a runner with the same weights and cache, without CUDA graphs, and with other operations if given."""
    decoder = runner._decoder if operations is None else replace(runner._decoder, operations=operations)
    other = TorchRunner(runner.shard, decoder, runner.device)
    other._cache = runner._cache
    return other


def show(case: str, name: str, taken: float, baseline: float, *notes: str) -> float:
    """Print a measurement, and return how many times as fast as the baseline it is."""
    ratio = baseline / taken
    print(f"{case:24} {name:28} {1e3 * taken:9.3f} ms {ratio:7.2f}  {', '.join(notes)}", flush=True)
    return ratio


# -- attention --------------------------------------------------------------------------------------------------------


def attention(setup: Setup) -> str:
    """The attention of a step of several layers, including what a library prepares on the host for each step."""
    cases = [("decode", 2, 1, 20), ("prefill", 1, 24, 0)]
    if not setup.smoke:
        decodes = [("decode", batch, 1, context) for context in (512, 4096) for batch in (1, 16, 64)]
        cases = [*decodes, ("prefill", 1, 1024, 0), ("prefill", 1, 1024, 4096), ("prefill", 1, 8192, 0)]
    headline = {}
    backends = list(_backends(setup))
    for phase, batch, new_tokens, context in cases:
        case, baseline = f"{phase} {batch} x {new_tokens} after {context}", 0.0
        for name, block_size, attend in backends:
            step = AttentionStep(setup, plan(batch, new_tokens, context, block_size), block_size)
            error = "not compared"
            # With more, the mask and the scores of plain torch operations would take gigabytes.
            if new_tokens <= 1024:
                found, expected = step.run(attend), step.run(PlainOperations().attention)
                error = f"error {check_close(f'{case}, {name}', found, expected, 0.02):.4f}"
            taken = setup.seconds(partial(step.run, attend))
            baseline = baseline or taken
            ratio = show(case, name, taken, baseline, error)
            if name != "triton":
                # Of the last decode and the last prefill, which are the largest.
                headline[phase, name] = f"{case}: {name} {ratio:.2f}"
            elif phase == "decode":
                # As decode steps run with any backend.
                show(case, "triton, CUDA graph", setup.seconds(captured(partial(step.run, attend))), baseline)
            del step
            release()
    libraries = "times as fast as triton: " + "; ".join(headline.values())
    return libraries if headline else "FlashInfer and FlashAttention do not run here"


def _backends(setup: Setup) -> Iterator[tuple[str, int, Attention]]:
    """Yield names, tokens per block and attention; those of libraries only if they are installed."""
    shape = HeadShape(setup.spec.num_kv_heads, setup.spec.head_dim, setup.spec.head_dim)
    yield "triton", BLOCK_SIZE, paged_attention
    names: tuple[tuple[AttentionBackendName, int], ...] = (("flashinfer", BLOCK_SIZE), ("flash_attn", 256))
    for name, block_size in names:
        try:
            found = open_attention(setup.device, RunnerOptions(attention_backend=name))
            assert found is not None
            check_attention(found, AttentionNeeds([shape], setup.dtype, block_size))
        except UnsupportedOption as error:
            print(error)
        else:
            yield name, block_size, found


class AttentionStep:
    """The attention of a step in several layers with a cache of random numbers, the same in each object."""

    def __init__(self, setup: Setup, step: StepPlan, block_size: int) -> None:
        spec, generator = setup.spec, torch.Generator(setup.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=setup.dtype, device=setup.device, generator=generator)

        shape = (step.block_tables.size, block_size, spec.num_kv_heads, spec.head_dim)
        # Several, so that a small KV cache isn't in the cache of the GPU already.
        self._layers = [LayerCache(normal(*shape), normal(*shape)) for _ in range(min(spec.num_layers, 8))]
        self._queries = normal(step.num_tokens, spec.num_heads, spec.head_dim)
        self._scale = spec.head_dim**-0.5
        tile_queries = choose_tile_queries(spec.num_heads // spec.num_kv_heads, spec.head_dim)
        self._inputs = step_inputs(step, block_size, setup.device, tile_queries=tile_queries)

    def run(self, attend: Attention) -> Tensor:
        """Return the attention of the last layer."""
        # A new object for each step, because libraries prepare once for each.
        inputs = replace(self._inputs)
        return [attend(self._queries, layer, inputs, None, self._scale, 0.0) for layer in self._layers][-1]


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapters(setup: Setup) -> str:
    """Steps with LoRA adapters of rank 16, on all matrices, in a batch of 64."""
    batch, context, rank, prompt = (2, 16, 4, 20) if setup.smoke else (64, 512, 16, 1024)
    runner = setup.load(lora_slots=batch, max_lora_rank=rank)
    # Two adapters take turns in the slots: to make 64 different ones would take minutes.
    packed = [runner.pack_adapter(_random_adapter(setup.spec, rank, seed)) for seed in range(2)]
    for slot in range(batch):
        runner.set_adapter(slot, packed[slot % 2])
    blocks = max(batch * (-(-context // BLOCK_SIZE) + 1), -(-prompt // BLOCK_SIZE))
    runner.allocate_cache(CacheLayout(blocks, BLOCK_SIZE))
    fill_cache(runner)
    plain, ungraphed = without_graphs(runner, PlainOperations()), without_graphs(runner)
    headline = []
    for case, step in (
        (f"decode {batch}", plan(batch, 1, context)),
        (f"prefill {prompt}", plan(1, prompt, 0)),
    ):
        bare = logits_of(runner, step).clone()
        baseline = setup.seconds(partial(runner.step, step))
        show(case, "no adapter", baseline, baseline)
        sequences = step.num_sequences
        for count in sorted({1, min(8, sequences), sequences}):
            name = f"{count} adapter{'s' * (count > 1)}"
            adapted = step.with_part(LoraPlan(np.arange(sequences, dtype=np.int32) % count))
            found = logits_of(runner, adapted).clone()
            error = check_close(f"{case}, {name}", found, logits_of(plain, adapted))
            change = relative_error(found, bare)
            if not change > 3 * error:
                raise RuntimeError(f"{case}: adapters change the logits by {change:.3g}, error {error:.3g}")
            notes = f"error {error:.4f}", f"logits change by {change:.2f}"
            taken = setup.seconds(partial(runner.step, adapted))
            ratio = show(case, name, taken, baseline, *notes)
            headline.append(f"{case}, {name}: {ratio:.2f}")
        if runner._graphs is not None and step.num_sequences == step.num_tokens:
            taken = setup.seconds(partial(ungraphed.step, adapted))
            show(case, f"{name}, no graph", taken, baseline)
    return "times as fast as without adapters: " + "; ".join(headline)


def _random_adapter(spec: DecoderSpec, rank: int, seed: int) -> LoraAdapter:
    rng = np.random.default_rng(seed)

    def update(outputs: int, inputs: int) -> LowRank:
        a, b = (rng.standard_normal(shape, np.float32) * 0.05 for shape in ((rank, inputs), (outputs, rank)))
        return LowRank(a, b, 1.0)

    shapes = [layer_shapes(spec, layer) for layer in range(spec.num_layers)]
    return LoraAdapter(tuple({target: update(*layer[target]) for target in TARGETS} for layer in shapes))


# -- sampling ---------------------------------------------------------------------------------------------------------


def sampling(setup: Setup) -> str:
    """Tokens of a batch of logits, until they are on the host, against the implementation in numpy."""
    rows, vocab, tokens = (4, 2000, 20) if setup.smoke else (64, setup.spec.vocab_size, 512)
    rng = np.random.default_rng(0)
    host = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)

    def draws(*filters: float, masks: RowMasks | None = None) -> SamplingBatch:
        temperature, top_k, top_p, min_p = filters
        uniforms = rng.random(rows)
        return SamplingBatch.of([(temperature, int(top_k), top_p, min_p, u) for u in uniforms], masks)

    every_row = np.arange(rows, dtype=np.int32)
    words = rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    penalties = _penalties(rng, rows, vocab, tokens)
    scores = ScoreRequest(every_row, 5, np.empty(0, np.int32), False)
    greedy = (0.0, 0, 1.0, 0.0)
    cases: dict[str, tuple[SamplingBatch, LogitAdjustments | None, ScoreRequest | None]] = {
        "greedy": (draws(*greedy), None, None),
        "temperature 0.7": (draws(0.7, 0, 1.0, 0.0), None, None),
        "top-p 0.9": (draws(0.7, 0, 0.9, 0.0), None, None),
        "top-k 50, top-p 0.9": (draws(0.7, 50, 0.9, 0.0), None, None),
        "min-p 0.05": (draws(0.7, 0, 1.0, 0.05), None, None),
        f"penalties of {tokens} tokens": (draws(*greedy), penalties, None),
        "grammar masks": (draws(*greedy, masks=RowMasks(every_row, words)), None, None),
        "grammar masks, top-p 0.9": (draws(0.7, 0, 0.9, 0.0, masks=RowMasks(every_row, words)), None, None),
        "5 log probabilities": (draws(*greedy), None, scores),
    }
    baseline, headline = 0.0, []

    def on_device() -> Tensor:
        return torch.from_numpy(host.copy()).to(setup.device)

    def sample(
        logits: Tensor,
        batch: SamplingBatch,
        adjustments: LogitAdjustments | None,
        wanted: ScoreRequest | None,
    ) -> np.ndarray:
        return LaunchedDeviceLogits(logits, lambda chosen: None).sample(batch, adjustments, wanted).wait()

    for name, case in cases.items():
        found, expected = sample(on_device(), *case).copy(), sample_and_score(host.copy(), *case)[0]
        different = int((found != expected).sum())
        # Sums are rounded in another order, which can choose the neighbour of a token that is drawn.
        if different > (rows // 16 if case[0].temperature[0] else 0):
            raise RuntimeError(f"{name}: {different} of {rows} tokens differ from those of numpy")
        # Masks and penalties change the logits; the time does not depend on them.
        taken = setup.seconds(partial(sample, on_device(), *case))
        baseline = baseline or taken
        ratio = show(f"{rows} x {vocab}", name, taken, baseline, f"{rows - different} of {rows} tokens equal")
        headline.append(f"{name} {ratio:.2f}")
    return "times as fast as greedy: " + ", ".join(headline[1:])


def _penalties(rng: np.random.Generator, rows: int, vocab: int, tokens: int) -> LogitAdjustments:
    """Penalties of this many different tokens of each row."""
    none, no_ids = np.empty(0, np.float32), Cells.of([])
    return LogitAdjustments(
        penalized=Cells.of([(row, rng.choice(vocab, tokens, replace=False)) for row in range(rows)]),
        factors=np.full(rows * tokens, 1.2, np.float32),
        subtracted=np.full(rows * tokens, 0.5, np.float32),
        dense_rows=np.empty(0, np.int32),
        dense_biases=np.empty((0, 0), np.float32),
        biased=no_ids,
        biases=none,
        allowed=no_ids,
        banned=no_ids,
    )


# -- products ---------------------------------------------------------------------------------------------------------

UNCACHED_BYTES = 512 << 20
"""Products take turns with copies of the weights that are larger together than the cache of a GPU."""


def products(setup: Setup) -> str:
    """Products with one matrix of the MLP in each format, by number of rows."""
    outputs, inputs = setup.spec.intermediate_size, setup.spec.hidden_size
    rng = np.random.default_rng(0)
    row_counts = (3,) if setup.smoke else (1, 16, 64, 256, 1024)
    dense = torch.randn(outputs, inputs, dtype=setup.dtype, device=setup.device) * 0.02
    baselines: dict[int, float] = {}
    headline = []
    for name, linear, weight, limit in _formats(rng, dense, setup):
        copies = [linear, *(_copy(linear) for _ in range(_num_copies(linear, setup)))]
        for rows in row_counts:
            x = torch.randn(rows, inputs, dtype=setup.dtype, device=setup.device)
            error = check_close(f"{name}, {rows} rows", linear(x), x.float() @ weight.T, limit)
            taken = device_seconds(partial(_multiply_all, copies, x), setup.runs) / len(copies)
            baselines.setdefault(rows, taken)
            ratio = show(f"{rows} x {outputs} x {inputs}", name, taken, baselines[rows], f"error {error:.4f}")
            if name != "dense" and rows in (1, 3, 64):
                headline.append(f"{name} {ratio:.2f}" + (f" ({rows} rows)" if rows != 1 else ""))
        del copies, linear, weight
        release()
    return "times as fast as bfloat16: " + ", ".join(headline)


def _multiply_all(linears: list[Linear], x: Tensor) -> list[Tensor]:
    return [linear(x) for linear in linears]


def _formats(
    rng: np.random.Generator, dense: Tensor, setup: Setup
) -> Iterator[tuple[str, Linear, Tensor, float]]:
    """Yield names, products, their weights float32[outputs, inputs], and the largest relative error; dense first."""
    outputs, inputs = dense.shape
    yield "dense", DenseLinear(dense), dense.float(), 0.02

    def grouped(matrix: QuantizedMatrix | Float8Matrix) -> tuple[Linear, Tensor]:
        weights = GroupedWeights.load([matrix], setup.dtype, setup.device)
        return QuantizedLinear(weights), torch.from_numpy(matrix.dequantize()).to(setup.device)

    order = rng.permutation(inputs).astype(np.int32)
    for name, bits, group, symmetric, permuted in (
        ("int8, groups of 32", 8, 32, True, False),
        ("int4, groups of 32", 4, 32, True, False),
        ("int4 AWQ and GPTQ", 4, 128, False, False),
        ("int4 GPTQ act-order", 4, 128, False, True),
    ):
        size = min(group, inputs)
        codes = rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8)
        scales = rng.uniform(0.5, 1.5, (outputs, -(-inputs // size))).astype(np.float32) * np.float32(1e-3)
        offsets = None if symmetric else -scales * rng.integers(0, 2**bits, scales.shape).astype(np.float32)
        matrix = QuantizedMatrix(codes, scales, offsets, bits, size, order if permuted else None)
        yield name, *grouped(matrix), 0.02
    float8 = Float8Linear.quantized(dense)
    # Inputs of e4m3 have an error of about 2.6 %.
    yield "fp8, a scale per output", float8, float8.dequantized(torch.float32), 0.06
    block = min(128, inputs)
    codes = (rng.standard_normal((outputs, inputs), np.float32) * 60).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1e-4, 1e-3, (-(-outputs // block), -(-inputs // block))).astype(np.float32)
    yield "fp8, blocks of 128 x 128", *grouped(Float8Matrix(codes, scales, (block, block))), 0.06


def _num_copies(linear: Linear, setup: Setup) -> int:
    if setup.smoke:
        return 0
    assert isinstance(linear, DenseLinear | Float8Linear | QuantizedLinear)
    return UNCACHED_BYTES // _weights(linear).nbytes


def _weights(linear: DenseLinear | Float8Linear | QuantizedLinear) -> Tensor:
    if isinstance(linear, DenseLinear):
        return linear.weight
    return linear.codes if isinstance(linear, Float8Linear) else linear.weights.codes


def _copy(linear: Linear) -> Linear:
    """Return a product with other memory for the weights; small scales are shared."""
    if isinstance(linear, DenseLinear):
        return replace(linear, weight=linear.weight.clone())
    if isinstance(linear, Float8Linear):
        return replace(linear, codes=linear.codes.clone())
    assert isinstance(linear, QuantizedLinear)
    weights = linear.weights
    offsets = None if weights.offsets is None else weights.offsets.clone()
    return replace(
        linear,
        weights=replace(weights, codes=weights.codes.clone(), scales=weights.scales.clone(), offsets=offsets),
    )


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


def graphs(setup: Setup) -> str:
    """Decode steps with and without CUDA graphs."""
    batches, context = ((1, 3), 16) if setup.smoke else ((1, 16, 64, 200, 256), 512)
    runner = setup.load()
    blocks = max(batches) * (-(-context // BLOCK_SIZE) + 1)
    runner.allocate_cache(CacheLayout(blocks, BLOCK_SIZE))
    if runner._graphs is None and not setup.smoke:
        raise RuntimeError("no CUDA graphs were captured")
    fill_cache(runner)
    ungraphed, plain = without_graphs(runner), without_graphs(runner, PlainOperations())
    headline = []
    for batch in batches:
        step = plan(batch, 1, context)
        found, expected = logits_of(runner, step).clone(), logits_of(plain, step)
        error = check_close(f"decode {batch}", found, expected)
        without = relative_error(found, logits_of(ungraphed, step))
        baseline = setup.seconds(partial(ungraphed.step, step))
        show(f"decode {batch}", "without graphs", baseline, baseline)
        taken = setup.seconds(partial(runner.step, step))
        notes = f"error {error:.4f}, to the same kernels {without:.4f}"
        ratio = show(f"decode {batch}", "with graphs", taken, baseline, notes)
        headline.append(f"decode {batch}: {ratio:.2f}")
    return "times as fast as without graphs: " + ", ".join(headline)


# -- overlap ----------------------------------------------------------------------------------------------------------


def overlap(setup: Setup) -> str:
    """Output tokens per second of an engine with and without overlapped steps, in turns; the tokens must be equal."""
    batch, prompt, output, rounds = (2, 8, 4, 1) if setup.smoke else (64, 128, 128, 3)
    runner = setup.load()
    cores = {}
    for name, overlaps in (("without overlap", False), ("with overlap", True)):
        config = SchedulerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=batch * prompt,
            max_prefill_chunk=batch * prompt,
            enable_prefix_caching=False,
            enable_overlap=overlaps,
        )
        own = TorchRunner(runner.shard, runner._decoder, runner.device)
        blocks = batch * (-(-(prompt + output) // BLOCK_SIZE) + 1)
        cores[name] = EngineCore(own, config, blocks, standard_addons(own))
    kinds = {
        "greedy": {"temperature": 0.0},
        "top-p": {"temperature": 0.8, "top_p": 0.9},
        # Sampling waits for the previous token, the model does not.
        "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    }
    headline = []
    for kind, fields in kinds.items():
        taken: dict[str, list[float]] = {name: [] for name in cores}
        tokens: dict[str, list[list[int]]] = {}
        for number in range(rounds + 1):
            for name, core in cores.items():
                started = time.perf_counter()
                tokens[name] = _generate(core, batch, prompt, output, fields)
                if number:  # the first round compiles kernels
                    taken[name].append(time.perf_counter() - started)
        equal = sum(one == other for one, other in zip(*tokens.values(), strict=True))
        # Both run the same steps, but sums of products may be in another order in each run.
        if equal < 0.9 * batch:
            raise RuntimeError(f"{kind}: with overlap, {batch - equal} of {batch} texts are different")
        medians = {name: float(np.median(values)) for name, values in taken.items()}
        for name, median in medians.items():
            ratio = show(kind, name, median, medians["without overlap"], f"{equal} of {batch} texts equal")
        headline.append(f"{kind} {ratio:.2f}")
    return "times as fast as without overlap: " + ", ".join(headline)


def _generate(
    core: EngineCore, batch: int, prompt: int, output: int, fields: dict[str, float]
) -> list[list[int]]:
    """Run requests that begin together; returns their tokens."""
    rng = np.random.default_rng(0)
    for index in range(batch):
        request = EngineRequest(
            request_id=str(index),
            prompt_token_ids=rng.integers(10, 500, prompt).tolist(),
            sampling=SamplingParams(ignore_eos=True, seed=index, **fields),
            max_tokens=output,
        )
        if errors := core.add(request):
            raise RuntimeError(errors[0].error)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(batch)}
    while core.has_work:
        for result in core.step():
            if result.error:
                raise RuntimeError(result.error)
            tokens[result.request_id] += result.token_ids
    return list(tokens.values())


PARTS: dict[str, Callable[[Setup], str]] = {
    part.__name__: part for part in (attention, adapters, sampling, products, graphs, overlap)
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, help="of the model (by default what fits, at most 16)")
    arguments = parse_arguments(parser, layers=1)
    unknown = set(arguments.parts) - PARTS.keys()
    if unknown:
        parser.error(f"unknown part {min(unknown)}, there are {', '.join(PARTS)}")
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.smoke:
        exit_missing("torch finds no GPU: see docs/guides/gpu.md")
    layers = arguments.layers or min(layers_that_fit(), 16)
    setup = Setup(
        llama_config("tiny" if arguments.smoke else "8b", layers),
        torch.device("cuda" if gpu else "cpu"),
        torch.bfloat16 if gpu else torch.float32,
        1 if arguments.smoke else 20,
    )
    print(f"{torch.cuda.get_device_name() if gpu else 'interpreter'}; {layers} layers, {setup.dtype}")
    for name in arguments.parts or PARTS:
        print(f"\n{name}: {PARTS[name].__doc__}")
        print(f"headline: {PARTS[name](setup)}")
        release()


if __name__ == "__main__":
    main()
