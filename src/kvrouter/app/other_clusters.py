"""Discovery and cordons of other clusters, from the settings."""

from pathlib import Path

from kvrouter.app.telemetry_hooks import refusals_on, troubles_on
from kvrouter.core.errors import ConfigError
from kvrouter.kube.account import Account, account_of_pod
from kvrouter.kube.client import ClusterUser
from kvrouter.settings.planes import (
    OTHER_CLUSTER_FLAG,
    DiscoveryBackend,
    OtherCluster,
    PlaneSettings,
    refuse_clusters,
)
from kvrouter.telemetry import Telemetry
from kvrouter.transports.records.clusters import ClustersCordons, ClustersDiscovery
from kvrouter.transports.records.kubernetes import KubernetesCordons, KubernetesDiscovery
from kvrouter.transports.records.port import CordonStore, Discovery

EXTRA = "kubernetes"


def own_account(planes: PlaneSettings) -> Account:
    """Return the account with which ``--discovery kubernetes`` reads its own cluster. Raises ConfigError."""
    folder = Path(planes.kubernetes_account)
    return account_of_pod(folder, host=planes.kubernetes_host, port=planes.kubernetes_port)


def check_clusters(planes: PlaneSettings, *, discovers: bool = True) -> None:
    """Raise ConfigError where other clusters are configured and cannot be followed."""
    if not planes.clusters:
        return
    if not discovers:
        refuse_clusters(planes, "workers that are named by hand are all that is there")
    if planes.discovery is not DiscoveryBackend.KUBERNETES:
        refuse_clusters(planes, f"needs --discovery kubernetes, not {planes.discovery}")
    if planes.cluster is None:
        raise ConfigError(
            f"--cluster: must be set with {OTHER_CLUSTER_FLAG}: what this process's own cluster is called",
            param="cluster",
        )
    if planes.cluster in [other.name for other in planes.clusters]:
        refuse_clusters(planes, f"{planes.cluster} is this process's own cluster, by --cluster")


def with_other_clusters(planes: PlaneSettings, own: Discovery, telemetry: Telemetry) -> Discovery:
    """Return ``own`` and the discoveries of all other clusters as one, without connecting yet.

    ``planes`` must have passed :func:`check_clusters`. Raises ConfigError for an unreadable kubeconfig.
    """
    namespace = own_account(planes).namespace
    clusters: dict[str, Discovery] = {planes.cluster or "": own}
    for other in planes.clusters:
        clusters[other.name] = _other(planes, other, telemetry, namespace=namespace)
    refuse = refusals_on("discovery", telemetry)
    return ClustersDiscovery(clusters, on_refused=lambda what, why: refuse(f"{what}: {why}"))


def cordons_of_clusters(
    planes: PlaneSettings, own: CordonStore, telemetry: Telemetry
) -> tuple[CordonStore, list[KubernetesCordons]]:
    """Return the cordons of all clusters as one store, and the stores to close besides ``own``.

    ``planes`` must have passed :func:`check_clusters`.
    """
    namespace = own_account(planes).namespace
    refuse = refusals_on("discovery", telemetry)
    others = {
        other.name: KubernetesCordons(
            _user(other, namespace=namespace),
            namespace=planes.namespace,
            on_refused=lambda what, why, name=other.name: refuse(f"cluster {name}: {what}: {why}"),  # type: ignore[misc] # the name is bound now
        )
        for other in planes.clusters
    }
    clusters: dict[str, CordonStore] = {planes.cluster or "": own, **others}
    store = ClustersCordons(clusters, on_refused=lambda what, why: refuse(f"cordons of {what}: {why}"))
    return store, [*others.values()]


def _other(
    planes: PlaneSettings, other: OtherCluster, telemetry: Telemetry, *, namespace: str
) -> KubernetesDiscovery:
    """The discovery of another cluster. Its log lines name the cluster."""
    report, refuse = troubles_on("discovery"), refusals_on("discovery", telemetry)
    return KubernetesDiscovery(
        _user(other, namespace=namespace),
        namespace=planes.namespace,
        lease_s=planes.card_lease_s,
        on_trouble=lambda what, why: report(f"cluster {other.name}: {what}", why),
        on_refused=lambda what, why: refuse(f"cluster {other.name}: {what}: {why}"),
    )


def _user(other: OtherCluster, *, namespace: str) -> ClusterUser:
    try:
        from kvrouter.kube.kubeconfig import user_of  # noqa: PLC0415 - an extra of the package

        return user_of(other.kubeconfig, other.context, namespace=namespace)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != EXTRA:
            raise
        why = f"needs the official client, which is not installed: pip install 'kvrouter[{EXTRA}]'"
        raise ConfigError(f"{OTHER_CLUSTER_FLAG}: {why}", param="other_clusters") from error
    except ConfigError as error:
        raise ConfigError(
            f"{OTHER_CLUSTER_FLAG} {other.name}: {error.message}", param="other_clusters"
        ) from error
