"""The HTTP servers of a replica: probes and metrics without TLS, and admission with TLS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from kvrouter.core.backoff import Backoff, Failures
from kvrouter.kube.client import ClusterError, KubeClient
from kvrouter.kube.informer import RETRY_MAX_S, RETRY_S, wait_after
from kvrouter.kube.objects import Key
from kvrouter.operator.admission.certificates import ServingCertificate
from kvrouter.operator.admission.server import AdmissionServer, probe
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth, log
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.reconcile.binding_labels import BindingLabels
from kvrouter.operator.reconcile.definition import Definition
from kvrouter.operator.reconcile.dry_run import DryRun
from kvrouter.operator.reconcile.info_reader import cluster_info_for_admission
from kvrouter.operator.reconcile.own_certificate import OwnCertificate
from kvrouter.telemetry import Event, MetricsFormat, OperatorTelemetry, log_event

ADMISSION = "admission"
CERTIFICATE = "the certificate's renewal"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The admission server's certificate and key as files, as cert-manager mounts them; reread on change."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSecret:
    """A certificate for ``dns_names`` that the operator issues itself, in a Secret of all replicas. Its CA
    certificate is written into the ValidatingWebhookConfiguration ``webhook``, and into the
    MutatingWebhookConfiguration ``webhook``-binding if the cluster has one.
    """

    secret: Key
    webhook: str
    dns_names: tuple[str, ...]


@asynccontextmanager
async def serve_probes(
    host: str, port: int, *, health: ReplicaHealth, telemetry: OperatorTelemetry
) -> AsyncIterator[int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics``; yield the port, a free one for port 0.

    Raises OSError when the port is taken.
    """

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=telemetry.render(), headers={"Content-Type": MetricsFormat.TEXT.value})

    app = web.Application()
    app.router.add_get("/healthz", probe(health.why_not_well))
    app.router.add_get("/readyz", probe(health.why_not_ready))
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionWork:
    """Runs the admission server. ``namespace`` is the only one that is managed; empty for all."""

    certificate: CertificateFiles | CertificateSecret
    defaults: PlanDefaults
    namespace: str
    class_name: str
    host: str
    port: int

    async def run(
        self,
        client: KubeClient,
        definition: Definition,
        instrumentation: OperatorInstrumentation,
        health: ReplicaHealth,
    ) -> None:
        """Start the server once it has a certificate, and serve until cancelled; deployments are only read
        while their definition is kvrouter's.

        Raises ConfigError for files without a valid certificate, and OSError when the port is taken.
        """
        async with _files(self.certificate, client, instrumentation, health) as files:
            node_places = BindingLabels(
                client,
                namespace=self.namespace,
                lost=instrumentation.lost_at_admission,
                class_name=self.class_name,
            )
            server = AdmissionServer(
                read_cluster_info=lambda: cluster_info_for_admission(client),
                labels=node_places.labels_of,
                tried=DryRun(client, defaults=self.defaults, namespace=self.namespace),
                defaults=self.defaults,
                certificate=ServingCertificate(files.cert, files.key),
                instrumentation=instrumentation,
                not_ready=health.why_not_ready,
                is_ours=lambda: definition.is_ours,
                class_name=self.class_name,
            )
            port = await server.start(self.host, self.port)
            log_event(log, Event.READY, kind="admission", host=self.host, port=port)
            health.has(ADMISSION)
            try:
                await definition.while_ours(node_places.run)
            finally:
                await server.stop()


@asynccontextmanager
async def _files(
    wanted: CertificateFiles | CertificateSecret,
    client: KubeClient,
    instrumentation: OperatorInstrumentation,
    health: ReplicaHealth,
) -> AsyncIterator[CertificateFiles]:
    """Yield the certificate files; those of a Secret are in a temporary folder of this process."""
    if isinstance(wanted, CertificateFiles):
        yield wanted
        return
    with TemporaryDirectory(prefix="kvrouter-operator-") as folder:
        certificate = OwnCertificate(
            client, wanted.secret, webhook=wanted.webhook, dns_names=wanted.dns_names, folder=Path(folder)
        )
        await _ensured(certificate, instrumentation, health)
        renewal = asyncio.create_task(certificate.run(instrumentation.certificate_refused))
        health.needs(CERTIFICATE, renewal)
        try:
            yield CertificateFiles(cert=certificate.cert, key=certificate.key)
        finally:
            renewal.cancel()
            with suppress(asyncio.CancelledError):
                await renewal


async def _ensured(
    certificate: OwnCertificate, instrumentation: OperatorInstrumentation, health: ReplicaHealth
) -> None:
    """Obtain the certificate; retry while the cluster does not answer, or lacks a part of the chart."""
    failures = Failures(Backoff(RETRY_S, RETRY_MAX_S))
    while True:
        try:
            await certificate.ensure()
        except ClusterError as error:
            health.waits_for(ADMISSION, f"there is no certificate yet: {error.message}")
            instrumentation.certificate_refused(error.message)
            await asyncio.sleep(wait_after(failures, error))
        else:
            return
