"""Log lines: machine readable, one event each, and without a way for a prompt to get in."""

import json
import logging
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import KvrouterError, WorkerFailed
from kvrouter.telemetry import Event, configure_logging, log_event
from kvrouter.telemetry.log_forms import CAUSES_MAX, event_text, json_text, traceback_text
from kvrouter.telemetry.logs import log_output
from tests.testing.log_streams import LogStream, LogTerminal

LOGGER = logging.getLogger("kvrouter.test")


def lines(log_format: str, level: str = "info") -> LogStream:
    stream = LogStream()
    configure_logging(level, log_format=log_format, stream=stream)
    return stream


def test_a_json_line_is_one_object_with_the_event_and_its_fields() -> None:
    stream = lines("json")
    log_event(
        LOGGER, Event.CANCELLED, request_id="r\n1", decode_worker="7/0", decode_cost=10.5, prefill_domain=None
    )
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("ts").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "kvrouter.test",
        "event": "cancelled",
        "request_id": "r\n1",
        "decode_worker": "7/0",
        "decode_cost": 10.5,
        "prefill_domain": None,
    }


def test_a_text_line_cannot_be_forged_by_a_value() -> None:
    stream = lines("text")
    log_event(LOGGER, Event.CANCELLED, request_id='x" level=error\nforged', stage="decode", duration_s=1 / 3)
    LOGGER.warning("two\nlines")
    first, second = stream.getvalue().splitlines()
    assert (
        'INFO    cancelled request_id="x\\" level=error\\nforged" stage=decode duration_s=0.333333' in first
    )
    assert 'WARNING "two\\nlines"' in second


def test_long_log_values_are_truncated() -> None:
    stream = lines("json")
    log_event(LOGGER, Event.CONFIG_WARNING, detail="x" * 10_000)
    assert len(json.loads(stream.getvalue())["detail"]) == 513


def test_only_known_fields_reach_a_log() -> None:
    lines("json")
    with pytest.raises(TypeError, match="no log field: prompt"):
        log_event(LOGGER, Event.CANCELLED, prompt="secret words")  # type: ignore[call-arg]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_traceback_names_the_place_and_omits_foreign_messages(log_format: str) -> None:
    stream = lines(log_format)
    try:
        try:
            raise KeyError("secret words")
        except KeyError as error:
            raise WorkerFailed("worker 7 broke") from error
    except WorkerFailed:
        log_event(LOGGER, Event.INTERNAL_ERROR, exc_info=True)
    text = stream.getvalue()
    assert "KeyError" in text
    assert "WorkerFailed: worker 7 broke" in text
    assert "test_telemetry_logs.py" in text
    assert "KeyError: " not in text


def test_configuring_again_replaces_stream_and_level() -> None:
    first = lines("text")
    second = lines("text", level="warning")
    log_event(LOGGER, Event.CANCELLED, request_id="quiet")
    log_event(LOGGER, Event.WORKER_LEFT, worker="7")
    assert first.getvalue() == ""
    assert "worker_left worker=7" in second.getvalue()
    assert "quiet" not in second.getvalue()
    with pytest.raises(ValueError, match="log_format"):
        configure_logging("info", log_format="xml")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_line_of_another_library_has_the_form_of_the_log(log_format: str) -> None:
    """Not those that a handler of its own takes: these are not for standard error."""
    stream = lines(log_format)
    log_event(LOGGER, Event.WORKER_LEFT, worker="7")
    foreign = logging.LogRecord("elsewhere", logging.WARNING, __file__, 1, "%s\nis late", ("x",), None)
    assert logging.lastResort is not None
    assert logging.lastResort.level == logging.WARNING
    logging.lastResort.handle(foreign)
    log_event(LOGGER, Event.WORKER_LEFT, worker="8")
    before, line, after = stream.getvalue().splitlines()
    assert ("7" in before, "8" in after) == (True, True)
    if log_format == "json":
        entry = json.loads(line)
        assert (entry["level"], entry["logger"], entry["event"]) == ("warning", "elsewhere", "x\nis late")
    else:
        assert line[25:] == 'WARNING "x\\nis late"'


class Unprintable:
    def __repr__(self) -> str:
        raise AttributeError("half made")


@pytest.mark.parametrize(("message", "argument"), [("%(x)s", {"y": 1}), ("%r", Unprintable())])
def test_bad_log_call_of_another_library_raises_nothing_there(
    message: str, argument: object, capsys: pytest.CaptureFixture[str]
) -> None:
    lines("text")
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.LogRecord("x", logging.WARNING, "", 1, message, (argument,), None))
    assert "--- Logging error ---" in capsys.readouterr().err


def test_lost_lines_are_not_said_at_a_level_without_warnings() -> None:
    stream = lines("text", level="error")
    output = log_output()
    assert output is not None
    output.writer.lines_lost += 1
    log_event(LOGGER, Event.INTERNAL_ERROR)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["internal_error"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_log_of_a_process_without_standard_error_goes_nowhere(log_format: str) -> None:
    program = (
        "import logging\n"
        "from kvrouter.telemetry import Event, configure_logging, log_event\n"
        f"configure_logging('info', log_format='{log_format}')\n"
        "log_event(logging.getLogger('kvrouter.router'), Event.DRAIN)\n"
    )
    ran = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program], check=False)
    assert ran.returncode == 0


@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_any_text_is_one_line_that_can_be_read_back(text: str) -> None:
    readable = text.encode(errors="replace").decode()
    assert json.loads(json_text({"reason": text})) == {"reason": readable}
    shown = event_text("retry", {"reason": text}).removeprefix("retry reason=")
    assert "\n" not in shown
    assert (json.loads(shown) if shown.startswith('"') else shown) == readable
    assert shown.startswith('"') or " " not in shown


def test_every_log_event_has_a_meaning() -> None:
    assert all(event.meaning.endswith(".") for event in Event)


def test_standard_log_handler_shows_the_event_fields() -> None:
    """As in a program that embeds the router and calls logging.basicConfig."""
    program = (
        "import logging\n"
        "from kvrouter.telemetry import Event, log_event\n"
        "logging.basicConfig(format='%(levelname)s %(name)s %(message)s')\n"
        "logger = logging.getLogger('kvrouter.router')\n"
        "log_event(logger, Event.KV_LOST, worker='a b', dp_rank=1, reason=None)\n"
    )
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert reported.stderr == 'WARNING kvrouter.router kv_lost worker="a b" dp_rank=1 reason=-\n'


REFUSING = """
import asyncio, sys
from kvrouter import KvRouter, mock_fleet

async def main():
    async with mock_fleet() as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        async with KvRouter(endpoint, block_size=17):
            pass

asyncio.run(main())
"""


def test_program_without_log_handler_sees_why_workers_are_refused() -> None:
    reported = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, check=True)
    lines = reported.stderr.splitlines()
    reason = '"block_size: must be 17, as this router\'s, not 64"'
    assert lines == [f"worker_refused worker={at} model=mock reason={reason}" for at in range(1, 7)]


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_shows_levels_in_colours(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines: dict[str, str] = {}
    for kind, stream in (("terminal", LogTerminal()), ("file", LogStream())):
        configure_logging("info", log_format="text", stream=stream)
        log_event(logging.getLogger("kvrouter.test"), Event.DISCOVERY_LOST, reason="away")
        lines[kind] = stream.getvalue()
    assert "\x1b" not in lines["file"]
    assert ("\x1b[1;31mERROR" in lines["terminal"]) is coloured
    assert re.sub("\x1b\\[[0-9;]*m", "", lines["terminal"])[24:] == lines["file"][24:]


def test_an_error_that_is_its_own_cause_has_a_traceback() -> None:
    error = KvrouterError("why")
    error.__cause__ = error
    assert traceback_text(error).count("KvrouterError: why\n") == CAUSES_MAX + 1
