"""Layers of the reference runner in plain NumPy: matrix products, norms, activations, MLPs, experts, adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan, LowRank, Target
from neso.engine.runners.reference.weights import ExpertsWeights, MLPWeights
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.encoder_spec import EncoderActivation

Float32Array = npt.NDArray[np.float32]

Adapt = Callable[[tuple[Target, ...], Float32Array, Float32Array], None]
"""(targets, x, y): add the adapters' updates to y, the product of x with the matrices of `targets`, in place."""

_erf = np.frompyfunc(math.erf, 1, 1)


def linear(x: Float32Array, weight: Float32Array, bias: Float32Array | None = None) -> Float32Array:
    """x @ weight.T + bias for x float32[T, inputs] and weight float32[outputs, inputs]."""
    product: Float32Array = x @ weight.T
    return product if bias is None else product + bias


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis (arXiv 1910.07467)."""
    mean: Float32Array = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32Array = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed


def layer_norm(x: Float32Array, weight: Float32Array, bias: Float32Array | None, eps: float) -> Float32Array:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last axis (arXiv 1607.06450)."""
    normed = rms_norm(x - x.mean(axis=-1, keepdims=True), weight, eps)
    return normed if bias is None else normed + bias


def softcap(x: Float32Array, cap: float) -> Float32Array:
    """cap * tanh(x / cap)."""
    capped: Float32Array = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


def sigmoid(x: Float32Array) -> Float32Array:
    with np.errstate(over="ignore"):  # exp overflows to infinity for large negative x; the quotient is 0
        result: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def silu(x: Float32Array) -> Float32Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Float32Array) -> Float32Array:
    """x times the standard normal distribution function."""
    erf = np.asarray(_erf(x.astype(np.float64) * math.sqrt(0.5)), np.float64)
    activated: Float32Array = (x * (1 + erf) / 2).astype(np.float32)
    return activated


def gelu_tanh(x: Float32Array) -> Float32Array:
    """The tanh approximation of GELU (arXiv 1606.08415)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: Float32Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated


def quick_gelu(x: Float32Array) -> Float32Array:
    """x * sigmoid(1.702 x), CLIP's activation."""
    return x * sigmoid(np.float32(1.702) * x)


def relu(x: Float32Array) -> Float32Array:
    return np.maximum(x, np.float32(0))


ACTIVATIONS: dict[EncoderActivation, Callable[[Float32Array], Float32Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
}


def _no_adapters(targets: tuple[Target, ...], x: Float32Array, y: Float32Array) -> None:
    pass


def run_mlp(
    spec: DecoderSpec,
    weights: MLPWeights | ExpertsWeights,
    x: Float32Array,
    adapt: Adapt = _no_adapters,
) -> Float32Array:
    """Return the output float32[T, hidden] for normed x float32[T, hidden]. Adapters do not apply to experts."""
    if isinstance(weights, ExpertsWeights):
        return _run_experts(spec, weights, x)
    inner = linear(x, weights.gate_up, weights.gate_up_bias)
    adapt(("gate", "up") if spec.gated else ("up",), x, inner)
    activation = ACTIVATIONS[spec.activation]
    if spec.gated:  # (arXiv 2002.05202); the gate is in the first half
        gate, up = np.split(inner, 2, axis=1)
        activated = activation(gate) * up
    else:
        activated = activation(inner)
    out = linear(activated, weights.down, weights.down_bias)
    adapt(("down",), activated, out)
    return out


def _run_experts(spec: DecoderSpec, weights: ExpertsWeights, x: Float32Array) -> Float32Array:
    """Run the experts, each on only the rows that are routed to it."""
    assert spec.experts is not None
    scores = linear(x, weights.router)
    chosen, expert_weights = choose_experts(
        scores[:, : spec.experts.count], spec.experts.top_k, spec.experts.normalized
    )
    results = np.empty((*chosen.shape, x.shape[1]), np.float32)
    for expert in np.unique(chosen):
        rows, ranks = np.nonzero(chosen == expert)
        results[rows, ranks] = run_mlp(spec, weights.experts[expert], x[rows])
    # Summed in the order of the weights, so that a row's result does not depend on the rest of the batch.
    total: Float32Array = np.einsum("tkh,tk->th", results, expert_weights)
    if weights.shared is not None:
        shared = run_mlp(spec, weights.shared, x)
        if spec.experts.shared_gated:
            shared *= sigmoid(scores[:, spec.experts.count :])
        total += shared
    return total


def choose_experts(
    scores: Float32Array, top_k: int, normalized: bool
) -> tuple[npt.NDArray[np.intp], Float32Array]:
    """Return the experts of each row and their weights, [T, top_k], largest weight first.

    Ties are won by the lower index.
    """
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if normalized:
        weights /= weights.sum(axis=1, keepdims=True)
    return chosen, weights


@dataclass(frozen=True, slots=True, eq=False)
class Float32Adapter:
    """A LoRA adapter in float32: low-rank updates by layer and target."""

    layers: list[dict[Target, LowRank]]

    @classmethod
    def convert(cls, adapter: LoraAdapter) -> Float32Adapter:
        def convert(change: LowRank) -> LowRank:
            return LowRank(change.a.astype(np.float32), change.b.astype(np.float32), change.scale)

        return cls([{t: convert(change) for t, change in layer.items()} for layer in adapter.layers])

    @property
    def num_bytes(self) -> int:
        return sum(change.a.nbytes + change.b.nbytes for layer in self.layers for change in layer.values())


class AdapterBatch:
    """The adapters of a step with their rows. `widths`: outputs of each target's matrix."""

    def __init__(
        self, plan: StepPlan, adapters: Mapping[int, Float32Adapter], widths: Mapping[Target, int]
    ) -> None:
        self._widths = widths
        self._groups: list[tuple[Float32Adapter, npt.NDArray[np.int64]]] = []
        lora = plan.part(LoraPlan)
        if lora is not None:
            slots = np.repeat(lora.slots, np.diff(plan.query_start))
            self._groups = [
                (adapters[slot], np.flatnonzero(slots == slot)) for slot in np.unique(slots) if slot >= 0
            ]

    def adapt(self, layer: int, targets: tuple[Target, ...], x: Float32Array, y: Float32Array) -> None:
        """y += scale * (x A^T) B^T (arXiv 2106.09685) for x[T, inputs] and y[T, outputs].

        The outputs of the targets are concatenated.
        """
        for adapter, rows in self._groups:
            changes = adapter.layers[layer]
            start = 0
            for target in targets:
                end = start + self._widths[target]
                if target in changes:
                    change = changes[target]
                    delta = (x[rows] @ change.a.T) @ change.b.T
                    y[rows, start:end] += np.float32(change.scale) * delta
                start = end
