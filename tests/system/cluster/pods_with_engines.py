"""Pods whose engines are small servers of this process; the test writes what a kubelet would."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from openai import AsyncOpenAI

from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster
from kvrouter.kube.account import Account
from kvrouter.text.source import MOCK_FOLDER
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE
from tests.system.cluster.pods import BY_HAND
from tests.system.cluster.workers_store import install_definition, mounted
from tests.testing.attached_engines import CONTEXT_TOKENS, config
from tests.testing.processes import Fleet, Frontend, Running, eventually, fleet, free_ports
from tests.testing.small_engine import SmallEngine, small_engine
from tests.testing.small_engine_protocols import VllmProtocol
from tests.testing.tcp_proxy import TcpProxy

EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes-engines"
PROMPT = [5, 6, 7] * 20


def example(name: str, namespace: str) -> list[dict[str, Any]]:
    """The manifests of an example, for this namespace."""
    found = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    for each in found:
        each["metadata"]["namespace"] = namespace
        for subject in each.get("subjects", ()):
            subject["namespace"] = namespace
    return found


def service_account(plane: ControlPlane, namespace: str, folder: Path) -> Account:
    """The account of the example, with the example's rights and no others."""
    plane.apply(*(each for each in example("kvrouter.yaml", namespace) if "spec" not in each))
    return mounted(plane, namespace, "kvrouter", folder)


def allow_cards(plane: ControlPlane, namespace: str) -> None:
    """Let that account announce workers as objects, stand by for them, and find them, as the pages say."""
    install_definition(plane)
    metadata = {"namespace": namespace, "name": "kvrouter-cards"}
    verbs = ["get", "create", "update", "list", "watch", "delete"]
    found = example("kvrouter.yaml", namespace)
    binding = next(each for each in found if each["kind"] == "RoleBinding")
    plane.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [{"apiGroups": ["kvrouter.dev"], "resources": ["kvrouterworkers"], "verbs": verbs}],
        },
        {**binding, "metadata": metadata, "roleRef": {**binding["roleRef"], "name": "kvrouter-cards"}},
    )


class PodsWithEngines:
    """A namespace with engines in its pods, and kvrouter before them. The network to the API server is a
    proxy's, which a test may close.
    """

    def __init__(
        self, plane: ControlPlane, account: Account, proxy: TcpProxy, processes: Fleet, stack: AsyncExitStack
    ) -> None:
        self.plane = plane
        self.proxy = proxy
        self.cluster = MockCluster()
        self.engines: dict[str, SmallEngine] = {}
        self._namespace = account.namespace
        self._environ = {
            "KUBERNETES_SERVICE_HOST": LOOPBACK,
            "KUBERNETES_SERVICE_PORT": str(proxy.port),
            "KVROUTER_KUBERNETES_ACCOUNT": str(account.folder),
        }
        self._processes = processes
        self._stack = stack

    async def kubectl(self, *arguments: str) -> str:
        return await asyncio.to_thread(self.plane.kubectl, *arguments, "--namespace", self._namespace)

    async def up(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Frontend:
        """Start ``kvrouter up --engine-pods``; return once its door is open."""
        more = {**self._environ, **(environ or {})}
        return await self._processes.door("up", "--engine-pods", *arguments, environ=more)

    async def workers(self, planes: Mapping[str, str], *arguments: str) -> Running:
        """Start ``kvrouter worker pods``; return once it follows the pods."""
        return await self._processes.worker(*arguments, engine="pods", environ={**self._environ, **planes})

    async def frontend(self, planes: Mapping[str, str]) -> Frontend:
        """Start a frontend for workers of other processes."""
        return await self._processes.frontend(environ={**self._environ, **planes})

    async def pod(
        self, name: str, *, zone: str, role: Role = Role.BOTH, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Create a pod with a new engine in it, which is bound to a node of this zone, and not ready yet."""
        engine = await self._stack.enter_async_context(
            small_engine(VllmProtocol(CONTEXT_TOKENS), config(role), self.cluster)
        )
        self.engines[name] = engine
        said = {"role": role.value, "tokenizer": str(MOCK_FOLDER), **(annotations or {})}
        ports = [{"name": "http", "containerPort": urlsplit(engine.url).port}]
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "namespace": self._namespace,
                "name": name,
                "labels": {**BY_HAND, "kvrouter.dev/engine": "vllm"},
                "annotations": {f"kvrouter.dev/{key}": value for key, value in said.items()},
            },
            "spec": {
                "nodeSelector": {ZONE: zone},
                "containers": [{"name": "engine", "image": "example.com/nothing:1", "ports": ports}],
            },
        }
        await asyncio.to_thread(self.plane.apply, manifest)
        await self.kubectl("wait", "--for=condition=PodScheduled", f"pod/{name}", "--timeout=120s")

    async def set_ready(self, *names: str, ready: bool = True) -> None:
        """Write what a kubelet would write of these pods."""
        status = {
            "phase": "Running",
            "podIP": LOOPBACK,
            "podIPs": [{"ip": LOOPBACK}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        for name in names:
            patch = json.dumps({"status": status})
            await self.kubectl(
                "patch", "pod", name, "--subresource=status", "--type=merge", f"--patch={patch}"
            )

    async def delete(self, *names: str) -> None:
        """Let pods be gone, and their engines with them."""
        for name in names:
            await self.engines[name].stop()
        await self.kubectl("delete", "pod", *names, "--force", "--grace-period=0")

    async def uid(self, name: str) -> str:
        return await self.kubectl("get", "pod", name, "--output=jsonpath={.metadata.uid}")

    async def events(self, name: str) -> list[tuple[str, str]]:
        """The reasons and messages of what was reported of a pod by kvrouter."""
        found = json.loads(
            await self.kubectl(
                "get", "events", "--output=json", f"--field-selector=involvedObject.name={name}"
            )
        )
        return [
            (each["reason"], each["message"])
            for each in found["items"]
            if each["source"].get("component") == "kvrouter"
        ]


async def there(frontend: Frontend) -> list[tuple[int, str, str, bool]]:
    """The ids, roles, zones of the workers that a frontend has, and whether they drain."""
    found = (await frontend.fleet())["workers"]
    return sorted(
        (each["worker_id"], each["role"], each["domains"].get("zone", ""), each["draining"]) for each in found
    )


async def until_there(frontend: Frontend, n: int) -> None:
    """Wait until a frontend serves so many workers."""
    await eventually(partial(frontend.serves, n))


async def completed(frontend: Frontend) -> str:
    """What a real client gets for a completion; its own errors where it gets none."""
    async with AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    return answer.choices[0].text


@asynccontextmanager
async def pods_with_engines(plane: ControlPlane, account: Account) -> AsyncIterator[PodsWithEngines]:
    """Nothing yet but the service account."""
    target = urlsplit(plane.url).port or 0
    async with (
        TcpProxy(LOOPBACK, target, port=free_ports(1)) as proxy,
        AsyncExitStack() as stack,
        fleet() as processes,
    ):
        yield PodsWithEngines(plane, account, proxy, processes, stack)
