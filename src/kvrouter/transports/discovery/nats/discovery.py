"""Discovery by a JetStream key-value bucket."""

from nats.aio.client import Client

from kvrouter.core.errors import ConfigError
from kvrouter.transports.discovery.card_publisher import HeldCards
from kvrouter.transports.discovery.card_tracker import TroubleSink
from kvrouter.transports.discovery.nats.bucket import BucketRecords
from kvrouter.transports.discovery.port import GoneSink
from kvrouter.transports.discovery.stored import StoredDiscovery
from kvrouter.transports.discovery.wire import CARDS, checked_lease

LEASE_S = 10.0

ANSWER_LEAST_S = 2.0
"""The least time in which NATS must answer, else the store is lost."""


class NatsDiscovery(StoredDiscovery[int]):
    """Keeps the cards of ``namespace`` in a bucket of its own, which is made where it is missing.

    A worker that starts or withdraws is heard at once. ``replicas`` is how many servers keep the bucket.
    While NATS is away, ``publish`` and ``watch`` return, and everything is made good when it is back.
    ``on_refused`` hears of keys that hold no card sealed with ``token``, once however many watch;
    ``on_trouble`` of cards that cannot be written. ``on_lost`` hears of a card published here that lost its
    place for ever: to a newer incarnation, or because somebody else withdrew it.

    Raises ConfigError for arguments out of range. The connection stays its maker's, who closes it.
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
