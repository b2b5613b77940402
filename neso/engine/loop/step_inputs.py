"""What a scheduled step needs beside its tokens; sequences whose part cannot be had are answered and left out."""

from __future__ import annotations

import logging

from neso.engine.core.request import SequenceOutput
from neso.engine.core.schedule import Schedule
from neso.engine.core.scheduler import Scheduler
from neso.engine.loop.failed_requests import fail_requests
from neso.engine.lora.manager import LoraManager

logger = logging.getLogger(__name__)


def load_rows(schedule: Schedule, scheduler: Scheduler) -> list[SequenceOutput]:
    """Make the rows that stand among the tokens of the step."""
    outputs = []
    for share in schedule.scheduled:
        sequence, rows = share.sequence, share.sequence.embedding_rows
        if rows is None or sequence.released:
            continue
        try:
            rows.load(sequence.num_computed_tokens, share.end)
        except Exception as error:
            logger.error("the images of request '%s' failed", sequence.request.request_id, exc_info=error)
            outputs += fail_requests(scheduler, [sequence], f"its images failed: {error}")
    if outputs:
        schedule.drop_released()
    return outputs


def load_adapters(schedule: Schedule, scheduler: Scheduler, lora: LoraManager) -> list[SequenceOutput]:
    """Give the runner the adapters of the step."""
    outputs = []
    for version, error in lora.fill_slots().items():
        users = [sequence for sequence in scheduler.running if sequence.request.adapter == version]
        outputs += fail_requests(scheduler, users, f"its adapter failed: {error}")
        lora.slots.vacate(version)
    if outputs:
        schedule.drop_released()
    return outputs
