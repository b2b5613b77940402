"""Encoder layers of the torch runner: flat batches everywhere except attention, which is padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.runners.base import Float32Array, Int32Array, LayerStack
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.device_runner import prepare_device
from neso.engine.runners.torch.step_inputs import send
from neso.engine.specs.encoder_spec import EncoderActivation, LayerRole, LayerStackSpec
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.quantized import dense

Pair = tuple[Tensor, Tensor]

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
    """(weight, bias) of each product and norm."""

    attention_norm: Pair
    qkv: Pair
    output: Pair
    mlp_norm: Pair
    up: Pair
    down: Pair


class TorchLayerStack(LayerStack):
    """Encoder layers in torch. Computes in the dtype of the options, by default the checkpoint's."""

    def __init__(self, spec: LayerStackSpec, layers: list[_Layer], device: torch.device) -> None:
        self.spec = spec
        self._layers, self._device = layers, device
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

    @torch.inference_mode()
    def run(self, x: Float32Array, starts: Int32Array) -> Float32Array:
        spec = self.spec
        hidden = send(x, self._device).to(self._dtype)
        padding = _Padding.of(starts, self._device)
        for layer in self._layers:
            if spec.norm_first:
                hidden = hidden + self._attention(layer, self._norm(hidden, layer.attention_norm), padding)
                hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
            else:
                hidden = self._norm(hidden + self._attention(layer, hidden, padding), layer.attention_norm)
                hidden = self._norm(hidden + self._mlp(layer, hidden), layer.mlp_norm)
        result: Float32Array = hidden.float().cpu().numpy()
        return result

    def _norm(self, x: Tensor, norm: Pair) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), *norm, self.spec.norm_eps)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        activated = _ACTIVATIONS[self.spec.activation](functional.linear(x, *layer.up))
        return functional.linear(activated, *layer.down)

    def _attention(self, layer: _Layer, x: Tensor, padding: _Padding) -> Tensor:
        spec = self.spec
        qkv = functional.linear(x, *layer.qkv)
        padded = qkv.new_zeros(padding.num_sequences * padding.longest, qkv.shape[1])
        padded[padding.rows] = qkv
        shape = (padding.num_sequences, padding.longest, 3, spec.num_heads, spec.head_dim)
        queries, keys, values = padded.view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=padding.mask, scale=spec.attention_scale
        )
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)[padding.rows]
        return functional.linear(flat, *layer.output)


def _read_layer(
    spec: LayerStackSpec, tensors: EncoderTensors, layer: int, device: torch.device, dtype: torch.dtype
) -> _Layer:
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim

    def pair(*roles: LayerRole, shape: tuple[int, ...]) -> Pair:
        """Return weights and biases of these roles, stacked along the outputs."""
        names = [spec.tensor_names[role].format(layer=layer) for role in roles]
        weight = torch.cat([torch.from_numpy(tensors.weight(name, shape)) for name in names])
        bias = torch.cat([torch.from_numpy(tensors.bias(name, shape[0])) for name in names])
        return weight.to(device, dtype), bias.to(device, dtype)

    return _Layer(
        attention_norm=pair("attention_norm", shape=(hidden,)),
        qkv=pair("query", "key", "value", shape=(width, hidden)),
        output=pair("output", shape=(hidden, width)),
        mlp_norm=pair("mlp_norm", shape=(hidden,)),
        up=pair("up", shape=(spec.intermediate_size, hidden)),
        down=pair("down", shape=(hidden, spec.intermediate_size)),
    )


@dataclass(frozen=True, slots=True)
class _Padding:
    """Padded layout of a flat batch: row of each token int64[T], mask of real keys bool[S, 1, 1, L] or None."""

    num_sequences: int
    longest: int
    rows: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, starts: Int32Array, device: torch.device) -> _Padding:
        lengths = np.diff(starts).astype(np.int64)
        longest = int(lengths.max())
        offsets = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lengths)
        rows = np.repeat(np.arange(len(lengths)) * longest, lengths) + offsets
        mask = None
        if (lengths != longest).any():
            mask = send(np.arange(longest) < lengths[:, None], device)[:, None, None]
        return cls(len(lengths), longest, send(rows, device), mask)


def _dtype(spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions) -> torch.dtype:
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    name = spec.tensor_names["up"].format(layer=0)
    found = dense(tensors.matrix(name, (spec.intermediate_size, spec.hidden_size)))
    return _DTYPES.get(found.dtype.name, torch.float32)
