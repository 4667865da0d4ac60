"""The workers that join as a process starts: a table on a terminal, and lines for whatever reads logs."""

import json
import logging

import pytest

from kvrouter.telemetry import Event, configure_logging, log_event
from kvrouter.telemetry.joined_workers import joined_as_table, joined_table
from tests.testing.log_streams import LogStream, LogTerminal

LOGGER = logging.getLogger("kvrouter.test")


@pytest.fixture(autouse=True)
def _without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def joins(worker: int, role: str = "decode", domain: str = "zone=a") -> None:
    log_event(
        LOGGER, Event.WORKER_JOINED, worker=str(worker), model="mock", role=role, domain=domain, taints=""
    )


def test_a_terminal_is_shown_one_table_and_later_joins_as_lines() -> None:
    stream = LogTerminal()
    configure_logging("info", log_format="text", stream=stream)
    with joined_as_table() as show_joined:
        joins(1, "prefill")
        for worker in (2, 3, 9):
            joins(worker)
        joins(4, domain="zone=b")
        assert stream.getvalue() == ""
        show_joined()
        assert stream.getvalue().splitlines() == [
            "model  place   role     workers  ids",
            "mock   zone=a  decode         3  2–3, 9",
            "mock   zone=a  prefill        1  1",
            "mock   zone=b  decode         1  4",
        ]
        joins(7)
    assert "worker_joined worker=7" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(("log_format", "stream"), [("json", LogTerminal()), ("text", LogStream())])
def test_join_lines_are_immediate_in_json_or_without_a_terminal(log_format: str, stream: LogStream) -> None:
    configure_logging("info", log_format=log_format, stream=stream)
    with joined_as_table() as show_joined:
        joins(1)
        joins(2)
        before = stream.getvalue()
        show_joined()
    assert stream.getvalue() == before
    assert [line.count("worker_joined") for line in before.splitlines()] == [1, 1]
    if log_format == "json":
        assert [json.loads(line)["worker"] for line in before.splitlines()] == ["1", "2"]


def test_failed_start_still_logs_the_joined_workers() -> None:
    stream = LogTerminal()
    configure_logging("info", log_format="text", stream=stream)
    with joined_as_table():
        joins(1)
    assert "worker_joined worker=1" in stream.getvalue()


def test_worker_that_left_has_no_table_row_and_its_lines_stay_in_order() -> None:
    stream = LogTerminal()
    configure_logging("info", log_format="text", stream=stream)
    with joined_as_table() as show_joined:
        joins(1)
        joins(2)
        log_event(LOGGER, Event.WORKER_LEFT, worker="1", model="mock", role="decode")
        show_joined()
    lines = stream.getvalue().splitlines()
    assert ["worker_joined worker=1" in lines[0], "worker_left worker=1" in lines[1]] == [True, True]
    assert lines[-1].split() == ["mock", "zone=a", "decode", "1", "2"]


def feed(worker: int, state: str, dp_rank: int = 0) -> None:
    log_event(LOGGER, Event.FEED_STATE, model="mock", worker=str(worker), dp_rank=dp_rank, state=state)


def test_feed_states_are_a_table_column_and_recovering_feeds_one_line() -> None:
    stream = LogTerminal()
    configure_logging("info", log_format="text", stream=stream)
    with joined_as_table() as show_joined:
        for worker in (1, 2, 3):
            feed(worker, "recovering")
            joins(worker)
        feed(1, "live")
        show_joined()
        table = stream.getvalue()
        assert [line.split()[3:] for line in table.splitlines()] == [
            ["feed", "workers", "ids"], ["live", "1", "1"], ["recovering", "2", "2–3"],
        ]  # fmt: skip
        feed(2, "live")
        assert stream.getvalue() == table
        feed(3, "partial")
        feed(3, "live")
    rest = stream.getvalue().removeprefix(table).splitlines()
    assert [line.split()[-1] for line in rest] == ["live", "state=partial", "state=live"]
    assert rest[0] == "1 of 2 feeds that were recovering are live"


def test_feed_that_becomes_partial_at_start_is_logged_after_the_join() -> None:
    stream = LogTerminal()
    configure_logging("info", log_format="text", stream=stream)
    with joined_as_table() as show_joined:
        joins(1)
        feed(1, "recovering")
        feed(1, "partial")
        show_joined()
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == [
        "worker_joined", "feed_state", "feed_state",
    ]  # fmt: skip


def test_log_level_above_info_shows_no_table() -> None:
    stream = LogTerminal()
    configure_logging("warning", log_format="text", stream=stream)
    with joined_as_table() as show_joined:
        joins(1)
        show_joined()
    assert stream.getvalue() == ""


def test_table_omits_empty_columns_and_escapes_control_characters() -> None:
    workers = [
        {"worker": str(n), "model": "m", "role": "both", "domain": "a\x1b[2J"} for n in range(0, 20, 2)
    ]
    head, row = joined_table(workers, is_coloured=True).splitlines()
    assert head == "\x1b[1mmodel  place         role  workers  ids\x1b[0m"
    assert row.split() == ["m", '"a\\u001b[2J"', "both", "10", "0,", "2,", "4,", "6", "and", "6", "more"]
