"""One pod, from its binding to its end."""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.system.cluster.kubelet.api import GONE, Api, ApiError, Object
from tests.system.cluster.kubelet.container import Container, Launch, argv_of, now
from tests.system.cluster.kubelet.fields import NotPlayedError, Outside, expanded, field
from tests.system.cluster.kubelet.probes import probe
from tests.system.cluster.kubelet.volumes import Volumes
from tests.testing.service_variables import Service, service_variables

AGAIN_S = 0.2
"""After so long, and ever later, what failed is tried again."""

AGAIN_MAX_S = 5.0
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
ACCOUNT_VARIABLE = "KVROUTER_KUBERNETES_ACCOUNT"
CONDITIONS = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """What the pods of one kubelet share."""

    api: Api
    folder: Path
    logs: Path
    group: int
    server: Service
    """The API server, as containers get it."""

    files_come: asyncio.Event
    """While it is not set, volumes of the Downward API are empty."""


class PlayedPod:
    """``stored`` is the pod as the API server showed it last."""

    def __init__(self, machine: Machine, stored: Object, address: str) -> None:
        self.stored = stored
        self.address = address
        self.name: str = stored["metadata"]["name"]
        self.uid: str = stored["metadata"]["uid"]
        self._machine = machine
        self.root = machine.folder / self.uid
        self.root.mkdir()
        self._volumes = Volumes(self.root / "volumes", machine.api, address)
        self._changed = asyncio.Event()
        self._began = now()
        self._is_mounted = False
        self._ending = asyncio.Event()
        self._conditions: dict[str, Object] = {}
        spec = stored["spec"]
        self.init_containers = self._containers(spec.get("initContainers", []))
        self.containers = self._containers(spec["containers"])
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self._tell())]

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels as they are stored."""
        found: Mapping[str, str] = self.stored["metadata"].get("labels", {})
        return found

    @property
    def is_ready(self) -> bool:
        """Whether the API server says so, and nobody deletes it: then its Services lead to it."""
        conditions = self.stored.get("status", {}).get("conditions", [])
        is_reported = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        return is_reported and not self.is_deleted

    @property
    def is_deleted(self) -> bool:
        """Whether somebody deletes it."""
        return "deletionTimestamp" in self.stored["metadata"]

    def volume(self, name: str) -> Path:
        """Return where a volume is."""
        return self._volumes.folder(name)

    def see(self, stored: Object) -> None:
        """Follow the pod: its labels in files, and its end."""
        self.stored = stored
        self.refresh()
        if self.is_deleted and not self._ending.is_set():
            self._ending.set()
            self._tasks.append(asyncio.create_task(self._end()))

    def refresh(self) -> None:
        """Show what its fields are now, where they are shown at all yet."""
        if self._is_mounted:
            self._volumes.refresh(self.stored, holds_fields=not self._machine.files_come.is_set())

    async def close(self) -> None:
        """End its processes at once, and all work for it."""
        self._ending.set()
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def _live(self) -> None:
        await _again(self._mount)
        self._is_mounted = True
        self.refresh()
        for container in self.init_containers:
            if container.spec.get("restartPolicy"):
                raise NotPlayedError(f"{container.name}: an init container that stays")
            await self._run(container, until_it_succeeds=True)
        async with asyncio.TaskGroup() as group:
            for container in self.containers:
                group.create_task(self._run(container))

    async def _mount(self) -> None:
        await self._volumes.mount(self.stored, holds_fields=not self._machine.files_come.is_set())

    async def _run(self, container: Container, *, until_it_succeeds: bool = False) -> None:
        """Run it, and again whenever it ended, ever later."""
        again_s = AGAIN_S
        while not self._ending.is_set():
            launch = await _again(lambda: self._launch(container))
            probing = None if until_it_succeeds else asyncio.create_task(probe(container, self.address))
            try:
                code = await container.run(launch)
            finally:
                if probing is not None:
                    probing.cancel()
                    with suppress(asyncio.CancelledError):
                        await probing
            if self._ending.is_set() or (until_it_succeeds and not code):
                return
            container.wait_for("CrashLoopBackOff")
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MAX_S)

    async def execute(self, words: Sequence[str]) -> tuple[int, str]:
        """Run a program in its first container, as ``kubectl exec``; answers with its exit code and words."""
        launch = await self._launch(self.containers[0], words)
        process = await asyncio.create_subprocess_exec(
            *launch.argv, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=dict(launch.environ)
        )
        said, _ = await process.communicate()
        return await process.wait(), said.decode()

    async def _launch(self, container: Container, words: Sequence[str] = ()) -> Launch:
        """What the container's own words, or these, come to here.

        Raises ApiError when a Secret is not there.
        """
        spec = container.spec
        mounts = spec.get("volumeMounts", [])
        folders = {mount["mountPath"]: self.volume(mount["name"]) for mount in mounts}
        outside = Outside(folders, self.address)
        reported: dict[str, str] = {}
        for entry in spec.get("env", []):
            value = await self._value(entry, reported)
            if value is not None:
                reported[entry["name"]] = value
        given = words or (*spec.get("command", []), *spec.get("args", []))
        words = [expanded(word, reported) for word in given]
        if "envFrom" in spec or not words:
            raise NotPlayedError(f"{container.name}: envFrom, or what only an image says")
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "HOSTNAME": self.name,
            **service_variables([*await self._services(), self._machine.server]),
            **{name: outside.word(value) for name, value in reported.items()},
        }
        if ACCOUNT in folders:
            environ.setdefault(ACCOUNT_VARIABLE, str(folders[ACCOUNT]))
        argv = argv_of([outside.word(word) for word in words])
        return Launch(argv, environ, self._machine.group)

    async def _services(self) -> list[Service]:
        """The Services that containers get, next to the API server's own."""
        if not self.stored["spec"].get("enableServiceLinks", True):
            return []
        space = f"/api/v1/namespaces/{self.stored['metadata']['namespace']}"
        found = await self._machine.api.read(f"{space}/services")
        return [service for each in found["items"] if (service := Service.read(each)) is not None]

    async def _value(self, entry: Mapping[str, Any], reported: Mapping[str, str]) -> str | None:
        """None of an optional Secret that is not there."""
        if "valueFrom" not in entry:
            return expanded(entry.get("value", ""), reported)
        ((kind, source),) = entry["valueFrom"].items()
        if kind == "fieldRef":
            return field(self.stored, source["fieldPath"], self.address)
        if kind == "secretKeyRef":
            space = f"/api/v1/namespaces/{self.stored['metadata']['namespace']}"
            try:
                secret = await self._machine.api.read(f"{space}/secrets/{source['name']}")
            except ApiError as error:
                if source.get("optional") and error.status in GONE:
                    return None
                raise
            return b64decode(secret["data"][source["key"]]).decode()
        raise NotPlayedError(f"{entry['name']}: valueFrom {kind}")

    async def _end(self) -> None:
        """What a kubelet does for a deleted pod: it ends in its time, and only then is the object gone."""
        grace_s = self.stored["metadata"].get("deletionGracePeriodSeconds", 0)
        everyone = (*self.init_containers, *self.containers)
        await asyncio.gather(*(container.stop(grace_s) for container in everyone))
        await _again(lambda: self._machine.api.delete_now(self._path, self.uid))

    async def _tell(self) -> None:
        """Write the status whenever it becomes another one."""
        written: Object = {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            status = self._status()
            if status != written:
                await _again(partial(self._write, status))
                written = status

    async def _write(self, status: Object) -> None:
        body = {"metadata": {"uid": self.uid}, "status": status}
        try:
            await self._machine.api.patch(f"{self._path}/status", body)
        except ApiError as error:
            if error.status not in GONE:
                raise

    def _status(self) -> Object:
        is_initialized = all(container.has_succeeded for container in self.init_containers)
        is_ready = is_initialized and all(container.is_ready for container in self.containers)
        holds = dict(zip(CONDITIONS, (self._is_mounted, is_initialized, is_ready, is_ready), strict=True))
        for name, is_true in holds.items():
            if self._conditions.get(name, {}).get("status") != str(is_true):
                self._conditions[name] = {"type": name, "status": str(is_true), "lastTransitionTime": now()}
        return {
            "phase": "Running" if any(container.starts for container in self.containers) else "Pending",
            "startTime": self._began,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": list(self._conditions.values()),
            "initContainerStatuses": [container.status() for container in self.init_containers],
            "containerStatuses": [container.status() for container in self.containers],
        }

    def _containers(self, specs: Iterable[Mapping[str, Any]]) -> tuple[Container, ...]:
        logs = self._machine.logs
        return tuple(
            Container(spec, logs / f"pod-{self.name}-{spec['name']}.log", self._changed.set) for spec in specs
        )

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.stored['metadata']['namespace']}/pods/{self.name}"


async def _again(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the API server did what it was asked, however long it is away."""
    again_s = AGAIN_S
    while True:
        try:
            return await call()
        except ApiError:
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MAX_S)
