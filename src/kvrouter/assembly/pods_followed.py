"""Labelled pods of a namespace, followed, and told in events how their engines are."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrouter.assembly.beside import EngineWorkers
from kvrouter.assembly.pod_fleet import PodFleet, PodPolicy
from kvrouter.assembly.told import troubles_on
from kvrouter.config import KvTransferSpec, Settings
from kvrouter.config.engine_pods import KIND_LABEL
from kvrouter.config.sources import ENGINE_KEY_VARIABLE
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
from kvrouter.planes.discovery.port import StoreSink
from kvrouter.worker.topology_env import ENABLED, ROUTER_LEVEL, parse_topology_env

ANSWER_S = 5.0
"""How long the API server may take for an answer."""

TOLD_AT_ONCE = 256
"""How many events about pods may wait to be written; those beyond are in the log alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePods:
    """Which pods are served: those with the label of an engine, narrowed by ``selector``.

    ``namespace`` is this process's own where it is None.
    """

    selector: str = ""
    namespace: str | None = None

    @property
    def whole_selector(self) -> str:
        """What the API server is asked for."""
        return f"{KIND_LABEL},{self.selector}" if self.selector else KIND_LABEL


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
            reason = pods_reason(error, needs="create on events")
            self._on_trouble("events about pods", f"not written: {reason}")


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


def account_of(settings: Settings, wanted_by: str) -> Account:
    """The account with which ``wanted_by`` watches pods. Raises ConfigError outside of one."""
    planes = settings.planes
    return account_of_pod(
        Path(planes.kubernetes_account),
        host=planes.kubernetes_host,
        port=planes.kubernetes_port,
        wanted_by=wanted_by,
        elsewhere="run kvrouter in a pod beside the engines, or name them in a fleet file",
    )


@asynccontextmanager
async def pods_followed(
    account: Account,
    pods: EnginePods,
    policy: PodPolicy,
    workers: EngineWorkers,
    *,
    drain_limit_s: float,
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
        async with PodFleet(workers, policy, tell, drain_limit_s=drain_limit_s) as fleet:
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
