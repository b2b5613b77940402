"""How requests end that cannot go on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence


def fail_requests(
    scheduler: Scheduler,
    sequences: Iterable[Sequence],
    message: str,
    *,
    refused: bool = False,
    error_field: str = "",
) -> list[SequenceOutput]:
    """Answer `sequences` with an error, and release their requests whole: also what was forked, or waits.

    `refused`, `error_field`: see `SequenceOutput`.

    Sequences that are released already are answered too: what they were to be told was lost.
    """
    ended = dict.fromkeys(sequences)
    for request_id in dict.fromkeys(sequence.request.request_id for sequence in ended):
        ended |= dict.fromkeys(scheduler.release_request(request_id))
    return [
        SequenceOutput.failed(
            s.request.request_id, s.index, message, refused=refused, error_field=error_field
        )
        for s in ended
    ]


def involved(scheduler: Scheduler) -> list[Sequence]:
    """Sequences that a step may have touched of which nobody knows how far its schedule came.

    At least one, if there is any: the next step must not fail for the same reason for ever.
    """
    touched = [*scheduler.running, *(sequence for sequence in scheduler.waiting if sequence.block_table)]
    return touched or list(islice(scheduler.waiting, 1))
