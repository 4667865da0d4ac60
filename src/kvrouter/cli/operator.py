"""``kvrouter operator``: the operator of a Kubernetes cluster."""

import os
import socket
import sys
import uuid
from pathlib import Path

import click

from kvrouter.config.planes import DiscoveryBackend, RequestPlaneKind
from kvrouter.core.errors import ConfigError
from kvrouter.telemetry.logs import configure_logging

EXTRA = "kubernetes"
OF_EXTRA = ("cryptography", "kubernetes")


@click.group()
def operator() -> None:
    """Look after DynamoGraphDeployments in a Kubernetes cluster."""


@operator.command("run", short_help="Run one replica of the operator.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="How to reach the cluster.  [default: the service account of this pod]",
)
@click.option(
    "--namespace", default="", metavar="NAME", help="Look after this namespace alone.  [default: all]"
)
@click.option("--image", required=True, metavar="IMAGE", help="The image that holds kvrouter.")
@click.option(
    "--nats-server",
    default="nats://kvrouter-nats:4222",
    show_default=True,
    metavar="URL",
    help="NATS, as the pods of deployments reach it.",
)
@click.option(
    "--request-plane",
    type=click.Choice([kind.value for kind in RequestPlaneKind]),
    default=RequestPlaneKind.TCP.value,
    show_default=True,
    help="How their frontends send requests to workers.",
)
@click.option(
    "--discovery",
    type=click.Choice([DiscoveryBackend.NATS.value, DiscoveryBackend.KUBERNETES.value]),
    default=DiscoveryBackend.NATS.value,
    show_default=True,
    help="Where their workers are announced.",
)
@click.option(
    "--lease-namespace",
    envvar="POD_NAMESPACE",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Where the lease is that one of the replicas holds.  [POD_NAMESPACE]",
)
@click.option(
    "--lease-name",
    default="kvrouter-operator",
    show_default=True,
    metavar="NAME",
    help="What the lease is called.",
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where it listens.")  # noqa: S104
@click.option(
    "--http-port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="The port of /healthz, /readyz and /metrics.",
)
@click.option(
    "--admission-port",
    type=click.IntRange(0, 65_535),
    default=9443,
    show_default=True,
    help="The port of the admission door; with --certificate.",
)
@click.option(
    "--certificate",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Open the admission door with FOLDER/tls.crt and tls.key, as cert-manager's Secret has them.",
)
@click.option(
    "--certificate-secret",
    metavar="NAME",
    help="Open it with a certificate of its own, kept in this Secret beside the lease and renewed.",
)
@click.option(
    "--webhook",
    default="kvrouter-operator",
    show_default=True,
    metavar="NAME",
    help="The ValidatingWebhookConfiguration that must trust it; with --certificate-secret.",
)
@click.option(
    "--service",
    default="kvrouter-operator",
    show_default=True,
    metavar="NAME",
    help="The Service, beside the lease, by which that finds the door; with --certificate-secret.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
def operator_run(
    *,
    kubeconfig: Path | None,
    namespace: str,
    image: str,
    nats_server: str,
    request_plane: str,
    discovery: str,
    lease_namespace: str,
    lease_name: str,
    host: str,
    http_port: int,
    admission_port: int,
    certificate: Path | None,
    certificate_secret: str | None,
    webhook: str,
    service: str,
    log_level: str,
    log_format: str,
) -> None:
    """Make of every DynamoGraphDeployment its Deployments and Services, and tell in its status how it is.

    Run two: one holds the lease and writes, the other follows, answers at the admission door, and takes over
    when the first one ends or is not heard of for 15 s.
    """
    try:
        from kvrouter.operator.plan import PlanDefaults  # noqa: PLC0415
        from kvrouter.operator.reconcile.kinds import Key  # noqa: PLC0415
        from kvrouter.operator.run import (  # noqa: PLC0415
            CertificateFiles,
            CertificateSecret,
            OperatorSettings,
            run_operator,
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OF_EXTRA:
            raise
        raise ConfigError(
            f"the operator needs {package}, which is not installed: pip install 'kvrouter[{EXTRA}]'"
        ) from error
    configure_logging(log_level, log_format=log_format)
    shown: CertificateFiles | CertificateSecret | None = None
    if certificate is not None and certificate_secret is not None:
        raise click.UsageError("give --certificate or --certificate-secret, and not both")
    if certificate is not None:
        shown = CertificateFiles(cert=certificate / "tls.crt", key=certificate / "tls.key")
    elif certificate_secret is not None:
        shown = CertificateSecret(
            secret=Key(lease_namespace, certificate_secret),
            webhook=webhook,
            dns_names=(f"{service}.{lease_namespace}.svc",),
        )
    settings = OperatorSettings(
        identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        lease=Key(lease_namespace, lease_name),
        defaults=PlanDefaults(
            image=image,
            nats_server=nats_server,
            request_plane=RequestPlaneKind(request_plane),
            discovery=DiscoveryBackend(discovery),
        ),
        kubeconfig=kubeconfig,
        namespace=namespace,
        host=host,
        http_port=http_port,
        admission_port=admission_port,
        certificate=shown,
    )
    sys.exit(run_operator(settings))
