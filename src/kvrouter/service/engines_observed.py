"""What engines tell of themselves, for telemetry: see ``engine_accounts``."""

import logging
from collections.abc import Iterable, Mapping

from kvrouter.core.ids import WorkerRank
from kvrouter.service.index_check import Answers, Compared, Prediction
from kvrouter.service.transfer_speed import Noted, Verdict
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.router")


class EnginesObserved:
    """The events of one model's engines."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self._telemetry = telemetry
        self._model = model
        self._transfer_counters = (
            telemetry.kv_transfers,
            telemetry.kv_transfer_bytes,
            telemetry.kv_transfer_seconds,
            telemetry.kv_transfers_failed,
        )

    def compared(self, rank: WorkerRank, compared: Compared) -> None:
        """An engine's count of cached tokens was compared with the index."""
        labels = self._labels(rank)
        self._telemetry.index_predictions.inc(*labels, compared.prediction.value)
        if compared.wrong is not None:
            self._telemetry.index_wrong.inc(*labels)
            self._log(Event.INDEX_WRONG, rank, _told_of_answers(compared.wrong))

    def kv_carried(self, rank: WorkerRank, noted: Noted) -> None:
        """A rank's engine told of the KV that it has fetched since."""
        labels, carried = self._labels(rank), noted.carried
        amounts = (carried.transfers, carried.bytes, carried.seconds, carried.failed)
        for counter, amount in zip(self._transfer_counters, amounts, strict=True):
            counter.inc(*labels, by=amount)
        if noted.verdict is not None:
            event = Event.KV_TRANSFER_SLOW if noted.verdict.is_slow else Event.KV_TRANSFER_WELL
            self._log(event, rank, _told_of_speeds(noted.verdict))

    def events_skipped(self, rank: WorkerRank, skipped: Mapping[str, int]) -> None:
        """A worker told what it did not pass on since of a rank's KV events, by the reason."""
        for reason, n in skipped.items():
            self._telemetry.kv_events_skipped.inc(*self._labels(rank), reason, by=n)

    def gone(self, rank: WorkerRank, *, skipped: Iterable[str]) -> None:
        """A rank left, of whose events some were skipped for these reasons. Its counters go with it: those of
        all ranks that ever were would fill the page in the end.
        """
        labels = self._labels(rank)
        for counter in (*self._transfer_counters, self._telemetry.index_wrong):
            counter.forget(*labels)
        for prediction in Prediction:
            self._telemetry.index_predictions.forget(*labels, prediction.value)
        for reason in skipped:
            self._telemetry.kv_events_skipped.forget(*labels, reason)

    def _labels(self, rank: WorkerRank) -> tuple[str, str, str]:
        return self._model, str(rank.worker_id), str(rank.dp_rank)

    def _log(self, event: Event, rank: WorkerRank, reason: str) -> None:
        worker = str(rank.worker_id)
        log_event(logger, event, model=self._model, worker=worker, dp_rank=rank.dp_rank, reason=reason)


def _told_of_answers(answers: Answers) -> str:
    than_predicted = "less" if answers.mean_error_blocks > 0 else "more"
    return (
        f"{answers.n_wrong} of {answers.n_answers} predictions were wrong; on average "
        f"{abs(answers.mean_error_blocks):.1f} blocks {than_predicted} in the cache than predicted"
    )


def _told_of_speeds(verdict: Verdict) -> str:
    now, shown = verdict.now, verdict.shown
    return (
        f"{now.bytes_per_s / 1e9:.3g} GB/s, {1e3 * now.transfer_s:.3g} ms a transfer; "
        f"it has shown {shown.bytes_per_s / 1e9:.3g} GB/s, {1e3 * shown.transfer_s:.3g} ms"
    )
