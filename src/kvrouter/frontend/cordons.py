"""Routes of cordons: which there are, cordon, uncordon."""

from datetime import UTC, datetime

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvrouter.core.cordons import Cordon
from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.decision_json import Json
from kvrouter.frontend.openai.body import Name, ScannedBody, decode_body
from kvrouter.frontend.pages import json_page
from kvrouter.frontend.prepare import Bodies
from kvrouter.service.cordons import CordonChange, CordonReading, Cordons


class CordonBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/cordons``. The name of a worker may be a number."""

    level: Name
    name: Name | int
    reason: str = ""
    by: str = ""
    force: bool = False


_CORDON = msgspec.json.Decoder(CordonBody)


def _body(scanned: ScannedBody) -> CordonBody:
    return decode_body(_CORDON, scanned)


class CordonRoutes:
    """The endpoints of ``/v1/cordons``."""

    def __init__(self, cordons: Cordons, bodies: Bodies) -> None:
        self._cordons = cordons
        self._bodies = bodies

    async def answer(self, request: Request) -> Response:
        """``GET``: every cordon with its workers; ``POST``: cordon; ``DELETE``: uncordon."""
        if request.method == "POST":
            return json_page(await self._cordon(await self._bodies.read(await request.body(), _body)))
        if request.method == "DELETE":
            return json_page(await self._uncordon(request))
        return json_page(self._listed())

    async def _cordon(self, body: CordonBody) -> Json:
        wanted = Cordon(body.level, str(body.name), reason=body.reason, by=body.by)
        return self._changed(await self._cordons.put(wanted, force=body.force))

    async def _uncordon(self, request: Request) -> Json:
        asked = request.query_params
        for field in asked:
            if field not in ("level", "name"):
                raise InvalidRequest(f"{field}: unknown; level and name are known", param=field)
        for field in ("level", "name"):
            if field not in asked:
                raise InvalidRequest(f"{field}: is required", param=field)
        return self._changed(await self._cordons.remove(asked["level"], asked["name"]))

    def _listed(self) -> Json:
        return {
            "cordons": [_reading_json(reading) for reading in self._cordons.readings()],
            "remaining": self._remaining(),
            "store": {"reachable": self._cordons.lost is None, "why": self._cordons.lost},
            "routers_look_every_s": self._cordons.look_s,
        }

    def _changed(self, change: CordonChange) -> Json:
        return {
            **_reading_json(change.reading),
            "changed": change.changed,
            "warnings": [*change.warnings],
            "remaining": self._remaining(),
            "routers_look_every_s": self._cordons.look_s,
        }

    def _remaining(self) -> list[Json]:
        return [
            {"model": each.model, "role": each.role.value, "workers": each.workers, "left": each.left}
            for each in self._cordons.remaining()
        ]


def cordon_json(cordon: Cordon) -> Json:
    """One cordon, without its workers."""
    return {
        "level": cordon.level,
        "name": cordon.name,
        "reason": cordon.reason or None,
        "by": cordon.by or None,
        "at": _time_text(cordon.at_s),
        "source": cordon.source.value,
        "cluster": cordon.cluster or None,
    }


def _time_text(at_s: float) -> str | None:
    if at_s <= 0.0:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _reading_json(reading: CordonReading) -> Json:
    return {
        **cordon_json(reading.cordon),
        "workers": [
            {
                "worker_id": worker.card.worker_id,
                "model": worker.card.model,
                "role": worker.card.role.value,
                "alive": worker.alive,
                "running_requests": worker.running_requests,
            }
            for worker in reading.workers
        ],
    }
