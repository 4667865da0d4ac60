"""A worker's topology files: the folder, waiting for it, watching it, and the check that shows it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.core.errors import TopologyUnavailable
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.worker import topology
from kvrouter.worker.topology import (
    CheckReport,
    read_domains,
    topology_check,
    topology_config,
    wait_for_topology,
    watch_topology,
)
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env

ON = {"DYN_TOPOLOGY_ENABLED": "true", "DYN_KV_TRANSFER_DOMAIN": "zone"}


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        (folder / name).write_text(content)


def env_of(folder: Path, **variables: str) -> TopologyEnv:
    return parse_topology_env({**ON, "DYN_TOPOLOGY_MOUNT_PATH": str(folder), **variables})


class Time:
    """A hand-turned clock, and the sleeps that turned it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Kubelet:
    """A volume as the kubelet writes one: names link into a hidden folder that is exchanged as a whole."""

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self._versions = 0

    def write(self, **files: str) -> None:
        self._versions += 1
        version = f"..2026_11_21_{self._versions}"
        (self._mount / version).mkdir()
        write(self._mount / version, **files)
        (self._mount / "..data_tmp").symlink_to(version)
        (self._mount / "..data_tmp").rename(self._mount / "..data")
        for name in files:
            if not (self._mount / name).is_symlink():
                (self._mount / name).symlink_to(f"..data/{name}")


# The folder.


def test_each_visible_file_with_content_is_a_domain(tmp_path: Path) -> None:
    write(tmp_path, zone="us-east-1a\n", Rack="  Rack-22 \n\n", blank=" \n", empty="", **{".hidden": "x"})
    (tmp_path / "nested").mkdir()
    write(tmp_path / "nested", host="h")
    (tmp_path / "dangling").symlink_to("nowhere")
    reading = read_domains(tmp_path)
    assert list(reading.domains.items()) == [("Rack", "Rack-22"), ("zone", "us-east-1a")]
    assert reading.warnings == ()
    assert reading.describe() == (
        "Rack=Rack-22, zone=us-east-1a, blank is empty, dangling is not a file, empty is empty, "
        "nested is not a file"
    )


def test_topology_files_are_read_through_kubelet_symlinks(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.write(zone="a", rack="1")
    assert read_domains(tmp_path).domains == {"zone": "a", "rack": "1"}
    kubelet.write(zone="b", rack="2")
    assert read_domains(tmp_path).domains == {"zone": "b", "rack": "2"}


def test_domains_are_reread_when_the_files_change_during_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.write(rack="a1", zone="a")
    read_value = topology._read_value

    def exchange_after_the_first(entry: Path) -> tuple[str, str | None, bool]:
        value = read_value(entry)
        if value[0] == "a1":
            kubelet.write(rack="b1", zone="b")
        return value

    monkeypatch.setattr(topology, "_read_value", exchange_after_the_first)
    assert read_domains(tmp_path).domains == {"rack": "b1", "zone": "b"}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("zone", b"\xff\xfe", "is not UTF-8"),
        ("zone", b"a\nb", "is not one line of printable characters"),
        ("zone", b"x" * 254, "is longer than 253 characters"),
        ("zone", b"x" * 100_000, "is longer than 253 characters"),
        ("z=1", b"a", "cannot be a domain: its name holds"),
        ("x" * 64, b"a", "cannot be a domain: its name is longer than 63"),
    ],
)
def test_files_invalid_as_domains_are_skipped_with_a_warning(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    reading = read_domains(tmp_path)
    assert reading.domains == {}
    assert why in reading.passed_over[name]
    assert len(reading.warnings) == 1
    assert str(tmp_path / name) in reading.warnings[0]


def test_an_unreadable_file_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, zone="a", rack="1")
    open_path = Path.open

    def refuse(path: Path, mode: str = "r") -> object:
        if path.name == "rack":
            raise PermissionError(13, "Permission denied")
        return open_path(path, mode)

    monkeypatch.setattr(Path, "open", refuse)
    reading = read_domains(tmp_path)
    assert reading.domains == {"zone": "a"}
    assert reading.warnings == (f"{tmp_path}/rack cannot be read: Permission denied",)


def test_a_missing_or_unlistable_topology_folder_is_described(tmp_path: Path) -> None:
    reading = read_domains(tmp_path / "topology")
    assert reading.domains == {}
    assert "does not exist" in reading.describe()
    (tmp_path / "file").write_text("")
    assert "cannot be listed" in read_domains(tmp_path / "file").describe()


# Waiting.


async def test_a_late_file_is_waited_for(tmp_path: Path) -> None:
    time = Time()

    async def sleep(seconds: float) -> None:
        await time.sleep(seconds)
        if time.now_s == 3.0:
            write(tmp_path, zone="us-east-1a")

    reading = await wait_for_topology(env_of(tmp_path), clock=time.clock, sleep=sleep)
    assert reading.domains == {"zone": "us-east-1a"}
    assert time.slept == [1.0, 1.0, 1.0]


async def test_an_absent_file_fails_the_start_and_lists_found_domains(tmp_path: Path) -> None:
    write(tmp_path, zone="  \n", rack="r1")
    time = Time()
    env = env_of(tmp_path, DYN_TOPOLOGY_POLL_S="2", DYN_TOPOLOGY_TIMEOUT_S="5")
    with pytest.raises(TopologyUnavailable) as refused:
        await wait_for_topology(env, clock=time.clock, sleep=time.sleep)
    assert time.slept == [2.0, 2.0, 1.0]
    assert refused.value.message == (
        f"DYN_KV_TRANSFER_DOMAIN=zone: {tmp_path}/zone has no value (found rack=r1, zone is empty); "
        "waited 5 s"
    )
    assert refused.value.param == "DYN_KV_TRANSFER_DOMAIN"


async def test_disabled_topology_waits_for_no_file() -> None:
    reading = await wait_for_topology(TopologyEnv(enabled=False))
    assert reading.domains == {}


# Watching.


class Watch:
    """A watch whose sleeps are steps of the test."""

    def __init__(self, env: TopologyEnv, config: ModelRuntimeConfig) -> None:
        self.reported: list[tuple[ModelRuntimeConfig, tuple[str, ...]]] = []
        self.failures: Iterator[OSError] = iter(())
        self._may_look = asyncio.Semaphore(0)
        self._looks = asyncio.Semaphore(0)
        self.task = asyncio.create_task(watch_topology(env, config, self._on_change, sleep=self._sleep))

    async def look(self) -> None:
        """Let one look happen, and wait until it is over."""
        await self._looks.acquire()
        self._may_look.release()
        await self._looks.acquire()
        self._looks.release()

    async def _sleep(self, _seconds: float) -> None:
        self._looks.release()
        await self._may_look.acquire()

    async def _on_change(self, config: ModelRuntimeConfig, warnings: tuple[str, ...]) -> None:
        for failure in self.failures:
            raise failure
        self.reported.append((config, warnings))


@pytest.fixture
async def watch(tmp_path: Path) -> Watch:
    write(tmp_path, zone="a")
    env = env_of(tmp_path)
    return Watch(env, topology_config(ModelRuntimeConfig(), env, read_domains(tmp_path)))


async def end(watch: Watch) -> None:
    watch.task.cancel()
    await asyncio.wait([watch.task])


async def test_a_changed_label_is_reported_once(tmp_path: Path, watch: Watch) -> None:
    await watch.look()
    write(tmp_path, zone="b")
    await watch.look()
    await watch.look()
    assert [(dict(config.topology_domains), warnings) for config, warnings in watch.reported] == [
        ({"zone": "b"}, ())
    ]
    await end(watch)


async def test_a_removed_value_is_reported_as_absent_with_a_warning(tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "zone").unlink()
    await watch.look()
    [(config, warnings)] = watch.reported
    assert (config.topology_domains, config.kv_transfer_domain) == ({}, "zone")
    assert config.kv_transfer_enforcement is Enforcement.REQUIRED
    assert "has no value (found nothing)" in warnings[0]
    await end(watch)


async def test_a_change_that_failed_to_be_reported_is_reported_again(tmp_path: Path, watch: Watch) -> None:
    watch.failures = iter([OSError("discovery is away")])
    write(tmp_path, zone="b")
    await watch.look()
    assert watch.reported == []
    await watch.look()
    assert [dict(config.topology_domains) for config, _ in watch.reported] == [{"zone": "b"}]
    await end(watch)


# The check.


def check(folder: Path, **variables: str) -> CheckReport:
    return topology_check({**ON, "DYN_TOPOLOGY_MOUNT_PATH": str(folder), **variables})


def test_topology_check_shows_the_config_and_taints_to_publish(tmp_path: Path) -> None:
    write(tmp_path, zone="us-east-1a\n", rack="rack-22")
    report = check(
        tmp_path,
        DYN_TOPOLOGY_LEVELS="zone, rack",
        DYN_KV_TRANSFER_ENFORCEMENT="preferred",
        DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.85",
    )
    assert report.exit_code == 0
    shown = report.text.split("\n", 1)[1].split("\nand carry the taints:\n")
    assert json.loads(shown[0]) == {
        "topology_domains": {"rack": "rack-22", "zone": "us-east-1a"},
        "topology_levels": ["zone", "rack"],
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
        "kv_transfer_preferred_weight": 0.85,
    }
    assert shown[1] == "  dynamo.topology/rack=rack-22\n  dynamo.topology/zone=us-east-1a"


def test_topology_check_states_why_a_worker_would_not_start(tmp_path: Path) -> None:
    report = check(tmp_path)
    assert report.exit_code == 1
    assert report.text == (
        f"A worker would not start: DYN_KV_TRANSFER_DOMAIN=zone: {tmp_path}/zone has no value "
        "(found nothing); a worker waits 30 s for it, then exits with code 1"
    )
    refused = check(tmp_path, DYN_KV_TRANSFER_ENFORCEMENT="strict")
    assert (refused.exit_code, refused.config) == (1, None)
    assert "DYN_KV_TRANSFER_ENFORCEMENT: 'strict' is none of" in refused.text


def test_topology_check_shows_warnings(tmp_path: Path) -> None:
    write(tmp_path, zone="a")
    (tmp_path / "rack").write_bytes(b"\xff")
    report = check(tmp_path, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5")
    assert report.exit_code == 0
    assert [line.split(":")[0] for line in report.text.splitlines()[-2:]] == ["warning", "warning"]


def test_topology_check_warns_of_levels_without_a_value(tmp_path: Path) -> None:
    write(tmp_path, zone="a", rack="")
    report = check(tmp_path, DYN_TOPOLOGY_LEVELS="region,zone,rack")
    assert report.exit_code == 0
    assert report.warnings == tuple(
        f"DYN_TOPOLOGY_LEVELS: {tmp_path}/{level} has no value for the level '{level}' "
        "(found zone=a, rack is empty)"
        for level in ("region", "rack")
    )
    assert report.text.endswith(f"\nwarning: {report.warnings[0]}\nwarning: {report.warnings[1]}")
    (tmp_path / "zone").unlink()
    refused = check(tmp_path, DYN_TOPOLOGY_LEVELS="region,zone")
    assert refused.exit_code == 1
    assert [line.split(" has no value")[0] for line in refused.warnings] == [
        f"DYN_TOPOLOGY_LEVELS: {tmp_path}/region"
    ]


def test_topology_check_reports_disabled_topology(tmp_path: Path) -> None:
    report = topology_check({})
    assert report == CheckReport(
        "Topology is off (DYN_TOPOLOGY_ENABLED is not true): nothing is published.", 0, ModelRuntimeConfig()
    )
