"""A program that embeds kvrouter, before a fleet of mock engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.library import AnswerPieces, Endpoint, Runtime
from tests.testing.waits import until


@dataclass(frozen=True, slots=True)
class Program:
    """What a test of the library holds."""

    fleet: MockFleet
    runtime: Runtime
    endpoint: Endpoint

    async def until_quiet(self) -> None:
        """Return once no engine holds anything for anybody."""
        await until(lambda: self.fleet.cluster.idle)
        assert self.fleet.check_integrity() == []


async def tokens_of(answer: AnswerPieces) -> list[int]:
    """Read an answer to its end."""
    return [token async for piece in answer for token in piece["token_ids"]]


@asynccontextmanager
async def program(fleet: FleetFile) -> AsyncIterator[Program]:
    """The fleet serves; at the end of a test that passes nothing may be left over on the engines."""
    async with MockFleet(fleet) as mock:
        runtime = Runtime(mock.discovery, mock.requests, mock.events)
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        here = Program(mock, runtime, endpoint)
        yield here
        await here.until_quiet()
