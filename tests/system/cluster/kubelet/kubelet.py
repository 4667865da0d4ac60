"""Which pods are played, and that nothing of them outlives a test."""

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from itertools import count
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.kubelet.api import Api, ApiError, Object
from tests.system.cluster.kubelet.pod import AGAIN_S, Machine, PlayedPod
from tests.system.cluster.pods import BY_HAND
from tests.system.cluster.together import Together
from tests.testing.service_variables import Service, ServicePort

SELECTOR = ",".join(f"{key}={value}" for key, value in BY_HAND.items())


class Kubelet:
    """Plays every pod of a namespace that KWOK leaves alone, on whatever node it was bound to.

    What a pod becomes follows from the stored pod alone: its containers' words, its own fields, the token of
    its service account. But there are no containers: each is a process of this machine, with an address of
    its own out of 127.0.0.0/8, and the paths of its mounts are rewritten to folders of the test.
    """

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.pods: dict[str, PlayedPod] = {}
        """Those that are there, by uid."""
        self.first_seen: dict[str, Object] = {}
        """Each pod, by name, as the first event showed it that reported its node."""
        self._plane = plane
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._files_come = asyncio.Event()
        self._files_come.set()
        self._addresses = _addresses()
        self._stack = AsyncExitStack()
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-kubelet-")))
        together = Together()
        self._stack.callback(together.kill)
        url = urlsplit(self._plane.url)
        self._machine = Machine(
            api=await self._stack.enter_async_context(Api(self._plane)),
            folder=folder,
            logs=self._plane.folder / "logs",
            group=together.group,
            server=Service("kubernetes", str(url.hostname), (ServicePort(url.port or 443, "https"),)),
            files_come=self._files_come,
        )
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._stack:
            following = self._following
            if following is not None:
                following.cancel()
                await asyncio.wait([following])
            await asyncio.gather(*(pod.close() for pod in self.pods.values()))
            if following is not None and not following.cancelled():
                following.result()

    def hold_files(self) -> None:
        """From now on the files of the Downward API come late: not before :meth:`release_files`."""
        self._files_come.clear()

    def release_files(self) -> None:
        """Let them come."""
        self._files_come.set()
        for pod in self.pods.values():
            pod.refresh()

    def of(self, component: str) -> list[PlayedPod]:
        """Return the pods of a deployment's component that nobody deletes."""
        pods = self.pods.values()
        return [
            pod
            for pod in pods
            if pod.labels.get("kvrouter.dev/component") == component and not pod.is_deleted
        ]

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except ApiError:
                await asyncio.sleep(AGAIN_S)

    async def _look(self) -> None:
        """List, then watch from there, until the watch ends."""
        found = await self._machine.api.read(self._path, labelSelector=SELECTOR)
        uids = {pod["metadata"]["uid"] for pod in found["items"]}
        for pod in found["items"]:
            self._see(pod)
        for uid in [uid for uid in self.pods if uid not in uids]:
            await self.pods.pop(uid).close()
        version = found["metadata"]["resourceVersion"]
        watch = self._machine.api.watch(self._path, version, labelSelector=SELECTOR)
        async with aclosing(watch):
            async for kind, thing in watch:
                if kind == "ERROR":
                    return
                if kind != "DELETED":
                    self._see(thing)
                elif (gone := self.pods.pop(thing["metadata"]["uid"], None)) is not None:
                    await gone.close()

    def _see(self, stored: Object) -> None:
        uid = stored["metadata"]["uid"]
        if "nodeName" not in stored["spec"]:
            return
        self.first_seen.setdefault(stored["metadata"]["name"], stored)
        if uid in self.pods:
            self.pods[uid].see(stored)
        else:
            self.pods[uid] = PlayedPod(self._machine, stored, next(self._addresses))


def _addresses() -> Iterator[str]:
    """Addresses of loopback that hardly anybody else has."""
    net = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
    return (f"{net}.{host}" for host in count(1))
