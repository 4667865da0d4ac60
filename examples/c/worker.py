"""The worker of an engine in C: its engine door is open, and a router says how much of a prompt is there.

python examples/c/worker.py unix:/tmp/worker.sock
echo 0 1 2 … 99 | ./publish unix:/tmp/worker.sock 16
"""

import asyncio
import os
import sys

from kvrouter import KvRouter, ModelInput, ModelType, Runtime, register_llm
from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.transports.requests.port import EngineStream
from kvrouter.worker import EngineDoor, KvPublisher, new_incarnation

BLOCK_SIZE = 16
WORKER_ID = WorkerId(1)


class EventsOnly:
    """This program is about events: no request is sent here, and none would be taken."""

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Refuse the request."""
        raise ShuttingDown(f"worker {WORKER_ID} takes no request {request.request_id}")


async def main(address: str) -> None:
    """Open the engine door, and print each change until the program ends."""
    discovery, requests, events = MemoryDiscovery(), MemoryRequestTransport(), MemoryEventTransport()
    incarnation = new_incarnation()
    publisher = KvPublisher(events, worker_id=WORKER_ID, epoch=incarnation, block_size=BLOCK_SIZE)
    events.serve_recovery(WORKER_ID, publisher)
    requests_at = memory_address(WORKER_ID, incarnation)
    requests.serve(requests_at, EventsOnly())
    await register_llm(
        discovery,
        worker_id=WORKER_ID,
        model="own",
        model_input=ModelInput.Tokens,
        model_type=ModelType.Chat | ModelType.Completions,
        address=requests_at,
        block_size=BLOCK_SIZE,
        context_length=4096,
        incarnation=incarnation,
    )

    token = os.environ.get("KVR_TOKEN", "")
    engine_door = EngineDoor(publisher, address=address, block_size=BLOCK_SIZE, token=token)
    await engine_door.start()
    print(f"the door is open at {engine_door.address}", flush=True)

    endpoint = (
        Runtime(discovery, requests, events).namespace("default").component("backend").endpoint("generate")
    )
    try:
        async with KvRouter(endpoint, block_size=BLOCK_SIZE) as router:
            before = None
            while True:
                worker, _, overlap_blocks = await router.best_worker(list(range(100)))
                if overlap_blocks != before:
                    print(f"worker {worker} holds {overlap_blocks} blocks of the prompt", flush=True)
                    before = overlap_blocks
                await asyncio.sleep(0.05)
    finally:
        await engine_door.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
