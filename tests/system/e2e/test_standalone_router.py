"""Standalone routers as processes: the page's own commands, and a decode leg sent by somebody else."""

import asyncio
import re
import shlex
from pathlib import Path

from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest, FinishReason, Leg, Sampling, TokenBuffer
from kvrouter.transports.requests.tcp import TcpRequestTransport
from tests.testing.mock_server import word_ids
from tests.testing.nats_server import NatsServer
from tests.testing.otlp_collector import otlp_collector, span_attributes
from tests.testing.processes import ENDS_WITHIN_S, Frontend, eventually, fleet

PAGE = (Path(__file__).parents[3] / "docs" / "standalone-router.md").read_text("utf-8")
TOKENS = word_ids(n=200)


def block(name: str) -> str:
    """One of the page's blocks of commands."""
    found = re.search(rf"^```bash {name}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


async def is_ready(router: Frontend) -> bool:
    return (await router.http.get("/ready")).status_code == 200


async def test_the_standalone_router_pages_commands_run() -> None:
    async with fleet({"KVROUTER_DEAD_AFTER_S": "60"}) as processes:
        ports: dict[str, Frontend] = {}
        for line in block("start").splitlines():
            words = shlex.split(line.removesuffix("&"))
            if words[:2] == ["kvrouter", "worker"]:
                await processes.worker(*words[3:])
            elif words[:2] == ["kvrouter", "router"]:
                at = words.index("--http-port")
                port = words[at + 1]
                ports[port] = await processes.router(*words[2:at], *words[at + 2 :])
        script = block("run")
        for port, router in ports.items():
            await eventually(lambda here=router: is_ready(here))
            script = script.replace(f"127.0.0.1:{port}", router.url.removeprefix("http://"))
        process = await asyncio.create_subprocess_exec(
            *("bash", "-ceu", script),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(ENDS_WITHIN_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        assert '"required_taints": [' in output.decode()
        assert '"booked":false' in output.decode()
        assert [await router.stop() for router in ports.values()] == [0, 0]


async def test_an_external_decode_leg_gets_kv_from_a_prefill_router(shared_nats: NatsServer) -> None:
    """SGLang's way: the prefill router answers at once, and and whoever fronts decode passes it on."""
    environ = {"DYN_DISCOVERY_BACKEND": "nats", "NATS_SERVER": shared_nats.url}
    async with fleet(environ) as processes:
        zone = ("--domain", "zone=a", "--speedup", "20")
        await processes.worker("--role", "prefill", "--kv-transfer-domain", "zone", *zone)
        await processes.worker("--role", "decode", *zone)
        prefill = await processes.router("--component", "prefill")
        backend = await processes.router("--component", "backend", "--lease-ttl-s", "0.5")
        plane = TcpRequestTransport(token=None)
        try:
            for router in (prefill, backend):
                await eventually(lambda here=router: is_ready(here))
            assert [worker["role"] for worker in (await prefill.fleet())["workers"]] == ["prefill"]
            assert [worker["role"] for worker in (await backend.fleet())["workers"]] == ["decode"]
            body = {"model": "mock", "token_ids": TOKENS, "request_id": "r"}
            prefilled = (await prefill.http.post("/v1/prefill", json=body)).raise_for_status().json()
            hints = {"routing_constraints": prefilled["constraint"]["routing_constraints"]}
            routed = await backend.http.post("/v1/route", json={**body, "nvext": hints})
            decode = routed.raise_for_status().json()
            leg = EngineRequest(
                request_id=RequestId("r"),
                attempt=0,
                leg=Leg.DECODE,
                model=ModelName("mock"),
                token_ids=TokenBuffer("I", TOKENS),
                sampling=Sampling(max_tokens=4, temperature=0.0),
                dp_rank=DpRank(decode["dp_rank"]),
                bootstrap=Bootstrap(**prefilled["bootstrap"]),
                prefill_worker_id=WorkerId(prefilled["worker_id"]),
            )
            async with asyncio.timeout(ENDS_WITHIN_S):
                chunks = [chunk async for chunk in await plane.open(decode["address"], leg)]
            assert chunks[-1].finish is FinishReason.LENGTH
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4
            again = {**body, "request_id": "r2"}

            async def is_remembered() -> bool:
                asked = await prefill.http.post("/v1/route?book=false", json=again)
                return bool(asked.json()["overlap_blocks"] == len(TOKENS) // 64)

            await eventually(is_remembered)

            async def has_lapsed() -> bool:
                return (await backend.metrics()).total("bookings_lapsed_total") == 1

            await eventually(has_lapsed)
            assert (await backend.metrics()).total("ledger_leases") == 0

            async def is_idle() -> bool:
                return (await prefill.metrics()).total("ledger_leases") == 0

            await eventually(is_idle)
        finally:
            await plane.close()


async def test_a_standalone_router_exports_spans_of_routes_and_prefills(shared_nats: NatsServer) -> None:
    environ = {"DYN_DISCOVERY_BACKEND": "nats", "NATS_SERVER": shared_nats.url}
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with otlp_collector() as found, fleet(environ) as processes:
        sends = {"OTEL_EXPORTER_OTLP_ENDPOINT": found.url}
        await processes.worker("--role", "prefill", "--speedup", "20")
        router = await processes.router("--component", "prefill", environ=sends)
        await eventually(lambda: is_ready(router))
        body = {"model": "mock", "token_ids": TOKENS}
        for call in ("/v1/prefill", "/v1/route", "/v1/route?book=false"):
            answer = await router.http.post(call, json=body, headers={"traceparent": parent})
            answer.raise_for_status()
            await router.http.request("DELETE", f"{call.partition('?')[0]}/{answer.json()['request_id']}")
        refused = await router.http.post("/v1/route", json={"model": "mock"}, headers={"traceparent": parent})
        assert refused.status_code == 400
        assert await router.stop() == 0
        ended = [line for line in router.lines().splitlines() if " request_ended " in line]
    assert [" decision_us=" in line for line in ended] == [True, True, False, False], "of what it booked"
    assert [f" isl_tokens={len(TOKENS)} " in line for line in ended] == [True, True, False, False]
    assert {span.trace_id.hex() for span in found.spans} == {parent.split("-")[1]}
    (prefill,) = found.named("POST /v1/prefill")
    assert prefill.parent_span_id.hex() == parent.split("-")[2]
    assert sorted(found.inside(prefill)) == ["prefill", "receive", "tokenize"]
    routes = found.named("POST /v1/route")
    steps = ["decide", "queue", "receive", "tokenize"]
    assert [sorted(found.inside(route)) for route in routes] == [steps, steps, ["receive", "tokenize"]]
    said = [span_attributes(list(span.attributes)) for span in (found.one("prefill"), *found.named("decide"))]
    assert len({attributes["kvrouter.prefill.worker"] for attributes in said}) == 1
    assert span_attributes(list(routes[-1].attributes))["error.type"] == "invalid_request"
