"""Messages between an engine client and its engine process, encoded as msgpack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.scheduler_config import CPU_LIMITS
from neso.engine.core.stats import EngineStats
from neso.engine.kv_transfer.format import KvFormat
from neso.engine.lora.config import LoraConfig
from neso.engine.runners.base import Capability
from neso.engine.sampling.score_limits import ScoreLimits
from neso.engine.vision.image_processor import VisionInfo
from neso.generation.pooling import PoolingInfo
from neso.generation.request import LoraRequest
from neso.generation.sampling_params import SamplingDefaults

ONE_PROCESS = "tensor_parallel_size and pipeline_parallel_size need `neso serve`: this engine has one process"


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Start a request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort a request, or one of its sequences."""

    request_id: str
    index: int | None = None


class CheckIntegrity(msgspec.Struct, frozen=True, tag="check"):
    """Check the KV-cache accounting; answered by `Integrity`."""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """Load an adapter, replacing one of the same name; answered by `LoraDone` with the same number."""

    number: int
    lora: LoraRequest


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    """Unload an adapter; requests in flight finish with it. Answered by `LoraDone`."""

    number: int
    name: str


class ExtendLease(msgspec.Struct, frozen=True, tag="extend_lease"):
    """Keep the blocks of a `KvExport` for `lease_seconds` from now on.

    Ignored before the lease begins, when all blocks are computed, and after it has ended.
    """

    transfer_id: str
    lease_seconds: float


class ReleaseLease(msgspec.Struct, frozen=True, tag="release_lease"):
    """Free the blocks of a `KvExport`, or once they are computed; ignored if the lease has ended."""

    transfer_id: str


class SendBlockKeys(msgspec.Struct, frozen=True, tag="send_block_keys"):
    """Send the keys of all cached prefixes, and their changes from then on, as `BlockChanges` to the server process."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Serve another client, which has bound a pair socket to `address`; its first event is `EngineInfo`."""

    client: int
    address: str


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """Abort the requests of a client that has ended, and close its socket."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process."""


Command = (
    Add
    | Abort
    | CheckIntegrity
    | LoadLora
    | UnloadLora
    | ExtendLease
    | ReleaseLease
    | SendBlockKeys
    | Attach
    | Detach
    | Shutdown
)

SERVER = 0
"""Number of the client that has started the engine."""


def client_prefix(client: int) -> str:
    """Return the beginning of the request ids of a client. Ids of `SERVER` do not begin with a NUL."""
    return "" if client == SERVER else f"\0{client}\0"


def client_of(request_id: str) -> int:
    """Return the number of the client that has sent a request."""
    return int(request_id[1 : request_id.index("\0", 1)]) if request_id.startswith("\0") else SERVER


def own_id(request_id: str) -> str:
    """Return a request id without the prefix of its client."""
    return request_id[request_id.index("\0", 1) + 1 :] if request_id.startswith("\0") else request_id


class EngineInfo(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded. Lengths are in tokens, `cache_bytes` is the size of the KV cache.

    `hidden_size`: width of the token embeddings. `generates`: whether the model has an LM head. `pooling`, `vision`:
    None if not supported. `default_sampling`: see `LanguageModel`.
    `logits_processors`: their names. `kv_address`: where other engines read blocks of the KV cache, empty if it exports
    none; `kv_format`: format of the blocks, None if it neither exports nor imports them.
    `load_log`: what an engine process has logged while it loaded the model.
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
    max_num_batched_tokens: int = CPU_LIMITS.max_num_batched_tokens
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
    logits_processors: tuple[str, ...] = ()
    kv_address: str = ""
    kv_format: KvFormat | None = None
    load_log: tuple[str, ...] = ()


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The model could not be loaded; the message is for the user."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """Outputs of one step, for all requests."""

    outputs: list[SequenceOutput]
    stats: EngineStats


class Integrity(msgspec.Struct, frozen=True, tag="integrity"):
    """Result of `CheckIntegrity`; the message is empty if the accounting is consistent."""

    message: str
    stats: EngineStats


class LoraDone(msgspec.Struct, frozen=True, tag="lora_done"):
    """Result of `LoadLora` or `UnloadLora`; the message is empty on success."""

    number: int
    message: str


class LoraNames(msgspec.Struct, frozen=True, tag="lora_names"):
    """The loaded adapters have changed: their names, each with the path it was loaded from, if any."""

    names: dict[str, str | None]


Event = EngineInfo | LoadFailed | StepOutputs | Integrity | LoraDone | LoraNames | BlockChanges


class Unsendable(ValueError):
    """A command cannot be encoded, for example because of an integer beyond 64 bits or invalid Unicode."""


command_encoder = msgspec.msgpack.Encoder()
_raw_commands = msgspec.msgpack.Decoder(list[msgspec.Raw])
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_encoder = msgspec.msgpack.Encoder()
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class _RequestId(msgspec.Struct):
    request_id: str = ""


class InvalidCommand(msgspec.Struct):
    """A command that could not be decoded, with the ids to which the error is reported."""

    request: _RequestId = msgspec.field(default_factory=_RequestId)
    number: int | None = None
    error: str = ""


def decode_commands(message: bytes) -> Iterator[Command | InvalidCommand]:
    """Decode the commands of a message; an invalid one does not affect the others."""
    for raw in _raw_commands.decode(message):
        try:
            yield _command_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            invalid = msgspec.msgpack.decode(raw, type=InvalidCommand)
            invalid.error = str(error)
            yield invalid
