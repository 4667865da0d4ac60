"""``kvrouter operator``: the operator of a Kubernetes cluster."""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kvrouter.cli.options import takes
from kvrouter.cli.output import Output, echo, json_text
from kvrouter.cli.process_settings import begin_log
from kvrouter.cli.progress import working
from kvrouter.cli.setting_flags import output_option
from kvrouter.core.errors import ConfigError
from kvrouter.settings.option import option
from kvrouter.settings.setting_spec import written_setting

if TYPE_CHECKING:  # these need the extra
    from kvrouter.operator.plan.defaults import PlanDefaults
    from kvrouter.operator.servers import CertificateFiles, CertificateSecret

EXTRA = "kubernetes"
OF_EXTRA = ("cryptography", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationOptions:
    """How a command finds the cluster, and which operator is meant."""

    kubeconfig: Path | None = option(
        "How to reach the cluster.  [default: the service account of this pod]", metavar="FILE"
    )
    lease_namespace: str = option(
        "Where the lease is that one of the replicas holds.  [POD_NAMESPACE]",
        default="default",
        metavar="NAME",
        variable="POD_NAMESPACE",
    )
    lease_name: str = option("What the lease is called.", default="kvrouter-operator", metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a replica of the operator, and of how processes of deployments reach each other."""

    namespace: str = option("Look after this namespace alone.  [default: all]", default="", metavar="NAME")
    class_name: str = option(
        "Look after deployments whose annotation kvrouter.dev/class is this; without it that is kvrouter.",
        default="kvrouter",
        flag="--class",
        metavar="NAME",
    )
    image: str = option("The image that holds kvrouter.", is_required=True, metavar="IMAGE")
    wait_image: str | None = option(
        "The image of init containers: the one in use keeps engines from rolling.  [default: --image]",
        metavar="IMAGE",
    )
    wait_timeout_s: int = option(
        "How long a worker's init container waits for its place before it is started again.",
        default=300,
        at_least=1,
    )
    wait_resources: str | None = option(
        "The resources of that init container, as containers state them.  [default: limits of 500m, 256Mi]",
        metavar="JSON",
    )
    frontend_resources: str | None = option(
        "The resources of frontends that state none.  [default: limits of 2 CPUs, 4Gi]", metavar="JSON"
    )
    disruption_hold_s: int = option(
        "How long a zone that lost workers keeps its PodDisruptionBudget, and a renamed component its "
        "old pods: longer than an engine loads.",
        default=600,
        at_least=0,
    )
    nats_server: str | None = option(
        "NATS, as the pods of deployments reach it; needed where a plane is NATS.  [default: none]",
        metavar="URL",
    )
    discovery: Literal["kubernetes", "nats"] = option("Where workers are announced.", default="kubernetes")
    request_plane: str = option(
        "How frontends send requests to workers.",
        default="tcp",
        choices=written_setting("planes.request_plane").choices,
    )
    event_plane: str = option(
        "How KV events reach frontends. auto is zmq with --discovery kubernetes.",
        default="auto",
        choices=written_setting("planes.event_plane").choices,
    )
    plane_token_secret: str | None = option(
        "The Secret with the token that frontends and workers share; each namespace of deployments needs "
        "one of this name.  [default: no token]",
        metavar="NAME",
    )
    plane_token_key: str = option(
        "The key of that Secret under which the token is.", default="token", metavar="KEY"
    )
    admin_token_secret: str = option(
        "The Secret with the token of frontends' admin routes, in each namespace of deployments; where "
        "there is none of this name they are closed.",
        default="kvrouter-admin",
        metavar="NAME",
    )
    admin_token_key: str = option(
        "The key of that Secret under which the token is.", default="token", metavar="KEY"
    )
    network_policies: bool = option(
        "Write NetworkPolicies: pods of deployments take and make only the connections they need.",
        default=False,
    )
    api_server_ports: tuple[int, ...] = option(
        "Where the API server listens: pods with NetworkPolicies may connect to this port of any address. "
        "May be repeated.",
        default=(443, 6443),
        flag="--api-server-port",
        at_least=1,
        at_most=65535,
    )
    host: str = option("Where it listens.", default="0.0.0.0")  # noqa: S104
    http_port: int = option(
        "The port of /healthz, /readyz and /metrics.", default=8080, at_least=0, at_most=65535
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """The admission server."""

    admission_port: int = option(
        "The port of the admission server; with --certificate or --certificate-secret.",
        default=9443,
        at_least=0,
        at_most=65535,
    )
    certificate: Path | None = option(
        "Serve admission with FOLDER/tls.crt and tls.key, as cert-manager's Secret has them.",
        metavar="FOLDER",
    )
    certificate_secret: str | None = option(
        "Open it with a certificate of its own, kept in this Secret (same namespace) and renewed.",
        metavar="NAME",
    )
    webhook: str = option(
        "The ValidatingWebhookConfiguration that must trust it, and where it is the "
        "MutatingWebhookConfiguration of that name with -binding after it; with --certificate-secret.",
        default="kvrouter-operator",
        metavar="NAME",
    )
    service: str = option(
        "The Service by which that finds the webhook (same namespace); with --certificate-secret.",
        default="kvrouter-operator",
        metavar="NAME",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How it logs."""

    log_level: Literal["debug", "info", "warning", "error"] = option("", default="info", hides_default=True)
    log_format: Literal["text", "json"] = option("", default="text", hides_default=True)


@click.group()
def operator() -> None:
    """Look after DynamoGraphDeployments in a Kubernetes cluster."""


@operator.command("run", short_help="Run one replica of the operator.")
@takes(InstallationOptions, RunOptions, AdmissionOptions, LogOptions)
def operator_run(
    installation: InstallationOptions, options: RunOptions, admission: AdmissionOptions, log: LogOptions
) -> None:
    """Make of every DynamoGraphDeployment its Deployments and Services, and tell in its status how it is.

    Run two: one holds the lease and writes, the other follows, answers admission reviews, and takes over
    when the first one ends or is not heard of for 15 s.
    """
    with _extra_is_there(installation.kubeconfig):
        from kvrouter.kube.objects import Key  # noqa: PLC0415
        from kvrouter.operator.run import OperatorSettings, run_operator  # noqa: PLC0415
    begin_log(log.log_level, log.log_format)
    settings = OperatorSettings(
        identity=_identity(),
        lease=Key(installation.lease_namespace, installation.lease_name),
        defaults=_defaults(options),
        kubeconfig=installation.kubeconfig,
        namespace=options.namespace,
        class_name=options.class_name,
        host=options.host,
        http_port=options.http_port,
        admission_port=admission.admission_port,
        certificate=_certificate(admission, installation.lease_namespace),
    )
    sys.exit(run_operator(settings))


@operator.command("clean-up", short_help="Remove what uninstalling would leave in the cluster.")
@takes(InstallationOptions)
def operator_clean_up(installation: InstallationOptions) -> None:
    """Remove the admission policies that the operator with this lease wrote: no other object owns them.

    Run it before the operator is uninstalled. A replica that still leads stops within seconds; deployments
    and their pods go on. To run it again is no mistake.
    """
    with _extra_is_there(installation.kubeconfig):
        from kvrouter.kube.objects import Key  # noqa: PLC0415
        from kvrouter.operator.run import clean_up_operator  # noqa: PLC0415
    lease = Key(installation.lease_namespace, installation.lease_name)
    with working("removing the admission policies"):
        removed = clean_up_operator(lease, installation.kubeconfig, f"clean-up_{_identity()}")
    for line in removed or ["nothing to remove"]:
        echo(line)


@operator.command("preflight", short_help="Say whether the definitions can be installed here, and how.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="How to reach the cluster.  [default: KUBECONFIG, ~/.kube/config, or this pod's service account]",
)
@output_option
def operator_preflight(*, kubeconfig: Path | None, output: Output) -> None:
    """Look at the cluster before anything is installed or upgraded: a line for each definition says whose it
    is, and what to do. Changes nothing.

    Exits 1 where something is in the way: another project's definition of the same name, or one whose fields
    are somebody else's.
    """
    kubeconfig = kubeconfig or _own_kubeconfig()
    with _extra_is_there(kubeconfig):
        from kvrouter.operator.run import preflight_operator  # noqa: PLC0415
    with working("asking the cluster"):
        reports = preflight_operator(kubeconfig)

    def draw() -> None:
        for report in reports:
            echo(f"{report.name}: {report.message}")

    output.show(lambda: json_text([report._asdict() for report in reports]), draw)
    if any(report.is_conflict for report in reports):
        sys.exit(1)


@operator.command("convert", short_help="Write Dynamo's manifests as kvrouter's, and say what is lost.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def operator_convert(*, file: Path) -> None:
    """Read Dynamo's DynamoGraphDeployments of FILE, v1alpha1 or v1beta1, or of standard input for -, and
    write them as kvrouter's to standard output. ConfigMaps, claims and other objects in FILE are passed on.

    Standard error has a line for each field that is lost, or is written in another way. Needs no cluster, and
    changes nothing.

    Exits 0 where nothing is lost, 1 where something is, and 2, without a manifest, where FILE is invalid.
    """
    from kvrouter.cli.operator.convert import convert_file  # noqa: PLC0415

    sys.exit(convert_file(file))


def _own_kubeconfig() -> Path | None:
    """Where kubectl would look; None in a pod."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    return Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")


@contextmanager
def _extra_is_there(kubeconfig: Path | None) -> Iterator[None]:
    """Say of a package that is missing how to install it; the official client is for ``kubeconfig`` alone."""
    try:
        if kubeconfig is not None:
            import kvrouter.kube.kubeconfig  # noqa: F401, PLC0415
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OF_EXTRA:
            raise
        raise ConfigError(
            f"the operator needs {package}, which is not installed: pip install 'kvrouter[{EXTRA}]'"
        ) from error


def _identity() -> str:
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def _defaults(options: RunOptions) -> "PlanDefaults":
    from kvrouter.operator.plan.defaults import (  # noqa: PLC0415
        FRONTEND_RESOURCES,
        WAIT_RESOURCES,
        PlanDefaults,
        Resources,
        SecretKey,
        read_resources,
    )
    from kvrouter.settings.planes import DiscoveryBackend, EventPlaneKind, RequestPlaneKind  # noqa: PLC0415

    def resources(text: str | None, flag: str, usual: Resources) -> Resources:
        return usual if text is None else read_resources(text, flag)

    secret = options.plane_token_secret
    found = PlanDefaults(
        image=options.image,
        nats_server=options.nats_server,
        request_plane=RequestPlaneKind(options.request_plane),
        discovery=DiscoveryBackend(options.discovery),
        event_plane=EventPlaneKind(options.event_plane),
        plane_token=None if secret is None else SecretKey(secret, options.plane_token_key),
        admin_token=SecretKey(options.admin_token_secret, options.admin_token_key),
        wait_image=options.wait_image,
        wait_timeout_s=options.wait_timeout_s,
        wait_resources=resources(options.wait_resources, "--wait-resources", WAIT_RESOURCES),
        frontend_resources=resources(options.frontend_resources, "--frontend-resources", FRONTEND_RESOURCES),
        disruption_hold_s=options.disruption_hold_s,
        network_policies=options.network_policies,
        api_server_ports=options.api_server_ports,
    )
    for plane in found.transports_of_nats if options.nats_server is None else ():
        raise click.UsageError(f"--{plane} is NATS: say with --nats-server where that is")
    return found


def _certificate(
    admission: AdmissionOptions, namespace: str
) -> "CertificateFiles | CertificateSecret | None":
    from kvrouter.kube.objects import Key  # noqa: PLC0415
    from kvrouter.operator.servers import CertificateFiles, CertificateSecret  # noqa: PLC0415

    if admission.certificate is not None and admission.certificate_secret is not None:
        raise click.UsageError("give --certificate or --certificate-secret, and not both")
    if admission.certificate is not None:
        return CertificateFiles(cert=admission.certificate / "tls.crt", key=admission.certificate / "tls.key")
    if admission.certificate_secret is None:
        return None
    return CertificateSecret(
        secret=Key(namespace, admission.certificate_secret),
        webhook=admission.webhook,
        dns_names=(f"{admission.service}.{namespace}.svc",),
    )
