"""Discovery by objects of a Kubernetes API server."""

from kvrouter.kube.client import ClusterUser
from kvrouter.kube.objects import WORKERS
from kvrouter.transports.discovery.card_publisher import HeldCards
from kvrouter.transports.discovery.card_tracker import TroubleSink
from kvrouter.transports.discovery.kubernetes.objects import OwnerPod, OwnerReference
from kvrouter.transports.discovery.kubernetes.records import ObjectRecords, Stood
from kvrouter.transports.discovery.port import GoneSink
from kvrouter.transports.discovery.stored import StoredDiscovery
from kvrouter.transports.discovery.wire import CARDS, CardRecord, checked_lease

LEASE_S = 60.0
"""A thousand workers then write 56 times a second, as the leases of 560 nodes do."""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the object of a worker that nobody renews; with long leases, after ten of them."""

ANSWER_LEAST_S = 5.0
"""The least time in which the API server must answer, else the store is lost."""


class WorkerObjects(ObjectRecords[CardRecord]):
    """The objects of workers, owned by ``pod`` where they are written here."""

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

    def owners_of(self, value: CardRecord, over: Stood | None) -> tuple[OwnerReference, ...]:
        """Return who owns a worker's object: withdrawing, which anybody may, changes no owner."""
        return over.owners if over is not None and value.withdrawn else self._owners


class KubernetesDiscovery(StoredDiscovery[Stood]):
    """Keeps the cards of the fleet ``namespace`` as objects in the user's namespace of Kubernetes.

    A worker that starts or withdraws is heard at once. ``pod`` owns what is published here: Kubernetes
    deletes it after the pod. While the API server is away, ``publish`` and ``watch`` return, and everything
    is made good when it is back. ``on_refused`` hears of objects that hold no card, once however many watch;
    ``on_trouble`` of cards that cannot be written. ``on_lost`` hears of a card published here that lost its
    place for ever: to a newer incarnation, or because somebody else withdrew it.

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
