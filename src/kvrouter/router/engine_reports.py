"""Compares reports of engines with predictions: cached tokens, KV transfers, skipped events."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.router.prompt_shapes import NotedShape, PromptShapes
from kvrouter.router.transfer_speed import NotedTransfers, SpeedVerdict, TransferReading, TransferSpeeds
from kvrouter.telemetry import Event, Telemetry, log_event

WINDOW_ANSWERS = 16
"""How many consecutive answers are judged together."""

WRONG_SHARE = 0.5
"""Share of wrong predictions from which the index counts as wrong, and not only as late."""

SPAN_S = 5.0
"""The judged answers span at least this time: no index predicts the first burst of a new prompt."""

TOLERANCE_BLOCKS = 1
"""A difference that is no error: engines always compute a prompt's last token again."""


class Prediction(StrEnum):
    """How an answer compares with its prediction: right, too many or too few blocks predicted; OTHER_PROMPT
    where the engine made other tokens of the call than the router, which says nothing about the index.
    """

    RIGHT = "right"
    TOO_MANY = "too_many"
    TOO_FEW = "too_few"
    OTHER_PROMPT = "other_prompt"


class AnswerCounts(NamedTuple):
    """The last answers of one rank: how many there are, how many were predicted wrongly, and the mean error
    of all in blocks; above 0 the index predicts blocks that the engine does not have.
    """

    n_answers: int
    n_wrong: int
    mean_error_blocks: float


class Compared(NamedTuple):
    """One answer compared with its prediction; ``wrong`` is set when the last answers condemn the index."""

    prediction: Prediction
    wrong: AnswerCounts | None


class _Window:
    """The last answers of one rank: arrival time, and by how many blocks the prediction was too high."""

    __slots__ = ("answers", "n_since_verdict", "was_asked_in_vain")

    def __init__(self) -> None:
        self.answers: deque[tuple[float, int]] = deque(maxlen=WINDOW_ANSWERS)
        self.n_since_verdict = 0
        self.was_asked_in_vain = False
        """Whether a snapshot was requested for a blind shape; a second one would not help."""

    def summed(self) -> AnswerCounts:
        errors = [error for _, error in self.answers]
        n_wrong = sum(1 for error in errors if abs(error) > TOLERANCE_BLOCKS)
        return AnswerCounts(len(errors), n_wrong, sum(errors) / len(errors))


class IndexCheck:
    """Keeps each slot's last answers. An answer counts only where blocks were predicted or cached."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._windows: dict[Slot, _Window] = {}

    def note(
        self,
        slot: Slot,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        isl_tokens: int,
        prompt_tokens: int | None,
        now_s: float,
        is_blind: bool = False,
    ) -> Compared | None:
        """Note an answer: ``isl_tokens`` were routed, and the engine counts ``prompt_tokens``, or None.
        Returns None where no block was predicted or cached. A wrong index is reported once per window of
        wrong answers; for calls whose shape ``is_blind`` only once until an answer is right, because the
        engine makes another prompt of them and a new snapshot does not help.
        """
        if prompt_tokens is not None and prompt_tokens != isl_tokens:
            return Compared(Prediction.OTHER_PROMPT, None)
        most = (isl_tokens - 1) // self._block_size * self._block_size  # the last token is always computed
        predicted_tokens = min(predicted_tokens, most)
        if not predicted_tokens and not cached_tokens:
            return None
        window = self._windows.get(slot)
        if window is None:
            window = self._windows[slot] = _Window()
        error = (predicted_tokens - cached_tokens) // self._block_size
        prediction = _prediction(error)
        if is_blind and window.was_asked_in_vain:
            return Compared(prediction, None)
        if prediction is Prediction.RIGHT:
            window.was_asked_in_vain = False
        window.answers.append((now_s, error))
        window.n_since_verdict += 1
        wrong = self._judged(window)
        window.was_asked_in_vain |= is_blind and wrong is not None
        return Compared(prediction, wrong)

    def last_answers(self, slot: Slot) -> AnswerCounts | None:
        """The counts of the slot's last answers; None before the first."""
        window = self._windows.get(slot)
        return None if window is None else window.summed()

    def freed(self, slot: Slot) -> None:
        """Forget the slot's rank, which has left."""
        self._windows.pop(slot, None)

    @staticmethod
    def _judged(window: _Window) -> AnswerCounts | None:
        answers = window.answers
        if window.n_since_verdict < WINDOW_ANSWERS or answers[-1][0] - answers[0][0] < SPAN_S:
            return None
        summed = window.summed()
        if summed.n_wrong < WRONG_SHARE * WINDOW_ANSWERS:
            return None
        window.n_since_verdict = 0
        return summed


def _prediction(error_blocks: int) -> Prediction:
    if abs(error_blocks) <= TOLERANCE_BLOCKS:
        return Prediction.RIGHT
    return Prediction.TOO_MANY if error_blocks > 0 else Prediction.TOO_FEW


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
