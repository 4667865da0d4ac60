"""KV handoffs as a state machine: a prefill leg's KV (the source), a decode leg that pulls it (the sink).

They meet under one name: the bootstrap address and room, or the one in the prefill answer's
``kv_transfer_params``. Either may come first in a bootstrap handoff. The sink may be in another process. A
handoff ends when the KV arrived, when one side gave up, or when it waited for too long; in every ending the
source's KV is released.

========================  ==========================================================================
event                     effect
========================  ==========================================================================
source joins              a sink that waits for it no longer expires
sink joins                no source, and none may follow: Fail
KV is ready               sink has memory: Pull. Not yet: expires. Sink gave up before: Release
sink has memory           KV is ready: Pull. No source: expires
pulled                    Release, Deliver
handshake is refused      Fail; the KV waits for another sink, and expires
source ends               StopPull, Fail
sink gives up             StopPull; Release as soon as the KV is ready
sink is lost              StopPull; the KV waits for another sink, and expires
expired                   Release, or Fail
========================  ==========================================================================
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, NewType

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import KvLoss
from kvrouter.engines.mock_engine.sequence import SequenceKey

HandoffName = NewType("HandoffName", str)


class LegId(NamedTuple):
    """The id of one leg: its worker, and the leg's key at the worker's engine."""

    worker_id: WorkerId
    key: SequenceKey


class RemoteSink(NamedTuple):
    """A decode leg at an engine of another process; a number is given once."""

    number: int


Sink = LegId | RemoteSink


class Pull(NamedTuple):
    """Move ``kv_tokens`` tokens' KV from the source to the sink."""

    handoff: HandoffName
    source: LegId
    sink: Sink
    kv_tokens: int


class StopPull(NamedTuple):
    """End the transfer of this handoff."""

    handoff: HandoffName


class Release(NamedTuple):
    """The source's KV is no longer needed."""

    source: LegId


class Deliver(NamedTuple):
    """The KV is in the sink's memory."""

    sink: Sink


class HandoffFailed(NamedTuple):
    """The sink's KV will never come."""

    sink: Sink
    loss: KvLoss
    reason: str


Command = Pull | StopPull | Release | Deliver | HandoffFailed


@dataclass(slots=True)
class _Handoff:
    name: HandoffName
    source: LegId | None = None
    sink: Sink | None = None
    source_expiry_s: float = 0.0
    sink_expiry_s: float = 0.0
    kv_ready: bool = False
    kv_unwanted: bool = False
    wanted_tokens: int | None = None
    pulling: bool = False
    deadline_s: float | None = None


class Handoffs:
    """All handoffs. Every method returns the commands to run now, in order."""

    def __init__(self) -> None:
        self._handoffs: dict[HandoffName, _Handoff] = {}
        self._by_source: dict[LegId, _Handoff] = {}
        self._by_sink: dict[Sink, _Handoff] = {}
        self._deadlines: list[tuple[float, HandoffName]] = []

    def __len__(self) -> int:
        return len(self._handoffs)

    def may_join(self, name: HandoffName, *, as_source: bool) -> None:
        """Raise InvalidRequest when the place is taken."""
        handoff = self._handoffs.get(name)
        if handoff is not None and (handoff.source if as_source else handoff.sink) is not None:
            side = "prefill" if as_source else "decode"
            raise InvalidRequest(f"handoff {name} has its {side} leg already", param="bootstrap")

    def legs_of(self, worker_id: WorkerId) -> list[LegId]:
        """Return the legs of one worker that are in a handoff."""
        leg_ids = dict.fromkeys((*self._by_source, *self._by_sink))
        return [each for each in leg_ids if isinstance(each, LegId) and each.worker_id == worker_id]

    def source_joins(self, name: HandoffName, source: LegId, *, expiry_s: float) -> None:
        """A prefill leg was accepted; its KV will wait ``expiry_s`` at most for a sink."""
        handoff = self._handoffs.setdefault(name, _Handoff(name))
        handoff.source, handoff.source_expiry_s = source, expiry_s
        handoff.deadline_s = None
        self._by_source[source] = handoff

    def sink_joins(
        self, name: HandoffName, sink: Sink, *, expiry_s: float, source_may_follow: bool
    ) -> list[Command]:
        """A decode leg was accepted; it waits ``expiry_s`` at most for a source to join."""
        handoff = self._handoffs.get(name)
        if handoff is None and not source_may_follow:
            return [HandoffFailed(sink, KvLoss.UNKNOWN, f"no KV waits under {name}")]
        if handoff is None:
            handoff = self._handoffs[name] = _Handoff(name)
        handoff.sink, handoff.sink_expiry_s = sink, expiry_s
        handoff.kv_unwanted = False
        self._by_sink[sink] = handoff
        return []

    def kv_ready(self, now: float, source: LegId) -> list[Command]:
        """The prefill leg ended well and its KV waits."""
        handoff = self._by_source[source]
        if handoff.kv_unwanted:
            return [Release(source), *self._close(handoff)]
        handoff.kv_ready = True
        self._expire_at(handoff, now + handoff.source_expiry_s)
        return self._pull(handoff)

    def kv_wanted(self, now: float, sink: Sink, kv_tokens: int) -> list[Command]:
        """The decode leg has memory for the ``kv_tokens`` tokens that it lacks."""
        handoff = self._by_sink[sink]
        handoff.wanted_tokens = kv_tokens
        if handoff.source is None:
            self._expire_at(handoff, now + handoff.sink_expiry_s)
        return self._pull(handoff)

    def refused(self, now: float, sink: Sink, reason: str) -> list[Command]:
        """The sink's engine refuses the source's."""
        commands = self._sink_ended(now, self._by_sink[sink], lost=True)
        return [*commands, HandoffFailed(sink, KvLoss.REFUSED, reason)]

    def pulled(self, name: HandoffName) -> list[Command]:
        """The transfer ended."""
        return self._pulled(self._handoffs[name])

    def remote_pulled(self, sink: RemoteSink) -> list[Command]:
        """The transfer to another process ended there; does nothing without a transfer."""
        handoff = self._by_sink.get(sink)
        return self._pulled(handoff) if handoff is not None and handoff.pulling else []

    def is_in(self, sink: RemoteSink) -> bool:
        """True from the moment when a sink joins until its handoff ends, or it does."""
        return sink in self._by_sink

    @property
    def has_remote_sinks(self) -> bool:
        """True when a decode leg of another process takes part in a handoff here."""
        return any(isinstance(leg_id, RemoteSink) for leg_id in self._by_sink)

    def _pulled(self, handoff: _Handoff) -> list[Command]:
        handoff.pulling = False
        commands: list[Command] = []
        if handoff.source is not None:
            commands.append(Release(handoff.source))
        if handoff.sink is not None:
            commands.append(Deliver(handoff.sink))
        return [*commands, *self._close(handoff)]

    def leg_ended(self, now: float, leg_id: Sink, reason: str, *, lost: bool) -> list[Command]:
        """A leg was cancelled, or ``lost`` with its engine; what memory it held is free already."""
        commands: list[Command] = []
        if (handoff := self._by_sink.get(leg_id)) is not None:
            commands += self._sink_ended(now, handoff, lost=lost)
        if isinstance(leg_id, LegId) and (handoff := self._by_source.get(leg_id)) is not None:
            sink = handoff.sink
            commands += self._close(handoff)
            if sink is not None:
                commands.append(HandoffFailed(sink, KvLoss.BROKEN if lost else KvLoss.UNKNOWN, reason))
        return commands

    def give_up(self, source: LegId) -> list[Command]:
        """The prefill leg was cancelled after its end: KV that no decode leg has come for is released."""
        handoff = self._by_source.get(source)
        if handoff is None or not handoff.kv_ready or handoff.sink is not None:
            return []
        return [Release(source), *self._close(handoff)]

    def next_time(self) -> float | None:
        """Return when the next handoff expires."""
        while self._deadlines:
            deadline_s, name = self._deadlines[0]
            handoff = self._handoffs.get(name)
            if handoff is not None and handoff.deadline_s == deadline_s:
                return deadline_s
            heappop(self._deadlines)
        return None

    def expire(self, now: float) -> list[Command]:
        """End every expired handoff."""
        commands: list[Command] = []
        while (deadline_s := self.next_time()) is not None and deadline_s <= now:
            handoff = self._handoffs[self._deadlines[0][1]]
            if handoff.source is not None:
                commands.append(Release(handoff.source))
            if handoff.sink is not None:
                why = f"handoff {handoff.name} did not come about in time"
                commands.append(HandoffFailed(handoff.sink, KvLoss.TIMEOUT, why))
            commands.extend(self._close(handoff))
        return commands

    def _sink_ended(self, now: float, handoff: _Handoff, *, lost: bool) -> list[Command]:
        """A sink that is lost did not give up: another may come for the KV."""
        if handoff.source is None:
            return self._close(handoff)
        if handoff.kv_ready and not lost:
            return [*self._close(handoff), Release(handoff.source)]
        commands: list[Command] = [StopPull(handoff.name)] if handoff.pulling else []
        if handoff.sink is not None:
            del self._by_sink[handoff.sink]
        handoff.sink, handoff.wanted_tokens, handoff.pulling = None, None, False
        if handoff.kv_ready:
            self._expire_at(handoff, now + handoff.source_expiry_s)
        else:
            handoff.kv_unwanted = not lost
        return commands

    def _pull(self, handoff: _Handoff) -> list[Command]:
        source, sink, kv_tokens = handoff.source, handoff.sink, handoff.wanted_tokens
        if source is None or sink is None or kv_tokens is None or not handoff.kv_ready:
            return []
        handoff.pulling, handoff.deadline_s = True, None
        return [Pull(handoff.name, source, sink, kv_tokens)]

    def _expire_at(self, handoff: _Handoff, deadline_s: float) -> None:
        handoff.deadline_s = deadline_s
        heappush(self._deadlines, (deadline_s, handoff.name))

    def _close(self, handoff: _Handoff) -> list[Command]:
        del self._handoffs[handoff.name]
        if handoff.source is not None:
            self._by_source.pop(handoff.source, None)
        if handoff.sink is not None:
            self._by_sink.pop(handoff.sink, None)
        return [StopPull(handoff.name)] if handoff.pulling else []
