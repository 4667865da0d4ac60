"""The tests' kubelet: what it makes of a pod follows from the pod alone, and nothing of it stays."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvrouter.settings.variables import without_service_links
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.kubelet import Kubelet, PlayedPod
from tests.system.cluster.kubelet.api import Api
from tests.system.cluster.kubelet.fields import NotPlayedError, Outside, expanded, field
from tests.system.cluster.kubelet.volumes import exchange
from tests.system.cluster.pods import BY_HAND
from tests.testing.asyncio_transports import track_transports
from tests.testing.waits import until

POD = {"metadata": {"name": "p", "labels": {"a.b/c": "here"}}, "spec": {"nodeName": "n"}}
GONE = "--timeout=240s"
PLACE = {"name": "place", "mountPath": "/etc/place"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("metadata.labels['a.b/c']", "here"),
        ("metadata.labels['other']", ""),
        ("metadata.annotations['other']", ""),
        ("metadata.name", "p"),
        ("spec.nodeName", "n"),
        ("status.podIP", "127.1.1.1"),
    ],
)
def test_a_field_reference_reads_the_pods_own_value(path: str, said: str) -> None:
    assert field(POD, path, "127.1.1.1") == said


def test_an_unsupported_field_reference_is_an_error() -> None:
    with pytest.raises(NotPlayedError, match="hostIP"):
        field(POD, "status.hostIP", "127.1.1.1")


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("--mount-path=/etc/place", "--mount-path=/root/place"),
        ("/etc/place/zone:/etc/place", "/root/place/zone:/root/place"),
        ("/etc/placement", "/etc/placement"),
        ("/mnt/etc/place", "/mnt/etc/place"),
        ("/etc/place/inner/x", "/root/inner/x"),
        ("0.0.0.0", "127.1.1.1"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ],
)
def test_only_mount_paths_and_the_address_are_rewritten(word: str, here: str) -> None:
    mounts = {"/etc/place": Path("/root/place"), "/etc/place/inner/": Path("/root/inner")}
    assert Outside(mounts, "127.1.1.1").word(word) == here


def test_variable_references_are_expanded_as_in_kubernetes() -> None:
    assert expanded("$(A)-$(B)-$$(A)-$A", {"A": "x"}) == "x-$(B)-$(A)-$A"


def test_volume_files_are_exchanged_atomically(tmp_path: Path) -> None:
    exchange(tmp_path, {"zone": b"a", "rack": b"r"})
    before = (tmp_path / "zone").resolve()
    exchange(tmp_path, {"zone": b"b"})
    assert (tmp_path / "zone").read_bytes() == b"b"
    assert not (tmp_path / "rack").is_symlink()
    assert not before.exists()
    assert (tmp_path / "..data").is_symlink()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("..")] == ["zone"]


async def test_a_cancelled_api_call_leaves_no_connection_open(plane: ControlPlane) -> None:
    for turns in (*range(0, 20), *range(20, 400, 20)):
        with track_transports() as transports:
            async with Api(plane) as api:
                asking = asyncio.create_task(api.read("/api/v1/namespaces/default/pods"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait([asking])
            await transports.until_ended()


async def test_a_played_pod_retries_its_init_container_restarts_and_ends(
    plane: ControlPlane, namespace: str
) -> None:
    async with Kubelet(plane, namespace) as kubelet:
        kubelet.hold_files()
        plane.apply(two_step_pod(namespace))
        await until(lambda: bool(kubelet.pods))
        (pod,) = kubelet.pods.values()
        (waits,), (main,) = pod.init_containers, pod.containers
        await until(lambda: waits.starts >= 3)
        assert main.starts == 0
        await until(lambda: init_status(pod).get("restartCount", 0) >= 2)
        assert init_status(pod)["lastState"]["terminated"]["exitCode"] == 1
        assert "no file" in init_status(pod)["lastState"]["terminated"]["message"]
        assert not pod.is_ready
        kubelet.release_files()
        await until(lambda: pod.is_ready)
        await until(lambda: main.log == f"here two-step {pod.address} 3\n")
        plane.kubectl("label", "pod/two-step", "place=there", "--overwrite", "--namespace", namespace)
        await until(lambda: (pod.volume("place") / "zone").read_text() == "there")
        main.kill()
        await until(lambda: main.log.endswith(f"there two-step {pod.address} 3\n"))
        await until(lambda: main.starts == 2)  # it may write before whoever started it knows
        await asyncio.to_thread(plane.kubectl, "delete", "pod/two-step", "--namespace", namespace, GONE)
        assert main.log.endswith("bye\n")
        assert not main.is_running
        await until(lambda: not kubelet.pods)


@pytest.mark.parametrize("links", [None, True, False])
async def test_containers_get_service_variables_unless_their_pod_opts_out(
    plane: ControlPlane, namespace: str, links: bool | None
) -> None:
    ports = [{"name": "http", "port": 8000}]
    of = {"namespace": namespace, "name": "kvrouter-x"}
    plane.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": of, "spec": {"ports": ports}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**of, "name": "headless"},
            "spec": {"ports": ports, "clusterIP": "None"},
        },
    )
    address = plane.read("service", "kvrouter-x", "--namespace", namespace)["spec"]["clusterIP"]
    tells = {"name": "main", "image": "example.com/sh:1", "command": ["/bin/sh", "-c"]}
    spec: dict[str, Any] = {
        "containers": [{**tells, "args": ["env; echo that is all; while :; do sleep 0.1; done"]}]
    }
    if links is not None:
        spec["enableServiceLinks"] = links
    metadata = {"namespace": namespace, "name": f"tells-{namespace}", "labels": BY_HAND}
    async with Kubelet(plane, namespace) as kubelet:
        plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await until(lambda: any(pod.is_ready for pod in kubelet.pods.values()))
        (pod,) = kubelet.pods.values()
        await until(lambda: pod.containers[0].log.endswith("that is all\n"))
        environ = dict(line.split("=", 1) for line in pod.containers[0].log.splitlines()[:-1])
    assert environ["KUBERNETES_SERVICE_PORT_HTTPS"] == environ["KUBERNETES_SERVICE_PORT"]
    assert not [name for name in environ if name.startswith("HEADLESS")]
    reported = {name: value for name, value in environ.items() if name.startswith("KVROUTER_X")}
    if links is False:
        assert reported == {}
    else:
        assert len(reported) == 8
        assert reported["KVROUTER_X_PORT"] == reported["KVROUTER_X_PORT_8000_TCP"] == f"tcp://{address}:8000"
        assert without_service_links(environ).keys().isdisjoint(reported)
    plane.kubectl("delete", f"pod/tells-{namespace}", "--namespace", namespace, "--grace-period=0", "--force")


async def test_running_containers_are_killed_with_the_kubelet(plane: ControlPlane, namespace: str) -> None:
    async with Kubelet(plane, namespace) as kubelet:
        plane.apply(two_step_pod(namespace))
        await until(lambda: any(pod.is_ready for pod in kubelet.pods.values()))
        (pod,) = kubelet.pods.values()
        process = pod.containers[0].process
        assert process is not None
        os.kill(process.pid, 0)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    plane.kubectl("delete", "pod/two-step", "--namespace", namespace, "--grace-period=0", "--force")


def init_status(pod: PlayedPod) -> dict[str, Any]:
    found: list[dict[str, Any]] = pod.stored.get("status", {}).get("initContainerStatuses", [])
    return found[0] if found else {}


def two_step_pod(namespace: str) -> dict[str, Any]:
    """A pod whose first step wants a file, and whose second tells of itself and says goodbye."""
    wants = "test -s /etc/place/zone || { echo no file; exit 1; }"
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    parts = f"$(tr . '\\n' < {account}/token | grep -c .)"
    tells = f"echo $(cat /etc/place/zone) $MINE $WHERE {parts}"
    says_goodbye = "trap 'echo bye; exit' TERM"  # before it tells of itself, since it is ended once it has
    stays = "while :; do sleep 0.1; done"
    names = {"MINE": "metadata.name", "WHERE": "status.podIP"}
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in names.items()]
    shell = {"image": "example.com/sh:1", "command": ["/bin/sh", "-c"], "volumeMounts": [PLACE]}
    fell_back = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    zone = {"path": "zone", "fieldRef": {"fieldPath": "metadata.labels['place']"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": "two-step", "labels": {**BY_HAND, "place": "here"}},
        "spec": {
            "initContainers": [{**shell, **fell_back, "name": "wants", "args": [wants]}],
            "containers": [
                {**shell, "name": "main", "args": [f"{says_goodbye}; {tells}; {stays}"], "env": env}
            ],
            "volumes": [{"name": "place", "downwardAPI": {"items": [zone]}}],
        },
    }
