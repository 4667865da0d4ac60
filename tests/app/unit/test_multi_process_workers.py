"""A router of many worker processes: its sockets and its open files."""

import resource
from contextlib import ExitStack

import pytest

from kvrouter.app.lifetime import allow_many_files
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import EventSource, EventTransport
from kvrouter.transports.events.zmq import ZmqEventSubscriber
from tests.testing.event_transports import card

LIBZMQ_DEFAULT = 1_023
FILES = 2_200


def source(number: int) -> EventSource:
    """Where nobody listens: connections are made later or never, sockets are there at once."""
    return EventSource(EventTransport.ZMQ, "tcp://127.0.0.1:1", f"tcp://127.0.0.1:{2 + number}")


def never(why: object) -> None:
    raise AssertionError(why)


def follow(subscriber: ZmqEventSubscriber, n_workers: int) -> None:
    """Follow so many workers and then none."""
    with ExitStack() as stack:
        for number in range(n_workers):
            stack.callback(subscriber.follow(card(WorkerId(number), source(number))))


async def test_subscriber_follows_more_workers_than_the_default_libzmq_sockets() -> None:
    allow_many_files()
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert files_max >= FILES, f"{FILES} open files are needed, {files_max} allowed: raise ulimit -Hn"
    subscriber = ZmqEventSubscriber(on_malformed=never, on_foreign=never)
    follow(subscriber, LIBZMQ_DEFAULT + 10)
    await subscriber.close()


async def test_worker_beyond_the_socket_limit_is_refused() -> None:
    subscriber = ZmqEventSubscriber(on_malformed=never, on_foreign=never, sockets_max=10)
    with pytest.raises(ConfigError, match="cannot be connected to"):
        follow(subscriber, 10)
    await subscriber.close()


def test_open_file_limit_is_raised_to_the_system_maximum() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
