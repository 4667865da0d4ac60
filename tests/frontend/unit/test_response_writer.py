"""The writer of responses: its headers name the workers that answer, whenever these are chosen."""

from types import SimpleNamespace
from typing import cast

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import DpRank, RequestId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.frontend.http.response import Responder, ResponseHeaders
from kvrouter.frontend.openai.answers import RouteKind
from kvrouter.frontend.response_writer import ResponseWriter
from kvrouter.kernel.routing.interface import Decision, Pick
from kvrouter.router.generation import Generation

REQUEST = RequestId("r1")


class Sent:
    """Keeps the headers of what is sent."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}

    async def send(self, _status: int, headers: ResponseHeaders, _body: bytes) -> None:
        self.headers = dict(headers)


def decided(worker: int) -> Decision:
    rank = WorkerRank(WorkerId(worker), DpRank(0))
    return Decision(
        REQUEST, 0, RouterMode.KV, Pick(Slot(0), rank, Leg.DECODE, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1), None
    )


async def test_headers_made_early_name_the_decode_worker_picked_again() -> None:
    placement = SimpleNamespace(decision=decided(1), decode_domains={})
    generation = cast("Generation", SimpleNamespace(placement=placement))
    sent = Sent()
    writer = ResponseWriter(RouteKind.CHAT, cast("Responder", sent), REQUEST)
    writer.prepare(generation)
    placement.decision = decided(2)
    await writer.send(generation, b"{}")
    assert sent.headers[b"x-kvrouter-decode-worker"] == b"2"
