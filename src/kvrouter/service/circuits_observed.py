"""Circuits that open and close, for telemetry: see ``circuits``."""

import logging

from kvrouter.core.ids import WorkerId
from kvrouter.fleet import Fault
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.router")


class CircuitsObserved:
    """The events of one model's circuits."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self._telemetry = telemetry
        self._model = model

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row."""
        worker = str(worker_id)
        self._telemetry.circuits_opened.inc(self._model, worker, fault.value)
        log_event(
            logger,
            Event.CIRCUIT_OPENED,
            model=self._model,
            worker=worker,
            reason=fault.value,
            duration_s=for_s,
        )

    def closed(self, worker_id: WorkerId) -> None:
        """A worker brought something again."""
        log_event(logger, Event.CIRCUIT_CLOSED, model=self._model, worker=str(worker_id))

    def gone(self, worker_id: WorkerId) -> None:
        """A worker left: its counters go with it, or those of all that ever were would fill the page."""
        for fault in Fault:
            self._telemetry.circuits_opened.forget(self._model, str(worker_id), fault.value)

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, *, for_s: float) -> None:
        """KV of a pair was lost, or lost again."""
        log_event(
            logger,
            Event.CIRCUIT_OPENED,
            model=self._model,
            prefill_worker=str(prefill),
            decode_worker=str(decode),
            reason=Fault.KV_LOST.value,
            duration_s=for_s,
        )

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """KV of a pair arrived again."""
        log_event(
            logger,
            Event.CIRCUIT_CLOSED,
            model=self._model,
            prefill_worker=str(prefill),
            decode_worker=str(decode),
        )
