"""What engines keep to that have it: a limit, a cache that can be asked, a server of their own, a pair."""

import json
import re

import pytest

from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.engines.port import SnapshotEngine
from kvrouter.transports.requests.port import EngineStream, StreamBroken, WorkerFull, WorkerUnreachable
from tests.testing.attached_engines import RUNNING_MAX, WAITING_MAX, AttachedEngine, EnginePair
from tests.testing.engine_laws import (
    LONG_TOKENS,
    answer,
    cached_tokens_of,
    ends_once,
    is_free,
    new_prompt,
    read,
    refusal_of,
    tokens_of,
)
from tests.testing.engine_recorder import R0, R1, HeldBlocks
from tests.testing.engine_requests import engine_request
from tests.testing.waits import until


class FullLaws:
    """An engine that has enough says so, and goes on."""

    async def test_a_full_engine_refuses_legs_and_continues_running_ones(self, at: AttachedEngine) -> None:
        taken: list[EngineStream] = []
        n_refused = 0
        for n in range(RUNNING_MAX + WAITING_MAX + 2):
            try:
                stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS))
                if RUNNING_MAX <= n < RUNNING_MAX + WAITING_MAX:
                    await until(lambda n=n: at.reported.running > n)  # type: ignore[misc]
                else:
                    await anext(aiter(stream))
                taken.append(stream)
            except WorkerFull:
                n_refused += 1
        assert (len(taken), n_refused) == (RUNNING_MAX + WAITING_MAX, 2)
        assert (await anext(aiter(taken[0]))).finish is None
        for stream in taken:
            stream.cancel("enough")
        await is_free(at)


class SnapshotLaws:
    """An engine that says what it holds says what its events came to."""

    async def test_a_snapshot_equals_the_state_after_its_events(self, at: AttachedEngine) -> None:
        engine = at.engine
        assert isinstance(engine, SnapshotEngine)
        assert engine.snapshot(R0) == ()
        prefix = new_prompt(2 * at.block_size)
        for n in range(12):
            await answer(at, engine_request([*prefix, *new_prompt((n % 5) * at.block_size)], max_tokens=40))
            held = HeldBlocks()
            held.take(engine.snapshot(R0))
            assert held.places() == at.reported.ranks[R0].places()
            assert (held.wrong, at.reported.wrong) == ([], [])


class RankLaws:
    """Two ranks have a cache, a load and events each."""

    async def test_each_rank_reports_only_its_own_blocks(self, at: AttachedEngine) -> None:
        size = at.block_size
        prompt = new_prompt(3 * size + 1)
        for rank in (R1, R0):
            assert cached_tokens_of(await answer(at, engine_request(prompt, max_tokens=1, dp_rank=rank))) == 0
            await until(lambda rank=rank: at.reported.overlap_blocks(prompt, rank) == 3)  # type: ignore[misc]
            assert at.reported.ranks.keys() == ({R1} if rank is R1 else {R0, R1})
            assert (
                cached_tokens_of(await answer(at, engine_request(prompt, max_tokens=1, dp_rank=rank)))
                == 3 * size
            )
        assert at.reported.wrong == []

    async def test_a_leg_counts_as_load_of_its_own_rank(self, at: AttachedEngine) -> None:
        stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS, dp_rank=R1))
        await anext(aiter(stream))
        await until(lambda: R1 in at.reported.loads and at.reported.loads[R1].running_requests == 1)
        assert R0 not in at.reported.loads or at.reported.loads[R0].running_requests == 0
        stream.cancel("enough")
        await until(lambda: not at.reported.running)


class WatchedLaws:
    """An engine with a server of its own is watched."""

    async def test_an_engines_silence_and_its_end_are_reported_once_each(self, at: AttachedEngine) -> None:
        assert at.door is not None
        stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS))
        await anext(aiter(stream))
        await at.door.close_door()
        with pytest.raises(StreamBroken):
            await read(stream)
        assert isinstance(await refusal_of(at, engine_request(new_prompt(5))), WorkerUnreachable)
        await until(lambda: not at.reported.states[-1].answers if at.reported.states else False)
        await at.door.open_door()
        await until(lambda: at.reported.states[-1].answers)
        await is_free(at)
        assert [(state.answers, state.knows_cache) for state in at.reported.states] == [
            (False, True),
            (True, True),
        ]


class StartLaws:
    """An engine that tells its starts apart is reported of as a new one."""

    async def test_a_restart_of_the_engine_is_reported(self, at: AttachedEngine) -> None:
        assert at.door is not None
        await until(lambda: bool(at.reported.n_loads))
        await at.door.close_door()
        await until(lambda: bool(at.reported.states))
        at.door.started_s += 100.0
        await at.door.open_door()
        await until(lambda: at.reported.states[-1].why == "the engine restarted")
        assert at.reported.states[-1].answers


class PairLaws:
    """Two engines share a request."""

    async def test_a_pair_gives_the_same_answer_as_one_engine(
        self, at: AttachedEngine, pair: EnginePair
    ) -> None:
        for n_prompt in (20, 100, 100):
            prompt = new_prompt(n_prompt)
            chunks = await both_legs(pair, prompt, max_tokens=15)
            assert tokens_of(chunks) == tokens_of(await answer(at, engine_request(prompt, max_tokens=15)))
            assert (chunks[-1].finish, ends_once(chunks)) == (FinishReason.LENGTH, True)
        for engine in (pair.prefill, pair.decode):
            await until(lambda engine=engine: not engine.reported.active_blocks)  # type: ignore[misc]
            assert engine.reported.wrong == []


class PairEndingLaws:
    """A client of two engines leaves."""

    async def test_a_cancelled_decode_leg_ends(self, pair: EnginePair) -> None:
        request, _ = await prefilled(pair, new_prompt(70), max_tokens=LONG_TOKENS)
        stream = await pair.decode.engine.submit(request)
        await anext(aiter(stream))
        await until(lambda: pair.decode.reported.running > 0)
        stream.cancel("its client left")
        assert (await read(stream))[-1].finish is FinishReason.CANCELLED
        await until(lambda: not pair.decode.reported.running and not pair.decode.reported.active_blocks)
        await until(lambda: not pair.prefill.reported.active_blocks)


class HandedLaws:
    """A prefill leg says where its KV waits."""

    async def test_unknown_kv_is_reported_lost_without_blame(self, pair: EnginePair) -> None:
        request, params = await prefilled(pair, new_prompt(70), max_tokens=9)
        gone = engine_request(request.token_ids, Leg.DECODE, kv_transfer_params=elsewhere(params))
        (chunk,) = await answer(pair.decode, gone)
        assert (chunk.finish, chunk.token_ids) == (FinishReason.ERROR, ())
        assert chunk.kv_lost is not None
        assert len(tokens_of(await answer(pair.decode, request))) == 9

    async def test_kv_of_a_dead_engine_is_reported_lost(self, pair: EnginePair) -> None:
        request, _ = await prefilled(pair, new_prompt(70), max_tokens=9)
        await (pair.prefill.door or pair.prefill.engine).stop()
        (chunk,) = await answer(pair.decode, request)
        assert (chunk.finish, chunk.kv_lost is None) == (FinishReason.ERROR, False)


class MeetingLaws:
    """The legs of a request meet, and a decode engine waits for a while only."""

    async def test_kv_that_never_arrives_is_reported_lost_without_blame(self, pair: EnginePair) -> None:
        alone = engine_request(new_prompt(70), Leg.DECODE, bootstrap=pair.meeting())
        (chunk,) = await answer(pair.decode, alone)
        assert (chunk.finish, chunk.token_ids) == (FinishReason.ERROR, ())
        assert chunk.kv_lost is not None
        await until(lambda: not pair.decode.reported.running and not pair.decode.reported.active_blocks)


async def prefilled(
    pair: EnginePair, prompt: list[int], *, max_tokens: int
) -> tuple[EngineRequest, dict[str, object]]:
    """Send the prefill leg of a request, and read it where it ends; return its decode leg and the params."""
    meeting = pair.meeting()
    first = engine_request(prompt, Leg.PREFILL, max_tokens=1, bootstrap=meeting)
    stream = await pair.prefill.engine.submit(first)
    if meeting is not None:
        return engine_request(prompt, Leg.DECODE, max_tokens=max_tokens, bootstrap=meeting), {}
    last: EngineChunk = (await read(stream))[-1]
    assert last.kv_transfer_params is not None
    assert last.raw == b""
    params = dict(last.kv_transfer_params)
    return engine_request(prompt, Leg.DECODE, max_tokens=max_tokens, kv_transfer_params=params), params


async def both_legs(pair: EnginePair, prompt: list[int], *, max_tokens: int) -> list[EngineChunk]:
    """The answer to a request whose legs are shared."""
    request, _ = await prefilled(pair, prompt, max_tokens=max_tokens)
    return await answer(pair.decode, request)


def elsewhere(params: dict[str, object]) -> dict[str, object]:
    """The same params, of an engine that nobody knows; whatever an engine wraps them in."""
    reported = json.dumps(params)
    found = re.search(r'remote_engine_id\\*": \\*"([^"\\]+)', reported)
    assert found is not None
    changed: dict[str, object] = json.loads(reported.replace(found[1], "gone"))
    return changed
