"""Cordons in a key-value bucket of JetStream of their own."""

from nats.aio.client import Client

from kvrouter.transports.discovery.card_tracker import TroubleSink
from kvrouter.transports.discovery.nats.bucket import BucketRecords
from kvrouter.transports.discovery.stored import StoredCordons
from kvrouter.transports.discovery.wire import CORDONS
from kvrouter.transports.nats_client import reason

ANSWER_S = 5.0
"""NATS must answer within this, else the store cannot be asked."""


class NatsCordons(StoredCordons[int]):
    """Keeps the cordons of ``namespace``; the bucket is made with the first one.

    A record is sealed with ``token`` for its key. ``on_refused`` hears of keys that hold no cordon, once
    each. ``replicas`` is how many servers keep the bucket. The connection stays its maker's, who closes it.
    """

    def __init__(
        self, client: Client, *, namespace: str, token: str, on_refused: TroubleSink, replicas: int = 1
    ) -> None:
        store = BucketRecords(
            client,
            CORDONS,
            namespace=namespace,
            purpose="cordons",
            token=token,
            replicas=replicas,
            answer_s=ANSWER_S,
            on_refused=on_refused,
        )
        super().__init__(store, why=lambda error: f"the bucket {store.name} cannot be used: {reason(error)}")
