"""The transfer policies that prefill workers publish, and who publishes each."""

from collections.abc import Iterator

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.fleet.columns import SlotColumn
from kvrouter.topology.policy import Required, TransferPolicy


class Policies:
    """Prefill slots by their worker's own policy; None is the policy of those that publish none."""

    def __init__(self) -> None:
        self._slots: dict[TransferPolicy | None, set[Slot]] = {}
        self._policy_of: dict[Slot, TransferPolicy | None] = {}

    def __iter__(self) -> Iterator[tuple[TransferPolicy | None, SlotColumn]]:
        for policy, slots in self._slots.items():
            yield policy, np.fromiter(slots, np.intp, len(slots))

    @property
    def required_domain(self) -> str | None:
        """A domain that some of them require: the first by name."""
        domains = (policy.domain for policy in self._slots if isinstance(policy, Required))
        return min(domains, default=None)

    def put(self, slot: Slot, policy: TransferPolicy | None) -> None:
        """Say that ``slot`` is a prefill slot with this policy."""
        self.remove(slot)
        self._policy_of[slot] = policy
        self._slots.setdefault(policy, set()).add(slot)

    def remove(self, slot: Slot) -> None:
        """Say that ``slot`` is no prefill slot."""
        if slot not in self._policy_of:
            return
        policy = self._policy_of.pop(slot)
        self._slots[policy].discard(slot)
        if not self._slots[policy]:
            del self._slots[policy]
