"""The part of ``dynamo._core`` that is measured, as its stubs describe it."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

Json = Mapping[str, object]


class SelectionService(Protocol):
    """An in-process selector."""

    async def upsert_worker(self, worker: Json) -> Json: ...
    async def recover_indexer_from_peers(self, peers: Sequence[str]) -> bool: ...
    async def overlap_scores(self, request: Json) -> Mapping[str, list[Mapping[str, int]]]: ...
    async def select(self, request: Json) -> Json: ...
    async def select_and_reserve(self, request: Json) -> Json: ...
    async def create_reservation(self, request: Json) -> Json: ...
    async def free_reservation(self, selection_id: str) -> None: ...
    def loads(self) -> list[Mapping[str, list[Mapping[str, int]]]]: ...
    def shutdown(self) -> None: ...


class OverlapScores(Protocol):
    """What a search found."""

    @property
    def scores(self) -> Mapping[tuple[int, int], int]: ...


class RadixTree(Protocol):
    """Who holds which blocks."""

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...
    def find_matches(self, sequence: Sequence[int]) -> OverlapScores: ...
    def remove_worker(self, worker_id: int) -> None: ...


class Core(Protocol):
    """The module."""

    def SelectionService(self, *, indexer_threads: int) -> SelectionService: ...  # noqa: N802 - a class there
    def RadixTree(self) -> RadixTree: ...  # noqa: N802 - a class there
    def compute_block_hash_for_seq(self, tokens: Sequence[int], kv_block_size: int) -> list[int]: ...


def load_core() -> Core:
    """Import the module, which only the peers' environment has."""
    return cast("Core", importlib.import_module("dynamo._core"))


class Publisher(Protocol):
    """A ZMQ socket that publishes."""

    def bind_to_random_port(self, address: str) -> int: ...
    def close(self) -> None: ...


def make_publisher() -> Publisher:
    """Open a socket for workers' events, which only the peers' environment can."""
    zmq = importlib.import_module("zmq")
    return cast("Publisher", zmq.Context.instance().socket(zmq.PUB))
