"""A fleet amid an upgrade: workers of two versions, whose engines cannot hand KV to each other."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import ANY, KvFormat, Role, can_transfer
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.kernel.routing.formats import FormatGroup, pair_capacity

BEFORE, AFTER = "before", "after"
"""The versions in the KV formats of workers; a stated one stays that of a worker that is not upgraded."""


class UpgradedWorkers(msgspec.Struct, frozen=True):
    """How many workers of a kind are upgraded, and how many there are."""

    upgraded: int
    workers: int


class Upgraded(NamedTuple):
    """How much of an upgrade is done: of the prefill workers, and of those that decode."""

    prefill: UpgradedWorkers
    decode: UpgradedWorkers

    @property
    def name(self) -> str:
        """Its name in tables."""
        prefill, decode = (f"{each.upgraded} of {each.workers}" for each in self)
        return f"{prefill} prefill and {decode} decode workers upgraded"


def parse_upgraded(text: str, file: FleetFile) -> Upgraded:
    """Parse ``50`` or ``50/25``, in percent of a fleet's prefill and decode workers, and round to whole
    workers. Raises ConfigError.
    """
    prefill, slash, decode = text.partition("/")
    try:
        shares = float(prefill) / 100.0, float(decode if slash else prefill) / 100.0
    except ValueError:
        shares = -1.0, -1.0
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise ConfigError(
            f"upgraded: {text!r} is not PERCENT or PERCENT/PERCENT, each from 0 to 100", param="upgraded"
        )
    n_prefill = sum(group.n_workers for group in file.workers if group.role is Role.PREFILL)
    counts = n_prefill, sum(group.n_workers for group in file.workers) - n_prefill
    return Upgraded(*(UpgradedWorkers(round(share * n), n) for share, n in zip(shares, counts, strict=True)))


def upgraded_fleet(file: FleetFile, upgraded: Upgraded) -> FleetFile:
    """Return a fleet with so many of its workers upgraded, the first of the file: a file by zones is upgraded
    zone by zone. Ids of workers stay.
    """
    left = {True: upgraded.prefill.upgraded, False: upgraded.decode.upgraded}
    names = {group.name for group in file.workers}
    workers: list[WorkerGroup] = []
    for group in file.workers:
        is_prefill = group.role is Role.PREFILL
        n_upgraded = min(left[is_prefill], group.n_workers)
        left[is_prefill] -= n_upgraded
        workers += _split(group, n_upgraded, names)
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


def _split(group: WorkerGroup, n_upgraded: int, names: set[str]) -> Iterator[WorkerGroup]:
    """Yield the upgraded workers of a group, under a name that is added to ``names``, then the others."""
    stated, name = group.kv_format.get("version"), group.name
    if n_upgraded:
        while name in names:
            name = f"{name}-{AFTER}"
        names.add(name)
        kv_format = {**group.kv_format, "version": ANY if stated == ANY else AFTER}
        yield group.model_copy(update={"name": name, "replicas": n_upgraded, "kv_format": kv_format})
    if n_upgraded < group.n_workers:
        kv_format = {**group.kv_format, "version": stated or BEFORE}
        yield group.model_copy(update={"replicas": group.n_workers - n_upgraded, "kv_format": kv_format})
