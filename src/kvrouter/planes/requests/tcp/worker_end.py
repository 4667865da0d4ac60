"""The worker's end of one connection: it takes legs for one worker and sends what they bring."""

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.core.requests import Leg as WhichLeg
from kvrouter.planes.requests.legs import PREFILLED_MAX, LegKey
from kvrouter.planes.requests.port import EngineStream, RequestServer, WorkerFull, WorkerUnreachable
from kvrouter.planes.requests.tcp.connection import LEFT, Connection
from kvrouter.planes.requests.tcp.frames import (
    CHUNKS_FLUSH_TOKENS,
    TO_WORKER,
    Item,
    Kind,
    cancel_decoder,
    credits_decoder,
    decode,
    encode_items,
    encode_number,
    encode_refused,
    item_of,
    open_decoder,
)
from kvrouter.planes.requests.tcp.hello import HELLO_BYTES, Hello, Secret, greeting, new_nonce, read_hello
from kvrouter.planes.requests.tcp.leg import WorkerLeg, cancel_soon
from kvrouter.planes.requests.wire import decode_request

ITEM_TOKENS = 64
"""What an item counts beside its tokens towards a full frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker's end keeps to; the constructor of the acceptor says what each means."""

    heartbeat_s: float
    dead_after_s: float
    hello_within_s: float
    streams_max: int
    write_max_bytes: int


class Place(Protocol):
    """A worker's place behind the listener."""

    @property
    def server(self) -> RequestServer:
        """The worker."""

    def join(self, end: "WorkerEnd") -> None:
        """A router's connection was welcomed."""

    def part(self, end: "WorkerEnd") -> None:
        """A router's connection is of no use any more."""

    def begin(self, key: LegKey) -> bool:
        """Count a leg; False when it is open already, over any connection."""

    def over(self, key: LegKey) -> None:
        """A leg runs no longer."""


class WorkerEnd(Connection):
    """A connection from one router to one worker."""

    def __init__(
        self,
        secret: Secret,
        limits: WorkerLimits,
        *,
        find: Callable[[WorkerId, Epoch], Place | None],
        on_refused: Callable[[str], None],
        admit: Callable[["WorkerEnd"], str | None],
    ) -> None:
        super().__init__(
            kinds=TO_WORKER,
            heartbeat_s=limits.heartbeat_s,
            dead_after_s=limits.dead_after_s,
            write_max_bytes=limits.write_max_bytes,
        )
        self._secret = secret
        self._limits = limits
        self._find = find
        self._tell_refused = on_refused
        self._admit = admit
        self._nonce = new_nonce()
        self._place: Place | None = None
        self._legs: dict[int, WorkerLeg] = {}
        self._last_id = -1
        self._ended_prefills: OrderedDict[int, EngineStream] = OrderedDict()
        self._items: list[Item] = []
        self._items_tokens = 0
        self._hello_timer: asyncio.TimerHandle | None = None
        self.handlers |= {
            Kind.OPEN: self._on_open,
            Kind.CREDIT: self._on_credit,
            Kind.CANCEL: self._on_cancel,
        }

    # Hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet; a router that is one too many learns that next."""
        super().connection_made(transport)
        self.send_raw(greeting(self._nonce))
        refusal = self._admit(self)
        if refusal is None:
            self._hello_timer = self.loop.call_later(self._limits.hello_within_s, self._no_hello)
        else:
            self.refuse(refusal)

    def read_opening(self, data: bytearray) -> int | None:
        """Welcome a router that knows the token, and wants a worker that is here."""
        said = read_hello(data)
        if said is None:
            return None
        self._end_hello_timer()
        proof = self._secret.router_proof(self._nonce, said.nonce, said.worker_id, said.incarnation)
        if not hmac.compare_digest(proof, said.proof):
            raise ProtocolError("the router does not know the token", param="token")
        place = self._find(said.worker_id, said.incarnation)
        if place is None:
            self.close(f"worker {said.worker_id}/{said.incarnation} is not served here")
        else:
            self._welcome(place, said)
        return HELLO_BYTES

    def _welcome(self, place: Place, said: Hello) -> None:
        self._place = place
        place.join(self)
        self.send(
            Kind.WELCOME,
            self._secret.worker_proof(self._nonce, said.nonce, said.worker_id, said.incarnation),
        )

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _no_hello(self) -> None:
        self.refuse(f"no hello within {self._limits.hello_within_s:g} s")

    def refuse(self, reason: str) -> None:
        """The router may not come in, or did what the protocol does not allow."""
        self._tell_refused(f"{self.peer}: {reason}")
        super().refuse(reason)

    # What the router says

    def _on_open(self, body: bytes) -> None:
        opened = decode(open_decoder, body, "open")
        if opened.stream_id <= self._last_id:
            raise ProtocolError(f"stream {opened.stream_id} was used before", param="stream_id")
        self._last_id = opened.stream_id
        place = self._place
        if place is None:
            raise ProtocolError("a leg came before the hello", param="kind")
        try:
            if len(self._legs) >= self._limits.streams_max:
                raise WorkerFull(f"{self._limits.streams_max} streams are open on this connection")
            request = decode_request(memoryview(opened.request))
            leg = WorkerLeg(self, opened.stream_id, opened.credit_tokens, request)
            if not place.begin(leg.key):
                raise WorkerUnreachable(f"{request.engine_key}: this leg runs here already")
        except KvrouterError as error:
            self.send(Kind.REFUSED, encode_refused(opened.stream_id, error))
            return
        self._legs[leg.stream_id] = leg
        leg.start(place.server)

    def _on_credit(self, body: bytes) -> None:
        for stream_id, tokens in decode(credits_decoder, body, "credit"):
            leg = self._legs.get(stream_id)
            if leg is not None:  # else it ended while its credit was on the way
                leg.add_credit(tokens)

    def _on_cancel(self, body: bytes) -> None:
        cancelled = decode(cancel_decoder, body, "cancel")
        leg = self._legs.get(cancelled.stream_id)
        if leg is not None:
            self._over(leg)
            leg.cancel(cancelled.reason)
            return
        inner = self._ended_prefills.pop(cancelled.stream_id, None)
        if inner is not None:
            cancel_soon(inner, cancelled.reason)

    # What legs bring

    def leg_accepted(self, leg: WorkerLeg) -> None:
        """The worker took the leg."""
        self.send(Kind.ACCEPTED, encode_number(leg.stream_id))

    def leg_brings(self, leg: WorkerLeg, chunk: EngineChunk) -> None:
        """The engine brought more; raise ProtocolError for what cannot travel."""
        item = item_of(leg.stream_id, chunk)
        if chunk.finish is not None:
            self._over(leg)
            if leg.key.leg is WhichLeg.PREFILL and leg.inner is not None:
                self._keep_prefill(leg.stream_id, leg.inner)
        self._items.append(item)
        self._items_tokens += ITEM_TOKENS + len(chunk.token_ids)
        if item[2] is not None:
            self._items_tokens += len(memoryview(item[2])) // 4
        if self._items_tokens >= CHUNKS_FLUSH_TOKENS:
            self.gather()
        self.flush_soon()

    def leg_failed(self, leg: WorkerLeg, error: Exception) -> None:
        """The worker refused the leg, or failed it. What was not meant is shown as the mistake it is."""
        if self._legs.get(leg.stream_id) is not leg:
            return
        self._over(leg)
        if leg.inner is not None:
            cancel_soon(leg.inner, "its leg failed")
        if not isinstance(error, KvrouterError):
            self.loop.call_exception_handler(
                {"message": f"leg {leg.request.engine_key} failed", "exception": error}
            )
        kind = Kind.REFUSED if leg.inner is None else Kind.FAILED
        self.send(kind, encode_refused(leg.stream_id, error))

    def _over(self, leg: WorkerLeg) -> None:
        del self._legs[leg.stream_id]
        if self._place is not None:
            self._place.over(leg.key)

    def _keep_prefill(self, stream_id: int, inner: EngineStream) -> None:
        self._ended_prefills[stream_id] = inner
        if len(self._ended_prefills) > PREFILLED_MAX:
            self._ended_prefills.popitem(last=False)

    def gather(self) -> None:
        """Put what all legs brought into one frame."""
        if self._items:
            items, self._items = self._items, []
            self._items_tokens = 0
            try:
                body = encode_items(items)
            except (TypeError, OverflowError) as error:  # an engine's adapter brought no plain integers
                self.loop.call_exception_handler({"message": "tokens cannot travel", "exception": error})
                self.abort("the worker's engine brought tokens that cannot travel")
                return
            self.send(Kind.CHUNKS, body)

    def resume_writing(self) -> None:
        """The router has read on: so do the legs."""
        super().resume_writing()
        for leg in self._legs.values():
            leg.go_on()

    # Life

    def ended(self, reason: str) -> None:
        """Whatever ran for the router is cancelled: nobody else can read it."""
        self._end_hello_timer()
        legs, self._legs = self._legs, {}
        ended, self._ended_prefills = self._ended_prefills, OrderedDict()
        place, self._place = self._place, None
        why = "the router closed its connection" if reason == LEFT else reason
        for leg in legs.values():
            if place is not None:
                place.over(leg.key)
            leg.cancel(why)
        for inner in ended.values():
            cancel_soon(inner, why)
        if place is not None:
            place.part(self)
