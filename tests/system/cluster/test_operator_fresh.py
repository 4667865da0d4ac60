"""A fresh install, in the order in which people do it, and what a second writer of the deployments sees."""

import asyncio
import json
from pathlib import Path

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import (
    WAIT,
    account_with_roles,
    changed,
    generations,
    graph,
    install_crds,
    operator,
)
from tests.system.cluster.preflighted import preflight
from tests.testing.console_examples import steps_of

DOCS = Path(__file__).parents[3] / "docs"
GITOPS = ("--server-side", "--field-manager=argocd-controller", "--filename", "-")
"""As Argo CD and Flux write: server-side, as a field manager of their own."""


def test_preflight_prints_the_output_on_the_page(own_plane: ControlPlane) -> None:
    (step,) = (
        step for step in steps_of(DOCS / "kubernetes-install.md") if "operator preflight" in step.command
    )
    code, written = preflight(own_plane)
    assert code == 0
    assert tuple(written.splitlines()) == step.shown


async def test_a_fresh_install_logs_no_cluster_lost(own_plane: ControlPlane) -> None:
    plane = own_plane
    with new_namespace(plane) as namespace:
        account = account_with_roles(plane, namespace, "kvrouter-operator")
        async with operator(plane, namespace, "one", kubeconfig=account) as replica:
            await asyncio.to_thread(install_crds, plane)
            await asyncio.to_thread(plane.apply, graph(namespace, "llm"))
            wait = ("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
            await asyncio.to_thread(plane.kubectl, *wait)
            assert [line for line in replica.log.splitlines() if "cluster_lost" in line] == []


async def test_another_field_manager_sees_no_difference_after_reconciling(own_plane: ControlPlane) -> None:
    plane = own_plane
    install_crds(plane)
    with new_namespace(plane) as namespace:
        stored = json.dumps(graph(namespace, "llm", labelKey="topology.kubernetes.io/zone", domain="zone"))

        def read() -> tuple[int, dict[str, int]]:
            found = plane.read("dgd", "llm", "--namespace", namespace)
            return found["metadata"]["generation"], generations(plane, namespace)

        async with operator(plane, namespace, "one"):
            await asyncio.to_thread(plane.kubectl, "apply", *GITOPS, stdin=stored)
            wait = ("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
            await asyncio.to_thread(plane.kubectl, *wait)
            generation, workloads = read()
            assert generation == 1, "the operator never writes the spec"
            tried = ("apply", "--dry-run=server", "--output", "json", *GITOPS)
            would_be = json.loads(await asyncio.to_thread(plane.kubectl, *tried, stdin=stored))
            live = plane.read("dgd", "llm", "--namespace", namespace)
            assert would_be["spec"] == live["spec"], "what a controller compares before it writes"
            for _ in range(3):
                await asyncio.to_thread(plane.kubectl, "apply", *GITOPS, stdin=stored)
            labelled = json.loads(stored)
            labelled["metadata"]["labels"] = {"app.kubernetes.io/instance": "fleets"}
            await asyncio.to_thread(plane.kubectl, "apply", *GITOPS, stdin=json.dumps(labelled))
            again, after = read()
            assert (again, changed(workloads, after)) == (1, set())
            status = plane.read("dgd", "llm", "--namespace", namespace)["status"]
            ready = next(each for each in status["conditions"] if each["type"] == "Ready")
            assert (ready["status"], status["observedGeneration"]) == ("True", generation)
