"""The controller: sources queue deployments, and workers pass them from the queue to the reconciler."""

import asyncio
import time
from contextlib import suppress

from kvrouter.kube.client import KubeClient
from kvrouter.kube.objects import Key
from kvrouter.operator.api.deployment import DEFAULT_CLASS
from kvrouter.operator.instrumentation import OperatorInstrumentation
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.reconcile.claims import AGAIN_S, Claims
from kvrouter.operator.reconcile.event_recorder import Recorder
from kvrouter.operator.reconcile.frontend_reader import READ_AGAIN_S
from kvrouter.operator.reconcile.info_reader import INFO_EACH_S
from kvrouter.operator.reconcile.reconciler import Reconciler
from kvrouter.operator.reconcile.sources import Sources, every
from kvrouter.operator.reconcile.status_writer import StatusWriter
from kvrouter.operator.reconcile.workqueue import Workqueue
from kvrouter.settings.planes import DiscoveryBackend

RECONCILES_AT_A_TIME = 4
RESYNC_S = 600.0
"""How often every deployment is reconciled, and applied, changed or not."""


class Controller:
    """Runs for one term as leader, and reads everything again at its start."""

    def __init__(
        self,
        client: KubeClient,
        *,
        defaults: PlanDefaults,
        identity: str,
        lease: Key,
        namespace: str,
        instrumentation: OperatorInstrumentation,
        class_name: str = DEFAULT_CLASS,
        info_each_s: float = INFO_EACH_S,
        links_s: float = READ_AGAIN_S,
    ) -> None:
        self._instrumentation = instrumentation
        self._workqueue = Workqueue[Key]()
        self._stirred = asyncio.Event()
        claims = Claims(client, lease, time.monotonic, class_name)
        recorder = Recorder(client, identity, instrumentation.event_refused)
        statuses = StatusWriter(client, claims.name, recorder, instrumentation.conditions_are)
        self._sources = Sources(
            client,
            self._enqueue,
            is_own_status=statuses.is_own,
            lost=instrumentation.lost,
            namespace=namespace,
            class_name=class_name,
            reads_workers=defaults.discovery is DiscoveryBackend.KUBERNETES,
            info_each_s=info_each_s,
            links_s=links_s,
        )
        self._reconciler = Reconciler(
            client, self._sources, claims, statuses, defaults=defaults, instrumentation=instrumentation
        )

    async def run(self) -> None:
        """Watch and reconcile until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._sources.start(group)
            group.create_task(self._reconciler.policies.follow_nodes())
            group.create_task(every(RESYNC_S, self._resync))
            group.create_task(every(AGAIN_S, self._enqueue_others))
            for _ in range(RECONCILES_AT_A_TIME):
                group.create_task(self._work())

    async def _work(self) -> None:
        """Reconcile the deployments that are due. An error of one does not stop the others."""
        loop = asyncio.get_running_loop()
        while True:
            key = self._workqueue.take(loop.time())
            if key is None:
                await self._until_due()
                continue
            self._instrumentation.waiting(len(self._workqueue))
            began_s, retry_s = loop.time(), 0.0
            error: Exception | None = None
            try:
                again_s = await self._reconciler.reconcile(key)
            except Exception as failed:  # noqa: BLE001 - one deployment's trouble must not stop the others
                error = failed
                retry_s = self._workqueue.failed(key, loop.time())
            else:
                self._workqueue.done(key)
                if again_s is not None:
                    self._enqueue(key, again_s)
            self._stirred.set()
            self._instrumentation.looked(key, loop.time() - began_s, error, retry_s)

    async def _until_due(self) -> None:
        self._stirred.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._workqueue.next_due_s()):
                await self._stirred.wait()

    def _enqueue(self, key: Key, in_s: float) -> None:
        self._workqueue.add(key, asyncio.get_running_loop().time() + in_s)
        self._stirred.set()

    async def _resync(self) -> None:
        self._reconciler.write_again()
        self._sources.enqueue_all()

    async def _enqueue_others(self) -> None:
        for key in self._reconciler.others:
            self._enqueue(key, 0.0)
