"""KV handoffs as a state machine: a prefill leg's KV (the source), a decode leg that pulls it (the sink).

They meet under one name: the bootstrap address and room, or the one in the prefill answer's
``kv_transfer_params``. Either may come first in a bootstrap handoff. The sink may be in another process. A
meeting ends when the KV arrived, when one side gave up, or when it waited for too long; in every ending the
source's KV is released.

========================  ==========================================================================
event                     effect
========================  ==========================================================================
source joins              a sink that waits for it no longer expires
sink joins                no source, and none may follow: Fail
KV is ready               sink has memory: Pull. Not yet: expires. Sink gave up before: Release
sink has memory           KV is ready: Pull. No source: expires
pulled                    Release, Deliver
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

MeetingName = NewType("MeetingName", str)


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

    meeting: MeetingName
    source: LegId
    sink: Sink
    kv_tokens: int


class StopPull(NamedTuple):
    """End the transfer of this meeting."""

    meeting: MeetingName


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
class _Meeting:
    name: MeetingName
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
    """All meetings. Every method returns the commands to run now, in order."""

    def __init__(self) -> None:
        self._meetings: dict[MeetingName, _Meeting] = {}
        self._by_leg: dict[Sink, _Meeting] = {}
        self._deadlines: list[tuple[float, MeetingName]] = []

    def __len__(self) -> int:
        return len(self._meetings)

    def may_join(self, name: MeetingName, *, as_source: bool) -> None:
        """Raise InvalidRequest when the place is taken."""
        meeting = self._meetings.get(name)
        if meeting is not None and (meeting.source if as_source else meeting.sink) is not None:
            side = "prefill" if as_source else "decode"
            raise InvalidRequest(f"handoff {name} has its {side} leg already", param="bootstrap")

    def legs_of(self, worker_id: WorkerId) -> list[LegId]:
        """Return the legs of one worker that are in a meeting."""
        leg_ids = (leg_id for leg_id in self._by_leg if isinstance(leg_id, LegId))
        return [leg_id for leg_id in leg_ids if leg_id.worker_id == worker_id]

    def source_joins(self, name: MeetingName, source: LegId, *, expiry_s: float) -> None:
        """A prefill leg was accepted; its KV will wait ``expiry_s`` at most for a sink."""
        meeting = self._meetings.setdefault(name, _Meeting(name))
        meeting.source, meeting.source_expiry_s = source, expiry_s
        meeting.deadline_s = None
        self._by_leg[source] = meeting

    def sink_joins(
        self, name: MeetingName, sink: Sink, *, expiry_s: float, source_may_follow: bool
    ) -> list[Command]:
        """A decode leg was accepted; it waits ``expiry_s`` at most for a source to join."""
        meeting = self._meetings.get(name)
        if meeting is None and not source_may_follow:
            return [HandoffFailed(sink, KvLoss.UNKNOWN, f"no KV waits under {name}")]
        if meeting is None:
            meeting = self._meetings[name] = _Meeting(name)
        meeting.sink, meeting.sink_expiry_s = sink, expiry_s
        meeting.kv_unwanted = False
        self._by_leg[sink] = meeting
        return []

    def kv_ready(self, now: float, source: LegId) -> list[Command]:
        """The prefill leg ended well and its KV waits."""
        meeting = self._by_leg[source]
        if meeting.kv_unwanted:
            return [Release(source), *self._close(meeting)]
        meeting.kv_ready = True
        self._expire_at(meeting, now + meeting.source_expiry_s)
        return self._pull(meeting)

    def kv_wanted(self, now: float, sink: Sink, kv_tokens: int) -> list[Command]:
        """The decode leg has memory for the ``kv_tokens`` tokens that it lacks."""
        meeting = self._by_leg[sink]
        meeting.wanted_tokens = kv_tokens
        if meeting.source is None:
            self._expire_at(meeting, now + meeting.sink_expiry_s)
        return self._pull(meeting)

    def pulled(self, name: MeetingName) -> list[Command]:
        """The transfer ended."""
        return self._pulled(self._meetings[name])

    def remote_pulled(self, sink: RemoteSink) -> list[Command]:
        """The transfer to another process ended there; does nothing without a transfer."""
        meeting = self._by_leg.get(sink)
        return self._pulled(meeting) if meeting is not None and meeting.pulling else []

    def is_in(self, sink: RemoteSink) -> bool:
        """True from the moment when a sink joins until its meeting ends, or it does."""
        return sink in self._by_leg

    @property
    def has_remote_sinks(self) -> bool:
        """True when a decode leg of another process takes part in a meeting here."""
        return any(isinstance(leg_id, RemoteSink) for leg_id in self._by_leg)

    def _pulled(self, meeting: _Meeting) -> list[Command]:
        meeting.pulling = False
        commands: list[Command] = []
        if meeting.source is not None:
            commands.append(Release(meeting.source))
        if meeting.sink is not None:
            commands.append(Deliver(meeting.sink))
        return [*commands, *self._close(meeting)]

    def leg_ended(self, now: float, leg_id: Sink, reason: str, *, lost: bool) -> list[Command]:
        """A leg was cancelled, or ``lost`` with its engine; what memory it held is free already."""
        meeting = self._by_leg.get(leg_id)
        if meeting is None:
            return []
        if meeting.source == leg_id:
            sink = meeting.sink
            commands = self._close(meeting)
            loss = KvLoss.BROKEN if lost else KvLoss.UNKNOWN
            return commands if sink is None else [*commands, HandoffFailed(sink, loss, reason)]
        return self._sink_ended(now, meeting, lost=lost)

    def give_up(self, source: LegId) -> list[Command]:
        """The prefill leg was cancelled after its end: KV that no decode leg has come for is released."""
        meeting = self._by_leg.get(source)
        if meeting is None or not meeting.kv_ready or meeting.sink is not None:
            return []
        return [Release(source), *self._close(meeting)]

    def next_time(self) -> float | None:
        """Return when the next meeting expires."""
        while self._deadlines:
            deadline_s, name = self._deadlines[0]
            meeting = self._meetings.get(name)
            if meeting is not None and meeting.deadline_s == deadline_s:
                return deadline_s
            heappop(self._deadlines)
        return None

    def expire(self, now: float) -> list[Command]:
        """End every expired meeting."""
        commands: list[Command] = []
        while (deadline_s := self.next_time()) is not None and deadline_s <= now:
            meeting = self._meetings[self._deadlines[0][1]]
            if meeting.source is not None:
                commands.append(Release(meeting.source))
            if meeting.sink is not None:
                why = f"handoff {meeting.name} did not come about in time"
                commands.append(HandoffFailed(meeting.sink, KvLoss.TIMEOUT, why))
            commands.extend(self._close(meeting))
        return commands

    def _sink_ended(self, now: float, meeting: _Meeting, *, lost: bool) -> list[Command]:
        """A sink that is lost did not give up: another may come for the KV."""
        if meeting.source is None:
            return self._close(meeting)
        if meeting.kv_ready and not lost:
            return [*self._close(meeting), Release(meeting.source)]
        commands: list[Command] = [StopPull(meeting.name)] if meeting.pulling else []
        if meeting.sink is not None:
            del self._by_leg[meeting.sink]
        meeting.sink, meeting.wanted_tokens, meeting.pulling = None, None, False
        if meeting.kv_ready:
            self._expire_at(meeting, now + meeting.source_expiry_s)
        else:
            meeting.kv_unwanted = not lost
        return commands

    def _pull(self, meeting: _Meeting) -> list[Command]:
        source, sink, kv_tokens = meeting.source, meeting.sink, meeting.wanted_tokens
        if source is None or sink is None or kv_tokens is None or not meeting.kv_ready:
            return []
        meeting.pulling, meeting.deadline_s = True, None
        return [Pull(meeting.name, source, sink, kv_tokens)]

    def _expire_at(self, meeting: _Meeting, deadline_s: float) -> None:
        meeting.deadline_s = deadline_s
        heappush(self._deadlines, (deadline_s, meeting.name))

    def _close(self, meeting: _Meeting) -> list[Command]:
        del self._meetings[meeting.name]
        for leg_id in (meeting.source, meeting.sink):
            if leg_id is not None:
                self._by_leg.pop(leg_id, None)
        return [StopPull(meeting.name)] if meeting.pulling else []
