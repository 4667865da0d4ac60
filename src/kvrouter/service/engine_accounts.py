"""What the engines of one model tell of themselves, beside what is believed of them."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.fleet.fleet import Fleet
from kvrouter.service.engines_observed import EnginesObserved
from kvrouter.service.index_check import Answers, IndexCheck
from kvrouter.service.transfer_speed import TransferReading, TransferSpeeds


class AccountReading(NamedTuple):
    """What one rank's engine told; None where it tells nothing, or has not yet."""

    answers: Answers | None
    transfers: TransferReading | None
    events_skipped: Mapping[str, int] | None


class EngineAccounts:
    """Keeps, for each worker rank, its engine's counts of tokens that were cached and of KV that was fetched,
    and its worker's count of KV events that were not passed on.
    """

    def __init__(self, fleet: Fleet, observed: EnginesObserved) -> None:
        self._fleet = fleet
        self._observed = observed
        self._index_check = IndexCheck(block_size=fleet.block_size)
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
    ) -> bool:
        """An engine told how much of a prompt it had cached, and of how many tokens it made it; return
        whether its last answers contradict the index.
        """
        compared = self._index_check.note(
            slot,
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
            isl_tokens=isl_tokens,
            prompt_tokens=prompt_tokens,
            now_s=time.monotonic(),
        )
        if compared is None:
            return False
        self._ranks[slot] = rank
        self._observed.compared(rank, compared)
        return compared.wrong is not None

    def reported(self, report: LoadReport) -> None:
        """A load report came of a rank that is here."""
        slot = self._fleet.slot_of(report.rank)
        if slot is None:
            return
        self._ranks[slot] = report.rank
        noted = self._transfers.note(slot, report.kv_transfers, now_s=time.monotonic())
        if noted is not None:
            self._observed.kv_carried(report.rank, noted)
        before, told = self._skipped.get(slot), report.kv_events_skipped
        if told != before:
            self._skipped[slot] = told
            self._observed.events_skipped(report.rank, _more(told, before or {}))

    def reading(self, slot: Slot) -> AccountReading:
        """What is known of the slot's rank now."""
        return AccountReading(
            answers=self._index_check.last_answers(slot),
            transfers=self._transfers.reading(slot, now_s=time.monotonic()),
            events_skipped=self._skipped.get(slot),
        )

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        self._index_check.freed(slot)
        self._transfers.freed(slot)
        skipped, rank = self._skipped.pop(slot, {}), self._ranks.pop(slot, None)
        if rank is not None:
            self._observed.gone(rank, skipped=skipped)


def _more(told: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was counted since; a count that became less is that of an engine that began anew."""
    return {
        reason: n - before.get(reason, 0) if n >= before.get(reason, 0) else n
        for reason, n in told.items()
        if n != before.get(reason, 0)
    }
