"""The settings of transports: discovery, request plane, event plane, security."""

import os
import re
import socket
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from annotated_types import Interval, MaxLen
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from kvrouter.core.errors import ConfigError
from kvrouter.settings.dynamo_settings import FOREIGN_DISCOVERY
from kvrouter.settings.setting import HostName, Positive, Secret, Section, Setting, Whole, refusing
from kvrouter.settings.setting_spec import Aliases, SettingGroup

LEASE_S = 10.0
KUBERNETES_LEASE_S = 60.0
"""An API server is shared with a whole cluster, and every renewal is a write to it."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?")


def _check_plain_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "must be letters, digits, dashes and underscores")
    return name


NAME_CHARS = 63

PlainName = Annotated[str, MaxLen(NAME_CHARS), AfterValidator(_check_plain_name)]
"""A name that may stand in a subject, a stream, a bucket and a path."""


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is a :data:`PlainName`."""
    return len(name) <= NAME_CHARS and _NAME.fullmatch(name) is not None


class OtherCluster(NamedTuple):
    """A cluster whose workers are served too. ``context`` is None for the file's current one."""

    name: str
    kubeconfig: Path
    context: str | None


def _other_cluster(given: str) -> OtherCluster:
    name, _, place = given.strip().partition("=")
    kubeconfig, hash_mark, context = place.partition("#")
    if not is_plain_name(name) or not kubeconfig or (hash_mark and not context):
        raise PydanticCustomError(
            "cluster",
            "must be NAME=KUBECONFIG or NAME=KUBECONFIG#CONTEXT, with commas between; a name is letters, "
            "digits, dashes and underscores",
        )
    return OtherCluster(name, Path(kubeconfig), context or None)


def _check_other_clusters(text: str) -> str:
    names = [_other_cluster(each).name for each in text.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError(
                "cluster_twice", "must name each cluster once: {name} is there twice", {"name": name}
            )
    return text


OTHER_CLUSTER_FLAG = "--other-cluster"


class DiscoveryBackend(StrEnum):
    """Where workers are announced."""

    AUTO = "auto"
    FILE = "file"
    NATS = "nats"
    KUBERNETES = "kubernetes"


class RequestPlaneKind(StrEnum):
    """How requests reach workers."""

    TCP = "tcp"
    HTTP = "http"
    NATS = "nats"


class EventPlaneKind(StrEnum):
    """How KV events reach routers."""

    AUTO = "auto"
    JETSTREAM = "jetstream"
    NATS = "nats"
    ZMQ = "zmq"


class PlaneSettings(Section):
    """What frontends and workers of one fleet agree on; one process alone needs none of it."""

    namespace: Annotated[PlainName, Setting(SettingGroup.PLANES, variable="DYN_NAMESPACE")] = "default"
    """Which fleet this process belongs to: it is part of every discovery key, subject, stream and bucket. A
    new namespace is a clean slate."""

    discovery: Annotated[
        DiscoveryBackend,
        refusing(FOREIGN_DISCOVERY),
        Setting(
            SettingGroup.PLANES,
            variable="DYN_DISCOVERY_BACKEND",
            aliases=Aliases(flags=("--discovery-backend",), names=("discovery_backend",)),
        ),
    ] = DiscoveryBackend.AUTO
    """Where workers announce themselves: in a directory of this host, in NATS, or as objects of the
    Kubernetes in whose pods they run. ``auto`` is NATS, but ``file`` with ``--no-kv-events`` where nothing
    else needs NATS and nothing is said of it: no server, no login, no request plane over it, no replica
    sync."""

    discovery_dir: Annotated[str | None, Setting(SettingGroup.PLANES)] = None
    """The directory of ``--discovery file``: one that is not there yet, is empty, or has been used for this.
    Unset: one of this user's, in the folder for temporary files."""

    kubernetes_account: Annotated[str, Setting(SettingGroup.PLANES)] = (
        "/var/run/secrets/kubernetes.io/serviceaccount"
    )
    """The directory with the token, authority and namespace of the service account that ``--discovery
    kubernetes`` uses."""

    kubernetes_host: Annotated[
        str | None, Setting(SettingGroup.PLANES, has_flag=False, variable="KUBERNETES_SERVICE_HOST")
    ] = None
    """Where the API server is. Kubernetes sets it in every pod."""

    kubernetes_port: Annotated[
        Annotated[Whole, Interval(ge=1, le=65535)],
        Setting(SettingGroup.PLANES, has_flag=False, variable="KUBERNETES_SERVICE_PORT"),
    ] = 443
    """The port of the API server. Kubernetes sets it in every pod."""

    pod_name: Annotated[str | None, Setting(SettingGroup.PLANES, has_flag=False, variable="POD_NAME")] = None
    """The pod that a worker runs in, from the Downward API. With ``POD_UID``, Kubernetes deletes the worker's
    card once the pod is gone."""

    pod_uid: Annotated[str | None, Setting(SettingGroup.PLANES, has_flag=False, variable="POD_UID")] = None
    """The uid of that pod, from the Downward API."""

    node_name: Annotated[
        str | None, Setting(SettingGroup.PLANES, has_flag=False, variable="POD_NODE_NAME")
    ] = None
    """The node of that pod, from the Downward API: ``kvrouter cordon node`` knows the worker by it. Unset:
    what this host calls itself."""

    cluster: Annotated[PlainName | None, Setting(SettingGroup.PLANES, variable="KVROUTER_CLUSTER_NAME")] = (
        None
    )
    """What a frontend or standalone router calls the Kubernetes cluster that its own discovery is in. It is
    needed with ``--other-cluster``, and has no effect without."""

    other_clusters: Annotated[
        Annotated[str, AfterValidator(_check_other_clusters)] | None,
        Setting(SettingGroup.PLANES, flag=OTHER_CLUSTER_FLAG),
    ] = None
    """Other Kubernetes clusters whose workers a frontend or standalone router serves too, as
    ``NAME=KUBECONFIG`` or ``NAME=KUBECONFIG#CONTEXT``, with commas between. Every worker is then in the
    domain ``cluster``, its broadest level. Needs ``--discovery kubernetes``."""

    lease_s: Annotated[
        Annotated[Positive, Interval(ge=0.5, le=3600)] | None, Setting(SettingGroup.PLANES, unit="seconds")
    ] = None
    """How long a worker that renews nothing stays announced. It is renewed three times in this time. Unset:
    10, and 60 with ``--discovery kubernetes``."""

    request_plane: Annotated[RequestPlaneKind, Setting(SettingGroup.PLANES, variable="DYN_REQUEST_PLANE")] = (
        RequestPlaneKind.TCP
    )
    """How requests reach workers: one connection for all streams of a frontend and a worker, an HTTP request
    for each, or over NATS. Workers and frontends must agree."""

    event_plane: Annotated[EventPlaneKind, Setting(SettingGroup.PLANES, variable="DYN_EVENT_PLANE")] = (
        EventPlaneKind.AUTO
    )
    """How a worker's KV events reach routers. ``auto`` is ZeroMQ with ``--discovery file``; else NATS Core
    for a worker with a local indexer and JetStream for one without. Routers hear each worker on its own."""

    nats_server: Annotated[str, Setting(SettingGroup.PLANES, variable="NATS_SERVER")] = (
        "nats://localhost:4222"
    )
    """The NATS servers, with commas between; ``tls://`` encrypts."""

    nats_replicas: Annotated[
        Annotated[Whole, Interval(ge=1, le=5)], Setting(SettingGroup.PLANES, unit="servers")
    ] = 1
    """How many servers of a NATS cluster keep each stream and bucket: with 3, one of them may die and nothing
    is lost. The process that makes a stream or bucket decides; those that exist already stay as they are."""

    nats_username: Annotated[
        str | None, Setting(SettingGroup.PLANES, has_flag=False, variable="NATS_AUTH_USERNAME")
    ] = None
    """The user at NATS."""

    nats_password: Annotated[
        Secret | None, Setting(SettingGroup.PLANES, has_flag=False, variable="NATS_AUTH_PASSWORD")
    ] = None
    """The user's password at NATS."""

    nats_token: Annotated[
        Secret | None, Setting(SettingGroup.PLANES, has_flag=False, variable="NATS_AUTH_TOKEN")
    ] = None
    """The token that NATS asks for."""

    nats_credentials: Annotated[
        str | None, Setting(SettingGroup.PLANES, variable="NATS_AUTH_CREDENTIALS_FILE")
    ] = None
    """A NATS credentials file."""

    plane_token: Annotated[Secret | None, Setting(SettingGroup.PLANES, has_flag=False)] = None
    """The secret that frontends and workers share. Over tcp, http, ZeroMQ and NATS, who does not know it is
    refused before anything that it sent is read; who may listen and delete on NATS, NATS itself decides. It
    has no flag, because the list of processes shows flags."""

    tls_cert: Annotated[
        str | None,
        Setting(
            SettingGroup.PLANES,
            aliases=Aliases(
                flags=("--tcp-tls-cert-path",),
                variables=("DYN_TCP_TLS_CERT_PATH",),
                names=("tcp_tls_cert_path",),
            ),
        ),
    ] = None
    """This process's certificate, a PEM file: the tcp and http planes are encrypted."""

    tls_key: Annotated[
        str | None,
        Setting(
            SettingGroup.PLANES,
            aliases=Aliases(
                flags=("--tcp-tls-key-path",),
                variables=("DYN_TCP_TLS_KEY_PATH",),
                names=("tcp_tls_key_path",),
            ),
        ),
    ] = None
    """The key of the certificate, a PEM file."""

    tls_ca: Annotated[
        str | None,
        Setting(
            SettingGroup.PLANES,
            aliases=Aliases(
                flags=("--tcp-tls-ca-cert-path",),
                variables=("DYN_TCP_TLS_CA_CERT_PATH",),
                names=("tcp_tls_ca_cert_path",),
            ),
        ),
    ] = None
    """The authority that signed the certificates of the others, a PEM file. Also for NATS."""

    listen_host: Annotated[HostName, Setting(SettingGroup.PLANES)] = "127.0.0.1"
    """The address on which a worker takes requests and questions. 0.0.0.0 is every interface: set a plane
    token then."""

    listen_port: Annotated[Annotated[Whole, Interval(ge=0, le=65535)], Setting(SettingGroup.PLANES)] = 0
    """The port on which a worker takes requests; at 0 the system picks a free one, which the card states."""

    advertise_host: Annotated[HostName | None, Setting(SettingGroup.PLANES)] = None
    """The name under which others reach this worker. Unset: the listen address, or this host's name where
    that is every interface."""

    health_port: Annotated[
        Annotated[Whole, Interval(ge=1, le=65535)] | None, Setting(SettingGroup.PLANES)
    ] = None
    """The port of a worker's ``/health`` and ``/accepting``, on its listen address, without TLS: for whatever
    starts it and asks whether it is well. Unset: it has no such port."""

    open_timeout_s: Annotated[Positive, Setting(SettingGroup.PLANES, unit="seconds")] = 5.0
    """How long a worker may take to accept a request; then it is sent elsewhere."""

    dead_after_s: Annotated[Positive, Setting(SettingGroup.PLANES, unit="seconds")] = 5.0
    """How long a worker's connection may be silent, heartbeats included, until the worker counts as dead."""

    hello_within_s: Annotated[Positive, Setting(SettingGroup.PLANES, unit="seconds")] = 5.0
    """How long a connection to a worker, over tcp or http, has to show the plane token; then it is closed."""

    hello_connections_max: Annotated[
        Annotated[Whole, Interval(ge=8, le=65536)], Setting(SettingGroup.PLANES, unit="connections")
    ] = 128
    """How many connections to a worker may not have shown the plane token yet, and how many its health port
    has. Where one more comes the oldest is dropped: strangers never take the places of frontends."""

    def settled(self, *, kv_events: bool, replica_sync: bool = False) -> "PlaneSettings":
        """Return these settings with the discovery of ``auto``, by the other parts that need NATS."""
        if self.discovery is not DiscoveryBackend.AUTO:
            return self
        is_given = self.model_fields_set & {
            name for name in type(self).model_fields if name.startswith("nats_")
        }
        needed = kv_events or replica_sync or self.request_plane is RequestPlaneKind.NATS or is_given
        found = DiscoveryBackend.NATS if needed else DiscoveryBackend.FILE
        return self.model_copy(update={"discovery": found})

    @property
    def card_lease_s(self) -> float:
        """The lease of a worker's card, in seconds."""
        if self.lease_s is not None:
            return self.lease_s
        return KUBERNETES_LEASE_S if self.discovery is DiscoveryBackend.KUBERNETES else LEASE_S

    @property
    def node(self) -> str:
        """The node or host that a worker of this process is on."""
        return self.node_name or socket.gethostname()

    @property
    def clusters(self) -> tuple[OtherCluster, ...]:
        """The other clusters, in the order in which they are given."""
        return tuple(map(_other_cluster, self.other_clusters.split(","))) if self.other_clusters else ()

    @property
    def discovery_path(self) -> Path:
        """The directory of ``--discovery file``."""
        if self.discovery_dir is not None:
            return Path(self.discovery_dir)
        runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return Path(runtime) / f"kvrouter-{os.getuid()}"


def refuse_clusters(planes: PlaneSettings, why: str) -> None:
    """Raise ConfigError that says ``why``, where other clusters are named."""
    if planes.other_clusters:
        raise ConfigError(f"{OTHER_CLUSTER_FLAG}: {why}", param="other_clusters")
