"""Waiting for a pod's topology files: what is awaited, what is reported, and when they never come."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError, TopologyUnavailable
from kvrouter.worker.topology import Awaited, awaited, wait_for_levels

ON = {"DYN_TOPOLOGY_ENABLED": "true"}


class Time:
    """A hand-turned clock; something may happen at the first sleep that ends at ``at_s`` or later."""

    def __init__(self, at_s: float = 0.0, happens: Callable[[], object] | None = None) -> None:
        self.now_s = 0.0
        self._at_s = at_s
        self._happens = happens

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        if self._happens is not None and self.now_s >= self._at_s:
            self._happens()
            self._happens = None


def waited(wanted: Awaited, time: Time, timeout_s: float) -> tuple[list[str], dict[str, str]]:
    said: list[str] = []
    reading = wait_for_levels(
        wanted, timeout_s=timeout_s, say=said.append, clock=time.clock, sleep=time.sleep
    )
    return said, dict(reading.domains)


def test_waiting_for_late_files_reports_progress_every_5_seconds(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("")
    time = Time(12.0, lambda: (tmp_path / "zone").write_text("us-east-1a\n"))
    said, domains = waited(Awaited(tmp_path, ("zone",)), time, 60.0)
    assert domains == {"zone": "us-east-1a"}
    waits = f"waiting for {tmp_path}/zone (pod label grove.io/topology.zone); found zone is empty; "
    assert said == [
        f"{waits}60 s left",
        f"{waits}55 s left",
        f"{waits}50 s left",
        f"{tmp_path} is there after 12.0 s: zone=us-east-1a",
    ]


def test_wait_fails_and_names_each_level_without_a_value(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a")
    wanted = Awaited(tmp_path, ("zone", "rack", "host"), {"rack": "nvidia.com/rack"})
    with pytest.raises(TopologyUnavailable) as failed:
        waited(wanted, Time(), 3.0)
    first, *rest = failed.value.message.splitlines()
    assert first == (
        f"no value for {tmp_path}/rack (pod label nvidia.com/rack), {tmp_path}/host (pod label "
        "grove.io/topology.host) after 3 s; found zone=a"
    )
    assert [line[:2] for line in rest[1:]] == ["1.", "2.", "3."]
    assert "nvidia.com/rack and grove.io/topology.host" in failed.value.message


def test_wait_ends_at_once_if_all_files_are_present(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a")
    time = Time()
    waited(Awaited(tmp_path, ("zone",)), time, 0.0)
    assert time.now_s == 0.0


def test_wait_with_timeout_zero_fails_without_sleeping(tmp_path: Path) -> None:
    time = Time()
    with pytest.raises(TopologyUnavailable):
        waited(Awaited(tmp_path, ("zone",)), time, 0.0)
    assert time.now_s == 0.0


def test_wait_without_topology_waits_for_no_file(tmp_path: Path) -> None:
    wanted = awaited({}, mount_path=str(tmp_path))
    said, _ = waited(wanted, Time(), 5.0)
    assert len(said) == 1
    assert "nothing to wait for" in said[0]


@pytest.mark.parametrize(
    ("environ", "levels"),
    [
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": "rack"}, ("rack",)),
        ({**ON, "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL": "zone"}, ("zone",)),
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": "zone", "DYN_TOPOLOGY_LEVELS": "zone,rack"}, ("zone",)),
        ({"DYN_KV_TRANSFER_DOMAIN": "zone"}, ()),
    ],
)
def test_wait_without_levels_awaits_the_level_that_a_worker_awaits(
    environ: dict[str, str], levels: tuple[str, ...]
) -> None:
    assert awaited(environ).levels == levels


def test_options_override_the_environment() -> None:
    environ = {"DYN_TOPOLOGY_MOUNT_PATH": "/etc/podinfo/topology"}
    assert awaited(environ).folder == Path("/etc/podinfo/topology")
    wanted = awaited(environ, mount_path="/here", levels=" zone, rack,zone ", labels=("zone=a/b=c",))
    assert (wanted.folder, wanted.levels) == (Path("/here"), ("zone", "rack"))
    assert (wanted.label("zone"), wanted.label("rack")) == ("a/b=c", "grove.io/topology.rack")
    assert awaited({}).folder == Path("/etc/dynamo/topology")


@pytest.mark.parametrize("levels", ["", "zone,,rack", ".hidden", "zo/ne", "a=b"])
def test_levels_invalid_as_file_names_are_refused(levels: str) -> None:
    with pytest.raises(ConfigError, match="--levels"):
        awaited({}, levels=levels)


@pytest.mark.parametrize("label", ["zone", "=key", "zone="])
def test_labels_without_level_or_key_are_refused(label: str) -> None:
    with pytest.raises(ConfigError, match="LEVEL=KEY"):
        awaited({}, labels=(label,))
