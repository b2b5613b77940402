"""Connection to NATS: the stream with the tickets of a queue, its consumer, and the bucket with its members."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from neso.engine.cluster_config import ClusterConfig
from neso.engine.errors import EngineError

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

    from neso.cluster.jetstream.client import ReconnectingClient

logger = logging.getLogger(__name__)

ACK_SECONDS = 10.0
"""JetStream gives a ticket to another worker when it was not extended for this long."""
BEAT_SECONDS = 3.0
"""Interval in which members renew their entries in the bucket."""
ENTRY_SECONDS = 15.0
"""Age at which an entry of the bucket is removed."""
CONNECT_SECONDS = 10
_PENDING_BYTES = 32 * 2**20
"""Messages that are kept while the connection is down; further ones are dropped, which `Links` notices."""
_STREAM_DIFFERS = 10058
MODEL_KEY = "model"
_PREFIX = "neso_"


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a queue is. The files contain secrets; the URLs may contain them.

    - urls: `nats://` or `tls://`, separated by commas; queue: name of the queue
    - token_file, credentials_file, nkey_file, password_file: token, user JWT and seed, seed of an NKEY, USER:PASSWORD
    - ca_file, cert_file, key_file: for TLS
    - max_requests: limit of the requests in the queue, of all servers
    """

    urls: str
    queue: str
    token_file: str | None = None
    credentials_file: str | None = None
    nkey_file: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    max_requests: int = 10_000

    @classmethod
    def of(cls, config: ClusterConfig, urls: str, model: str, token_file: str | None) -> NatsOptions:
        """Return the options for a model. `model`: path of its checkpoint."""
        return cls(
            urls=urls,
            queue=config.nats_queue or re.sub(r"[^A-Za-z0-9_-]", "-", model.rstrip("/").rpartition("/")[2]),
            token_file=token_file,
            credentials_file=config.nats_credentials_file,
            nkey_file=config.nats_nkey_file,
            password_file=config.nats_password_file,
            ca_file=config.nats_ca_file,
            cert_file=config.nats_cert_file,
            key_file=config.nats_key_file,
            max_requests=config.nats_max_requests,
        )

    @property
    def shown(self) -> str:
        """The URLs without user and password."""
        return ",".join(re.sub(r"//[^/@]*@", "//", url) for url in self.urls.split(","))


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the bucket: a server (`kind` "server") or a worker. `session`: differs after a restart."""

    kind: str
    name: str
    host: str
    pid: int
    model: str
    session: str
    version: str
    roles: list[str] = []
    requests: int = 0
    free_sequences: int = 0

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.name}"


class NatsConnection:
    """A connection of a server or worker to the queue of a model. Created by `open`."""

    def __init__(self, options: NatsOptions, client: ReconnectingClient) -> None:
        self.options, self.client = options, client
        self.prefix = f"neso.{options.queue}"
        self.stream = f"{_PREFIX}{options.queue}"
        self.tickets = f"{self.prefix}.tickets"
        self.jetstream: JetStreamContext = client.jetstream(timeout=5)
        self.bucket: KeyValue
        self.on_reconnect: list[Callable[[], None]] = []
        self._created: object = None
        self._last_error: Exception | None = None

    @classmethod
    async def open(cls, options: NatsOptions, name: str) -> NatsConnection:
        """Connect, and create what does not exist yet. Raises `EngineError`."""
        self = await cls.connect(options, name)
        try:
            await self.create()
        except Exception as error:
            await self.close()
            raise EngineError(f"cannot use JetStream at {options.shown}: {self._reason(error)}") from None
        return self

    @classmethod
    async def connect(cls, options: NatsOptions, name: str) -> NatsConnection:
        """Connect. Raises `EngineError`."""
        try:
            from neso.cluster.jetstream.client import RECONNECT_SECONDS, ReconnectingClient
        except ImportError:
            raise EngineError("NATS needs the package nats-py: pip install 'neso-server[nats]'") from None
        client = ReconnectingClient()
        self = cls(options, client)
        arguments = _authentication(options)
        try:
            await asyncio.wait_for(
                client.connect(
                    servers=options.urls.split(","),
                    name=name,
                    error_cb=self._error,
                    reconnected_cb=self._reconnected,
                    connect_timeout=CONNECT_SECONDS,
                    reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    ping_interval=5,
                    pending_size=_PENDING_BYTES,
                    **arguments,
                ),
                CONNECT_SECONDS,
            )
        except Exception as error:
            reason = self._reason(self._last_error or error)
            await _close(client)
            raise EngineError(f"cannot connect to NATS at {options.shown}: {reason}") from None
        return self

    async def create(self) -> bool:
        """Create the stream, its consumer and the bucket if they do not exist. Returns whether the stream is new."""
        from nats.js.api import (
            AckPolicy,
            ConsumerConfig,
            DiscardPolicy,
            KeyValueConfig,
            RetentionPolicy,
            StreamConfig,
        )
        from nats.js.errors import BadRequestError

        config = StreamConfig(
            name=self.stream,
            subjects=[self.tickets],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_msgs=self.options.max_requests,
        )
        try:
            await self.jetstream.add_stream(config)
        except BadRequestError as error:
            if error.err_code != _STREAM_DIFFERS:
                raise
            await self.jetstream.update_stream(config)
        await self.jetstream.add_consumer(
            self.stream,
            ConsumerConfig(
                durable_name="workers",
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_SECONDS,
                max_ack_pending=-1,
                max_waiting=4096,
            ),
        )
        self.bucket = await self.jetstream.create_key_value(
            KeyValueConfig(bucket=self.stream, history=1, ttl=ENTRY_SECONDS)
        )
        created = (await self.jetstream.stream_info(self.stream)).created
        new, self._created = self._created is not None and self._created != created, created
        return new

    async def check_model(self, digest: str) -> None:
        """Raise `EngineError` if the queue serves another model. The first member decides which one it is."""
        from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

        try:
            await self.bucket.create(MODEL_KEY, digest.encode())
            return
        except KeyWrongLastSequenceError:
            pass
        try:
            other = (await self.bucket.get(MODEL_KEY)).value
        except KeyNotFoundError:
            other = digest.encode()
        if other != digest.encode():
            raise EngineError(
                f"the queue '{self.options.queue}' at {self.options.shown} is used for another checkpoint, or with "
                "other options of the model: use the same ones, or another nats_queue"
            )

    async def announce(self, member: Member) -> None:
        """Renew the entry of a member, and the model's."""
        await self.bucket.put(member.key, msgspec.json.encode(member))
        await self.bucket.put(MODEL_KEY, member.model.encode())

    async def leave(self, member: Member) -> None:
        """Remove the entry of a member, if NATS responds."""
        try:
            await asyncio.wait_for(self.bucket.delete(member.key), 1)
        except Exception as error:
            logger.debug("the entry of '%s' was not removed: %s", member.name, self._hidden(error))

    async def members(self) -> list[Member]:
        """Return the servers and workers of the queue."""
        from nats.js.errors import KeyNotFoundError, NoKeysError

        try:
            keys = await self.bucket.keys()
        except NoKeysError:
            return []
        found = []
        for key in sorted(keys):
            try:
                value = (await self.bucket.get(key)).value or b""
            except KeyNotFoundError:
                continue
            if key != MODEL_KEY:
                found.append(msgspec.json.decode(value, type=Member))
        return found

    async def queues(self) -> dict[str, tuple[int, list[Member]]]:
        """Return the number of tickets and the members of all queues. Raises `EngineError`."""
        found = {}
        try:
            for stream in await self.jetstream.streams_info():
                name = stream.config.name or ""
                if name.startswith(_PREFIX):
                    self.bucket = await self.jetstream.key_value(name)
                    found[name.removeprefix(_PREFIX)] = stream.state.messages, await self.members()
        except Exception as error:
            raise EngineError(
                f"cannot use JetStream at {self.options.shown}: {self._reason(error)}"
            ) from None
        return found

    async def close(self) -> None:
        """Send what is pending, and close."""
        await _close(self.client)

    async def _reconnected(self) -> None:
        logger.info("connected to NATS at %s again", self.options.shown)
        self.client.failures = 0
        for callback in self.on_reconnect:
            callback()

    async def _error(self, error: Exception) -> None:
        if self.client.is_connected or repr(error) != repr(
            self._last_error
        ):  # not for each attempt to reconnect
            logger.warning("NATS at %s: %s", self.options.shown, self._reason(error))
        self._last_error = error

    def _reason(self, error: Exception) -> str:
        return self._hidden(error) or type(error).__name__

    def _hidden(self, error: BaseException | None) -> str:
        """Return the text of an error without secrets of the URLs."""
        text = str(error) if error is not None else ""
        for url in self.options.urls.split(","):
            parts = urlsplit(url)
            for secret in (parts.password, parts.username):
                text = text.replace(secret, "***") if secret else text
        return text


async def _close(client: ReconnectingClient) -> None:
    try:
        if client.is_connected:
            await asyncio.wait_for(client.flush(1), 1)
        await asyncio.wait_for(client.close(), 2)
    except Exception as error:
        logger.debug("closing the connection to NATS: %s", type(error).__name__)


def _authentication(options: NatsOptions) -> dict[str, Any]:
    """Return the arguments of `connect` for authentication and TLS. Raises `EngineError`."""
    arguments: dict[str, Any] = {}
    try:
        if options.token_file is not None:
            arguments["token"] = _read(options.token_file)
        if options.password_file is not None:
            arguments["user"], separator, arguments["password"] = _read(options.password_file).partition(":")
            if not separator:
                raise EngineError(f"{options.password_file} must have the form USER:PASSWORD")
        if options.nkey_file is not None:
            arguments["nkeys_seed_str"] = _nkey_seed(options.nkey_file)
        if options.credentials_file is not None:
            _read(options.credentials_file)
            arguments["user_credentials"] = options.credentials_file  # read again for each connection
        if options.ca_file or options.cert_file or "tls://" in options.urls:
            context = ssl.create_default_context(cafile=options.ca_file)
            if options.cert_file is not None:
                context.load_cert_chain(options.cert_file, options.key_file)
            arguments["tls"] = context
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"a file with secrets of NATS cannot be read: {error}") from None
    return arguments


def _read(path: str) -> str:
    return Path(path).read_text().strip()


def _nkey_seed(path: str) -> str:
    """Return the seed of an NKEY. Raises `EngineError`, which does not contain it, `OSError`."""
    import nkeys  # type: ignore[import-untyped]

    seed = _read(path)
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except Exception:
        raise EngineError(f"{path} must contain the seed of an NKEY") from None
    return seed
