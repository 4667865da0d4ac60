"""Other clusters by the settings: what is followed, and what is refused by its name."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvrouter.app.frontend_place import read_place
from kvrouter.app.router_transports import open_router_transports
from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.cli.commands import kvrouter
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import WorkerCard
from kvrouter.kube.kubeconfig import KubeconfigUser, user_of
from kvrouter.settings.planes import OtherCluster
from kvrouter.settings.sources import load_settings
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Telemetry
from kvrouter.transports.records.clusters import ClustersDiscovery
from kvrouter.transports.records.kubernetes import KubernetesDiscovery
from tests.testing.discovery_stores import card

VARIABLE = "KVROUTER_OTHER_CLUSTERS"


@pytest.fixture
def pod(tmp_path: Path) -> dict[str, str]:
    """The settings of a process in a pod, which needs no NATS."""
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text("models")
    return {
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_EVENT_PLANE": "zmq",
        "KVROUTER_KUBERNETES_ACCOUNT": str(tmp_path),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "1",
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A kubeconfig with two contexts, the second with a namespace."""
    place = {"cluster": "c", "user": "u"}
    path = tmp_path / "config"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "one",
                "contexts": [
                    {"name": "one", "context": place},
                    {"name": "two", "context": {**place, "namespace": "elsewhere"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return path


def settings(environ: dict[str, str], **more: str) -> Settings:
    return load_settings(flags={}, environ={**environ, **more}).settings


def rewrite(file: Path, text: str | None) -> None:
    """Replace what is in a file; None removes it, and nothing leaves it as it is."""
    if text is None:
        file.unlink()
    elif text:
        file.write_text(text)


async def refused(chosen: Settings, *, static: tuple[WorkerCard, ...] = ()) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        async with open_router_transports(chosen, Telemetry(), http_port=0, static=static):
            raise AssertionError
    return caught.value


def test_other_clusters_are_names_with_kubeconfigs_and_contexts() -> None:
    text = "west=/etc/west.yaml, far_1=/etc/far#arn:aws:eks:eu-west-1:1:cluster/far"
    chosen = load_settings(flags={"planes.other_clusters": text}, environ={}).settings.planes
    assert chosen.clusters == (
        OtherCluster("west", Path("/etc/west.yaml"), None),
        OtherCluster("far_1", Path("/etc/far"), "arn:aws:eks:eu-west-1:1:cluster/far"),
    )
    assert Settings().planes.clusters == ()


@pytest.mark.parametrize("text", ["west", "west=", "=/etc/west", "we.st=/etc/west", "west=/f#", "west=/f,"])
def test_malformed_other_cluster_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be NAME=KUBECONFIG or NAME=KUBECONFIG#CONTEXT") as caught:
        load_settings(flags={}, environ={VARIABLE: text})
    assert caught.value.message.startswith(f"{VARIABLE} (planes.other_clusters): ")


def test_cluster_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name each cluster once: west is there twice"):
        load_settings(flags={}, environ={VARIABLE: "west=/a,east=/b,west=/c"})


def test_own_cluster_name_without_other_clusters_is_a_warning() -> None:
    alone = load_settings(flags={"planes.cluster": "east"}, environ={})
    assert alone.warnings == ("planes.cluster has no effect without planes.other_clusters",)
    both = load_settings(flags={"planes.cluster": "east", "planes.other_clusters": "west=/f"}, environ={})
    assert both.warnings == ()


async def test_own_cluster_alone_uses_plain_kubernetes_discovery(pod: dict[str, str]) -> None:
    for chosen in (settings(pod), settings(pod, KVROUTER_CLUSTER_NAME="east")):
        async with open_router_transports(chosen, Telemetry(), http_port=0) as transports:
            assert isinstance(transports.discovery, KubernetesDiscovery)


async def test_other_clusters_are_followed_together_with_the_own_cluster(
    pod: dict[str, str], file: Path
) -> None:
    both = {"KVROUTER_CLUSTER_NAME": "east", VARIABLE: f"west={file},far={file}#two"}
    async with open_router_transports(settings(pod, **both), Telemetry(), http_port=0) as transports:
        assert isinstance(transports.discovery, ClustersDiscovery)


def test_namespace_is_the_contexts_or_else_the_given_one(file: Path) -> None:
    assert user_of(file, None, namespace="models") == KubeconfigUser(file, None, "models")
    assert user_of(file, "two", namespace="models").namespace == "elsewhere"


@pytest.mark.parametrize(
    ("param", "said", "more"),
    [
        ("cluster", "--cluster: must be set with --other-cluster", {"KVROUTER_CLUSTER_NAME": ""}),
        (
            "other_clusters",
            "--other-cluster: west is this process's own cluster",
            {"KVROUTER_CLUSTER_NAME": "west"},
        ),
        (
            "other_clusters",
            "--other-cluster: needs --discovery kubernetes, not file",
            {"DYN_DISCOVERY_BACKEND": "file"},
        ),
    ],
)
async def test_invalid_cluster_settings_are_refused_by_name(
    pod: dict[str, str], file: Path, param: str, said: str, more: dict[str, str]
) -> None:
    environ = {**pod, "KVROUTER_CLUSTER_NAME": "east", VARIABLE: f"west={file}", **more}
    error = await refused(settings(environ))
    assert error.param == param
    assert error.message.startswith(said)


@pytest.mark.parametrize(
    ("text", "context", "said"),
    [
        (None, "", "No such file or directory"),
        ("[]", "", "is no kubeconfig"),
        ("a: [", "", "while parsing"),
        ("{}", "", "Expected key current-context"),
        ("", "#three", "Expected object with name three"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_named_with_its_cluster(
    pod: dict[str, str], file: Path, text: str | None, context: str, said: str
) -> None:
    rewrite(file, text)
    error = await refused(settings(pod, KVROUTER_CLUSTER_NAME="east", **{VARIABLE: f"west={file}{context}"}))
    assert error.param == "other_clusters"
    assert error.message.startswith(f"--other-cluster west: {file}: ")
    assert said in error.message


async def test_static_workers_worker_processes_and_up_refuse_other_clusters(
    pod: dict[str, str], file: Path
) -> None:
    environ = {**pod, "KVROUTER_CLUSTER_NAME": "east", VARIABLE: f"west={file}"}
    error = await refused(settings(environ), static=(card(),))
    assert error.message == "--other-cluster: workers that are named by hand are all that is there"
    with pytest.raises(ConfigError, match="--other-cluster: a worker announces itself in its own cluster"):
        async with open_worker_transports(
            settings(environ), component="backend", has_local_indexer=False, publishes_kv_events=True
        ):
            raise AssertionError
    for more in ((), ("--engine-pods",)):
        ran = CliRunner().invoke(kvrouter, ["up", *more], env=environ)
        assert isinstance(ran.exception, ConfigError)
        assert ran.exception.message.startswith("--other-cluster: kvrouter up discovers no workers")


async def test_frontend_of_several_clusters_knows_its_cluster_without_a_file() -> None:
    near = load_settings(flags={"router.router_prefill_level": "cluster"}, environ={}).settings.router
    place = await read_place(near, {}, cluster="east")
    assert (place.domains, place.env) == ({"cluster": "east"}, None)
    with pytest.raises(ConfigError, match="own cluster is not known"):
        await read_place(near, {})
