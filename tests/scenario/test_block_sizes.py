"""Workers of one model whose cards name different block sizes: that of most of them is the model's."""

from msgspec import structs

from kvrouter.core.requests import FinishReason
from kvrouter.core.workers import WorkerCard
from tests.support.fleets import BLOCK_SIZE, Bench, card, read_all
from tests.support.planes import ScriptedPlane

OTHER = 2 * BLOCK_SIZE


def odd(worker_id: int) -> WorkerCard:
    return structs.replace(card(worker_id), block_size=OTHER)


def ids(bench: Bench) -> set[int]:
    return {int(each.worker_id) for each in bench.model.fleet}


def bench_of_streams() -> Bench:
    return Bench(ScriptedPlane(lambda stream: stream.tokens(1, finish=FinishReason.STOP)))


async def test_a_first_card_that_is_wrong_does_not_keep_the_right_ones_out() -> None:
    bench = bench_of_streams()
    await bench.start(odd(1))
    bench.discovery.put(card(2))
    assert (bench.model.fleet.block_size, ids(bench)) == (OTHER, {1}), "one against one: the first stays"
    bench.discovery.put(card(3))
    assert (bench.model.fleet.block_size, ids(bench)) == (BLOCK_SIZE, {2, 3})
    assert await read_all(bench) == [1]
    bench.discovery.put(odd(4))
    assert (bench.model.fleet.block_size, ids(bench)) == (BLOCK_SIZE, {2, 3}), "two against two"


async def test_those_who_are_refused_take_over_when_they_are_more_than_who_is_left() -> None:
    bench = bench_of_streams()
    await bench.start(card(1), card(2), odd(3), odd(4))
    assert ids(bench) == {1, 2}
    bench.discovery.drop(2)
    assert (bench.model.fleet.block_size, ids(bench)) == (OTHER, {3, 4})
    bench.discovery.drop(3)
    assert ids(bench) == {4}
    bench.discovery.drop(4)
    assert (bench.model.fleet.block_size, ids(bench)) == (BLOCK_SIZE, {1})
    assert await read_all(bench) == [1]


async def test_a_refused_worker_that_left_counts_no_more() -> None:
    bench = bench_of_streams()
    await bench.start(card(1), odd(2))
    bench.discovery.drop(2)
    bench.discovery.put(odd(3))
    assert ids(bench) == {1}
