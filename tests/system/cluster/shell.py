"""A terminal on a control plane: what a page's commands do, with the tests' kubelet behind the pods."""

import asyncio
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests.system.cluster.charted import (
    NAME,
    lead,
    operator_as_deployed,
    reachable,
    run_job,
)
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.kubelet import Kubelet, PlayedPod
from tests.system.cluster.operators import Operator
from tests.system.cluster.pods import BY_HAND
from tests.testing.console_examples import Step
from tests.testing.helm_chart import Manifest, is_hook, of_kind, rendered
from tests.testing.tcp_proxy import TcpProxy

ROOT = Path(__file__).parents[3]
NAMESPACE = "default"
ENDS_WITHIN_S = 300.0
SETTING = re.compile(r"--set (\S+?)=(\S+)")

NOT_HERE = ("docker ", "kind ")
"""What these begin cannot be done here: there are no containers and no registry."""


class Shell:
    """Runs the commands of pages, from the repository's root, as the administrator.

    Helm's are done by the chart's own manifests, and the chart's operator is a process. ``kubectl exec``,
    ``logs`` and ``port-forward``, which ask a node's kubelet, are answered by the kubelet of these tests.
    """

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder
        self._stack = AsyncExitStack()
        self._release = AsyncExitStack()
        self._manifests: list[Manifest] = []
        self._operator: Operator | None = None
        self._doors: dict[str, str] = {}
        self._played: dict[str, Callable[[str], Coroutine[Any, Any, str]]] = {
            "helm install ": self._install,
            "helm uninstall ": self._uninstall,
            "kubectl port-forward ": self._forward,
            "kubectl exec ": self._execute,
            "kubectl logs ": self._logs,
        }

    async def __aenter__(self) -> Self:
        _lay_out(self._folder)
        self._kubelet = await self._stack.enter_async_context(Kubelet(self._plane, NAMESPACE))
        await self._stack.enter_async_context(self._release)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, step: Step) -> str:
        """Do what a step says; answers with what it wrote. Raises AssertionError when it fails."""
        if step.command.startswith(NOT_HERE):
            return "\n".join(step.shown)
        for beginning, play in self._played.items():
            if step.command.startswith(beginning):
                return await play(step.command.replace("\\\n", " "))
        program = (sys.executable, "-c") if step.is_python else ("bash", "-o", "pipefail", "-c")
        return await self._process(*program, self._reachable(step.command))

    async def _process(self, *argv: str) -> str:
        environ = {
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            "HOME": str(self._folder),
            "KUBECONFIG": str(self._plane.admin),
        }
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self._folder,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(ENDS_WITHIN_S):
            said, _ = await process.communicate()
        text = said.decode()
        assert process.returncode == 0, f"{argv[-1]}\nended with {process.returncode}: {text}"
        return text

    def _reachable(self, command: str) -> str:
        for reported, here in self._doors.items():
            command = command.replace(reported, here)
        return command

    async def _install(self, command: str) -> str:
        (namespace,) = re.findall(r"--namespace (\S+)", command)
        values: dict[str, Any] = reachable()
        for key, value in SETTING.findall(command):
            group, _, name = key.partition(".")
            values.setdefault(group, {})[name] = value
        self._manifests = rendered(values, namespace=namespace)
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        shipped = [each for each in self._manifests if not is_hook(each)]
        await asyncio.to_thread(self._plane.apply, made, *shipped)
        await asyncio.to_thread(lead, self._plane, namespace)
        replica = operator_as_deployed(self._plane, namespace, "one")
        self._operator = await self._release.enter_async_context(replica)
        return ""

    async def _uninstall(self, command: str) -> str:
        (namespace,) = re.findall(r"--namespace (\S+)", command)
        await self._release.aclose()
        hooks = [each for each in self._manifests if is_hook(each) and each["kind"] != "Pod"]
        (job,) = of_kind(hooks, "Job")
        accounts = [each for each in hooks if each is not job]
        shipped = [each for each in self._manifests if not is_hook(each)]
        await self._delete(*reversed(shipped))
        await asyncio.to_thread(self._plane.apply, *accounts)
        await run_job(self._plane, namespace, job)
        await self._delete(*reversed(accounts))
        return f'release "{shlex.split(command)[2]}" uninstalled\n'

    async def _delete(self, *manifests: Manifest) -> None:
        stdin = yaml.safe_dump_all(manifests)
        await asyncio.to_thread(self._plane.kubectl, "delete", "--filename", "-", stdin=stdin)

    async def _forward(self, command: str) -> str:
        """To one pod, as kubectl does: the same for as long as the command runs."""
        words = [word for word in shlex.split(command)[2:] if word != "&"]
        target, port = words[0], words[1]
        if target == f"deployment/{NAME}":
            assert self._operator is not None
            proxy = TcpProxy("127.0.0.1", self._operator_port())
        else:
            proxy = TcpProxy(self._pod(target).address, int(port))
        await self._stack.enter_async_context(proxy)
        self._doors[f"localhost:{port}"] = f"127.0.0.1:{proxy.port}"
        return ""

    def _operator_port(self) -> int:
        (deployment,) = of_kind(self._manifests, "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return int(next(each["containerPort"] for each in container["ports"] if each["name"] == "http"))

    async def _execute(self, command: str) -> str:
        before, _, words = command.partition(" -- ")
        code, said = await self._pod(shlex.split(before)[2]).execute(shlex.split(words))
        assert code == 0, f"{command}\nended with {code}: {said}"
        return said

    async def _logs(self, command: str) -> str:
        words = shlex.split(command)[2:]
        if words[0] == f"deployment/{NAME}":
            assert self._operator is not None
            return self._operator.log
        pod = self._pod(words[0])
        name = words[words.index("-c") + 1] if "-c" in words else pod.containers[0].name
        every = (*pod.init_containers, *pod.containers)
        container = next(each for each in every if each.name == name)
        log = container.log
        for mount in container.spec.get("volumeMounts", []):
            log = log.replace(str(pod.volume(mount["name"])), mount["mountPath"])
        return log

    def _pod(self, target: str) -> PlayedPod:
        """A Ready pod of ``deployment/llm-decode`` or ``service/llm-frontend``."""
        component = target.rpartition("-")[2]
        return next(pod for pod in self._kubelet.of(component) if pod.is_ready)


def _lay_out(folder: Path) -> None:
    """Make the folder look like the repository, with examples whose pods are left to the tests' kubelet."""
    for name in ("deploy", "docs"):
        (folder / name).symlink_to(ROOT / name)
    examples = folder / "examples" / "kubernetes"
    shutil.copytree(ROOT / "examples" / "kubernetes", examples)
    for path in examples.glob("*.yaml"):
        documents = list(yaml.safe_load_all(path.read_text()))
        for each in of_kind(documents, "DynamoGraphDeployment"):
            for component in each["spec"]["components"]:
                template = component.setdefault("podTemplate", {"spec": {}})
                template.setdefault("metadata", {}).setdefault("labels", {}).update(BY_HAND)
        path.write_text(yaml.safe_dump_all(documents))
