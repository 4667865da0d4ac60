"""A container's own probes, asked as a kubelet asks them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from tests.system.cluster.kubelet.container import Container
from tests.system.cluster.kubelet.fields import NotPlayedError

HURRY = 10.0
"""Periods of probes pass so many times faster than a kubelet's, since tests wait for them. A container is
killed after so many times more of them, and so no sooner than by a kubelet: this machine may be busy. So an
answer may take so many times longer, too.
"""


async def probe(container: Container, address: str) -> None:
    """Tell the container what its probes find, until it is cancelled; kill it when they say so.

    Without a startup probe it is started at once, and without a readiness probe it is ready when started.
    """
    spec = container.spec
    async with httpx.AsyncClient() as client:
        if "startupProbe" in spec and not await anext(_found(client, container, "startupProbe", address)):
            container.kill()
            return
        container.reported(is_started=True, is_ready="readinessProbe" not in spec)
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in spec:
                group.create_task(_follow(container, _found(client, container, "readinessProbe", address)))
            if "livenessProbe" in spec:
                group.create_task(_guard(container, _found(client, container, "livenessProbe", address)))


async def _follow(container: Container, readiness: AsyncIterator[bool]) -> None:
    async for is_ready in readiness:
        if is_ready != container.is_ready:
            container.reported(is_ready=is_ready)


async def _guard(container: Container, liveness: AsyncIterator[bool]) -> None:
    async for is_alive in liveness:
        if not is_alive:
            container.kill()


async def _found(
    client: httpx.AsyncClient, container: Container, name: str, address: str
) -> AsyncIterator[bool]:
    """Yield what a probe found each time that it was found often enough in a row."""
    spec = container.spec[name]
    if "httpGet" not in spec:
        raise NotPlayedError(f"a {name} without httpGet")
    asked = spec["httpGet"]
    url = f"http://{address}:{_port(container.spec, asked['port'])}{asked.get('path', '/')}"
    failures = spec.get("failureThreshold", 3) * (1 if name == "readinessProbe" else HURRY)
    needed = {True: spec.get("successThreshold", 1), False: failures}
    in_a_row, last = 0, False
    while True:
        found = await _passes(client, url, spec.get("timeoutSeconds", 1) * HURRY)
        container.probes[name] += 1
        in_a_row = in_a_row + 1 if found is last else 1
        last = found
        if in_a_row >= needed[found]:
            yield found
        await asyncio.sleep(spec.get("periodSeconds", 10) / HURRY)


async def _passes(client: httpx.AsyncClient, url: str, within_s: float) -> bool:
    asking = asyncio.create_task(client.get(url, timeout=within_s))
    try:
        answer = await asyncio.shield(asking)
    except httpx.HTTPError:
        return False
    except asyncio.CancelledError:
        # One that is cancelled while it connects would leave its connection to nobody.
        await asyncio.gather(asking, return_exceptions=True)
        raise
    return 200 <= answer.status_code < 400


def _port(spec: Mapping[str, Any], port: int | str) -> int:
    named = {each.get("name"): each["containerPort"] for each in spec.get("ports", [])}
    return port if isinstance(port, int) else int(named[port])
