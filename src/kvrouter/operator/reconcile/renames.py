"""Components that are planned no more stay while others of their role start: as after a change of name."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from kvrouter.kube.objects import Manifest, key_of, metadata_of
from kvrouter.operator.plan import COMPONENT_LABEL, TYPE_LABEL
from kvrouter.operator.plan.manifest import mapping

_TIME = "%Y-%m-%dT%H:%M:%SZ"


class Held(NamedTuple):
    """The components whose objects stay though they are planned no more, and in how many seconds the first of
    them goes in any case; None where none stays.
    """

    components: frozenset[str]
    ends_s: float | None


def held_components(
    there: Sequence[Manifest], planned: Iterable[str], roles: Iterable[str], now: datetime, hold_s: float
) -> Held:
    """Return the components of the workloads ``there`` that are not ``planned``, by their names, while a
    planned one of the same role has come within ``hold_s`` and has not all of its pods Ready. ``roles`` are
    those of planned workloads that are yet to be created.
    """
    names = frozenset(planned)
    ends: dict[str, float] = dict.fromkeys(roles, hold_s)
    for workload in there:
        left_s = hold_s - (now - _created(workload, now)).total_seconds()
        if key_of(workload).name in names and left_s > 0 and not _is_ready(workload):
            role = _label(workload, TYPE_LABEL)
            ends[role] = max(left_s, ends.get(role, 0.0))
    gone = [each for each in there if key_of(each).name not in names]
    held = {_label(each, COMPONENT_LABEL): ends.get(_label(each, TYPE_LABEL)) for each in gone}
    lasting = {component: ends_s for component, ends_s in held.items() if component and ends_s is not None}
    return Held(frozenset(lasting), min(lasting.values(), default=None))


def _label(workload: Manifest, name: str) -> str:
    return str(mapping(metadata_of(workload).get("labels")).get(name) or "")


def _created(workload: Manifest, now: datetime) -> datetime:
    try:
        return datetime.strptime(str(metadata_of(workload).get("creationTimestamp")), _TIME).replace(
            tzinfo=UTC
        )
    except ValueError:
        return now


def _is_ready(workload: Manifest) -> bool:
    """Whether all pods that it states are Ready, and of its last template."""
    spec, status = mapping(workload.get("spec")), mapping(workload.get("status"))
    wanted = _number(spec.get("replicas"), usual=1)
    is_seen = _number(status.get("observedGeneration")) >= _number(metadata_of(workload).get("generation"))
    return is_seen and all(_number(status.get(n)) >= wanted for n in ("readyReplicas", "updatedReplicas"))


def _number(found: object, *, usual: int = 0) -> int:
    return found if isinstance(found, int) else usual
