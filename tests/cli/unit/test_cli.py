"""The command line: flags from the tree, one clear line for each mistake, and never a traceback."""

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvrouter.cli import main
from kvrouter.cli.setting_flags import FIRST_BETWEEN_PROCESSES, FIRST_TO_SERVE
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import KvrouterError, TopologyUnavailable
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.tree import SETTINGS, Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [spec.variable for spec in SETTINGS] + ["KVROUTER_FLEET"]:
        monkeypatch.delenv(name, raising=False)


class Served:
    """Stands where the assembly would: notes what it is asked to serve."""

    def __init__(self) -> None:
        self.calls: list[tuple[Settings, FleetFile]] = []
        self.events: Path | None = None
        self.ends_with: int | BaseException = 0

    def __call__(self, settings: Settings, fleet: FleetFile, events: Path | None, *_: object) -> int:
        self.calls.append((settings, fleet))
        self.events = events
        if isinstance(self.ends_with, BaseException):
            raise self.ends_with
        return self.ends_with


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    module = ModuleType("kvrouter.cli.up.run")
    module.serve = served  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvrouter.cli.up.run", module)
    return served


def test_up_gets_its_events_file(served: Served) -> None:
    assert main(["up", "--events", "events.yaml"]) == 0
    assert served.events == Path("events.yaml")


def test_up_serves_the_default_fleet_with_settings_of_flags_and_variables(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_ROUTER_MODE", "random")
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.5")
    assert main(["up", "--http-port", "9000", "--router-temperature", "0.7", "--no-kv-events"]) == 0
    ((settings, fleet),) = served.calls
    assert settings.frontend.http_port == 9000
    assert settings.router.router_mode is RouterMode.RANDOM
    assert settings.router.router_temperature == 0.7
    assert not settings.router.kv_events
    assert settings.router.track_active_blocks
    assert [group.name for group in fleet.workers] == ["prefill-a", "decode-a", "prefill-b", "decode-b"]
    assert capsys.readouterr() == ("", "")


def test_up_in_one_process_says_that_replica_sync_has_no_effect(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--router-replica-sync"]) == 0
    assert served.calls
    assert "router.replica_sync has no effect in one process" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_up_takes_a_fleet_file_and_its_settings(
    how: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "version: 1\nmodels: [{name: m}]\nworkers: [{name: w}]\n"
        "router: {retries_max: 1, admission_queue_max: 3}\nlog: {log_format: json}\n"
    )
    if how == "variable":
        monkeypatch.setenv("KVROUTER_FLEET", str(path))
    arguments = ["--fleet", str(path)] if how == "flag" else []
    assert main(["up", *arguments, "--retries-max", "0"]) == 0
    ((settings, fleet),) = served.calls
    assert (settings.router.retries_max, settings.log.log_format) == (0, "json")
    assert fleet.models[0].name == "m"
    warning = (
        "kvrouter: warning: router.admission_queue_max has no effect while router.admission_wait_s is 0\n"
    )
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--router-mode", "best"], "--router-mode (router.router_mode): must be 'kv',"),
        (["up", "--http-port", "x"], "--http-port (frontend.http_port): must be a whole number, not 'x'"),
        (["up", "--router-tempeature", "1"], "No such option '--router-tempeature'"),
        (["up", "--admin-token", "x"], "No such option '--admin-token'"),
        (["up", "--fleet", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["up", "extra"], "Got unexpected extra argument"),
        (["up", "--events", "e.yaml", "--replicas", "2"], "--events: not with --replicas or --nats"),
        (["up", "--events", "e.yaml", "--nats"], "--events: not with --replicas or --nats"),
        (["up", "--events", "e.yaml", "--engine-pods"], "--events: not with --engine-pods"),
        (["upp"], "No such command 'upp'"),
        (["fleet", "check", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvrouter: {line}")
    assert err.count("\n") == 1
    assert served.calls == []


UNBOUND = """\
version: 1
models: [{name: m}]
topology: {levels: [zone]}
workers:
  - {name: p, role: prefill, domains: {zone: a}}
  - {name: d, role: decode, domains: {zone: a}}
"""
LEVEL = "--kv-transfer-topology-level"


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_up_refuses_a_topology_level_that_the_fleet_does_not_have(
    how: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "fleet.yaml"
    in_file = "router: {kv_transfer_topology_level: zne}\n" if how == "file" else ""
    path.write_text(UNBOUND + in_file)
    if how == "variable":
        monkeypatch.setenv("DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL", "zne")
    assert main(["up", "--fleet", str(path), *([LEVEL, "zne"] if how == "flag" else [])]) == 2
    must = "must be one of topology.levels (zone), not 'zne' (did you mean zone?)"
    place = f"{path}:7: " if how == "file" else ""
    assert capsys.readouterr().err == f"kvrouter: {place}router.kv_transfer_topology_level: {must}\n"
    assert served.calls == []
    path.write_text(UNBOUND)
    monkeypatch.setenv("DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL", "zone")
    assert main(["up", "--fleet", str(path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new", "err"),
    [
        ("role: prefill", "role: both", "router.kv_transfer_topology_level has no effect on model 'm'"),
        ("prefill, domains: {zone: a}", "prefill, topology_env: {DYN_TOPOLOGY_ENABLED: 'true'}", ""),
    ],
)
def test_up_accepts_an_unknown_level_that_may_come_later_or_has_no_effect(
    old: str, new: str, err: str, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(UNBOUND.replace(old, new))
    assert main(["up", "--fleet", str(path), LEVEL, "rack"]) == 0
    reported = capsys.readouterr().err
    assert reported.startswith(f"kvrouter: warning: {err}") if err else reported == ""
    assert len(served.calls) == 1


def test_up_warns_of_settings_and_fleet_combined_and_serves_with_both(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(UNBOUND.replace("decode, domains: {zone: a}", "decode, domains: {zone: b}"))
    flags = [LEVEL, "zone", "--kv-transfer-weight", "2", "--tokenize-inline-max-chars", "7"]
    assert main(["up", "--fleet", str(path), *flags]) == 0
    reported = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("kvrouter: warning: ").split(":")[0] for line in reported] == [
        "router.kv_transfer_weight has no effect without links",
        "zone=a has prefill workers and no decode worker",
        "zone=b has decode workers and no prefill worker",
    ]
    ((settings, fleet),) = served.calls
    assert (fleet.router, fleet.frontend, fleet.log) == (settings.router, settings.frontend, settings.log)
    assert fleet.frontend.tokenize_inline_max_chars == 7
    served.calls.clear()
    crossing = ["--kv-transfer-mismatch-policy", "fallback"]
    assert main(["up", "--fleet", str(path), LEVEL, "zone", *crossing]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("ends_with", "code", "line"),
    [
        (3, 3, ""),
        (OSError(98, "Address already in use"), 1, "kvrouter: [Errno 98] Address already in use\n"),
        (KvrouterError("the engine is gone"), 1, "kvrouter: the engine is gone\n"),
        (TopologyUnavailable("no file zone"), 1, "kvrouter: no file zone\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_error_while_serving_is_one_line_with_its_exit_code(
    ends_with: int | BaseException, code: int, line: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.ends_with = ends_with
    assert main(["up"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("command", "sections", "first"),
    [
        ("up", {"router", "frontend", "planes", "recording", "log"}, FIRST_TO_SERVE),
        (
            "frontend",
            {"router", "frontend", "planes", "recording", "log"},
            {*FIRST_TO_SERVE, *FIRST_BETWEEN_PROCESSES},
        ),
        (
            "router",
            {"router", "frontend", "planes", "log"},
            {*FIRST_TO_SERVE, *FIRST_BETWEEN_PROCESSES} - {"recording.folder"},
        ),
        (
            "worker mock",
            {"planes", "log"},
            {*FIRST_BETWEEN_PROCESSES, "log.log_level", "log.log_format"},
        ),
    ],
)
def test_help_shows_the_first_settings_and_help_all_every_one(
    command: str, sections: set[str], first: Collection[str], capsys: pytest.CaptureFixture[str]
) -> None:
    of_command = [spec for spec in SETTINGS if spec.section in sections]
    assert set(first) <= {spec.yaml_key for spec in of_command}
    for flag, shown in (("--help", set(first)), ("--help-all", {spec.yaml_key for spec in of_command})):
        assert main([*command.split(), flag]) == 0
        page = capsys.readouterr().out
        assert {spec.yaml_key for spec in of_command if f" [{spec.variable}; default: " in page} == shown
        assert "--help-all" in page


def test_up_help_shows_ten_settings_and_takes_every_one(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(set(FIRST_TO_SERVE)) == 10
    assert main(["up", "--router-ttl", "7"]) == 0
    assert served.calls[0][0].router.router_ttl_s == 7.0
    assert main(["up", "--router-tll", "7"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean" in said
    assert "--router-ttl" in said


def test_help_lists_every_flag_with_its_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--help-all"]) == 0
    page = capsys.readouterr().out
    for spec in SETTINGS:
        assert (spec.flag or "no flag") in page
        assert f"[{spec.variable}; default: {spec.default_text}" in page
    titles = ["Routing:", "Busy workers and admission:", "Topology:", "Frontend:", "Logs:"]
    assert [page.index(title) for title in titles] == sorted(page.index(title) for title in titles)
    assert "--kv-events / --no-kv-events" in page
    assert max(map(len, page.splitlines())) <= 160


def test_bare_command_exits_with_2_and_version_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvrouter ")
    assert main([]) == 2
    assert "explain" in capsys.readouterr().err


def test_fleet_check_validates_and_starts_nothing(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    text = "version: 1\nmodels: [{name: m}]\nworkers:\n  - {name: w, replicas: 2}\n"
    path.write_text(text)
    assert main(["fleet", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good: 2 workers for m, no transfer policy\n"
    path.write_text(text.replace("2}", "-2}"))
    assert main(["fleet", "check", str(path)]) == 2
    assert capsys.readouterr().err == f"kvrouter: {path}:4: workers[0].replicas: must be ≥ 1, not -2\n"
    assert served.calls == []


@pytest.mark.parametrize("code", [0, 1])
def test_topology_check_prints_the_report_and_ends_with_its_code(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(environ: Mapping[str, str]) -> SimpleNamespace:
        return SimpleNamespace(text=f"enabled: {environ['DYN_TOPOLOGY_ENABLED']}", exit_code=code)

    module = ModuleType("kvrouter.worker.topology")
    module.topology_check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvrouter.worker.topology", module)
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "yes")
    assert main(["topology", "check"]) == code
    assert capsys.readouterr().out == "enabled: yes\n"


def test_importing_the_cli_starts_no_linear_algebra_threads() -> None:
    """A frontend on a machine with 128 cores would have 127 of them, which search for work as it starts."""
    code = "import os, kvrouter.cli, numpy; print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "1\n"
