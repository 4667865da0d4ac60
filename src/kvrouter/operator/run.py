"""One replica of the operator: its servers, its work while it holds the lease, and clean-up."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.kube.account import AccountConnection, account_of_pod
from kvrouter.kube.client import CONFLICT, KubeClient, RequestRefused
from kvrouter.kube.lease import Leader, LeaseCandidate, LeaseTimes
from kvrouter.kube.objects import LEASES, Key
from kvrouter.operator.api.deployment import DEFAULT_CLASS
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth, log
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import MANAGER
from kvrouter.operator.reconcile.bindings import remove_policies
from kvrouter.operator.reconcile.controller import Controller
from kvrouter.operator.reconcile.definition import Definition, DefinitionReport, preflight
from kvrouter.operator.servers import (
    ADMISSION,
    AdmissionWork,
    CertificateFiles,
    CertificateSecret,
    serve_probes,
)
from kvrouter.telemetry import Event, log_event

TRIES = 5


async def clean_up(client: KubeClient, lease: Key, identity: str, times: LeaseTimes) -> list[str]:
    """Remove the admission policies of the operator of ``lease``; return what was removed. Raises
    ClusterError.

    The lease is taken first: a leading replica then stops at its next renewal, and does not write them again.
    Replicas that keep running lead again once the lease has run out.
    """
    candidate = LeaseCandidate(identity, lease, times)
    if await _is_taken(client, lease, candidate):
        await asyncio.sleep(2 * times.retry_s)
    return await remove_policies(client, lease)


async def _is_taken(client: KubeClient, lease: Key, candidate: LeaseCandidate) -> bool:
    """Take the lease from its holder; return False if it has no holder."""
    for tries_left in reversed(range(TRIES)):
        found = await client.read(LEASES, lease)
        taken = candidate.take(found, datetime.now(UTC))
        if taken is None:
            return False
        try:
            await client.replace(LEASES, taken)
        except RequestRefused as refused:
            if refused.status != CONFLICT or not tries_left:
                raise
        else:
            return True
    return False


HTTPS_PORT = 443
ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the service account of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings of one replica.

    Without ``kubeconfig`` it signs in as its pod's service account. ``namespace`` is the only one that is
    managed, empty for all, and ``class_name`` the only class. With a ``certificate`` it serves admission on
    ``admission_port``. Probes and metrics are on ``http_port``, without TLS. A port of 0 is a free one.
    """

    identity: str
    lease: Key
    defaults: PlanDefaults
    kubeconfig: Path | None = None
    namespace: str = ""
    class_name: str = DEFAULT_CLASS
    times: LeaseTimes = field(default_factory=LeaseTimes)
    host: str = "0.0.0.0"  # noqa: S104 - kubelets and the API server come from outside the pod
    http_port: int = 8080
    admission_port: int = 9443
    certificate: CertificateFiles | CertificateSecret | None = None


def run_operator(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code. Raises ConfigError for settings that do not work."""
    asyncio.run(_run(settings))
    return 0


def clean_up_operator(lease: Key, kubeconfig: Path | None, identity: str) -> list[str]:
    """Remove the objects that the operator of ``lease`` wrote and no object owns; return them.

    Raises ConfigError when it cannot sign in, and ClusterError.
    """

    async def signed_in() -> list[str]:
        async with _signed_in(kubeconfig) as client:
            return await clean_up(client, lease, identity, LeaseTimes())

    return asyncio.run(signed_in())


def preflight_operator(kubeconfig: Path | None) -> list[DefinitionReport]:
    """Return the state of each definition in the cluster. Raises ConfigError and ClusterError as above."""

    async def signed_in() -> list[DefinitionReport]:
        async with _signed_in(kubeconfig) as client:
            return await preflight(client)

    return asyncio.run(signed_in())


async def _run(settings: OperatorSettings) -> None:
    health = ReplicaHealth()
    instrumentation = OperatorInstrumentation(health)
    async with AsyncExitStack() as stack:
        signed_in = _signed_in(settings.kubeconfig, instrumentation.warned)
        client = await stack.enter_async_context(signed_in)
        telemetry = instrumentation.telemetry
        server = serve_probes(settings.host, settings.http_port, health=health, telemetry=telemetry)
        http_port = await stack.enter_async_context(server)
        log_event(log, Event.READY, kind="http", host=settings.host, port=http_port)
        await _until_signalled(_work(settings, client, instrumentation, health))
        log_event(log, Event.STOP)


def _work(
    settings: OperatorSettings,
    client: KubeClient,
    instrumentation: OperatorInstrumentation,
    health: ReplicaHealth,
) -> list[asyncio.Task[None]]:
    """Start the tasks of a replica."""
    definition = Definition(client, instrumentation)

    async def drive() -> None:
        await Controller(
            client,
            defaults=settings.defaults,
            identity=settings.identity,
            lease=settings.lease,
            namespace=settings.namespace,
            instrumentation=instrumentation,
            class_name=settings.class_name,
        ).run()

    async def lead() -> None:
        await definition.while_ours(drive)

    leader = Leader(client, settings.lease, settings.identity, times=settings.times, listener=instrumentation)
    tasks = [asyncio.create_task(leader.run(lead)), asyncio.create_task(definition.run())]
    health.needs("the lease's renewal", tasks[0])
    health.needs("the look at the definition", tasks[1])
    if settings.certificate is not None:
        admission = AdmissionWork(
            certificate=settings.certificate,
            defaults=settings.defaults,
            namespace=settings.namespace,
            class_name=settings.class_name,
            host=settings.host,
            port=settings.admission_port,
        )
        health.waits_for(ADMISSION, "it does not listen yet")
        tasks.append(asyncio.create_task(admission.run(client, definition, instrumentation, health)))
        health.needs(ADMISSION, tasks[-1])
    return tasks


async def _until_signalled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for SIGTERM, SIGINT or the end of a task; then cancel all tasks. Raises what a task raised."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    waiting = asyncio.create_task(signalled.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, *tasks):
        task.cancel()
    for outcome in await asyncio.gather(waiting, *tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


@asynccontextmanager
async def _signed_in(
    kubeconfig: Path | None, on_warning: Callable[[str, str], None] | None = None
) -> AsyncIterator[KubeClient]:
    """Yield a client for the user of ``kubeconfig``, else for this pod's account. Raises ConfigError."""
    if kubeconfig is not None:
        from kvrouter.kube.kubeconfig import signed_in  # noqa: PLC0415 - an extra of the package

        async with signed_in(kubeconfig) as connection:
            yield KubeClient(connection, manager=MANAGER, on_warning=on_warning)
        return
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    try:
        account = account_of_pod(
            ACCOUNT_FOLDER,
            host=os.environ.get("KUBERNETES_SERVICE_HOST"),
            port=int(port) if port.isdecimal() else HTTPS_PORT,
            wanted_by="its service account",
            elsewhere="give --kubeconfig",
        )
    except ConfigError as error:
        raise ConfigError(
            f"no --kubeconfig is given, and this is no pod of a cluster: {error.message}", param="kubeconfig"
        ) from error
    client = KubeClient(AccountConnection(account), manager=MANAGER, on_warning=on_warning)
    try:
        yield client
    finally:
        await client.close()
