"""Discovery by a JetStream key-value bucket."""

from nats.aio.client import Client

from kvrouter.core.errors import ConfigError
from kvrouter.transports.records.card_publisher import HeldCards
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CARDS, checked_lease
from kvrouter.transports.records.nats.store import BucketRecords
from kvrouter.transports.records.port import GoneSink
from kvrouter.transports.records.stored import StoredDiscovery

LEASE_S = 10.0

ANSWER_LEAST_S = 2.0
"""The least time in which NATS must answer, else the store counts as lost."""


class NatsDiscovery(StoredDiscovery[int]):
    """Keeps the cards of ``namespace`` in a bucket, created where it is missing.

    Watchers notice a worker that starts or withdraws at once. ``replicas`` is the number of servers that
    store the bucket. While NATS is unreachable, ``publish`` and ``watch`` return, and catch up when it is
    back. ``on_refused`` is called for keys that hold no card sealed with ``token``, once for all watches;
    ``on_trouble`` for cards that cannot be written; ``on_lost`` for a card published here that lost its id
    for good: a newer incarnation replaced it, or another process withdrew it.

    Raises ConfigError for arguments out of range. The owner of the connection closes it.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        replicas: int = 1,
    ) -> None:
        if not 1 <= replicas <= 5:
            raise ConfigError(f"replicas: 1 to 5, not {replicas}", param="replicas")
        store = BucketRecords(
            client,
            CARDS,
            namespace=namespace,
            purpose="discovery",
            token=token,
            replicas=replicas,
            answer_s=max(checked_lease(lease_s) / 2, ANSWER_LEAST_S),
            on_refused=on_refused,
            lease_s=lease_s,
        )
        cards = HeldCards(store, lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost)
        super().__init__(store, cards, lease_s=lease_s, on_trouble=on_trouble)
