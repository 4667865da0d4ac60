"""Cordons in a key-value bucket of JetStream."""

from nats.aio.client import Client

from kvrouter.transports.nats_client import reason
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CORDONS
from kvrouter.transports.records.nats.store import BucketRecords
from kvrouter.transports.records.stored import StoredCordons

ANSWER_S = 5.0
"""NATS must answer within this, else the store counts as unreachable."""


class NatsCordons(StoredCordons[int]):
    """Keeps the cordons of ``namespace`` in a bucket, created with the first one.

    Records are sealed with ``token`` for their keys. ``on_refused`` is called once for each key without a
    cordon. ``replicas`` is the number of servers that store it. The owner of the connection closes it.
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
