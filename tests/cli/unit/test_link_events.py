"""What ``kvrouter up --events`` takes, and when it happens."""

import logging
from pathlib import Path

import pytest

from kvrouter.cli.up.link_events import LinkStep, happening, read_link_events
from kvrouter.core.errors import ConfigError
from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.mock_links import LinkChange
from kvrouter.fleetfile.fleet_file import FleetFile
from tests.testing.log_events import events_of
from tests.testing.mock_fleet import fleet_file, zoned_fleet
from tests.testing.waits import until

REAL = """
version: 1
models: [{name: mock, tokenizer: mock}]
topology: {levels: [zone]}
workers:
- {name: real-a, domains: {zone: a}, engine: {kind: vllm, url: "http://127.0.0.1:1"}}
"""
MIXED = f"""{REAL.rstrip()}
- {{name: mock-b, replicas: 2, domains: {{zone: b}}}}
"""


def read(folder: Path, fleet: FleetFile, *events: str) -> tuple[LinkStep, ...]:
    path = folder / "events.yaml"
    path.write_text("events:\n" + "".join(f"- {{{event}}}\n" for event in events), encoding="utf-8")
    return read_link_events(path, fleet)


def refusal(folder: Path, fleet: FleetFile, *events: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(folder, fleet, *events)
    return refused.value.message


def test_link_events_are_read_as_in_a_replay_with_a_description(tmp_path: Path) -> None:
    steps = read(
        tmp_path,
        zoned_fleet(),
        "at_s: 1, what: link, between: [a, b], bandwidth_factor: 0.1",
        "at_s: 2.5, what: link, level: zone, between: [a, a], latency_s: 0.01, bandwidth_bytes_per_s: 1.0e+9",
    )
    assert [(step.at_s, step.link, step.detail) for step in steps] == [
        (1.0, "a – b", "bandwidth × 0.1"),
        (2.5, "zone a – a", "bandwidth 1e+09 bytes/s, latency 0.01 s"),
    ]
    assert steps[0].change == LinkChange(level="zone", between=("a", "b"), bandwidth_factor=0.1)


@pytest.mark.parametrize(
    "event",
    [
        "what: die, worker: 1",
        "what: drain",
        "what: join",
        "what: label, set: {zone: b}",
        "what: policy, set: {router_cost: time}",
        "what: add, group: decode-a",
    ],
)
def test_events_other_than_link_changes_are_all_refused_at_once(event: str, tmp_path: Path) -> None:
    link = "at_s: 1, what: link, between: [a, b], bandwidth_factor: 0.1"
    message = refusal(tmp_path, zoned_fleet(), f"at_s: 0, {event}", link, f"at_s: 2, {event}")
    kind = event.partition(",")[0].removeprefix("what: ")
    assert message.splitlines() == [
        f"{tmp_path}/events.yaml:{line}: events[{number}].what: must be link, not '{kind}': that is for a "
        "replay"
        for line, number in ((2, 0), (4, 2))
    ]


def test_link_that_no_mock_engines_have_is_refused(tmp_path: Path) -> None:
    change = "at_s: 1, what: link, bandwidth_factor: 0.1"
    assert "no worker has zone=c" in refusal(tmp_path, zoned_fleet(), f"{change}, between: [a, c]")
    mixed = fleet_file(MIXED)
    assert len(read(tmp_path, mixed, f"{change}, between: [b, b]")) == 1
    assert "no worker has zone=a" in refusal(tmp_path, mixed, f"{change}, between: [a, b]")
    assert "--events: the fleet has no mock engines" in refusal(
        tmp_path, fleet_file(REAL), f"{change}, between: [a, a]"
    )


async def test_each_link_change_happens_at_its_engine_time_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.engines.mock_engine")
    cluster = MockCluster(speedup=10_000.0)
    change = LinkChange(level="zone", between=("a", "b"), bandwidth_factor=0.1)
    steps = [LinkStep(at_s, change, "a – b", f"after {at_s:g}") for at_s in (0.0, 1_000.0, 2_000.0, 1e9)]
    began_s = cluster.now_s
    async with happening(steps, cluster):
        for n in (1, 2, 3):
            await until(lambda n=n: len(caplog.records) == n)  # type: ignore[misc]
            assert cluster.now_s >= began_s + steps[n - 1].at_s
    assert events_of(caplog.records) == ["mock_link_changed"] * 3
    assert [vars(record)["kvrouter_fields"] for record in caplog.records] == [
        {"link": "a – b", "detail": f"after {step.at_s:g}"} for step in steps[:3]
    ]
