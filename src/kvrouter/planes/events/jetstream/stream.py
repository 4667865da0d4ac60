"""The persistent stream of one component: made when it is missing, read, purged."""

from dataclasses import dataclass
from typing import NamedTuple

from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from kvrouter.core.ids import WorkerRank
from kvrouter.planes.events.jetstream.words import LaneNames, StreamLimits

STREAM_NAME_IN_USE = 10058
"""The server's code for a stream that exists with other limits."""


@dataclass(frozen=True, slots=True)
class StreamReading:
    """Where a stream stands: the sequences it holds, and how many messages.

    ``made`` tells one stream of a name from the next: sequences begin anew with it. An empty stream has
    ``first`` = ``last`` + 1.
    """

    first: int
    last: int
    messages: int
    made: str


class FirstMessage(NamedTuple):
    """The oldest message of one rank."""

    payload: bytes
    sequence: int


class EventStream:
    """One component's stream. Every method raises what the client does, in bounded time."""

    def __init__(self, jetstream: JetStreamContext, names: LaneNames, limits: StreamLimits) -> None:
        self.names = names
        self._jetstream = jetstream
        self._limits = limits

    async def ensure(self) -> StreamReading:
        """Make the stream unless it is there; return where it stands."""
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
            if error.err_code != STREAM_NAME_IN_USE:
                raise
            return await self.read()  # another process made it a moment ago, with other limits
        return _reading(info)

    async def read(self) -> StreamReading:
        """Where the stream stands; raises NotFoundError when there is none."""
        return _reading(await self._jetstream.stream_info(self.names.stream))

    async def first_of(self, rank: WorkerRank) -> FirstMessage | None:
        """The oldest message of the rank that the stream has."""
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
    # The server says 0 for the first sequence of a stream that never had a message.
    return StreamReading(max(1, state.first_seq), state.last_seq, state.messages, str(info.created))
