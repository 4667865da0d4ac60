"""A fleet of processes whose planes are encrypted and ask for a token, as the settings say it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer, TlsFiles, running_nats
from tests.testing.processes import Frontend, eventually, fleet

TOKEN = "a long secret of this fleet"
NATS_TOKEN = "letmein"
PROMPT = words(n=200)
NATS = {"DYN_DISCOVERY_BACKEND": "nats", "NATS_AUTH_TOKEN": NATS_TOKEN}
PLANES = [
    pytest.param({}, (), id="file-tcp-zmq"),
    pytest.param(
        {**NATS, "DYN_REQUEST_PLANE": "http", "DYN_ROUTER_REPLICA_SYNC": "true"}, (), id="nats-http-jetstream"
    ),
    pytest.param(
        {**NATS, "DYN_REQUEST_PLANE": "nats"},
        ("--enable-local-indexer",),
        id="nats-nats-core",
    ),
]


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """The settings of a process that has a certificate of the fleet's authority."""
    return issued(trustme.CA(), tmp_path)


def issued(authority: trustme.CA, folder: Path) -> dict[str, str]:
    mine = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    cert.write_bytes(b"".join(pem.bytes() for pem in mine.cert_chain_pems))
    mine.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    return {"KVROUTER_TLS_CERT": str(cert), "KVROUTER_TLS_KEY": str(key), "KVROUTER_TLS_CA": str(ca)}


@pytest.fixture
def closed_nats(certificates: dict[str, str]) -> Iterator[NatsServer]:
    """A server that takes nobody without the token and a certificate of the authority."""
    files = TlsFiles(
        Path(certificates["KVROUTER_TLS_CERT"]),
        Path(certificates["KVROUTER_TLS_KEY"]),
        client_ca=Path(certificates["KVROUTER_TLS_CA"]),
    )
    with running_nats(token=NATS_TOKEN, tls=files) as server:
        yield server


async def is_served(frontend: Frontend) -> bool:
    body = {"model": "mock", "prompt": PROMPT, "max_tokens": 4}
    return (await frontend.http.post("/v1/completions", json=body)).status_code == 200


async def has_cached(frontend: Frontend) -> bool:
    page = await frontend.fleet()
    return any(rank["index_blocks"] for worker in page["workers"] for rank in worker["ranks"])


async def hears_another(frontend: Frontend) -> bool:
    return (await frontend.metrics()).total("replicas") == 1


async def refuses_cards(frontend: Frontend) -> bool:
    return (await frontend.metrics()).total("planes_refused_total", plane="discovery") > 0


async def sees_workers_that_do_not_answer(frontend: Frontend) -> bool:
    workers = (await frontend.fleet())["workers"]
    return bool(workers) and not any(worker["alive"] for worker in workers)


@pytest.mark.parametrize(("environ", "flags"), PLANES)
async def test_only_processes_with_token_and_certificate_are_served(
    environ: dict[str, str],
    flags: tuple[str, ...],
    certificates: dict[str, str],
    closed_nats: NatsServer,
) -> None:
    where = f"tls://127.0.0.1:{closed_nats.port}"
    shared = {"NATS_SERVER": where, "KVROUTER_PLANE_TOKEN": TOKEN, **certificates, **environ}
    async with fleet(shared) as processes:
        zone = ("--domain", "zone=a", "--kv-transfer-domain", "zone", "--speedup", "20", *flags)
        await processes.worker("--role", "prefill", *zone)
        await processes.worker("--role", "decode", *zone)
        frontend = await processes.frontend()
        await eventually(lambda: is_served(frontend))
        await eventually(lambda: has_cached(frontend))
        assert (await frontend.metrics()).total("handoffs_total", prefill_domain="a", decode_domain="a") >= 1
        if "DYN_ROUTER_REPLICA_SYNC" in environ:
            other = await processes.frontend()
            await eventually(lambda: hears_another(other))

        strangers = [await processes.frontend(environ={"KVROUTER_PLANE_TOKEN": "guessed"})]
        if "DYN_DISCOVERY_BACKEND" not in environ:  # else NATS itself sends it away
            strangers.append(await processes.frontend(environ=dict.fromkeys(certificates, "")))
        for stranger in strangers:
            if "DYN_DISCOVERY_BACKEND" in environ:
                await eventually(lambda here=stranger: refuses_cards(here))
                assert (await stranger.fleet())["workers"] == []
            else:
                await eventually(lambda here=stranger: sees_workers_that_do_not_answer(here))
            assert not await is_served(stranger)
        if "DYN_ROUTER_REPLICA_SYNC" in environ:
            assert (await strangers[0].metrics()).total("replicas") == 0
        assert await is_served(frontend)
