"""What the chart installs, on a control plane: its pods' containers run as processes of this machine."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.operators import WAIT, Operator
from tests.testing.helm_chart import Manifest
from tests.testing.processes import eventually, free_ports

NAME = "kvrouter-operator"
DOOR = "http://127.0.0.1"
REFERENCE = re.compile(r"\$\(([A-Z_]+)\)")
NO_SUCH_KIND = (
    "the server doesn't have a resource type",
    "could not find the requested resource",
    "(NotFound)",
)
OF_EVERY_NAMESPACE = {"ConfigMap kube-root-ca.crt", "ServiceAccount default"}


def reachable() -> dict[str, Any]:
    """Values with ports of this machine that nobody has, the same on the Service and behind it."""
    port = free_ports(2)
    return {
        "admission": {"port": port, "servicePort": port},
        "metrics": {"port": port + 1},
        "logFormat": "text",
    }


def lead(plane: ControlPlane, namespace: str) -> None:
    """Lead the API server's calls through the chart's Service to this machine, once its pods are there."""
    plane.kubectl("rollout", "status", f"deployment/{NAME}", "--namespace", namespace, WAIT)
    patch = '{"spec": {"type": "ExternalName", "externalName": "localhost", "selector": null}}'
    plane.kubectl("patch", "service", NAME, "--namespace", namespace, "--type=merge", "--patch", patch)


@asynccontextmanager
async def operator_as_deployed(plane: ControlPlane, namespace: str, name: str) -> AsyncIterator[Operator]:
    """One replica, ready: the Deployment's own container, as its service account, with no other right.

    Flags are the container's own, and how to reach the API server.
    """
    spec = plane.read("deployment", NAME, "--namespace", namespace)["spec"]["template"]["spec"]
    argv, environ = _words(spec, {"metadata.name": name, "metadata.namespace": namespace})
    account = plane.account_kubeconfig(namespace, spec["serviceAccountName"])
    log = plane.folder / "logs" / f"{namespace}-{name}.log"
    (container,) = spec["containers"]
    port = next(entry["containerPort"] for entry in container["ports"] if entry["name"] == "http")
    path = container["readinessProbe"]["httpGet"]["path"]
    async with AsyncExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *argv, "--kubeconfig", str(account), stdout=output, stderr=output, env=environ
        )
        replica = Operator(process, log)
        stack.push_async_callback(replica.end)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"{DOOR}:{port}", timeout=60.0))

        async def is_ready() -> bool:
            assert process.returncode is None, replica.log
            try:
                return (await client.get(path)).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(is_ready)
        yield replica


async def run_job(plane: ControlPlane, namespace: str, job: Mapping[str, Any]) -> str:
    """Run a Job's container as its service account; answers with what it wrote."""
    spec = job["spec"]["template"]["spec"]
    argv, environ = _words(spec, {"metadata.namespace": namespace})
    account = plane.account_kubeconfig(namespace, spec["serviceAccountName"])
    process = await asyncio.create_subprocess_exec(
        *argv, "--kubeconfig", str(account), stdout=asyncio.subprocess.PIPE, env=environ
    )
    reported, _ = await process.communicate()
    assert process.returncode == 0
    return reported.decode()


def left_over(plane: ControlPlane, namespace: str) -> set[str]:
    """What there is that no other namespace has: in this one, and of ours in the whole cluster."""
    found = set()
    kinds = plane.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    for kind in kinds:
        if kind.partition(".")[0] == "events":
            continue
        items = _all_of(plane, kind, "--namespace", namespace)
        found |= {f"{each['kind']} {each['metadata']['name']}" for each in items}
    kinds = plane.kubectl("api-resources", "--namespaced=false", "--verbs=list", "--output=name").split()
    for kind in kinds:
        items = _all_of(plane, kind)
        names = {f"{each['kind']} {each['metadata']['name']}" for each in items}
        found |= {name for name in names if "kvrouter" in name}
    return found - OF_EVERY_NAMESPACE


def _all_of(plane: ControlPlane, kind: str, *where: str) -> list[Manifest]:
    """The objects of a kind; none of one whose definition was deleted since the kinds were listed."""
    try:
        found: list[Manifest] = plane.read(kind, *where)["items"]
    except KubectlError as error:
        if any(words in error.said for words in NO_SUCH_KIND):
            return []
        raise
    return found


def _words(spec: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line of a pod's only container, and its environment."""
    (container,) = spec["containers"]
    reported = {
        entry["name"]: entry["value"]
        if "value" in entry
        else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container.get("env", [])
    }
    line: list[str] = [*container["command"], *container["args"]]
    assert line[0] == "kvrouter"
    words = [REFERENCE.sub(lambda found: reported[found[1]], word) for word in line[1:]]
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return [sys.executable, "-m", "kvrouter.cli", *words], {**kept, **reported}
