"""Prefill legs for somebody else's decode: who gets them, what comes back, what is left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoEligibleWorker,
    Reason,
    ShuttingDown,
    WorkerFailed,
)
from kvrouter.core.ids import DpRank, RequestId, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import Enforcement, LoadReport, Role, WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState, Fault
from kvrouter.kernel.placement.placement import Placement
from kvrouter.router.bookings import Bookings, RequestInUse
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.prefill_dispatch import (
    PrefillDiscarded,
    PrefillDispatch,
    Prefilled,
    PrefillsFull,
    UnknownPrefill,
)
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import RouterHarness, card, generate_request
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

R1 = RequestId("r1")
LAST = EngineChunk(token_ids=(7,), finish=FinishReason.LENGTH, cached_tokens=16, kv_transfer_params={"at": 5})
Script = Callable[[ScriptedStream], None]


def ends(stream: ScriptedStream) -> None:
    stream.feed(LAST)


@dataclass
class Place:
    harness: RouterHarness
    plane: ScriptedTransport
    bookings: Bookings
    prefills: PrefillDispatch
    placed: list[Placement] = field(default_factory=list)

    async def prefill(self, request_id: str = "r1") -> Prefilled:
        request = generate_request(request_id=request_id)
        return await self.prefills.prefill(self.harness.model, request, self.placed.append)

    def faults(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Fault]]:
        """What is counted against workers from now on, by their addresses."""
        found: list[tuple[str, Fault]] = []

        def failed(placement: Placement, leg: Leg, fault: Fault, **_: float) -> None:
            found.append((placement.decode_address, fault))

        monkeypatch.setattr(self.harness.model.placer.circuits, "failed", failed)
        return found

    @property
    def is_clean(self) -> bool:
        return self.harness.booked() == len(self.prefills) == len(self.harness.model.ledger) == 0


@asynccontextmanager
async def place(
    *cards: WorkerCard,
    script: Script | None = None,
    prefills_max: int = 10,
    limit_s: float = 60.0,
    config: KvRouterConfig | None = None,
) -> AsyncIterator[Place]:
    plane = ScriptedTransport(script)
    harness = RouterHarness(plane, config, prefill_alone=True)
    await harness.start(*cards)
    bookings = Bookings()
    prefills = PrefillDispatch(
        plane,
        bookings,
        ServiceInstrumentation(harness.telemetry),
        redispatches_max=2,
        limit_s=limit_s,
        prefills_max=prefills_max,
    )
    try:
        yield Place(harness, plane, bookings, prefills)
    finally:
        await prefills.close()
        harness.service.stop()


def prefill_card(worker_id: int, *, bootstrap: bool = False, dp_size: int = 1) -> WorkerCard:
    return card(worker_id, Role.PREFILL, bootstrap=bootstrap, dp_size=dp_size)


async def test_a_synchronous_prefill_is_answered_when_its_leg_ends() -> None:
    async with place(prefill_card(1)) as here:
        running = asyncio.ensure_future(here.prefill())
        stream = await here.plane.wait_for(Leg.PREFILL)
        assert stream.request.sampling.max_tokens == 1
        assert stream.request.bootstrap is None
        assert here.harness.booked() == 40, "a prefill worker's load is its tokens, not blocks"
        assert not running.done()
        stream.feed(LAST)
        done = await running
        assert (done.kv_transfer_params, done.cached_tokens, done.bootstrap) == ({"at": 5}, 16, None)
        assert here.is_clean
        assert stream.cancelled_for is None, "its KV waits for decode"


async def test_a_bootstrap_prefill_is_answered_at_once_while_its_leg_runs() -> None:
    async with place(prefill_card(1, bootstrap=True, dp_size=4)) as here:
        done = await here.prefill()
        (stream,) = here.plane.opened
        assert done.bootstrap is not None
        assert stream.request.bootstrap == done.bootstrap
        assert (done.bootstrap.host, done.bootstrap.port) == ("host-1", 9000)
        assert done.bootstrap.room % 4 == stream.request.dp_rank == done.placement.prefill_pick.rank.dp_rank
        assert (len(here.prefills), here.harness.booked()) == (1, 40)
        with pytest.raises(RequestInUse):
            await here.prefill()
        idle = asyncio.ensure_future(here.prefills.wait_idle(60))
        stream.feed(LAST)
        assert await idle == 0
        assert here.is_clean
        await here.prefill()


async def test_a_failed_prefill_is_tried_on_another_worker() -> None:
    dead: list[str] = []

    def script(stream: ScriptedStream) -> None:
        if len(dead) < 2:
            dead.append(stream.address)
            stream.die()
        else:
            ends(stream)

    async with place(*map(prefill_card, (1, 2, 3)), script=script) as here:
        done = await here.prefill()
        tried = [stream.address for stream in here.plane.opened]
        assert sorted(tried) == [address_of(n) for n in (1, 2, 3)]
        assert done.placement.decode_address == tried[-1]
        assert [stream.request.attempt for stream in here.plane.opened] == [0, 1, 2]
        assert here.is_clean


@pytest.mark.parametrize("how", ["dies", "refuses", "tells nothing", "fails"])
async def test_a_prefill_failing_every_try_raises_worker_failed(how: str) -> None:
    def script(stream: ScriptedStream) -> None:
        match how:
            case "dies":
                stream.die()
            case "tells nothing":
                stream.feed(EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH))
            case "fails":
                stream.feed(EngineChunk(finish=FinishReason.ERROR, error="out of memory"))

    async with place(*map(prefill_card, (1, 2, 3, 4)), script=script) as here:
        if how == "refuses":
            here.plane.unreachable = {address_of(n) for n in range(1, 5)}
        with pytest.raises(WorkerFailed, match="try 3 of 3") as error:
            await here.prefill()
        assert "://" not in error.value.message, "clients do not learn the addresses of workers"
        assert here.is_clean


async def test_a_prefill_failing_on_the_only_worker_reports_the_failure() -> None:
    async with place(prefill_card(1), script=ScriptedStream.die) as here:
        with pytest.raises(NoEligibleWorker, match=r"worker 1 failed .*; after that, no prefill worker"):
            await here.prefill()
        assert here.is_clean


async def test_an_invalid_prefill_request_is_tried_once() -> None:
    async with place(
        prefill_card(1),
        prefill_card(2),
        script=lambda stream: stream.feed(InvalidRequest("prompt: odd", param="prompt")),
    ) as here:
        with pytest.raises(InvalidRequest, match="odd"):
            await here.prefill()
        assert len(here.plane.opened) == 1
        assert here.is_clean


async def test_a_cancelled_caller_cancels_its_prefill_leg() -> None:
    async with place(prefill_card(1)) as here:
        running = asyncio.ensure_future(here.prefill())
        stream = await here.plane.wait_for(Leg.PREFILL)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert stream.cancelled_for is not None
        assert here.is_clean


@pytest.mark.parametrize("bootstrap", [False, True])
@in_virtual_time
async def test_a_prefill_past_its_time_limit_is_cancelled(bootstrap: bool) -> None:
    async with place(prefill_card(1, bootstrap=bootstrap), limit_s=0.05) as here:
        if bootstrap:
            await here.prefill()
        else:
            with pytest.raises(DeadlineExceeded, match=r"longer than 0\.05 s"):
                await here.prefill()
        await until(lambda: here.is_clean)
        assert here.plane.opened[0].cancelled_for is not None


async def test_discarding_a_finished_prefill_cancels_its_leg() -> None:
    async with place(prefill_card(1), script=ends) as here:
        await here.prefill()
        here.prefills.discard(R1)
        assert here.plane.opened[0].cancelled_for == "nobody will fetch its KV"
        with pytest.raises(UnknownPrefill):
            here.prefills.discard(R1)


async def test_discarding_a_running_prefill_cancels_it_without_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place(prefill_card(1, bootstrap=True)) as here:
        await here.prefill()
        here.prefills.discard(R1)
        await until(lambda: here.is_clean)
        assert here.plane.opened[0].cancelled_for == "nobody will fetch its KV"
        assert "request_failed" not in caplog.text
        await here.prefill("r2")
        here.plane.opened[1].die()
        await until(lambda: here.is_clean)
        assert "request_failed" in caplog.text


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("sent", [False, True])
async def test_a_prefill_discarded_before_its_answer_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, bootstrap: bool, sent: bool
) -> None:
    def script(stream: ScriptedStream) -> None:
        stream.is_accepted = False

    async with place(*(prefill_card(n, bootstrap=bootstrap) for n in (1, 2)), script=script) as here:
        faults = here.faults(monkeypatch)
        if not sent:
            here.plane.accepts.clear()
        running = asyncio.ensure_future(here.prefill())
        await until(lambda: bool(here.plane.opened if sent else here.plane.asked))
        here.prefills.discard(R1)
        here.plane.accepts.set()
        with pytest.raises(PrefillDiscarded):
            await running
        assert [stream.cancelled_for for stream in here.plane.opened] == ["nobody will fetch its KV"]
        assert here.is_clean
        assert faults == []


async def test_running_and_remembered_prefills_are_limited() -> None:
    async with place(prefill_card(1, bootstrap=True), prefills_max=2) as here:
        for request_id in ("r1", "r2"):
            await here.prefill(request_id)
        with pytest.raises(PrefillsFull):
            await here.prefill("r3")
        ends(here.plane.opened[0])
        await until(lambda: len(here.prefills) == 1)
        ends(here.plane.opened[1])
        await until(lambda: here.is_clean)
        await here.prefill("r3")
        ends(here.plane.opened[2])
        await until(lambda: here.is_clean)
        with pytest.raises(UnknownPrefill):
            here.prefills.discard(R1)
        here.prefills.discard(RequestId("r3"))


async def test_closing_cancels_running_prefills_and_refuses_new_prefills() -> None:
    async with place(prefill_card(1, bootstrap=True)) as here:
        await here.prefill()
        assert await here.prefills.wait_idle(0.0) == 1
        await here.prefills.close()
        assert here.plane.opened[0].cancelled_for == "this router shuts down"
        assert here.is_clean
        with pytest.raises(ShuttingDown):
            await here.prefill()


async def test_an_internal_error_in_a_bootstrap_leg_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with place(prefill_card(1, bootstrap=True)) as here:
        await here.prefill()
        here.plane.opened[0].feed(ZeroDivisionError("a mistake"))
        await until(lambda: here.is_clean)
        await until(lambda: "internal_error" in caplog.text)


async def test_a_required_domain_without_a_value_refuses_the_prefill() -> None:
    lost = card(1, Role.PREFILL, enforcement=Enforcement.REQUIRED)
    async with place(lost, script=ends) as here:
        with pytest.raises(NoEligibleWorker) as refused:
            await here.prefill()
        assert refused.value.refusals == {Reason.DOMAIN_UNKNOWN: 1}
        assert refused.value.role == "prefill"
        assert not here.plane.opened


async def fails_at(here: Place, worker_id: int, request_id: str, error: type[Exception]) -> None:
    """Send a prefill that is pinned to the worker, and fails."""
    pin = Pin(WorkerId(worker_id))
    request = structs.replace(generate_request(request_id=request_id), prefill_pin=pin)
    with pytest.raises(error):
        await here.prefills.prefill(here.harness.model, request, here.placed.append)


async def test_a_repeatedly_failing_prefill_worker_has_an_open_circuit() -> None:
    def script(stream: ScriptedStream) -> None:
        (ScriptedStream.die if stream.address == address_of(1) else ends)(stream)

    async with place(prefill_card(1), prefill_card(2), script=script) as here:
        for number in range(3):
            await fails_at(here, 1, f"failing-{number}", NoEligibleWorker)
        assert here.harness.circuit_state(WorkerId(1)) is CircuitState.OPEN
        before = len(here.plane.opened)
        for number in range(8):
            await here.prefill(f"r{number}")
        assert {stream.address for stream in here.plane.opened[before:]} == {address_of(2)}
        assert here.is_clean


@pytest.mark.parametrize("bootstrap", [False, True])
@in_virtual_time
async def test_a_silent_prefill_worker_has_an_open_circuit(bootstrap: bool) -> None:
    async with place(prefill_card(1, bootstrap=bootstrap), limit_s=0.2) as here:
        state_of = here.harness.circuit_state
        for number in range(3):
            assert state_of(WorkerId(1)) is CircuitState.CLOSED
            if bootstrap:
                await here.prefill(f"r{number}")
                await here.prefills.wait_idle(60)
            else:
                await fails_at(here, 1, f"r{number}", DeadlineExceeded)
                assert [each.decision.request_id for each in here.placed][number:] == [f"r{number}"]
        assert state_of(WorkerId(1)) is CircuitState.OPEN
        assert here.is_clean


@in_virtual_time
async def test_a_worker_tried_late_is_not_silent_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(stream: ScriptedStream) -> None:
        if stream is here.plane.opened[0]:
            asyncio.get_running_loop().call_later(0.3, stream.die)

    async with place(prefill_card(1), prefill_card(2), limit_s=0.4, script=script) as here:
        faults = here.faults(monkeypatch)
        with pytest.raises(DeadlineExceeded):
            await here.prefill()
        assert [fault for _, fault in faults] in ([Fault.LOST], [Fault.SILENT]), "one worker's, whose it was"
        assert {address for address, _ in faults} == {here.plane.opened[0].address}
        assert here.is_clean


@in_virtual_time
async def test_a_worker_that_lost_a_leg_is_not_silent_while_the_retry_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = KvRouterConfig(admission_queue_max=8, admission_wait_s=60.0, active_prefill_tokens_threshold=100)
    async with place(
        prefill_card(1), prefill_card(2), limit_s=0.3, script=ScriptedStream.die, config=config
    ) as here:
        here.harness.load(LoadReport(WorkerRank(WorkerId(2), DpRank(0)), 0, 1024, active_prefill_tokens=5000))
        faults = here.faults(monkeypatch)
        with pytest.raises(DeadlineExceeded):
            await here.prefill()
        assert faults == [(address_of(1), Fault.LOST)]
        assert here.is_clean
