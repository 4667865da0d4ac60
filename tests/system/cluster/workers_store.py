"""The API server as a store of worker cards: behind a proxy, so that a test can lose it."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from kvrouter.kube.account import Account
from kvrouter.transports.records.kubernetes import KubernetesDiscovery, OwnerPod
from kvrouter.transports.records.port import GoneSink
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import WAIT
from tests.testing.discovery_stores import LEASE_S
from tests.testing.processes import free_ports
from tests.testing.tcp_proxy import TcpProxy

DEFINITION = Path(__file__).parents[3] / "deploy" / "crds" / "kvrouter.dev_kvrouterworkers.yaml"
WORKER_VERBS = ("get", "create", "update")
FRONTEND_VERBS = ("list", "watch", "delete")


def install_definition(plane: ControlPlane) -> None:
    """Make the API server know the kind; returns once it does."""
    definition = yaml.safe_load(DEFINITION.read_text())
    plane.apply(definition)
    name = definition["metadata"]["name"]
    plane.kubectl("wait", "--for=condition=Established", f"crd/{name}", WAIT)
    plane.until_served(name)


def account(
    plane: ControlPlane,
    namespace: str,
    name: str,
    verbs: tuple[str, ...],
    folder: Path,
    *,
    resources: tuple[str, ...] = ("kvrouterworkers",),
) -> Account:
    """A service account with these rights and no others; ``folder`` is what its pods would find mounted."""
    metadata = {"namespace": namespace, "name": name}
    rule = {"apiGroups": ["kvrouter.dev"], "resources": list(resources), "verbs": list(verbs)}
    rbac = "rbac.authorization.k8s.io"
    plane.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": name}],
        },
    )
    for resource in resources:
        plane.until_granted(user_of(namespace, name), verbs[-1], f"{resource}.kvrouter.dev", namespace)
    return mounted(plane, namespace, name, folder)


def user_of(namespace: str, name: str) -> str:
    """The user as whom a service account signs in."""
    return f"system:serviceaccount:{namespace}:{name}"


def mounted(plane: ControlPlane, namespace: str, name: str, folder: Path) -> Account:
    """A service account that exists; ``folder`` is what its pods would find mounted."""
    folder.mkdir(parents=True)
    (folder / "token").write_text(plane.kubectl("create", "token", name, "--namespace", namespace))
    (folder / "ca.crt").write_bytes(plane.authority.certificate_pem)
    (folder / "namespace").write_text(namespace)
    return Account(plane.url, folder, namespace)


class KubernetesStore:
    """A fleet of its own in a namespace of Kubernetes; while it is lost, nobody listens where it was."""

    def __init__(self, plane: ControlPlane, account: Account, proxy: TcpProxy) -> None:
        self.plane = plane
        self.fleet = f"test-{secrets.token_hex(4)}"
        self.proxy = proxy
        self.ends: list[KubernetesDiscovery] = []
        self.troubles: list[tuple[str, str]] = []
        self.refusals: list[tuple[str, str]] = []
        self._account = Account(f"https://{LOOPBACK}:{proxy.port}", account.folder, account.namespace)
        self._port = proxy.port

    @property
    def selected(self) -> tuple[str, ...]:
        """What kubectl needs to find the fleet's objects."""
        namespace = self._account.namespace
        return ("kvw", "--namespace", namespace, "--selector", f"kvrouter.dev/namespace={self.fleet}")

    def end(
        self,
        *,
        account: Account | None = None,
        pod: OwnerPod | None = None,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
    ) -> KubernetesDiscovery:
        made = KubernetesDiscovery(
            account or self._account,
            namespace=self.fleet,
            on_trouble=lambda *trouble: self.troubles.append(trouble),
            on_refused=lambda *refusal: self.refusals.append(refusal),
            lease_s=lease_s,
            on_lost=on_lost,
            pod=pod,
        )
        self.ends.append(made)
        return made

    async def kubectl(self, *arguments: str) -> str:
        """What kubectl says, which needs no proxy."""
        return await asyncio.to_thread(self.plane.kubectl, *arguments)

    async def lose(self) -> None:
        await self.proxy.close()

    async def bring_back(self, *, is_empty: bool) -> None:
        if is_empty:
            await self.kubectl("delete", *self.selected)
        await self.proxy.start(self._port)


@asynccontextmanager
async def kubernetes_store(plane: ControlPlane, account: Account) -> AsyncIterator[KubernetesStore]:
    async with TcpProxy(LOOPBACK, urlsplit(plane.url).port or 0, port=free_ports(1)) as proxy:
        store = KubernetesStore(plane, account, proxy)
        try:
            yield store
        finally:
            for end in store.ends:
                await end.close()
