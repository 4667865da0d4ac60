"""Every setting of a fleet's transfer policy and the router's choice: enforcement, level, mode, and cost."""

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from kvrouter.core.constraints import PdSelection, RouterMode
from kvrouter.core.cost_rules import BLOCKS, JOINT, TIME
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.problems import Document, Problem
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.timetable import PolicyEvent, TimetableEvent
from kvrouter.sim.replay.variant import VARIANTS_MAX, Variant, changed_fleet

PREFERRED_WEIGHT = 1.0
"""The weight of ``preferred`` without one in the fleet file: the largest."""

STRICTNESS: tuple[Enforcement | None, ...] = (
    None,
    Enforcement.PREFERRED,
    Enforcement.FALLBACK,
    Enforcement.REQUIRED,
)
"""The enforcements, from the least strict on; None: no policy."""


COMPARED = (
    "kv_transfer",
    "router_mode",
    "router_cost",
    "router_pd_selection",
    "kv_transfer_topology_level",
    "kv_transfer_mismatch_policy",
)
"""What choices differ in: a section of the fleet file, and keys of its ``router``."""


COMPARED_COSTS = (BLOCKS, TIME, JOINT)
"""The costs that are compared by default."""


class TransferChoice(msgspec.Struct, frozen=True):
    """How KV keeps to the domains of one level, and how workers are picked.

    ``enforcement`` and ``level`` are None if KV goes anywhere. ``weight`` is that of ``preferred``. ``cost``
    is one of :func:`~kvrouter.core.cost_rules.cost_choices`, None in modes without costs.
    """

    mode: RouterMode
    enforcement: Enforcement | None = None
    level: str | None = None
    weight: float | None = None
    cost: str | None = None

    @property
    def name(self) -> str:
        """Its name in tables."""
        picked = f"{self.mode}" if self.cost is None else f"{self.mode} by {self.cost}"
        return f"{self.boundary}, {picked}"

    @property
    def boundary(self) -> str:
        """How it bounds KV transfers."""
        if self.enforcement is None:
            return "anywhere"
        weight = "" if self.weight is None else f" {self.weight:g}"
        return f"{self.enforcement}{weight} on {self.level}"

    @property
    def strictness(self) -> int:
        """0 for no policy; more the more it rules out."""
        return STRICTNESS.index(self.enforcement)

    def is_looser_than(self, today: "TransferChoice", levels: Sequence[str]) -> bool:
        """Whether KV may go where ``today`` keeps it from going, or prefers it not to; ``levels`` are the
        broadest first.
        """
        if today.level is None:
            return False
        if self.level is None or self.strictness < today.strictness:
            return True
        return levels.index(self.level) < levels.index(today.level)

    def change_from(self, today: "TransferChoice", levels: Sequence[str]) -> tuple[int, ...]:
        """Return how large a change it is, by what weighs most: another mode, how many of policy and cost are
        others, how strict it is, and how narrow.
        """
        policy = (self.enforcement, self.level, self.weight)
        is_other = policy != (today.enforcement, today.level, today.weight), self.cost != today.cost
        narrowness = -1 if self.level is None else levels.index(self.level)
        return int(self.mode is not today.mode), sum(is_other), self.strictness, narrowness

    def settings(self) -> list[tuple[str, object]]:
        """The keys of a fleet file that set it, with their values; None takes a key out.

        The router's own default is taken out with them: it would hold where no policy is published.
        """
        policy: dict[str, object] | None = None
        if self.enforcement is not None:
            policy = {"domain": self.level, "enforcement": self.enforcement.value}
            if self.weight is not None:
                policy["preferred_weight"] = self.weight
        cost, selection = self.cost, None
        if cost is not None:
            selection = PdSelection.JOINT.value if cost == JOINT else PdSelection.SEQUENTIAL.value
        return [
            ("kv_transfer", policy),
            ("router.kv_transfer_topology_level", None),
            ("router.kv_transfer_mismatch_policy", None),
            ("router.router_mode", self.mode.value),
            ("router.router_cost", TIME if cost == JOINT else cost),
            ("router.router_pd_selection", selection),
        ]


def choice_of(file: FleetFile) -> TransferChoice:
    """Return the choice of a fleet file: its own policy, else the router's default policy."""
    policy, router = file.kv_transfer, file.router
    mode, cost = router.router_mode, _cost_of(router)
    if policy is not None:
        is_preferred = policy.enforcement is Enforcement.PREFERRED
        weight = policy.preferred_weight if is_preferred else None
        return TransferChoice(mode, policy.enforcement, policy.domain, weight, cost)
    if router.kv_transfer_topology_level is not None:
        is_required = router.kv_transfer_mismatch_policy is MismatchPolicy.FAIL
        enforcement = Enforcement.REQUIRED if is_required else Enforcement.FALLBACK
        return TransferChoice(mode, enforcement, router.kv_transfer_topology_level.strip(), cost=cost)
    return TransferChoice(mode, cost=cost)


def _cost_of(router: KvRouterConfig) -> str | None:
    if router.router_mode is not RouterMode.KV:
        return None
    if router.router_pd_selection is PdSelection.JOINT:
        return JOINT
    return router.cost


def other_choices(
    file: FleetFile, modes: Sequence[RouterMode], costs: Sequence[str] = COMPARED_COSTS
) -> list[TransferChoice]:
    """Return every choice but the file's own: no policy, and each enforcement on each level, in each mode,
    with each cost if costs pick.

    ``preferred`` is left out if costs do not pick, round-robin and at random: there it has no effect. Raises
    ConfigError for a file in which no choice would have an effect, or too many would.
    """
    _check(file)
    today = choice_of(file)
    weight = PREFERRED_WEIGHT
    if file.kv_transfer is not None and file.kv_transfer.preferred_weight is not None:
        weight = file.kv_transfer.preferred_weight
    others = [choice for choice in _all(file.topology.levels, modes, costs, weight) if choice != today]
    if len(others) >= VARIANTS_MAX:
        raise ConfigError(
            f"mode: {len(others)} alternatives; at most {VARIANTS_MAX - 1}: ask for fewer modes, or costs",
            param="mode",
        )
    return others


def _all(
    levels: Sequence[str], modes: Sequence[RouterMode], costs: Sequence[str], weight: float
) -> Iterator[TransferChoice]:
    for mode in modes:
        for cost in costs if mode is RouterMode.KV else (None,):
            yield TransferChoice(mode, cost=cost)
            for enforcement, level in product(STRICTNESS[1:], levels):
                if enforcement is not Enforcement.PREFERRED:
                    yield TransferChoice(mode, enforcement, level, cost=cost)
                elif cost is not None:
                    yield TransferChoice(mode, enforcement, level, weight, cost)


def check_events(events: Sequence[TimetableEvent]) -> None:
    """Raise ConfigError, with its place in the file, for an event that changes a compared setting: from then
    on all choices would be equal.
    """
    for event in events:
        for key in event.set if isinstance(event, PolicyEvent) else ():
            if key.removeprefix("router.") in COMPARED or key.startswith("kv_transfer."):
                raise event.wrong(Problem(("set", key), "cannot change: it is what is compared"))


def variant_of(document: Document, choice: TransferChoice) -> Variant:
    """Return the fleet of a file with this choice instead of its own. Raises ConfigError."""
    return Variant(choice.name, changed_fleet(document, choice.settings()), lambda: None, "this router")


def _check(file: FleetFile) -> None:
    if not file.topology.levels:
        raise ConfigError(
            "topology.levels: is empty: no policy can keep KV to anything", param="topology.levels"
        )
    if file.topology.links is None:
        raise ConfigError(
            "topology.links: is required: measure the links, because assumed ones tell nothing of yours",
            param="topology.links",
        )
    if not any(group.role is Role.PREFILL for group in file.workers):
        raise ConfigError(
            "workers: none has role prefill, so no KV travels and no transfer policy does anything",
            param="workers",
        )
