"""The routes of ``/v1/cordons``: list, cordon, uncordon."""

from datetime import UTC, datetime

import msgspec
from msgspec.structs import asdict

from kvrouter.api import cordon_schema as api
from kvrouter.api.fleet_schema import Cordoned, Discovery
from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.openai.body import ScannedBody, decode_body
from kvrouter.frontend.page_route import Page, PageRequest, json_page
from kvrouter.frontend.prepare import Bodies
from kvrouter.router.fleet_cordons import CordonChange, CordonReading, Cordons

_CORDON = msgspec.json.Decoder(api.CordonBody)


def _body(scanned: ScannedBody) -> api.CordonBody:
    return decode_body(_CORDON, scanned)


class CordonRoutes:
    """The endpoints of ``/v1/cordons``."""

    def __init__(self, cordons: Cordons, bodies: Bodies) -> None:
        self._cordons = cordons
        self._bodies = bodies

    async def show(self, _: PageRequest) -> Page:
        """``GET``: every cordon with its workers."""
        return json_page(self._listed())

    async def put(self, request: PageRequest) -> Page:
        """``POST``: cordon."""
        body = await self._bodies.read(request.take_body(), _body)
        cordon = Cordon(body.level, str(body.name), reason=body.reason, by=body.by)
        return json_page(self._changed(await self._cordons.put(cordon, force=body.force)))

    async def remove(self, request: PageRequest) -> Page:
        """``DELETE``: uncordon."""
        query = request.query
        for field in query:
            if field not in ("level", "name"):
                raise InvalidRequest(f"{field}: unknown; level and name are known", param=field)
        for field in ("level", "name"):
            if field not in query:
                raise InvalidRequest(f"{field}: is required", param=field)
        return json_page(self._changed(await self._cordons.remove(query["level"], query["name"])))

    def _listed(self) -> api.CordonList:
        return api.CordonList(
            cordons=[
                api.CordonState(**asdict(cordoned(reading.cordon)), workers=_workers(reading))
                for reading in self._cordons.readings()
            ],
            remaining=self._remaining(),
            store=Discovery(reachable=self._cordons.lost is None, why=self._cordons.lost),
            routers_look_every_s=self._cordons.poll_s,
        )

    def _changed(self, change: CordonChange) -> api.CordonChange:
        return api.CordonChange(
            **asdict(cordoned(change.reading.cordon)),
            workers=_workers(change.reading),
            changed=change.changed,
            warnings=change.warnings,
            remaining=self._remaining(),
            routers_look_every_s=self._cordons.poll_s,
        )

    def _remaining(self) -> list[api.Remaining]:
        return [
            api.Remaining(model=each.model, role=each.role, workers=each.workers, left=each.left)
            for each in self._cordons.remaining()
        ]


def cordoned(cordon: Cordon) -> Cordoned:
    """Return a cordon as the API has it, without its workers."""
    return Cordoned(
        level=cordon.level,
        name=cordon.name,
        reason=cordon.reason or None,
        by=cordon.by or None,
        at=_time_text(cordon.at_s),
        source=cordon.source,
        cluster=cordon.cluster or None,
    )


def _time_text(at_s: float) -> str | None:
    if at_s <= 0.0:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _workers(reading: CordonReading) -> list[api.CordonedWorker]:
    return [
        api.CordonedWorker(
            worker_id=worker.card.worker_id,
            model=worker.card.model,
            role=worker.card.role,
            alive=worker.alive,
            running_requests=worker.running_requests,
        )
        for worker in reading.workers
    ]
