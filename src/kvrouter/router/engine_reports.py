"""Compares reports of engines with predictions: cached tokens, KV transfers, skipped events."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.router.engine_instrumentation import EngineInstrumentation
from kvrouter.router.index_check import AnswerCounts, IndexCheck
from kvrouter.router.prompt_shapes import PromptShapes
from kvrouter.router.transfer_speed import TransferReading, TransferSpeeds


class ReportReading(NamedTuple):
    """The last reports of one rank's engine; a field is None where it has reported none."""

    answers: AnswerCounts | None
    transfers: TransferReading | None
    events_skipped: Mapping[str, int] | None


class EngineReports:
    """Keeps each worker rank's reports: cached tokens, fetched KV, and KV events that its worker skipped."""

    def __init__(
        self,
        fleet: Fleet,
        instrumentation: EngineInstrumentation,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._fleet = fleet
        self._instrumentation = instrumentation
        self._index_check = IndexCheck(block_size=fleet.block_size)
        self.shapes = PromptShapes(block_size=fleet.block_size)
        self._transfers = TransferSpeeds()
        self._skipped: dict[Slot, Mapping[str, int]] = {}
        self._ranks: dict[Slot, WorkerRank] = {}

    def answered(
        self,
        slot: Slot,
        rank: WorkerRank,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        isl_tokens: int,
        prompt_tokens: int | None,
        shape: str = "",
    ) -> bool:
        """Note how many tokens of a prompt the engine had cached, for a call of this shape; return whether
        its last answers contradict the index. ``prompt_tokens`` is the engine's own count, None where it has
        none.
        """
        now_s = self._clock()
        noted = None
        if shape:
            noted = self.shapes.note(
                shape,
                predicted_tokens=predicted_tokens,
                cached_tokens=cached_tokens,
                isl_tokens=isl_tokens,
                prompt_tokens=prompt_tokens,
                now_s=now_s,
            )
        if noted is not None:
            self._instrumentation.shape_noted(noted)
        compared = self._index_check.note(
            slot,
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
            isl_tokens=isl_tokens,
            prompt_tokens=prompt_tokens,
            now_s=now_s,
            is_blind=noted is not None and noted.is_blind,
        )
        if compared is None:
            return False
        self._ranks[slot] = rank
        self._instrumentation.compared(rank, compared)
        return compared.wrong is not None

    def reported(self, report: LoadReport) -> KvTransfers | None:
        """Note the load report of a rank; return the KV that its engine has fetched since the last report,
        None where nothing new or the rank is unknown.
        """
        slot = self._fleet.slot_of(report.rank)
        if slot is None:
            return None
        self._ranks[slot] = report.rank
        noted = self._transfers.note(slot, report.kv_transfers, now_s=self._clock())
        if noted is not None:
            self._instrumentation.kv_carried(report.rank, noted)
        before, skipped = self._skipped.get(slot), report.kv_events_skipped
        if skipped != before:
            self._skipped[slot] = skipped
            self._instrumentation.events_skipped(report.rank, _more(skipped, before or {}))
        return None if noted is None else noted.carried

    def reading(self, slot: Slot) -> ReportReading:
        """The last reports of the slot's rank."""
        return ReportReading(
            answers=self._index_check.last_answers(slot),
            transfers=self._transfers.reading(slot, now_s=self._clock()),
            events_skipped=self._skipped.get(slot),
        )

    def freed(self, slot: Slot) -> None:
        """Forget the slot's rank, which has left."""
        self._index_check.freed(slot)
        self._transfers.freed(slot)
        skipped, rank = self._skipped.pop(slot, {}), self._ranks.pop(slot, None)
        if rank is not None:
            self._instrumentation.gone(rank, skipped=skipped)


def _more(skipped: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The counts since ``before``; a count that fell is that of a restarted engine, and counts in full."""
    return {
        reason: n - before.get(reason, 0) if n >= before.get(reason, 0) else n
        for reason, n in skipped.items()
        if n != before.get(reason, 0)
    }
