"""Handoffs between two processes: their messages, and the pulls in progress.

The process of the source (the prefill leg) holds the handoff and its expiry; the sink (the decode leg) of
another process takes part in it as a :class:`RemoteSink`. The sink's process simulates the transfer, over its
own links, and counts it. The caller carries the messages: each pull has its own connection, which keeps
their order. When it is lost, the source's side counts the sink as lost, and the sink's side the KV.

========  =======  =======================================================================
sender    message  when
========  =======  =======================================================================
sink      Join     its leg was accepted: always the first message
sink      Want     it has memory
source    Ready    prefill has ended, and the sink has memory
sink      Done     the bytes have arrived, and the source releases its KV: a last message
sink      GiveUp   its leg was cancelled: a last message
source    Failed   the leg ended, the KV expired, the place is taken: a last message
========  =======  =======================================================================
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
from kvrouter.core.workers import KV_PART_MAX_CHARACTERS
from kvrouter.engines.mock_engine.handoff import LegId, RemoteSink
from kvrouter.engines.mock_engine.mock_links import Place

PullId = NewType("PullId", int)
"""A pull of a sink of this process, from a source of another one."""

HOST_CHARS_MAX = 253
PORT_MAX = 65_535
REASON_CHARS_MAX = 500

Name = Annotated[str, Meta(min_length=1, max_length=2_000)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Handshake = Annotated[str, Meta(max_length=KV_PART_MAX_CHARACTERS)]


class Peer(NamedTuple):
    """Where a process answers for the KV of its prefill legs."""

    host: str
    port: int


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A decode leg joins the handoff ``meeting``.

    For a source that ``may_follow`` it waits ``expiry_s`` seconds at most, of the engine's or of real time,
    whichever is longer.
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


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """The KV of ``kv_tokens`` tokens may be pulled: ``kv_bytes`` bytes, from a worker at ``src`` that takes
    part in handoffs with engines of the same ``handshake``.
    """

    kv_tokens: Count
    kv_bytes: Count
    src: Place
    handshake: Handshake = ""


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The KV will never come."""

    loss: KvLoss
    reason: Reason


SinkMessage = Join | Want | Done | GiveUp
SourceMessage = Ready | Failed


class ToSource(NamedTuple):
    """Send ``message`` to the process at ``peer``; None: close the connection, as the sink is lost."""

    pull: PullId
    peer: Peer
    message: SinkMessage | None


class ToSink(NamedTuple):
    """Send ``message`` to the process of ``sink``."""

    sink: RemoteSink
    message: SourceMessage


RemoteOutput = ToSource | ToSink


def source_peer(request: EngineRequest) -> Peer | None:
    """Return the process that keeps the KV that a leg fetches; None if the request names no other process."""
    if request.bootstrap is not None:
        if request.leg is not Leg.DECODE:
            return None
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
    """The state of one sink of this process. ``key`` names its transfer in the network."""

    id: PullId
    sink: LegId
    peer: Peer
    key: str
    moving: bool = False


class Pulls:
    """The sinks of this process with a source elsewhere, and the messages for those sources."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._by_sink: dict[LegId, RemotePull] = {}
        self._by_id: dict[PullId, RemotePull] = {}
        self._by_key: dict[str, RemotePull] = {}
        self._outputs: list[RemoteOutput] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, sink: LegId, peer: Peer, join: Join) -> None:
        """Open the pull of an accepted decode leg with its source at ``peer``."""
        pull_id = PullId(next(self._ids))
        # Every handoff's name has a slash and this key has none: no transfer is taken for another.
        pull = RemotePull(pull_id, sink, peer, f"pull {pull_id}")
        self._by_sink[sink] = self._by_id[pull_id] = self._by_key[pull.key] = pull
        self.send_to_source(pull, join)

    def of_sink(self, sink: LegId) -> RemotePull | None:
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
        """End a pull."""
        del self._by_sink[pull.sink], self._by_id[pull.id], self._by_key[pull.key]

    def send_to_source(self, pull: RemotePull, message: SinkMessage | None) -> None:
        """Queue a message for the source's process; see :class:`ToSource`."""
        self._outputs.append(ToSource(pull.id, pull.peer, message))

    def send_to_sink(self, sink: RemoteSink, message: SourceMessage) -> None:
        """Queue a message for the process of a remote sink."""
        self._outputs.append(ToSink(sink, message))

    def take_outputs(self) -> list[RemoteOutput]:
        """Return the messages to send since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs
