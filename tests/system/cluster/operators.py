"""Operators as processes, and deployments for them."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import RACK, ZONES
from tests.testing.helm_chart import FILLED, OF_ROLES, is_hook, rendered
from tests.testing.processes import Metrics, eventually

CRDS = Path(__file__).parents[3] / "deploy" / "crds"
IMAGE = "example.com/kvrouter:test"
ENDS_WITHIN_S = 120.0
WAIT = "--timeout=240s"
FAR_S = 3000.0
"""A lease that no test outlives."""

LATE = "operator_pods_labelled_late_total"
"""The metric of pods that got their place after their binding."""


def install_crds(plane: ControlPlane) -> None:
    """Install the definitions that the project ships; returns once kubectl knows their kinds."""
    paths = sorted(CRDS.glob("*_*.yaml"))
    files = [word for path in paths for word in ("--filename", str(path))]
    plane.kubectl("apply", "--server-side", *files)
    plane.kubectl("wait", "--for=condition=Established", *files, WAIT)
    plane.until_served(
        *(f"{plural}.{group}" for group, _, plural in (path.stem.partition("_") for path in paths))
    )


def account_with_roles(plane: ControlPlane, namespace: str, name: str, **values: object) -> Path:
    """Make a service account with the roles that the chart has for it, and what they name; answers with its
    kubeconfig.
    """
    given = {"serviceAccount": {"name": name}, **values}
    manifests = [
        each
        for each in rendered(given, namespace=namespace)
        if each["kind"] in OF_ROLES | FILLED and not is_hook(each)
    ]
    plane.apply(*manifests)
    return plane.account_kubeconfig(namespace, name)


class Operator:
    """One replica."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text()

    def port(self, kind: str) -> int:
        """The port of its plain door (``http``) or of its admission door, once it is open."""
        found = re.search(rf" ready kind={kind} .*?port=(\d+)", self.log)
        assert found is not None
        return int(found[1])

    async def metrics(self) -> Metrics:
        """``GET /metrics`` of its plain door: unlike the log, it has what was done a moment ago."""
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.get(f"http://127.0.0.1:{self.port('http')}/metrics")
        return Metrics(answer.raise_for_status().text)

    @property
    def is_leading(self) -> bool:
        """Whether it wrote last that it leads."""
        reported = [
            line for line in self.log.splitlines() if "operator_leads" in line or "operator_follows" in line
        ]
        return bool(reported) and "operator_leads" in reported[-1]

    async def end(self, *, at_once: bool = False) -> int:
        """End it, in good order unless ``at_once``; answers with its exit code.

        One that ends in good order gives its lease back: whoever comes next need not wait until it runs out.
        """
        if self.process.returncode is None:
            (self.process.kill if at_once else self.process.terminate)()
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                return await self.process.wait()
        finally:
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()


@asynccontextmanager
async def operator(
    plane: ControlPlane, namespace: str, name: str, *more: str, kubeconfig: Path | None = None
) -> AsyncIterator[Operator]:
    """A replica that looks after this namespace, as the administrator unless stated otherwise."""
    log = plane.folder / "logs" / f"operator-{namespace}-{name}.log"
    argv = (
        *("--kubeconfig", str(kubeconfig or plane.admin), "--namespace", namespace, "--image", IMAGE),
        *("--lease-namespace", namespace, "--host", "127.0.0.1", "--http-port", "0", *more),
    )
    async with AsyncExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.cli", "operator", "run", *argv),
            stdout=output,
            stderr=output,
            env={**os.environ, "POD_NAME": name},
        )
        replica = Operator(process, log)
        stack.push_async_callback(replica.end)
        yield replica


def wait_for(plane: ControlPlane, namespace: str, condition: str, name: str = "llm") -> None:
    """Return once a deployment has this condition: ``Ready``, or ``Ready=False``."""
    plane.kubectl("wait", f"--for=condition={condition}", f"dgd/{name}", "--namespace", namespace, WAIT)


def events(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """The events of a namespace."""
    found: list[dict[str, Any]] = plane.read("events", "--namespace", namespace)["items"]
    return found


def reasons(plane: ControlPlane, namespace: str) -> set[str]:
    """The reasons of its events."""
    return {event["reason"] for event in events(plane, namespace)}


async def until_recorded(plane: ControlPlane, namespace: str, reason: str) -> None:
    """Return once there is an event of this reason: events are written after the status."""

    async def is_recorded() -> bool:
        return reason in reasons(plane, namespace)

    await eventually(is_recorded)


def generations(plane: ControlPlane, namespace: str) -> dict[str, int]:
    """How often the spec of each Deployment was written."""
    found = plane.read("deployments", "--namespace", namespace)["items"]
    return {each["metadata"]["name"]: each["metadata"]["generation"] for each in found}


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """The Deployments whose spec was written between two looks."""
    return {name for name in after if before.get(name) != after[name]}


async def until_replaced(plane: ControlPlane, namespace: str, component: str) -> None:
    """Delete the pods of a component; return once as many others are Ready."""
    where = ("--selector", f"kvrouter.dev/component={component}", "--namespace", namespace)
    before = {each["metadata"]["uid"] for each in plane.read("pods", *where)["items"]}
    plane.kubectl("delete", "pods", *where)

    async def are_ready() -> bool:
        pods = [each for each in plane.read("pods", *where)["items"] if each["metadata"]["uid"] not in before]
        conditions = [each["status"].get("conditions", []) for each in pods]
        ready = [c for each in conditions for c in each if (c["type"], c["status"]) == ("Ready", "True")]
        return len(ready) == len(before)

    await eventually(are_ready)


def graph(namespace: str, name: str, **policy: object) -> dict[str, Any]:
    """A deployment of one frontend, three prefill workers and three decode workers.

    Where racks are its domains, both kinds go to the first rack of each zone: the scheduler is free to choose
    another one for each, and then a rack has prefill workers alone.
    """
    spread = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule",
    }

    def workers(kind: str) -> dict[str, Any]:
        selector = {"matchLabels": {"kvrouter.dev/deployment": name, "kvrouter.dev/component": kind}}
        main = {"name": "main", "args": ["worker", "mock", "--role", kind]}
        pod: dict[str, Any] = {
            "containers": [main],
            "topologySpreadConstraints": [{**spread, "labelSelector": selector}],
        }
        if policy.get("domain") == "rack":
            first = {"key": RACK, "operator": "In", "values": [f"{zone}-rack-0" for zone in ZONES]}
            terms = {"nodeSelectorTerms": [{"matchExpressions": [first]}]}
            pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        return {"name": kind, "type": kind, "replicas": 3, "podTemplate": {"spec": pod}}

    spec: dict[str, Any] = {
        "components": [{"name": "frontend", "type": "frontend"}, workers("prefill"), workers("decode")]
    }
    if policy:
        spec["experimental"] = {"kvTransferPolicy": policy}
    metadata = {"namespace": namespace, "name": name}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata,
        "spec": spec,
    }


def autoscaler(namespace: str, deployment: str, at_least: int, at_most: int) -> dict[str, Any]:
    """What scales a Deployment by its pods' memory."""
    memory = {"name": "memory", "target": {"type": "AverageValue", "averageValue": "100Mi"}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
        "minReplicas": at_least,
        "maxReplicas": at_most,
        "metrics": [{"type": "Resource", "resource": memory}],
        "behavior": {"scaleUp": {"stabilizationWindowSeconds": 0}},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"namespace": namespace, "name": deployment},
        "spec": spec,
    }


def card(
    namespace: str,
    number: int,
    role: str,
    zone: str,
    *,
    draining: bool = False,
    lease_s: float = FAR_S,
    pod: Mapping[str, Any] | None = None,
    version: str = "",
) -> dict[str, Any]:
    """A worker's object, as the worker writes it: that of a pod where it runs in one, and with the version of
    its engine where KV formats compare it.
    """
    fleet = f"{namespace}_llm"
    config: dict[str, Any] = {"topology_domains": {"zone": zone}, "kv_format": {"version": version}}
    if role == "prefill":
        config |= {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}
    said = {"model": "llama", "role": role, "draining": draining, "runtime_config": config}
    owned = {} if pod is None else {"ownerReferences": [owner(pod)]}
    return {
        "apiVersion": "kvrouter.dev/v1alpha1",
        "kind": "KvrouterWorker",
        "metadata": {
            "namespace": namespace,
            "name": f"{fleet.replace('_', '.')}-{number}",
            "labels": {"kvrouter.dev/namespace": fleet},
            **owned,
        },
        "spec": {"card": said, "lease_s": lease_s, "withdrawn": False},
    }


def owner(pod: Mapping[str, Any]) -> dict[str, str]:
    """The reference of what ends with a pod."""
    metadata = pod["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
