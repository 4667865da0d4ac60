"""Requests that are booked by hand: load until they are freed, or until their owner is silent too long."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import NoEligibleWorker, ShuttingDown
from kvrouter.core.ids import RequestId
from kvrouter.core.workers import LoadReport, Role
from kvrouter.kernel.placement.placement import Placement
from kvrouter.router.bookings import Bookings, BookingsFull, NotBooked, RequestInUse
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import RouterHarness, card, generate_request
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.virtual_time import run_in_virtual_time

TTL_S = 10.0
R1, R2 = RequestId("r1"), RequestId("r2")


class Owner:
    """Bookings on a bench of workers, and what was said to have lapsed."""

    def __init__(
        self, harness: RouterHarness, *, bookings_max: int = 100, lease_ttl_s: float | None = TTL_S
    ) -> None:
        self.bench = harness
        self.lapsed: list[tuple[str, float]] = []
        """Which bookings, and when."""
        self.bookings = Bookings(
            bookings_max=bookings_max, lease_ttl_s=lease_ttl_s, on_lapsed=self._on_lapsed
        )

    def _on_lapsed(self, model: str, placement: Placement) -> None:
        assert model == "mock"
        self.lapsed.append((placement.decision.request_id, asyncio.get_running_loop().time()))

    async def book(self, request_id: str = "r1") -> Placement:
        return await self.bookings.book(self.bench.model, generate_request(request_id=request_id))


async def owner_of(
    *roles: Role,
    config: KvRouterConfig | None = None,
    bookings_max: int = 100,
    lease_ttl_s: float | None = TTL_S,
) -> Owner:
    harness = RouterHarness(ScriptedTransport(), config)
    await harness.start(*(card(1 + number, role) for number, role in enumerate(roles or (Role.BOTH,))))
    return Owner(harness, bookings_max=bookings_max, lease_ttl_s=lease_ttl_s)


def test_a_booking_loads_the_ledger_until_it_is_freed() -> None:
    async def story() -> None:
        owner = await owner_of(Role.PREFILL, Role.DECODE)
        ledger = owner.bench.model.ledger
        placement = await owner.book()
        decode, prefill = placement.decision.decode.slot, placement.prefill_pick.slot
        assert ledger.columns().prefill_tokens[prefill] == 40
        assert ledger.columns().active_blocks[decode] == 3
        owner.bookings.first_token(R1)
        assert ledger.columns().prefill_tokens.sum() == 0
        owner.bookings.output_blocks(R1, 2)
        assert ledger.columns().active_blocks[decode] == 5
        assert owner.bookings.free(R1) is placement
        assert owner.bench.booked() == len(owner.bookings) == 0
        for late in (owner.bookings.free, owner.bookings.first_token, owner.bookings.renew):
            with pytest.raises(NotBooked, match="'r1' is not booked"):
                late(R1)

    run_in_virtual_time(story())


@pytest.mark.parametrize("says", ["renew", "first_token", "output_blocks", "nothing"])
def test_a_booking_lapses_after_its_ttl_without_renewal(says: str) -> None:
    async def story() -> None:
        owner = await owner_of()
        bookings = owner.bookings
        await owner.book("r1")
        await asyncio.sleep(1)
        await owner.book("r2")
        await asyncio.sleep(TTL_S - 2)
        match says:
            case "renew":
                bookings.renew(R1)
            case "first_token":
                bookings.first_token(R1)
            case "output_blocks":
                bookings.output_blocks(R1, 1)
        await asyncio.sleep(3 * TTL_S)
        silent_from_s = 0.0 if says == "nothing" else TTL_S - 1
        assert sorted(owner.lapsed) == [("r1", silent_from_s + TTL_S), ("r2", 1 + TTL_S)]
        assert owner.bench.booked() == len(bookings) == 0

    run_in_virtual_time(story())


def test_a_booking_without_a_ttl_never_lapses() -> None:
    async def story() -> None:
        owner = await owner_of(lease_ttl_s=None)
        await owner.book()
        await asyncio.sleep(1_000 * TTL_S)
        assert len(owner.bookings) == 1
        owner.bookings.close()
        assert owner.bench.booked() == 0

    run_in_virtual_time(story())


def test_a_request_id_is_taken_while_booking_or_claimed() -> None:
    async def story() -> None:
        owner = await owner_of()
        both = await asyncio.gather(owner.book(), owner.book(), return_exceptions=True)
        assert [isinstance(each, RequestInUse) for each in both] == [False, True]
        owner.bookings.claim(R2)
        with pytest.raises(RequestInUse, match="'r2' runs already"):
            await owner.book("r2")
        owner.bookings.give_back(R2)
        await owner.book("r2")
        owner.bookings.free(R1)
        await owner.book()

    run_in_virtual_time(story())


def test_a_booking_over_the_limit_is_refused_and_leaves_no_load() -> None:
    async def story() -> None:
        owner = await owner_of(bookings_max=2)
        done = await asyncio.gather(*(owner.book(f"r{n}") for n in range(4)), return_exceptions=True)
        assert [type(each) for each in done if isinstance(each, Exception)] == [BookingsFull] * 2
        assert len(owner.bookings) == 2
        await asyncio.sleep(TTL_S)
        assert owner.bench.booked() == 0

    run_in_virtual_time(story())


def test_a_refused_booking_frees_its_request_id() -> None:
    async def story() -> None:
        owner = await owner_of()
        owner.bench.discovery.drop(1)
        with pytest.raises(NoEligibleWorker):
            await owner.book()
        owner.bench.discovery.put(card(1))
        await owner.book()

    run_in_virtual_time(story())


def test_a_queued_booking_fails_when_bookings_close() -> None:
    async def story() -> None:
        config = KvRouterConfig(
            active_prefill_tokens_threshold=10, admission_queue_max=4, admission_wait_s=100.0
        )
        owner = await owner_of(config=config)
        busy = LoadReport(card(1).ranks()[0], 0, 1024, active_prefill_tokens=11)
        owner.bench.load(busy)
        waiting = asyncio.ensure_future(owner.book())
        await owner.bench.until_parked()
        owner.bookings.close()
        owner.bench.load(LoadReport(busy.rank, 0, 1024))
        with pytest.raises(ShuttingDown):
            await waiting
        assert owner.bench.booked() == len(owner.bookings) == 0
        with pytest.raises(ShuttingDown):
            await owner.book("r2")

    run_in_virtual_time(story())


def test_a_drain_waits_until_all_bookings_are_freed_or_times_out() -> None:
    async def story() -> None:
        owner = await owner_of()
        assert await owner.bookings.wait_empty(1) == 0
        await owner.book()
        assert await owner.bookings.wait_empty(1) == 1
        empty = asyncio.ensure_future(owner.bookings.wait_empty(5))
        await asyncio.sleep(1)
        owner.bookings.free(R1)
        assert await empty == 0
        assert asyncio.get_running_loop().time() == 2.0

    run_in_virtual_time(story())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("book", "first", "output", "free", "pass", "leave", "join")), st.integers(0, 3)
    ),
    max_size=40,
)


@given(STEPS)
def test_any_steps_leave_no_booking_or_load_after_the_ttl(steps: list[tuple[str, int]]) -> None:
    async def story() -> None:
        owner = await owner_of(Role.BOTH, Role.BOTH, bookings_max=3)
        bookings = owner.bookings
        for step, n in steps:
            request_id = RequestId(f"r{n}")
            try:
                match step:
                    case "book":
                        await owner.book(request_id)
                    case "first":
                        bookings.first_token(request_id)
                    case "output":
                        bookings.output_blocks(request_id, 1 + n)
                    case "free":
                        bookings.free(request_id)
                    case "pass":
                        await asyncio.sleep(n * TTL_S / 2.5)
                    case "leave":
                        owner.bench.discovery.drop(1 + n % 2)
                    case "join":
                        owner.bench.discovery.put(card(1 + n % 2))
            except (NotBooked, RequestInUse, BookingsFull, NoEligibleWorker):
                pass
            assert len(bookings) <= 3
        await asyncio.sleep(TTL_S)
        assert len(bookings) == owner.bench.booked() == len(owner.bench.model.ledger) == 0

    run_in_virtual_time(story())
