"""The example files of Docker Compose as Compose reads them: with ``extends`` and variables resolved."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "compose"
SECRETS = ("KVROUTER_ADMIN_TOKEN", "KVROUTER_PLANE_TOKEN")
"""The variables that have no default: who starts the fleet makes them."""

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[-?])(?P<word>[^}]*))?\}")

Service = dict[str, Any]


def compose_file(name: str) -> dict[str, Any]:
    """The file as it is written."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return found


def compose_services(name: str, environ: Mapping[str, str]) -> dict[str, Service]:
    """Its services, each whole. Raises KeyError for a variable that has neither a value nor a default."""
    return {key: _filled(_whole(name, key), environ) for key in compose_file(name)["services"]}


def service_environment(service: Service) -> dict[str, str]:
    """The variables of a service's processes. Raises TypeError for one that YAML reads as no text."""
    found = service.get("environment", {})
    if not all(isinstance(value, str) for value in found.values()):
        raise TypeError(f"not texts: {found}")
    return dict(found)


def _whole(name: str, key: str) -> Service:
    """A service with what it takes from another: mappings are joined, and all else of its own replaces."""
    service = dict(compose_file(name)["services"][key])
    base = service.pop("extends", None)
    if base is None:
        return service
    whole = _whole(base.get("file", name), base["service"])
    for field, value in service.items():
        old = whole.get(field)
        whole[field] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return whole


def _filled(value: Any, environ: Mapping[str, str]) -> Any:
    def fill(match: re.Match[str]) -> str:
        if match["how"] == "-":
            return environ.get(match["name"]) or match["word"]
        return environ[match["name"]]

    if isinstance(value, str):
        return _VARIABLE.sub(fill, value)
    if isinstance(value, dict):
        return {key: _filled(each, environ) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, environ) for each in value]
    return value
