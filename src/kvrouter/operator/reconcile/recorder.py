"""Events: what ``kubectl describe`` tells of a deployment."""

import hashlib
from datetime import UTC, datetime

from pydantic import JsonValue

from kvrouter.operator.api import API_VERSION, KIND
from kvrouter.operator.reconcile.cluster import MANAGER, Cluster
from kvrouter.operator.reconcile.kinds import EVENTS, Key, Manifest, key_of, uid_of

MESSAGE_CHARS_MAX = 1024
NAME_CHARS_MAX = 230
NORMAL, WARNING = "Normal", "Warning"


class Recorder:
    """Writes events about deployments. The same one again is counted, not written anew."""

    def __init__(self, cluster: Cluster, identity: str) -> None:
        self._cluster = cluster
        self._identity = identity

    async def record(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Tell ``reason``, a stable word in CamelCase, and a sentence. Raises ClusterError."""
        key, uid = key_of(about), uid_of(about)
        digest = hashlib.sha256("\0".join((uid, reason, message)).encode()).hexdigest()[:16]
        name = f"{key.name[:NAME_CHARS_MAX]}.{digest}"
        place = Key(key.namespace, name)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        there = await self._cluster.read(EVENTS, place)
        if there is not None:
            count = there.get("count")
            again: Manifest = {"count": (count if isinstance(count, int) else 0) + 1, "lastTimestamp": now}
            await self._cluster.merge(EVENTS, place, again)
            return
        told: dict[str, JsonValue] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.name,
            "metadata": {"namespace": key.namespace, "name": name},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
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
        await self._cluster.create(EVENTS, told)
