"""Metrics and log events of what engines report: their answers beside the index, and their speeds."""

import logging
from collections.abc import Iterable, Mapping

from kvrouter.core.ids import WorkerRank
from kvrouter.router.index_check import AnswerCounts, Compared, Prediction
from kvrouter.router.prompt_shapes import NotedShape
from kvrouter.router.transfer_speed import NotedTransfers, SpeedVerdict
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.router")


class EngineInstrumentation:
    """Metrics and log events about one model's engines."""

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
        """Count an answer compared with the index, and log a wrong index."""
        labels = self._labels(rank)
        self._telemetry.index_predictions.inc(*labels, compared.prediction.value)
        if compared.wrong is not None:
            self._telemetry.index_wrong.inc(*labels)
            self._log(Event.INDEX_WRONG, rank, _answers_detail(compared.wrong))

    def shape_noted(self, noted: NotedShape) -> None:
        """Count an answer by the shape of its call, and log a shape that turned blind."""
        outcome = "missed" if noted.is_missed else "found"
        self._telemetry.prompt_shape_answers.inc(self._model, noted.shape, outcome)
        if noted.turned_blind is not None:
            reading = noted.turned_blind
            log_event(
                logger,
                Event.PROMPT_SHAPE_BLIND,
                model=self._model,
                shape=reading.shape,
                reason=f"of the last {reading.answers} such calls {reading.missed} were not found where the "
                "engine had them cached: it makes another prompt of them than the router",
            )

    def kv_carried(self, rank: WorkerRank, noted: NotedTransfers) -> None:
        """Count the KV that a rank's engine has fetched since its last report."""
        labels, carried = self._labels(rank), noted.carried
        amounts = (carried.transfers, carried.bytes, carried.seconds, carried.failed)
        for counter, amount in zip(self._transfer_counters, amounts, strict=True):
            counter.inc(*labels, by=amount)
        if noted.verdict is not None:
            event = Event.KV_TRANSFER_SLOW if noted.verdict.is_slow else Event.KV_TRANSFER_WELL
            self._log(event, rank, _speeds_detail(noted.verdict))

    def events_skipped(self, rank: WorkerRank, skipped: Mapping[str, int]) -> None:
        """Count KV events of a rank that its worker has skipped since its last report, by reason."""
        for reason, n in skipped.items():
            self._telemetry.kv_events_skipped.inc(*self._labels(rank), reason, by=n)

    def gone(self, rank: WorkerRank, *, skipped: Iterable[str]) -> None:
        """Remove the counters of a rank that has left; ``skipped`` are its reasons for skipped events."""
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


def _answers_detail(answers: AnswerCounts) -> str:
    than_predicted = "less" if answers.mean_error_blocks > 0 else "more"
    return (
        f"{answers.n_wrong} of {answers.n_answers} predictions were wrong; on average "
        f"{abs(answers.mean_error_blocks):.1f} blocks {than_predicted} in the cache than predicted"
    )


def _speeds_detail(verdict: SpeedVerdict) -> str:
    now, shown = verdict.now, verdict.shown
    return (
        f"{now.bytes_per_s / 1e9:.3g} GB/s, {1e3 * now.transfer_s:.3g} ms a transfer; "
        f"it has shown {shown.bytes_per_s / 1e9:.3g} GB/s, {1e3 * shown.transfer_s:.3g} ms"
    )
