"""Whom a failed attempt speaks against, for the circuits of its workers."""

from math import inf

from kvrouter.core.requests import Leg
from kvrouter.fleet import Fault
from kvrouter.journey.words import LegLost, State
from kvrouter.service.attempt import Attempt
from kvrouter.service.circuits import Circuits

SILENT_SHARE = 0.5
"""Who had a request for this part of its deadline, and brought nothing, is silent; else it came too late."""


def blame_loss(circuits: Circuits, attempt: Attempt, lost: LegLost, state: State) -> None:
    """A leg was lost. That a worker is full, had the leg already or is leaving is no failure of its own."""
    if lost.full or lost.repeated or lost.blameless:
        return
    is_prefill = lost.leg is Leg.PREFILL
    circuits.failed(
        attempt.placement,
        lost.leg,
        Fault.LOST,
        since_s=attempt.prefill_sent_s if is_prefill else attempt.last_sent_s,
        has_begun=not is_prefill and state is State.STREAMING,
    )


def blame_silence(
    circuits: Circuits, attempt: Attempt, state: State, *, heard_s: float, before_s: float = inf
) -> None:
    """Nothing came in time, of legs that were sent ``before_s``. Of a pair whose legs both still run, either
    may be what is waited for; the one that is well will show it with another request.
    """
    placement, task = attempt.placement, attempt.prefill_task
    waits_for_prefill = state is State.DECODING and task is not None and not task.done()
    if (state is State.PREFILLING or waits_for_prefill) and attempt.prefill_sent_s < before_s:
        circuits.failed(placement, Leg.PREFILL, Fault.SILENT, since_s=attempt.prefill_sent_s)
    leg = placement.decision.decode.leg
    if state is State.DECODING and attempt.last_sent_s < before_s:
        circuits.failed(placement, leg, Fault.SILENT, since_s=attempt.last_sent_s)
    elif state is State.STREAMING:
        circuits.failed(placement, leg, Fault.SILENT, since_s=heard_s, has_begun=True)
