"""The stream of one component: created, read, purged; its names and limits."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from kvrouter.core.ids import WorkerRank
from kvrouter.transports.events.port import ForeignRank
from kvrouter.transports.nats_client import STREAM_EXISTS, subject_name

STREAM_MAX_BYTES = 1 << 30
"""The size of one component's stream; beyond it the oldest messages are removed, and routers ask workers."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of one component's stream; the oldest messages are removed first.

    ``max_age_s`` None: no age limit. ``replicas``: copies in a NATS cluster. The process that creates the
    stream sets its limits; later ones do not change them.
    """

    max_bytes: int = STREAM_MAX_BYTES
    max_age_s: float | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ComponentNames:
    """The names of one component's stream, subjects and snapshots on NATS."""

    namespace: str
    component: str

    @property
    def stream(self) -> str:
        """The persistent stream."""
        return f"kvrouter-{subject_name(self.namespace)}-{subject_name(self.component)}-kv-events"

    @property
    def bucket(self) -> str:
        """The key-value bucket and the object store of the snapshots."""
        return f"kvrouter-{subject_name(self.namespace)}-{subject_name(self.component)}-index"

    @property
    def all_events(self) -> str:
        """The subjects of the stream."""
        return f"{self._prefix}.kv.*.*"

    @property
    def all_loads(self) -> str:
        """The loads of the component's workers."""
        return f"{self._prefix}.loads.*.*"

    def events(self, rank: WorkerRank) -> str:
        """Return the subject of one worker rank's KV events."""
        return f"{self._prefix}.kv.{rank.worker_id}.{rank.dp_rank}"

    @property
    def _prefix(self) -> str:
        return f"kvrouter.{subject_name(self.namespace)}.{subject_name(self.component)}"


class EventTransportObserver(Protocol):
    """Called for events of the JetStream transport, on the event loop; must not block or raise."""

    def dropped(self, n_batches: int, why: str) -> None:
        """A worker's batches were not published; routers will notice the gap and ask."""

    def refused(self, why: str) -> None:
        """A message that is no batch or load was dropped."""

    def spoke_for_another(self, error: ForeignRank) -> None:
        """A message about a rank of another worker than its subject's was dropped."""

    def disturbed(self, component: str, why: str) -> None:
        """An operation failed, and is retried."""

    def was_reset(self, component: str) -> None:
        """The stream and the snapshots of the component were cleared, as asked."""


@dataclass(frozen=True, slots=True)
class StreamReading:
    """The state of a stream: its first and last sequence, and how many messages it holds.

    ``created`` identifies the stream: a new stream of the same name counts from 1 again. An empty stream has
    ``first`` = ``last`` + 1.
    """

    first: int
    last: int
    messages: int
    created: str


class FirstMessage(NamedTuple):
    """The oldest message of one rank."""

    payload: bytes
    sequence: int


class EventStream:
    """One component's stream. Every method raises what the client raises, in bounded time."""

    def __init__(self, jetstream: JetStreamContext, names: ComponentNames, limits: StreamLimits) -> None:
        self.names = names
        self._jetstream = jetstream
        self._limits = limits

    async def ensure(self) -> StreamReading:
        """Create the stream unless it exists; return its state."""
        limits = self._limits
        try:
            return await self.read()
        except NotFoundError:
            pass
        try:
            info = await self._jetstream.add_stream(
                api.StreamConfig(
                    name=self.names.stream,
                    subjects=[self.names.all_events],
                    storage=api.StorageType.FILE,
                    discard=api.DiscardPolicy.OLD,
                    max_bytes=limits.max_bytes,
                    max_age=limits.max_age_s,
                    num_replicas=limits.replicas,
                )
            )
        except BadRequestError as error:
            if error.err_code != STREAM_EXISTS:
                raise
            return await self.read()  # another process has just created it, with other limits
        return _reading(info)

    async def read(self) -> StreamReading:
        """Return the state of the stream; raise NotFoundError when it does not exist."""
        return _reading(await self._jetstream.stream_info(self.names.stream))

    async def first_of(self, rank: WorkerRank) -> FirstMessage | None:
        """Return the rank's oldest message in the stream; None without one."""
        try:
            message = await self._jetstream.get_msg(
                self.names.stream, seq=1, subject=self.names.events(rank), next=True
            )
        except NotFoundError:
            return None
        return FirstMessage(message.data or b"", message.seq or 0)

    async def purge(self, *, through: int | None = None) -> None:
        """Remove the messages up to the sequence ``through``, or all."""
        await self._jetstream.purge_stream(self.names.stream, seq=None if through is None else through + 1)


def _reading(info: api.StreamInfo) -> StreamReading:
    state = info.state
    # The server reports 0 as the first sequence of a stream that never had a message.
    return StreamReading(max(1, state.first_seq), state.last_seq, state.messages, str(info.created))
