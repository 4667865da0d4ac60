"""What discovery by Kubernetes reads and writes, without an API server."""

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrouter.app.router_transports import nats_needs
from kvrouter.core.backoff import Backoff, Failures
from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.kube.account import Account, AccountConnection, Token, account_of_pod
from kvrouter.kube.client import ClusterError, KubeClient, RequestRefused
from kvrouter.kube.informer import wait_after
from kvrouter.kube.objects import FLEET_LABEL, WORKERS
from kvrouter.operator.plan.manifest import fleet_name
from kvrouter.settings.sources import load_settings
from kvrouter.transports.records.card_tracker import RENEWALS_PER_LEASE
from kvrouter.transports.records.encoding import CARDS, CardRecord
from kvrouter.transports.records.kubernetes import KubernetesDiscovery, OwnerPod
from kvrouter.transports.records.kubernetes.api import reason
from kvrouter.transports.records.kubernetes.cards import LEASE_S, WorkerObjects
from kvrouter.transports.records.kubernetes.objects import (
    StoredObject,
    checked_fleet,
    encode_object,
)
from tests.testing.discovery_stores import card, ignore_reports

RECORD = CardRecord(card(5), 60.0, (), False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a pod finds of its service account."""
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(f"the {name}\n")
    return tmp_path


async def test_connection_is_kept_alive_between_two_renewals(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_s: list[float] = []

    class Recorded(aiohttp.TCPConnector):
        def __init__(self, *, keepalive_timeout: float = 15.0, limit: int, ssl: Any) -> None:  # theirs
            kept_s.append(keepalive_timeout)
            super().__init__(keepalive_timeout=keepalive_timeout, limit=limit, ssl=ssl)

    monkeypatch.setattr(aiohttp, "TCPConnector", Recorded)
    monkeypatch.setattr(Account, "ssl_context", lambda _: ssl.create_default_context())
    server = KubeClient(AccountConnection(Account("https://127.0.0.1:1", folder, "models")), answer_s=5.0)
    with pytest.raises(ClusterError):
        await server.ask("GET", "/")
    await server.close()
    assert [LEASE_S / RENEWALS_PER_LEASE < each < 90.0 for each in kept_s] == [True]


def objects_of(folder: Path, fleet: str) -> WorkerObjects:
    user = Account("https://nowhere", folder, "default")
    return WorkerObjects(user, fleet=fleet, lease_s=60.0, on_refused=ignore_reports, pod=None)


def found_as(name: str, *, fleet: str) -> StoredObject:
    """What the API server has under a name."""
    body = encode_object(WORKERS, name, CARDS.encode(RECORD), fleet=fleet)
    return msgspec.json.decode(body, type=StoredObject)


def test_record_survives_encoding_as_an_object(folder: Path) -> None:
    body = encode_object(
        WORKERS,
        "a-1-5",
        CARDS.encode(RECORD),
        fleet="a-1",
        renewals=3,
        replaces="17",
        owners=(OwnerPod("pod-1", "uid-1").reference(),),
    )
    found = msgspec.json.decode(body, type=StoredObject)
    record = objects_of(folder, "a-1").opened(found)
    assert (record.key, record.value, record.version.version) == ("5", RECORD, "17")
    assert msgspec.json.decode(body)["metadata"] == {
        "name": "a-1-5",
        "resourceVersion": "17",
        "labels": {"kvrouter.dev/namespace": "a-1"},
        "annotations": {"kvrouter.dev/renewals": "3"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "pod-1", "uid": "uid-1"}],
    }


@pytest.mark.parametrize("name", ["a-1-6", "a-5", "a-1-05", "a-1-", "b-1-5", "a-1-99999999999999999999"])
def test_object_with_name_of_another_fleet_or_worker_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ProtocolError):
        objects_of(folder, "a-1").opened(found_as(name, fleet="a-1"))


def test_fleet_of_an_operator_deployment_has_its_own_object_names(folder: Path) -> None:
    mine = objects_of(folder, "team_a-1")
    assert mine.name_of("5") == "team.a-1-5"
    found = found_as("team.a-1-5", fleet="team_a-1")
    assert found.metadata.labels == {FLEET_LABEL: "team_a-1"}
    assert mine.opened(found).value == RECORD
    for other in ("team-a-1", "team_a_1", "team_a"):
        with pytest.raises(ProtocolError):
            objects_of(folder, other).opened(found)
    long = fleet_name("n" * 60, "d.e" * 60)
    assert checked_fleet(long) == long
    assert checked_fleet(fleet_name("team", "a-1")) == "team_a-1"
    assert checked_fleet(fleet_name("1team", "a.b")) != checked_fleet(fleet_name("1team", "a-b"))


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("namespace", {"namespace": "Space"}),
        ("namespace", {"namespace": "a.b"}),
        ("namespace", {"namespace": "a__b"}),
        ("namespace", {"namespace": "a_-b"}),
        ("namespace", {"namespace": "a" * 64}),
        ("namespace", {"namespace": "-a"}),
        ("namespace", {"namespace": ""}),
        ("lease_s", {"lease_s": 0.0}),
    ],
)
def test_arguments_out_of_range_are_refused(folder: Path, param: str, changes: dict[str, object]) -> None:
    arguments = {"namespace": "space", "on_trouble": ignore_reports, "on_refused": ignore_reports, **changes}
    with pytest.raises(ConfigError) as refused:
        KubernetesDiscovery(Account("https://nowhere", folder, "default"), **arguments)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_pod_account_has_api_server_url_and_namespace(folder: Path) -> None:
    found = account_of_pod(folder, host="10.0.0.1", port=443)
    assert found == Account("https://10.0.0.1:443", folder, "the namespace")
    assert account_of_pod(folder, host="fd00::1", port=6443).url == "https://[fd00::1]:6443"


def test_missing_pod_environment_or_token_is_refused_with_the_fix(folder: Path) -> None:
    with pytest.raises(ConfigError, match="choose file or nats"):
        account_of_pod(folder, host=None, port=443)
    (folder / "token").unlink()
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        account_of_pod(folder, host="10.0.0.1", port=443)


def test_a_token_that_was_refused_is_read_again(folder: Path) -> None:
    token = Token(Account("https://nowhere", folder, "default"))
    assert token.read() == "the token"
    (folder / "token").write_text("another")
    assert token.read() == "the token"
    token.refused()
    assert token.read() == "another"


@pytest.mark.parametrize(
    ("code", "fix"), [(403, "bind a Role"), (404, "kubectl apply"), (500, "says 500 Why: how")]
)
def test_api_server_refusal_is_reported_with_the_fix(code: int, fix: str) -> None:
    assert fix in reason(RequestRefused("how", status=code, reason="Why"), WORKERS)


def test_retry_waits_double_up_to_a_limit_and_follow_retry_after() -> None:
    failures = Failures(Backoff(0.1, 1.0))
    waits = [wait_after(failures, TimeoutError()) for _ in range(6)]
    for least_s, wait_s in zip((0.1, 0.2, 0.4, 0.8, 1.0, 1.0), waits, strict=True):
        assert least_s <= wait_s <= 1.5 * least_s
    assert wait_after(failures, RequestRefused("slow down", status=429, wait_s=30.0)) >= 30.0
    failures.reset()
    assert wait_after(failures, TimeoutError()) <= 0.15


@pytest.mark.parametrize(
    ("event_plane", "needs"), [("auto", True), ("nats", True), ("jetstream", True), ("zmq", False)]
)
def test_kubernetes_discovery_needs_nats_unless_event_plane_is_zmq(event_plane: str, needs: bool) -> None:
    environ = {"DYN_DISCOVERY_BACKEND": "kubernetes", "DYN_EVENT_PLANE": event_plane}
    settings = load_settings(flags={}, environ=environ).settings
    assert bool(nats_needs(settings)) is needs


def test_default_card_lease_is_longer_with_kubernetes_discovery() -> None:
    for backend, lease_s in (("file", 10.0), ("nats", 10.0), ("kubernetes", 60.0)):
        found = load_settings(flags={}, environ={"DYN_DISCOVERY_BACKEND": backend})
        assert found.settings.planes.card_lease_s == lease_s
    reported = load_settings(
        flags={}, environ={"DYN_DISCOVERY_BACKEND": "kubernetes", "KVROUTER_LEASE_S": "12"}
    )
    assert reported.settings.planes.card_lease_s == 12.0
