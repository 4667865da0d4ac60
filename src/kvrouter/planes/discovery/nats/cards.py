"""A bucket as the store of the cards that a process holds."""

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.discovery.nats.bucket import STORE_ERRORS, Bucket
from kvrouter.planes.discovery.wire import CardRecord
from kvrouter.planes.nats_reasons import reason


class BucketCards:
    """A record's version is the revision of its key, 0 where nothing ever was."""

    errors: tuple[type[Exception], ...] = (*STORE_ERRORS, ProtocolError)

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def reason(self, error: Exception) -> str:
        """What ``error`` says, in a line that a person can act on."""
        return reason(error)

    async def read(self, worker_id: WorkerId) -> tuple[CardRecord | None, int | None]:
        """Return what is there, and its revision."""
        self._check_connected()
        key = str(worker_id)
        kept = await self._bucket.read(key)
        if kept.value is None:
            return None, kept.revision
        try:
            return self._bucket.opened(key, kept.value)[1], kept.revision
        except ProtocolError:
            return None, kept.revision

    async def write(self, record: CardRecord, over: int | None, *, number: int) -> int:  # noqa: ARG002 - each write has a revision
        """Write over a revision; return the new one. Raises OtherWrote when another one is there."""
        self._check_connected()
        return await self._bucket.write(record, over or 0)

    def _check_connected(self) -> None:
        if not self._bucket.client.is_connected:
            raise ConnectionError("not connected to NATS")
