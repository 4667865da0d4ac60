"""The admission door over real HTTPS: questions, limits, probes, and a certificate that changes."""

import asyncio
import base64
import io
import json
import os
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from pydantic import JsonValue

from kvrouter.core.errors import ConfigError
from kvrouter.operator.admission import server as server_module
from kvrouter.operator.admission.certificates import (
    AUTHORITY_CERT,
    SERVING_CERT,
    SERVING_KEY,
    ServingCertificate,
    renewed,
)
from kvrouter.operator.admission.review import Review
from kvrouter.operator.admission.server import (
    ANSWER_S,
    BINDING_BYTES_MAX,
    BODY_BYTES_MAX,
    AdmissionServer,
    Labels,
    ReadClusterInfo,
    Tried,
)
from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.api.deployment import UNKNOWN_MAX
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth
from kvrouter.operator.labels.binding import BindingTarget
from kvrouter.settings.problems import Problem
from tests.testing.calls import WatchCalls
from tests.testing.operator_deployments import GROVE, Document, deployment
from tests.testing.planned_deployments import DEFAULTS

NAMES = ("localhost", "127.0.0.1")
Data = dict[str, bytes]
POLICY: Document = {"clusterTopologyName": "fabric", "domain": "zone"}
SOON_S = 60.0


def secret() -> Data:
    data = renewed(datetime.now(UTC), {}, NAMES)
    assert data is not None
    return data


def write(folder: Path, data: Data) -> tuple[Path, Path]:
    """As a Secret's volume does: what is there is exchanged at once."""
    for name in (SERVING_CERT, SERVING_KEY):
        (folder / f".{name}").write_bytes(data[name])
        (folder / f".{name}").replace(folder / name)
    return folder / SERVING_CERT, folder / SERVING_KEY


class Heard(OperatorInstrumentation):
    def __init__(self) -> None:
        super().__init__(ReplicaHealth())
        self.verdicts: list[Verdict] = []
        self.reasons: list[str] = []
        self.labels: list[Mapping[str, str] | None] = []
        self.certificates: asyncio.Queue[str] = asyncio.Queue()

    def judged(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def bound(self, labels: Mapping[str, str] | None) -> None:
        self.labels.append(labels)

    def not_answered(self, reason: str) -> None:
        self.reasons.append(reason)

    def certificate_changed(self) -> None:
        self.certificates.put_nowait("changed")

    def certificate_refused(self, reason: str) -> None:
        self.certificates.put_nowait(reason)


@dataclass
class Opened:
    url: str
    heard: Heard
    data: Data
    folder: Path
    not_ready: str | None = None

    @asynccontextmanager
    async def client(self, data: Data | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        trusted = (data or self.data)[AUTHORITY_CERT].decode()
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=trusted))
        async with aiohttp.ClientSession(self.url, connector=connector) as session:
            yield session


async def known() -> ClusterInfo:
    return GROVE


async def placed(pod: BindingTarget) -> Mapping[str, str] | None:
    """Of the pod ``mine`` its place, of ``odd`` nothing that is known; the others are not ours."""
    return (
        None if pod.name == "odd" else {"a/zone": f"{pod.namespace}-{pod.node}"} if pod.name == "mine" else {}
    )


async def taken(_review: Review, _cluster_info: ClusterInfo, _within_s: float) -> Verdict:
    return Verdict()


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    read_cluster_info: ReadClusterInfo = known,
    labels: Labels = placed,
    tried: Tried = taken,
    info_timeout_s: float = SOON_S,
    labels_s: float = SOON_S,
    body_s: float = SOON_S,
    body_bytes_max: int = 100_000,
    reviews_max: int = 8,
    bindings_max: int = 8,
) -> AsyncIterator[Opened]:
    data = secret()
    certificate = ServingCertificate(*write(folder, data))
    found = Opened("", Heard(), data, folder)
    server = AdmissionServer(
        read_cluster_info=read_cluster_info,
        labels=labels,
        tried=tried,
        defaults=DEFAULTS,
        certificate=certificate,
        instrumentation=found.heard,
        not_ready=lambda: found.not_ready,
        info_timeout_s=info_timeout_s,
        body_s=body_s,
        labels_s=labels_s,
        reread_s=0.01,
        body_bytes_max=body_bytes_max,
        reviews_max=reviews_max,
        bindings_max=bindings_max,
    )
    port = await server.start("127.0.0.1", 0)
    found.url = f"https://localhost:{port}"
    try:
        yield found
    finally:
        await server.stop()


def review(document: JsonValue) -> Document:
    kind: JsonValue = {"group": "nvidia.com", "version": "v1beta1", "kind": "DynamoGraphDeployment"}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "1-2", "kind": kind, "operation": "CREATE", "object": document},
    }


def binding(name: str, **metadata: JsonValue) -> Document:
    target: JsonValue = {"kind": "Node", "name": "n1"}
    stored: JsonValue = {"metadata": {"name": name, **metadata}, "target": target}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "1-2",
            "kind": {"group": "", "version": "v1", "kind": "Binding"},
            "operation": "CREATE",
            "namespace": "fleet",
            "name": name,
            "object": stored,
        },
    }


async def bound(client: aiohttp.ClientSession, question: Document) -> Document:
    async with client.post("/bind", json=question) as answer:
        assert answer.status == 200
        response: Document = (await answer.json())["response"]
        assert (response["uid"], response["allowed"]) == ("1-2", True)
        return response


async def test_binding_is_patched_with_the_labels_of_the_pods_node(tmp_path: Path) -> None:
    async with opened(tmp_path) as server, server.client() as client:
        response = await bound(client, binding("mine", labels={"a/zone": "forged"}))
        assert response["patchType"] == "JSONPatch"
        assert json.loads(base64.b64decode(str(response["patch"]))) == [
            {"op": "add", "path": "/metadata/labels/a~1zone", "value": "fleet-n1"}
        ]
        for other in ("odd", "theirs"):
            assert "patch" not in await bound(client, binding(other))
    assert server.heard.labels == [{"a/zone": "fleet-n1"}, None, {}]


async def test_binding_is_answered_without_a_patch_when_labels_take_too_long(tmp_path: Path) -> None:
    async def never(_pod: BindingTarget) -> Mapping[str, str] | None:
        await asyncio.Event().wait()
        return {}

    async with opened(tmp_path, labels=never, labels_s=0.05) as server, server.client() as client:
        assert "patch" not in await bound(client, binding("mine"))
    assert server.heard.labels == [None]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"operation": "DELETE"}, "a Binding that is created"),
        ({"kind": {"group": "", "kind": "Pod"}}, "a Binding that is created"),
        ({"namespace": ""}, "request.namespace: must be there"),
        ({"object": {"target": {}}}, "request.object.target.name: must be there"),
        ({"object": None}, "request.object: must be an object"),
    ],
)
async def test_invalid_binding_review_is_answered_400_with_the_reason(
    tmp_path: Path, part: Document, reason: str
) -> None:
    question = binding("mine")
    request = question["request"]
    assert isinstance(request, dict)
    request.update(part)
    async with (
        opened(tmp_path) as server,
        server.client() as client,
        client.post("/bind", json=question) as answer,
    ):
        assert answer.status == 400
        assert reason in await answer.text()


async def test_bindings_at_their_limit_get_503_and_do_not_block_validation(tmp_path: Path) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def held(_pod: BindingTarget) -> Mapping[str, str] | None:
        entered.set()
        await go.wait()
        return {}

    async with opened(tmp_path, labels=held, bindings_max=1) as server, server.client() as client:
        first = asyncio.create_task(bound(client, binding("mine")))
        await entered.wait()
        async with client.post("/bind", json=binding("mine")) as answer:
            assert answer.status == 503
        async with client.post("/validate", json=review(deployment())) as answer:
            assert answer.status == 200
        go.set()
        await first


async def test_validation_review_is_answered_as_allowed_or_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as server, server.client() as client:
        async with client.post("/validate", json=review(deployment(graph=POLICY))) as answer:
            assert answer.status == 200
            assert (await answer.json())["response"] == {"uid": "1-2", "allowed": True}
        async with client.post("/validate", json=review({})) as answer:
            response = (await answer.json())["response"]
            assert (response["allowed"], response["status"]["message"]) == (False, "spec: is required")
    assert [verdict.is_allowed for verdict in server.heard.verdicts] == [True, False]


async def test_only_a_deployment_that_passes_validation_is_dry_run(tmp_path: Path) -> None:
    asked: list[str] = []

    async def refusing(review: Review, _cluster_info: ClusterInfo, _within_s: float) -> Verdict:
        asked.append(review.uid)
        return Verdict((Problem(("spec", "components", 1), "no room"),))

    async with opened(tmp_path, tried=refusing) as server, server.client() as client:
        for graph, reported in (
            ({"labelKey": "a/zone", "domain": "zone"}, "no room"),
            ({"domain": "zone"}, ""),
        ):
            document = deployment(graph=graph)
            async with client.post("/validate", json=review(document)) as answer:
                response = (await answer.json())["response"]
            assert response["allowed"] is False
            assert reported in response["status"]["message"]
    assert len(asked) == 1


async def test_the_dry_run_has_what_reading_the_cluster_leaves_of_the_answers_time(tmp_path: Path) -> None:
    left_s: list[float] = []

    async def slowly_known() -> ClusterInfo:
        await asyncio.sleep(0.1)
        return GROVE

    async def timed(_review: Review, _cluster_info: ClusterInfo, within_s: float) -> Verdict:
        left_s.append(within_s)
        return Verdict()

    async with (
        opened(tmp_path, read_cluster_info=slowly_known, tried=timed) as server,
        server.client() as client,
        client.post("/validate", json=review(deployment(graph=POLICY))) as answer,
    ):
        assert answer.status == 200
    assert left_s[0] <= ANSWER_S - 0.1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 50_000, "no JSON"),
        (b"{}", "must be an AdmissionReview of admission.k8s.io/v1"),
    ],
)
async def test_body_that_is_no_review_is_answered_400_with_the_reason(
    tmp_path: Path, body: bytes, reason: str
) -> None:
    async with opened(tmp_path) as server, server.client() as client:
        async with client.post("/validate", data=body) as answer:
            assert answer.status == 400
            assert reason in await answer.text()
        assert reason in server.heard.reasons[0]


def body_of(document: JsonValue) -> io.BytesIO:
    return io.BytesIO(json.dumps(review(document)).encode())


async def test_large_object_is_judged_off_the_event_loop_and_a_larger_one_refused(
    tmp_path: Path, watch_calls: WatchCalls
) -> None:
    judgements = watch_calls(server_module, "judged")
    document = deployment(graph=POLICY)
    document.update({f"x{n}": n for n in range(200_000)})
    async with opened(tmp_path, body_bytes_max=BODY_BYTES_MAX) as server, server.client() as client:
        async with client.post("/validate", data=body_of(document)) as answer:
            response = (await answer.json())["response"]
        assert response["allowed"]
        assert len(response["warnings"]) <= UNKNOWN_MAX + 1
        too_many: JsonValue = {f"x{n}": 1 for n in range(600_000)}
        async with client.post("/validate", data=body_of(too_many)) as answer:
            assert answer.status == 400
            assert "more values than are read" in await answer.text()
    assert judgements
    assert threading.current_thread().name not in {call.thread for call in judgements}


async def test_body_over_the_limit_is_answered_413(tmp_path: Path) -> None:
    async with opened(tmp_path, body_bytes_max=1_000) as server, server.client() as client:
        async with client.post("/validate", json=review("x" * 1_000)) as answer:
            assert answer.status == 413
        async with client.post("/validate", json=review("x")) as answer:
            assert answer.status == 200


async def test_binding_too_large_or_without_a_length_is_answered_413(tmp_path: Path) -> None:
    async def without_length() -> AsyncIterator[bytes]:
        yield b"{}"

    async with opened(tmp_path, body_bytes_max=2 * BINDING_BYTES_MAX) as server, server.client() as client:
        for body in (b" " * (BINDING_BYTES_MAX + 1), without_length()):
            async with client.post("/bind", data=body) as answer:
                assert answer.status == 413
        async with client.post("/bind", data=b" " * BINDING_BYTES_MAX) as answer:
            assert answer.status == 400


async def test_body_that_does_not_end_in_time_is_answered_408(tmp_path: Path) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with (
        opened(tmp_path, body_s=0.05) as server,
        server.client() as client,
        client.post("/validate", data=slow()) as answer,
    ):
        assert answer.status == 408


async def test_a_cluster_that_does_not_answer_counts_as_unread(tmp_path: Path) -> None:
    """What needs no topology is admitted all the same."""

    async def never() -> ClusterInfo:
        await asyncio.Event().wait()
        return GROVE

    async def refused() -> ClusterInfo:
        raise ConnectionRefusedError("nobody is there")

    for read_cluster_info, info_timeout_s, why in (
        (never, 0.05, "no answer within 0.05 s"),
        (refused, SOON_S, "nobody is there"),
    ):
        async with (
            opened(tmp_path, read_cluster_info=read_cluster_info, info_timeout_s=info_timeout_s) as server,
            server.client() as client,
        ):
            async with client.post("/validate", json=review(deployment(graph=POLICY))) as answer:
                response = (await answer.json())["response"]
                assert f"could not be read just now ({why})" in response["status"]["message"]
            async with client.post("/validate", json=review(deployment())) as answer:
                assert (await answer.json())["response"]["allowed"]


async def test_reviews_beyond_the_limit_are_answered_503(tmp_path: Path) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def held() -> ClusterInfo:
        entered.set()
        await go.wait()
        return GROVE

    async with opened(tmp_path, read_cluster_info=held, reviews_max=1) as server, server.client() as client:

        async def ask() -> int:
            async with client.post("/validate", json=review(deployment())) as answer:
                return answer.status

        first = asyncio.create_task(ask())
        await entered.wait()
        assert await ask() == 503
        go.set()
        assert await first == 200
        assert await ask() == 200


async def test_readyz_answers_503_with_the_reason_until_ready(tmp_path: Path) -> None:
    async with opened(tmp_path) as server, server.client() as client:
        server.not_ready = "the cluster was not read yet"
        async with client.get("/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "the cluster was not read yet\n")
        server.not_ready = None
        for path in ("/readyz", "/healthz"):
            async with client.get(path) as answer:
                assert answer.status == 200


async def test_changed_certificate_files_are_served_to_new_connections(tmp_path: Path) -> None:
    async with opened(tmp_path) as server, server.client() as before:
        async with before.get("/healthz") as answer:
            assert answer.status == 200
        other = secret()
        write(tmp_path, other)
        while await asyncio.wait_for(server.heard.certificates.get(), SOON_S) != "changed":
            pass
        async with server.client(other) as after, after.get("/healthz") as answer:
            assert answer.status == 200
        async with server.client() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get("/healthz")
        async with before.get("/healthz") as answer:
            assert answer.status == 200


async def test_certificate_and_key_that_do_not_match_leave_the_served_ones(tmp_path: Path) -> None:
    async with opened(tmp_path) as server:
        (tmp_path / SERVING_KEY).write_bytes(secret()[SERVING_KEY])
        reason = await asyncio.wait_for(server.heard.certificates.get(), SOON_S)
        assert str(tmp_path / SERVING_CERT) in reason
        async with server.client() as client, client.get("/healthz") as answer:
            assert answer.status == 200


def test_missing_certificate_file_is_a_config_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=os.fspath(tmp_path / "none.crt")):
        ServingCertificate(tmp_path / "none.crt", tmp_path / "none.key")


async def test_a_port_that_is_taken_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        other = AdmissionServer(
            read_cluster_info=known,
            labels=placed,
            tried=taken,
            defaults=DEFAULTS,
            certificate=ServingCertificate(*write(tmp_path, secret())),
            instrumentation=Heard(),
            not_ready=lambda: None,
        )
        with pytest.raises(OSError, match=str(port)):
            await other.start("127.0.0.1", port)
