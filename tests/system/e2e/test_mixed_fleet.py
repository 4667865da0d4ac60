"""Workers of one fleet on different event transports: a frontend hears each on its own."""

from functools import partial

from tests.testing.mock_server import words
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet

LANES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "jetstream": ((), {}),
    "nats": (("--enable-local-indexer",), {}),
    "zmq": ((), {"DYN_EVENT_PLANE": "zmq"}),
}
"""By what auto makes of a worker's flags, or its own setting, where cards are in NATS."""


async def held_blocks(frontend: Frontend) -> dict[int, int]:
    page = await frontend.fleet()
    return {
        worker["worker_id"]: sum(rank["index_blocks"] for rank in worker["ranks"])
        for worker in page["workers"]
    }


async def test_each_worker_is_heard_on_its_cards_event_transport(shared_nats: NatsServer) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "DYN_DISCOVERY_BACKEND": "nats"}
    async with fleet(settings) as processes:
        for flags, environ in LANES.values():
            await processes.worker("--speedup", "20", *flags, environ=environ)
        early = await processes.frontend()
        await eventually(partial(early.serves, len(LANES)))
        workers = list(await held_blocks(early))
        assert {worker["event_lane"] for worker in (await early.fleet())["workers"]} == set(LANES)
        for worker in workers:
            body = {
                "model": "mock",
                "prompt": words(n=200),
                "max_tokens": 1,
                "nvext": {"worker_id": worker},
            }
            (await early.http.post("/v1/completions", json=body)).raise_for_status()
        late = await processes.frontend()

        for frontend in (early, late):

            async def hears_all(here: Frontend = frontend) -> bool:
                return list((await held_blocks(here)).values()) == [3] * len(LANES)

            await eventually(hears_all)
