"""Options of stages: models of the repository that run on workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from neso.flags import Flag, integer, number
from neso.server.errors import InvalidArgument


def _counts(texts: Iterable[str]) -> dict[str, int]:
    """Parse `MODEL=COUNT` into counts by model. Raises `InvalidArgument`."""
    counts: dict[str, int] = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        if not name or not (count.isascii() and count.isdigit()):
            raise InvalidArgument(f"--stage: expected MODEL=COUNT, got '{text}'")
        if name in counts:
            raise InvalidArgument(f"--stage: '{name}' is given twice")
        counts[name] = int(count)
    return counts


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Models that run on workers, and where workers of other hosts join. Raises `InvalidArgument`.

    - workers: number of worker processes that the server starts, by model
    - address: `tcp://HOST:PORT` or `ipc://PATH`; a tcp:// address needs `token_file`
    """

    workers: Annotated[
        Mapping[str, int],
        Flag(
            "stage",
            "Run a model of the repository on COUNT worker processes; 0: only on workers that join.",
            repeated=True,
            metavar="MODEL=COUNT",
            convert=_counts,
        ),
    ] = field(default_factory=dict)
    address: Annotated[
        str | None,
        Flag("stage-address", "Address for workers started by `neso worker --stage`.", metavar="ADDRESS"),
    ] = None
    token_file: Annotated[
        str | None,
        Flag("stage-token-file", "File with the secret of workers at a tcp:// address.", metavar="PATH"),
    ] = None
    max_attempts: Annotated[
        int,
        Flag("stage-max-attempts", "Workers that a request may lose before it fails.", integer(1)),
    ] = 3
    heartbeat_timeout: Annotated[
        float,
        Flag("stage-heartbeat-timeout", "Seconds of silence after which a worker is given up.", number(0.1)),
    ] = 30.0

    def __post_init__(self) -> None:
        if self.workers and any(count < 0 for count in self.workers.values()):
            raise InvalidArgument("the number of workers of a stage must not be negative")
        if self.address is None:
            missing = [name for name, count in self.workers.items() if not count]
            if missing:
                raise InvalidArgument(f"--stage {missing[0]}=0 needs --stage-address, where its workers join")
            return
        if not self.workers:
            raise InvalidArgument("--stage-address needs --stage, which names the models that run on workers")
        if not self.address.startswith(("tcp://", "ipc://")):
            raise InvalidArgument(f"--stage-address must begin with tcp:// or ipc://, got '{self.address}'")
        if self.address.startswith("tcp://") and self.token_file is None:
            raise InvalidArgument(
                f"--stage-address {self.address} needs --stage-token-file: connections are encrypted with it"
            )
