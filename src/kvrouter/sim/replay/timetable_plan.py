"""The plan of a timetable over one fleet: derived, and checked, before the replay."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.engines.mock_engine.mock_links import LinkChange, Place
from kvrouter.fleetfile.fleet_checks import examine_fleet
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import link_level, mock_links, numbered_workers
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.settings.problems import Document, Path, Problem, did_you_mean, dotted
from kvrouter.sim.replay.fleet_check import group_problems
from kvrouter.sim.replay.timetable import (
    AddEvent,
    LabelEvent,
    LinkEvent,
    PolicyEvent,
    TimetableEvent,
    WorkersEvent,
)

TRANSFER_KEYS = ("domain", "enforcement", "preferred_weight")
"""Keys of ``kv_transfer`` that may change: workers publish their cards again."""

ROUTER_KEYS = (
    "router_mode",
    "router_cost",
    "router_pd_selection",
    "router_price_weight",
    "router_timing",
    "router_decode_weight",
    "overlap_score_weight",
    "router_temperature",
    "track_prefill_tokens",
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "slo_ttft_ms",
    "kv_transfer_topology_level",
    "kv_transfer_mismatch_policy",
    "kv_transfer_weight",
)
"""Keys of ``router`` that may change, as each decision reads them. The others shape a router at its start."""

_NOT_REPLAYED = {"frontend", "planes", "recording", "log"}


class Step(NamedTuple):
    """One event and its effects: the ``file`` from then on, new workers, a changed link."""

    event: TimetableEvent
    file: FleetFile
    added: tuple[tuple[WorkerId, WorkerGroup], ...] = ()
    link: LinkChange | None = None


def plan_timetable(events: Sequence[TimetableEvent], fleet: FleetFile) -> tuple[Step, ...]:
    """Return the steps of ``events``, which come in the order of time. Raises ConfigError for an event that
    cannot happen to this fleet, with its place in the file.
    """
    plan = _Plan(fleet)
    steps = tuple(plan.take(event) for event in events)
    for step in steps:
        if isinstance(step.event, LinkEvent) and step.link is not None:
            plan.check_link(step.event, step.link)
    return steps


def relabelled(group: WorkerGroup, labels: Mapping[str, str | None]) -> WorkerGroup:
    """Return ``group`` with these values of levels; None takes one away."""
    domains = {**group.domains, **labels}
    return group.model_copy(
        update={"domains": {level: value for level, value in domains.items() if value is not None}}
    )


class _Plan:
    """The fleet after the events so far."""

    def __init__(self, fleet: FleetFile) -> None:
        self.file = fleet
        self._groups = dict(numbered_workers(fleet))
        self._links = mock_links(fleet)
        self._level = link_level(fleet)
        self._places: dict[tuple[tuple[str, str], ...], Place] = {}
        """Where workers are at some time, by their domains."""
        self._note_places()

    def take(self, event: TimetableEvent) -> Step:
        """Let it happen."""
        added: tuple[tuple[WorkerId, WorkerGroup], ...] = ()
        link: LinkChange | None = None
        match event:
            case WorkersEvent():
                self._select(event)
            case LinkEvent():
                link = self._change(event)
            case PolicyEvent():
                self._switch(event)
            case AddEvent():
                added = self._add(event)
        return Step(event, self.file, added, link)

    def check_link(self, event: LinkEvent, change: LinkChange) -> None:
        """Raise ConfigError unless transfers may go over the link, at some time."""
        level = change.level
        known = {place.domains[level] for place in self._places.values() if level in place.domains}
        for position, value in enumerate(change.between):
            if value not in known:
                must = f"no worker has {level}={value}{did_you_mean(value, known)}"
                raise event.wrong(Problem(("between", position), must))
        sides = [
            [place for place in self._places.values() if place.domains.get(level) == value]
            for value in change.between
        ]
        if not any(change.concerns(self._links.shared(a, b)[0]) for a in sides[0] for b in sides[1]):
            one, other = change.between
            name = self._links.shared(sides[0][0], sides[1][0])[0]
            must = (
                f"no KV between {level}={one} and {level}={other} has a link of that level: "
                f"it goes over one of level {name.level}"
            )
            raise event.wrong(Problem(("between",), must))

    def _select(self, event: WorkersEvent) -> None:
        names = {group.name for group in self._groups.values()}
        if event.group is not None and event.group not in names:
            must = f"no worker of the fleet is in a group {event.group!r}{did_you_mean(event.group, names)}"
            raise event.wrong(Problem(("group",), must))
        for level in event.domains:
            self._check_level(event, ("domains", level), level)
        selected = [worker_id for worker_id, group in self._groups.items() if event.selects(worker_id, group)]
        if not selected and event.worker is not None and event.worker not in self._groups:
            must = f"the fleet has no worker {event.worker} then: they are numbered 1 to {len(self._groups)}"
            raise event.wrong(Problem(("worker",), must))
        if not selected:
            raise event.wrong(Problem((), "no worker of the fleet is in this group and these domains then"))
        if isinstance(event, LabelEvent):
            for level in event.set:
                self._check_level(event, ("set", level), level)
            for worker_id in selected:
                self._groups[worker_id] = relabelled(self._groups[worker_id], event.set)
            self._note_places()

    def _check_level(self, event: TimetableEvent, path: Path, level: str) -> None:
        levels = self.file.topology.levels
        if level not in levels:
            listed = ", ".join(levels) or "none are given"
            must = f"must be one of topology.levels ({listed}), not {level!r}{did_you_mean(level, levels)}"
            raise event.wrong(Problem(path, must))

    def _change(self, event: LinkEvent) -> LinkChange:
        level = self._level if event.level is None else event.level
        if level is None:
            raise event.wrong(
                Problem(("between",), "the fleet has no topology.levels, so no links with names")
            )
        self._check_level(event, ("level",), level)
        one, other = event.between
        return LinkChange(
            level=level,
            between=(one, other),
            bandwidth_factor=event.bandwidth_factor,
            bandwidth_bytes_per_s=event.bandwidth_bytes_per_s,
            latency_factor=event.latency_factor,
            latency_s=event.latency_s,
        )

    def _switch(self, event: PolicyEvent) -> None:
        content = self._content()
        for key, value in event.set.items():
            section, _, name = key.rpartition(".")
            if key == "kv_transfer":
                content["kv_transfer"] = value
            elif section == "kv_transfer" and name in TRANSFER_KEYS:
                _section(content, "kv_transfer")[name] = value
            elif section in ("", "router") and name in ROUTER_KEYS:
                _section(content, "router")[name] = value
            else:
                known = ["kv_transfer", *(f"kv_transfer.{each}" for each in TRANSFER_KEYS)]
                known += [f"router.{each}" for each in ROUTER_KEYS]
                must = (
                    f"cannot change while the router runs{did_you_mean(key, known)}; {', '.join(known)} can"
                )
                raise event.wrong(Problem(("set", key), must))

        def at(path: Path) -> tuple[Path, str]:
            for key in (dotted(path), str(path[-1]), str(path[0])):
                if key in event.set:
                    return ("set", key), "" if key == dotted(path) else f"{dotted(path)} "
            return ("set",), f"{dotted(path)} "

        self._examine(event, content, at)
        try:
            routing_settings(self.file.router, None)
        except ConfigError as error:
            named = [key for key in event.set if key.rpartition(".")[2] == error.param]
            raise event.wrong(Problem(("set", *named[:1]), error.message)) from error

    def _add(self, event: AddEvent) -> tuple[tuple[WorkerId, WorkerGroup], ...]:
        content, groups = self._content(), self.file.workers
        entries = content["workers"] = [*content["workers"]]
        replicas = event.replicas or 1
        if event.group is None:
            problems = [
                Problem(("workers", position, *problem.path), problem.must)
                for position, group in enumerate(event.workers)
                for problem in group_problems(group)
            ]
            if problems:
                raise event.wrong(*problems)
            entries += [group.model_dump(exclude_unset=True) for group in event.workers]
            new = event.workers
        else:
            names = [group.name for group in groups]
            if event.group not in names:
                must = f"must be a group of the fleet, not {event.group!r}{did_you_mean(event.group, names)}"
                raise event.wrong(Problem(("group",), must))
            position = names.index(event.group)
            entries[position] = {
                **entries[position],
                "replicas": groups[position].n_workers + replicas,
            }
            new = (groups[position].model_copy(update={"replicas": replicas}),)

        def at(path: Path) -> tuple[Path, str]:
            if path[:1] == ("workers",) and len(path) > 1 and isinstance(path[1], int):
                if path[1] >= len(groups):
                    return ("workers", path[1] - len(groups), *path[2:]), ""
                if path[2:] == ("replicas",):
                    return ("replicas",), "of the group with those before "
            return ("workers",) if event.group is None else ("group",), f"{dotted(path)} "

        self._examine(event, content, at)
        first = len(self._groups) + 1
        each = [group for group in new for _ in range(group.n_workers)]
        added = tuple((WorkerId(first + n), group) for n, group in enumerate(each))
        self._groups.update(added)
        self._note_places()
        return added

    def _content(self) -> dict[str, Any]:
        """Return the current file, in its written form."""
        return self.file.model_dump(exclude_unset=True, exclude=_NOT_REPLAYED)

    def _examine(
        self,
        event: TimetableEvent,
        content: Mapping[str, object],
        at: Callable[[Path], tuple[Path, str]],
    ) -> None:
        """Take ``content`` as the file from now on; ``at`` returns the event's field for a path with a
        mistake, and a prefix for its message.
        """
        examined = examine_fleet(Document("fleet", content, {}))
        if examined.problems or examined.fleet is None:
            found = [(at(problem.path), problem.must) for problem in examined.problems]
            raise event.wrong(*(Problem(path, f"{before}{must}") for (path, before), must in found))
        kept = {name: getattr(self.file, name) for name in _NOT_REPLAYED}
        self.file = examined.fleet.model_copy(update=kept)

    def _note_places(self) -> None:
        """Remember where workers are; those of one place are one."""
        for worker_id, group in self._groups.items():
            domains = tuple(sorted(group.domains.items()))
            if domains not in self._places:
                self._places[domains] = self._links.place(group.domains, worker_id)


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The section of a file that is about to change, without changing what others hold of it."""
    content[name] = {**(content.get(name) or {})}
    section: dict[str, Any] = content[name]
    return section
