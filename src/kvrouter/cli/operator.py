"""``kvrouter operator``: the operator of a Kubernetes cluster."""

import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvrouter.cli.flags import output_option
from kvrouter.commands.output import Output, echo, json_text
from kvrouter.config.setting_spec import written_setting
from kvrouter.core.errors import ConfigError

if TYPE_CHECKING:  # these need the extra
    from kvrouter.operator.plan import PlanDefaults
    from kvrouter.operator.servers import CertificateFiles, CertificateSecret

EXTRA = "kubernetes"
OF_EXTRA = ("cryptography", "kubernetes")

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """What ``kvrouter operator run`` was given."""

    kubeconfig: Path | None
    lease_namespace: str
    lease_name: str
    namespace: str
    class_name: str
    image: str
    wait_image: str | None
    wait_timeout_s: int
    wait_resources: str | None
    frontend_resources: str | None
    disruption_hold_s: int
    nats_server: str | None
    discovery: str
    request_plane: str
    event_plane: str
    plane_token_secret: str | None
    plane_token_key: str
    admin_token_secret: str
    admin_token_key: str
    network_policies: bool
    api_server_ports: tuple[int, ...]
    host: str
    http_port: int
    admission_port: int
    certificate: Path | None
    certificate_secret: str | None
    webhook: str
    service: str


@click.group()
def operator() -> None:
    """Look after DynamoGraphDeployments in a Kubernetes cluster."""


def of_installation(command: F) -> F:
    """Add the options by which every command finds the cluster, and which operator is meant."""
    for option in (
        click.option(
            "--lease-name",
            default="kvrouter-operator",
            show_default=True,
            metavar="NAME",
            help="What the lease is called.",
        ),
        click.option(
            "--lease-namespace",
            envvar="POD_NAMESPACE",
            default="default",
            show_default=True,
            metavar="NAME",
            help="Where the lease is that one of the replicas holds.  [POD_NAMESPACE]",
        ),
        click.option(
            "--kubeconfig",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="How to reach the cluster.  [default: the service account of this pod]",
        ),
    ):
        command = option(command)
    return command


def of_planes(command: F) -> F:
    """Add the options that say how the processes of deployments find and reach each other."""
    for option in (
        click.option(
            "--api-server-port",
            "api_server_ports",
            type=click.IntRange(1, 65_535),
            multiple=True,
            default=(443, 6443),
            show_default=True,
            help="Where the API server listens: pods with NetworkPolicies may connect to this port of any "
            "address. May be repeated.",
        ),
        click.option(
            "--network-policies",
            is_flag=True,
            help="Write NetworkPolicies: pods of deployments take and make only the connections they need.",
        ),
        click.option(
            "--admin-token-key",
            default="token",
            show_default=True,
            metavar="KEY",
            help="The key of that Secret under which the token is.",
        ),
        click.option(
            "--admin-token-secret",
            default="kvrouter-admin",
            show_default=True,
            metavar="NAME",
            help="The Secret with the token of frontends' admin routes, in each namespace of deployments; "
            "where there is none of this name they are closed.",
        ),
        click.option(
            "--plane-token-key",
            default="token",
            show_default=True,
            metavar="KEY",
            help="The key of that Secret under which the token is.",
        ),
        click.option(
            "--plane-token-secret",
            metavar="NAME",
            help="The Secret with the token that frontends and workers share; each namespace of deployments "
            "needs one of this name.  [default: no token]",
        ),
        click.option(
            "--event-plane",
            type=click.Choice(written_setting("planes.event_plane").choices),
            default="auto",
            show_default=True,
            help="How KV events reach frontends. auto is zmq with --discovery kubernetes.",
        ),
        click.option(
            "--request-plane",
            type=click.Choice(written_setting("planes.request_plane").choices),
            default="tcp",
            show_default=True,
            help="How frontends send requests to workers.",
        ),
        click.option(
            "--discovery",
            type=click.Choice(["kubernetes", "nats"]),
            default="kubernetes",
            show_default=True,
            help="Where workers are announced.",
        ),
        click.option(
            "--nats-server",
            metavar="URL",
            help="NATS, as the pods of deployments reach it; needed where a plane is NATS.  [default: none]",
        ),
    ):
        command = option(command)
    return command


def of_admission(command: F) -> F:
    """Add the options of the admission server."""
    for option in (
        click.option(
            "--service",
            default="kvrouter-operator",
            show_default=True,
            metavar="NAME",
            help="The Service by which that finds the webhook (same namespace); with --certificate-secret.",
        ),
        click.option(
            "--webhook",
            default="kvrouter-operator",
            show_default=True,
            metavar="NAME",
            help="The ValidatingWebhookConfiguration that must trust it, and where it is the "
            "MutatingWebhookConfiguration of that name with -binding after it; with --certificate-secret.",
        ),
        click.option(
            "--certificate-secret",
            metavar="NAME",
            help="Open it with a certificate of its own, kept in this Secret (same namespace) and renewed.",
        ),
        click.option(
            "--certificate",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help="Serve admission with FOLDER/tls.crt and tls.key, as cert-manager's Secret has them.",
        ),
        click.option(
            "--admission-port",
            type=click.IntRange(0, 65_535),
            default=9443,
            show_default=True,
            help="The port of the admission server; with --certificate or --certificate-secret.",
        ),
    ):
        command = option(command)
    return command


@operator.command("run", short_help="Run one replica of the operator.")
@of_installation
@click.option(
    "--namespace",
    default="",
    metavar="NAME",
    help="Look after this namespace alone.  [default: all]",
)
@click.option(
    "--class",
    "class_name",
    default="kvrouter",
    show_default=True,
    metavar="NAME",
    help="Look after deployments whose annotation kvrouter.dev/class is this; without it that is kvrouter.",
)
@click.option("--image", required=True, metavar="IMAGE", help="The image that holds kvrouter.")
@click.option(
    "--wait-image",
    metavar="IMAGE",
    help="The image of init containers: the one in use keeps engines from rolling.  [default: --image]",
)
@click.option(
    "--wait-timeout-s",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="How long a worker's init container waits for its place before it is started again.",
)
@click.option(
    "--wait-resources",
    metavar="JSON",
    help="The resources of that init container, as containers state them.  [default: limits of 500m, 256Mi]",
)
@click.option(
    "--frontend-resources",
    metavar="JSON",
    help="The resources of frontends that state none.  [default: limits of 2 CPUs, 4Gi]",
)
@click.option(
    "--disruption-hold-s",
    type=click.IntRange(min=0),
    default=600,
    show_default=True,
    help="How long a zone that lost workers keeps its PodDisruptionBudget, and a renamed component its "
    "old pods: longer than an engine loads.",
)
@of_planes
@click.option("--host", default="0.0.0.0", show_default=True, help="Where it listens.")  # noqa: S104
@click.option(
    "--http-port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="The port of /healthz, /readyz and /metrics.",
)
@of_admission
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
def operator_run(*, log_level: str, log_format: str, **flags: object) -> None:
    """Make of every DynamoGraphDeployment its Deployments and Services, and tell in its status how it is.

    Run two: one holds the lease and writes, the other follows, answers admission reviews, and takes over
    when the first one ends or is not heard of for 15 s.
    """
    run_flags = RunFlags(**flags)  # type: ignore[arg-type]  # click checked them
    with _extra_is_there(run_flags.kubeconfig):
        from kvrouter.kube.objects import Key  # noqa: PLC0415
        from kvrouter.operator.run import OperatorSettings, run_operator  # noqa: PLC0415
    from kvrouter.telemetry.logs import configure_logging  # noqa: PLC0415

    configure_logging(log_level, log_format=log_format)
    settings = OperatorSettings(
        identity=_identity(),
        lease=Key(run_flags.lease_namespace, run_flags.lease_name),
        defaults=_defaults(run_flags),
        kubeconfig=run_flags.kubeconfig,
        namespace=run_flags.namespace,
        class_name=run_flags.class_name,
        host=run_flags.host,
        http_port=run_flags.http_port,
        admission_port=run_flags.admission_port,
        certificate=_certificate(run_flags),
    )
    sys.exit(run_operator(settings))


@operator.command("clean-up", short_help="Remove what uninstalling would leave in the cluster.")
@of_installation
def operator_clean_up(*, kubeconfig: Path | None, lease_namespace: str, lease_name: str) -> None:
    """Remove the admission policies that the operator with this lease wrote: no other object owns them.

    Run it before the operator is uninstalled. A replica that still leads stops within seconds; deployments
    and their pods go on. To run it again is no mistake.
    """
    with _extra_is_there(kubeconfig):
        from kvrouter.kube.objects import Key  # noqa: PLC0415
        from kvrouter.operator.run import clean_up_operator  # noqa: PLC0415
    removed = clean_up_operator(Key(lease_namespace, lease_name), kubeconfig, f"clean-up_{_identity()}")
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
    from kvrouter.commands.operator_convert import convert_file  # noqa: PLC0415

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


def _defaults(run_flags: RunFlags) -> "PlanDefaults":
    from kvrouter.config.planes import DiscoveryBackend, EventPlaneKind, RequestPlaneKind  # noqa: PLC0415
    from kvrouter.operator.plan import PlanDefaults, SecretKey  # noqa: PLC0415
    from kvrouter.operator.plan.defaults import (  # noqa: PLC0415
        FRONTEND_RESOURCES,
        WAIT_RESOURCES,
        Resources,
        read_resources,
    )

    def resources(text: str | None, flag: str, usual: Resources) -> Resources:
        return usual if text is None else read_resources(text, flag)

    secret = run_flags.plane_token_secret
    found = PlanDefaults(
        image=run_flags.image,
        nats_server=run_flags.nats_server,
        request_plane=RequestPlaneKind(run_flags.request_plane),
        discovery=DiscoveryBackend(run_flags.discovery),
        event_plane=EventPlaneKind(run_flags.event_plane),
        plane_token=None if secret is None else SecretKey(secret, run_flags.plane_token_key),
        admin_token=SecretKey(run_flags.admin_token_secret, run_flags.admin_token_key),
        wait_image=run_flags.wait_image,
        wait_timeout_s=run_flags.wait_timeout_s,
        wait_resources=resources(run_flags.wait_resources, "--wait-resources", WAIT_RESOURCES),
        frontend_resources=resources(
            run_flags.frontend_resources, "--frontend-resources", FRONTEND_RESOURCES
        ),
        disruption_hold_s=run_flags.disruption_hold_s,
        network_policies=run_flags.network_policies,
        api_server_ports=run_flags.api_server_ports,
    )
    for plane in found.planes_of_nats if run_flags.nats_server is None else ():
        raise click.UsageError(f"--{plane} is NATS: say with --nats-server where that is")
    return found


def _certificate(run_flags: RunFlags) -> "CertificateFiles | CertificateSecret | None":
    from kvrouter.kube.objects import Key  # noqa: PLC0415
    from kvrouter.operator.servers import CertificateFiles, CertificateSecret  # noqa: PLC0415

    if run_flags.certificate is not None and run_flags.certificate_secret is not None:
        raise click.UsageError("give --certificate or --certificate-secret, and not both")
    if run_flags.certificate is not None:
        return CertificateFiles(cert=run_flags.certificate / "tls.crt", key=run_flags.certificate / "tls.key")
    if run_flags.certificate_secret is None:
        return None
    return CertificateSecret(
        secret=Key(run_flags.lease_namespace, run_flags.certificate_secret),
        webhook=run_flags.webhook,
        dns_names=(f"{run_flags.service}.{run_flags.lease_namespace}.svc",),
    )
