"""A standalone router over a real socket: what it decides, books and sends, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from pydantic import SecretStr

from kvrouter.cli.router.run import Standalone
from kvrouter.core.constraints import RouterMode
from kvrouter.core.requests import CallRoute, EngineChunk, FinishReason, Leg
from kvrouter.core.workers import Enforcement, LoadReport, Role, WorkerCard
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.frontend.standalone import RouterApp
from kvrouter.router.bookings import Bookings
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.prefill_dispatch import PrefillDispatch
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings, TokenizeFallback
from tests.testing.frontend_harness import mock_text, token_ids
from tests.testing.processes import Metrics
from tests.testing.router_harness import MODEL, RouterHarness, card
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.waits import until

TOKENS: dict[str, object] = {"model": MODEL, "token_ids": list(range(100, 140))}
PARAMS = {"at": 5}


def prefills(stream: ScriptedStream) -> None:
    stream.feed(
        EngineChunk(token_ids=(7,), finish=FinishReason.LENGTH, cached_tokens=16, kv_transfer_params=PARAMS)
    )


@dataclass(frozen=True, slots=True)
class Router:
    harness: RouterHarness
    plane: ScriptedTransport
    router: Standalone
    http: httpx.AsyncClient

    async def post(self, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        answer = await self.http.post(path, json=TOKENS if body is None else body, headers=headers)
        return answer.status_code, answer.json()

    async def route(self, query: str = "", **fields: object) -> tuple[int, Any]:
        return await self.post(f"/v1/route{query}", {**TOKENS, **fields})

    async def metrics(self) -> Metrics:
        return Metrics((await self.http.get("/metrics")).text)

    @property
    def is_clean(self) -> bool:
        return self.harness.booked() == len(self.router.bookings) == len(self.harness.model.ledger) == 0


@asynccontextmanager
async def open_router(
    *cards: WorkerCard,
    prefill_alone: bool = False,
    script: Callable[[ScriptedStream], None] | None = None,
    config: KvRouterConfig | None = None,
    settings: FrontendSettings | None = None,
    lease_ttl_s: float = 100.0,
    bookings_max: int = 100,
    has_tokenizer: bool = True,
) -> AsyncIterator[Router]:
    plane = ScriptedTransport(script)
    harness = RouterHarness(plane, config, prefill_alone=prefill_alone)
    await harness.start(*cards)
    instrumentation = ServiceInstrumentation(harness.telemetry)
    bookings = Bookings(
        bookings_max=bookings_max, lease_ttl_s=lease_ttl_s, on_lapsed=instrumentation.booking_lapsed
    )
    legs = PrefillDispatch(plane, bookings, instrumentation, redispatches_max=2, limit_s=60.0)
    door = RouterApp(
        harness.service,
        ModelTexts({MODEL: mock_text()} if has_tokenizer else {}),
        bookings,
        legs,
        settings=settings or FrontendSettings(),
        telemetry=harness.telemetry,
        lease_ttl_s=lease_ttl_s,
        takes_prefills=prefill_alone,
    )
    server = door.server(connections_max=100, descriptors_max=2**20, refused_max=64)
    await server.serve()
    try:
        host, port = server.addresses[0]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30.0) as client:
            router = Standalone(harness.service, server, harness.telemetry, bookings, legs)
            yield Router(harness, plane, router, client)
    finally:
        await legs.close()
        await server.drain(0.0)
        bookings.close()
        door.close()
        harness.service.stop()


def pair() -> tuple[WorkerCard, ...]:
    return (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED, bootstrap=True),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE, zone="b"),
    )


async def test_round_robin_queries_do_not_advance_the_bookings_turn() -> None:
    config = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
    async with open_router(*(card(number) for number in range(1, 4)), config=config) as router:
        asked = [(await router.route("?book=false"))[1]["worker_id"] for _ in range(4)]
        explained = [
            (await router.post("/v1/route/explain", {"model": MODEL, "prompt": [1]}))[1] for _ in "ab"
        ]
        booked = [(await router.route())[1] for _ in range(3)]
        kept = (await router.http.get(f"/v1/decisions/{booked[1]['request_id']}")).json()
    assert asked == [1, 2, 3, 1]
    assert [each["decode"]["chosen"]["worker_id"] for each in explained] == [2, 3]
    assert [each["worker_id"] for each in booked] == [1, 2, 3]
    assert kept["attempts"][0]["decode"]["worker_id"] == 2, "a request's own decision stays its own"


async def test_a_route_is_decided_and_booked_until_freed() -> None:
    async with open_router(card(1)) as here:
        status, answer = await here.route(request_id="mine")
        assert status == 200
        assert {key: answer[key] for key in ("request_id", "model", "leg", "booked", "lease_ttl_s")} == {
            "request_id": "mine", "model": MODEL, "leg": "aggregated", "booked": True, "lease_ttl_s": 100.0
        }  # fmt: skip
        assert (answer["worker_id"], answer["dp_rank"], answer["address"]) == (1, 0, address_of(1))
        assert (answer["prefill"], answer["bootstrap"], answer["constraint"]) == (None, None, None)
        assert here.harness.booked() == 43
        assert (await here.post("/v1/route/mine/prefill_complete"))[0] == 200
        assert here.harness.booked() == 3
        assert (await here.post("/v1/route/mine/output_blocks", {"blocks": 2}))[0] == 200
        assert here.harness.booked() == 5
        assert (await here.metrics()).total("bookings") == 1
        renewed = await here.post("/v1/route/mine/renew")
        assert renewed == (200, {"request_id": "mine", "booked": True, "lease_ttl_s": 100.0})
        freed = await here.post("/v1/route/mine/free")
        assert freed == (200, {"request_id": "mine", "booked": False, "lease_ttl_s": None})
        assert here.is_clean
        assert not here.plane.opened, "a router of this kind sends nothing"


@pytest.mark.parametrize("path", ["/v1/route/a/b", "/v1/route/a/b/free"])
async def test_deleting_a_booking_frees_its_id(path: str) -> None:
    async with open_router(card(1)) as here:
        await here.route(request_id="a/b")
        assert (await here.http.delete(path)).status_code == 200
        assert here.is_clean


async def test_an_id_with_slashes_may_end_in_a_route_name() -> None:
    async with open_router(card(1)) as here:
        await here.route(request_id="a/renew")
        assert (await here.post("/v1/route/a/renew/renew"))[1]["request_id"] == "a/renew"
        assert (await here.http.delete("/v1/route/a/renew")).status_code == 200
        assert here.is_clean


@pytest.mark.parametrize("request_id", ["a/free", "a//b", "/a", "a/", "a/../b", ".", ".."])
async def test_an_id_with_an_ambiguous_path_is_refused(request_id: str) -> None:
    async with open_router(card(1)) as here:
        status, answer = await here.route(request_id=request_id)
        assert (status, answer["error"]["param"]) == (400, "request_id")
        headed = await here.http.post("/v1/route", json=TOKENS, headers={"x-request-id": request_id})
        assert headed.json()["request_id"] != request_id
        await here.http.delete(f"/v1/route/{headed.json()['request_id']}")
        assert here.is_clean


async def test_a_pair_has_its_bootstrap_address_and_constraint() -> None:
    async with open_router(*pair()) as here:
        _, answer = await here.route()
        assert (answer["worker_id"], answer["domains"], answer["leg"]) == (2, {"zone": "a"}, "decode")
        assert (answer["prefill"]["worker_id"], answer["prefill"]["address"]) == (1, address_of(1))
        assert answer["bootstrap"]["host"] == "host-1"
        assert answer["constraint"]["taint"] == "dynamo.topology/zone=a"
        assert (await here.http.post("/v1/prefill", json=TOKENS)).status_code == 404


async def test_a_query_books_nothing_and_answers_as_a_booking() -> None:
    async with open_router(card(1), card(2), card(3)) as here:
        _, asked = await here.route("?book=false", request_id="r")
        assert here.is_clean
        _, again = await here.route("?book=0", request_id="r")
        _, booked = await here.route("?book=true", request_id="r")
        reported = {**booked, "booked": False, "lease_ttl_s": None}
        assert asked == again == reported


async def test_prompts_and_chats_are_tokenized_as_at_the_frontend() -> None:
    async with open_router(card(1)) as here:
        _, of_text = await here.post("/v1/route", {"model": MODEL, "prompt": "hello there"})
        assert of_text["isl_tokens"] == len(token_ids("hello there"))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "stream": True}
        _, of_chat = await here.post("/v1/route", chat)
        assert of_chat["isl_tokens"] > of_text["isl_tokens"]
        assert len(of_chat["request_id"]) == 32
        _, named = await here.post("/v1/route", chat, **{"x-request-id": "by-header"})
        assert named["request_id"] == "by-header"


async def test_token_ids_need_no_tokenizer_here() -> None:
    async with open_router(card(1), has_tokenizer=False) as here:
        assert (await here.route())[0] == 200
        status, answer = await here.post("/v1/route", {"model": MODEL, "prompt": "hello"})
        assert (status, answer["error"]["code"]) == (503, "model_not_ready")


async def test_an_engine_tokenizes_prompts_without_a_tokenizer_here() -> None:
    def tokenizes(stream: ScriptedStream) -> None:
        assert stream.request.call is not None
        assert stream.request.call.route is CallRoute.TOKENIZE
        stream.feed(EngineChunk(raw=b'{"tokens":[1,2,3]}', finish=FinishReason.STOP))

    front = FrontendSettings(tokenize_fallback=TokenizeFallback.ENGINE)
    engine = replace(card(1), takes_calls=True)
    async with open_router(engine, script=tokenizes, settings=front, has_tokenizer=False) as here:
        for prompt in ({"prompt": "hello there"}, {"messages": [{"role": "user", "content": "hello there"}]}):
            status, answer = await here.post("/v1/route", {"model": MODEL, **prompt})
            assert (status, answer["isl_tokens"]) == (200, 3)


async def test_hints_apply_as_at_the_frontend() -> None:
    async with open_router(*pair()[1:]) as here:
        taint = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=b"]}}
        assert (await here.route(nvext=taint))[1]["worker_id"] == 3
        assert (await here.route(nvext={"worker_id": 2}))[1]["worker_id"] == 2
        status, answer = await here.route(nvext={"worker_id": 9})
        assert (status, answer["error"]["code"]) == (400, "unknown_worker")


async def test_tenants_and_adapters_have_separate_blocks() -> None:
    async with open_router(card(1)) as here:
        tenants: tuple[tuple[dict[str, object], int], ...] = (
            ({}, 3),
            ({}, 4),  # the full blocks are active already: only the tail is new
            ({"lora_name": "a"}, 7),
            ({"cache_namespace": "t"}, 10),
            ({"cache_salt": "t"}, 11),
        )
        for fields, blocks in tenants:
            _, answer = await here.post("/v1/route", {**TOKENS, **fields})
            await here.post(f"/v1/route/{answer['request_id']}/prefill_complete")
            assert here.harness.booked() == blocks


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [2**32]}, "token_ids[0]"),
        ({"token_ids": [1] * 4096}, "token_ids"),
        ({"prompt": "x"}, "token_ids"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"cache_salt": "a", "cache_namespace": "b"}, "cache_namespace"),
        ({"worker_id": 1}, "worker_id"),
        ({"nvext": {"wrong": 1}}, "nvext.wrong"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"lora_name": ""}, "lora_name"),
    ],
)
async def test_an_invalid_call_names_its_field_and_books_nothing(
    fields: dict[str, object], param: str
) -> None:
    async with open_router(card(1)) as here:
        status, answer = await here.post("/v1/route", {**TOKENS, **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert here.is_clean


@pytest.mark.parametrize("query", ["?bok=false", "?book", "?book=perhaps", "?book=true&x=1"])
async def test_a_misspelt_query_parameter_books_nothing(query: str) -> None:
    async with open_router(card(1)) as here:
        assert (await here.route(query))[0] == 400
        assert here.is_clean


@pytest.mark.parametrize(
    "body", [{"model": MODEL}, {"model": MODEL, "messages": []}, {"model": MODEL, "prompt": []}, [], 1]
)
async def test_a_body_without_a_prompt_is_a_400(body: object) -> None:
    async with open_router(card(1)) as here:
        status, answer = await here.post("/v1/route", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_refusals_have_the_frontends_statuses() -> None:
    async with open_router(card(1), bookings_max=1) as here:
        assert (await here.route(model="other"))[0] == 404
        assert (await here.route(request_id="r"))[0] == 200
        assert (await here.route(request_id="r"))[1]["error"]["code"] == "request_in_use"
        full = await here.http.post("/v1/route", json=TOKENS)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "bookings_full")
        assert full.headers["retry-after"] == "1"
        assert (await here.post("/v1/route/unknown/free"))[1]["error"]["code"] == "request_not_booked"
        assert (await here.post("/v1/route/r/output_blocks", {"blocks": 0}))[0] == 400
        assert (await here.http.get("/v1/route")).headers["allow"] == "POST"
        here.harness.discovery.drop(1)
        status, answer = await here.route("?book=false")
        assert (status, answer["error"]["code"]) == (503, "no_eligible_worker")
        status, answer = await here.post("/v1/route/r/free")
        assert status == 200, "a worker that left takes no booking's end with it"
        metrics = await here.metrics()
        assert metrics.total("requests_total", route="/v1/route", model=MODEL, status="200") == 1
        assert metrics.total("requests_total", route="/v1/route", model="unknown", status="404") == 1


async def test_an_unfreed_booking_lapses_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with open_router(card(1), lease_ttl_s=0.05) as here:
        await here.route(request_id="forgotten")
        await until(lambda: here.is_clean)
        assert (await here.post("/v1/route/forgotten/free"))[0] == 404
        assert (await here.metrics()).total("bookings_lapsed_total", model=MODEL) == 1
        assert "booking_lapsed" in caplog.text


async def test_a_caller_leaving_while_waiting_books_nothing() -> None:
    config = KvRouterConfig(active_prefill_tokens_threshold=10, admission_queue_max=4, admission_wait_s=100.0)
    async with open_router(card(1), config=config) as here:
        rank = card(1).ranks()[0]
        here.harness.load(LoadReport(rank, 0, 1024, active_prefill_tokens=11))
        asking = asyncio.ensure_future(here.post("/v1/route"))
        await until(lambda: len(here.harness.model.placer.waiting) == 1)
        asking.cancel()
        await until(lambda: not here.harness.model.placer.waiting)
        here.harness.load(LoadReport(rank, 0, 1024))
        assert here.is_clean


async def test_a_prefill_is_sent_and_answered_with_its_constraint() -> None:
    cards = (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.PREFILL, zone="b", enforcement=Enforcement.PREFERRED, weight=0.5),
        card(3, Role.PREFILL, zone="c", enforcement=Enforcement.FALLBACK),
        card(4, Role.PREFILL),
    )
    reported: dict[int, object] = {
        1: ("required", "a", {"required_taints": ["dynamo.topology/zone=a"]}),
        2: ("preferred", "b", {"preferred_taints": {"dynamo.topology/zone=b": 0.5}}),
        3: ("fallback", "c", {"required_taints": ["dynamo.topology/zone=c"]}),
        4: None,
    }
    async with open_router(*cards, prefill_alone=True, script=prefills) as here:
        for worker_id, wanted in reported.items():
            body = {**TOKENS, "nvext": {"prefill_worker_id": worker_id}}
            status, answer = await here.post("/v1/prefill", body)
            assert (status, answer["worker_id"], answer["cached_tokens"]) == (200, worker_id, 16)
            assert (answer["kv_transfer_params"], answer["bootstrap"]) == (PARAMS, None)
            constraint = answer["constraint"]
            assert wanted == (
                constraint
                and (constraint["enforcement"], constraint["value"], constraint["routing_constraints"])
            )
        assert here.is_clean
        assert {leg for leg, _ in here.plane.legs()} == {Leg.PREFILL}
        _, asked = await here.route("?book=false")
        assert asked["leg"] == "prefill"


async def test_a_decode_pick_can_obey_the_prefill_constraint() -> None:
    async with (
        open_router(card(1, Role.PREFILL, zone="b", enforcement=Enforcement.REQUIRED),
                    prefill_alone=True, script=prefills) as prefill,
        open_router(*pair()[1:]) as decode,
    ):  # fmt: skip
        _, prefilled = await prefill.post("/v1/prefill")
        hints = {"routing_constraints": prefilled["constraint"]["routing_constraints"]}
        _, routed = await decode.route(nvext=hints, request_id=prefilled["request_id"])
        assert routed["worker_id"] == 3


async def test_a_bootstrap_prefill_is_answered_while_it_runs_and_can_be_deleted() -> None:
    async with open_router(card(1, Role.PREFILL, bootstrap=True), prefill_alone=True) as here:
        status, answer = await here.post("/v1/prefill", {**TOKENS, "request_id": "r"})
        assert status == 200
        sent = here.plane.opened[0].request.bootstrap
        assert sent is not None
        assert answer["bootstrap"] == {"host": sent.host, "port": sent.port, "room": sent.room}
        assert (await here.metrics()).total("prefills_active") == 1
        assert (await here.post("/v1/prefill", {**TOKENS, "request_id": "r"}))[0] == 409
        assert (await here.http.delete("/v1/prefill/r")).status_code == 200
        await until(lambda: here.is_clean)
        assert (await here.http.delete("/v1/prefill/r")).status_code == 404
        assert (await here.post("/v1/prefill?x=1"))[0] == 400


async def test_a_caller_leaving_cancels_its_prefill() -> None:
    async with open_router(card(1, Role.PREFILL), prefill_alone=True) as here:
        asking = asyncio.ensure_future(here.post("/v1/prefill"))
        await here.plane.wait_for(Leg.PREFILL)
        asking.cancel()
        await until(lambda: here.is_clean and here.plane.opened[0].cancelled_for is not None)


async def test_a_draining_router_refuses_requests_and_waits_for_bookings() -> None:
    async with open_router(card(1)) as here:
        await here.route(request_id="r")
        draining = asyncio.ensure_future(here.router.drain(60.0))
        await until(lambda: here.harness.service.requests.is_draining)
        assert (await here.route())[1]["error"]["code"] == "shutting_down"
        assert (await here.http.get("/ready")).status_code == 503
        assert (await here.http.get("/health")).json()["status"] == "draining"
        assert (await here.post("/v1/route/r/free"))[0] == 200
        assert await draining == 0


async def test_a_drain_ends_at_its_time_limit() -> None:
    async with open_router(card(1)) as here:
        await here.route()
        assert await here.router.drain(0.01) == 1


async def test_admin_routes_need_the_token_and_routing_does_not() -> None:
    settings = FrontendSettings(admin_token=SecretStr("s"))
    async with open_router(card(1), settings=settings) as here:
        assert (await here.http.get("/v1/fleet")).status_code == 401
        assert (await here.http.get("/ui")).status_code == 200, "its files hold no data"
        assert (await here.post("/v1/route/explain"))[0] == 401
        assert (await here.route(request_id="r"))[0] == 200
        page = await here.http.get("/v1/decisions/r", headers={"authorization": "Bearer s"})
        assert page.json()["attempts"][0]["decode"]["worker_id"] == 1


async def test_a_prefill_only_decision_names_its_leg() -> None:
    async with open_router(card(1, Role.PREFILL), prefill_alone=True, script=prefills) as here:
        await here.post("/v1/prefill", {**TOKENS, "request_id": "r"})
        (attempt,) = (await here.http.get("/v1/decisions/r")).json()["attempts"]
        assert (attempt["prefill"]["worker_id"], attempt["decode"]) == (1, None)
        _, explained = await here.post("/v1/route/explain", {"model": MODEL, "prompt": "hello"})
        assert (explained["prefill"]["chosen"]["worker_id"], explained["decode"]) == (1, None)
        assert (await here.metrics()).total("decisions_total", shape="prefill") == 1


async def test_openapi_describes_bookings_and_prefills() -> None:
    async with open_router(card(1), prefill_alone=True) as router:
        described = (await router.http.get("/openapi.json")).json()["paths"]
    booked = "/v1/route/{request_id}"
    for path in (
        booked,
        *(f"{booked}/{end}" for end in ("prefill_complete", "output_blocks", "renew", "free")),
    ):
        for operation in described[path].values():
            assert operation["summary"]
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Booking"}
    assert "OutputBody" in str(described[f"{booked}/output_blocks"]["post"]["requestBody"])
    assert "PrefillEnded" in str(described["/v1/prefill/{request_id}"]["delete"]["responses"])
    assert described["/v1/prefill"]["post"]["summary"] == "Prefill a request; say where its KV waits"
