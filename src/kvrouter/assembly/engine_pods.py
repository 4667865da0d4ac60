"""``kvrouter up --engine-pods``: a front door, and a worker beside the engine of every labelled pod."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kvrouter.assembly.address import claimed
from kvrouter.assembly.beside import EngineWorkers
from kvrouter.assembly.door import OpenDoor, open_door
from kvrouter.assembly.ground import MemoryGround
from kvrouter.assembly.lifetime import ToldToStop, allow_many_files, told_to_stop, unless_told
from kvrouter.assembly.mock_fleet import MemoryPlanes
from kvrouter.assembly.pod_fleet import PodFleet, PodPolicy
from kvrouter.assembly.router import build_service
from kvrouter.assembly.serve import logger, serve_until
from kvrouter.assembly.texts import AnnouncedTexts
from kvrouter.assembly.told import troubles_on
from kvrouter.config import KvTransferSpec, Settings
from kvrouter.config.engine_pods import KIND_LABEL
from kvrouter.config.sources import ENGINE_KEY_VARIABLE
from kvrouter.config.version import installed_version
from kvrouter.core.ids import ModelName
from kvrouter.core.pods import EnginePod
from kvrouter.core.workers import Enforcement
from kvrouter.planes.discovery.kubernetes import (
    STORE_ERRORS,
    Account,
    PodsApi,
    PodsWatch,
    account_of_pod,
    pods_reason,
)
from kvrouter.planes.discovery.memory import MemoryDiscovery
from kvrouter.planes.discovery.port import CardSink, GoneSink, StoreSink
from kvrouter.planes.events.memory import MemoryEventPlane
from kvrouter.planes.requests.memory import MemoryRequestPlane
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.text.encode_pool import EncodePool
from kvrouter.worker.topology_env import ENABLED, ROUTER_LEVEL, parse_topology_env

ANSWER_S = 5.0
"""How long the API server may take for an answer."""

TOLD_AT_ONCE = 256
"""How many events about pods may wait to be written; those beyond are in the log alone."""

_log = logging.getLogger("kvrouter.up")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePods:
    """Which pods are served: those with the label of an engine, narrowed by ``selector``.

    ``namespace`` is this process's own where it is None. ``folders`` are tokenizers' on this host, by model.
    """

    selector: str = ""
    namespace: str | None = None
    folders: Mapping[ModelName, Path]

    @property
    def whole_selector(self) -> str:
        """What the API server is asked for."""
        return f"{KIND_LABEL},{self.selector}" if self.selector else KIND_LABEL


class PodsDiscovery(MemoryDiscovery):
    """The cards of this process, whose store counts as lost while pods cannot be watched."""

    def __init__(self) -> None:
        super().__init__()
        self._stores: dict[object, StoreSink] = {}
        self._lost: str | None = None

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, and whether pods can be watched."""
        end_cards = await super().watch(on_card, on_gone)
        key = object()
        if on_store is not None:
            self._stores[key] = on_store
            if self._lost is not None:
                on_store(False, self._lost)

        def end() -> None:
            self._stores.pop(key, None)
            end_cards()

        return end

    def on_store(self, is_reachable: bool, why: str) -> None:
        """Pods can be watched again, or not any more."""
        self._lost = None if is_reachable else why
        for on_store in tuple(self._stores.values()):
            on_store(is_reachable, why)


class PodEvents:
    """Writes events about pods, beside everything else; what cannot be written is told and let go."""

    def __init__(self, api: PodsApi) -> None:
        self._api = api
        self._on_trouble = troubles_on("pods")
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        """Write an event some time."""
        if len(self._writing) >= TOLD_AT_ONCE:
            self._on_trouble("events", f"more than {TOLD_AT_ONCE} wait to be written: the log has them all")
            return
        task = asyncio.create_task(self._write(pod, reason=reason, message=message, warns=warns))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Write nothing any more."""
        writing = tuple(self._writing)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)

    async def _write(self, pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        try:
            await self._api.tell(pod, reason=reason, message=message, warns=warns)
        except STORE_ERRORS as error:
            self._on_trouble("events about pods", f"not written: {pods_reason(error)}")


def policy_of(environ: Mapping[str, str]) -> tuple[PodPolicy, tuple[str, ...]]:
    """Return the policy of KV transfers that ``environ`` states, in the words of a worker's contract, and
    warnings. Pods have no files: their labels are read. Raises ConfigError that names the variable.
    """
    # A level of the router's own is asked for where a worker has no policy; no worker waits for it here.
    contract = {ROUTER_LEVEL: "zone", **environ, ENABLED: "true"}
    env = parse_topology_env(contract)
    transfer = None
    if env.transfer_domain is not None:
        transfer = KvTransferSpec(
            domain=env.transfer_domain,
            enforcement=env.enforcement or Enforcement.REQUIRED,
            preferred_weight=env.preferred_weight,
        )
    key = environ.get(ENGINE_KEY_VARIABLE) or None
    return PodPolicy(transfer=transfer, levels=env.levels, engine_key=key), env.warnings


def account_of(settings: Settings) -> Account:
    """The account with which pods are watched. Raises ConfigError outside of one."""
    planes = settings.planes
    return account_of_pod(
        Path(planes.kubernetes_account),
        host=planes.kubernetes_host,
        port=planes.kubernetes_port,
        wanted_by="--engine-pods",
        elsewhere="run kvrouter in a pod beside the engines, or name them in a fleet file",
    )


@asynccontextmanager
async def pods_served(
    settings: Settings, account: Account, pods: EnginePods, policy: PodPolicy
) -> AsyncIterator[OpenDoor]:
    """Serve the engines of labelled pods behind one front door, on this event loop.

    Raises CannotListen, before anything is asked, when the front door's address cannot be had.
    """
    front = settings.frontend
    telemetry = Telemetry()
    telemetry.build_info.set(1, installed_version())
    discovery = PodsDiscovery()
    planes = MemoryPlanes(discovery, MemoryEventPlane(), MemoryRequestPlane())
    pool = EncodePool(off_loop_chars=front.tokenize_inline_max_chars)
    async with AsyncExitStack() as stack:
        sockets = await stack.enter_async_context(claimed(front.http_host, front.http_port))
        stack.callback(pool.close)
        stack.push_async_callback(planes.requests.close)
        service = build_service(
            settings.router,
            plane=planes.requests,
            discovery=discovery,
            subscriber=planes.events,
            telemetry=telemetry,
        )
        texts = AnnouncedTexts(pods.folders, pool)
        stack.push_async_callback(texts.loaded)
        stack.callback(await discovery.watch(texts.on_card, texts.on_gone))
        workers = EngineWorkers(settings, MemoryGround(planes), folders=pods.folders.keys())
        fleet = await stack.enter_async_context(
            _followed(settings, account, pods, policy, workers, on_store=discovery.on_store)
        )
        yield await stack.enter_async_context(
            open_door(
                service,
                texts,
                settings=front,
                telemetry=telemetry,
                sockets=sockets,
                awaited=fleet.awaited,
            )
        )


@asynccontextmanager
async def _followed(
    settings: Settings,
    account: Account,
    pods: EnginePods,
    policy: PodPolicy,
    workers: EngineWorkers,
    *,
    on_store: StoreSink,
) -> AsyncIterator[PodFleet]:
    """The workers of the pods that the API server shows, from its first list on or from when it answers."""
    api = PodsApi(
        account,
        namespace=pods.namespace or account.namespace,
        selector=pods.whole_selector,
        answer_s=ANSWER_S,
    )
    tell = PodEvents(api)
    try:
        async with PodFleet(workers, policy, tell, drain_limit_s=settings.frontend.drain_limit_s) as fleet:
            watch = PodsWatch(
                api,
                on_pod=fleet.on_pod,
                on_gone=fleet.on_gone,
                on_store=on_store,
                on_refused=troubles_on("pods"),
            )
            await watch.start()
            try:
                yield fleet
            finally:
                watch.end()
                await watch.ended()
    finally:
        await tell.close()
        await api.close()


def serve_engine_pods(settings: Settings, pods: EnginePods, environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises CannotListen, ConfigError."""
    policy, warnings = policy_of(environ)
    account = account_of(settings)
    for warning in warnings:
        log_event(_log, Event.CONFIG_WARNING, detail=warning)
    allow_many_files()
    return uvloop.run(_serve(settings, account, pods, policy))


async def _serve(settings: Settings, account: Account, pods: EnginePods, policy: PodPolicy) -> int:
    log_event(logger, Event.START, version=installed_version())
    async with AsyncExitStack() as stack:
        stopping = stack.enter_context(told_to_stop())
        try:
            async with unless_told(stopping):
                door = await stack.enter_async_context(pods_served(settings, account, pods, policy))
        except ToldToStop:
            log_event(logger, Event.STOP)
            return 0
        await serve_until(stopping, door, drain_limit_s=settings.frontend.drain_limit_s)
    return 0
