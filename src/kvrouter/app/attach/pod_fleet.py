"""Attaches the engines of labelled pods: runs a worker for each while its pod exists."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from msgspec import structs

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.app.attach.attachment import RETRY_AFTER_S, EngineAttachment, EngineWorkers, expected_engine
from kvrouter.app.attach.spec import attach_spec, with_key
from kvrouter.app.telemetry_hooks import troubles_on
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import DRAWN_WORKER_IDS, WorkerId
from kvrouter.core.workers import Enforcement, EnginePod
from kvrouter.engines.attach import AttachSpec
from kvrouter.fleetfile.engine_pods import KIND_LABEL, PLACES, engine_of
from kvrouter.fleetfile.fleet_file import KvTransferSpec
from kvrouter.fleetfile.worker_options import EnginePods
from kvrouter.kube.account import Account, account_of_pod
from kvrouter.kube.client import ClusterError
from kvrouter.settings.tree import Settings
from kvrouter.settings.variables import ENGINE_KEYS_PREFIX
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.log_forms import cut
from kvrouter.transports.records.kubernetes import PodsApi, PodsWatch, pods_reason
from kvrouter.transports.records.port import StoreSink
from kvrouter.worker import Worker
from kvrouter.worker.topology_env import ENABLED, ROUTER_LEVEL, parse_topology_env

_log = logging.getLogger("kvrouter.up")

JOINED, MISTAKEN, REFUSED = "EngineJoined", "EngineMistaken", "EngineRefused"
"""Reasons of events about a pod: its engine is served; its labels or annotations are invalid; its engine
contradicts them, or other engines.
"""


class PodEventWriter(Protocol):
    """Writes an event about a pod in the background."""

    def __call__(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        """``reason`` is a stable word in CamelCase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPolicy:
    """Settings for all pods: the KV transfer policy, the order of topology domains, the engines' keys."""

    transfer: KvTransferSpec | None = None
    levels: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Keys of engines by environment variable; a pod can name only these."""


def worker_id_of(uid: str) -> WorkerId:
    """The worker id of a pod: equal in every process that serves the pod, at each start."""
    digest = hashlib.sha256(uid.encode()).digest()
    return WorkerId(int.from_bytes(digest[:8], "big") % DRAWN_WORKER_IDS)


def is_same_worker(one: AttachSpec, other: AttachSpec) -> bool:
    """Whether the specs differ in topology domains at most, so that the worker can go on."""
    domains = other.runtime_config.topology_domains
    levels = other.runtime_config.topology_levels
    moved = structs.replace(one.runtime_config, topology_domains=domains, topology_levels=levels)
    return replace(one, runtime_config=moved) == other


class PodAttachment:
    """One pod's engine: the wanted spec, and the task that follows it."""

    def __init__(
        self,
        pod: EnginePod,
        spec: AttachSpec,
        workers: EngineWorkers,
        write_event: PodEventWriter,
        *,
        drain_limit_s: float,
    ) -> None:
        self.pod = pod
        self.spec: AttachSpec | None = spec
        self.attachment: EngineAttachment | None = None
        self._workers = workers
        self._write_event = write_event
        self._drain_limit_s = drain_limit_s
        self._draining = False
        self._changed = asyncio.Event()

    def want(self, spec: AttachSpec | None) -> None:
        """Set the wanted spec; None when the pod is gone. Ends draining."""
        self.spec, self._draining = spec, False
        self._changed.set()

    def drain(self) -> None:
        """Refuse new requests until :meth:`want`."""
        self._draining = True
        self._changed.set()

    async def run(self) -> None:
        """Run workers for the wanted specs until the pod is gone."""
        while (spec := self.spec) is not None:
            self._changed.clear()
            attachment = self.attachment = EngineAttachment(
                spec,
                self._workers,
                on_refused=self._refused,
                on_joined=self._joined,
                drain_limit_s=self._drain_limit_s,
            )
            await attachment.set_draining(self._draining)
            life = asyncio.create_task(attachment.run())
            drain_limit_s = 0.0
            try:
                await self._until_another(attachment, spec)
                # A restarted engine has lost all running answers.
                is_restarted = self.spec is not None and self.spec.start != spec.start
                drain_limit_s = 0.0 if is_restarted else self._drain_limit_s
            finally:
                life.cancel()
                await asyncio.wait({life})
                await attachment.leave(drain_limit_s=drain_limit_s)

    async def _until_another(self, attachment: EngineAttachment, spec: AttachSpec) -> None:
        """Let the worker drain and move as its pod does, until another worker or no worker is wanted."""
        while (now := self.spec) is not None and is_same_worker(spec, now):
            await attachment.set_draining(self._draining)
            if now != attachment.spec:
                await attachment.move(now)
            await self._changed.wait()
            self._changed.clear()

    def _joined(self, worker: Worker) -> None:
        card = worker.card
        message = f"kvrouter serves {card.model} here, as worker {card.worker_id} ({card.role.value})"
        self._write_event(self.pod, reason=JOINED, message=message, warns=False)

    def _refused(self, error: KvrouterError) -> None:
        if not isinstance(error, ConfigError):
            reason = f"the worker of pod {self.pod.name}: {error.message}"
            log_event(_log, Event.PLANE_DISTURBED, plane="pods", reason=reason)
            return
        log_event(_log, Event.ENGINE_POD_REFUSED, pod=self.pod.name, reason=error.message)
        self._write_event(self.pod, reason=REFUSED, message=error.message, warns=True)


class PodFleet:
    """The workers of all reported pods. Use it as an async context manager: leaving it ends them.

    ``on_pod`` and ``on_gone`` are callbacks of a pod watch. A Ready pod gets a worker; while the pod is not
    Ready the worker refuses new requests, and when the pod is gone it finishes running requests and leaves.
    An engine that does not answer delays no other.
    """

    def __init__(
        self, workers: EngineWorkers, policy: PodPolicy, write_event: PodEventWriter, *, drain_limit_s: float
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._write_event = write_event
        self._drain_limit_s = drain_limit_s
        self._entries: dict[str, PodAttachment] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_draining = False
        self._without: dict[str, ExpectedEngine] = {}
        """The engines of pods that get no worker, by the pod's uid: the pod is not ready, or described
        wrongly.
        """

    @property
    def workers(self) -> dict[str, Worker]:
        """The workers that have joined, by pod name."""
        entries = [(entry.pod.name, entry.attachment) for entry in self._entries.values()]
        return {name: each.worker for name, each in entries if each is not None and each.worker is not None}

    def expected(self) -> list[ExpectedEngine]:
        """Every engine whose pod exists, with or without a worker."""
        entries = [(entry.spec, entry.attachment) for entry in self._entries.values()]
        attached = [
            expected_engine(spec) if attachment is None else attachment.expected
            for spec, attachment in entries
            if spec is not None
        ]
        return [*self._without.values(), *attached]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Let every worker finish its running requests and leave; no further worker joins."""
        self._is_draining = True
        for entry in self._entries.values():
            entry.want(None)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def on_pod(self, pod: EnginePod) -> None:
        """Handle a new or changed pod."""
        entry = self._entries.get(pod.uid)
        if self._is_draining:
            return
        if pod.is_ready and not pod.is_leaving:
            self._serve(pod, entry)
        elif entry is None or entry.spec is None:
            self._leave_out(pod, ExpectedState.AWAITED, "the pod is not ready")
        else:
            entry.drain()

    def on_gone(self, uid: str) -> None:
        """Handle a pod that is gone, has ended, or lost its engine label."""
        self._without.pop(uid, None)
        entry = self._entries.get(uid)
        if entry is not None and entry.spec is not None:
            log_event(_log, Event.ENGINE_POD_GONE, pod=entry.pod.name)
            entry.want(None)

    def _serve(self, pod: EnginePod, entry: PodAttachment | None) -> None:
        try:
            spec = self._spec_of(pod)
        except ConfigError as error:
            self._mistaken(pod, error)
            if entry is not None:
                entry.want(None)
            return
        self._without.pop(pod.uid, None)
        if entry is not None:
            entry.pod = pod
            entry.want(spec)
            return
        log_event(
            _log,
            Event.ENGINE_POD_FOUND,
            pod=pod.name,
            worker=str(spec.worker_id),
            url=spec.url,
        )
        entry = PodAttachment(pod, spec, self._workers, self._write_event, drain_limit_s=self._drain_limit_s)
        self._entries[pod.uid] = entry
        self._tasks[pod.uid] = asyncio.create_task(self._run(entry))

    async def _run(self, entry: PodAttachment) -> None:
        uid = entry.pod.uid
        try:
            while entry.spec is not None:
                try:
                    await entry.run()
                except Exception as error:  # noqa: BLE001 - an internal error is logged, and affects this pod alone
                    log_event(_log, Event.INTERNAL_ERROR, exc_info=error)
                    await asyncio.sleep(RETRY_AFTER_S)
        finally:
            del self._entries[uid], self._tasks[uid]

    def _mistaken(self, pod: EnginePod, error: ConfigError) -> None:
        reason = "; ".join(error.message.splitlines())
        if self._leave_out(pod, ExpectedState.REFUSED, reason):
            log_event(_log, Event.ENGINE_POD_REFUSED, pod=pod.name, reason=reason)
            self._write_event(pod, reason=MISTAKEN, message=error.message, warns=True)

    def _leave_out(self, pod: EnginePod, state: ExpectedState, reason: str) -> bool:
        """Note why a pod gets no worker; return whether that is news."""
        reason = str(cut(reason))
        known = self._without.get(pod.uid)
        if known is not None and (known.state, known.reason) == (state, reason):
            return False
        since_s: float | None = round(time.time(), 3)
        if known is not None and known.state == state:
            since_s = known.since_s
        self._without[pod.uid] = ExpectedEngine(
            written_at=f"pod {pod.name}", pod=pod.name, state=state, reason=reason, since_s=since_s
        )
        return True

    def _spec_of(self, pod: EnginePod) -> AttachSpec:
        described = engine_of(pod, policy=self._policy.transfer, levels=self._policy.levels)
        spec = attach_spec(
            described.fleet,
            described.group,
            described.engine,
            worker_id=worker_id_of(pod.uid),
            url=described.url,
            written_at=f"pod {pod.name}",
            fields_at=PLACES,
        )
        spec = with_key(spec, described.engine, self._policy.keys)
        return replace(spec, start=described.start, pod=pod.name, node=pod.node)


ANSWER_S = 5.0
"""Seconds that the API server may take for an answer."""

EVENTS_AT_ONCE = 256
"""The most events about pods that wait to be written; further ones are only logged."""


def full_selector(pods: EnginePods) -> str:
    """The label selector for the API server."""
    return f"{KIND_LABEL},{pods.selector}" if pods.selector else KIND_LABEL


class PodEvents:
    """Writes events about pods in background tasks; an event that cannot be written is logged and dropped."""

    def __init__(self, api: PodsApi) -> None:
        self._api = api
        self._on_trouble = troubles_on("pods")
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        """Write an event in the background."""
        if len(self._writing) >= EVENTS_AT_ONCE:
            self._on_trouble("events", f"more than {EVENTS_AT_ONCE} wait to be written: the log has them all")
            return
        task = asyncio.create_task(self._write(pod, reason=reason, message=message, warns=warns))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Cancel the pending writes."""
        writing = tuple(self._writing)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)

    async def _write(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        try:
            await self._api.write_event(pod, reason=reason, message=message, warns=warns)
        except ClusterError as error:
            reason = pods_reason(error, needs="create on events")
            self._on_trouble("events about pods", f"not written: {reason}")


def policy_of(environ: Mapping[str, str]) -> tuple[PodPolicy, tuple[str, ...]]:
    """Return the KV transfer policy from the variables of a worker's topology environment, and warnings. Pods
    have no topology files: their labels are read. Raises ConfigError that names the variable.
    """
    # Without a policy the parser requires a router level; no worker waits for it here.
    variables = {ROUTER_LEVEL: "zone", **environ, ENABLED: "true"}
    env = parse_topology_env(variables)
    transfer = None
    if env.transfer_domain is not None:
        transfer = KvTransferSpec(
            domain=env.transfer_domain,
            enforcement=env.enforcement or Enforcement.REQUIRED,
            preferred_weight=env.preferred_weight,
        )
    keys = {name: key for name, key in environ.items() if f"{name}_".startswith(ENGINE_KEYS_PREFIX)}
    return PodPolicy(transfer=transfer, levels=env.levels, keys=keys), env.warnings


def account_of(settings: Settings, wanted_by: str) -> Account:
    """The service account with which ``wanted_by`` watches pods. Raises ConfigError outside a pod."""
    planes = settings.planes
    return account_of_pod(
        Path(planes.kubernetes_account),
        host=planes.kubernetes_host,
        port=planes.kubernetes_port,
        wanted_by=wanted_by,
        elsewhere="run kvrouter in a pod next to the engines, or name them in a fleet file",
    )


class WatchedPods(NamedTuple):
    """The pods to follow, the account that lists them, and the policy of their workers."""

    account: Account
    pods: EnginePods
    policy: PodPolicy


@asynccontextmanager
async def pods_followed(
    watched: WatchedPods, workers: EngineWorkers, *, drain_limit_s: float, on_store: StoreSink
) -> AsyncIterator[PodFleet]:
    """Follow the pods that the API server lists, and run their workers."""
    account, pods, policy = watched
    api = PodsApi(
        account,
        namespace=pods.namespace or account.namespace,
        selector=full_selector(pods),
        answer_s=ANSWER_S,
    )
    events = PodEvents(api)
    try:
        async with PodFleet(workers, policy, events, drain_limit_s=drain_limit_s) as fleet:
            watch = PodsWatch(
                api,
                on_pod=fleet.on_pod,
                on_gone=fleet.on_gone,
                on_store=on_store,
                on_refused=troubles_on("pods"),
            )
            try:
                await watch.start()
                yield fleet
            finally:
                watch.end()
                await watch.ended()
    finally:
        await events.close()
        await api.close()
