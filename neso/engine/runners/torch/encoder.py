"""Encoder layers of the torch runner: flat batches everywhere except attention, which is padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.runners.base import Float32Array, Int32Array, LayerStack, positions_in_sequences
from neso.engine.runners.rotary_tables import RotaryTables
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.device_runner import is_lost, prepare_device
from neso.engine.runners.torch.operations import rotate_pairs
from neso.engine.runners.torch.step_inputs import send
from neso.engine.specs.encoder_spec import EncoderActivation, LayerRole, LayerStackSpec
from neso.engine.weights.model_tensors import EncoderTensors, LayerTensors
from neso.engine.weights.quantized import dense

Pair = tuple[Tensor, Tensor | None]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ACTIVATIONS: dict[EncoderActivation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weight and bias of each matrix and norm. None instead of a pair: the layer has no such matrix or norm."""

    attention_norm: Pair | None
    qkv: Pair
    output: Pair
    mlp_norm: Pair
    gate: Pair | None
    up: Pair
    down: Pair


class TorchLayerStack(LayerStack):
    """Encoder layers in torch. Computes in the dtype of the options, by default the checkpoint's."""

    def __init__(self, spec: LayerStackSpec, layers: list[_Layer], device: torch.device) -> None:
        self.spec = spec
        self._layers, self._device = layers, device
        self._rotary = RotaryTables(spec.rotaries)
        self._dtype = layers[0].up[0].dtype if layers else torch.float32

    @classmethod
    def load(
        cls, spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> TorchLayerStack:
        if options.quantization is not None:
            raise UnsupportedOption("the torch runner does not quantize encoders")
        device = prepare_device(options)
        dtype = _dtype(spec, tensors, options)
        layers = [_read_layer(spec, tensors, index, device, dtype) for index in range(spec.num_layers)]
        return cls(spec, layers, device)

    def has_lost_device(self) -> bool:
        return is_lost(self._device)

    @torch.inference_mode()
    def run(self, x: Float32Array, starts: Int32Array) -> Float32Array:
        spec = self.spec
        hidden = send(x, self._device).to(self._dtype)
        padding = _Padding.of(starts, self._device)
        tables = self._rotary.lookup(positions_in_sequences(starts))
        rotations = {
            rotary: (send(cos, self._device)[:, None], send(sin, self._device)[:, None])
            for rotary, (cos, sin) in tables.items()
        }
        for index, layer in enumerate(self._layers):
            rotary = spec.rotary(index)
            attention = partial(
                self._attention,
                layer,
                padding=padding,
                mask=padding.mask(spec.reach(index)),
                rotation=None if rotary is None else rotations[rotary],
            )
            if spec.norm_first:
                hidden = hidden + attention(self._norm(hidden, layer.attention_norm))
                hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
            else:
                hidden = self._norm(hidden + attention(hidden), layer.attention_norm)
                hidden = self._norm(hidden + self._mlp(layer, hidden), layer.mlp_norm)
        result: Float32Array = hidden.float().cpu().numpy()
        return result

    def _norm(self, x: Tensor, norm: Pair | None) -> Tensor:
        if norm is None:
            return x
        return functional.layer_norm(x, (x.shape[-1],), *norm, self.spec.norm_eps)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        activation, up = _ACTIVATIONS[self.spec.activation], functional.linear(x, *layer.up)
        if layer.gate is None:
            activated = activation(up)
        else:
            activated = activation(functional.linear(x, *layer.gate)) * up
        return functional.linear(activated, *layer.down)

    def _attention(
        self,
        layer: _Layer,
        x: Tensor,
        padding: _Padding,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        spec = self.spec
        qkv = functional.linear(x, *layer.qkv)
        if rotation is not None:
            heads = qkv.view(len(x), 3, spec.num_heads, spec.head_dim)
            rotate_pairs(heads[:, :2].flatten(1, 2), *rotation)
        padded = qkv.new_zeros(padding.num_sequences * padding.longest, qkv.shape[1])
        padded[padding.rows] = qkv
        shape = (padding.num_sequences, padding.longest, 3, spec.num_heads, spec.head_dim)
        queries, keys, values = padded.view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=spec.attention_scale
        )
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)[padding.rows]
        return functional.linear(flat, *layer.output)


def _read_layer(
    spec: LayerStackSpec, tensors: EncoderTensors, layer: int, device: torch.device, dtype: torch.dtype
) -> _Layer:
    read = LayerTensors(spec, tensors, layer)

    def pair(*roles: LayerRole) -> Pair:
        """Return weights and biases of these roles, stacked along the outputs."""
        weight = torch.cat([torch.from_numpy(read.weight(role)) for role in roles])
        bias = read.biases(*roles)
        return weight.to(device, dtype), None if bias is None else torch.from_numpy(bias).to(device, dtype)

    return _Layer(
        attention_norm=pair("attention_norm") if spec.has_attention_norm(layer) else None,
        qkv=pair("query", "key", "value"),
        output=pair("output"),
        mlp_norm=pair("mlp_norm"),
        gate=pair("gate") if spec.gated else None,
        up=pair("up"),
        down=pair("down"),
    )


@dataclass(frozen=True, slots=True)
class _Padding:
    """Padded layout of a flat batch: row of each token int64[T], real keys bool[S, 1, 1, L] or None if all are."""

    num_sequences: int
    longest: int
    rows: Tensor
    real: Tensor | None
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, starts: Int32Array, device: torch.device) -> _Padding:
        lengths = np.diff(starts).astype(np.int64)
        longest = int(lengths.max())
        rows = np.repeat(np.arange(len(lengths)) * longest, lengths) + positions_in_sequences(starts)
        real = None
        if (lengths != longest).any():
            real = send(np.arange(longest) < lengths[:, None], device)[:, None, None]
        return cls(len(lengths), longest, send(rows, device), real)

    def mask(self, reach: int | None) -> Tensor | None:
        """Return the keys that a query attends to, bool[1 or S, 1, 1 or L, L]; None for all."""
        if reach not in self._masks:
            self._masks[reach] = self.real if reach is None else self._within(reach)
        return self._masks[reach]

    def _within(self, reach: int) -> Tensor:
        places = torch.arange(self.longest, device=self.rows.device)
        near = ((places[:, None] - places).abs() <= reach)[None, None]
        if self.real is None:
            return near
        # The queries of the padding attend to something, because a softmax over nothing is not a number.
        return near & self.real | (near & ~self.real.mT)


def _dtype(spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions) -> torch.dtype:
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    found = dense(LayerTensors(spec, tensors, 0).matrix("up"))
    return _DTYPES.get(found.dtype.name, torch.float32)
