"""The harness of the limits of one router. No figure is judged here."""

from contextlib import ExitStack

import pytest

from benchmarks import limits
from benchmarks.frontend.client import ask_side_by_side, wait_ready
from tests.testing.constants import SetConstants


async def test_a_frontend_follows_a_processs_workers_and_is_measured() -> None:
    with ExitStack() as stack:
        server = limits.start_frontend(stack, n_workers=3, dp_size=2, processes=1)
        limits.wait_joined(server, 3)
        await wait_ready(server.port)
        assert server.rss_bytes() > 2**20
        assert limits.open_files(server) > 3
        rate = await ask_side_by_side(server.port, connections=2, requests=3, prompt_words=10, seed=1)
        assert rate > 0


def test_workers_that_never_join_raise_a_timeout(set_constants: SetConstants) -> None:
    set_constants(limits, JOINED_WITHIN_S=0.1)
    with ExitStack() as stack:
        server = limits.start_frontend(stack, n_workers=0, dp_size=1, processes=0)
        with pytest.raises(TimeoutError, match="0 of 2"):
            limits.wait_joined(server, 2)


def test_a_figure_has_its_unit() -> None:
    (line,) = limits.lines_of("row", {"memory|MiB": [1.0, 3.0, 2.0]})
    assert (line.variant, line.unit, line.ours.p50) == ("memory", "MiB", 2.0)
