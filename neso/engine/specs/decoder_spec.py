"""A decoder-only transformer as data: the specification executed by runners, and the tensors of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.specs.config_reader import InvalidConfig
from neso.engine.specs.rotary_spec import RotarySpec

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal["head", "width"]

NormRole = Literal[
    "attention_norm", "attention_post_norm", "attention_sum_norm", "mlp_norm", "mlp_post_norm", "mlp_sum_norm"
]
ExpertRole = Literal["expert_gate", "expert_up", "expert_down"]

Role = (
    Literal[
        # per model
        "embedding",
        "position_embedding",
        "final_norm",
        "final_norm_bias",
        "lm_head",
        "lm_head_bias",
        # per layer
        "attention_norm_bias",
        "query",
        "key",
        "value",
        "query_bias",
        "key_bias",
        "value_bias",
        "query_norm",
        "key_norm",
        "output",
        "output_bias",
        "attention_post_norm_bias",
        "attention_sum_norm_bias",
        "mlp_norm_bias",
        "gate",
        "up",
        "gate_bias",
        "up_bias",
        "down",
        "down_bias",
        "mlp_post_norm_bias",
        "mlp_sum_norm_bias",
        # per sparse layer
        "router",
        "shared_router",
        "shared_gate",
        "shared_up",
        "shared_down",
    ]
    | NormRole
    | ExpertRole
)

EXPERT_ROLES: tuple[ExpertRole, ...] = get_args(ExpertRole)
"""Roles that exist once per expert of a sparse layer."""

NORM_BIASES: dict[NormRole, Role] = {
    "attention_norm": "attention_norm_bias",
    "attention_post_norm": "attention_post_norm_bias",
    "attention_sum_norm": "attention_sum_norm_bias",
    "mlp_norm": "mlp_norm_bias",
    "mlp_post_norm": "mlp_post_norm_bias",
    "mlp_sum_norm": "mlp_sum_norm_bias",
}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows of a fused checkpoint tensor that hold one role.

    The tensor has `outputs` rows in `groups` equal groups; the part is rows `begin` to `end` of each group.

    - name: tensor name; "{layer}" is replaced by the layer index
    - transposed: the tensor is stored [inputs, outputs] instead of [outputs, inputs]
    - paired: head_dim, if the checkpoint rotates interleaved pairs (2i, 2i + 1); the rows are reordered to the
      half-split order (i, i + head_dim / 2) used by runners. 0: no reordering
    """

    name: str
    outputs: int
    begin: int
    end: int
    groups: int = 1
    transposed: bool = False
    paired: int = 0

    def rows(self) -> slice | npt.NDArray[np.intp]:
        """Return the row indices of the part, in order; a slice if they are contiguous."""
        if self.groups == 1 and not self.paired:
            return slice(self.begin, self.end)
        starts = np.arange(self.groups)[:, None] * (self.outputs // self.groups)
        rows = (starts + np.arange(self.begin, self.end)).reshape(-1)
        if self.paired:
            rows = rows.reshape(-1, self.paired // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows


@dataclass(frozen=True, slots=True)
class TensorProduct:
    """A matrix that the checkpoint stores as two factors: rows @ factor, computed in float32 while loading.

    - name, factor: tensor names of the rows [outputs, inner] and of the other factor
    - inner: number of columns of the rows
    - transposed: the factor is stored [inputs, inner] instead of [inner, inputs]
    """

    name: str
    factor: str
    inner: int
    transposed: bool = False


TensorLocation = str | TensorPart | TensorProduct
"""A checkpoint tensor, a part of one, or a product of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Mixture-of-experts MLP (arXiv 1701.06538, 2101.03961).

    Expert probabilities are softmax(router(x)) over `count` experts. The output is the sum of the `top_k` most
    probable experts' outputs, weighted by their probabilities.

    - intermediate_size: width of one expert
    - normalized: the `top_k` probabilities are divided by their sum
    - shared_size: width of the shared expert that every token passes through; None: no shared expert
    - shared_gated: the shared expert's output is multiplied by sigmoid(shared_router(x))
    - layers: for each layer, whether its MLP is a mixture of experts

    Raises `InvalidConfig` unless 1 <= top_k <= count.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalized: bool
    layers: tuple[bool, ...]
    shared_size: int | None = None
    shared_gated: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise InvalidConfig(
                f"num_experts_per_tok is {self.top_k}: it must be at least 1 and at most the number of experts, "
                f"{self.count}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder whose layers add two branches, attention and MLP, to the residual stream x.

        x = sum_norm(x + post_norm(attention(norm(x))) * residual_scale), and the same with the MLP

    - `layer_norms`: which of these norms exist. `parallel`: both branches read the same x; without "mlp_norm",
      the MLP of a parallel layer reads the output of "attention_norm", and there are no "sum" norms.
    - Norms: "rms" (arXiv 1910.07467) or "layer" (arXiv 1607.06450), optionally with biases. `norm_offset` is added
      to the norm weights of the checkpoint.
    - Attention: `num_heads` query heads share `num_kv_heads` key and value heads. Scores are multiplied by
      `attention_scale`; with `attention_softcap` they become softcap * tanh(score / softcap). `qk_norm` normalizes
      queries and keys before the rotation, per head or over the whole width.
    - `rotaries`: rotary embedding of each layer; None: no rotation. `sliding_windows`: for each layer, the number of
      most recent tokens that a token attends to, itself included; None: all. The first `sink_tokens` tokens of a
      sequence stay visible in layers with a window.
    - The MLP is `gated`, down(activation(gate(x)) * up(x)), or plain, down(activation(up(x))). Layers may have
      `experts` instead.
    - x starts as the token embedding times `embedding_scale`. With a `position_offset`, row position + offset of a
      learned position table is added; None: there is no table.
    - logits = lm_head(norm(x)) * `logit_scale`, capped like scores if there is a `logit_softcap`. The norm exists
      unless `has_final_norm` is False.
    - `max_position`: maximum sequence length in tokens.
    - `has_embedding`, `has_head`: False for a stage of a pipeline that starts with the x of the previous stage, or that
      ends with x instead of logits.
    - `tensor_names`: location of each role in the checkpoint, with placeholders "{layer}" and "{expert}".
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm: NormKind
    norm_eps: float
    norm_offset: float = 0.0
    norm_bias: bool = False
    layer_norms: tuple[NormRole, ...] = ("attention_norm", "mlp_norm")
    parallel: bool = False
    activation: Activation
    gated: bool = True
    experts: ExpertsSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: QKNorm | None = None
    tied_embeddings: bool
    rotaries: tuple[RotarySpec | None, ...]
    position_offset: int | None = None
    attention_scale: float
    attention_softcap: float | None = None
    sliding_windows: tuple[int | None, ...]
    sink_tokens: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    has_final_norm: bool = True
    has_embedding: bool = True
    has_head: bool = True
    tensor_names: Mapping[Role, TensorLocation] = field(hash=False, repr=False)

    @property
    def widest_window(self) -> AttentionWindow | None:
        """The largest window of any layer; None if any layer attends to all tokens."""
        windows = [window for window in self.sliding_windows if window is not None]
        if len(windows) < self.num_layers:
            return None
        return AttentionWindow(max(windows), self.sink_tokens)

    def for_length(self, length: int) -> DecoderSpec:
        """Return the spec for sequences of at most `length` tokens; the length selects LongRoPE's factors."""
        rotaries = tuple(rotary and rotary.for_length(length) for rotary in self.rotaries)
        return replace(self, rotaries=rotaries)

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of this layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def tensor_name(self, role: Role, layer: int | None = None, expert: int | None = None) -> str:
        """Return the name of the checkpoint tensor that holds a role; `layer` and `expert` for roles that repeat."""
        location = self.tensor_names[role]
        name = location if isinstance(location, str) else location.name
        return name.format(layer=layer, expert=expert)


def model_shapes(spec: DecoderSpec) -> dict[Role, Shape]:
    """Return the shapes of the tensors outside the layers. With tied embeddings there is no lm_head."""
    shapes: dict[Role, Shape] = {}
    if spec.has_embedding:
        shapes["embedding"] = (spec.vocab_size, spec.hidden_size)
        if spec.position_offset is not None:
            shapes["position_embedding"] = (spec.max_position + spec.position_offset, spec.hidden_size)
    if not spec.has_head:
        return shapes
    if spec.has_final_norm:
        shapes["final_norm"] = (spec.hidden_size,)
        if spec.norm_bias:
            shapes["final_norm_bias"] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    if spec.lm_head_bias:
        shapes["lm_head_bias"] = (spec.vocab_size,)
    return shapes


def layer_shapes(spec: DecoderSpec, layer: int = 0) -> dict[Role, Shape]:
    """Return the shapes of the tensors of a layer; of one expert for expert roles. Matrices are [outputs, inputs]."""
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[Role, Shape] = {
        "query": (query, hidden),
        "key": (kv, hidden),
        "value": (kv, hidden),
        "output": (hidden, query),
    }
    for role in spec.layer_norms:
        shapes[role] = (hidden,)
        if spec.norm_bias:
            shapes[NORM_BIASES[role]] = (hidden,)
    if spec.qkv_bias:
        shapes |= {"query_bias": (query,), "key_bias": (kv,), "value_bias": (kv,)}
    if spec.output_bias:
        shapes["output_bias"] = (hidden,)
    if spec.qk_norm == "head":
        shapes |= {"query_norm": (spec.head_dim,), "key_norm": (spec.head_dim,)}
    elif spec.qk_norm == "width":
        shapes |= {"query_norm": (query,), "key_norm": (kv,)}
    return shapes | (_experts_shapes(spec) if spec.is_sparse(layer) else _mlp_shapes(spec))


def _mlp_shapes(spec: DecoderSpec) -> dict[Role, Shape]:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    shapes: dict[Role, Shape] = {"up": (intermediate, hidden), "down": (hidden, intermediate)}
    if spec.gated:
        shapes["gate"] = (intermediate, hidden)
    if spec.mlp_bias:
        shapes |= {"up_bias": (intermediate,), "down_bias": (hidden,)}
        if spec.gated:
            shapes["gate_bias"] = (intermediate,)
    return shapes


def _experts_shapes(spec: DecoderSpec) -> dict[Role, Shape]:
    experts, hidden = spec.experts, spec.hidden_size
    assert experts is not None
    wide, narrow = (experts.intermediate_size, hidden), (hidden, experts.intermediate_size)
    shapes: dict[Role, Shape] = {
        "router": (experts.count, hidden),
        "expert_gate": wide,
        "expert_up": wide,
        "expert_down": narrow,
    }
    if experts.shared_size is not None:
        wide, narrow = (experts.shared_size, hidden), (hidden, experts.shared_size)
        shapes |= {"shared_gate": wide, "shared_up": wide, "shared_down": narrow}
        if experts.shared_gated:
            shapes["shared_router"] = (1, hidden)
    return shapes


def all_tensors(spec: DecoderSpec) -> Iterator[tuple[Role, int | None, int | None, Shape]]:
    """Yield (role, layer, expert, shape) of every tensor of the model."""
    for role, shape in model_shapes(spec).items():
        yield role, None, None, shape
    for layer in range(spec.num_layers):
        for role, shape in layer_shapes(spec, layer).items():
            count = spec.experts.count if spec.experts is not None and role in EXPERT_ROLES else 0
            for expert in range(count) if count else (None,):
                yield role, layer, expert, shape


def limit_attention(
    spec: DecoderSpec, max_attention_window_size: int | list[int] | None, sink_token_length: int
) -> DecoderSpec:
    """Return the spec with windows of at most `max_attention_window_size` tokens, and with attention sinks.

    A list gives one size per layer and is repeated if it is shorter. The first `sink_token_length` tokens of a sequence
    stay visible in layers with a window; positions do not change. Raises `ValueError` for a size below 1, or for sinks
    without any window.
    """
    if max_attention_window_size is not None:
        sizes = (
            max_attention_window_size
            if isinstance(max_attention_window_size, list)
            else [max_attention_window_size]
        )
        if not sizes or min(sizes) < 1:
            raise ValueError(f"max_attention_window_size must be at least 1, got {max_attention_window_size}")
        windows = tuple(
            window if size >= (window or spec.max_position) else size
            for window, size in zip(spec.sliding_windows, cycle(sizes), strict=False)
        )
        spec = replace(spec, sliding_windows=windows)
    if not sink_token_length:
        return spec
    if sink_token_length < 0:
        raise ValueError(f"sink_token_length must be at least 0, got {sink_token_length}")
    if not any(spec.sliding_windows):
        raise ValueError(
            "sink_token_length needs a model with a sliding window, or max_attention_window_size"
        )
    return replace(spec, sink_tokens=sink_token_length)
