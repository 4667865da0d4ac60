"""What every way to sign in at an API server must do: send what it is given, and say what comes back."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from kvrouter.kube.account import AUTHORITY, TOKEN, Account, AccountConnection
from kvrouter.kube.client import ClusterLost, Connection, KubeClient, RequestRefused
from kvrouter.kube.kubeconfig import signed_in, user_of
from kvrouter.kube.objects import LEASES, Key, Manifest
from kvrouter.operator.admission.certificates import AUTHORITY_CERT, renewed
from tests.testing.asyncio_servers import port_of, serving

LEASE: Manifest = {
    "metadata": {"namespace": "here", "name": "one", "resourceVersion": "7"},
    "spec": {"holderIdentity": '\u00e9 "quoted"'},
}
SignIn = Callable[[str, Path], AbstractAsyncContextManager[Connection]]


@asynccontextmanager
async def by_account(url: str, folder: Path) -> AsyncIterator[Connection]:
    certificates = renewed(datetime.now(UTC), {}, ["127.0.0.1"]) or {}
    (folder / AUTHORITY).write_bytes(certificates[AUTHORITY_CERT])
    (folder / TOKEN).write_text("t0p\n")
    connection = AccountConnection(Account(url, folder, "here"))
    try:
        yield connection
    finally:
        await connection.close()


def write_kubeconfig(url: str, folder: Path, *, token: str = "t0p") -> Path:
    file = folder / "config"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )
    )
    return file


@asynccontextmanager
async def by_kubeconfig(url: str, folder: Path) -> AsyncIterator[Connection]:
    async with signed_in(write_kubeconfig(url, folder)) as connection:
        yield connection


@asynccontextmanager
async def by_kubeconfig_again(url: str, folder: Path) -> AsyncIterator[Connection]:
    connection = user_of(write_kubeconfig(url, folder), None, namespace="here").connection()
    try:
        yield connection
    finally:
        await connection.close()


class Server:
    """Records each request, and answers it with its own body, or with ``refusal``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], dict[str, str], Manifest | None]] = []
        self.refusal: web.Response | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body = json.loads(text) if text else None
        headers = {
            name: request.headers.get(name, "") for name in ("Authorization", "Accept", "Content-Type")
        }
        self.asked.append((request.method, request.path, dict(request.query), headers, body))
        return self.refusal or web.json_response(body or {"metadata": {}})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    scripted = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.answer)
    async with serving(app) as server:
        yield scripted, f"http://127.0.0.1:{port_of(server)}"


@pytest.fixture(params=[by_account, by_kubeconfig, by_kubeconfig_again])
def sign_in(request: pytest.FixtureRequest) -> SignIn:
    found: SignIn = request.param
    return found


async def test_each_verb_sends_its_method_path_query_and_body(
    server: tuple[Server, str], sign_in: SignIn, tmp_path: Path
) -> None:
    scripted, url = server
    async with sign_in(url, tmp_path) as connection:
        client = KubeClient(connection, manager="tests")
        for answer in (
            await client.create(LEASES, LEASE),
            await client.replace(LEASES, LEASE),
            await client.apply(LEASES, LEASE),
            await client.merge(LEASES, Key("here", "one"), LEASE),
        ):
            assert answer == LEASE
        await client.delete(LEASES, Key("here", "one"), uid="u1")
        assert await client.read(LEASES, Key("here", "one")) == {"metadata": {}}
    leases = "/apis/coordination.k8s.io/v1/namespaces/here/leases"
    one, managed = f"{leases}/one", {"fieldManager": "tests"}
    deletion: Manifest = {"propagationPolicy": "Background", "preconditions": {"uid": "u1"}}
    assert [(method, path, query, body) for method, path, query, _, body in scripted.asked] == [
        ("POST", leases, managed, LEASE),
        ("PUT", one, managed, LEASE),
        ("PATCH", one, {**managed, "force": "true"}, LEASE),
        ("PATCH", one, managed, LEASE),
        ("DELETE", one, {}, deletion),
        ("GET", one, {}, None),
    ]
    assert {headers["Authorization"] for _, _, _, headers, _ in scripted.asked} == {"Bearer t0p"}
    assert {headers["Accept"] for _, _, _, headers, _ in scripted.asked} == {"application/json"}
    assert [
        headers["Content-Type"].partition(";")[0] for _, _, _, headers, body in scripted.asked if body
    ] == [
        "application/json",
        "application/json",
        "application/apply-patch+yaml",
        "application/merge-patch+json",
        "application/json",
    ]


async def test_refusal_carries_status_reason_detail_and_retry_wait(
    server: tuple[Server, str], sign_in: SignIn, tmp_path: Path
) -> None:
    scripted, url = server
    status = {"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "slow down"}
    scripted.refusal = web.json_response(status, status=429, headers={"Retry-After": "3"})
    async with sign_in(url, tmp_path) as connection:
        with pytest.raises(RequestRefused) as raised:
            await KubeClient(connection).replace(LEASES, LEASE)
    refused = raised.value
    assert (refused.status, refused.reason, refused.detail, refused.wait_s) == (
        429,
        "TooManyRequests",
        "slow down",
        3.0,
    )
    assert len(scripted.asked) == 1


async def test_unreachable_api_server_is_a_lost_cluster(sign_in: SignIn, tmp_path: Path) -> None:
    async with sign_in("http://127.0.0.1:1", tmp_path) as connection:
        with pytest.raises(ClusterLost):
            await KubeClient(connection).read(LEASES, Key("here", "one"))


async def test_refused_user_signs_in_again_with_the_current_kubeconfig(
    server: tuple[Server, str], tmp_path: Path
) -> None:
    scripted, url = server
    async with by_kubeconfig_again(url, tmp_path) as connection:
        client, one = KubeClient(connection), Key("here", "one")
        await client.read(LEASES, one)
        write_kubeconfig(url, tmp_path, token="n3w")
        await client.read(LEASES, one)
        scripted.refusal = web.json_response({"kind": "Status", "code": 401}, status=401)
        with pytest.raises(RequestRefused):
            await client.read(LEASES, one)
        scripted.refusal = None
        (tmp_path / "config").rename(tmp_path / "aside")
        with pytest.raises(ClusterLost, match="config"):
            await client.read(LEASES, one)
        (tmp_path / "aside").rename(tmp_path / "config")
        await client.read(LEASES, one)
    shown = [headers["Authorization"] for _, _, _, headers, _ in scripted.asked]
    assert shown == ["Bearer t0p", "Bearer t0p", "Bearer t0p", "Bearer n3w"]
