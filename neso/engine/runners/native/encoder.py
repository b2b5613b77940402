"""Encoder layers of the native runner."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

import neso._native as _native
from neso.engine.runners.base import Float32Array, Int32Array, LayerStack, positions_in_sequences
from neso.engine.runners.native.packing import DTYPES, KINDS, Packer, reject_fp8
from neso.engine.runners.rotary_tables import RotaryTables
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions
from neso.engine.specs.encoder_spec import LayerRole, LayerStackSpec
from neso.engine.thread_placement import ThreadPlacement, place_threads
from neso.engine.weights.model_tensors import EncoderTensors, LayerTensors

logger = logging.getLogger(__name__)


class NativeLayerStack(LayerStack):
    """Holds the packed weights and the thread team. Not thread-safe."""

    binds_threads = True

    def __init__(
        self,
        spec: LayerStackSpec,
        layers: list[_native.EncoderLayer],
        rotary: RotaryTables,
        cache_kind: str,
        threads: ThreadPlacement,
    ) -> None:
        self.spec = spec
        self._rotary = rotary
        self._layers = layers  # the encoder holds pointers to them
        self._encoder = _native.Encoder(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            heads=spec.num_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            activation=spec.activation,
            norm_first=spec.norm_first,
            layers=layers,
            cache_kind=cache_kind,
            isa=_native.default_isa(),
            threads=threads.count,
            cpus=threads.cpus,
        )

    @classmethod
    def load(
        cls, spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> NativeLayerStack:
        reject_fp8(options)
        threads = place_threads(options.num_threads, options.thread_binding)
        dtype = _dense_dtype(spec, tensors, options)
        packer = Packer.from_options(options, dtype, threads)
        rotary = RotaryTables(spec.rotaries)
        layers = [_load_layer(spec, tensors, packer, rotary, layer) for layer in range(spec.num_layers)]
        exact = KINDS[dtype] == "f32" and options.quantization is None
        return cls(spec, layers, rotary, "f32" if exact else "bf16", threads)

    def run(self, x: Float32Array, starts: Int32Array) -> Float32Array:
        x = np.require(x, np.float32, ["C", "W"])
        starts = np.ascontiguousarray(starts, np.int32)
        rotary = self._rotary.lookup(positions_in_sequences(starts)).values()
        self._encoder.run(x, starts, list(rotary))
        return x


def _load_layer(
    spec: LayerStackSpec, tensors: EncoderTensors, packer: Packer, tables: RotaryTables, layer: int
) -> _native.EncoderLayer:
    read = LayerTensors(spec, tensors, layer)

    def norm(role: LayerRole) -> npt.NDArray[np.float32]:
        bias = read.bias(role)
        return np.stack([read.weight(role)] if bias is None else [read.weight(role), bias])

    def packed(*roles: LayerRole) -> _native.Matrix:
        return packer.pack([read.matrix(role) for role in roles], read.biases(*roles)).native()

    rotary, reach = spec.rotary(layer), spec.reach(layer)
    return _native.EncoderLayer(
        norm("attention_norm") if spec.has_attention_norm(layer) else None,
        packed("query", "key", "value"),
        packed("output"),
        norm("mlp_norm"),
        packed("gate") if spec.gated else None,
        packed("up"),
        packed("down"),
        reach=-1 if reach is None else reach,
        rotary=-1 if rotary is None else tables.index(rotary),
    )


def _dense_dtype(spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions) -> np.dtype[Any]:
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    found = LayerTensors(spec, tensors, 0).matrix("up")
    if isinstance(found, np.ndarray) and found.dtype in KINDS:
        return found.dtype
    return DTYPES["float32"]
