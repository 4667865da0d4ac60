"""Events: what ``kubectl describe`` tells of a deployment."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from kvrouter.operator.api import API_VERSION, KIND
from kvrouter.operator.reconcile.cluster import MANAGER, Cluster, Refused
from kvrouter.operator.reconcile.kinds import EVENTS, Key, Manifest, key_of, metadata_of, uid_of

MESSAGE_CHARS_MAX = 1024
NAME_CHARS_MAX = 230
NORMAL, WARNING = "Normal", "Warning"


class Recorder:
    """Writes events about deployments. The same one again is counted, not written anew.

    ``on_refused`` is called for one that the API server refuses (no right, a quota), which is dropped: what
    has to be known is in the status.
    """

    def __init__(self, cluster: Cluster, identity: str, on_refused: Callable[[Refused], None]) -> None:
        self._cluster = cluster
        self._identity = identity
        self._on_refused = on_refused
        self._told: dict[Key, tuple[str, set[str]]] = {}

    async def record(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Tell ``reason``, a stable word in CamelCase, and a sentence. Raises ClusterError."""
        place = _place(about, reason, message)
        with self._dropping_refused():
            there = await self._cluster.read(EVENTS, place)
            if there is None:
                await self._cluster.create(EVENTS, self._event(about, place, reason, message, warns))
                return
            count = there.get("count")
            again: Manifest = {
                "count": (count if isinstance(count, int) else 0) + 1,
                "lastTimestamp": _written(datetime.now(UTC)),
            }
            await self._cluster.merge(EVENTS, place, again)

    async def record_once(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Tell it once for each generation of the spec, however often it is found. Raises ClusterError."""
        generation = f"{uid_of(about)}/{metadata_of(about).get('generation')}"
        known, told = self._told.get(key_of(about), ("", set()))
        if known != generation:
            told = set()
        place = _place(about, reason, message, generation)
        if place.name in told:
            return
        with self._dropping_refused():
            if await self._cluster.read(EVENTS, place) is None:
                await self._cluster.create(EVENTS, self._event(about, place, reason, message, warns))
        self._told[key_of(about)] = (generation, told | {place.name})

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone."""
        self._told.pop(key, None)

    @contextmanager
    def _dropping_refused(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            if refused.is_passing:
                raise
            self._on_refused(refused)

    def _event(self, about: Manifest, place: Key, reason: str, message: str, warns: bool) -> Manifest:
        key, now = key_of(about), _written(datetime.now(UTC))
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.name,
            "metadata": {"namespace": place.namespace, "name": place.name},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid_of(about),
            },
            "type": WARNING if warns else NORMAL,
            "reason": reason,
            "message": message[:MESSAGE_CHARS_MAX],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._identity,
        }


def _place(about: Manifest, reason: str, message: str, generation: str = "") -> Key:
    key = key_of(about)
    digest = hashlib.sha256("\0".join((uid_of(about), reason, message, generation)).encode()).hexdigest()
    return Key(key.namespace, f"{key.name[:NAME_CHARS_MAX]}.{digest[:16]}")


def _written(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
