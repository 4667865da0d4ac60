"""Handoffs between two processes: their messages, and the pulls in progress.

The process of the source (the prefill leg) holds the meeting and its expiry; the sink (the decode leg) of
another process takes part in it as a :class:`RemoteSink`. The sink's process
simulates the transfer, over its own links, and counts it. Nothing here knows how words travel: each pull has
a way of its own, and words keep their order on it. When it is lost, the source's side takes the sink for
lost, and the sink's side the KV.

========  ======  ========================================================================
who says  word    when
========  ======  ========================================================================
sink      Join    its leg was accepted: always the first word
sink      Want    it has memory
source    Ready   prefill has ended, and the sink has memory
sink      Done    the bytes have arrived, and the source releases its KV: a last word
sink      GiveUp  its leg was cancelled: a last word
source    Failed  the leg ended, the KV expired, the place is taken: a last word
========  ======  ========================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import isfinite
from typing import Annotated, NamedTuple, NewType

import msgspec
from msgspec import Meta

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest, KvLoss, Leg
from kvrouter.engines.mock_engine.handoff import Party, RemoteSink
from kvrouter.engines.mock_engine.links import Place

PullId = NewType("PullId", int)
"""A pull of a sink of this process, from a source of another one."""

HOST_CHARS_MAX = 253
PORT_MAX = 65_535
REASON_CHARS_MAX = 500

Name = Annotated[str, Meta(min_length=1, max_length=2_000)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Peer(NamedTuple):
    """Where a process answers for the KV of its prefill legs."""

    host: str
    port: int


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A decode leg comes for the KV of ``meeting``.

    For a source that ``may_follow`` it waits ``expiry_s`` seconds at most, of the engine's or of real time,
    whatever is longer.
    """

    meeting: Name
    expiry_s: float
    may_follow: bool

    def __post_init__(self) -> None:
        if not (isfinite(self.expiry_s) and self.expiry_s > 0.0):
            raise ValueError("expiry_s: must be finite and above 0")


class Want(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sink has memory for the ``kv_tokens`` tokens that it lacks."""

    kv_tokens: Count


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All bytes are in the sink's memory."""


class GiveUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sink no longer wants the KV."""

    reason: Reason


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The KV of ``kv_tokens`` tokens may be pulled: ``kv_bytes`` bytes, from a worker at ``src``."""

    kv_tokens: Count
    kv_bytes: Count
    src: Place


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The KV will never come."""

    loss: KvLoss
    reason: Reason


SinkWord = Join | Want | Done | GiveUp
SourceWord = Ready | Failed


class ToSource(NamedTuple):
    """Send ``word`` to the process at ``peer``; None: close the connection to it, as the sink is lost."""

    pull: PullId
    peer: Peer
    word: SinkWord | None


class ToSink(NamedTuple):
    """Send ``word`` to the process of ``sink``."""

    sink: RemoteSink
    word: SourceWord


RemoteOutput = ToSource | ToSink


def source_peer(request: EngineRequest) -> Peer | None:
    """Return where the KV that a decode leg comes for is kept; None when the request names no such place."""
    if request.leg is not Leg.DECODE:
        return None
    if request.bootstrap is not None:
        host, port = request.bootstrap.host, request.bootstrap.port
        return Peer(host, port) if _is_place(host, port) else None
    params: Mapping[str, object] = request.kv_transfer_params or {}
    match params.get("remote_host"), params.get("remote_port"):
        case str(host), int(port) if _is_place(host, port):
            return Peer(host, port)
    return None


def _is_place(host: str, port: int) -> bool:
    return 1 <= len(host) <= HOST_CHARS_MAX and 1 <= port <= PORT_MAX


@dataclass(slots=True)
class RemotePull:
    """One sink of this process and how far it is. ``key`` names its transfer in the network."""

    id: PullId
    sink: Party
    peer: Peer
    key: str
    moving: bool = False


class Pulls:
    """The sinks of this process whose source is elsewhere, and the messages for those sources."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._by_sink: dict[Party, RemotePull] = {}
        self._by_id: dict[PullId, RemotePull] = {}
        self._by_key: dict[str, RemotePull] = {}
        self._outputs: list[RemoteOutput] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, sink: Party, peer: Peer, join: Join) -> None:
        """A decode leg was accepted whose source is at ``peer``."""
        pull_id = PullId(next(self._ids))
        # Every meeting's name has a slash and this key has none: no transfer is taken for another.
        pull = RemotePull(pull_id, sink, peer, f"pull {pull_id}")
        self._by_sink[sink] = self._by_id[pull_id] = self._by_key[pull.key] = pull
        self.tell_source(pull, join)

    def of_sink(self, sink: Party) -> RemotePull | None:
        """Return the pull of a decode leg, if it has one."""
        return self._by_sink.get(sink)

    def of_id(self, pull_id: PullId) -> RemotePull | None:
        """Return a pull that is still under way."""
        return self._by_id.get(pull_id)

    def of_key(self, key: str) -> RemotePull | None:
        """Return the pull whose transfer has this key."""
        return self._by_key.get(key)

    def of_worker(self, worker_id: WorkerId) -> list[RemotePull]:
        """Return the pulls of one worker's legs."""
        return [pull for sink, pull in self._by_sink.items() if sink.worker_id == worker_id]

    def close(self, pull: RemotePull) -> None:
        """The pull ended, in whatever way."""
        del self._by_sink[pull.sink], self._by_id[pull.id], self._by_key[pull.key]

    def tell_source(self, pull: RemotePull, word: SinkWord | None) -> None:
        """Queue a message for the source's process; see :class:`ToSource`."""
        self._outputs.append(ToSource(pull.id, pull.peer, word))

    def tell_sink(self, sink: RemoteSink, word: SourceWord) -> None:
        """Queue a message for the process of a remote sink."""
        self._outputs.append(ToSink(sink, word))

    def take_outputs(self) -> list[RemoteOutput]:
        """Return the messages to send since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs
