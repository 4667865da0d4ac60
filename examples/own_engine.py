"""An engine of your own in the fleet: serve its requests, publish what it caches, register it."""

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import count

from kvrouter import KvRouter, ModelInput, ModelType, Runtime, register_llm
from kvrouter.core.ids import EngineHash, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.requests.memory import MemoryRequestTransport, memory_address
from kvrouter.transports.requests.port import Registration
from kvrouter.worker import KvPublisher, new_incarnation

BLOCK_SIZE = 16


class Echo:
    """The answer to one request: the prompt's last tokens, one at a time."""

    def __init__(self, request: EngineRequest) -> None:
        self._left = deque(request.token_ids[-request.sampling.max_tokens :])
        self._cancelled_for: str | None = None

    def __aiter__(self) -> "Echo":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._cancelled_for is not None:
            return EngineChunk(finish=FinishReason.CANCELLED, error=self._cancelled_for)
        if not self._left:
            raise StopAsyncIteration
        await asyncio.sleep(0)  # a model would compute here
        token = self._left.popleft()
        return EngineChunk(token_ids=(token,), finish=None if self._left else FinishReason.LENGTH)

    def cancel(self, reason: str) -> None:
        """The reader left: stop, and free what the request holds."""
        self._cancelled_for = reason


class EchoEngine:
    """Keeps the blocks of every prompt for ever, under names of its own."""

    def __init__(self, publisher: KvPublisher) -> None:
        self._publisher = publisher
        self._names = count(1)

    async def submit(self, request: EngineRequest) -> Echo:
        """Take a request; tell which blocks are cached now."""
        tokens = request.token_ids[: len(request.token_ids) // BLOCK_SIZE * BLOCK_SIZE]
        engine_hashes = [EngineHash(next(self._names)) for _ in range(len(tokens) // BLOCK_SIZE)]
        self._publisher.publish_stored(tokens, engine_hashes, dp_rank=request.dp_rank)
        return Echo(request)


@dataclass(frozen=True, slots=True)
class Member:
    """An engine in the fleet, and what it takes to leave."""

    card: WorkerCard
    publisher: KvPublisher
    registration: Registration

    async def leave(self, discovery: MemoryDiscovery) -> None:
        """Say goodbye, then stop."""
        await discovery.withdraw(self.card.worker_id, self.card.incarnation)
        self.registration.leave("the program ends")
        self.publisher.close()


async def join(
    worker_id: WorkerId,
    discovery: MemoryDiscovery,
    requests: MemoryRequestTransport,
    events: MemoryEventTransport,
) -> Member:
    """Serve at an address, publish, register."""
    incarnation = new_incarnation()
    publisher = KvPublisher(events, worker_id=worker_id, epoch=incarnation, block_size=BLOCK_SIZE)
    events.serve_recovery(worker_id, publisher)
    address = memory_address(worker_id, incarnation)
    registration = requests.serve(address, EchoEngine(publisher))
    card = await register_llm(
        discovery,
        worker_id=worker_id,
        model="echo",
        model_input=ModelInput.Tokens,
        model_type=ModelType.Chat | ModelType.Completions,
        address=address,
        block_size=BLOCK_SIZE,
        context_length=4096,
        incarnation=incarnation,
    )
    return Member(card, publisher, registration)


async def main() -> None:
    """Register two engines on planes of this process, and let a router follow what they cache."""
    discovery, requests, events = MemoryDiscovery(), MemoryRequestTransport(), MemoryEventTransport()
    first = await join(WorkerId(1), discovery, requests, events)
    second = await join(WorkerId(2), discovery, requests, events)

    endpoint = (
        Runtime(discovery, requests, events).namespace("default").component("backend").endpoint("generate")
    )
    async with KvRouter(endpoint, block_size=BLOCK_SIZE) as router:
        prompt = list(range(100))
        answer = await router.generate(prompt, worker_id=1, stop_conditions={"max_tokens": 4})
        print("answer:", [token async for piece in answer for token in piece["token_ids"]])
        worker, _, overlap_blocks = await router.best_worker(prompt)
        print(f"worker {worker} now holds {overlap_blocks} blocks of it")

        # The first engine needs the room; the second one was warmed with the same prompt.
        first.publisher.publish_cleared()
        second.publisher.publish_stored(prompt[: 6 * BLOCK_SIZE], [11, 12, 13, 14, 15, 16])
        while worker == 1 or overlap_blocks == 0:
            await asyncio.sleep(0.001)  # publishing waits for nobody: the events are on their way
            worker, _, overlap_blocks = await router.best_worker(prompt)
        print(f"the same prompt goes to worker {worker}: {overlap_blocks} blocks are there")

    await first.leave(discovery)
    await second.leave(discovery)


if __name__ == "__main__":
    asyncio.run(main())
