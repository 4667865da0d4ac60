"""What ``kvrouter bench`` reads of the router's fleet."""

import pytest

from kvrouter.api.fleet_schema import Fleet, Rank, Speed, Worker
from kvrouter.cli.bench.arms import SLOW_SHOWN, peers_of, slow_workers
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.core.errors import ConfigError


def worker(worker_id: int, *slowness: float, model: str = "m") -> Worker:
    ranks = [
        Rank(
            dp_rank=at,
            total_blocks=None,
            speed=Speed(slowness=each, relative=1.0, slow=False),
        )
        for at, each in enumerate(slowness)
    ]
    return Worker(worker_id=worker_id, model=model, role="both", engine=None, domains={}, ranks=ranks)


def lines(*workers: Worker) -> list[str]:
    return list(slow_workers(Fleet(models=[], workers=workers), "m"))


def test_workers_that_are_slower_than_the_fastest_are_named() -> None:
    (line,) = lines(worker(1, 2.0), worker(2, 1.0, 3.6), worker(3, 2.4), worker(4, 9.0, model="other"))
    assert line.startswith("the router takes worker 2 (both) for 1.8 times as slow as the fastest one")
    assert not lines(worker(1, 3.0), worker(2, 3.1))
    assert not lines(worker(1))
    assert len(lines(worker(0, 1.0), *(worker(each, 2.0) for each in range(1, 9)))) == SLOW_SHOWN


@pytest.mark.parametrize(
    "peers", [("x",), ("=http://a:1",), ("round-robin=http://a:1",), ("x=http://a:1",) * 2]
)
def test_peers_have_names_of_their_own(peers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--peer: "):
        peers_of(BenchOptions(peers=peers))
    assert peers_of(BenchOptions(peers=("x=http://a:1", "y=http://b:2"))) == {
        "x": "http://a:1",
        "y": "http://b:2",
    }
