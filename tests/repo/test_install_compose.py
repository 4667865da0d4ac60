"""The examples for Docker Compose are of its schema, and the real command line takes each command."""

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.testing.command_lines import ParsedCommand, parse_command
from tests.testing.compose_files import (
    FOLDER,
    SECRETS,
    Service,
    compose_file,
    compose_services,
    service_environment,
)

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "tests" / "data" / "compose-spec" / "compose-spec.json"
FILES = ("compose.yaml", "vllm.yaml")
SECRET = dict.fromkeys(SECRETS, "0123456789abcdef")
EXACT = re.compile(r"docker\.io/[\w/-]+:v?\d+\.\d+\.\d+")
PORT = re.compile(r"http://127\.0\.0\.1:(\d+)/accepting")


def seconds(text: str) -> float:
    (number,) = re.fullmatch(r"(\d+)s", text).groups()  # type: ignore[union-attr]  # an example writes no other unit
    return float(number)


def own(file: str) -> dict[str, Service]:
    """The services that run kvrouter."""
    return {
        name: service
        for name, service in compose_services(file, SECRET).items()
        if service["image"].startswith("kvrouter:")
    }


def start(service: Service) -> ParsedCommand:
    return parse_command(service["command"], service_environment(service))


def workers(file: str) -> dict[str, Service]:
    return {name: service for name, service in own(file).items() if service["command"][0] == "worker"}


CASES = [(file, name) for file in FILES for name in own(file)]


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))


@pytest.mark.parametrize("file", FILES)
def test_compose_examples_fit_the_compose_schema(file: str) -> None:
    document = compose_file(file)
    assert [error.message for error in validator().iter_errors(document)] == []
    next(iter(document["services"].values()))["restrat"] = "always"
    assert [error.message for error in validator().iter_errors(document)] != []


@pytest.mark.parametrize("file", FILES)
def test_compose_files_require_each_secret_from_the_user(file: str) -> None:
    for missing in SECRETS:
        with pytest.raises(KeyError, match=missing):
            compose_services(file, {name: value for name, value in SECRET.items() if name != missing})
    head = (FOLDER / "compose.yaml").read_text("utf-8").partition("name:")[0]
    assert all(f"{name}=%s" in head for name in SECRETS)


@pytest.mark.parametrize(("file", "name"), CASES)
def test_compose_commands_are_accepted_by_the_command_line(file: str, name: str) -> None:
    service = own(file)[name]
    started = start(service)
    assert seconds(service["stop_grace_period"]) > started.drain_limit_s
    planes = started.settings.planes
    assert planes.plane_token is not None
    (port,) = PORT.findall(service["healthcheck"]["test"][-1])
    if name == "frontend":
        frontend = started.settings.frontend
        assert frontend.admin_token is not None
        assert started.settings.router.router_min_initial_workers == len(workers(file))
        assert frontend.http_port == int(port)
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    else:
        assert planes.health_port == int(port)
        assert planes.listen_host == "0.0.0.0"


@pytest.mark.parametrize(("file", "name"), CASES)
def test_compose_services_are_hardened_and_use_the_projects_image(file: str, name: str) -> None:
    service = own(file)[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert service["image"] == f"kvrouter:{version}"
    built = FOLDER / service["build"]["context"]
    assert (built / service["build"]["dockerfile"]).resolve() == ROOT / "Containerfile"


def test_a_wrong_flag_or_variable_is_refused() -> None:
    service = own("compose.yaml")["prefill-a"]
    with pytest.raises(ValueError, match="--zone"):
        start({**service, "command": [*service["command"], "--zone", "a"]})
    with pytest.raises(ValueError, match="KVROUTER_HELTH_PORT"):
        start({**service, "environment": {"KVROUTER_HELTH_PORT": "1"}})


@pytest.mark.parametrize("file", FILES)
def test_third_party_images_have_an_exact_version(file: str) -> None:
    for name, service in compose_services(file, SECRET).items():
        if name not in own(file):
            assert EXACT.fullmatch(service["image"]), name


def mounts(service: Service) -> Iterator[tuple[Path, str]]:
    """The files of this repository that a service sees, and where."""
    for each in service.get("volumes", []):
        source, target, *_ = each.split(":")
        if source.startswith("."):
            yield (FOLDER / source).resolve(), target


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_prometheus_and_grafana_mount_the_files_they_read() -> None:
    services = compose_services("compose.yaml", SECRET)
    seen = {target: path for name in ("prometheus", "grafana") for path, target in mounts(services[name])}
    assert all(path.exists() for path in seen.values())
    scraped = read(seen["/etc/prometheus/prometheus.yml"])
    assert [seen[path] for path in scraped["rule_files"]] == [ROOT / "deploy" / "monitoring" / "alerts.yaml"]
    ((target,),) = [each["targets"] for each in scraped["scrape_configs"][0]["static_configs"]]
    name, _, port = target.partition(":")
    assert start(services[name]).settings.frontend.http_port == int(port)
    assert scraped["scrape_configs"][0]["honor_labels"] is True
    (provider,) = read(seen["/etc/grafana/provisioning/dashboards/kvrouter.yaml"])["providers"]
    dashboards = seen[provider["options"]["path"]]
    assert dashboards == ROOT / "deploy" / "monitoring" / "dashboards"
    assert list(dashboards.glob("*.json"))
    (source,) = read(seen["/etc/grafana/provisioning/datasources/kvrouter.yaml"])["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {services[name]["profiles"][0] for name in ("prometheus", "grafana")} == {"monitoring"}


def test_each_zone_has_a_prefill_and_a_decode_worker() -> None:
    commands = [" ".join(service["command"]) for service in workers("compose.yaml").values()]
    has = {tuple(re.findall(r"--role (\w+) --domain zone=(\w+)", each)[0]) for each in commands}
    assert has == {(role, zone) for role in ("prefill", "decode") for zone in ("a", "b")}


def test_each_vllm_engine_has_a_worker_and_the_needed_flags() -> None:
    services = compose_services("vllm.yaml", SECRET)
    engines = {name for name, service in services.items() if service["image"].startswith("docker.io/vllm/")}
    urls = {
        service["command"][service["command"].index("--url") + 1] for service in workers("vllm.yaml").values()
    }
    assert urls == {f"http://{name}:8000" for name in engines}
    for name in engines:
        flags = dict(flag.partition("=")[::2] for flag in services[name]["command"])
        events = json.loads(flags["--kv-events-config"])
        assert events["enable_kv_cache_events"] is True
        assert {"endpoint", "replay_endpoint"} <= set(events)
    kubernetes = (ROOT / "examples" / "kubernetes" / "vllm.yaml").read_text("utf-8")
    assert {services[name]["image"] for name in engines} == set(
        re.findall(r"image: (docker.io/vllm/\S+)", kubernetes)
    )
