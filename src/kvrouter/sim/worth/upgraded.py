"""A fleet amid an upgrade: workers of two versions, whose engines cannot hand KV to each other."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import ANY, KvFormat, Role, can_transfer
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.kernel.routing.formats import FormatGroup, pair_capacity

BEFORE, AFTER = "before", "after"
"""The versions in the KV formats of workers; a stated one stays that of a worker that is not upgraded."""


class Upgraded(NamedTuple):
    """How much of an upgrade is done: the shares of prefill workers, and of those that decode."""

    prefill: float
    decode: float

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.prefill:.0%} of prefill and {self.decode:.0%} of decode upgraded"


def parse_upgraded(text: str) -> Upgraded:
    """Parse ``50`` or ``50/25``, in percent of prefill and of decode workers. Raises ConfigError."""
    prefill, slash, decode = text.partition("/")
    try:
        found = Upgraded(float(prefill) / 100.0, float(decode if slash else prefill) / 100.0)
    except ValueError:
        found = Upgraded(-1.0, -1.0)
    if not all(0.0 <= share <= 1.0 for share in found):
        raise ConfigError(
            f"upgraded: {text!r} is not PERCENT or PERCENT/PERCENT, each from 0 to 100", param="upgraded"
        )
    return found


def upgraded_fleet(file: FleetFile, upgraded: Upgraded) -> FleetFile:
    """Return a fleet with these shares of its workers upgraded, the first of the file: a file by zones is
    upgraded zone by zone. Ids of workers stay.
    """
    left = Counter[bool]()
    for group in file.workers:
        left[group.role is Role.PREFILL] += group.n_workers
    left = Counter({True: round(upgraded.prefill * left[True]), False: round(upgraded.decode * left[False])})
    workers: list[WorkerGroup] = []
    for group in file.workers:
        is_prefill = group.role is Role.PREFILL
        n_upgraded = min(left[is_prefill], group.n_workers)
        left[is_prefill] -= n_upgraded
        workers += _split(group, n_upgraded)
    return file.model_copy(update={"workers": tuple(workers)})


def pair_capacity_of(file: FleetFile) -> float:
    """Return the share of the capacity of pairs that KV formats leave, as ``/v1/fleet`` has it."""
    groups = [group for _, group in numbered_workers(file)]
    formats = [KvFormat(**group.kv_format) for group in groups]
    sends = np.array([group.role is Role.PREFILL for group in groups])
    by_format = [
        FormatGroup(
            sends & np.array([each == sent for each in formats]),
            ~sends & np.array([can_transfer(sent, each) for each in formats]),
        )
        for sent in dict.fromkeys(each for each, is_sent in zip(formats, sends, strict=True) if is_sent)
    ]
    return round(pair_capacity(by_format, sends, ~sends), 3)


def _split(group: WorkerGroup, n_upgraded: int) -> Iterator[WorkerGroup]:
    """Yield the upgraded workers of a group, then the others."""
    stated = group.kv_format.get("version")
    if n_upgraded:
        kv_format = {**group.kv_format, "version": ANY if stated == ANY else AFTER}
        yield group.model_copy(
            update={"name": f"{group.name}-{AFTER}", "replicas": n_upgraded, "kv_format": kv_format}
        )
    if n_upgraded < group.n_workers:
        kv_format = {**group.kv_format, "version": stated or BEFORE}
        yield group.model_copy(update={"replicas": group.n_workers - n_upgraded, "kv_format": kv_format})
