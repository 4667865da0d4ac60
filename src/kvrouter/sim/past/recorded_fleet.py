"""The fleet that a recording saw, as a fleet file, and whether another fleet has the same workers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.taints import listed_taints, own_taints
from kvrouter.core.workers import Enforcement
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.recording.schema import Worker
from kvrouter.settings.problems import Document, Path, dotted
from kvrouter.sim.past.fleet_history import FleetHistory, RecordedWorker


class RecordedDocument(Document):
    """A document made of a recording: its values have the file and line of their records.

    ``origins`` are by path; ``name`` is the place of all other values.
    """

    def __init__(
        self, name: str, content: Mapping[str, object], origins: Mapping[Path, RecordedWorker]
    ) -> None:
        super().__init__(name, content, {})
        self._origins = origins

    def place(self, path: Path) -> str:
        """Return the place of ``path``: file and line, the worker, the field."""
        known = path
        while known and known not in self._origins:
            known = known[:-1]
        if not known:
            return f"{self.name}: {dotted(path)}" if path else self.name
        recorded = self._origins[known]
        return f"{recorded.place}: worker {recorded.worker.worker}: {dotted(path)}"


class Policy(NamedTuple):
    """The transfer policy of a worker's card."""

    domain: str
    enforcement: str
    preferred_weight: float | None

    @property
    def content(self) -> dict[str, object]:
        """The policy as ``kv_transfer`` of a fleet file."""
        made: dict[str, object] = {"domain": self.domain, "enforcement": self.enforcement}
        if self.preferred_weight is not None:
            made["preferred_weight"] = self.preferred_weight
        return made


class Numbering(NamedTuple):
    """The ids of recorded workers in a fleet: those at the beginning, and the groups of later ones, by
    ``kind_of`` them.
    """

    numbers: Mapping[str, WorkerId]
    n_workers: int
    groups: Mapping[Hashable, str]
    kind_of: Callable[[Worker], Hashable]


class RecordedFleet(NamedTuple):
    """A fleet file made of a recording, and which of its workers each recorded one is."""

    document: RecordedDocument
    numbering: Numbering


def policy_of(worker: Worker) -> Policy | None:
    """Return the transfer policy that a worker's card has; None without one."""
    if worker.transfer_domain is None:
        return None
    enforcement = worker.enforcement or Enforcement.REQUIRED.value
    weight = worker.preferred_weight if enforcement == Enforcement.PREFERRED.value else None
    return Policy(worker.transfer_domain, enforcement, weight)


def kind_of(worker: Worker) -> Hashable:
    """Return all fields of a worker that a group of a fleet file has."""
    return (place_of(worker), *hardware_of(worker))


def hardware_of(worker: Worker) -> tuple[Hashable, ...]:
    """Return what cannot change of a worker while it runs, and a replay knows."""
    return (
        worker.role,
        worker.dp_size,
        tuple(listed_taints(worker.taints)),
        worker.kv_blocks,
        worker.kv_bytes_per_token,
        worker.max_num_seqs,
        worker.max_num_batched_tokens,
    )


def place_of(worker: Worker) -> Hashable:
    """Return its role and domains, which a fleet in place of the recorded one must have too."""
    return (worker.role, tuple(sorted(worker.domains.items())))


def group_place(group: WorkerGroup) -> Hashable:
    """Return the role and domains of a group, as :func:`place_of` has them."""
    return (group.role.value, tuple(sorted(group.domains.items())))


def group_content(worker: Worker, name: str) -> dict[str, Any]:
    """Return a worker as a group of a fleet file; what its card leaves out has the file's defaults."""
    engine = {
        "total_kv_blocks": worker.kv_blocks,
        "kv_bytes_per_token": worker.kv_bytes_per_token,
        "max_num_seqs": worker.max_num_seqs,
        "max_num_batched_tokens": worker.max_num_batched_tokens,
    }
    engine = {key: value for key, value in engine.items() if value is not None}
    made: dict[str, Any] = {"name": name, "role": worker.role}
    if worker.dp_size != 1:
        made["dp_size"] = worker.dp_size
    if worker.domains:
        made["domains"] = dict(worker.domains)
    if taints := own_taints(worker.taints):
        made["taints"] = taints
    if engine:
        made["engine"] = {"kind": "mock", **engine}
    return made


def main_policy(policies: Counter[Policy | None]) -> Policy | None:
    """Return the policy of most workers; of two with as many, the earlier one."""
    return policies.most_common(1)[0][0] if policies else None


def initial_policy(history: FleetHistory) -> Policy | None:
    """Return what most workers had at the first request."""
    return main_policy(Counter(policy_of(recorded.worker) for recorded in history.initial.values()))


def recorded_fleet(history: FleetHistory, recorded_in: str) -> RecordedFleet:
    """Return the workers at the first request as a fleet file of mock engines.

    Equal ones are in one group, named by its role. Raises ConfigError if the recording has no worker.
    """
    if not history.initial:
        raise ConfigError(
            f"{recorded_in}: no worker of {history.model} is recorded there; name a fleet with --fleet",
            param="fleet",
        )
    alike: defaultdict[Hashable, list[RecordedWorker]] = defaultdict(list)
    for name in sorted(history.initial, key=_by_number):
        alike[kind_of(history.initial[name].worker)].append(history.initial[name])
    groups: list[dict[str, Any]] = []
    origins: dict[Path, RecordedWorker] = {}
    numbers: dict[str, WorkerId] = {}
    group_of: dict[Hashable, str] = {}
    of_role: Counter[str] = Counter()
    for kind, members in alike.items():
        worker = members[0].worker
        role = "workers" if worker.role == "both" else worker.role
        of_role[role] += 1
        group_of[kind] = f"{role}-{of_role[role]}"
        origins["workers", len(groups)] = members[0]
        groups.append(group_content(worker, group_of[kind]) | {"replicas": len(members)})
        for recorded in members:
            numbers[recorded.worker.worker] = WorkerId(len(numbers) + 1)
    content: dict[str, object] = {
        "version": 1,
        "models": [
            {
                "name": history.model,
                "block_size": history.block_size,
                "context_length": max(
                    recorded.worker.context_length for recorded in history.initial.values()
                ),
            }
        ],
        "workers": groups,
    }
    if levels := _levels(history):
        content["topology"] = {"levels": levels}
    if (policy := initial_policy(history)) is not None:
        content["kv_transfer"] = policy.content
    name = f"the fleet recorded in {recorded_in}"
    numbering = Numbering(numbers, len(numbers), group_of, kind_of)
    return RecordedFleet(RecordedDocument(name, content, origins), numbering)


def match(history: FleetHistory, file: FleetFile) -> tuple[Numbering | None, str]:
    """Return the recorded workers' ids in a fleet, or why it does not fit: it must have as many of each role
    in the same domains, with any engines. Workers that are equal in this are matched in the order of their
    ids.
    """
    for level in _levels(history):
        if level not in file.topology.levels:
            return None, f"its topology.levels have no {level}, where recorded workers have one"
    here: defaultdict[Hashable, list[WorkerId]] = defaultdict(list)
    groups: dict[Hashable, str] = {}
    for worker_id, group in numbered_workers(file):
        here[group_place(group)].append(worker_id)
        groups.setdefault(group_place(group), group.name)
    n_workers = sum(map(len, here.values()))
    by_kind: defaultdict[Hashable, list[RecordedWorker]] = defaultdict(list)
    for name in sorted(history.initial, key=_by_number):
        by_kind[place_of(history.initial[name].worker)].append(history.initial[name])
    numbers: dict[str, WorkerId] = {}
    for kind, members in by_kind.items():
        ids = here.pop(kind, [])
        if len(ids) != len(members):
            recorded = members[0]
            why = (
                f"it has {len(ids)} workers like {_described(recorded.worker)}; {len(members)} were recorded"
            )
            return None, f"{why} ({recorded.place})"
        numbers.update(
            (recorded.worker.worker, worker_id) for recorded, worker_id in zip(members, ids, strict=True)
        )
    if here:
        more = sum(map(len, here.values()))
        return None, f"{more} of its workers have roles and domains that none had in the recording"
    return Numbering(numbers, n_workers, groups, place_of), ""


def _described(worker: Worker) -> str:
    domains = ", ".join(f"{level}={value}" for level, value in sorted(worker.domains.items()))
    return f"worker {worker.worker}: {worker.role}" + (f", {domains}" if domains else "")


def _by_number(name: str) -> tuple[int, str]:
    return (int(name) if name.isdecimal() else 0, name)


def _levels(history: FleetHistory) -> list[str]:
    """Return every level of the workers, broadest first: as in their cards, else by the number of values."""
    levels: dict[str, None] = {}
    values: defaultdict[str, set[str]] = defaultdict(set)
    for recorded in history.recorded:
        levels.update(dict.fromkeys(recorded.worker.levels))
        for level, value in recorded.worker.domains.items():
            values[level].add(value)
        if recorded.worker.transfer_domain is not None:
            values.setdefault(recorded.worker.transfer_domain, set())
    others = sorted(values.keys() - levels.keys(), key=lambda level: (len(values[level]), level))
    return [*levels, *others]
