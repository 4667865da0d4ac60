"""Every row of the page's table of mistakes, with kubectl: what comes back names the field and the fix."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from tests.system.cluster.admission_rows import (
    BY_LABEL,
    BY_THE_DEFINITION,
    IN_FABRIC,
    UNREAD,
    WARNED,
    WITH_GROVE,
    WITHOUT_GROVE,
    WORKERS,
    Case,
    Fields,
    of_frontend,
    spec,
)
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.grove import BINDING, install_grove, topology
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK, ZONE
from tests.system.cluster.operators import account_with_roles, install_crds
from tests.system.cluster.webhooks import SERVICE, judging

pytestmark = pytest.mark.api_server

OLDER = "ClusterTopology"
LEVELS = {"zone": ZONE, "rack": RACK}
_numbers = count(1)


def rows(table: dict[str, list[Case]]) -> list[Any]:
    """Each case, called by its row."""
    return [
        pytest.param(case, id=f"{row}-{i}") for row, cases in table.items() for i, case in enumerate(cases)
    ]


def manifest(namespace: str, name: str, fields: Fields) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"namespace": namespace, "name": name},
        "spec": fields,
    }


def refused(plane: ControlPlane, namespace: str, case: Case) -> None:
    """Apply it, and read what kubectl tells."""
    name = case.name or f"row-{next(_numbers)}"
    if case.before:
        plane.apply(manifest(namespace, name, case.before))
    with pytest.raises(KubectlError) as error:
        plane.apply(manifest(namespace, name, case.spec))
    assert [words for words in case.reported if words not in error.value.said] == [], error.value.said


@pytest.fixture(scope="module")
def plane(own_plane: ControlPlane) -> ControlPlane:
    """One where no other test installs Grove."""
    install_crds(own_plane)
    return own_plane


@pytest.fixture(scope="module")
def nobodys(plane: ControlPlane) -> Iterator[str]:
    """A namespace of which no webhook is asked."""
    with new_namespace(plane) as namespace:
        yield namespace


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def namespace(plane: ControlPlane) -> AsyncIterator[str]:
    """A namespace whose deployments an operator judges, who may read everything."""
    async with judged(plane) as namespace:
        yield namespace


@pytest.fixture(scope="module")
def grove(plane: ControlPlane) -> None:
    """From now on Grove is there, in both of its spellings."""
    for kind in (BINDING, OLDER):
        install_grove(plane, kind)
    plane.apply(topology("fabric", LEVELS), topology("older", LEVELS, OLDER))


@asynccontextmanager
async def judged(plane: ControlPlane, **values: Any) -> AsyncIterator[str]:
    """Such a namespace; the operator has the chart's roles with these values, if there are any."""
    with new_namespace(plane) as namespace:
        account = account_with_roles(plane, namespace, SERVICE, **values) if values else None
        async with judging(plane, namespace, account):
            yield namespace


@pytest.mark.parametrize("case", rows(BY_THE_DEFINITION))
def test_the_definition_refuses_mistakes_without_an_operator(
    plane: ControlPlane, nobodys: str, case: Case
) -> None:
    refused(plane, nobodys, case)


@pytest.mark.parametrize("case", rows(WITHOUT_GROVE))
def test_grove_references_are_refused_without_grove(plane: ControlPlane, namespace: str, case: Case) -> None:
    refused(plane, namespace, case)


@pytest.mark.parametrize(
    "fields",
    [
        spec(WORKERS),
        spec(WORKERS, **IN_FABRIC),
        spec(of_frontend(level="zone", label=ZONE)),
        spec(of_frontend(level="zone", label=ZONE), **IN_FABRIC),
        spec(WORKERS, experimental={"kvTransferPolicy": BY_LABEL}),
    ],
)
def test_deployments_without_grove_references_are_admitted_silently(
    plane: ControlPlane, namespace: str, fields: Fields
) -> None:
    assert plane.apply(manifest(namespace, f"row-{next(_numbers)}", fields)) == []


@pytest.mark.usefixtures("grove")
@pytest.mark.parametrize("case", rows(WITH_GROVE))
def test_missing_grove_topologies_and_levels_are_refused(
    plane: ControlPlane, namespace: str, case: Case
) -> None:
    refused(plane, namespace, case)


@pytest.mark.usefixtures("grove")
@pytest.mark.parametrize("kind", [BINDING, OLDER])
@pytest.mark.parametrize("spelling", ["key", "labelKey"])
def test_both_topology_kinds_are_read_in_both_spellings(
    plane: ControlPlane, namespace: str, kind: str, spelling: str
) -> None:
    name = f"{kind}-{spelling}".lower()
    described = topology(name, LEVELS, kind)
    described["spec"]["levels"] = [{"domain": domain, spelling: key} for domain, key in LEVELS.items()]
    plane.apply(described)
    policy = {"clusterTopologyName": name, "domain": "rack"}
    with plane.deleting(f"{kind.lower()}.grove.io", name):
        for fields in (
            spec(WORKERS, experimental={"kvTransferPolicy": policy}),
            spec(of_frontend(level="rack"), topologyConstraint={"clusterTopologyName": name}),
        ):
            assert plane.apply(manifest(namespace, f"row-{next(_numbers)}", fields)) == []


@pytest.mark.usefixtures("grove")
@pytest.mark.parametrize("case", rows({"warned": WARNED}))
def test_odd_deployments_are_admitted_with_a_kubectl_warning(
    plane: ControlPlane, namespace: str, case: Case
) -> None:
    (warning,) = plane.apply(manifest(namespace, f"row-{next(_numbers)}", case.spec))
    assert [words for words in case.reported if words not in warning] == [], warning


def test_an_unknown_field_is_refused_by_name(plane: ControlPlane, nobodys: str) -> None:
    fields = spec(WORKERS, experimental={"kvTransferPolcy": {}})
    with pytest.raises(KubectlError, match=r"spec\.experimental\.kvTransferPolcy: field not declared"):
        plane.apply(manifest(nobodys, "llm", fields))


@pytest.mark.usefixtures("grove")
def test_policies_may_change_and_a_deleted_topology_allows_scaling(
    plane: ControlPlane, namespace: str
) -> None:
    plane.apply(topology("passing", LEVELS))
    fields = spec(WORKERS)
    steps: list[Fields] = [
        {},
        {"kvTransferPolicy": BY_LABEL},
        {"kvTransferPolicy": {"clusterTopologyName": "passing", "domain": "zone", "enforcement": "fallback"}},
        {"kvTransferPolicy": {"clusterTopologyName": "passing", "domain": "rack"}},
    ]
    for experimental in steps:
        assert plane.apply(manifest(namespace, "steps", {**fields, "experimental": experimental})) == []
    plane.kubectl("delete", "clustertopologybinding", "passing")
    grown = [*WORKERS[:2], {**WORKERS[2], "replicas": 1}]
    kept = {"components": grown, "experimental": steps[-1]}
    (warning,) = plane.apply(manifest(namespace, "steps", kept))
    assert "no ClusterTopologyBinding or ClusterTopology 'passing' is in this cluster" in warning
    changed = {"kvTransferPolicy": {"clusterTopologyName": "passing", "domain": "zone"}}
    with pytest.raises(KubectlError, match="'passing' is in this cluster"):
        plane.apply(manifest(namespace, "steps", {**kept, "experimental": changed}))


@pytest.mark.usefixtures("grove")
async def test_an_unreadable_grove_is_not_taken_as_absent(plane: ControlPlane) -> None:
    async with judged(plane, rbac={"nodes": False}) as namespace:
        for cases in UNREAD.values():
            for case in cases:
                refused(plane, namespace, case)
        assert plane.apply(manifest(namespace, "llm", spec(WORKERS))) == []
