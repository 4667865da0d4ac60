"""The examples for systemd: systemd accepts them, and the real command line takes each command."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.testing.command_lines import ParsedCommand, parse_command

FOLDER = Path(__file__).parents[2] / "examples" / "systemd"
PROGRAM = "/opt/kvrouter/bin/kvrouter"
INSTANCE = "a"
SECRETS = {"KVROUTER_PLANE_TOKEN": "0123456789abcdef", "KVROUTER_ADMIN_TOKEN": "fedcba9876543210"}
UNITS = {"kvrouter-frontend.service": ["fleet.env", "frontend.env"],
         "kvrouter-worker@.service": ["fleet.env", "worker-a.env"]}  # fmt: skip
HARDENED = {
    "DynamicUser": "yes",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "MemoryDenyWriteExecute": "yes",
    "RestrictNamespaces": "yes",
    "SystemCallFilter": "@system-service ~@privileged",
}

Sections = dict[str, dict[str, list[str]]]


def text_of(unit: str) -> str:
    """The unit as systemd reads the instance: its name put in, and lines that go on joined."""
    text = (FOLDER / unit).read_text("utf-8").replace("%i", INSTANCE).replace("%S", "/var/lib")
    assert "%" not in text
    return re.sub(r"\\\n\s*", "", text)


def sections(unit: str) -> Sections:
    """The unit's sections; each line is a heading, a remark or ``Name=value``."""
    found: Sections = {}
    for line in text_of(unit).splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            found[heading[1]] = {}
        elif line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Z]\w+)=(.*)", line)
            assert match is not None, line
            found[list(found)[-1]].setdefault(match[1], []).append(match[2])
    return found


def service_of(unit: str) -> dict[str, str]:
    """Its [Service]; a name that is given several times has all of its values, with spaces between."""
    return {name: " ".join(values) for name, values in sections(unit)["Service"].items()}


def environment_of(unit: str) -> dict[str, str]:
    environ = dict(each.split("=", 1) for each in service_of(unit)["Environment"].split())
    environ |= SECRETS
    for file in UNITS[unit]:
        for line in (FOLDER / file).read_text("utf-8").splitlines():
            if line and not line.startswith("#"):
                name, equals, value = line.partition("=")
                assert equals, line
                environ[name] = value
    return environ


def start(unit: str) -> ParsedCommand:
    """What its command would start: variables in braces are one word each, as systemd has it."""
    environ = environment_of(unit)
    program, *words = shlex.split(service_of(unit)["ExecStart"])
    assert program == PROGRAM
    filled = [re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], word) for word in words]
    return parse_command(filled, environ)


def test_the_example_list_is_complete() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        *UNITS,
        *(file for files in UNITS.values() for file in files),
    }


@pytest.mark.parametrize("unit", UNITS)
def test_unit_commands_are_accepted_and_may_drain_before_the_stop_limit(unit: str) -> None:
    started = start(unit)
    service = service_of(unit)
    assert float(service["TimeoutStopSec"]) > started.drain_limit_s
    assert service["Restart"] == "always"
    assert "KillSignal" not in service
    assert started.settings.planes.plane_token is not None
    assert (
        started.settings.frontend.http_host == "127.0.0.1"
        or started.settings.frontend.admin_token is not None
    )


def test_units_are_not_restarted_after_their_final_exit_codes() -> None:
    assert service_of("kvrouter-worker@.service")["RestartPreventExitStatus"].split() == ["2", "3"]
    assert service_of("kvrouter-frontend.service")["RestartPreventExitStatus"].split() == ["2"]


@pytest.mark.parametrize("unit", UNITS)
def test_units_read_the_example_environment_files(unit: str) -> None:
    named = service_of(unit)["EnvironmentFile"].split()
    fleet, own = UNITS[unit]
    assert named == [f"/etc/kvrouter/{file}" for file in (fleet, "secrets.env", own)]


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_hardened_and_use_their_own_state_folder(unit: str) -> None:
    service = service_of(unit)
    assert {name: service.get(name) for name in HARDENED} == HARDENED
    folder = f"/var/lib/{service['StateDirectory']}"
    assert service["WorkingDirectory"] == folder
    environ = environment_of(unit)
    assert environ["HOME"] == folder
    learned = start(unit).settings.router.router_learned_file
    assert learned is None or learned.startswith(f"{folder}/")


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_has_the_three_sections(unit: str) -> None:
    assert set(sections(unit)) == {"Unit", "Service", "Install"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    """The program that the unit starts is not installed here: another one stands in for it."""
    assert verified(tmp_path / unit.replace("@", f"@{INSTANCE}"), text_of(unit)) == ""
    assert "UMsk" in verified(tmp_path / "wrong.service", text_of(unit).replace("UMask=", "UMsk="))


def verified(path: Path, text: str) -> str:
    """What systemd says against a unit."""
    path.write_text(text.replace(PROGRAM, "/usr/bin/env"), "utf-8")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_examples_hold_no_secret_and_explain_how_to_make_them() -> None:
    files = {file for files in UNITS.values() for file in files}
    for file in files:
        assert not re.search(r"^\w+_(TOKEN|KEY)=", (FOLDER / file).read_text("utf-8"), re.M)
    made = (FOLDER / "fleet.env").read_text("utf-8")
    assert all(f"{name}=%s" in made for name in SECRETS)
    assert "install -m 600 /dev/stdin /etc/kvrouter/secrets.env" in made
