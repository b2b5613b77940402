"""What crosses the channel between a server and an engine process, as msgpack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.lora.config import LoraConfig
from neso.engine.runners.base import Capability
from neso.engine.sampling.limits import ScoreLimits
from neso.engine.vision.image_prompt import VisionInfo
from neso.generation.pooling import PoolingInfo
from neso.generation.request import LoraRequest
from neso.generation.sampling_params import SamplingDefaults


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Start a request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request, or one of its sequences."""

    request_id: str
    index: int | None = None


class CheckIntegrity(msgspec.Struct, frozen=True, tag="check"):
    """Compare the books of the cache; answered by `Integrity`."""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """Load an adapter, in place of the one that has its name; answered by `LoraDone` with the same number."""

    number: int
    lora: LoraRequest


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    """Forget an adapter; requests that use it go on. Answered by `LoraDone`."""

    number: int
    name: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process."""


Command = Add | Abort | CheckIntegrity | LoadLora | UnloadLora | Shutdown


class EngineInfo(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded. Lengths are in tokens, `cache_bytes` is the size of the key-value cache.

    `hidden_size`: width of the vectors that stand for tokens. `generates`: whether it gives text; `pooling`: which
    vectors it gives, None for none; `vision`: how it takes images. `default_sampling`: see `LanguageModel`.
    """

    runner: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    cache_bytes: int
    load_seconds: float
    capabilities: frozenset[Capability] = frozenset()
    hidden_size: int = 0
    enable_prefix_caching: bool = True
    in_flight_batching: bool = True
    lora: LoraConfig = LoraConfig()
    scores: ScoreLimits = ScoreLimits()
    generates: bool = True
    pooling: PoolingInfo | None = None
    vision: VisionInfo | None = None
    num_speculative_tokens: int = 0
    default_sampling: SamplingDefaults = SamplingDefaults()


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The model could not be loaded, for a reason fit for the user."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """What one step gave, for all requests together."""

    outputs: list[SequenceOutput]
    stats: EngineStats


class Integrity(msgspec.Struct, frozen=True, tag="integrity"):
    """Result of `CheckIntegrity`: an empty message if all is well."""

    message: str
    stats: EngineStats


class LoraDone(msgspec.Struct, frozen=True, tag="lora_done"):
    """The end of `LoadLora` or `UnloadLora`, with an empty message if it went well."""

    number: int
    message: str


class LoraNames(msgspec.Struct, frozen=True, tag="lora_names"):
    """The adapters that can be asked for have changed: names, with the paths of those that have one."""

    names: dict[str, str | None]


Event = EngineInfo | LoadFailed | StepOutputs | Integrity | LoraDone | LoraNames

command_encoder = msgspec.msgpack.Encoder()
_raw_commands = msgspec.msgpack.Decoder(list[msgspec.Raw])
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_encoder = msgspec.msgpack.Encoder()
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class _Named(msgspec.Struct):
    request_id: str = ""


class UnreadCommand(msgspec.Struct):
    """A command that could not be decoded: what is known of whom to tell, and why."""

    request: _Named = msgspec.field(default_factory=_Named)
    number: int | None = None
    error: str = ""


def decode_commands(message: bytes) -> Iterator[Command | UnreadCommand]:
    """The commands of a message; one that does not fit its type spoils none of the others."""
    for raw in _raw_commands.decode(message):
        try:
            yield _command_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            unread = msgspec.msgpack.decode(raw, type=UnreadCommand)
            unread.error = str(error)
            yield unread
