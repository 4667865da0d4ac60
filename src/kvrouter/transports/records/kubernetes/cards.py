"""Discovery by objects of a Kubernetes API server."""

from kvrouter.kube.client import ClusterUser
from kvrouter.kube.objects import WORKERS
from kvrouter.transports.records.card_publisher import HeldCards
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CARDS, CardRecord, checked_lease
from kvrouter.transports.records.kubernetes.objects import OwnerPod, OwnerReference
from kvrouter.transports.records.kubernetes.store import ObjectRecords, ObjectVersion
from kvrouter.transports.records.port import GoneSink
from kvrouter.transports.records.stored import StoredDiscovery

LEASE_S = 60.0
"""With this lease, a thousand workers write 56 times a second, as the leases of 560 nodes do."""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the object of a worker that is not renewed; with long leases, after ten of them."""

ANSWER_LEAST_S = 5.0
"""The least time in which the API server must answer, else the store counts as lost."""


class WorkerObjects(ObjectRecords[CardRecord]):
    """Worker objects; ``pod`` owns those that are written here."""

    def __init__(
        self, user: ClusterUser, *, fleet: str, lease_s: float, on_refused: TroubleSink, pod: OwnerPod | None
    ) -> None:
        super().__init__(
            user,
            CARDS,
            WORKERS,
            fleet=fleet,
            answer_s=max(checked_lease(lease_s) / 4, ANSWER_LEAST_S),
            on_refused=on_refused,
            lease_s=lease_s,
        )
        self._owners = () if pod is None else (pod.reference(),)

    def owners_of(self, value: CardRecord, over: ObjectVersion | None) -> tuple[OwnerReference, ...]:
        """Return the owners of a worker's object: withdrawing, which any process may do, keeps the owners."""
        return over.owners if over is not None and value.withdrawn else self._owners


class KubernetesDiscovery(StoredDiscovery[ObjectVersion]):
    """Keeps the cards of the fleet ``namespace`` as objects in the user's Kubernetes namespace.

    Watchers notice a worker that starts or withdraws at once. ``pod`` owns the objects published here:
    Kubernetes deletes them after the pod. While the API server is unreachable, ``publish`` and ``watch``
    return, and catch up when it is back. ``on_refused`` is called for objects that hold no card, once for all
    watches; ``on_trouble`` for cards that cannot be written; ``on_lost`` for a card published here that lost
    its id for good: a newer incarnation replaced it, or another process withdrew it.

    Raises ConfigError for arguments out of range.
    """

    def __init__(
        self,
        user: ClusterUser,
        *,
        namespace: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        remove_after_s: float = REMOVE_AFTER_S,
        pod: OwnerPod | None = None,
    ) -> None:
        store = WorkerObjects(user, fleet=namespace, lease_s=lease_s, on_refused=on_refused, pod=pod)
        cards = HeldCards(store, lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost)
        super().__init__(store, cards, lease_s=lease_s, on_trouble=on_trouble, remove_after_s=remove_after_s)
