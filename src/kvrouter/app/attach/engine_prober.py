"""Probes the engines of a frontend's file whose workers are other processes: which have none, and why."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.app.attach.attachment import NotAnswered, expected_engine, probe, without_place
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import SEVERAL_ENGINES
from kvrouter.engines.attach import AttachSpec
from kvrouter.router.router_service import RouterService
from kvrouter.telemetry import Event, log_event

_log = logging.getLogger("kvrouter.frontend")

PROBE_EVERY_S = 10.0
"""Seconds between two probes of an engine without a worker."""

PROBED_AT_ONCE = 16

NOT_ANNOUNCED = "no worker has announced it"
PROBED_HERE = f"Asked from the frontend, since {NOT_ANNOUNCED}"
ANSWERS = f"{NOT_ANNOUNCED}, though it answers the frontend"


class EngineProber:
    """Probes the engines that have no worker, for the reason; the log of an engine's worker has it too.

    Inside ``async with``, :attr:`expected` is kept up to date. ``specs`` have the ids of a fleet file.
    """

    def __init__(self, specs: Sequence[AttachSpec], service: RouterService) -> None:
        self._specs = specs
        self._service = service
        self._records = {
            spec.worker_id: replace(expected_engine(spec), reason=NOT_ANNOUNCED) for spec in specs
        }
        self._gate = asyncio.Semaphore(PROBED_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._specs:
            self._task = asyncio.create_task(self._keep_probing())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def expected(self) -> list[ExpectedEngine]:
        """Every engine; it has joined if a worker of its id is announced, or one whose engine has its URL."""
        cards = [card for model in self._service.models() for card in model.fleet]
        by_url = {card.engine_url: card for card in cards}
        by_id = {card.worker_id: card for card in cards}
        found = []
        for worker_id, record in self._records.items():
            card = by_url.get(record.engine_url or "") or by_id.get(worker_id)
            if card is not None:
                several = f"{card.engine_url} {SEVERAL_ENGINES}" if card.several_engines else None
                joined = ExpectedState.JOINED
                record = replace(record, model=card.model, state=joined, reason=several)  # noqa: PLW2901
            found.append(record)
        return found

    async def _keep_probing(self) -> None:
        while True:
            missing = {each.worker_id for each in self.expected() if each.state != ExpectedState.JOINED}
            await asyncio.gather(*(self._probe(spec) for spec in self._specs if spec.worker_id in missing))
            await asyncio.sleep(PROBE_EVERY_S)

    async def _probe(self, spec: AttachSpec) -> None:
        state = ExpectedState.AWAITED
        try:
            async with self._gate:
                await probe(spec)
            why = None
        except NotAnswered as error:
            why = error.__cause__.message if isinstance(error.__cause__, KvrouterError) else error.message
        except KvrouterError as error:
            state, why = ExpectedState.REFUSED, error.message
        except Exception as error:  # noqa: BLE001 - an internal error is logged, and stops no other probe
            log_event(_log, Event.INTERNAL_ERROR, worker=str(spec.worker_id), exc_info=error)
            why = "it could not be asked; the log has the traceback"
        reason = ANSWERS
        if why is not None:
            what = without_place(why, spec)
            reason = f"{what}{'' if what.endswith('?') else '.'} {PROBED_HERE}"
        self._note(spec.worker_id, state, reason)

    def _note(self, worker_id: WorkerId, state: ExpectedState, reason: str) -> None:
        record = self._records[worker_id]
        since_s = record.since_s if record.state == state else round(time.time(), 3)
        self._records[worker_id] = replace(record, state=state, reason=reason, since_s=since_s)
