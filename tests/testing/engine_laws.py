"""What every engine keeps to, whatever it is: a mock, a server that stands in for one, a real one. Then what
engines keep to that have it: a limit, a cache that can be asked, a server of their own, a pair.

A class of tests is made of these by a subclass with the fixture ``at`` or ``pair``. No law needs an engine
that is as it was started: prompts are new ones, and what was stored before is allowed for.
"""

import asyncio
import json
import re
from itertools import count

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.engines.port import SnapshotEngine
from kvrouter.transports.requests.port import EngineStream, StreamBroken, WorkerFull, WorkerUnreachable
from tests.testing.attached_engines import RUNNING_MAX, WAITING_MAX, AttachedEngine, EnginePair
from tests.testing.engine_recorder import R0, R1, HeldBlocks
from tests.testing.engine_requests import completion_request, engine_request
from tests.testing.waits import until

VOCABULARY = 1_900
LONG_TOKENS = 300
"""An answer that nobody waits for."""

_seeds = count(1)


def new_prompt(n_tokens: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    seed = next(_seeds)
    return [10 + (seed * 7919 + place * 31 + place // 7) % VOCABULARY for place in range(n_tokens)]


async def read(stream: EngineStream) -> list[EngineChunk]:
    """Every chunk of an answer."""
    return [chunk async for chunk in stream]


async def answer(at: AttachedEngine, request: EngineRequest) -> list[EngineChunk]:
    """Every chunk of the answer to a leg."""
    return await read(await at.engine.submit(request))


def tokens_of(chunks: list[EngineChunk]) -> list[int]:
    """The tokens of an answer."""
    return [token for chunk in chunks for token in chunk.token_ids]


def cached_tokens_of(chunks: list[EngineChunk]) -> int:
    """What the engine had cached, which it tells once."""
    (found,) = [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
    return found


def ends_once(chunks: list[EngineChunk]) -> bool:
    """Whether the last chunk, and no other, tells why it ended."""
    *before, last = chunks
    return last.finish is not None and all(chunk.finish is None for chunk in before)


async def is_free(at: AttachedEngine) -> None:
    """Wait until nothing runs, waits or holds blocks, by the engine's own reports from now on. A real engine
    counts again with its next step: it is given one.
    """
    await answer(at, engine_request(new_prompt(3), max_tokens=1))
    await until(lambda: not at.reported.running and not at.reported.active_blocks)


async def refusal_of(at: AttachedEngine, request: EngineRequest) -> KvrouterError:
    """The error with which a leg is refused, at once or by its first read."""
    with pytest.raises(KvrouterError) as refused:
        await anext(aiter(await at.engine.submit(request)))
    return refused.value


class AnswerLaws:
    """What an answer is."""

    @pytest.mark.parametrize("n_tokens", [1, 2, 40])
    async def test_an_answer_has_the_requested_tokens_and_one_end(
        self, at: AttachedEngine, n_tokens: int
    ) -> None:
        stream = await at.engine.submit(engine_request(new_prompt(50), max_tokens=n_tokens))
        chunks = await read(stream)
        assert (len(tokens_of(chunks)), chunks[-1].finish) == (n_tokens, FinishReason.LENGTH)
        assert ends_once(chunks)
        assert not any(chunk.raw for chunk in chunks)
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))
        stream.cancel("it has ended")

    async def test_a_greedy_answer_repeats_and_continues_from_its_middle(self, at: AttachedEngine) -> None:
        prompt = new_prompt(70)
        whole = tokens_of(await answer(at, engine_request(prompt, max_tokens=12)))
        assert tokens_of(await answer(at, engine_request(prompt, max_tokens=12))) == whole
        resumed = engine_request([*prompt, *whole[:5]], max_tokens=7, resumed_tokens=5)
        assert tokens_of(await answer(at, resumed)) == whole[5:]

    async def test_concurrent_legs_get_their_own_tokens(self, at: AttachedEngine) -> None:
        prompts = [new_prompt(40 + n) for n in range(4)]
        alone = [tokens_of(await answer(at, engine_request(prompt, max_tokens=20))) for prompt in prompts]
        together = await asyncio.gather(
            *(answer(at, engine_request(prompt, max_tokens=20)) for prompt in prompts)
        )
        assert [tokens_of(chunks) for chunks in together] == alone

    async def test_an_unread_leg_does_not_delay_others(self, at: AttachedEngine) -> None:
        slow = await at.engine.submit(engine_request(new_prompt(33), max_tokens=100))
        assert len(tokens_of(await answer(at, engine_request(new_prompt(34), max_tokens=20)))) == 20
        assert len(tokens_of(await read(slow))) == 100

    async def test_a_second_leg_of_the_same_id_leaves_the_first_intact(self, at: AttachedEngine) -> None:
        request = engine_request(new_prompt(45), max_tokens=60)
        first = await at.engine.submit(request)
        begun = await anext(aiter(first))
        try:
            again = tokens_of(await answer(at, request))
        except (InvalidRequest, WorkerUnreachable):
            again = []
        whole = tokens_of([begun, *await read(first)])
        assert len(whole) == 60
        assert again in ([], whole)


class RefusalLaws:
    """What is refused, and as whose fault."""

    async def test_a_call_at_fault_names_its_field(self, at: AttachedEngine) -> None:
        error = await refusal_of(at, engine_request(new_prompt(5), max_tokens=-1))
        assert isinstance(error, InvalidRequest)
        assert "max_" in (error.param or error.message)
        assert not isinstance(error, ContextLengthExceeded)

    async def test_a_prompt_beyond_the_context_is_reported_as_too_long(self, at: AttachedEngine) -> None:
        request = engine_request(new_prompt(at.context_tokens + 1), max_tokens=100)
        assert isinstance(await refusal_of(at, request), ContextLengthExceeded)

    async def test_no_answer_exceeds_the_context(self, at: AttachedEngine) -> None:
        try:
            chunks = await answer(at, engine_request(new_prompt(at.context_tokens - 8), max_tokens=100))
        except ContextLengthExceeded:
            return
        assert (len(tokens_of(chunks)) <= 8, chunks[-1].finish) == (True, FinishReason.LENGTH)

    async def test_a_call_without_tokens_is_a_client_error(self, at: AttachedEngine) -> None:
        assert isinstance(await refusal_of(at, engine_request([])), InvalidRequest)

    async def test_a_refused_leg_leaves_nothing_behind(self, at: AttachedEngine) -> None:
        for _ in range(3):
            await refusal_of(at, engine_request(new_prompt(at.context_tokens + 1), max_tokens=100))
        await is_free(at)


class CacheLaws:
    """What is cached is what the events say."""

    async def test_full_blocks_of_a_prompt_without_its_last_token_are_cached(
        self, at: AttachedEngine
    ) -> None:
        size = at.block_size
        request = engine_request(new_prompt(4 * size), max_tokens=1)
        assert cached_tokens_of(await answer(at, request)) == 0
        await at.settled(request)
        for n_tokens, cached in ((4 * size, 3 * size), (4 * size - 1, 3 * size), (3 * size + 1, 3 * size)):
            shorter = request.token_ids[:n_tokens]
            assert at.reported.reusable_tokens(shorter) == cached
            assert cached_tokens_of(await answer(at, engine_request(shorter, max_tokens=1))) == cached
        longer = engine_request([*request.token_ids, *new_prompt(40)], max_tokens=1)
        assert cached_tokens_of(await answer(at, longer)) == 4 * size

    async def test_the_blocks_of_an_answer_are_cached_too(self, at: AttachedEngine) -> None:
        size = at.block_size
        prompt = new_prompt(size + 3)
        tokens = tokens_of(await answer(at, engine_request(prompt, max_tokens=2 * size)))
        after = engine_request([*prompt, *tokens], max_tokens=1)
        await until(lambda: at.reported.overlap_blocks(after.token_ids) == 3)
        assert cached_tokens_of(await answer(at, after)) == 3 * size

    async def test_evicted_blocks_are_reported(self, at: AttachedEngine) -> None:
        await answer(
            at, engine_request(new_prompt(3), max_tokens=1)
        )  # some engines tell no load before they ran
        await until(lambda: bool(at.reported.loads))
        total_blocks = sum(load.total_blocks for load in at.reported.loads.values())
        requests = [
            engine_request(new_prompt(4 * at.block_size), max_tokens=1) for _ in range(total_blocks // 4 + 2)
        ]
        for request in requests:
            await answer(at, request)
        await at.settled(requests[-1])
        assert sum(len(held.places()) for held in at.reported.ranks.values()) <= total_blocks
        found = []
        for request in (requests[0], requests[-1]):
            promised = at.reported.reusable_tokens(request.token_ids)
            found.append(cached_tokens_of(await answer(at, engine_request(request.token_ids, max_tokens=1))))
            assert found[-1] == promised
            await at.settled(request)
        assert found == [0, 3 * at.block_size]
        assert at.reported.wrong == []


class SaltLaws:
    """Prompts of one tenant are not another's."""

    async def test_a_salt_keeps_prompts_apart(self, at: AttachedEngine) -> None:
        request = engine_request(new_prompt(2 * at.block_size + 1), max_tokens=1, cache_namespace="tenant")
        for namespace, cached in (("tenant", 0), ("tenant", 2), ("other", 0), (None, 0)):
            found = await answer(
                at, replace(engine_request(request.token_ids, max_tokens=1), cache_namespace=namespace)
            )
            assert cached_tokens_of(found) == cached * at.block_size
            await at.settled(replace(request, cache_namespace=namespace))


class EndingLaws:
    """What is given up ends, and is gone."""

    async def test_a_cancelled_leg_ends_at_once_and_is_gone(self, at: AttachedEngine) -> None:
        stream = await at.engine.submit(engine_request(new_prompt(64), max_tokens=LONG_TOKENS))
        assert (await anext(aiter(stream))).finish is None
        await until(lambda: at.reported.running > 0 and at.reported.active_blocks > 0)
        waiting = asyncio.ensure_future(anext(aiter(stream)))
        stream.cancel("its client left")
        stream.cancel("again")
        chunks = [await waiting, *await read(stream)]
        assert (chunks[-1].finish, ends_once(chunks)) == (FinishReason.CANCELLED, True)
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))
        await is_free(at)

    async def test_unread_legs_leave_nothing_behind(self, at: AttachedEngine) -> None:
        given_up = []
        for turns in range(4):
            stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS))
            for _ in range(turns):
                await asyncio.sleep(0)
            stream.cancel("its client left")
            given_up.append(stream)
        await is_free(at)
        for stream in given_up:
            assert (await read(stream))[-1].finish is FinishReason.CANCELLED

    async def test_closing_a_stream_midway_ends_its_leg(self, at: AttachedEngine) -> None:
        before = engine_request(new_prompt(at.block_size), max_tokens=1)
        await answer(at, before)
        await at.settled(before)
        n_before = at.reported.n_stored
        stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS))
        await anext(aiter(stream))
        await until(lambda: at.reported.running > 0)
        stream.cancel("its client left")
        await is_free(at)
        assert at.reported.n_stored - n_before < LONG_TOKENS // at.block_size

    async def test_a_legs_load_is_reported_and_falls_when_it_ends(self, at: AttachedEngine) -> None:
        streams = [
            await at.engine.submit(engine_request(new_prompt(64), max_tokens=LONG_TOKENS)) for _ in range(2)
        ]
        await until(lambda: at.reported.running == 2 and at.reported.active_blocks > 2)
        assert all(load.active_blocks <= load.total_blocks for load in at.reported.loads.values())
        for stream in streams:
            stream.cancel("enough")
        await is_free(at)

    async def test_a_stopped_engine_breaks_streams_and_accepts_nothing(self, at: AttachedEngine) -> None:
        stream = await at.engine.submit(engine_request(new_prompt(40), max_tokens=LONG_TOKENS))
        await anext(aiter(stream))
        await at.engine.stop()
        with pytest.raises(StreamBroken):
            await read(stream)
        stream.cancel("too late")
        assert isinstance(await refusal_of(at, engine_request(new_prompt(5))), WorkerUnreachable)
        await at.engine.stop()


class CallLaws:
    """A client's call goes as it was written, and its answer comes in the engine's own bytes."""

    @pytest.mark.parametrize("stream", [True, False])
    async def test_the_passed_bytes_are_a_valid_answer(self, at: AttachedEngine, stream: bool) -> None:
        request = completion_request(new_prompt(40), stream=stream, max_tokens=6)
        chunks = await answer(at, request)
        raw = b"".join(chunk.raw for chunk in chunks)
        assert (chunks[-1].finish, ends_once(chunks)) == (FinishReason.LENGTH, True)
        assert raw.endswith(b"data: [DONE]\n\n") is stream
        assert raw.count(b'"finish_reason":') >= 1
        assert b'token_ids":[' not in raw

    async def test_a_wrong_call_is_a_client_error(self, at: AttachedEngine) -> None:
        error = await refusal_of(at, completion_request(new_prompt(5), max_tokens=-1))
        assert isinstance(error, InvalidRequest)
        error = await refusal_of(at, completion_request(new_prompt(at.context_tokens + 1)))
        assert isinstance(error, ContextLengthExceeded)

    async def test_cached_tokens_are_reported_whether_or_not_usage_is_requested(
        self, at: AttachedEngine
    ) -> None:
        request = completion_request(new_prompt(2 * at.block_size + 1), max_tokens=2)
        chunks = await answer(at, request)
        assert cached_tokens_of(chunks) == 0
        assert b'"usage":{' not in b"".join(chunk.raw for chunk in chunks)
        await at.settled(request)
        assert request.call is not None
        asks = completion_request(request.token_ids, max_tokens=2, stream_options={"include_usage": True})
        chunks = await answer(at, asks)
        assert cached_tokens_of(chunks) == 2 * at.block_size
        assert b'"usage":{' in b"".join(chunk.raw for chunk in chunks)


class CallEndingLaws:
    """A client that leaves is gone."""

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_disconnected_client_ends_its_leg(self, at: AttachedEngine, stream: bool) -> None:
        given_up = await at.engine.submit(
            completion_request(new_prompt(40), stream=stream, max_tokens=LONG_TOKENS)
        )
        await until(lambda: at.reported.running > 0)
        given_up.cancel("its client left")
        assert (await read(given_up))[-1].finish is FinishReason.CANCELLED
        await is_free(at)


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


class PullLaws:
    """A decode engine keeps what it has of a prompt, and a prefill engine fetches it."""

    async def test_a_prefill_leg_fetches_what_a_decode_engine_keeps(self, pair: EnginePair) -> None:
        prompt = new_prompt(100)
        tokens = tokens_of(await both_legs(pair, prompt, max_tokens=40))
        longer = [*prompt, *tokens, *new_prompt(10)]
        n_kept = (len(longer) - 11) // pair.decode.block_size * pair.decode.block_size
        keeping = engine_request(longer[:n_kept], Leg.PREFILL, max_tokens=1)
        place = (await answer(pair.decode, keeping))[-1].kv_transfer_params
        assert place
        fetching = engine_request(longer, Leg.PREFILL, max_tokens=1, kv_transfer_params=place)
        last = (await answer(pair.prefill, fetching))[-1]
        assert last.cached_tokens == n_kept
        decode = engine_request(longer, Leg.DECODE, max_tokens=9, kv_transfer_params=last.kv_transfer_params)
        alone = engine_request(longer, Leg.AGGREGATED, max_tokens=9)
        assert tokens_of(await answer(pair.decode, decode)) == tokens_of(await answer(pair.decode, alone))
        await until(
            lambda: not pair.prefill.reported.active_blocks and not pair.decode.reported.active_blocks
        )

    async def test_a_prefill_leg_without_the_kv_that_it_fetches_is_not_at_fault(
        self, pair: EnginePair
    ) -> None:
        prompt = new_prompt(100)
        keeping = engine_request(prompt[:64], Leg.PREFILL, max_tokens=1)
        place = (await answer(pair.decode, keeping))[-1].kv_transfer_params
        assert place
        gone = engine_request(prompt, Leg.PREFILL, max_tokens=1, kv_transfer_params=elsewhere(dict(place)))
        (chunk,) = await answer(pair.prefill, gone)
        assert (chunk.finish, chunk.token_ids) == (FinishReason.ERROR, ())
        assert chunk.kv_lost is not None


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
