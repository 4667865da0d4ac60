"""Every engine keeps the laws of the port: mock engines, and engines behind servers of their own."""

from collections.abc import AsyncIterator

import pytest

from tests.testing.attached_engines import KINDS, SERVED_KINDS, SLOW_MS, AttachedEngine, EnginePair
from tests.testing.engine_laws import (
    AnswerLaws,
    CacheLaws,
    CallEndingLaws,
    CallLaws,
    EndingLaws,
    FullLaws,
    HandedLaws,
    MeetingLaws,
    PairEndingLaws,
    PairLaws,
    PullLaws,
    RankLaws,
    RefusalLaws,
    SaltLaws,
    SnapshotLaws,
    StartLaws,
    WatchedLaws,
)

ALONE = sorted({*KINDS} - {"mock-meeting"})


class TestEverySlowEngine(EndingLaws, FullLaws):
    """All kinds, with legs that go on."""

    @pytest.fixture(params=ALONE)
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with KINDS[request.param].alone(decode_ms=SLOW_MS) as found:
            yield found


class TestEveryEngine(AnswerLaws, RefusalLaws, CacheLaws):
    """All kinds."""

    @pytest.fixture(params=ALONE)
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with KINDS[request.param].alone() as found:
            yield found


class TestEnginesWithSalts(SaltLaws):
    """Those that take one for every prompt."""

    @pytest.fixture(params=["mock", "sglang", "vllm"])
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with KINDS[request.param].alone() as found:
            yield found


class TestSlowServedEngines(CallEndingLaws, WatchedLaws):
    """Those that are processes of their own, with legs that go on."""

    @pytest.fixture(params=sorted(SERVED_KINDS))
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with SERVED_KINDS[request.param].alone(decode_ms=SLOW_MS) as found:
            yield found


class TestServedEngines(CallLaws):
    """Those that take calls as clients wrote them."""

    @pytest.fixture(params=sorted(SERVED_KINDS))
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with SERVED_KINDS[request.param].alone() as found:
            yield found


class TestEnginesOfTwoRanks(RankLaws):
    """Those that are asked for a rank here, with legs that go on."""

    @pytest.fixture(params=["mock", "vllm"])
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with KINDS[request.param].alone(n_ranks=2, decode_ms=SLOW_MS) as found:
            yield found


class TestEnginesThatTellTheirStarts(StartLaws):
    """Those whose pages do."""

    @pytest.fixture(params=["sglang", "vllm"])
    async def at(self, request: pytest.FixtureRequest) -> AsyncIterator[AttachedEngine]:
        async with SERVED_KINDS[request.param].alone() as found:
            yield found


class TestMockEngines(SnapshotLaws):
    """Those that can be asked what they hold."""

    @pytest.fixture
    async def at(self) -> AsyncIterator[AttachedEngine]:
        async with KINDS["mock"].alone() as found:
            yield found


class TestPairs(PairLaws):
    """All ways to hand KV over."""

    @pytest.fixture(params=sorted(KINDS))
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[EnginePair]:
        async with KINDS[request.param].pair() as found:
            yield found

    @pytest.fixture
    async def at(self) -> AsyncIterator[AttachedEngine]:
        async with KINDS["mock"].alone() as found:
            yield found


class TestSlowPairs(PairEndingLaws):
    """All ways to hand KV over, with legs that go on."""

    @pytest.fixture(params=sorted(KINDS))
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[EnginePair]:
        async with KINDS[request.param].pair(decode_ms=SLOW_MS) as found:
            yield found


class TestPairsThatHandParams(HandedLaws):
    """Those whose prefill leg ends before the decode leg begins."""

    @pytest.fixture(params=["mock", "trtllm", "vllm"])
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[EnginePair]:
        async with KINDS[request.param].pair() as found:
            yield found


class TestPairsWhoseKvGoesBothWays(PullLaws):
    """Those whose prefill engine fetches too."""

    @pytest.fixture(params=["mock"])
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[EnginePair]:
        async with KINDS[request.param].pair() as found:
            yield found


class TestPairsThatMeet(MeetingLaws):
    """Those whose legs run at once."""

    @pytest.fixture(params=["mock-meeting", "sglang"])
    async def pair(self, request: pytest.FixtureRequest) -> AsyncIterator[EnginePair]:
        async with KINDS[request.param].pair(waits_s=0.1) as found:
            yield found
