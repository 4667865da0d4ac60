"""One replica of the operator: its doors, and its work while it holds the lease."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from kvrouter.core.errors import ConfigError
from kvrouter.operator.admission.server import AdmissionDoor
from kvrouter.operator.admission.shown import ShownCertificate
from kvrouter.operator.observed import Observed, log
from kvrouter.operator.plan import PlanDefaults
from kvrouter.operator.reconcile.clean_up import clean_up
from kvrouter.operator.reconcile.cluster import Cluster
from kvrouter.operator.reconcile.driver import Driver
from kvrouter.operator.reconcile.election import LeaseTimes
from kvrouter.operator.reconcile.kinds import Key
from kvrouter.operator.reconcile.known import facts_for_admission
from kvrouter.operator.reconcile.leader import Leader
from kvrouter.operator.reconcile.own_certificate import OwnCertificate
from kvrouter.operator.reconcile.places import Places
from kvrouter.telemetry import METRICS_CONTENT_TYPE, Event, log_event

CONNECTIONS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The admission door's certificate and key, as cert-manager mounts them; read again when they change."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSecret:
    """A certificate of the operator's own, in a Secret that all replicas share. The authority that signed it
    is written into the ValidatingWebhookConfiguration ``webhook``, which calls the door by ``dns_names``,
    and into the MutatingWebhookConfiguration ``webhook``-binding where that is.
    """

    secret: Key
    webhook: str
    dns_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """What one replica runs with.

    Without ``kubeconfig`` it signs in as its pod's service account. ``namespace`` is the only one that is
    looked after; empty for all. ``certificate`` opens the admission door on ``admission_port``; without it
    there is none. Probes and metrics are on ``http_port``, without TLS. Ports may be 0.
    """

    identity: str
    lease: Key
    defaults: PlanDefaults
    kubeconfig: Path | None = None
    namespace: str = ""
    times: LeaseTimes = field(default_factory=LeaseTimes)
    host: str = "0.0.0.0"  # noqa: S104 - kubelets and the API server come from outside the pod
    http_port: int = 8080
    admission_port: int = 9443
    certificate: CertificateFiles | CertificateSecret | None = None


def run_operator(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code. Raises ConfigError for what it cannot start with."""
    asyncio.run(_run(settings))
    return 0


def clean_up_operator(lease: Key, kubeconfig: Path | None, identity: str) -> list[str]:
    """Remove what the operator of ``lease`` wrote and no object owns; return what went.

    Raises ConfigError for what cannot sign in, and ClusterError.
    """

    async def signed_in() -> list[str]:
        async with _signed_in(kubeconfig) as api:
            return await clean_up(Cluster(api), lease, identity, LeaseTimes())

    return asyncio.run(signed_in())


async def _run(settings: OperatorSettings) -> None:
    observed = Observed()
    async with AsyncExitStack() as stack:
        cluster = Cluster(await stack.enter_async_context(_signed_in(settings.kubeconfig)))
        http_port = await stack.enter_async_context(_plain_door(settings, observed))
        if settings.certificate is not None:
            shown = _certificate(settings.certificate, cluster, observed)
            files = await stack.enter_async_context(shown)
            await stack.enter_async_context(_admission(settings, files, cluster, observed))
        leader = Leader(cluster, settings.lease, settings.identity, times=settings.times, listener=observed)
        log_event(log, Event.READY, kind="http", host=settings.host, port=http_port)

        async def lead() -> None:
            await Driver(
                cluster,
                defaults=settings.defaults,
                identity=settings.identity,
                lease=settings.lease,
                namespace=settings.namespace,
                listener=observed,
            ).run()

        work = asyncio.create_task(leader.run(lead))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        with suppress(asyncio.CancelledError):
            await work
        log_event(log, Event.STOP)


@asynccontextmanager
async def _signed_in(kubeconfig: Path | None) -> AsyncIterator[ApiClient]:
    configuration = Configuration()
    try:
        if kubeconfig is None:
            load_incluster_config(client_configuration=configuration)
        else:
            await load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
            )
    except (ConfigException, OSError) as error:
        where = "--kubeconfig" if kubeconfig else "no --kubeconfig is given, and this is no pod of a cluster"
        raise ConfigError(f"{where}: {error}", param="kubeconfig") from error
    configuration.connection_pool_maxsize = CONNECTIONS_MAX
    async with ApiClient(configuration) as api:
        yield api


@asynccontextmanager
async def _plain_door(settings: OperatorSettings, observed: Observed) -> AsyncIterator[int]:
    """``/healthz``, ``/readyz`` and ``/metrics``: of followers too, which are ready to take over."""

    async def well(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(_request: web.Request) -> web.Response:
        headers = {"Content-Type": METRICS_CONTENT_TYPE}
        return web.Response(body=observed.telemetry.render(), headers=headers)

    app = web.Application()
    app.router.add_get("/healthz", well)
    app.router.add_get("/readyz", well)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.http_port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _admission(
    settings: OperatorSettings, files: CertificateFiles, cluster: Cluster, observed: Observed
) -> AsyncIterator[None]:
    places = Places(cluster, namespace=settings.namespace, lost=observed.lost)
    door = AdmissionDoor(
        facts=lambda: facts_for_admission(cluster),
        labels=places.labels_of,
        defaults=settings.defaults,
        certificate=ShownCertificate(files.cert, files.key),
        listener=observed,
        not_ready=lambda: None,
    )
    port = await door.start(settings.host, settings.admission_port)
    log_event(log, Event.READY, kind="admission", host=settings.host, port=port)
    keeping_up = asyncio.create_task(places.run())
    try:
        yield
    finally:
        await door.stop()
        keeping_up.cancel()
        with suppress(asyncio.CancelledError):
            await keeping_up


@asynccontextmanager
async def _certificate(
    wanted: CertificateFiles | CertificateSecret, cluster: Cluster, observed: Observed
) -> AsyncIterator[CertificateFiles]:
    """The files that the door shows; those of a Secret are kept in a folder of this process."""
    if isinstance(wanted, CertificateFiles):
        yield wanted
        return
    with TemporaryDirectory(prefix="kvrouter-operator-") as folder:
        own = OwnCertificate(
            cluster, wanted.secret, webhook=wanted.webhook, dns_names=wanted.dns_names, folder=Path(folder)
        )
        await own.ensure()
        looking_after = asyncio.create_task(own.run(observed))
        try:
            yield CertificateFiles(cert=own.cert, key=own.key)
        finally:
            looking_after.cancel()
            with suppress(asyncio.CancelledError):
                await looking_after
