"""Two workers with publishers of their own, a door at the second, and a router that compares them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import ModelInput, ModelType
from kvrouter.library import KvRouter, Runtime
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.transports.requests.port import EngineStream, Registration
from kvrouter.worker import EngineDoor, KvPublisher, new_incarnation, register_llm
from tests.testing.waits import LIMIT_S

BLOCK_SIZE = 16
TOKEN = "a secret"
PROMPT = list(range(500, 500 + 6 * BLOCK_SIZE + 3))
"""Six blocks, and a tail that is none."""

BEHIND_DOOR = WorkerId(2)


class UnusedServer:
    """What serves requests where none is sent."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        raise AssertionError(request.request_id)


@dataclass(frozen=True, slots=True)
class PublishingWorkers:
    """Worker 1 holds the prompt's first three blocks; worker 2 what its engine tells at the door."""

    door: EngineDoor
    publisher: KvPublisher
    router: KvRouter

    async def best(self) -> tuple[int, int]:
        """Where the prompt would go, and for how many blocks."""
        worker_id, _, overlap_blocks = await self.router.best_worker(PROMPT)
        return worker_id, overlap_blocks

    async def until_best(self, worker_id: int, overlap_blocks: int) -> None:
        """Return once the prompt would go there, for so many blocks."""
        loop = asyncio.get_running_loop()
        last_s = loop.time() + LIMIT_S
        while (best := await self.best()) != (worker_id, overlap_blocks):
            assert loop.time() < last_s, f"the prompt would go to {best}"
            await asyncio.sleep(0)


@asynccontextmanager
async def publishing_workers(address: str) -> AsyncIterator[PublishingWorkers]:
    """Both workers are registered, and the door is open at ``address``."""
    discovery, requests, events = MemoryDiscovery(), MemoryRequestTransport(), MemoryEventTransport()
    publishers: dict[WorkerId, KvPublisher] = {}
    address_of: dict[WorkerId, str] = {}
    registrations: list[Registration] = []
    for worker_id in (WorkerId(1), BEHIND_DOOR):
        incarnation = new_incarnation()
        publisher = KvPublisher(events, worker_id=worker_id, epoch=incarnation, block_size=BLOCK_SIZE)
        publishers[worker_id] = publisher
        events.serve_recovery(worker_id, publisher)
        address_of[worker_id] = memory_address(worker_id, incarnation)
        registrations.append(requests.serve(address_of[worker_id], UnusedServer()))
        await register_llm(
            discovery,
            worker_id=worker_id,
            model="own",
            model_input=ModelInput.Tokens,
            model_type=ModelType.Chat | ModelType.Completions,
            address=address_of[worker_id],
            block_size=BLOCK_SIZE,
            context_length=4096,
            incarnation=incarnation,
        )
    door = EngineDoor(publishers[BEHIND_DOOR], address=address, block_size=BLOCK_SIZE, token=TOKEN)
    await door.start()
    endpoint = (
        Runtime(discovery, requests, events).namespace("default").component("backend").endpoint("generate")
    )
    try:
        async with KvRouter(endpoint, block_size=BLOCK_SIZE) as router:
            publishers[WorkerId(1)].publish_stored(PROMPT[: 3 * BLOCK_SIZE], [1, 2, 3], dp_rank=DpRank(0))
            yield PublishingWorkers(door, publishers[BEHIND_DOOR], router)
    finally:
        await door.stop()
        for registration in registrations:
            registration.leave("the test ends")
